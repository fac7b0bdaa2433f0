"""Products of Jacobians with vectors, against the rows of all outputs."""

from typing import Any
from unittest import mock

import pytest
import torch
from network.dense import random, weights_of
from torch import Tensor, nn
from zoo import CASES, HYPERPARAMETERS

from evigrad.network import Linearization, linearization, plan

ROWS, INNER = 2**62, 0  # values of _OUTPUTS_PER_VECTOR that choose the way


def products(model: nn.Module, x: Any, way: int, *, graph: bool = False) -> Tensor:
    """Return J v for three vectors."""
    weights = weights_of(model.eval(), HYPERPARAMETERS)
    vectors = {name: random(3, *weight.shape).to(weight) for name, weight in weights.items()}
    with mock.patch.object(linearization, "_OUTPUTS_PER_VECTOR", way):
        return Linearization(model, weights, x, plan(model, weights, x), graph).times(vectors)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", list(CASES))
def test_both_ways_agree(name: str) -> None:
    model, x = CASES[name].build(4)
    by_rows = products(model, x, ROWS)
    assert by_rows.shape[1] == 3
    with mock.patch.object(Linearization, "rows", side_effect=AssertionError):
        torch.testing.assert_close(products(model, x, INNER), by_rows)


def test_gradient_in_the_inputs() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4)).double()
    x = random(5, 2, 4)
    gradients = []
    for way in (ROWS, INNER):
        leaf = x.clone().requires_grad_()
        product = products(model, leaf, way, graph=True)
        gradients.append(torch.autograd.grad(product.square().sum(), leaf)[0])
    torch.testing.assert_close(*gradients)


class Doubled(torch.autograd.Function):
    """An operation whose derivative is correct, but is not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return 2.0 * grad_outputs[0].detach()


class Once(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Doubled.apply(x)
        return result


def test_an_operation_without_second_derivative() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Once(), nn.Tanh(), nn.Linear(4, 4)).double()
    x = random(5, 4)
    torch.testing.assert_close(products(model, x, INNER), products(model, x, ROWS))
