"""Rules from outside the package: a wrong one is not used, and a warning tells why."""

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn
from torch.overrides import (
    _get_current_function_mode,
    handle_torch_function,
    has_torch_function,
)

from evigrad import Evidence
from evigrad.core.algebra import dot
from evigrad.core.curvature.kronecker import KroneckerUse
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Gaussian
from evigrad.network import Linearization, MatrixUse, plan, spot_check
from evigrad.network.layers import RULES, Match, Rule, aligned, given
from evigrad.network.recorder import Recorder
from evigrad.priors import GaussianPrior


class Bilinear(Rule):
    """z_o = aᵀ W_o b + c_o, with every method that a rule may have."""

    name = "bilinear"
    kronecker = frozenset({"weight"})

    def match(
        self, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Match | None:
        products = (input1[:, :, None] * input2[:, None]).flatten(1)
        return Match(products, given(weight=weight, bias=bias))

    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        if slot == "bias":
            return gradient.sum(2)
        r = torch.einsum("mkpo,mqpi->mkoi", gradient, aligned(match.input, gradient))
        return r.unflatten(3, match.slots["weight"].shape[1:])

    def inner(self, slot: str, match: Match, gradient: Tensor, cotangent: Tensor) -> Tensor:
        if slot == "bias":
            return super().inner(slot, match, gradient, cotangent)
        products = aligned(match.input, gradient)[:, 0]
        return dot(torch.einsum("mpi,mkoi->mkpo", products, cotangent.flatten(3)), gradient)

    def factors(self, match: Match, gradient: Tensor) -> KroneckerUse:
        return KroneckerUse(aligned(match.input, gradient), gradient[:, :, None])

    def matrix(self, use: Any, shape: Any) -> MatrixUse:
        return MatrixUse(use.parts, shape[1] * shape[2], shape[0])


class WrongRows(Bilinear):
    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        return 2 * super().rows(slot, match, gradient)


class RaisingRows(Bilinear):
    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        raise RuntimeError("my bug")


class WrongInner(Bilinear):
    def inner(self, slot: str, match: Match, gradient: Tensor, cotangent: Tensor) -> Tensor:
        return 10 * super().inner(slot, match, gradient, cotangent)


class DetachedInner(Bilinear):
    """The value is right, but only derivatives of the value matter."""

    def inner(self, slot: str, match: Match, gradient: Tensor, cotangent: Tensor) -> Tensor:
        right = super().inner(slot, match, gradient, cotangent)
        return right.detach() + 0 * right if slot == "weight" else right


class WrongFactors(Bilinear):
    def factors(self, match: Match, gradient: Tensor) -> KroneckerUse:
        return KroneckerUse(10 * aligned(match.input, gradient), gradient[:, :, None])


class NoFactors(Bilinear):
    def factors(self, match: Match, gradient: Tensor) -> KroneckerUse:
        return Rule.factors(self, match, gradient)


class WrongProducts(Bilinear):
    def products(self, match: Match, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, g = super().products(match, gradient)
        return a.flip(2), g


class OtherSlot(Bilinear):
    """Kronecker factors need the slot "weight"."""

    kronecker = frozenset({"matrix"})

    def match(self, input1: Tensor, input2: Tensor, weight: Tensor, bias: Any = None) -> Match:
        match = super().match(input1, input2, weight, bias)
        assert match is not None
        return Match(match.input, {"matrix": weight, "bias": bias})

    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        if slot == "bias":
            return gradient.sum(2)
        renamed = Match(match.input, {"weight": match.slots["matrix"]})
        return super().rows("weight", renamed, gradient)

    def inner(self, slot: str, match: Match, gradient: Tensor, cotangent: Tensor) -> Tensor:
        return Rule.inner(self, slot, match, gradient, cotangent)


class OtherSignature(Bilinear):
    def match(self, a: Tensor) -> Match | None:  # type: ignore[override]
        return None


class ForgottenBias(Bilinear):
    def match(self, input1: Tensor, input2: Tensor, weight: Tensor, bias: Any = None) -> Any:
        return super().match(input1, input2, weight, None)


class NoMatch(Bilinear):
    """The parts of a match, but not as a ``Match``."""

    def match(self, input1: Tensor, input2: Tensor, weight: Tensor, bias: Any = None) -> Any:
        match = super().match(input1, input2, weight, bias)
        assert match is not None
        return match.input, match.slots


class RaisingCall(Bilinear):
    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        raise RuntimeError("my bug")


class Pair(nn.Module):
    """A bilinear layer between two linear ones, and a scale of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixed, self.out = nn.Linear(3, 4), nn.Bilinear(4, 4, 3), nn.Linear(3, 2)
        for i, p in enumerate(self.parameters()):
            p.data = random(*p.shape, seed=i) / 2
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x * self.scale.exp()).tanh()
        return self.out(self.mixed(a, a.flip(1)).tanh())


def pair() -> tuple[nn.Module, dict[str, nn.Parameter], Tensor]:
    model = Pair().double().eval()
    return model, weights_of(model, ["scale"]), random(5, 3)


def evidence(estimator: str) -> dict[str, Any]:
    """The log evidence and its gradients."""
    pair_evidence = Evidence(
        Pair().double(),
        Gaussian(),
        GaussianPrior("layerwise"),
        estimator=estimator,
        num_data=5,
        hyperparameters=["scale"],
        generator=0,
    )
    value = pair_evidence.backward(random(5, 3), random(5, 2, seed=1)).log_evidence
    return {"value": value} | {n: p.grad for n, p in pair_evidence.hyperparameters().items()}


def test_a_right_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("full-N-C", "kfac-N-C", "ntk-5-1")
    without = [evidence(name) for name in names]
    monkeypatch.setitem(RULES, F.bilinear, Bilinear())
    model, weights, x = pair()
    jacobian_plan = plan(model, weights, x)
    assert jacobian_plan.words["mixed.weight"] == jacobian_plan.words["mixed.bias"] == "bilinear"
    assert "mixed.weight" in jacobian_plan.kronecker
    for name, before in zip(names, without, strict=True):
        after = evidence(name)
        if name != "kfac-N-C":  # without factors, kfac has the exact block
            for key, value in before.items():
                torch.testing.assert_close(after[key], value, msg=f"{name} {key}")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WrongRows, r"rows\(\.\.\.\) disagrees with automatic differentiation"),
        (RaisingRows, r"raised RuntimeError\('my bug'\)"),
        (WrongInner, r"inner\(\.\.\.\) disagrees with rows"),
        (DetachedInner, r"derivatives of inner\(\.\.\.\) disagree with rows"),
        (WrongFactors, r"factors\(\.\.\.\) disagrees with rows"),
        (NoFactors, r"factors\(\.\.\.\) raised NotImplementedError"),
        (WrongProducts, r"products\(\.\.\.\) disagrees with rows"),
        (OtherSlot, r"factors\(\.\.\.\) raised KeyError\('weight'\)"),
        (OtherSignature, r"match\(\.\.\.\) raised TypeError"),
        (ForgottenBias, "all parameters of the call as slots"),
        (NoMatch, "must be a Match"),
        (RaisingCall, r"call\(\.\.\.\) raised RuntimeError\('my bug'\)"),
    ],
)
def test_a_wrong_rule(
    kind: Callable[[], Rule], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameter takes the generic path, all others keep their closed forms, and it is told."""
    model, weights, x = pair()
    monkeypatch.setitem(RULES, F.bilinear, kind())
    with pytest.warns(EvigradWarning, match=rf"mixed\.weight \(bilinear: .*{reason}"):
        jacobian_plan = plan(model, weights, x)
    assert jacobian_plan.words["mixed.weight"] == "generic: vmap"
    assert jacobian_plan.words["first.weight"] == jacobian_plan.words["out.weight"] == "linear"
    assert jacobian_plan.kronecker == {"first.weight", "out.weight"}
    vectors = random(5, 2, 2)
    linearization = Linearization(model, weights, x, jacobian_plan, False)
    assert_rows(linearization.rows(vectors), rows(jacobian(model, weights, x), vectors))


@pytest.mark.parametrize("kind", [WrongInner, WrongFactors, WrongProducts])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_rule_that_becomes_wrong(
    kind: Callable[[], Rule], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a real pass compares the same methods, for one example."""
    model, weights, x = pair()
    model, x = model.to(dtype), x.to(dtype)
    monkeypatch.setitem(RULES, F.bilinear, Bilinear())
    jacobian_plan = plan(model, weights, x)
    vectors = random(5, 1, 2).to(dtype)

    def wrong() -> set[str]:
        return spot_check(Linearization(model, weights, x, jacobian_plan, False), vectors, 3)

    assert wrong() == set()
    monkeypatch.setitem(RULES, F.bilinear, kind())
    assert "mixed.weight" in wrong()
    assert not wrong() & {"first.weight", "first.bias", "out.weight", "out.bias"}


def test_a_model_that_does_not_use_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, F.bilinear, WrongRows())
    model = nn.Linear(3, 2).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan(model, weights_of(model), random(3, 3)).words["weight"] == "linear"


def test_a_wrong_rule_in_a_model_that_fails_while_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RULES, F.bilinear, ForgottenBias())

    class Checked(Pair):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            if isinstance(_get_current_function_mode(), Recorder):
                raise RuntimeError("an unknown mode")
            return output

    model = Checked().double().eval()
    with pytest.warns(EvigradWarning, match="all parameters of the call as slots"):
        jacobian_plan = plan(model, weights_of(model, ["scale"]), random(3, 3))
    assert set(jacobian_plan.words.values()) == {"generic: vmap"}


def test_a_parameter_with_another_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, F.bilinear, Bilinear())

    class Twice(Pair):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.mixed.weight.sum()

    model = Twice().double().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the rule is right
        jacobian_plan = plan(model, weights_of(model, ["scale"]), random(3, 3))
    assert jacobian_plan.words["mixed.weight"] == "generic: vmap"
    assert jacobian_plan.words["mixed.bias"] == "bilinear"


def gate(x: Tensor, weight: Tensor) -> Tensor:
    """A function that may return its input, as a gate that is closed does."""
    if _get_current_function_mode() is not None or has_torch_function((x, weight)):
        return handle_torch_function(gate, (x, weight), x, weight)
    return x


class Gate(Rule):
    """The rule for a closed gate, whose input is a view of the result."""

    name = "gate"

    def match(self, x: Tensor, weight: Tensor) -> Match | None:
        return Match(x[:, :], {"weight": weight})

    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        return gradient.sum(2) * 0


class Gated(nn.Module):
    """A network with a gate at a tensor that it keeps."""

    position: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position", torch.ones(1, 4))
        self.gate = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + gate(self.position, self.gate)) + 0 * self.gate.sum()


def test_a_tensor_of_the_model_gets_no_graph() -> None:
    model, x = Gated().eval(), random(3, 4).float()
    weights = weights_of(model)
    with mock.patch.dict(RULES, {gate: Gate()}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EvigradWarning)
            jacobian_plan = plan(model, weights, x)
        Linearization(model, weights, x, jacobian_plan, False)
    assert not model.position.requires_grad and model.position.grad_fn is None
