"""What every pass needs: the problem, and a plan for each shape of inputs."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.blocks.anchors.choice import LastLayer, last_layer, watched
from evigrad.blocks.partitions import Partition
from evigrad.curvature import Storage, Structure, contracted, make_structure
from evigrad.distributed import Ranks
from evigrad.engine.checks import check_inputs
from evigrad.engine.memory import MicroBatches
from evigrad.engine.settings import Settings
from evigrad.errors import ConfigurationError, EvigradWarning, listed
from evigrad.inputs import AtPositions, Inputs, Tree, each_once, layout, output_layer
from evigrad.invariances.noise import Noise, PackedModel, stochastic_modules
from evigrad.jacobians import (
    JacobianPlan,
    Linearization,
    adapted,
    check_hooks,
    check_output,
    demote,
    derivatives_named,
    matrix_uses,
    model_outputs,
    plan,
    spot_check,
)
from evigrad.jacobians.modes import evaluation_run
from evigrad.likelihoods import Likelihood
from evigrad.priors import GaussianPrior

# The plans of so many latest input shapes are kept; others are adapted from these at little cost.
_KEPT = 16
# Planning finds the batch dimension by comparing batches of two and three data.
PROBE_SIZE = 3


@dataclass(frozen=True)
class InputPlan:
    """The plan for inputs of one shape.

    Attributes:
        model: Takes ``pack(x, noise)``.
        jacobian: How its derivatives are computed.
        structure: The structure of the curvature.
        partition: The partition of all rows into blocks.
        draws_globally: Whether the model drew from the global generators when it was planned.
        outputs: Outputs (probe, C) of the inputs that it was planned on; may be stale.
        contracts: Whether closed forms may replace the rows of large matrices; False after a pass
            that lacked one.
        gram_dtype: Type of the structure's matrices; None for that of the rows.
        positions: The shape … of outputs (m, …, C) for whole inputs; the plan is for single
            positions then.
    """

    model: nn.Module
    jacobian: JacobianPlan
    structure: Structure[Any]
    partition: Partition
    draws_globally: bool
    outputs: Tensor
    contracts: bool
    gram_dtype: torch.dtype | None
    positions: tuple[int, ...] = ()

    def pack(self, x: Inputs, noise: Noise, data: slice) -> Tensor:
        """The inputs as ``model`` takes them: several parts and their noise as one tensor."""
        if isinstance(self.model, PackedModel):
            return self.model.pack(x, noise.slice(data.start, data.stop))
        assert isinstance(x, Tensor)
        return x

    def fits(self, x: Inputs) -> bool:
        """Whether this is a plan for inputs of their shape."""
        if isinstance(self.model, PackedModel):
            return self.model.fits(x)
        return isinstance(x, Tensor) and tuple(x.shape[1:]) == self.jacobian.datum_shape

    def numbers(self, x: Inputs) -> int:
        """How many numbers a datum has, its noise included."""
        if isinstance(self.model, PackedModel):
            return self.model.numbers
        return sum(prod(shape) for _, shape, _ in layout(x))


class Plans:
    """The plans for the latest shapes of inputs."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        likelihood: Likelihood,
        prior: GaussianPrior,
        settings: Settings,
    ) -> None:
        self.model = model
        self.weights = dict(weights)
        self.likelihood = likelihood
        self.prior = prior
        self.settings = settings
        self._drawing = stochastic_modules(model)
        self._plans: dict[str, InputPlan] = {}
        # Of a checkpoint, for inputs not seen since: how to differentiate, and ``contracts``.
        self._loaded: dict[str, tuple[JacobianPlan, bool]] = {}
        self._outputs: dict[str, tuple[tuple[int, ...], nn.Linear | None]] = {}
        self._passes = 0
        # Parameters in which the derivatives of rows were checked.
        self.differentiated: set[str] = set()

    def of(self, x: Inputs) -> InputPlan:
        """The plan for inputs of this shape, or for their single positions, made once."""
        check_hooks(self.model)
        # A module's number of samples may change at any time.
        one = torch.Generator().manual_seed(0)
        drawn = [module.draw(1, one).shape for module in self._drawing]
        if isinstance(x, Tensor):
            shapes = [tuple(shape) for shape in (x.shape[1:], *drawn)]
            key = f"{shapes} {x.dtype} {x.device}"
        else:
            key = f"{layout(x)} {[tuple(shape) for shape in drawn]} {x.device}"
        if key in self._plans:
            self._plans[key] = self._plans.pop(key)  # the latest is the last
            return self._plans[key]
        if key not in self._outputs:
            self._outputs[key] = self._output_layer(each_once(x))
            for old in list(self._outputs)[: -2 * _KEPT]:
                del self._outputs[old]
        positions, layer = self._outputs[key]
        if positions and not isinstance(x, AtPositions):
            few = x[:PROBE_SIZE]
            first = torch.zeros(len(few), dtype=torch.int64, device=x.device)
            return self.of(AtPositions(few, None, first))
        probe, model = x[:PROBE_SIZE].detach(), self.model
        if self._drawing or not isinstance(probe, Tensor):
            noise = self.noise(seed=0).slice(0, len(probe))
            if isinstance(probe, AtPositions):
                probe = probe.alone()
                probe.count = prod(positions)
            model = PackedModel(model, probe, noise, layer)
            probe = model.pack(probe, noise)
        jacobian_plan, contracts = self._loaded.get(key, (None, True))
        with derivatives_named(), evaluation_run(model) as has_drawn:
            with torch.no_grad():
                f = model_outputs(model, probe)
            plans = [input_plan.jacobian for input_plan in reversed(self._plans.values())]
            jacobian_plan = (
                jacobian_plan
                or adapted(plans, model, self.weights, probe)
                or plan(model, self.weights, probe)
            )
            draws_globally = has_drawn()
        num_outputs = f.shape[1]
        num_rows = self.likelihood.num_rows(num_outputs)
        partition = Partition(self.settings.spec, self.settings.num_data, num_outputs, num_rows)
        dtype = self.settings.gram_dtype
        structure = self._structure(jacobian_plan, partition, contracts, dtype)
        self._loaded.pop(key, None)
        self._plans[key] = InputPlan(
            model,
            jacobian_plan,
            structure,
            partition,
            draws_globally,
            f,
            contracts,
            dtype,
            positions,
        )
        for old in list(self._plans)[:-_KEPT]:
            del self._plans[old]
        return self._plans[key]

    def _output_layer(self, x: Tensor | Tree) -> tuple[tuple[int, ...], nn.Linear | None]:
        """The shape … of outputs (m, …, C), and the layer that makes them, by a small pass."""
        few = x[:PROBE_SIZE].detach()
        with evaluation_run(self.model), torch.no_grad():
            f, layer = output_layer(self.model, few)
            return tuple(check_output(f, len(few), positions=True).shape[1:-1]), layer

    def state_dict(self) -> dict[str, Any]:
        """Return what later passes depend on, in plain types: their number and the plans.

        A plan depends on the weights that it was made with, and on checks on real data since: it
        could not be made again.
        """
        used = {
            key: (input_plan.jacobian, input_plan.contracts)
            for key, input_plan in self._plans.items()
        }
        plans = self._loaded | used
        return {
            "passes": self._passes,
            "plans": {
                key: jacobian_plan.as_record()
                for key, (jacobian_plan, _) in list(plans.items())[-_KEPT:]
            },
            "formed": sorted(key for key, (_, contracts) in plans.items() if not contracts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of ``state_dict`` of the same model and settings."""
        self._passes = int(state["passes"])
        self._loaded = {
            key: (JacobianPlan.from_record(record), key not in state["formed"])
            for key, record in state["plans"].items()
        }
        for jacobian_plan, _ in self._loaded.values():
            if set(jacobian_plan.describe()) != set(self.weights):
                raise ConfigurationError("The state has a plan of other weights.")
        for key, input_plan in self._plans.items():
            jacobian_plan, contracts = self._loaded.pop(
                key, (input_plan.jacobian, key not in state["formed"])
            )
            self._plans[key] = self._replanned(
                input_plan, jacobian=jacobian_plan, contracts=contracts
            )

    def last_layer(self, x: Inputs) -> tuple[Tensor, LastLayer | None]:
        """Outputs (m, C) without a graph, and their last layer, or None where none is linear."""
        model = self.model
        with evaluation_run(model), torch.no_grad(), watched(model, self.weights) as call:
            f = model_outputs(model, each_once(x), positions=True)
        temperature, shape = self.settings.temperature, f.shape[:-1]
        f = f.flatten(0, -2)
        layer = last_layer(call, f, self.weights, self.prior.precisions(), temperature)
        if isinstance(x, AtPositions):
            f = x.of_outputs(f.unflatten(0, shape))
            if layer is not None:
                features = x.of_outputs(layer.features.unflatten(0, shape))
                layer = replace(layer, features=features)
        return f, layer

    def latest(self) -> InputPlan | None:
        """The plan that was used last, if any."""
        return next(reversed(self._plans.values()), None)

    def noise(self, seed: int, positions: Tensor | None = None) -> Noise:
        """The noise of a block, drawn when read; ``positions`` says whose noise each datum has."""
        return Noise(self._drawing, seed, positions)

    def without_contraction(self, plan: InputPlan) -> InputPlan:
        """Replace a plan by one that forms all rows, where some pass lacks a closed form."""
        formed = self._replanned(plan, contracts=False)
        self._plans = {
            key: formed if input_plan is plan else input_plan
            for key, input_plan in self._plans.items()
        }
        return formed

    def in_float64(self, plan: InputPlan) -> InputPlan:
        """The plan with products and factors in float64, for one evaluation."""
        return self._replanned(plan, gram_dtype=torch.float64)

    def _replanned(self, plan: InputPlan, **changes: Any) -> InputPlan:
        """The plan with changes, and the structure that they ask for."""
        plan = replace(plan, **changes)
        structure = self._structure(plan.jacobian, plan.partition, plan.contracts, plan.gram_dtype)
        return replace(plan, structure=structure)

    def _structure(
        self,
        jacobian_plan: JacobianPlan,
        partition: Partition,
        contracts: bool,
        gram_dtype: torch.dtype | None,
    ) -> Structure[Any]:
        settings, spec = self.settings, partition.spec
        rows, groups = partition.block_rows, self.prior.constant_groups()
        data = rows if spec.rows else min(spec.subset or rows, rows)
        # An exact Hessian has no rows.
        plain = settings.plain_curvature
        uses = matrix_uses(jacobian_plan, self.weights) if contracts and not plain else {}
        return make_structure(
            spec.structure,
            self.weights,
            jacobian_plan,
            precision_groups={n: g for n, g in groups.items() if n in self.weights},
            parameter_partition=settings.parameter_partition,
            sharing=settings.sharing,
            gram_dtype=gram_dtype,
            contracted=contracted(uses, data, max(1, rows // data)),
            storage=Storage(settings.rows_dtype, settings.rows_device),
            num_rows=None if plain or spec.curvature == "hessian" else rows,
        )

    # ------------------------------------------------------------ checking on real data

    def check_is_due(self) -> bool:
        """True at passes 1, 2, 4, 8, …, to check what a plan assumed on real data and weights."""
        self._passes += 1
        is_due = self._passes & (self._passes - 1) == 0
        return is_due and self.settings.spec.curvature != "hessian"

    def checked(self, plan: InputPlan, linearization: Linearization) -> InputPlan:
        """Return the plan without the fast derivatives that are wrong for one datum of a pass.

        They are compared with plain automatic differentiation of that datum alone.
        """
        # A generator of its own, so that the evidence's draws are not shifted.
        generator = torch.Generator().manual_seed(self._passes)
        f = linearization.outputs
        vectors = torch.randn(len(f), 1, f.shape[1], generator=generator, device="cpu").to(f)
        index = int(torch.randint(len(f), (), generator=generator, device="cpu"))
        wrong = spot_check(linearization, vectors, index)
        if not wrong:
            return plan
        warnings.warn(
            f"The fast derivatives of {listed(sorted(wrong))} are wrong for this model (it may"
            " reorder its data, or use a weight in an unusual way): from here on they are"
            " computed one datum at a time. Earlier estimates of this evidence may be wrong.",
            EvigradWarning,
            stacklevel=2,
        )
        demoted = self._replanned(plan, jacobian=demote(plan.jacobian, wrong))
        # Plans of other lengths are made from these.
        self._loaded = {
            k: (demote(jacobian_plan, wrong), c) for k, (jacobian_plan, c) in self._loaded.items()
        }
        self._plans = {
            key: demoted
            if input_plan is plan
            else self._replanned(input_plan, jacobian=demote(input_plan.jacobian, wrong))
            for key, input_plan in self._plans.items()
        }
        return demoted


@dataclass(frozen=True, eq=False)
class Problem:
    """A model with its weights, likelihood and prior, and how its evidence is computed.

    Attributes:
        model: The user's.
        weights: Its trainable parameters that are no hyperparameters, by name.
        likelihood: Gives the curvature of the outputs.
        prior: Bound to the weights.
        settings: How the evidence is computed.
        generator: The source of every random choice.
        plans: The plan for each shape of inputs.
        sizes: How many data pass through the network at once.
        ranks: The processes that share the work.
    """

    model: nn.Module
    weights: Mapping[str, nn.Parameter]
    likelihood: Likelihood
    prior: GaussianPrior
    settings: Settings
    generator: torch.Generator
    plans: Plans
    sizes: MicroBatches
    ranks: Ranks = field(default_factory=Ranks)

    def plan_of(self, x: Any) -> InputPlan:
        """The plan for these inputs, which are checked."""
        return self.plans.of(check_inputs(x, self.device))

    def splits(self, plan: InputPlan) -> bool:
        """Whether each rank passes over its part of all the data: if the statistic is a sum."""
        sums = self.settings.spec.subset is None and not plan.structure.keeps_rows
        return sums and 1 < self.ranks.count <= self.settings.num_data

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Put generator and sizes of micro-batches back if an exception is raised inside."""
        state, chosen = self.generator.get_state(), dict(self.sizes.chosen)
        try:
            yield
        except BaseException:
            self.generator.set_state(state)
            self.sizes.chosen = chosen
            raise

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.weights.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the first weight."""
        return next(iter(self.weights.values())).dtype


@dataclass(frozen=True)
class ParameterReport:
    """What one weight tensor gets from an estimator.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        rows: How its derivatives are computed: a closed form, or a generic path.
        curvature: Its block of the curvature.
        group: Its prior group.
        precision: Its prior precision (the mean, where it varies inside the tensor).
    """

    name: str
    shape: tuple[int, ...]
    rows: str
    curvature: str
    group: str
    precision: float


def parameter_reports(problem: Problem, x: Any | None) -> list[ParameterReport]:
    """Return a report for each weight tensor, in the model's order.

    ``x`` are some inputs, or None for the plan that was used last.

    Raises:
        ConfigurationError: If ``x`` is None and no input was seen yet.
    """
    plan = problem.plans.latest() if x is None else problem.plan_of(x)
    if plan is None:
        raise ConfigurationError(
            "No inputs were seen yet: call describe(x) with a few inputs, as x[:3]."
        )
    rows, curvature = plan.jacobian.describe(), plan.structure.describe()
    precisions = problem.prior.precisions()
    return [
        ParameterReport(
            name=name,
            shape=tuple(w.shape),
            rows=rows[name],
            curvature=curvature[name],
            group=problem.prior.group_name(name),
            precision=float(precisions[name].detach().double().mean()),
        )
        for name, w in problem.weights.items()
    ]
