"""Grams of rows as products, in strips and at once."""

import math
from typing import Any

import pytest
import torch

from evigrad.fast import contraction
from evigrad.fast.contraction import contraction_cotangents, contraction_gram

CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("positions", [(0, 2), (2, 0)])
def test_no_positions(positions: tuple[int, int]) -> None:
    one, other = (
        (random(3, count, 4, seed=0), random(3, 2, count, 5, seed=1)) for count in positions
    )
    assert torch.equal(contraction_gram(one, other), torch.zeros(6, 6, dtype=torch.float64))


@pytest.mark.each(2)
@pytest.mark.parametrize("limit", [1, 60, 300, 10**6])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_parts_change_nothing(
    limit: int, k: int, is_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of examples and positions, as on a CPU and as on other devices, against rows."""
    monkeypatch.setattr("evigrad.fast.contraction._NUMBERS", limit)
    monkeypatch.setattr("evigrad.fast.contraction._CPU_NUMBERS", limit)
    monkeypatch.setattr("evigrad.fast.contraction._FUSING", "cpu" if is_cpu else "none")
    m, i, o = 7, 3, 4
    one = random(m, 5, i, seed=0).requires_grad_(), random(m, k, 5, o, seed=1).requires_grad_()
    other = random(m, 3, i, seed=2), random(m, k, 3, o, seed=3)
    rows, other_rows = (
        torch.einsum("mti,mkto->mkoi", a, g).reshape(m * k, -1) for a, g in (one, other)
    )
    torch.testing.assert_close(contraction_gram(one, other), rows @ other_rows.mT, **CLOSE)
    cotangent = random(m * k, m * k, seed=4)
    cotangent = (cotangent + cotangent.mT).mT.contiguous().mT  # as ``cholesky_inverse`` returns it
    expected = torch.autograd.grad(((rows @ rows.mT) * cotangent).sum(), one, retain_graph=True)
    by_graph = torch.autograd.grad((contraction_gram(one, one) * cotangent).sum(), one)
    torch.testing.assert_close(by_graph, expected, **CLOSE)
    inputs, gradients = (tensor.detach() for tensor in one)
    closed = contraction_cotangents(inputs, gradients, cotangent)
    torch.testing.assert_close(closed, expected, **CLOSE)


@pytest.mark.parametrize("num_data", [10, 3000])
def test_the_number_of_parts(num_data: int) -> None:
    """A loop over pairs would take 64², and parts of all examples would not be limited."""
    parts, largest = [], 0
    for at, data, others in contraction._parts(64, num_data, 64, num_data, contraction._NUMBERS):
        sizes = [part.stop - part.start for part in (at, data, others)]
        parts.append(sizes)
        largest = max(largest, math.prod(sizes) * num_data)
    assert sum(map(math.prod, parts)) == 64 * num_data * 64
    assert largest <= contraction._NUMBERS
    assert len(parts) <= 2 * -(-64 * num_data * 64 * num_data // contraction._NUMBERS)
