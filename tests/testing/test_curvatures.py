"""``check_curvature``: every structure passes, and planted errors are reported."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traces import Traces

from evigrad.core.curvature import (
    BlockDiagonal,
    BlockKernel,
    Curvature,
    Diagonal,
    Full,
    Kfac,
    Ntk,
    make_curvature,
)
from evigrad.core.curvature.base import Differential
from evigrad.core.curvature.dense import BlockStatistic
from evigrad.core.names import STRUCTURES
from evigrad.core.protocols import Purpose
from evigrad.errors import ConfigurationError, ConformanceError, InputError
from evigrad.network import matrix_uses, plan
from evigrad.passes.parameter_blocks import partition_names
from evigrad.testing import check_curvature
from evigrad.testing.comparison import random


class Net(nn.Module):
    """Two layers at two positions, and a parameter of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        for i, p in enumerate(self.parameters()):
            p.data = random(*p.shape, seed=i)

    def forward(self, x: Tensor) -> Tensor:
        return (self.b(self.a(x).tanh()) * self.scale).sin().sum(1)


NET, X = Net(), random(5, 2, 3)
WEIGHTS = dict(NET.named_parameters())
NAMES = list(WEIGHTS)
PLAN = plan(NET, WEIGHTS, X)
CONTRACTED = {name: uses[0].numbers for name, uses in matrix_uses(PLAN, WEIGHTS).items()}
ALONE = {name: name for name in WEIGHTS}
SHARED = {"a.weight": 0, "a.bias": 0, "b.weight": 1, "scale": 1}
GROUPS = {"first": ["a"], "second": ["b", "scale"]}
_NUMBERS = random(2).exp()
OF_GROUPS = {name: _NUMBERS[group].clone() for name, group in SHARED.items()}
OF_GROUPS |= {"a.bias": OF_GROUPS["a.weight"], "scale": OF_GROUPS["b.weight"]}


def partitioned(partition: Any) -> BlockDiagonal:
    return BlockDiagonal(WEIGHTS, partition_names(NAMES, partition))


def over(blocks: Sequence[Sequence[str]]) -> Callable[[Tensor, Tensor], Tensor]:
    """The sum of log|P0 + H| − log|P0| over blocks of weights."""
    numels = [weight.numel() for weight in WEIGHTS.values()]
    places = dict(zip(NAMES, torch.arange(13).split(numels), strict=True))

    def log_det(h: Tensor, precision: Tensor) -> Tensor:
        total = -precision.log().sum()
        for block in blocks:
            chosen = torch.cat([places[name] for name in block])
            matrix = h[chosen][:, chosen] + precision[chosen].diag()
            total = total + torch.linalg.slogdet(matrix)[1]
        return total

    return log_det


def of_diagonal(h: Tensor, precision: Tensor) -> Tensor:
    return (h.diagonal() / precision).log1p().sum()


def of_traces(h: Tensor, precision: Tensor) -> Tensor:
    numels = [w.numel() for w in WEIGHTS.values()]
    blocks = zip(h.diagonal().split(numels), precision.split(numels), strict=True)
    return torch.stack([len(b) * (b.sum() / (len(b) * p[0])).log1p() for b, p in blocks]).sum()


class ScalarTraces(Traces):
    def log_det(self, statistic: Any, precisions: Mapping[str, Tensor]) -> Tensor:
        if any(p.ndim for n, p in precisions.items() if n != "scale"):
            raise ConfigurationError("Precisions must be numbers.")
        return super().log_det(statistic, precisions)


# A curvature, a reference (None: that of an exact curvature), and precisions (None: any).
Case = tuple[Curvature[Any], Any, Any]
TENSORS = [[name] for name in NAMES]
MODULES = [["a.weight", "a.bias"], ["b.weight"], ["scale"]]
OF_TWO = [["a.weight", "a.bias"], ["b.weight", "scale"]]
PARTITIONS = {"tensor": TENSORS, "module": MODULES, "groups": OF_TWO}
CASES: dict[str, Case] = {
    "ntk": (Ntk(WEIGHTS, ALONE), None, None),
    "ntk of groups": (Ntk(WEIGHTS, SHARED), None, OF_GROUPS),
    "ntk of varying precisions": (Ntk(WEIGHTS, {}), None, None),
    "ntk of some varying precisions": (
        Ntk(WEIGHTS, {"a.bias": 0, "b.weight": 1, "scale": 1}),
        None,
        OF_GROUPS | {"a.weight": random(2, 3).exp()},
    ),
    "ntk of contracted rows": (Ntk(WEIGHTS, SHARED, contracted=CONTRACTED), None, OF_GROUPS),
    "full": (Full(WEIGHTS), None, None),
    "full by rows": (BlockKernel(Full(WEIGHTS), WEIGHTS, {}), None, None),
    "diag": (Diagonal(WEIGHTS), of_diagonal, None),
    "traces": (ScalarTraces(WEIGHTS), of_traces, None),
}
for _name, _blocks in PARTITIONS.items():
    _dense = partitioned(GROUPS if _name == "groups" else _name)
    CASES[_name] = (_dense, over(_blocks), None)
    _kernel = BlockKernel(_dense, WEIGHTS, ALONE if _name == "tensor" else {})
    CASES[f"{_name} by rows"] = (_kernel, over(_blocks), None)
_contracted = BlockKernel(partitioned("module"), WEIGHTS, ALONE, None, CONTRACTED)
CASES["module by contracted rows"] = (_contracted, over(MODULES), None)
for _sharing in ("expand", "reduce"):
    for _limit in (0, 100):
        _kfac = Kfac(WEIGHTS, PLAN.kronecker, {}, _sharing, None, _limit)
        CASES[f"kfac, {_sharing}, {_limit}"] = (_kfac, None, None)


# Each structure once; further partitions by rows, and the other limit of kfac, are long.
FURTHER = ["ntk of some varying precisions", "tensor by rows", "groups", "groups by rows"]
FURTHER += ["module by rows", "kfac, expand, 100", "kfac, reduce, 100"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in FURTHER)) for name in CASES],
)
def test_every_structure(name: str) -> None:
    curvature, log_det, precisions = CASES[name]
    check_curvature(curvature, NET, X, precisions=precisions, log_det=log_det)


def test_names_lead_to_these_structures() -> None:
    kinds = {type(curvature) for curvature, _, _ in CASES.values()}
    for name in STRUCTURES:
        assert type(make_curvature(name, WEIGHTS, kronecker=PLAN.kronecker)) in kinds


# ------------------------------------------------------------------ planted errors


class Planted(Traces):
    log_det_is = "approximate"

    def changed(self, statistic: Any, factor: Any) -> Any:
        return BlockStatistic({name: factor * block for name, block in statistic.blocks.items()})


class Forgets(Planted):
    def collect(self, statistic: Any, *arguments: Any, **keywords: Any) -> Any:
        return super().collect(None, *arguments, **keywords)


class Means(Planted):
    def collect(self, statistic: Any, linearization: Any, root: Any) -> Any:
        part = super().collect(None, linearization, root)
        part = self.changed(part, 1 / len(root.vectors))
        if statistic is None:
            return part
        return BlockStatistic({n: statistic.blocks[n] + b for n, b in part.blocks.items()})


class Overwrites(Planted):
    def collect(self, statistic: Any, *arguments: Any, **keywords: Any) -> Any:
        total = super().collect(statistic, *arguments, **keywords)
        if statistic is None:
            return total
        for name, block in statistic.blocks.items():
            block.copy_(total.blocks[name])
        return statistic


class Unscaled(Planted):
    def collect(self, statistic: Any, linearization: Any, root: Any) -> Any:
        return super().collect(statistic, linearization, replace(root, scale=None))


class CountsRows(Planted):
    def collect(self, statistic: Any, linearization: Any, root: Any) -> Any:
        total = super().collect(statistic, linearization, root)
        return self.changed(total, 1 + 0.1 * root.vectors.shape[1])


class DetachedRows(Planted):
    def collect(self, *arguments: Any, **keywords: Any) -> Any:
        total = super().collect(*arguments, **keywords)
        return total.with_tensors([tensor.detach() for tensor in total.tensors()])


class Plain(Planted):
    def collect(self, *arguments: Any, **keywords: Any) -> Any:
        return super().collect(*arguments, **keywords).blocks


class Negative(Planted):
    def log_det(self, *arguments: Any, **keywords: Any) -> Tensor:
        return -super().log_det(*arguments, **keywords)


class DetachedPrecisions(Planted):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        return super().log_det(statistic, {n: p.detach() for n, p in precisions.items()})


class OneDetachedPrecision(Planted):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        detached = {"a.bias": precisions["a.bias"].detach()}
        return super().log_det(statistic, {**precisions, **detached})


class NoBound(Traces):
    def log_det(self, *arguments: Any, **keywords: Any) -> Tensor:
        return super().log_det(*arguments, **keywords) / 10


class NotExact(Traces):
    log_det_is = "exact"


class Purposes(Planted):
    def empty(self, purpose: Purpose, num_data: int) -> Any:
        is_other = purpose is Purpose.STEPS
        return BlockStatistic({n: torch.tensor(0.1 * is_other).double() for n in self.sizes})


class Cotangents(Planted):
    def differentiate(self, statistic: Any, *arguments: Any, **keywords: Any) -> Differential:
        result = super().differentiate(statistic, *arguments, **keywords)
        return replace(result, cotangent=self.changed(result.cotangent, 1.01))


class Gradients(Planted):
    def differentiate(self, *arguments: Any, **keywords: Any) -> Differential:
        result = super().differentiate(*arguments, **keywords)
        return replace(result, gradients=[g + 0.1 for g in result.gradients if g is not None])


class Inner(Planted):
    def inner(self, cotangent: Any, data: slice, linearization: Any, root: Any) -> Tensor:
        root = replace(root, scale=root.scale.detach())
        return super().inner(cotangent, data, linearization, root)


class Rescaled(Planted):
    def rescaled(self, statistic: Any, precisions: Any, scale: Tensor, parameters: Any) -> Any:
        return super().rescaled(statistic, precisions, scale.sqrt(), parameters)


class Reduced(BlockStatistic):
    def reduced(self, total: Any) -> Any:
        tensors = total(self.tensors())
        return self.with_tensors([tensor / 2 for tensor in tensors])


class Ranks(Planted):
    def collect(self, statistic: Any, *arguments: Any, **keywords: Any) -> Any:
        return Reduced(super().collect(statistic, *arguments, **keywords).blocks)


class Anchors(Ntk):
    def conditional(self, statistic: Any, precisions: Any, conditioning: Any) -> Any:
        conditioning = copy.copy(conditioning)
        object.__setattr__(conditioning, "weights", (3.5, 0.3))
        return super().conditional(statistic, precisions, conditioning)


class Random(Planted):
    """Its draws are the same in every call of the suite."""

    def log_det(self, *arguments: Any, **keywords: Any) -> Tensor:
        return super().log_det(*arguments, **keywords) * (1 + 0.1 * torch.rand(()))


PLANTED: dict[type[Any], str] = {
    Forgets: "log_det of Forgets of several micro-batches must be .*, a difference of",
    Means: "log_det of Means of several micro-batches",
    Overwrites: "Overwrites",
    Unscaled: "log_det of Unscaled of scaled vectors",
    CountsRows: "log_det of CountsRows",
    DetachedRows: "derivative of log_det of DetachedRows along a direction of the vectors",
    Plain: "collect of Plain must return a Statistic, got a dict",
    Negative: "log_det of Negative, which must not be negative, must be 0, got -",
    DetachedPrecisions: "derivative of log_det of .* with respect to the precision of 'scale'",
    OneDetachedPrecision: "derivative of log_det of .* with respect to the precision of 'a.bias'",
    NoBound: "log_det of NoBound, an upper bound on ℓ",
    NotExact: "log_det of NotExact, compared with the reference",
    Purposes: "log_det of Purposes with Purpose.STEPS",
    Cotangents: "derivative by differentiate and inner of Cotangents with respect to the vectors",
    Gradients: "derivative by differentiate and inner of Gradients with respect to the precision",
    Inner: "derivative by differentiate and inner of Inner with respect to the scales",
    Rescaled: "log_det of Rescaled with rescaled",
    Ranks: "log_det of Ranks of a sum over ranks by reduced",
    Anchors: "conditional of Anchors",
}


@pytest.mark.parametrize("kind", PLANTED, ids=lambda kind: kind.__name__)
def test_a_planted_error(kind: type[Any]) -> None:
    curvature = kind(WEIGHTS, ALONE) if issubclass(kind, Ntk) else kind(WEIGHTS)
    numbers = {name: random(seed=i).exp() for i, name in enumerate(WEIGHTS)}
    with pytest.raises(ConformanceError, match=PLANTED[kind]):
        check_curvature(curvature, NET, X, precisions=numbers)


def test_a_wrong_reference_random_numbers_and_few_inputs() -> None:
    numbers = {name: random(seed=i).exp() for i, name in enumerate(WEIGHTS)}
    state, net = torch.get_rng_state(), copy.deepcopy(NET).float()
    before = copy.deepcopy(net.state_dict())
    check_curvature(Random(WEIGHTS), net, X.float(), precisions=numbers)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(ConformanceError, match="log_det of Diagonal, compared with the reference"):
        check_curvature(Diagonal(WEIGHTS), NET, X, log_det=lambda h, p: h.trace() + p.sum())
    with pytest.raises(InputError, match="at least 3 examples, got 2"):
        check_curvature(Diagonal(WEIGHTS), NET, X[:2])
