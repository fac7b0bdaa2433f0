"""Layers that see several parts of each datum in dim 0."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from network.calls import Folded, M, called, check_folded
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn

from evigrad.network import Linearization, convolutions, plan


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d"])
def test_convolutions_of_one_datum_at_a_time(name: str) -> None:
    layer, shape = called(name)
    with mock.patch.object(convolutions, "_WORTH_A_CALL", 0):
        check_folded(Folded(layer, 3), random(M, *shape), name)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
def test_any_number_of_parts(parts: int) -> None:
    """Also where their number is that of the data."""
    check_folded(Folded(nn.Linear(3, 2), parts), random(M, 3), "linear")


@pytest.mark.parametrize("body", ["linear", "conv2d", "mul", "group_norm"])
def test_parts_of_all_data_side_by_side_are_found_out(body: str) -> None:
    layer, shape = called(body)
    jacobian_plan = check_folded(Folded(layer, 3, major="samples"), random(M, *shape), None)
    assert all(word.startswith("generic") for word in jacobian_plan.describe().values())


def test_a_length_that_does_not_grow_with_the_data() -> None:
    """Dim 0 is 6 for 2 data and for 3."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            table = self.inner(torch.linspace(-1, 1, 18).to(x).reshape(6, 3))
            return self.head(torch.tanh(x)) * torch.tanh(table).sum(0)

    torch.manual_seed(0)
    model, x = Table().double(), random(6, 3)
    weights = weights_of(model)
    jacobian_plan = plan(model, weights, x[:3])
    assert jacobian_plan.describe()["inner.weight"].startswith("generic")
    for m in (6, 3, 2, 1):
        vectors = random(m, 2, 2)
        expected = rows(jacobian(model, weights, x[:m]), vectors)
        assert_rows(
            Linearization(model, weights, x[:m], jacobian_plan, False).rows(vectors), expected
        )


def test_another_number_of_parts_than_planned_is_not_closed() -> None:
    model, x = Folded(nn.Linear(3, 2), 3).double(), random(M, 3)
    weights = weights_of(model, ["gate"])
    jacobian_plan = plan(model, weights, x)
    model.parts = 2
    linearization = Linearization(model, weights, x, jacobian_plan, False)
    assert not linearization.is_closed("body.weight")
    vectors = random(M, 2, 2)
    assert_rows(linearization.rows(vectors), rows(jacobian(model, weights, x), vectors))


def test_derivatives() -> None:
    model: Any = Folded(nn.Conv2d(2, 2, 2), 3).double()
    x, vectors = random(M, 2, 3, 3), random(M, 2, 2).requires_grad_()
    weights = weights_of(model, ["gate"])
    jacobian_plan = plan(model, weights, x)
    arguments = [vectors, model.gate]
    cotangents = {name: random(M, 2, *w.shape, seed=4) for name, w in weights.items()}
    expected = rows(jacobian(model, weights, x, graph=True), vectors)
    linearization = Linearization(model, weights, x, jacobian_plan, True)
    actual = linearization.rows(vectors)
    values = [
        sum(((r[name] * c).sum() for name, c in cotangents.items()), start=torch.zeros(()))
        for r in (expected, actual)
    ]
    values.append(linearization.inner(vectors, cotangents))
    slopes = [torch.autograd.grad(v, arguments, retain_graph=True) for v in values]
    for actual_slopes in slopes[1:]:
        for a, e in zip(actual_slopes, slopes[0], strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


@pytest.mark.each(1)
@pytest.mark.parametrize("body, index", [("linear", 0), ("linear", 1), ("conv2d", 0)])
@pytest.mark.parametrize("parts, samples", [(3, 3), (6, 3), (6, 1), (3, 2)])
def test_factors_over_samples(body: str, index: int, parts: int, samples: int) -> None:
    """Means of inputs and sums of gradients over the samples; other parts are positions."""
    layer, shape = called(body, index)
    model: Any = Folded(layer, parts, samples).double()
    x, vectors, weights = random(M, *shape), random(M, 2, 2), weights_of(model, ["gate"])
    jacobian_plan = plan(model, weights, x)
    assert "body.weight" in jacobian_plan.kronecker
    linearization = Linearization(model, weights, x, jacobian_plan, False)
    (use,) = linearization.factors(vectors, ["body.weight"])["body.weight"]
    seen: list[Tensor] = []
    handle = model.body.register_forward_hook(lambda _, args, out: seen.extend((args[0], out)))
    outputs = model(x)
    handle.remove()
    a, z = seen
    shares = samples if parts % samples == 0 else 1
    columns = [
        torch.autograd.grad(outputs, z, vectors[:, j], retain_graph=True)[0] for j in range(2)
    ]
    a = a.unflatten(0, (M, shares, -1)).mean(1).flatten(0, 1)
    g = torch.stack([c.unflatten(0, (M, shares, -1)).sum(1) for c in columns], 1)
    if body == "conv2d":
        a = torch.nn.functional.unfold(a, (3, 2), padding=1, stride=2).mT
        g = g.flatten(4).mT
        a, g = a.unflatten(2, (2, -1)), g.unflatten(4, (2, -1))  # (m F, T, G, i), (.., T, G, o)
    else:
        a, g = a.reshape(len(a), -1, 1, a.shape[-1]), g.reshape(*g.shape[:3], -1, 1, g.shape[-1])
    a = a.detach().unflatten(0, (M, -1)).flatten(1, 2).transpose(1, 2)
    torch.testing.assert_close(use.inputs, a)
    torch.testing.assert_close(use.gradients, g.flatten(2, 3).transpose(2, 3))


def test_functional_call_inside() -> None:
    """Patches of an image as further data, through a plain function."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(random(2, 1, 2, 2))
            self.gate = nn.Parameter(torch.tensor(0.7))
            self.body = nn.Module()

        def forward(self, x: Tensor) -> Tensor:
            patches = (x * self.gate).unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5)
            f = torch.tanh(F.conv2d(patches.flatten(0, 2), self.weight))
            return f.reshape(len(x), -1, 2).sum(1)

    check_folded(Patches(), random(M, 1, 4, 4), "conv2d")
