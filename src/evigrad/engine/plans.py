"""Plans for each input shape: how to differentiate, the structure, and the partition."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.blocks.anchors.last_layer import LastLayer, last_layer, watched
from evigrad.blocks.partitions import Partition
from evigrad.curvature import Storage, Structure, contracted, make_structure
from evigrad.engine.settings import Settings
from evigrad.errors import EvigradWarning, listed
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
        gram_dtype: Type of the structure's matrices; None for that of the rows.
    """

    model: nn.Module
    jacobian: JacobianPlan
    structure: Structure[Any]
    partition: Partition
    draws_globally: bool
    outputs: Tensor
    gram_dtype: torch.dtype | None = None

    def pack(self, x: Tensor, noise: Noise | None, data: slice) -> Tensor:
        """The inputs as the model takes them, followed by their noise where the model draws."""
        if noise is None or not isinstance(self.model, Drawn):
            return x
        return self.model.pack(x, noise.slice(data.start, data.stop))

    def numbers(self, x: Tensor) -> int:
        """How many numbers a datum has, its noise included."""
        drawn = self.model.noise_numbers if isinstance(self.model, Drawn) else 0
        return prod(x.shape[1:]) + drawn


class Plans:
    """The plans for the latest shapes of inputs.

    Args:
        model: The user's.
        weights: Its weights by name.
        prior: Bound to them.
        settings: How the evidence is computed.
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
        self._plans: dict[str, InputPlan] = {}
        self._known: dict[str, JacobianPlan] = {}
        self._formed: set[str] = set()  # keys of inputs for which no weight is contracted
        self._passes = 0

    def of(self, x: Tensor) -> InputPlan:
        """The plan for inputs of this shape, made once."""
        check_hooks(self.model)
        # A module's number of samples may change at any time.
        one = torch.Generator().manual_seed(0)
        drawn = [module.draw(1, one).shape for module in self._drawing]
        shapes = [tuple(shape) for shape in (x.shape[1:], *drawn)]
        key = f"{shapes} {x.dtype} {x.device}"
        if key in self._plans:
            self._plans[key] = self._plans.pop(key)  # the latest is the last
            return self._plans[key]
        probe, model = x[:PROBE_SIZE].detach(), self.model
        if self.draws:
            noise = self.noise(seed=0).slice(0, len(probe))
            model = Drawn(model, probe, noise)
            probe = model.pack(probe, noise)
        # A separate generator: planning must not advance the evidence's.
        own = torch.Generator().manual_seed(0)
        with evaluation_mode(model, own) as has_drawn, model_run(model):
            with torch.no_grad():
                f = model_outputs(model, probe)
            plans = [each.jacobian for each in reversed(self._plans.values())]
            made = (
                self._known.get(key)
                or adapted(plans, model, self.weights, probe)
                or plan(model, self.weights, probe)
            )
            draws_globally = has_drawn()
        partition = Partition(self.settings.spec, self.settings.num_data, f.shape[1])
        given = self.settings.gram_dtype
        structure = self._structure(made, partition, key not in self._formed, given)
        self._plans[key] = InputPlan(model, made, structure, partition, draws_globally, f, given)
        for old in list(self._plans)[:-_KEPT]:
            del self._plans[old]
            self._formed.discard(old)
        return self._plans[key]

    def state_dict(self) -> dict[str, Any]:
        """Return what later passes depend on, in plain types: their number and the plans.

        A plan depends on the weights that it was made with, and on checks on real data since: it
        could not be made again.
        """
        plans = self._known | {key: each.jacobian for key, each in self._plans.items()}
        return {
            "passes": self._passes,
            "plans": {key: each.as_record() for key, each in list(plans.items())[-_KEPT:]},
            "formed": sorted(self._formed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state of ``state_dict`` of the same model and settings."""
        self._passes = state["passes"]
        self._known = {
            key: JacobianPlan.from_record(record) for key, record in state["plans"].items()
        }
        self._formed = set(state["formed"])
        for key, each in self._plans.items():
            made = self._known.get(key, each.jacobian)
            self._plans[key] = self._replanned(each, made, key not in self._formed)

    def last_layer(self, x: Tensor) -> tuple[Tensor, LastLayer | None]:
        """Outputs (m, C) without a graph, and their last layer, or None where none is linear."""
        own, model = torch.Generator().manual_seed(0), self.model  # not the evidence's generator
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

    def latest(self) -> InputPlan | None:
        """The plan that was used last, if any."""
        return next(reversed(self._plans.values()), None)

    def noise(self, seed: int, positions: Tensor | None = None) -> Noise:
        """The noise of a block, drawn when read; ``positions`` says whose noise each datum has."""
        return Noise(self._drawing, seed, positions)

    def without_contraction(self, plan: InputPlan) -> InputPlan:
        """Replace a plan by one that forms all rows, where some pass lacks a closed form."""
        self._formed |= {key for key, known in self._plans.items() if known is plan}
        return self._replaced(plan, self._replanned(plan, plan.jacobian, contract=False))

    def _replaced(self, old: InputPlan, new: InputPlan) -> InputPlan:
        for key, known in self._plans.items():
            if known is old:
                self._plans[key] = new
        return new

    def in_float64(self, plan: InputPlan) -> InputPlan:
        """The plan with products and factors in float64, for one evaluation."""
        wider = replace(plan, gram_dtype=torch.float64)
        return self._replanned(wider, wider.jacobian, bool(plan.structure.contracted))

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
        # One graph is the reference, and takes no shortcuts. An exact Hessian has no rows.
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

    def _replanned(self, plan: InputPlan, made: JacobianPlan, contract: bool) -> InputPlan:
        structure = self._structure(made, plan.partition, contract, plan.gram_dtype)
        return replace(plan, jacobian=made, structure=structure)

    # ------------------------------------------------------------ checking on real data

    def check_is_due(self) -> bool:
        """True at passes 1, 2, 4, 8, …, to check what a plan assumed on real data and weights."""
        self._passes += 1
        is_due = self._passes & (self._passes - 1) == 0
        return is_due and self.settings.spec.curvature != "hessian"

    def checked(self, plan: InputPlan, linearization: Linearization, x: Tensor) -> InputPlan:
        """Return the plan without the fast derivatives that are wrong for one datum of a pass.

        They are compared with plain automatic differentiation of that datum alone.

        Args:
            plan: The plan of the pass.
            linearization: The pass.
            x: Its inputs, packed.
        """
        own = torch.Generator().manual_seed(self._passes)  # the evidence's draws are not shifted
        f = linearization.outputs
        vectors = torch.randn(len(f), 1, f.shape[1], generator=own).to(f)
        index = int(torch.randint(len(f), (), generator=own))
        wrong = spot_check(
            plan.model, self.weights, x, plan.jacobian, linearization, vectors, index
        )
        if not wrong:
            return plan
        warnings.warn(
            f"The fast derivatives of {listed(sorted(wrong))} are wrong for this model (it may"
            " reorder its data, or use a weight in an unusual way): from here on they are"
            " computed one datum at a time. Earlier estimates of this evidence may be wrong.",
            EvigradWarning,
            stacklevel=2,
        )
        self._known = {key: demote(p, wrong) for key, p in self._known.items()}
        for key, each in self._plans.items():  # plans of other lengths are made from these
            if each is not plan:
                self._plans[key] = self._demoted(each, wrong)
        return self._replaced(plan, self._demoted(plan, wrong))

    def _demoted(self, plan: InputPlan, wrong: set[str]) -> InputPlan:
        contract = bool(plan.structure.contracted)
        return self._replanned(plan, demote(plan.jacobian, wrong), contract)
