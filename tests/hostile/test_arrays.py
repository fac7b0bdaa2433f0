"""Arrays of any shape, type and content, given as data."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from hostile.cases import errors_of_ours, hostile, values
from hypothesis import strategies as st
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, Schedule
from evigrad.likelihoods import LIKELIHOODS
from evigrad.priors import GaussianPrior

_TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8]
_TYPES += [torch.uint8, torch.bool, torch.complex64]
_SPECIAL = [float("nan"), float("inf"), -float("inf"), 1e38, -1.0, 0.0, 3.0, 100.0, 2.0**62]
N, C = 6, 2


@st.composite
def tensors(draw: Any, shapes: list[tuple[int, ...]]) -> Tensor:
    """Mostly of a shape and a type that would do, with a hostile number in some place."""
    others = st.lists(st.integers(0, 3), max_size=4).map(tuple)
    shape = draw(st.one_of(st.sampled_from(shapes), st.sampled_from(shapes), others))
    kind = draw(st.one_of(st.sampled_from([torch.float32, torch.int64]), st.sampled_from(_TYPES)))
    size = int(np.prod(shape))
    content = torch.tensor([0.5 * (i % 4) for i in range(size)], dtype=torch.float64)
    if size and draw(st.booleans()):
        content[draw(st.integers(0, size - 1))] = draw(st.sampled_from(_SPECIAL))
    real = torch.nan_to_num(content, 0, 2**62, -(2**62)) if not kind.is_floating_point else content
    tensor = (real if not kind.is_complex else content).to(kind).reshape(shape)
    changes = {
        "as it is": lambda: tensor,
        "requires a gradient": lambda: tensor.requires_grad_(tensor.is_floating_point()),
        "a view": lambda: tensor[..., None].expand(*tensor.shape, 2)[..., 0],
        "sparse": lambda: tensor.to_sparse() if tensor.ndim and tensor.numel() else tensor,
        "meta": lambda: tensor.to("meta"),
    }
    return changes[draw(st.sampled_from(["as it is"] * 6 + [*changes]))]()


_X = tensors([(N, 3), (N, 3), (N, 1, 3)])
_Y = tensors([(N,), (N, C), (N, 1), (N, 2 * C)])


@st.composite
def problems(draw: Any) -> tuple[Any, Any, str, str]:
    """Inputs, targets, a likelihood, an estimator."""
    names = ["ntk-2-1", "kfac-3-C", "full-N-C", "diag-4-1-mc", "ntk-3-rows-anchored"]
    x = draw(st.one_of(_X, _X, _X, _X, values()))
    y = draw(st.one_of(_Y, _Y, _Y, _Y, values()))
    return x, y, draw(st.sampled_from(sorted(LIKELIHOODS))), draw(st.sampled_from(names))


def network(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, outputs))


@hostile(problems(), 30, 6_000)
def test_estimates_are_finite_or_refused(tmp_path: Path, problem: Any) -> None:
    x, y, likelihood, name = problem
    with errors_of_ours():
        evidence = Evidence(
            network(2 * C if "gaussian" in likelihood and likelihood != "gaussian" else C),
            LIKELIHOODS[likelihood](),
            GaussianPrior(),
            estimator=name,
            num_data=N,
            generator=0,
        )
        for verb in (
            lambda: evidence.map_loss(x, y),  # of huge numbers it may be infinite
            lambda: next(iter(evidence.blocks((x, y)).take(1))),
            lambda: evidence.backward(x, y).log_evidence,
        ):
            with errors_of_ours():
                estimate = verb()
                assert not isinstance(estimate, float) or np.isfinite(estimate)


@hostile(problems(), 10, 1_500)
def test_fit_ends_with_finite_weights_or_refuses(tmp_path: Path, problem: Any) -> None:
    x, y, likelihood, name = problem
    with errors_of_ours():
        result = evigrad.fit(
            network(2 * C if "gaussian" in likelihood and likelihood != "gaussian" else C),
            (x, y),
            likelihood=likelihood,
            estimator=name,
            schedule=Schedule(epochs=2, burn_in=1, every=1, steps=1),
            progress=False,
        )
        assert all(weight.isfinite().all() for weight in result.model.parameters())
