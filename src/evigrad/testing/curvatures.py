"""The conformance suite for curvatures."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad import reference
from evigrad.core.block import Conditioning
from evigrad.core.curvature import Cost, Curvature, Statistic
from evigrad.core.curvature.base import log_det_of
from evigrad.core.protocols import Purpose
from evigrad.core.roots import RootRows
from evigrad.errors import ConfigurationError, ConformanceError, InputError
from evigrad.network import Linearization, plan
from evigrad.testing.comparison import (
    DIFFERENCES,
    agree,
    difference_quotients,
    gradients,
    random,
    same_gradients,
)

# Rows of each example.
_ROWS = 2
LogDet = Callable[[Float[Tensor, "P P"], Float[Tensor, " P"]], Tensor]


def check_curvature(
    curvature: Curvature[Any],
    model: nn.Module,
    inputs: Tensor,
    *,
    precisions: Mapping[str, Tensor] | None = None,
    log_det: LogDet | None = None,
) -> None:
    """Check that a curvature fulfills the contract of ``Curvature``.

    The suite collects statistics of random rows of a model, and checks that

    - ℓ is a finite number of at least 0, and is exact or a bound if ``log_det_is`` says so,
    - micro-batches, several ranks, every ``Purpose`` and ``rescaled`` give the same ℓ, and
      ``collect`` changes no statistic,
    - rows of zeros add nothing, and scales multiply rows,
    - derivatives with respect to precisions, rows and scales agree with finite differences,
    - ``differentiate`` and ``inner`` together give the derivatives of ℓ,
    - ``conditional``, if it is defined, agrees with ℓ of parts of the rows.

    Global random numbers in ``collect`` and ``log_det`` are the same in every call.

    Args:
        curvature: The curvature of the model's weights.
        model: A small model. Its weights are the parameters that require a gradient. The suite uses
            a copy in float64.
        inputs: Inputs of at least 3 examples.
        precisions: Precisions by weight, if the curvature does not accept all. Weights with the
            same tensor share a precision. Default: random numbers, and then random tensors that
            vary along one or all axes, unless ``log_det`` raises a ConfigurationError for them.
        log_det: ℓ as a function of H (P, P) and the precisions (P,), written without code of the
            curvature. It is then compared with the curvature, with all derivatives. Default:
            log|I + H/P0| if the curvature is exact, and otherwise none.

    Raises:
        InputError: If there are fewer than 3 examples.
        ConformanceError: If a result is wrong. The message states what differs, and by how much.

    Examples:
        >>> import torch
        >>> from evigrad.core.curvature import Diagonal
        >>> from evigrad.testing import check_curvature
        >>> model = torch.nn.Linear(3, 2)
        >>> weights = dict(model.named_parameters())
        >>> check_curvature(Diagonal(weights), model, torch.randn(4, 3))

    See also: docs/theory.md.
    """
    if len(inputs) < 3:
        raise InputError(f"inputs must have at least 3 examples, got {len(inputs)}.")
    suite = _Suite(curvature, model, inputs)
    if log_det is None and curvature.log_det_is == "exact":
        log_det = reference.log_det
    if precisions is not None:
        suite.check(precisions, log_det)
        return
    named = suite.weights.items()
    suite.check({n: random(seed=i).exp() for i, (n, _) in enumerate(named)}, log_det)
    varying = {n: random(*_axes(w.shape, i), seed=50 + i).exp() for i, (n, w) in enumerate(named)}
    try:
        suite.value(suite.statistic(suite.root), varying)
    except ConfigurationError:
        return
    suite.check(varying, log_det)


def _axes(shape: Sequence[int], place: int) -> list[int]:
    """Return a shape with all axes, or with one axis if the place is even."""
    axis = place // 2 % max(len(shape), 1)
    return [n if place % 2 or i == axis else 1 for i, n in enumerate(shape)]


class _Suite:
    def __init__(self, curvature: Curvature[Any], model: nn.Module, inputs: Tensor) -> None:
        self.curvature, self.name = curvature, type(curvature).__name__
        self.model = copy.deepcopy(model).double().eval()
        self.weights = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.x = inputs.detach().clone()
        if self.x.is_floating_point():
            self.x = self.x.double()
        self.plan = plan(self.model, self.weights, self.x)
        self._kept: dict[tuple[int, int], Linearization] = {}
        m, num_outputs = len(inputs), self._linearized(slice(0, 1)).outputs.shape[1]
        # One row is padding.
        present = torch.ones(m, _ROWS, dtype=torch.bool, device="cpu")
        present[1, 0] = False
        vectors = random(m, _ROWS, num_outputs) * present[..., None]
        self.root = RootRows(vectors, random(m, _ROWS, seed=1).exp(), present)
        self.whole = slice(0, m)
        # Products of the rows of the last part with those of all others must not be missing.
        ends = sorted({0, 1, min(2, m - 1), m})
        self.parts = [slice(start, stop) for start, stop in pairwise(ends)]

    def _linearized(self, data: slice, graph: bool = False) -> Linearization:
        key = (data.start, data.stop)
        if key in self._kept and not graph and not self.x.requires_grad:
            return self._kept[key]
        linearization = Linearization(self.model, self.weights, self.x[data], self.plan, graph)
        if not graph and not self.x.requires_grad:  # differences do not change the inputs
            self._kept[key] = linearization
        return linearization

    def statistic(
        self,
        root: RootRows,
        parts: Sequence[slice] = (),
        start: Any = None,
        graph: bool = False,
    ) -> Any:
        """Return the statistic of the rows, collected in these parts of the examples."""
        statistic = start
        for data in parts or [self.whole]:
            linearization = self._linearized(data, graph)
            with _same_draws():
                statistic = self.curvature.collect(statistic, linearization, _part(root, data))
        return statistic

    def value(
        self,
        statistic: Any,
        precisions: Mapping[str, Tensor],
        conditioning: Conditioning | None = None,
    ) -> Tensor:
        """Return ℓ."""
        with _same_draws():
            return log_det_of(self.curvature, statistic, precisions, conditioning).value

    def check(self, precisions: Mapping[str, Tensor], log_det: LogDet | None) -> None:
        """Check everything with these precisions."""
        # Weights that share a precision share a leaf.
        leaves = {id(p): p.detach().double().clone().requires_grad_() for p in precisions.values()}
        precisions = {name: leaves[id(precisions[name])] for name in self.weights}
        names: dict[int, str] = {}
        for name, precision in precisions.items():
            names.setdefault(id(precision), f"the precision of {name!r}")
        self.named_precisions = {names[id(p)]: p for p in precisions.values()}
        self.precisions = precisions
        value = self._check_value()
        self._check_collecting(value)
        self._check_rows(value)
        self._check_precisions()
        self._check_derivatives(log_det)
        self._check_conditional()

    # ------------------------------------------------------------ values

    def _check_value(self) -> Tensor:
        statistic = self.statistic(self.root)
        if not isinstance(statistic, Statistic):
            raise ConformanceError(
                f"collect of {self.name} must return a Statistic, got a {type(statistic).__name__}."
            )
        if any(tensor.requires_grad for tensor in statistic.tensors()):
            raise ConformanceError(
                f"collect of {self.name} must return tensors without a graph if the rows and their"
                " scales have none."
            )
        value = self.value(statistic, self.precisions).detach()
        if not value.isfinite():
            raise ConformanceError(f"log_det of {self.name} must be finite, got {float(value)}.")
        agree(f"log_det of {self.name}, which must not be negative,", value, value.clamp(min=0))
        copied = statistic.with_tensors(statistic.tensors())
        words = f"log_det of {self.name} for with_tensors(tensors())"
        agree(words, self.value(copied, self.precisions), value)
        if not isinstance(self.curvature.cost(len(self.x) * _ROWS, Purpose.VALUE), Cost):
            raise ConformanceError(f"cost of {self.name} must return a Cost.")
        return value

    def _check_collecting(self, value: Tensor) -> None:
        """Check micro-batches, purposes and ranks."""
        words, m = f"log_det of {self.name}", len(self.x)
        first = self.statistic(self.root, self.parts[:1])
        before = [tensor.clone() for tensor in first.tensors()]
        self.value(first, self.precisions)  # which may cache results for these rows
        merged = self.statistic(self.root, self.parts[1:], first)
        agree(f"{words} of several micro-batches", self.value(merged, self.precisions), value)
        again = self.statistic(self.root, self.parts[1:], first)
        agree(
            f"{words} of a statistic that was used twice", self.value(again, self.precisions), value
        )
        for tensor, old in zip(first.tensors(), before, strict=True):
            agree(
                f"A tensor of the statistic that was passed to collect of {self.name}", tensor, old
            )
        for purpose in Purpose:
            for parts in ([self.whole], self.parts):
                with _same_draws():
                    start = self.curvature.empty(purpose, m)
                total = self.statistic(self.root, parts, start)
                agree(f"{words} with {purpose}", self.value(total, self.precisions), value)
        if not self.curvature.keeps_rows:
            ranks = [self.statistic(self.root, [data]) for data in (slice(0, 1), slice(1, m))]
            total = self.value(_reduced(ranks), self.precisions)
            agree(f"{words} of a sum over ranks by reduced", total, value)

    def _check_rows(self, value: Tensor) -> None:
        """Check scales and rows of zeros."""
        words, root = f"log_det of {self.name}", self.root
        assert root.scale is not None and root.present is not None
        for other in (RootRows(root.scaled, None, root.present), RootRows(root.scaled)):
            total = self.statistic(other, self.parts)
            agree(f"{words} of scaled vectors", self.value(total, self.precisions), value)
        zeros, ones = torch.zeros_like(root.vectors), torch.ones_like(root.scale)
        padded = torch.cat([root.vectors, zeros], 1), torch.cat([root.scale, ones], 1)
        present = torch.cat([root.present, torch.zeros_like(root.present)], 1)
        for is_present in (None, present):
            total = self.statistic(RootRows(*padded, is_present), self.parts)
            agree(f"{words} with rows of zeros", self.value(total, self.precisions), value)
        # One number for all rows, or a number for each row that the statistic stores.
        plain = self.statistic(RootRows(root.vectors, None, root.present))
        scale = root.scale if self.curvature.keeps_rows else torch.full_like(root.scale, 1.7)
        total, precisions = self.curvature.rescaled(plain, self.precisions, scale[root.present], [])
        expected = self.statistic(RootRows(root.vectors, scale, root.present))
        right = self.value(expected, self.precisions)
        agree(f"{words} with rescaled", self.value(total, precisions), right)

    # ------------------------------------------------------------ derivatives

    def _check_precisions(self) -> None:
        """Compare derivatives with respect to precisions with finite differences."""
        for parts in ([self.whole], self.parts):
            statistic = self.statistic(self.root, parts)
            # The second value may use what the statistic has cached.
            values = [self.value(statistic, self.precisions) for _ in range(2)]
            slopes = [gradients(value, self.named_precisions.values()) for value in values]
            log_det = partial(self.value, statistic, self.precisions)
            pairs = zip(self.named_precisions.items(), *slopes, strict=True)
            for i, ((name, leaf), *both) in enumerate(pairs):
                direction = random(*leaf.shape, seed=30 + i)
                (expected,) = difference_quotients(log_det, leaf, [direction])
                words = f"The derivative of log_det of {self.name} with respect to {name}"
                for slope in both:
                    agree(words, (slope * direction).sum(), expected, DIFFERENCES)

    def _check_derivatives(self, log_det: LogDet | None) -> None:
        """Check derivatives with respect to everything, in one graph and in two passes."""
        words, root = f"log_det of {self.name}", self.root
        assert root.scale is not None
        vectors, scale = (t.clone().requires_grad_() for t in (root.vectors, root.scale))
        variable = RootRows(vectors, scale, root.present)
        arguments = {"the vectors of the rows": vectors, "the scales of the rows": scale}
        if self.x.is_floating_point():
            self.x.requires_grad_()
            arguments["the inputs"] = self.x
        value = self.value(self.statistic(variable, graph=True), self.precisions)
        slopes = gradients(value, arguments.values())
        for i, ((name, argument), slope) in enumerate(zip(arguments.items(), slopes, strict=True)):
            direction = random(*argument.shape, seed=70 + i)
            (expected,) = difference_quotients(
                lambda: self.value(self.statistic(_detached(variable)), self.precisions),
                argument,
                [direction],
            )
            what = f"The derivative of {words} along a direction of {name}"
            agree(what, (slope * direction).sum(), expected, DIFFERENCES)
        self._check_two_passes(value, variable, arguments)
        dense = self._dense(variable) if log_det or self.curvature.log_det_is == "bound" else None
        if dense is not None:
            h, precision = dense
            if self.curvature.log_det_is == "bound":
                exact = reference.log_det(h, precision).detach()
                least = torch.maximum(value.detach(), exact * (1 - 1e-9))
                agree(f"{words}, an upper bound on ℓ,", value, least)
            if log_det is not None:
                expected = log_det(h, precision)
                agree(f"{words}, compared with the reference,", value, expected)
                everything = {**arguments, **self.named_precisions}
                same_gradients(
                    f"{words}, compared with the reference,", value, expected, everything
                )
        self.x = self.x.detach()

    def _check_two_passes(
        self, value: Tensor, root: RootRows, arguments: Mapping[str, Tensor]
    ) -> None:
        """Compare ``differentiate`` and ``inner`` with derivatives of ℓ in one graph."""
        words, everything = f"of {self.name}", {**arguments, **self.named_precisions}
        right = gradients(value, everything.values())
        for parts in ([self.whole], self.parts):
            with _same_draws():
                start = self.curvature.empty(Purpose.DIFFERENTIATE, len(self.x))
            statistic = self.statistic(_detached(root), parts, start)
            leaves = list(self.named_precisions.values())
            with _same_draws():
                differential = self.curvature.differentiate(statistic, self.precisions, leaves)
            agree(f"ℓ in differentiate {words}", differential.log_det.value, value)
            total = [torch.zeros_like(argument) for argument in arguments.values()]
            for data in parts:
                linearization = self._linearized(data, graph=True)
                with _same_draws():
                    inner = self.curvature.inner(
                        differential.cotangent, data, linearization, _part(root, data)
                    )
                steps = gradients(inner, arguments.values())
                total = [t + s for t, s in zip(total, steps, strict=True)]
            pairs = zip(everything, [*total, *differential.gradients], right, strict=True)
            for name, actual, expected in pairs:
                actual = torch.zeros_like(expected) if actual is None else actual
                what = f"The derivative by differentiate and inner {words} with respect to {name}"
                agree(what, actual, expected)

    def _dense(self, root: RootRows) -> tuple[Float[Tensor, "P P"], Float[Tensor, " P"]]:
        """Return H and the precisions, with a graph."""
        with torch.enable_grad():
            outputs = self.model(self.x)
        vectors, rows = root.scaled, list[Tensor]()
        for n in range(len(outputs)):
            for vector in vectors[n]:
                value = (outputs[n] * vector).sum()
                slopes = gradients(value, self.weights.values(), graph=True)
                rows.append(torch.cat([slope.flatten() for slope in slopes]))
        stacked = torch.stack(rows)
        pairs = ((self.precisions[name], weight) for name, weight in self.weights.items())
        return stacked.mT @ stacked, torch.cat([p.expand_as(w).flatten() for p, w in pairs])

    # ------------------------------------------------------------ anchors

    def _check_conditional(self) -> None:
        """Compare ℓ(Z) + Σ_b w_b ℓ(B_b|Z) with ℓ of parts of the rows."""
        weights = (3.5, 0.25)
        root = self.root
        assert root.present is not None
        labels = torch.arange(root.present.numel(), device="cpu").view_as(root.present) % 4 - 1

        def entropy(*chosen: int) -> Tensor:
            zeroed = (
                root.vectors * torch.isin(labels, torch.tensor(chosen, device="cpu"))[..., None]
            )
            return self.value(self.statistic(RootRows(zeroed, root.scale)), self.precisions)

        conditioning = Conditioning(labels[root.present], weights)  # -1: the row does not count
        try:
            value = self.value(self.statistic(root), self.precisions, conditioning)
        except ConfigurationError:  # no anchors
            return
        anchor_entropy = entropy(0)
        expected = anchor_entropy
        for b, weight in enumerate(weights, start=1):
            expected = expected + weight * (entropy(0, b) - anchor_entropy)
        words = f"conditional of {self.name}"
        agree(words, value, expected)
        same_gradients(words, value, expected, self.named_precisions)


def _reduced(ranks: Sequence[Statistic]) -> Statistic:
    """Return the sum of the statistics of several ranks, by their method ``reduced``."""
    calls: list[list[list[Tensor]]] = [[] for _ in ranks]
    for statistic, received in zip(ranks, calls, strict=True):

        def noted(tensors: Sequence[Tensor], received: list[list[Tensor]] = received):
            received.append(list(tensors))
            return list(tensors)

        statistic.reduced(noted)
    sums = iter([[a + b for a, b in zip(*pair, strict=True)] for pair in zip(*calls, strict=True)])
    return ranks[0].reduced(lambda _: next(sums))


@contextmanager
def _same_draws() -> Iterator[None]:
    """Return a context in which global random numbers are the same every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def _part(root: RootRows, data: slice) -> RootRows:
    scale = None if root.scale is None else root.scale[data]
    present = None if root.present is None else root.present[data]
    return RootRows(root.vectors[data], scale, present)


def _detached(root: RootRows) -> RootRows:
    scale = None if root.scale is None else root.scale.detach()
    return RootRows(root.vectors.detach(), scale, root.present)
