"""Derivatives of the rows in hyperparameters, inputs and vectors."""

import pytest
import torch
from network.dense import functional, gradients, jacobian, random, rows, weights_of
from torch import Tensor, nn
from zoo import CASES, HYPERPARAMETERS

from evigrad.network import Linearization, plan


@pytest.mark.parametrize("case", ["conv2d", "linear-leading", "layer-norm", "transposed", "gru"])
def test_gradients_equal_finite_differences(case: str) -> None:
    model, x = CASES[case].build(3)
    model.eval()
    weights = weights_of(model, HYPERPARAMETERS)
    jacobian_plan = plan(model, weights, x)
    vectors = random(3, 2, 3)
    value = functional(Linearization(model, weights, x, jacobian_plan, True).rows(vectors))
    names = [n for n in HYPERPARAMETERS if hasattr(model, n)]
    for name, gradient in zip(
        names, gradients(value, [getattr(model, n) for n in names]), strict=True
    ):
        hyperparameter = getattr(model, name)
        direction = random(*hyperparameter.shape, seed=7)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                hyperparameter += step * direction
            values.append(
                functional(Linearization(model, weights, x, jacobian_plan, False).rows(vectors))
            )
            with torch.no_grad():
                hyperparameter -= step * direction
        slope = (values[0] - values[1]) / 2e-5
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("columns", [1, 40])
def test_convolution_rows_have_right_derivatives_both_ways(columns: int) -> None:
    """Few columns go through grouped convolutions, many through patches."""
    body = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.Tanh())
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(4 * 16, 3)).double()
    weights, x = weights_of(model), random(3, 2, 8, 8).requires_grad_()
    jacobian_plan = plan(model, weights, x)
    assert jacobian_plan.describe()["0.0.weight"] == "conv2d"
    vectors = random(3, columns, 3)
    actual = functional(Linearization(model, weights, x, jacobian_plan, True).rows(vectors))
    expected = functional(rows(jacobian(model, weights, x, graph=True), vectors))
    torch.testing.assert_close(*(gradients(v, [x])[0] for v in (actual, expected)))


class NormalisedInside(nn.Module):
    """A layer norm that no closed form covers, since dim 0 is not the data there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(x.transpose(0, 1))).transpose(0, 1).flatten(1))


def test_first_derivatives_do_not_vouch_for_second_ones() -> None:
    """Rows of a layer norm under vmap are right, but in torch 2.13 their derivatives are not."""
    model, x = NormalisedInside().double(), random(3, 2, 4).requires_grad_()
    weights, vectors = weights_of(model), random(3, 2, 3)
    actual = Linearization(model, weights, x, plan(model, weights, x), True).rows(vectors)
    expected = rows(jacobian(model, weights, x, graph=True), vectors)
    for name, e in expected.items():
        a = actual[name]
        torch.testing.assert_close(a, e)
        for slope, right in zip(
            gradients(functional({name: a}), [x]) if a.requires_grad else [torch.zeros_like(x)],
            gradients(functional({name: e}), [x]) if e.requires_grad else [torch.zeros_like(x)],
            strict=True,
        ):
            torch.testing.assert_close(slope, right, msg=name)


def test_factors_have_the_derivatives_of_the_rows() -> None:
    model, x = CASES["conv2d"].build(3)
    model.eval()
    weights = weights_of(model, HYPERPARAMETERS)
    jacobian_plan = plan(model, weights, x)
    vectors = random(3, 2, 3)
    linearization = Linearization(model, weights, x, jacobian_plan, differentiable=True)
    name, arguments = "body.weight", [model.gate, model.input_scale]
    (use,) = linearization.factors(vectors, [name])[name]
    product = torch.einsum("nkgto,ngti->nkgoi", use.gradients, use.inputs)
    row = linearization.rows(vectors, [name])[name]
    for a, e in zip(
        gradients(functional({name: product.reshape(row.shape)}), arguments),
        gradients(functional({name: row}), arguments),
        strict=True,
    ):
        assert e.norm() > 1e-6
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("case", ["conv2d", "lstm", "transposed"])
def test_without_derivatives_everything_is_detached(case: str) -> None:
    model, x = CASES[case].build(3)
    model.eval()
    weights = weights_of(model, HYPERPARAMETERS)
    jacobian_plan = plan(model, weights, x)
    linearization = Linearization(
        model, weights, x.requires_grad_(), jacobian_plan, differentiable=False
    )
    vectors = random(3, 2, 3).requires_grad_()
    assert not linearization.outputs.requires_grad
    assert not any(r.requires_grad for r in linearization.rows(vectors).values())
    for uses in linearization.factors(vectors, sorted(jacobian_plan.kronecker)).values():
        assert not any(u.inputs.requires_grad or u.gradients.requires_grad for u in uses)


@pytest.mark.parametrize("differentiable", [False, True])
def test_inside_no_grad(differentiable: bool) -> None:
    """Callers may have switched gradients off; the rows need them all the same."""
    model, x = CASES["conv2d"].build(3)
    model.eval()
    weights, vectors = weights_of(model, HYPERPARAMETERS), random(3, 2, 3)
    expected = rows(jacobian(model, weights, x), vectors)
    with torch.no_grad():
        jacobian_plan = plan(model, weights, x)
        linearization = Linearization(model, weights, x, jacobian_plan, differentiable)
        actual = linearization.rows(vectors)
    for name, e in expected.items():
        torch.testing.assert_close(actual[name], e)
        assert actual[name].requires_grad == (
            differentiable and name.startswith(("body", "head.w"))
        )
