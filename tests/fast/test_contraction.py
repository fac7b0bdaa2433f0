"""Grams of rows as products, in strips and at once."""

import pytest
import torch

from evigrad.fast.contraction import contraction_cotangents, contraction_gram


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("positions", [(0, 2), (2, 0)])
def test_no_positions(positions: tuple[int, int]) -> None:
    one, other = (
        (random(3, count, 4, seed=0), random(3, 2, count, 5, seed=1)) for count in positions
    )
    assert torch.equal(contraction_gram(one, other), torch.zeros(6, 6, dtype=torch.float64))


@pytest.mark.parametrize("strip", [1, 60, 10**6])
@pytest.mark.parametrize("k", [1, 2])
def test_strips_change_nothing(strip: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evigrad.fast.contraction._STRIP", strip)
    m, i, o = 7, 3, 4
    one = random(m, 2, i, seed=0).requires_grad_(), random(m, k, 2, o, seed=1).requires_grad_()
    other = random(m, 3, i, seed=2), random(m, k, 3, o, seed=3)
    rows, other_rows = (
        torch.einsum("mti,mkto->mkoi", a, g).reshape(m * k, -1) for a, g in (one, other)
    )
    torch.testing.assert_close(contraction_gram(one, other), rows @ other_rows.mT)
    cotangent = random(m * k, m * k, seed=4)
    cotangent = cotangent + cotangent.mT
    expected = torch.autograd.grad(((rows @ rows.mT) * cotangent).sum(), one, retain_graph=True)
    by_graph = torch.autograd.grad((contraction_gram(one, one) * cotangent).sum(), one)
    torch.testing.assert_close(by_graph, expected)
    inputs, gradients = (tensor.detach() for tensor in one)
    torch.testing.assert_close(contraction_cotangents(inputs, gradients, cotangent), expected)
