"""ℓ(Z) + Σ_b w_b ℓ(B_b|Z) and its derivative, against determinants of sub-matrices."""

import pytest
import torch
from torch import Tensor

from evigrad.core.curvature.anchored import Conditioning, log_det_conditional
from evigrad.errors import ConfigurationError


def gram(rows: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return a @ a.mT


def entropy(matrix: Tensor, rows: list[int]) -> Tensor:
    index = torch.tensor(rows, dtype=torch.long)
    return torch.linalg.slogdet(torch.eye(len(rows)).double() + matrix[index][:, index])[1]


def reference(matrix: Tensor, conditioning: Conditioning) -> Tensor:
    labels = conditioning.parts.tolist()
    anchors = [r for r, label in enumerate(labels) if label == 0]
    total = of_anchors = entropy(matrix, anchors)
    for b, weight in enumerate(conditioning.weights, start=1):
        part = [r for r, label in enumerate(labels) if label == b]
        total = total + weight * (entropy(matrix, anchors + part) - of_anchors)
    return total


CASES = {
    "one part": ([0, 1, 0, 1, 1, 0, 0, 1, 0], (3.5,)),
    "two parts between": ([2, 1, 0, 1, 2, 0, 0, 1, 2], (3.5, 0.25)),
    "three parts": ([0, 3, 1, 2, 3, 0, 1, 2, 1], (2.0, 2.0, 7.0)),
    "no anchors": ([1, 1, 2, 2, 1, 2, 1, 1, 2], (2.0, 2.0)),
    "anchors alone": ([0] * 9, ()),
    "rows that do not count": ([0, 1, -1, 1, -1, 0, 0, 1, -1], (3.5,)),
    "an empty part": ([0, 1, 0, 1, 0, 0, 0, 1, 0], (1.5, 4.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_derivative(name: str) -> None:
    parts, weights = CASES[name]
    conditioning = Conditioning(torch.tensor(parts), weights)
    matrix = gram().requires_grad_()
    log_det = log_det_conditional(matrix, conditioning)
    value = log_det.value
    expected = reference(matrix, conditioning)
    torch.testing.assert_close(value, expected)
    entropies = log_det.entropies
    (slope,) = torch.autograd.grad(3.0 * value, matrix)
    (gradient,) = torch.autograd.grad(3.0 * expected, matrix)
    torch.testing.assert_close(slope, gradient)
    of_anchors, *of_parts = entropies
    total = of_anchors + sum(w * e for w, e in zip(weights, of_parts, strict=True))
    assert total == pytest.approx(float(expected.detach()))


def test_it_has_first_derivatives_only() -> None:
    matrix = gram().requires_grad_()
    value = log_det_conditional(
        matrix, Conditioning(torch.tensor(CASES["one part"][0]), (3.5,))
    ).value
    with pytest.raises(ConfigurationError, match="differentiated only once"):
        torch.autograd.grad(value, matrix, create_graph=True)
