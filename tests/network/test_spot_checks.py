"""One datum of a real pass against plain autograd: what planning could not see must show."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn
from zoo import HYPERPARAMETERS

from evigrad.errors import ConfigurationError
from evigrad.network import Linearization, demote, plan, spot_check
from evigrad.network.layers import RULES, Linear, Match


class Net(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.zeros(3))
        self.double()
        self.kept = [self.first.weight]
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def plain(net: Any, x: Tensor) -> Tensor:
    return net.last(torch.tanh(net.first(x)))


def sorting(net: Any, x: Tensor) -> Tensor:
    """The last layer works on sorted data."""
    order = x[:, 0].argsort(stable=True)
    return net.last(torch.tanh(net.first(x))[order])[order.argsort()]


def check(model: nn.Module, x: Tensor, jacobian_plan: Any, index: int, k: int = 2) -> set[str]:
    weights = weights_of(model, HYPERPARAMETERS)
    linearization = Linearization(model, weights, x, jacobian_plan, False)
    vectors = random(len(x), k, linearization.outputs.shape[1]).to(linearization.outputs)
    return spot_check(linearization, vectors, index)


@pytest.mark.parametrize("differentiable", [False, True])
def test_sorted_data_that_were_tied_in_planning(differentiable: bool) -> None:
    model, x = Net(sorting), random(6, 3)
    tied = x.clone()
    tied[:, 0] = 1.0
    weights = weights_of(model)
    jacobian_plan = plan(model, weights, tied[:3])
    assert jacobian_plan.words["last.weight"] == "linear"
    linearization = Linearization(model, weights, x, jacobian_plan, differentiable)
    vectors, last_names = random(6, 2, 3), {"last.weight", "last.bias"}
    # The rows are right in the pass itself, whose owners are known: there is nothing to be found.
    assert {name for name in jacobian_plan.uses if not linearization.is_closed(name)} == last_names
    expected = rows(jacobian(model, weights, x), vectors)
    assert_rows({name: r.detach() for name, r in linearization.rows(vectors).items()}, expected)
    assert all(spot_check(linearization, vectors, i) == set() for i in range(6))

    mended = demote(jacobian_plan, last_names)
    assert mended.words == {**jacobian_plan.words, **dict.fromkeys(last_names, "generic: loop")}
    assert mended.kronecker == jacobian_plan.kronecker - {"last.weight"} == {"first.weight"}
    assert not last_names & set(mended.uses)
    actual = Linearization(model, weights, x, mended, False).rows(vectors)
    assert_rows(actual, rows(jacobian(model, weights, x), vectors))
    assert check(model, x, mended, 0) == set()


def test_vectorised_rows_that_miss_a_kept_reference() -> None:
    model: Any = Net(lambda net, x: net.last(torch.tanh(x @ net.kept[0].mT)))
    x, weights = random(5, 3), weights_of(model)
    jacobian_plan = plan(model, weights, x[:3])
    assert jacobian_plan.words["first.weight"] == "generic: loop"
    wrong = replace(
        jacobian_plan,
        words={**jacobian_plan.words, "first.weight": "generic: vmap"},
        vectorised=frozenset({"first.weight"}),
    )
    assert check(model, x, wrong, 4) == {"first.weight"}
    assert demote(wrong, {"first.weight"}) == replace(
        jacobian_plan, demoted=frozenset({"first.weight"})
    )


def test_vectorised_rows_that_raise() -> None:
    model: Any = Net(
        lambda net, x: net.last(torch.tanh(x @ net.first.weight.mT)) if x.sum() > 0 else x
    )
    x, weights = random(5, 3).abs(), weights_of(model)
    jacobian_plan = plan(model, weights, x[:3])
    wrong = replace(jacobian_plan, vectorised=frozenset({"first.weight"}))
    wrong = replace(wrong, words={**jacobian_plan.words, "first.weight": "generic: vmap"})
    assert check(model, x, wrong, 1) == {"first.weight"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_that_are_wrong_for_certain_inputs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(Linear):
        def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
            right = super().rows(slot, match, gradient)
            if slot == "bias" or match.input.shape[1] != 3:
                return right
            return right * (1 + (match.input[:, 0] > 5).to(right))[:, None, None, None]

    monkeypatch.setitem(RULES, F.linear, Wrong())
    model, x = Net(plain).to(dtype), random(6, 3).to(dtype)
    jacobian_plan = plan(model, weights_of(model), x[:3])
    assert jacobian_plan.words["first.weight"] == "linear"
    x[4:, 0] = 10
    assert check(model, x, jacobian_plan, 1) == set()
    assert check(model, x, jacobian_plan, 4) == {"first.weight"}


@pytest.mark.parametrize("index", [0, 4])
def test_data_that_mix_in_larger_batches(index: int) -> None:
    model = Net(lambda net, x: plain(net, x - x.mean(0) if len(x) > 3 else x))
    x = random(5, 3)
    jacobian_plan = plan(model, weights_of(model), x[:3])
    with pytest.raises(ConfigurationError, match="other examples of\\s+the batch"):
        check(model, x, jacobian_plan, index)


def test_no_false_alarm_in_single_precision() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inner in (3, 64, 64, 64):
        layers += [nn.Linear(inner, 64), nn.LayerNorm(64), nn.ReLU()]
    model, x = nn.Sequential(*layers, nn.Linear(64, 3)), torch.randn(64, 3)
    jacobian_plan = plan(model, weights_of(model), x[:3])
    assert not any(check(model, x, jacobian_plan, index) for index in range(64))


def test_nothing_is_run_where_all_goes_through_the_loop() -> None:
    model, x = Net(plain), random(5, 3)
    weights = weights_of(model)
    jacobian_plan = demote(plan(model, weights, x[:3]), list(weights))
    assert set(jacobian_plan.describe().values()) == {"generic: loop"}
    linearization = Linearization(model, weights, x, jacobian_plan, False)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    assert spot_check(linearization, random(5, 2, 3), 0) == set()
    assert not passes
    assert_rows(
        linearization.rows(random(5, 2, 3)), rows(jacobian(model, weights, x), random(5, 2, 3))
    )


def test_one_pass_of_one_datum() -> None:
    model, x = Net(plain), random(5, 3)
    weights = weights_of(model)
    jacobian_plan = plan(model, weights, x[:3])
    linearization = Linearization(model, weights, x, jacobian_plan, False)
    sizes = []
    model.register_forward_hook(lambda module, args, output: sizes.append(len(args[0])))
    assert spot_check(linearization, random(5, 2, 3), 2) == set()
    assert sizes == [1]


def test_demoting_an_unused_parameter() -> None:
    model, x = Net(plain), random(5, 3)
    jacobian_plan = plan(model, weights_of(model), x[:3])
    assert jacobian_plan.words["shift"] == "unused"
    assert check(model, x, jacobian_plan, 0) == set()
    mended = demote(jacobian_plan, {"shift"})
    vectors = random(5, 2, 3)
    actual = Linearization(model, weights_of(model), x, mended, False).rows(vectors)
    assert_rows(actual, rows(jacobian(model, weights_of(model), x), vectors))


def test_demoting_an_unknown_name() -> None:
    model = Net(plain)
    jacobian_plan = plan(model, weights_of(model), random(3, 3))
    with pytest.raises(ConfigurationError, match=r"'lats\.weight'.*'last\.weight'"):
        demote(jacobian_plan, {"lats.weight"})


def test_rows_whose_squares_overflow_are_not_compared() -> None:
    model, x = nn.Linear(3, 2).double(), random(6, 3)
    jacobian_plan = plan(model, weights_of(model), x[:3])
    for scale in (1.0, 1e160, 1e200):
        assert check(model, scale * x, jacobian_plan, 3) == set()
