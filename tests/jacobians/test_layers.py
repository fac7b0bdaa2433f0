"""Every closed form, in all its variations, against the dense Jacobian."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from jacobians.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn

from evigrad.jacobians import JacobianPlan, Linearization, linearize, plan

M, K, C = 4, 2, 3


class Wrapped(nn.Module):
    """Something differentiable before and after the layer, so that all gradients are dense."""

    def __init__(self, layer: Callable[..., Tensor], features: int, first: bool) -> None:
        super().__init__()
        self.layer = layer
        self.first = first
        self.mix = nn.Parameter(random(features, C, seed=3) / features**0.5)

    def forward(self, x: Tensor) -> Tensor:
        if not self.first:
            x = x + 0.1 * self.mix.mean() * torch.sin(x)
        return torch.tanh(self.layer(x).flatten(1)) @ self.mix


def randomised(layer: nn.Module) -> nn.Module:
    for i, p in enumerate(layer.parameters()):
        p.data = random(*p.shape, seed=i + 10)
    return layer.double().eval()


def check(layer: nn.Module, x: Tensor, word: str, *, k: int = K, first: bool = False) -> None:
    """The layer's parameters get this closed form, and its rows are right."""
    layer = randomised(layer)
    with torch.no_grad():
        features = layer(x).flatten(1).shape[1]
    model = Wrapped(layer, features, first or not x.is_floating_point())
    weights = weights_of(model)
    made = plan(model, weights, x[:3])
    words = {name: w for name, w in made.describe().items() if name.startswith("layer.")}
    assert words and set(words.values()) == {word}
    vectors = random(len(x), k, C, seed=1)
    expected = rows(jacobian(model, weights, x), vectors)
    assert any(e.norm() > 1e-3 for name, e in expected.items() if name in words)
    linearization = linearize(model, weights, x, made, differentiable=False)
    assert_rows(linearization.rows(vectors), expected)
    check_factors(linearization, made, vectors, expected)


def check_factors(
    linearization: Linearization,
    made: JacobianPlan,
    vectors: Tensor,
    expected: Mapping[str, Tensor],
) -> None:
    """Σ_T gradients ⊗ inputs, summed over the uses, are the rows."""
    factors = linearization.factors(vectors, sorted(made.kronecker))
    for name, uses in factors.items():
        e = expected[name]
        products = [torch.einsum("nkgto,ngti->nkgoi", u.gradients, u.inputs) for u in uses]
        torch.testing.assert_close(
            torch.stack(products).sum(0).reshape(e.shape), e, rtol=1e-10, atol=1e-10
        )


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_linear_with_leading_dimensions(lead: tuple[int, ...], bias: bool, first: bool) -> None:
    check(nn.Linear(3, 2, bias=bias), random(M, *lead, 3), "linear", first=first)


def test_linear_with_as_many_positions_as_data() -> None:
    check(nn.Linear(3, 2), random(M, M, 3), "linear")


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[int, dict, tuple[int, ...]]:
    dims = draw(st.integers(1, 3))

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(dims)]

    groups = draw(st.sampled_from([1, 1, 2, 3]))
    kernel, dilation = each(1, 3), each(1, 2)
    padding: str | tuple[int, ...] = draw(st.sampled_from(["same", "valid", "numbers"]))
    stride = tuple(each(1, 3))
    if padding == "numbers":
        padding = tuple(each(0, 2))
    elif padding == "same":
        stride = (1,) * dims
        # PyTorch itself warns about uneven padding, which has a test of its own.
        kernel = [
            k if k * d % 2 or d == 2 else k - 1 for k, d in zip(kernel, dilation, strict=True)
        ]
    settings = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 2)),
        "kernel_size": tuple(kernel),
        "stride": stride,
        "padding": padding,
        "dilation": tuple(dilation),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "zeros", "replicate", "circular"])),
    }
    size = tuple(
        d * (k - 1) + 1 + draw(st.integers(1, 4)) for k, d in zip(kernel, dilation, strict=True)
    )
    return dims, settings, size


@given(convolutions(), st.booleans(), st.sampled_from([1, 2, 40]))
def test_convolutions(case: tuple[int, dict, tuple[int, ...]], first: bool, k: int) -> None:
    dims, settings, size = case
    assume(min(settings["kernel_size"]) > 0)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](**settings)
    x = random(3, settings["in_channels"], *size)
    check(layer, x, f"conv{dims}d", k=k, first=first)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("k", [1, 3])
def test_convolution_with_uneven_padding(k: int) -> None:
    check(nn.Conv2d(2, 2, (2, 4), padding="same"), random(M, 2, 4, 5), "conv2d", k=k)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_convolution_with_padding_mode(mode: Any) -> None:
    layer = nn.Conv2d(2, 2, 3, padding="same", dilation=2, padding_mode=mode)
    check(layer, random(M, 2, 5, 6), "conv2d")


def test_convolution_whose_stride_leaves_a_rest() -> None:
    check(nn.Conv2d(1, 2, 2, stride=3), random(M, 1, 7, 6), "conv2d")


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("sparse", [False, True])
def test_embedding(shape: tuple[int, ...], padding_idx: int | None, sparse: bool) -> None:
    x = torch.randint(0, 5, (M, *shape), generator=torch.Generator().manual_seed(0))
    x.view(-1)[0], x.view(-1)[-1] = 0, 4  # both paddings occur
    layer = nn.Embedding(5, 2, padding_idx=padding_idx)
    if sparse:
        check_sparse(layer, x)
    else:
        check(layer, x, "embedding")


def check_sparse(layer: nn.Embedding, x: Tensor) -> None:
    """Autograd's sparse gradient is the dense one's."""
    randomised(layer)
    model = Wrapped(layer, layer(x).flatten(1).shape[1], True)
    weights, vectors = weights_of(model), random(M, K, C, seed=1)
    expected = rows(jacobian(model, weights, x), vectors)
    layer.sparse = True
    made = plan(model, weights, x)
    assert made.describe()["layer.weight"] == "embedding"
    assert_rows(linearize(model, weights, x, made, False).rows(vectors), expected)


@pytest.mark.parametrize("shape, size", [((3,), (3,)), ((2, 3), (3,)), ((4, 2, 3), (2, 3))])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(shape: tuple[int, ...], size: Any, bias: bool) -> None:
    check(nn.LayerNorm(size, bias=bias), random(M, *shape), "layer_norm")


@pytest.mark.parametrize("shape, size", [((3,), (3,)), ((4, 2, 3), (2, 3))])
def test_rms_norm(shape: tuple[int, ...], size: Any) -> None:
    check(nn.RMSNorm(size, eps=1e-3), random(M, *shape), "rms_norm")


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2), (4, 2, 1, 3)])
def test_group_norm(shape: tuple[int, ...]) -> None:
    check(nn.GroupNorm(2, 4, eps=1e-3), random(M, *shape), "group_norm")


@pytest.mark.parametrize(
    "layer, shape",
    [
        (nn.BatchNorm1d, (3,)),
        (nn.BatchNorm1d, (3, 4)),
        (nn.BatchNorm2d, (3, 2, 2)),
        (nn.BatchNorm3d, (3, 2, 1, 2)),
    ],
)
def test_batch_norm(layer: Any, shape: tuple[int, ...]) -> None:
    made = layer(3)
    made.running_mean.copy_(random(3))
    made.running_var.copy_(random(3, seed=1).exp())
    check(made, random(M, *shape), "batch_norm")


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize(
    "layer, shape", [(nn.InstanceNorm1d, (3, 4)), (nn.InstanceNorm2d, (3, 2, 3))]
)
def test_instance_norm(layer: Any, shape: tuple[int, ...], track: bool) -> None:
    made = layer(3, affine=True, track_running_stats=track)
    if track:
        made.running_mean.copy_(random(3))
        made.running_var.copy_(random(3, seed=1).exp())
    check(made, random(M, *shape), "instance_norm")


@pytest.mark.parametrize("parameters, shape", [(1, (3,)), (1, (3, 2)), (3, (3,)), (3, (3, 2, 2))])
def test_prelu(parameters: int, shape: tuple[int, ...]) -> None:
    check(nn.PReLU(parameters), random(M, *shape), "prelu")


class Operator(nn.Module):
    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor], shape: Sequence[int]) -> None:
        super().__init__()
        self.operation = operation
        self.p = nn.Parameter(torch.zeros(tuple(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, self.p)


OPERATIONS = {
    "x + p": (lambda x, p: x + p, "add"),
    "p + x": (lambda x, p: p + x, "add"),
    "torch.add": (lambda x, p: torch.add(x, p, alpha=0.3), "add"),
    "torch.add left": (lambda x, p: torch.add(p, x, alpha=0.3), "add"),
    "x.add": (lambda x, p: x.add(p, alpha=-2), "add"),
    "x - p": (lambda x, p: x - p, "sub"),
    "p - x": (lambda x, p: p - x, "sub"),
    "torch.sub": (lambda x, p: torch.sub(x, p, alpha=0.3), "sub"),
    "x * p": (lambda x, p: x * p, "mul"),
    "p * x": (lambda x, p: p * x, "mul"),
    "torch.mul": (lambda x, p: torch.mul(p, x), "mul"),
    "x / p": (lambda x, p: x / p, "div"),
    "p / x": (lambda x, p: p / x, "div"),
}


SHAPES = [(), (1,), (3,), (2, 3), (2, 1), (1, 2, 3), (1, 1, 1)]


@pytest.mark.parametrize(
    ("operation", "shape", "first"),  # each pair of them
    [
        (operation, shape, (i + j) % 2 == 0)
        for i, operation in enumerate(OPERATIONS)
        for j, shape in enumerate(SHAPES)
    ],
)
def test_elementwise(operation: str, shape: tuple[int, ...], first: bool) -> None:
    function, word = OPERATIONS[operation]
    x = random(M, 2, 3)
    x = x + x.sign()  # away from zero, for the quotient
    check(Operator(function, shape), x, word, first=first)


def test_elementwise_parameter_wider_than_the_input() -> None:
    check(Operator(lambda x, p: x * p, (4, 3)), random(M, 1, 3), "mul")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, p: torch.div(x, p, rounding_mode=None),
        lambda x, p: x.clone().add_(p),
        lambda x, p: torch.addcmul(x, x, p),
        lambda x, p: torch.add(x, p.view(3)),
        lambda x, p: x + p * p,
        lambda x, p: x * p.expand(len(x), 2, 3),
    ],
)
def test_elementwise_in_other_words_is_generic(function: Callable) -> None:
    check(Operator(function, (3,)), random(M, 2, 3) + 3, "generic: vmap")
