"""Mixed precision: closed forms of low-precision passes, in the type of the parameters."""

from typing import Any

import pytest
import torch
from network.dense import random, weights_of
from torch import Tensor, nn

from evigrad.invariances.noise import sampled
from evigrad.network import Linearization, plan, spot_check

M, C = 6, 4


class Net(nn.Module):
    def __init__(self, samples: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Parameter(torch.tensor(0.3))
        self.samples = samples
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.body = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, bias=False),
            nn.GroupNorm(2, 8),
            nn.PReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * 9, 16),
            nn.LayerNorm(16),
            nn.Tanh(),
        )
        self.head = nn.Linear(16, C)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sin(x * self.gate.exp())
        shifts = torch.linspace(0.9, 1.1, self.samples)[:, None, None, None]
        with sampled(self.samples):
            f = self.head(self.body((x[:, None] * shifts).flatten(0, 1)) * self.scale)
        return f.unflatten(0, (-1, self.samples)).mean(1)


def relative(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
def test_bfloat16(samples: int, inside: bool) -> None:
    """Rows, factors and inner products, asked for inside of autocast or outside."""
    model = Net(samples).eval()
    weights, x = weights_of(model, ["gate"]), random(M, 2, 6, 6).float()
    jacobian_plan = plan(model, weights, x)
    assert not any(word.startswith("generic") for word in jacobian_plan.describe().values())
    vectors = random(M, 2, C).float()
    cotangents = {n: 1e-12 * random(M, 2, *w.shape).float() for n, w in weights.items()}

    exact = Linearization(model, weights, x, jacobian_plan, differentiable=True)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = Linearization(model, weights, x, jacobian_plan, differentiable=True)
    assert coarse.mixed and not exact.mixed
    assert coarse.outputs.dtype == torch.float32
    assert all(coarse.is_closed(name) for name in weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        rows, factors = (
            coarse.rows(vectors),
            coarse.factors(vectors, sorted(jacobian_plan.kronecker)),
        )
        inner = coarse.inner(vectors, cotangents)
    expected = exact.rows(vectors)
    for name, row in rows.items():
        assert row.dtype == torch.float32
        assert 0 < relative(row, expected[name]) < 0.04, name
    right = torch.stack([(rows[n] * c).sum() for n, c in cotangents.items()])
    assert abs(inner - right.sum()) < 0.02 * right.norm()
    (slope,) = torch.autograd.grad(inner, model.gate, retain_graph=True)
    (expected_slope,) = torch.autograd.grad(right.sum(), model.gate, retain_graph=True)
    parts = [torch.autograd.grad(r, model.gate, retain_graph=True)[0] for r in right[1:]]
    assert abs(slope - expected_slope) < 0.05 * torch.stack(parts).norm()

    for name, uses in exact.factors(vectors, sorted(jacobian_plan.kronecker)).items():
        for use, of_coarse in zip(uses, factors[name], strict=True):
            pairs: list[tuple[Any, Any]] = [
                (of_coarse.inputs, use.inputs),
                (of_coarse.gradients, use.gradients),
                (of_coarse.source.gram(torch.float32), use.source.gram(torch.float32)),
                (of_coarse.source.sum(torch.float32), use.source.sum(torch.float32)),
            ]
            for a, e in pairs:
                assert a.dtype == torch.float32
                assert relative(a, e) < 0.04, name
            cotangent = torch.eye(use.inputs.shape[-1])[None].expand(use.inputs.shape[1], -1, -1)
            value = of_coarse.source.inner_gram(cotangent)
            assert relative(value, use.source.inner_gram(cotangent)) < 0.02


def test_a_plan_under_autocast_is_the_same() -> None:
    model = Net(2).eval()
    weights, x = weights_of(model, ["gate"]), random(M, 2, 6, 6).float()
    jacobian_plan = plan(model, weights, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert plan(model, weights, x) == jacobian_plan


def test_spot_checks_are_exact() -> None:
    """Rounding raises no alarm."""
    model = Net(2).eval()
    weights, x = weights_of(model, ["gate"]), random(M, 2, 6, 6).float()
    jacobian_plan = plan(model, weights, x)
    vectors = random(M, 2, C).float()
    with torch.autocast("cpu", torch.bfloat16):
        linearization = Linearization(model, weights, x, jacobian_plan, differentiable=False)
        assert not spot_check(linearization, vectors, 3)
    assert not spot_check(linearization, vectors, 3)


def test_generic_rows_are_exact() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(75, C))
    weights, x = weights_of(model), random(M, 2, 4, 4).float()
    jacobian_plan = plan(model, weights, x)
    assert jacobian_plan.describe()["0.weight"].startswith("generic")
    vectors = random(M, 2, C).float()
    with torch.autocast("cpu", torch.bfloat16):
        rows = Linearization(model, weights, x, jacobian_plan, False).rows(vectors)
    expected = Linearization(model, weights, x, jacobian_plan, False).rows(vectors)
    for name, row in rows.items():
        assert relative(row, expected[name]) < (1e-6 if name.startswith("0") else 0.04), name


def test_half_precision_elsewhere_has_no_closed_form() -> None:
    """A result in another type without autocast is not known to be a rounded one."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x.double() * self.p).float())

    model, x = Cast(), random(M, 3).float()
    weights = weights_of(model)
    assert plan(model, weights, x).describe()["p"].startswith("generic")
