"""``check_rule``: every rule of the package passes, and planted errors are reported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network import test_custom_rules as custom
from network.calls import CALLS, Called
from torch import Tensor, nn

from evigrad.errors import ConformanceError, InputError
from evigrad.network import MatrixUse
from evigrad.network.layers import RULES, Match, Rule
from evigrad.testing import check_rule
from evigrad.testing.comparison import random

# The arguments belong to the first function of each rule. test_layers calls the others.
FUNCTIONS = {rule.name: function for function, rule in reversed(RULES.items())}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CALLS)
def test_every_rule(name: str) -> None:
    function = FUNCTIONS[name]
    for case in CALLS[name]:
        for parts in case.parts:
            args, kwargs = Called(function, case).arguments(case.inputs(5 * parts))
            check_rule(RULES[function], function, args, kwargs, parts=parts)


class DetachedRows(custom.Bilinear):
    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        return super().rows(slot, match, gradient.detach())


class DetachedFactors(custom.Bilinear):
    def factors(self, match: Match, gradient: Tensor) -> Any:
        return super().factors(match, gradient).detach()


class FirstExample(custom.Bilinear):
    """Rows of an example depend on the number of examples."""

    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        rows = super().rows(slot, match, gradient)
        return rows if len(rows) > 1 else 2 * rows


class WrongSizes(custom.Bilinear):
    def matrix(self, use: Any, shape: Any) -> MatrixUse:
        return MatrixUse(use.parts, shape[0], shape[1] * shape[2])


class WrongCall(custom.Bilinear):
    def call(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        return function(*args, **kwargs).detach()


class Views(custom.Bilinear):
    def match(self, input1: Tensor, input2: Tensor, weight: Tensor, bias: Any = None) -> Any:
        return super().match(input1, input2, weight[:], bias)


class Settings(custom.Bilinear):
    def match(self, input1: Tensor, input2: Tensor, weight: Tensor, bias: Any = None) -> Any:
        match = super().match(input1, input2, weight, bias)
        assert match is not None
        return Match(match.input, match.slots, {"size": len(input1)})


PLANTED: dict[Callable[[], Rule], str] = {
    custom.WrongRows: r"rows of bilinear, slot 'weight' at index \[.* must be .* a difference of",
    DetachedRows: "derivative of rows of bilinear, slot 'weight' with respect to the gradient",
    custom.WrongInner: "inner of bilinear, slot 'weight'",
    custom.DetachedInner: "derivative of inner of bilinear, slot 'weight' with respect to",
    custom.WrongFactors: "^factors of bilinear at index",
    DetachedFactors: "derivative of factors of bilinear",
    custom.WrongProducts: "^products of bilinear at index",
    WrongSizes: "^matrix of bilinear at index",
    custom.OtherSlot: "kronecker of bilinear must contain only the slot 'weight', got 'matrix'",
    custom.ForgottenBias: "slots must be the 2 parameters of the call themselves, got .'weight'",
    Views: "slots must be the 2 parameters of the call themselves",
    custom.NoMatch: "match of bilinear must return a Match for these arguments, got",
    FirstExample: "^rows of bilinear",
    WrongCall: "derivative of call of bilinear with respect to argument 0",
    Settings: "settings must be the same in every batch, got {'size': 4}",
}


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_a_planted_error(kind: Callable[[], Rule]) -> None:
    layer = nn.Bilinear(3, 2, 2)
    call = (random(4, 3), random(4, 2), layer.weight, layer.bias)
    check_rule(custom.Bilinear(), F.bilinear, call)
    with pytest.raises(ConformanceError, match=PLANTED[kind]):
        check_rule(kind(), F.bilinear, call)


def silent(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale


class Scale(Rule):
    name = "scale"

    def match(self, x: Tensor, scale: Tensor) -> Match:
        return Match(x, {"scale": scale})

    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        return (gradient * match.input[:, None, None]).sum(2)


def test_functions_that_are_not_reported_and_bad_arguments() -> None:
    call = (random(4, 3), nn.Parameter(torch.ones(3)))
    with pytest.raises(ConformanceError, match="does not report calls of silent.*wrap_torch_func"):
        check_rule(Scale(), silent, call)
    wrapped = torch.overrides.wrap_torch_function(lambda x, scale: (x, scale))(silent)
    check_rule(Scale(), wrapped, call)
    with pytest.raises(InputError, match="not a multiple of 3 parts"):
        check_rule(Scale(), wrapped, call, parts=3)
    with pytest.raises(InputError, match=r"must contain the weights as nn.Parameter, got none"):
        check_rule(Scale(), wrapped, (call[0], torch.ones(3)))
