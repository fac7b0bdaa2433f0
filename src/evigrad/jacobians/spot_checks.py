"""Checking the fast paths again where it counts: on the data of a real pass.

A plan is checked on a few data and on the weights of its day. What it could not see there (a
branch that only other inputs take, data that mix only in larger batches) shows here.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.jacobians.arguments import DATA_MIX
from evigrad.jacobians.generic import datum_rows
from evigrad.jacobians.linearization import Linearization, linearize
from evigrad.jacobians.paths import LOOP, JacobianPlan
from evigrad.jacobians.state import model_run, without_autocast
from evigrad.jacobians.verification import close, close_outputs

# On the part of the largest rows below which all is rounding: trained networks cancel more than
# those on which plans are made.
_ROUNDING_FACTOR = 10.0


def spot_check(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    x: Tensor,
    plan: JacobianPlan,
    linearization: Linearization,
    vectors: Float[Tensor, "m k C"],
    index: int,
) -> set[str]:
    """Compare one datum of a pass with plain automatic differentiation of that datum alone.

    Takes a forward pass of the datum and k backward passes, and k backward passes of the batch;
    nothing at all where every parameter goes through the loop.

    Args:
        model: As given to ``linearize``, and in the same mode.
        weights: As given to ``linearize``.
        x: The m inputs of the pass.
        plan: The plan that the pass was made with.
        linearization: The pass.
        vectors: Cotangents that its rows are taken with.
        index: Which datum, in 0 ... m - 1.

    Returns:
        The names whose rows disagree, to be handed to ``demote``. In types below double precision
        those that disagree for the next datum too: a rounding error can carry a unit across the
        kink of its activation.

    Raises:
        ConfigurationError: If the output for the datum is another than in the batch.
    """
    if all(word == LOOP for word in plan.words.values()):
        return set()
    if linearization.mixed:
        # Rounding would hide what is wrong, or look like it: the same pass in full precision.
        with without_autocast(x.device):
            exact = linearize(model, weights, x, plan, differentiable=False)
            return spot_check(model, weights, x, plan, exact, vectors, index)
    found = _disagreeing(model, weights, x, plan, linearization, vectors, index)
    if found and linearization.outputs.dtype != torch.float64 and len(x) > 1:
        neighbour = (index + 1) % len(x)
        found &= _disagreeing(model, weights, x, plan, linearization, vectors, neighbour)
    return found


def _disagreeing(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    x: Tensor,
    plan: JacobianPlan,
    linearization: Linearization,
    vectors: Float[Tensor, "m k C"],
    index: int,
) -> set[str]:
    """The names whose rows of one datum are not those of the loop."""
    one = slice(index, index + 1)
    names = [name for name, word in plan.words.items() if word != LOOP]
    f = linearization.outputs.detach()
    with model_run(model):
        alone, expected = datum_rows(
            model, weights, names, x[one].detach(), vectors[one].detach(), False
        )
    if not f.isfinite().all():  # which tells nothing about the paths
        return set()
    if not close_outputs(f[one], alone, f.norm(dim=1).max()):
        raise ConfigurationError(DATA_MIX)
    rows = linearization.fast_rows_of_datum(vectors, index)
    stacked = {name: torch.stack(expected[name])[None] for name in names}
    largest = torch.stack([r.norm().to(f.dtype) for r in stacked.values()]).max()
    # Names that are missing among the rows take the loop in this pass, whatever the plan says.
    return {
        name
        for name, row in rows.items()
        if name in stacked
        and (row is None or not close(row, stacked[name], largest * _ROUNDING_FACTOR))
    }
