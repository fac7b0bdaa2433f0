"""Checking the fast paths again on the data of a real pass.

A plan is checked on a few data and on the weights of that time. What it could not see there (a
branch that only other inputs take, data that mix only in larger batches) shows here.
"""

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, is_out_of_memory
from evigrad.jacobians.arguments import DATA_MIX, model_outputs
from evigrad.jacobians.generic import datum_rows
from evigrad.jacobians.linearization import Linearization
from evigrad.jacobians.modes import model_run, without_autocast
from evigrad.jacobians.paths import LOOP
from evigrad.jacobians.verification import close, close_outputs

# Factor on the part of the largest rows below which all is rounding: trained networks cancel more
# than those on which plans are made.
_ROUNDING_FACTOR = 10.0


def spot_check(
    linearization: Linearization, vectors: Float[Tensor, "m k C"], index: int
) -> set[str]:
    """Return the names whose rows of one datum disagree with differentiating that datum alone.

    Takes a forward pass of the datum alone and k backward passes, and k backward passes of the
    batch; nothing at all where every parameter goes through the loop. The model is in the same mode
    as in the pass; ``vectors`` are the cotangents of its rows. Below double precision they must
    disagree for the next datum too: a rounding error can carry a unit across the kink of its
    activation.

    Raises:
        ConfigurationError: If the output for the datum differs from that in the batch.
    """
    x, f = linearization.x, linearization.outputs
    if all(word == LOOP for word in linearization.plan.words.values()):
        return set()
    if linearization.mixed:
        # Rounding would hide errors, or look like one: repeat the pass in full precision.
        with without_autocast(x.device):
            settings = (linearization.model, linearization.weights, x, linearization.plan)
            return spot_check(Linearization(*settings, differentiable=False), vectors, index)
    found = _disagreeing(linearization, vectors, index)
    if found and f.dtype != torch.float64 and len(x) > 1:
        found &= _disagreeing(linearization, vectors, (index + 1) % len(x))
    return found


def _disagreeing(
    linearization: Linearization, vectors: Float[Tensor, "m k C"], index: int
) -> set[str]:
    """The names whose rows of one datum are not those of the loop."""
    one, x, f = slice(index, index + 1), linearization.x, linearization.outputs.detach()
    model, weights = linearization.model, linearization.weights
    names = [name for name, word in linearization.plan.words.items() if word != LOOP]
    with model_run(model):
        alone, expected = datum_rows(
            model, weights, names, x[one].detach(), vectors[one].detach(), False
        )
    if not f.isfinite().all():  # the comparison would say nothing about the paths
        return set()
    if not close_outputs(f[one], alone, f.norm(dim=1).max()):
        _refuse_mixing(model, x, [torch.arange(len(x))[one]])
    rows = linearization.fast_rows_of_datum(vectors, index)
    stacked = {name: torch.stack(expected[name])[None] for name in names}
    largest = torch.stack([r.norm().to(f.dtype) for r in stacked.values()]).max()
    # Names that are missing among the rows take the loop in this pass, against the plan.
    return {
        name
        for name, row in rows.items()
        if name in stacked
        and (row is None or not close(row, stacked[name], largest * _ROUNDING_FACTOR))
    }


def check_separate(
    model: nn.Module, x: Tensor, outputs: Float[Tensor, "m C"], generator: torch.Generator
) -> None:
    """Raise if an output depends on other data of its batch.

    The data go through the model again in random parts of 1, 2, 4, …: they may mix because of any
    single datum, of many, or of their number. Takes one forward pass without a graph in all, in the
    same mode as for the ``outputs`` f(x), in the type of the weights.
    """
    order, parts = torch.randperm(len(x), generator=generator), list[Tensor]()
    while len(order):
        size = 2 ** len(parts)
        parts.append(order[:size])
        order = order[size:]
    outputs = outputs.detach()
    if outputs.isfinite().all() and not _is_separate(model, x, outputs, parts):
        _refuse_mixing(model, x, parts)


def _is_separate(
    model: nn.Module, x: Tensor, outputs: Float[Tensor, "m C"], parts: Sequence[Tensor]
) -> bool:
    scale = outputs.norm(dim=1).max()
    with model_run(model), torch.no_grad():
        return all(
            close_outputs(model_outputs(model, x[part]).to(outputs), outputs[part], scale)
            for part in parts
        )


def _refuse_mixing(model: nn.Module, x: Tensor, parts: Sequence[Tensor]) -> None:
    """Raise for outputs that differ, unless they agree in double precision."""
    # Where numbers choose between experts, say, rounding may choose one in the batch and another in
    # a part of it. In double precision no datum is so near the border.
    try:
        with model_run(model), torch.no_grad(), without_autocast(x.device):
            exact = copy.deepcopy(model).double()
            x = x.double() if x.is_floating_point() else x
            if _is_separate(exact, x, model_outputs(exact, x), parts):
                return
    except Exception as error:  # any error means that there is no such copy
        if is_out_of_memory(error):
            raise
    raise ConfigurationError(DATA_MIX)
