"""Linearize any module. Each input shape has a plan, which is made once and then checked."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, EvigradWarning, listed
from evigrad.inputs import AtPositions, Inputs, Tree, each_once, layout, output_layer
from evigrad.invariances.noise import Noise, PackedModel, stochastic_modules
from evigrad.network.arguments import check_hooks, check_output, derivatives_named, model_outputs
from evigrad.network.layers import has_closed_forms
from evigrad.network.linearization import Linearization
from evigrad.network.modes import evaluation_run
from evigrad.network.paths import JacobianPlan, demote
from evigrad.network.plan import adapted, plan
from evigrad.network.verification import spot_check

# Number of latest input shapes whose plans are kept. New plans are adapted from them at low cost.
KEPT_PLANS = 16
# Planning finds the batch dimension by comparing batches of two and three examples.
PROBE_SIZE = 3


def drop_oldest(cache: dict[Any, Any], size: int) -> None:
    """Remove all but the latest ``size`` entries of a cache."""
    for key in list(cache)[:-size]:
        del cache[key]


@dataclass(frozen=True, eq=False)
class InputPlan:
    """The plan for inputs of one shape.

    Attributes:
        model: The model for inputs from ``pack``.
        jacobian: The plan for computing Jacobian rows.
        draws_globally: Whether the model drew from the global random generators during planning.
        outputs: Outputs (p, C) for the p examples that were used for planning. They may be
            outdated.
        positions: The shape … of the outputs (m, …, C) for whole inputs. If it is not empty, the
            plan is for single positions.
    """

    model: nn.Module
    jacobian: JacobianPlan
    draws_globally: bool
    outputs: Tensor
    positions: tuple[int, ...] = ()

    @property
    def num_outputs(self) -> int:
        """C, the number of outputs per example."""
        return self.outputs.shape[1]

    def pack(self, x: Inputs, noise: Noise, data: slice) -> Tensor:
        """Return inputs for ``model``. Several tensors and noise are packed into one tensor."""
        if isinstance(self.model, PackedModel):
            return self.model.pack(x, noise.slice(data.start, data.stop))
        assert isinstance(x, Tensor)
        return x

    def fits(self, x: Inputs) -> bool:
        """Return whether this plan is for inputs with the shape of ``x``."""
        if isinstance(self.model, PackedModel):
            return self.model.fits(x)
        return isinstance(x, Tensor) and tuple(x.shape[1:]) == self.jacobian.datum_shape

    def numbers(self, x: Inputs) -> int:
        """Return the number of entries of an example's input, including noise."""
        if isinstance(self.model, PackedModel):
            return self.model.numbers
        return sum(prod(shape) for _, shape, _ in layout(x))


class Network:
    """A model with the plans for computing its Jacobian with respect to the weights.

    Args:
        model: The user's model.
        weights: Trainable parameters by name, without hyperparameters.

    Attributes:
        differentiated: Names of the hyperparameters for which derivatives of rows were checked.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
        self.model, self.weights = model, dict(weights)
        self.differentiated: set[str] = set()
        self._drawing = stochastic_modules(model)
        self._plans: dict[str, InputPlan] = {}
        self.example: Inputs | None = None  # inputs of training, which need no plan
        # Plans from a checkpoint, for input shapes that have not occurred since.
        self._loaded: dict[str, JacobianPlan] = {}
        self._outputs: dict[str, tuple[tuple[int, ...], nn.Linear | None]] = {}
        self._passes = 0

    def plan(self, x: Inputs) -> InputPlan:
        """Return the plan for inputs of this shape. Make a plan if there is none.

        If the model's outputs have the shape (m, …, C), the plan is for single positions.
        """
        check_hooks(self.model)
        key = self._key(x)
        if key in self._plans:
            self._plans[key] = self._plans.pop(key)  # keep the latest at the end
            return self._plans[key]
        if key not in self._outputs:
            self._outputs[key] = self._output_layer(each_once(x))
            drop_oldest(self._outputs, 2 * KEPT_PLANS)
        positions, layer = self._outputs[key]
        if positions and not isinstance(x, AtPositions):
            few = x[:PROBE_SIZE]
            first = torch.zeros(len(few), dtype=torch.int64, device=x.device)
            return self.plan(AtPositions(few, None, first))
        probe, model = x[:PROBE_SIZE].detach(), self.model
        if self._drawing or not isinstance(probe, Tensor):
            noise = self.noise(seed=0).slice(0, len(probe))
            if isinstance(probe, AtPositions):
                probe = probe.separate()
                probe.count = prod(positions)
            model = PackedModel(model, probe, noise, layer)
            probe = model.pack(probe, noise)
        jacobian_plan = self._loaded.get(key)
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
        self._loaded.pop(key, None)
        self._plans[key] = InputPlan(model, jacobian_plan, draws_globally, f, positions)
        drop_oldest(self._plans, KEPT_PLANS)
        return self._plans[key]

    def _key(self, x: Inputs) -> str:
        """Return the key of a plan: shapes, type and device of inputs, and shapes of the noise."""
        # The shapes are drawn each time, because a module's number of samples may change.
        drawn = [
            tuple(module.draw(1, torch.Generator().manual_seed(0)).shape)
            for module in self._drawing
        ]
        if isinstance(x, Tensor):
            return f"{[tuple(x.shape[1:]), *drawn]} {x.dtype} {x.device}"
        return f"{layout(x)} {drawn} {x.device}"

    def _output_layer(self, x: Tensor | Tree) -> tuple[tuple[int, ...], nn.Linear | None]:
        """Return the shape … of outputs (m, …, C) and the output layer, found by a small pass."""
        few = x[:PROBE_SIZE].detach()
        with evaluation_run(self.model), torch.no_grad():
            f, layer = output_layer(self.model, few)
            return tuple(check_output(f, len(few), True, self.model).shape[1:-1]), layer

    def latest(self) -> InputPlan | None:
        """Return the most recently used plan, or None before the first pass."""
        return next(reversed(self._plans.values()), None)

    def noise(self, seed: int, positions: Tensor | None = None) -> Noise:
        """Return the noise for a block, which is drawn when it is read.

        See ``Noise`` for ``positions``.
        """
        return Noise(self._drawing, seed, positions)

    # ------------------------------------------------------------ checking on real data

    def check_is_due(self) -> bool:
        """Count a pass and return whether to check it. Passes 1, 2, 4, 8, … are checked."""
        self._passes += 1
        return self._passes & (self._passes - 1) == 0

    def verified(self, input_plan: InputPlan, x: Tensor) -> InputPlan:
        """Return the plan without the fast derivatives that are wrong for a random example.

        The example is one of the packed inputs ``x``. Its fast derivatives are compared with plain
        automatic differentiation.
        """
        with torch.enable_grad():
            linearization = Linearization(
                input_plan.model, self.weights, x, input_plan.jacobian, False
            )
        # A separate generator, so that the evidence's draws do not change.
        generator = torch.Generator().manual_seed(self._passes)
        f = linearization.outputs
        vectors = torch.randn(len(f), 1, f.shape[1], generator=generator, device="cpu").to(f)
        index = int(torch.randint(len(f), (), generator=generator, device="cpu"))
        wrong = spot_check(linearization, vectors, index)
        if not wrong:
            return input_plan
        warnings.warn(
            f"The fast derivatives of {listed(sorted(wrong))} are wrong for this model. The model"
            " may reorder the examples, or use a weight in an unusual way. From now on, these"
            " derivatives are computed one example at a time, but earlier estimates may be wrong.",
            EvigradWarning,
            stacklevel=2,
        )
        # Plans for other input shapes are adapted from these.
        self._loaded = {key: demote(old, wrong) for key, old in self._loaded.items()}
        demoted = {
            key: replace(old, jacobian=demote(old.jacobian, wrong))
            for key, old in self._plans.items()
        }
        keys = [key for key, old in self._plans.items() if old is input_plan]
        self._plans = demoted
        return (
            demoted[keys[0]]
            if keys
            else replace(input_plan, jacobian=demote(input_plan.jacobian, wrong))
        )

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the number of passes and the plans, as plain types.

        Plans are stored because they depend on the weights at planning time and on later checks
        with real data. Planning again could give a different plan.
        """
        plans = self._loaded | {key: plan.jacobian for key, plan in self._plans.items()}
        latest = list(plans.items())[-KEPT_PLANS:]
        return {
            "passes": self._passes,
            "plans": {key: jacobian_plan.as_record() for key, jacobian_plan in latest},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict`` of the same model."""
        self._passes = int(state["passes"])
        self._loaded = {k: JacobianPlan.from_record(r) for k, r in state["plans"].items()}
        for jacobian_plan in self._loaded.values():
            if set(jacobian_plan.describe()) != set(self.weights):
                raise ConfigurationError(
                    "The state contains a plan for a model with different weights. Load a state"
                    " that was saved for this model."
                )
            if not all(map(has_closed_forms, jacobian_plan.uses.values())):
                raise ConfigurationError(
                    "The state contains a plan with an unknown closed form. The state is damaged,"
                    " or another version of evigrad saved it. Load another state."
                )
        for key, old in self._plans.items():
            if key in self._loaded:
                self._plans[key] = replace(old, jacobian=self._loaded.pop(key))
