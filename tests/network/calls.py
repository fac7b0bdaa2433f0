"""Arguments to call every function of ``RULES`` with, and a network around each call.

A rule that is added there needs an entry of its name in ``CALLS``, and nothing else, to be tested.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn

from evigrad.invariances.noise import sampled
from evigrad.network import Linearization, plan, spot_check
from evigrad.network.layers import RULES

M = 4


@dataclass(frozen=True)
class Case:
    """A call of a function: its input, its parameters, and what else it takes.

    Attributes:
        shape: Of a datum's input; integers below ``tokens`` if that is not 0.
        slots: Shapes of the parameters by their names; "other" and "input" are the right and the
            left of two positional arguments, the other one being the input.
        settings: Further arguments.
        tokens: How many different integers the input may hold.
        parts: How many parts of each datum to call it with, one time after the other.
        order: Of the input, "x", and the parameters where all are positional arguments.
    """

    shape: tuple[int, ...]
    slots: Mapping[str, tuple[int, ...]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 0
    parts: tuple[int, ...] = (1, 3)
    order: tuple[str, ...] = ()

    def inputs(self, m: int) -> Tensor:
        """Inputs of m data."""
        if not self.tokens:
            return random(m, *self.shape)
        return torch.arange(m * prod(self.shape)).reshape(m, *self.shape) % self.tokens


def affine(*size: int) -> dict[str, tuple[int, ...]]:
    return {"weight": size, "bias": size}


STATISTICS = {"running_mean": random(4), "running_var": random(4, seed=1).exp()}
OPERATOR = [
    Case((2, 3), {"other": (3,)}, parts=(1,)),
    Case((2, 3), {"input": (2, 1)}, parts=(3,)),
    Case((2, 3), {"other": (1, 2, 3)}, parts=(3,)),
    Case((2, 3), {"input": ()}, parts=(1,)),
    Case((2, 3), {"input": (1, 1, 1)}, parts=(3,)),
]
# By the names of the rules.
CALLS: dict[str, list[Case]] = {
    "linear": [
        Case((3,), {"weight": (4, 3), "bias": (4,)}),
        Case((2, 3), {"weight": (2, 3), "bias": (2,)}),
        Case((4, 3), {"weight": (2, 3)}),  # as many positions as data
        Case((2, 1, 3), {"weight": (4, 3), "bias": (4,)}),
    ],
    "addmm": [
        Case((3,), {"weight": (3, 4), "bias": (4,)}, order=("bias", "x", "weight")),
    ],
    "matmul": [
        Case((3,), {"weight": (3, 4)}, order=("x", "weight")),
        Case((4,), {"weight": (4, 4)}, order=("x", "weight")),
    ],
    "conv1d": [Case((2, 4), {"weight": (2, 2, 3), "bias": (2,)}, {"padding": 1})],
    "conv2d": [
        Case(
            (2, 4, 5),
            {"weight": (4, 1, 3, 2), "bias": (4,)},
            {"stride": 2, "padding": 1, "groups": 2},
        ),
        Case((1, 3, 4), {"weight": (2, 1, 3, 3)}, {"padding": "same"}),
    ],
    "conv3d": [Case((1, 2, 3, 2), {"weight": (2, 1, 2, 2, 2), "bias": (2,)})],
    "embedding": [
        Case((), {"weight": (5, 2)}, tokens=5),
        Case((3,), {"weight": (5, 2)}, {"padding_idx": 1}, tokens=5),
        Case((2, 3), {"weight": (5, 2)}, {"padding_idx": -1}, tokens=5),
    ],
    "layer_norm": [
        Case((4,), {"weight": (4,)}, {"normalized_shape": (4,)}),
        Case((2, 2, 3), affine(2, 3), {"normalized_shape": (2, 3)}),
    ],
    "rms_norm": [
        Case((4,), {"weight": (4,)}, {"normalized_shape": (4,), "eps": 1e-3}),
        Case((4, 2, 3), {"weight": (2, 3)}, {"normalized_shape": (2, 3), "eps": 1e-3}),
    ],
    "group_norm": [
        Case((4, 3), affine(4), {"num_groups": 2, "eps": 1e-3}),
        Case((4,), affine(4), {"num_groups": 2, "eps": 1e-3}),
        Case((4, 2, 1, 3), affine(4), {"num_groups": 2, "eps": 1e-3}),
    ],
    "batch_norm": [
        Case((4,), affine(4), STATISTICS),
        Case((4, 3), affine(4), STATISTICS),
        Case((4, 2, 1, 2), affine(4), STATISTICS),
    ],
    "instance_norm": [
        Case((2, 4), affine(2)),
        Case((4, 2, 3), affine(4), {**STATISTICS, "use_input_stats": False}),
    ],
    "prelu": [
        Case((4,), {"weight": (1,)}),
        Case((3, 2), {"weight": (1,)}),
        Case((4,), {"weight": (4,)}),
        Case((3, 2, 2), {"weight": (3,)}),
    ],
    "expand": [
        Case((2, 3), {"input": (1, 2, 3)}),
        Case((2, 3), {"input": (2, 1)}),
        Case((2,), {"input": ()}),
    ],
    "add": OPERATOR,
    "sub": OPERATOR,
    "mul": OPERATOR,
    "div": OPERATOR,
}


class Called(nn.Module):
    """One call of a function."""

    def __init__(self, function: Callable[..., Tensor], case: Case) -> None:
        super().__init__()
        self.function, self.case = function, case
        for i, (slot, shape) in enumerate(case.slots.items()):
            value = random(*shape, seed=i)
            value = 1 + value.abs() if slot in ("input", "other") else value  # for a divisor
            self.register_parameter(slot, nn.Parameter(value))

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the call."""
        slots, settings = dict(self.named_parameters()), dict(self.case.settings)
        if self.case.order:
            return tuple(({"x": x} | slots)[name] for name in self.case.order), {}
        if self.function is Tensor.expand:
            return (slots["input"], *x.shape), {}
        if "other" in slots:
            return (x, slots["other"]), settings
        if "input" in slots:
            return (slots["input"], x.exp()), settings
        return (x,), slots | settings

    def forward(self, x: Tensor) -> Tensor:
        args, kwargs = self.arguments(x)
        output = self.function(*args, **kwargs)
        return x * output if self.function is Tensor.expand else output


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


def called(name: str, index: int = 0) -> tuple[nn.Module, tuple[int, ...]]:
    """A call by a rule of this name, and the shape of a datum's input."""
    function, case = next(f for f, rule in RULES.items() if rule.name == name), CALLS[name][index]
    return Called(function, case), case.shape


def check_folded(model: Any, x: Tensor, word: str | None) -> Any:
    """Right rows, inner products and spot checks, by this closed form."""
    model = model.double().eval()
    weights = weights_of(model, ["gate"])
    jacobian_plan = plan(model, weights, x[:3])
    words = set(jacobian_plan.describe().values())
    if word is not None:
        assert words == {word}
    jac = jacobian(model, weights, x)
    for m, k in ((len(x), 1), (2, 3), (1, 1)):
        vectors = random(m, k, 2, seed=k)
        linearization = Linearization(model, weights, x[:m], jacobian_plan, differentiable=False)
        assert all(linearization.is_closed(name) for name in jacobian_plan.uses)
        expected = rows({name: j[:m] for name, j in jac.items()}, vectors)
        assert any(e.norm() > 1e-3 for e in expected.values())
        assert_rows(linearization.rows(vectors), expected)
        cotangents = {name: random(*e.shape, seed=9) for name, e in expected.items()}
        value = sum((e * cotangents[name]).sum() for name, e in expected.items())
        torch.testing.assert_close(linearization.inner(vectors, cotangents), value)
        assert not spot_check(linearization, vectors, m - 1)
    return jacobian_plan
