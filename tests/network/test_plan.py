"""What the plan refuses, notices and demotes: a wrong number must not get through in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, EvigradWarning, InputError
from evigrad.network import Linearization, plan
from evigrad.network.layers import RULES, Linear, Match


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()


class Function(nn.Module):
    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.model = model
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self.model, x)


def check_rows(model: nn.Module, jacobian_plan: Any, x: Tensor) -> None:
    weights, vectors = weights_of(model), random(len(x), 2, 2)
    expected = rows(jacobian(model, weights, x), vectors)
    assert_rows(Linearization(model, weights, x, jacobian_plan, False).rows(vectors), expected)


class Doubled(Linear):
    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        return super().rows(slot, match, gradient) * (2 if slot == "weight" else 1)


class Halting(Linear):
    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


class WithoutDerivative(Linear):
    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        gradient = gradient.detach() if slot == "weight" else gradient
        return super().rows(slot, match, gradient)


@pytest.mark.parametrize(
    "rule, weight, bias, reason",
    [
        (
            Doubled,
            "generic: vmap",
            "linear",
            r"rows\(\.\.\.\) disagrees with automatic differentiation",
        ),
        (WithoutDerivative, "generic: vmap", "linear", "derivatives of rows"),
        (Halting, "generic: vmap", "generic: vmap", "raised ZeroDivisionError"),
    ],
)
def test_a_wrong_closed_form_is_not_used(
    rule: type[Linear], weight: str, bias: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, F.linear, rule())
    model, x = two_layers(), random(5, 3)
    with pytest.warns(EvigradWarning, match=rf"0\.weight \(linear: .*{reason}"):
        jacobian_plan = plan(model, weights_of(model), x)
    assert jacobian_plan.describe()["0.weight"] == weight
    assert jacobian_plan.describe()["0.bias"] == bias
    check_rows(model, jacobian_plan, x)


@pytest.mark.parametrize("probe", [1, 2, 3, 7])
def test_any_number_of_probes(probe: int) -> None:
    model, x = two_layers(), random(7, 3)
    jacobian_plan = plan(model, weights_of(model), x[:probe])
    assert set(jacobian_plan.describe().values()) == {"linear"}
    assert jacobian_plan.kronecker == {"0.weight", "2.weight"}
    for m in (1, 2, 7):
        check_rows(model, jacobian_plan, x[:m])


def test_names_keep_the_order_of_the_weights() -> None:
    model, x = two_layers(), random(4, 3)
    weights = dict(reversed(weights_of(model).items()))
    jacobian_plan = plan(model, weights, x)
    linearization = Linearization(model, weights, x, jacobian_plan, False)
    assert (
        list(jacobian_plan.describe()) == list(linearization.rows(random(4, 1, 2))) == list(weights)
    )


def test_subset_of_the_weights() -> None:
    model, x = two_layers(), random(4, 3)
    weights = {"0.weight": model.get_parameter("0.weight")}
    jacobian_plan = plan(model, weights, x)
    vectors = random(4, 2, 2)
    expected = rows(jacobian(model, weights, x), vectors)
    assert_rows(Linearization(model, weights, x, jacobian_plan, False).rows(vectors), expected)


def test_parameter_used_otherwise_than_planned() -> None:
    """The network takes another branch for some data: other uses, and one that no rule knows."""

    def forward(model: Any, x: Tensor) -> Tensor:
        if x.sum() > 100:
            return model[2](torch.tanh(x @ model[0].weight))
        if x.sum() < -100:
            return model[2](model[0](model[0](x)))
        return model(x)

    model, x = Function(two_layers(), forward), random(4, 3) / 4
    jacobian_plan = plan(model, weights_of(model), x)
    assert jacobian_plan.describe()["model.0.weight"] == "linear"
    for shift in (0, 200, -200):
        check_rows(model, jacobian_plan, x + shift)
    linearization = Linearization(model, weights_of(model), x + 200, jacobian_plan, False)
    linearization.factors(random(4, 1, 2), ["model.2.weight"])
    with pytest.raises(InputError, match="uses this parameter differently than in the plan"):
        linearization.factors(random(4, 1, 2), ["model.0.weight"])


def test_inputs_of_another_shape_than_planned() -> None:
    """T positions in front of the data: with this T and m, dim 0 looks like the data."""

    def forward(model: Any, x: Tensor) -> Tensor:
        return model(x.transpose(0, 1) if x.dim() == 3 else x.unsqueeze(1)).sum(
            0 if x.dim() == 3 else 1
        )

    model = Function(two_layers(), forward)
    jacobian_plan = plan(model, weights_of(model), random(3, 3))
    assert jacobian_plan.describe()["model.0.weight"] == "linear"
    check_rows(model, jacobian_plan, random(4, 4, 3))


@pytest.mark.parametrize("k", [1, 3])
def test_rows_may_be_taken_again_and_again(k: int) -> None:
    model, x = two_layers(), random(4, 3)
    weights = weights_of(model)
    linearization = Linearization(model, weights, x, plan(model, weights, x), False)
    first = linearization.rows(random(4, k, 2))
    linearization.factors(random(4, k, 2), ["0.weight"])
    linearization.rows(random(4, k, 2, seed=1))
    assert_rows(linearization.rows(random(4, k, 2)), first)


def test_one_forward_pass_where_everything_is_closed() -> None:
    passes = []
    model, x = two_layers(), random(4, 3)
    weights = weights_of(model)
    jacobian_plan = plan(model, weights, x)
    model.register_forward_hook(lambda *_: passes.append(1))
    linearization = Linearization(model, weights, x, jacobian_plan, False)
    linearization.rows(random(4, 2, 2))
    linearization.factors(random(4, 2, 2), ["0.weight"])
    assert len(passes) == 1


def test_unknown_name() -> None:
    model, x = two_layers(), random(4, 3)
    weights = weights_of(model)
    linearization = Linearization(model, weights, x, plan(model, weights, x), False)
    with pytest.raises(ConfigurationError, match=r"'0\.wieght'.*'0\.weight'"):
        linearization.rows(random(4, 1, 2), ["0.wieght"])
    with pytest.raises(ConfigurationError, match="no Kronecker factors"):
        linearization.factors(random(4, 1, 2), ["0.bias"])


@pytest.mark.parametrize(
    "forward, message",
    [
        (lambda model, x: model(x)[:, 0], r"f\[:, None\]"),
        (lambda model, x: model(x)[:, :, None], "the same shape for inputs"),
        (lambda model, x: model(x).T, "must be the example"),
        (lambda model, x: model(x).sum(), "must be the example"),
        (lambda model, x: (model(x), x), "a tuple"),
        (lambda model, x: {"logits": model(x)}, "a dict"),
    ],
)
def test_outputs_of_another_shape(forward: Callable, message: str) -> None:
    model = Function(two_layers(), forward)
    with pytest.raises(InputError, match=message):
        plan(model, weights_of(model), random(5, 3))
    model.function, made_of = lambda model, x: model(x), model.function
    jacobian_plan = plan(model, weights_of(model), random(5, 3))
    model.function = made_of
    with pytest.raises(InputError, match=message):
        Linearization(model, weights_of(model), random(5, 3), jacobian_plan, False)


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, x: model(x - x.mean(0)),
        lambda model, x: model(F.dropout(x, 0.5)),
        lambda model, x: (
            F.batch_norm(model(x), None, None, training=True) if len(x) > 1 else model(x)
        ),
    ],
)
def test_data_that_mix_or_chance_are_refused(forward: Callable) -> None:
    model = Function(two_layers(), forward)
    state = torch.get_rng_state()
    with pytest.raises(ConfigurationError, match="other examples of\\s+the batch"):
        plan(model, weights_of(model), random(5, 3))
    torch.set_rng_state(state)


def test_no_data() -> None:
    model = two_layers()
    weights = weights_of(model)
    for x in (random(0, 3), random()):
        with pytest.raises(InputError, match="x is empty or a scalar"):
            plan(model, weights, x)
    with pytest.raises(InputError, match="x is empty or a scalar"):
        Linearization(model, weights, random(0, 3), plan(model, weights, random(3, 3)), False)


def test_weights_that_are_none() -> None:
    model, x = two_layers(), random(4, 3)
    jacobian_plan = plan(model, weights_of(model), x)
    for weights in (
        {"0.wieght": model.get_parameter("0.weight")},
        {"0.weight": nn.Parameter(model.get_parameter("0.weight").detach())},
    ):
        for call in (
            lambda w: plan(model, w, x),
            lambda w: Linearization(model, w, x, jacobian_plan, False),
        ):
            with pytest.raises(ConfigurationError, match="not the model.s current parameter"):
                call(weights)
    weights = weights_of(model)
    weights["0.weight"].requires_grad_(False)
    with pytest.raises(ConfigurationError, match="requires a gradient"):
        Linearization(model, weights, x, jacobian_plan, False)


def test_no_gradients_in_inference_mode() -> None:
    model, x = two_layers(), random(4, 3)
    jacobian_plan = plan(model, weights_of(model), x)
    with torch.inference_mode(), pytest.raises(ConfigurationError, match="inference_mode"):
        Linearization(model, weights_of(model), x, jacobian_plan, False)


def test_hook_on_a_gradient() -> None:
    model = two_layers()
    handle = model.get_parameter("0.weight").register_hook(lambda g: 2 * g)
    with pytest.raises(ConfigurationError, match="hook"):
        plan(model, weights_of(model), random(4, 3))
    handle.remove()
    plan(model, weights_of(model), random(4, 3))
