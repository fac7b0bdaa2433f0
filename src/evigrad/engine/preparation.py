"""What depends on the shape of the inputs: plan, structure and partition, made once for each."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.blocks.anchors import Anchoring
from evigrad.blocks.anchors.last_layer import LastLayer, last_layer, watched
from evigrad.blocks.partitions import Partition
from evigrad.curvature import ParameterPartition, Storage, Structure, contracted, make_structure
from evigrad.engine.checks import (
    check_anchored,
    check_choice,
    check_count,
    check_passes,
    check_positive,
    check_rows,
    check_spec,
)
from evigrad.errors import EvigradWarning, listed
from evigrad.estimators import ROOTS, EstimatorSpec
from evigrad.invariances.noise import Drawn, Noise, stochastic_modules
from evigrad.jacobians import (
    JacobianPlan,
    Linearization,
    adapted,
    check_hooks,
    demote,
    matrix_uses,
    model_outputs,
    model_run,
    plan,
    spot_check,
)
from evigrad.jacobians.modes import evaluation_mode
from evigrad.priors import GaussianPrior

# Input shapes whose plans are kept, the latest; others are adapted from these at little cost.
_KEPT = 16
# Planning tells the batch from other dimensions by two batch sizes, two and three.
PROBE_SIZE = 3


@dataclass(frozen=True)
class Settings:
    """How an evidence computes; see ``Evidence`` for each.

    Raises:
        ConfigurationError: If a value does not exist or does not fit.
    """

    spec: EstimatorSpec
    num_data: int
    root: str
    sharing: str
    parameter_partition: ParameterPartition
    temperature: float
    micro_batch: int | str | None = None
    memory_budget: int | None = None
    gram_dtype: torch.dtype | None = None
    rows_dtype: torch.dtype | None = None
    rows_device: torch.device | None = None
    autocast: torch.dtype | None = None
    gradient: str = "two-pass"
    anchoring: Anchoring | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_count("num_data", self.num_data)
        check_spec(self.spec, self.num_data)
        check_choice("root", self.root, ROOTS)
        check_anchored(self.spec, self.root, self.anchoring)
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        check_positive("temperature", self.temperature)
        check_passes(
            self.spec,
            self.micro_batch,
            self.memory_budget,
            self.gram_dtype,
            self.rows_dtype,
            self.autocast,
        )
        check_rows(self.spec, self.rows_dtype, self.rows_device)
        check_choice("gradient", self.gradient, ("two-pass", "one-graph"))


@dataclass(frozen=True)
class Prepared:
    """What is prepared for inputs of one shape.

    Attributes:
        model: Takes ``pack(x, noise)``.
        plan: How its derivatives are computed.
        structure: Of the curvature.
        partition: Of rows into blocks.
        draws_globally: Whether the model drew from the global generators when it was planned.
        outputs: Of the inputs that it was prepared on, under the weights of that day.
        gram_dtype: Of the structure's matrices; None for that of the rows.
    """

    model: nn.Module
    plan: JacobianPlan
    structure: Structure[Any]
    partition: Partition
    draws_globally: bool
    outputs: Tensor
    gram_dtype: torch.dtype | None = None

    def pack(self, x: Tensor, noise: Noise | None, data: slice) -> Tensor:
        """Inputs as the model takes them.

        Args:
            x: Inputs (m, ...).
            noise: Of the block, where the model draws.
            data: Positions of the inputs in the block.

        Returns:
            The inputs, with their noise behind them where the model draws.
        """
        if noise is None or not isinstance(self.model, Drawn):
            return x
        return self.model.pack(x, noise.slice(data.start, data.stop))

    def numbers(self, x: Tensor) -> int:
        """How many numbers a datum has, its noise included."""
        drawn = self.model.noise_numbers if isinstance(self.model, Drawn) else 0
        return prod(x.shape[1:]) + drawn


class Preparation:
    """Makes and keeps what is prepared.

    Args:
        model: The user's.
        weights: Its weights by name.
        prior: Bound to them.
        settings: Of the evidence.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        prior: GaussianPrior,
        settings: Settings,
    ) -> None:
        self.model = model
        self.weights = dict(weights)
        self.prior = prior
        self.settings = settings
        self._drawing = stochastic_modules(model)
        self._prepared: dict[str, Prepared] = {}
        self._known_plans: dict[str, JacobianPlan] = {}
        self._formed: set[str] = set()  # inputs for which all rows are formed, none contracted
        self._passes = 0

    def prepare(self, x: Tensor) -> Prepared:
        """Plan the derivatives and build the structure for inputs of this shape, once.

        Args:
            x: Some inputs.

        Returns:
            What is prepared for them.
        """
        check_hooks(self.model)
        # How much a module draws may be changed at any time (its number of samples).
        one = torch.Generator().manual_seed(0)
        drawn = [module.draw(1, one).shape for module in self._drawing]
        shapes = [tuple(shape) for shape in (x.shape[1:], *drawn)]
        key = f"{shapes} {x.dtype} {x.device}"
        if key in self._prepared:
            self._prepared[key] = self._prepared.pop(key)  # the latest is the last
            return self._prepared[key]
        probe, model = x[:PROBE_SIZE].detach(), self.model
        if self.draws:
            noise = self.noise(seed=0).slice(0, len(probe))
            model = Drawn(model, probe, noise)
            probe = model.pack(probe, noise)
        # Planning happens once, so it draws from a generator of its own.
        own = torch.Generator().manual_seed(0)
        with evaluation_mode(model, own) as has_drawn, model_run(model):
            with torch.no_grad():
                f = model_outputs(model, probe)
            plans = [each.plan for each in reversed(self._prepared.values())]
            made = (
                self._known_plans.get(key)
                or adapted(plans, model, self.weights, probe)
                or plan(model, self.weights, probe)
            )
            draws_globally = has_drawn()
        partition = Partition(self.settings.spec, self.settings.num_data, f.shape[1])
        given = self.settings.gram_dtype
        structure = self._structure(made, partition, key not in self._formed, given)
        self._prepared[key] = Prepared(model, made, structure, partition, draws_globally, f, given)
        for old in list(self._prepared)[:-_KEPT]:
            del self._prepared[old]
            self._formed.discard(old)
        return self._prepared[key]

    def state_dict(self) -> dict[str, Any]:
        """What later passes depend on: how many there were, and the paths of derivatives.

        A plan belongs to the weights of the day that it was made, and to what the checks on real
        data have found since: it could not be made again.

        Returns:
            Numbers, strings, and tuples, lists and dictionaries of them.
        """
        plans = self._known_plans | {key: each.plan for key, each in self._prepared.items()}
        return {
            "passes": self._passes,
            "plans": {key: each.as_record() for key, each in list(plans.items())[-_KEPT:]},
            "formed": sorted(self._formed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of ``state_dict``, in place of what was prepared here.

        Args:
            state: From the same model and settings.
        """
        self._passes = state["passes"]
        self._known_plans = {
            key: JacobianPlan.from_record(record) for key, record in state["plans"].items()
        }
        self._formed = set(state["formed"])
        for key, prepared in self._prepared.items():
            made = self._known_plans.get(key, prepared.plan)
            self._prepared[key] = self._replanned(prepared, made, key not in self._formed)

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs of the model, without a graph; what it draws is not the evidence's.

        Args:
            x: Inputs (m, ...).

        Returns:
            Of shape (m, C).
        """
        return self.last_layer(x)[0]

    def last_layer(self, x: Tensor) -> tuple[Tensor, LastLayer | None]:
        """Outputs as ``outputs`` gives them, and the last layer that they come from.

        Args:
            x: Inputs (m, ...).

        Returns:
            Outputs (m, C); the layer, or None where none is linear.
        """
        own, model = torch.Generator().manual_seed(0), self.model
        with (
            evaluation_mode(model, own),
            model_run(model),
            torch.no_grad(),
            watched(model, self.weights) as call,
        ):
            f = model_outputs(model, x)
        temperature = self.settings.temperature
        return f, last_layer(call, f, self.weights, self.prior.precisions(), temperature)

    @property
    def draws(self) -> bool:
        """Whether the model draws noise."""
        return bool(self._drawing)

    def latest(self) -> Prepared | None:
        """What was prepared last, if anything."""
        return next(reversed(self._prepared.values()), None)

    def noise(self, seed: int, positions: Tensor | None = None) -> Noise:
        """The noise of a block, of all modules that draw.

        Args:
            seed: Of the noise.
            positions: Whose noise each datum has, in ascending order; None for its own.

        Returns:
            The noise, drawn as it is read.
        """
        return Noise(self._drawing, seed, positions)

    def without_contraction(self, prepared: Prepared) -> Prepared:
        """The same with all rows formed, for a model whose passes do not all have closed forms.

        Args:
            prepared: One of those made here.

        Returns:
            What takes its place from here on.
        """
        self._formed |= {key for key, known in self._prepared.items() if known is prepared}
        return self._replaced(prepared, self._replanned(prepared, prepared.plan, contract=False))

    def _replaced(self, old: Prepared, new: Prepared) -> Prepared:
        for key, known in self._prepared.items():
            if known is old:
                self._prepared[key] = new
        return new

    def in_float64(self, prepared: Prepared) -> Prepared:
        """The same with products and factors in float64, whatever the dtype of the rows.

        Args:
            prepared: One of those made here.

        Returns:
            Another one, for a single evaluation.
        """
        wider = replace(prepared, gram_dtype=torch.float64)
        return self._replanned(wider, wider.plan, bool(prepared.structure.contracted))

    def _structure(
        self,
        made: JacobianPlan,
        partition: Partition,
        contract: bool,
        gram_dtype: torch.dtype | None,
    ) -> Structure[Any]:
        settings, spec = self.settings, partition.spec
        rows = partition.block_rows
        data = rows if spec.rows else min(spec.subset or rows, rows)
        # One graph is the reference: nothing that saves work without changing the result. An exact
        # Hessian has no rows.
        plain = settings.gradient == "one-graph"
        contract = contract and not plain
        uses = matrix_uses(made, self.weights) if contract else {}
        return make_structure(
            spec.structure,
            self.weights,
            made,
            precision_groups=self.prior.constant_groups(),
            parameter_partition=settings.parameter_partition,
            sharing=settings.sharing,
            gram_dtype=gram_dtype,
            contracted=contracted(uses, data, max(1, rows // data)),
            storage=Storage(settings.rows_dtype, settings.rows_device),
            num_rows=None if plain or spec.curvature == "hessian" else rows,
        )

    def _replanned(self, prepared: Prepared, made: JacobianPlan, contract: bool) -> Prepared:
        structure = self._structure(made, prepared.partition, contract, prepared.gram_dtype)
        return replace(prepared, plan=made, structure=structure)

    # ------------------------------------------------------------ checking on real data

    def check_is_due(self) -> bool:
        """At passes 1, 2, 4, 8, …: what a plan could not see, the first data and weights show."""
        self._passes += 1
        is_due = self._passes & (self._passes - 1) == 0
        return is_due and self.settings.spec.curvature != "hessian"

    def checked(self, prepared: Prepared, linearization: Linearization, x: Tensor) -> Prepared:
        """One datum of a pass against plain automatic differentiation of it alone.

        Args:
            prepared: That the pass was made with.
            linearization: The pass.
            x: Its inputs, packed.

        Returns:
            The same, or another one without the fast derivatives that were found to be wrong.
        """
        own = torch.Generator().manual_seed(self._passes)  # the evidence's draws are not shifted
        f = linearization.outputs
        vectors = torch.randn(len(f), 1, f.shape[1], generator=own).to(f)
        index = int(torch.randint(len(f), (), generator=own))
        wrong = spot_check(
            prepared.model, self.weights, x, prepared.plan, linearization, vectors, index
        )
        if not wrong:
            return prepared
        warnings.warn(
            f"The fast derivatives of {listed(sorted(wrong))} are wrong for this model (it may"
            " reorder its data, or use a weight in an unusual way): from here on they are"
            " computed one datum at a time. Earlier estimates of this evidence may be wrong.",
            EvigradWarning,
            stacklevel=2,
        )
        self._known_plans = {key: demote(p, wrong) for key, p in self._known_plans.items()}
        for key, each in self._prepared.items():  # plans of other lengths are made from these
            if each is not prepared:
                self._prepared[key] = self._demoted(each, wrong)
        return self._replaced(prepared, self._demoted(prepared, wrong))

    def _demoted(self, prepared: Prepared, wrong: set[str]) -> Prepared:
        contract = bool(prepared.structure.contracted)
        return self._replanned(prepared, demote(prepared.plan, wrong), contract)
