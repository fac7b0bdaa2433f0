"""Every closed form, in all its variations, against the dense Jacobian."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from network.calls import CALLS, Called, Folded, check_folded
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn

from evigrad.network import (
    JacobianPlan,
    Linearization,
    Recorder,
    plan,
)
from evigrad.network.layers import RULES
from evigrad.network.linearization import _Columns
from evigrad.network.ownership import _STEPS, _VIEWS, traced

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
    jacobian_plan = plan(model, weights, x[:3])
    words = {name: w for name, w in jacobian_plan.describe().items() if name.startswith("layer.")}
    assert words and set(words.values()) == {word}
    vectors = random(len(x), k, C, seed=1)
    expected = rows(jacobian(model, weights, x), vectors)
    assert any(e.norm() > 1e-3 for name, e in expected.items() if name in words)
    linearization = Linearization(model, weights, x, jacobian_plan, differentiable=False)
    assert_rows(linearization.rows(vectors), expected)
    check_factors(linearization, jacobian_plan, vectors, expected)


def check_factors(
    linearization: Linearization,
    jacobian_plan: JacobianPlan,
    vectors: Tensor,
    expected: Mapping[str, Tensor],
) -> None:
    """Σ_T gradients ⊗ inputs, summed over the uses, are the rows."""
    factors = linearization.factors(vectors, sorted(jacobian_plan.kronecker))
    for name, uses in factors.items():
        e = expected[name]
        products = [torch.einsum("nkgto,ngti->nkgoi", u.gradients, u.inputs) for u in uses]
        products = [p.mT if u.transposed else p for p, u in zip(products, uses, strict=True)]
        torch.testing.assert_close(
            torch.stack(products).sum(0).reshape(e.shape), e, rtol=1e-10, atol=1e-10
        )


def test_calls_are_known_for_every_rule() -> None:
    assert {rule.name for rule in RULES.values()} == CALLS.keys()


@pytest.mark.parametrize("function", RULES, ids=lambda function: function.__name__)
def test_every_closed_form(function: Callable[..., Tensor]) -> None:
    """In a network, and what ``ownership`` knows of the function."""
    rule = RULES[function]
    for case in CALLS[rule.name]:
        for parts in case.parts:
            model = Folded(Called(function, case), parts, tokens=case.tokens)
            x = case.inputs(M)
            jacobian_plan = check_folded(model, x, rule.name)
            assert jacobian_plan.kronecker == {f"body.{slot}" for slot in rule.kronecker}
            check_ownership(model, x)


def check_ownership(model: nn.Module, x: Tensor) -> None:
    """The graph alone tells the data of each call, those in front of the layer's too."""
    with Recorder(weights_of(model), len(x)) as recorder:
        outputs = model(x)
    owned_ids, nodes, _ = traced(outputs, recorder.calls)
    supported = {"AccumulateGrad", *(f"{operation}Backward0" for operation in (*_STEPS, *_VIEWS))}
    unknown = sorted({node.name() for node in nodes} - supported)
    assert len(owned_ids) == len(recorder.calls), f"ownership has no step for one of {unknown}"


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


def test_a_sparse_embedding() -> None:
    """Autograd's sparse gradient is the dense one's."""
    layer: Any = randomised(nn.Embedding(5, 2))
    x = torch.tensor([[0, 4], [1, 1], [2, 3], [4, 0]])
    model = Wrapped(layer, layer(x).flatten(1).shape[1], True)
    weights, vectors = weights_of(model), random(M, K, C, seed=1)
    expected = rows(jacobian(model, weights, x), vectors)
    layer.sparse = True
    jacobian_plan = plan(model, weights, x)
    assert jacobian_plan.describe()["layer.weight"] == "embedding"
    assert_rows(Linearization(model, weights, x, jacobian_plan, False).rows(vectors), expected)


class Operator(nn.Module):
    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor], shape: Sequence[int]) -> None:
        super().__init__()
        self.operation = operation
        self.p = nn.Parameter(torch.zeros(tuple(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, self.p)


class Shifted(nn.Module):
    """A number added to all of a tensor, and another that scales it, as in Fixup networks."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(random(1))
        self.scale = nn.Parameter(random(1, seed=1))
        self.other = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x.sin() + self.shift) * self.scale


def test_sums_over_gradients_do_not_copy_them() -> None:
    """On the paper's ResNets, the copies took a quarter of a step."""
    model, x = randomised(nn.Sequential(Shifted(), nn.Flatten())), random(M, 2, 3, 3)
    weights, vectors = weights_of(model), random(M, K, 18, seed=1)
    jacobian_plan = plan(model, weights, x)
    sums = [f"0.{name}" for name in ("shift", "scale", "other.bias")]
    with mock.patch.object(_Columns, "stacked", side_effect=AssertionError):
        linearization = Linearization(model, weights, x, jacobian_plan, differentiable=False)
        computed = linearization.rows(vectors, sums)
    expected = rows(jacobian(model, weights, x), vectors)
    assert_rows(computed, {name: expected[name] for name in sums})


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
        lambda x, p: x * p.broadcast_to(len(x), 2, 3),
    ],
)
def test_elementwise_in_other_words_is_generic(function: Callable) -> None:
    check(Operator(function, (3,)), random(M, 2, 3) + 3, "generic: vmap")


class Places(nn.Module):
    """A learned vector for each place of a sequence, looked up once for all data."""

    def __init__(self, repeat: bool = False, flat: bool = False) -> None:
        super().__init__()
        self.places, self.repeat, self.flat = nn.Embedding(5, 3), repeat, flat

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.arange(x.shape[1])
        places = self.places(numbers if self.flat else numbers[None])
        if self.repeat:  # which repeated indices would not fit
            places = places.repeat(len(x), 1, 1)
        return (x + places).tanh()


def test_an_embedding_of_places() -> None:
    check(Places(), random(M, 4, 3), "embedding")
    for length in (2, 3, 4):  # as many places as data are in a probe, and here
        word = "embedding" if length == 4 else "generic: vmap"
        check(Places(flat=True), random(4, length, 3), word)
    model = randomised(nn.Sequential(Places(repeat=True), nn.Flatten(), nn.Linear(12, 2)))
    words = plan(model, weights_of(model), random(M, 4, 3)).describe()
    assert words["0.places.weight"].startswith("generic") and words["2.weight"] == "linear"


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear((x @ self.weight).tanh(), self.weight)


def test_a_weight_used_in_both_directions_has_no_kronecker_factors() -> None:
    model = randomised(BothWays())
    jacobian_plan = plan(model, weights_of(model), random(M, 3))
    assert jacobian_plan.describe() == {"weight": "matmul + linear"} and not jacobian_plan.kronecker
