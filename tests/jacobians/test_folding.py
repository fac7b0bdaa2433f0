"""Layers that see several parts of each datum in dim 0."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from jacobians.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn

from evigrad.invariances.noise import sampled
from evigrad.jacobians import convolutions, linearize, plan, spot_check

M = 4


class Folded(nn.Module):
    """body applied to every part of a datum, (m, F, ...), and a mean over the parts of a head."""

    def __init__(
        self, body: nn.Module, parts: int, samples: int = 1, major: str = "data", tokens: int = 0
    ) -> None:
        super().__init__()
        self.body = body
        self.parts, self.samples, self.major = parts, samples, major
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        # Every part is another one, as augmentation samples of a datum are.
        if self.tokens:
            shifts = torch.arange(self.parts, device=x.device)
            x = (x[:, None] + shifts.reshape(-1, *[1] * (x.dim() - 1))) % self.tokens
        else:
            shifts = torch.linspace(0.5, 1.5, self.parts).to(x)
            x = torch.sin(
                self.gate * x[:, None] * shifts.reshape(-1, *[1] * (x.dim() - 1)) + shifts[0]
            )
        m = len(x)
        x = x if self.major == "data" else x.transpose(0, 1)
        with sampled(self.samples):
            f = torch.tanh(self.body(x.flatten(0, 1)).flatten(1))
        f = f.unflatten(0, (m, -1) if self.major == "data" else (-1, m))
        f = f.mean(1 if self.major == "data" else 0)
        return f.unflatten(1, (2, -1)).sum(2)


class Loose(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]):
        super().__init__()
        self.function = function
        self.p = nn.Parameter(random(*shape) + 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.p)


def batch_norm(size: int) -> nn.Module:
    layer = nn.BatchNorm2d(size)
    assert layer.running_mean is not None
    layer.running_mean.copy_(random(size))
    return layer


BODIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "linear-leading": (lambda: nn.Linear(3, 2), (2, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 2, 3, padding=1), (2, 4)),
    "conv2d": (lambda: nn.Conv2d(2, 4, (3, 2), stride=2, padding=1, groups=2), (2, 4, 5)),
    "conv2d-reflect": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (1, 3, 4)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 2, 3, 2)),
    "layer_norm": (lambda: nn.LayerNorm([2, 3]), (2, 2, 3)),
    "rms_norm": (lambda: nn.RMSNorm(4), (4,)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (4, 3)),
    "instance_norm": (lambda: nn.InstanceNorm1d(2, affine=True), (2, 4)),
    "batch_norm": (lambda: batch_norm(2), (2, 2, 3)),
    "prelu": (lambda: nn.PReLU(2), (2, 3)),
    "prelu-one": (lambda: nn.PReLU(), (2, 3)),
    "add": (lambda: Loose(lambda x, p: torch.add(x, p, alpha=2), (4,)), (2, 4)),
    "mul": (lambda: Loose(lambda x, p: x * p, (3, 4)), (3, 4)),
    "mul-of-a-column": (lambda: Loose(lambda x, p: x * p, (3, 1)), (3, 4)),
    "mul-with-batch-dimension": (lambda: Loose(lambda x, p: p * x, (1, 3, 4)), (3, 4)),
    "mul-one": (lambda: Loose(lambda x, p: x * p, ()), (4,)),
    "div": (lambda: Loose(lambda x, p: x / p, (1, 4)), (2, 4)),
    "div-under": (lambda: Loose(lambda x, p: p / (x + 3), (4,)), (2, 4)),
}


def check(model: Any, x: Tensor, word: str | None) -> Any:
    """Right rows, inner products and spot checks, by this closed form."""
    model = model.double().eval()
    for i, p in enumerate(model.body.parameters()):
        p.data = p + random(*p.shape, seed=i)
    weights = weights_of(model, ["gate"])
    made = plan(model, weights, x[:3])
    words = set(made.describe().values())
    if word is not None:
        assert words == {word}
    jac = jacobian(model, weights, x)
    for m, k in ((len(x), 1), (2, 3), (1, 1)):
        vectors = random(m, k, 2, seed=k)
        linearization = linearize(model, weights, x[:m], made, differentiable=False)
        assert all(linearization.is_closed(name) for name in made.uses)
        expected = rows({name: j[:m] for name, j in jac.items()}, vectors)
        assert any(e.norm() > 1e-3 for e in expected.values())
        assert_rows(linearization.rows(vectors), expected)
        cotangents = {name: random(*e.shape, seed=9) for name, e in expected.items()}
        value = sum((e * cotangents[name]).sum() for name, e in expected.items())
        torch.testing.assert_close(linearization.inner(vectors, cotangents), value)
        assert not spot_check(linearization, vectors, m - 1)
    return made


@pytest.mark.parametrize(
    "body, each", [(b, False) for b in BODIES] + [(b, True) for b in BODIES if b.startswith("conv")]
)
def test_closed_forms(body: str, each: bool) -> None:
    build, shape = BODIES[body]
    with mock.patch.object(convolutions, "_WORTH_A_CALL", 0 if each else 2**62):
        check(Folded(build(), 3), random(M, *shape), body.partition("-")[0])


def test_embedding() -> None:
    x = torch.randint(0, 5, (M, 3), generator=torch.Generator().manual_seed(0))
    check(Folded(nn.Embedding(5, 2, padding_idx=1), 3, tokens=5), x, "embedding")


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6])
def test_any_number_of_parts(parts: int) -> None:
    """Also where their number is that of the data."""
    check(Folded(nn.Linear(3, 2), parts), random(M, 3), "linear")


@pytest.mark.parametrize("body", ["linear", "conv2d", "mul", "group_norm"])
def test_parts_of_all_data_side_by_side_are_found_out(body: str) -> None:
    build, shape = BODIES[body]
    made = check(Folded(build(), 3, major="samples"), random(M, *shape), None)
    assert all(word.startswith("generic") for word in made.describe().values())


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
    made = plan(model, weights, x[:3])
    assert made.describe()["inner.weight"].startswith("generic")
    for m in (6, 3, 2, 1):
        vectors = random(m, 2, 2)
        expected = rows(jacobian(model, weights, x[:m]), vectors)
        assert_rows(linearize(model, weights, x[:m], made, False).rows(vectors), expected)


def test_another_number_of_parts_than_planned_is_not_closed() -> None:
    model, x = Folded(nn.Linear(3, 2), 3).double(), random(M, 3)
    weights = weights_of(model, ["gate"])
    made = plan(model, weights, x)
    model.parts = 2
    linearization = linearize(model, weights, x, made, False)
    assert not linearization.is_closed("body.weight")
    vectors = random(M, 2, 2)
    assert_rows(linearization.rows(vectors), rows(jacobian(model, weights, x), vectors))


def test_derivatives() -> None:
    model: Any = Folded(nn.Conv2d(2, 2, 2), 3).double()
    x, vectors = random(M, 2, 3, 3), random(M, 2, 2).requires_grad_()
    weights = weights_of(model, ["gate"])
    made = plan(model, weights, x)
    arguments = [vectors, model.gate]
    cotangents = {name: random(M, 2, *w.shape, seed=4) for name, w in weights.items()}
    expected = rows(jacobian(model, weights, x, graph=True), vectors)
    linearization = linearize(model, weights, x, made, True)
    actual = linearization.rows(vectors)
    values = [
        sum(((r[name] * c).sum() for name, c in cotangents.items()), start=torch.zeros(()))
        for r in (expected, actual)
    ]
    values.append(linearization.inner(vectors, cotangents))
    slopes = [torch.autograd.grad(v, arguments, retain_graph=True) for v in values]
    for found in slopes[1:]:
        for a, e in zip(found, slopes[0], strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("body", ["linear", "linear-leading", "conv2d"])
@pytest.mark.parametrize("parts, samples", [(3, 3), (6, 3), (6, 1), (3, 2)])
def test_factors_over_samples(body: str, parts: int, samples: int) -> None:
    """Means of inputs and sums of gradients over the samples; other parts are positions."""
    build, shape = BODIES[body]
    model: Any = Folded(build(), parts, samples).double()
    x, vectors, weights = random(M, *shape), random(M, 2, 2), weights_of(model, ["gate"])
    made = plan(model, weights, x)
    assert "body.weight" in made.kronecker
    linearization = linearize(model, weights, x, made, False)
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

    check(Patches(), random(M, 1, 4, 4), "conv2d")
