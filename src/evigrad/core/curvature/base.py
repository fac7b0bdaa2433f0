"""The interface of a curvature.

Row (n, j) is ``scale[n, j] * vectors[n, j]ᵀ J_n``, where J_n is the Jacobian of example n with
respect to all weights. The sum of the outer products of the rows is H, and the diagonal prior
precision is P0. A curvature computes or approximates ℓ = log|I + P0^{-1/2} H P0^{-1/2}| in nats,
for the rows that it received and without a factor N/m. With the Gram matrix S of the rows times
P0^{-1/2}, ℓ is also log|I + S|. The temperature is part of ``scale``. Rows of zeros (padding) add
nothing to H.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Generic, Literal, Self, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import is_one_number
from evigrad.core.block import Conditioning
from evigrad.core.curvature.anchored import LogDet
from evigrad.core.protocols import Linearization, Purpose
from evigrad.core.roots import RootRows
from evigrad.errors import ConfigurationError, NotPositiveDefiniteError

# Copies of a dense n x n block next to the statistic while a log-determinant is differentiated: the
# scaled matrix, its factor, the inverse and one product.
DENSE_WORKING_COPIES = 4
# Rows of an example whose gradients are in memory together, for curvatures that sum over rows. Each
# row has a gradient for each activation.
ROWS_AT_ONCE = 64
# Step of finite differences of a custom log-determinant, and the tolerated difference from its
# derivative relative to both: in float64, and in float32, where sums and pivots round.
DIFFERENCES = {torch.float64: (1e-3, 1e-4), torch.float32: (5e-2, 1e-2)}


class Statistic(ABC):
    """An additive summary of the data that determines the log-determinant."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the tensors on which the log-determinant depends, in a fixed order."""

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor]) -> "Statistic":
        """Return a copy of this statistic with new values of ``tensors()``."""

    def reduced(self, total: Callable[[Sequence[Tensor]], list[Tensor]]) -> Self:
        """Return the sum of the statistics of several parts of the data, without a graph.

        The function ``total`` sums tensors over all parts, including the part of this statistic.
        """
        return cast(Self, self.with_tensors(total(self.tensors())))


StatisticT = TypeVar("StatisticT", bound=Statistic)


@dataclass(frozen=True)
class Cost:
    """The memory that a curvature needs for a block, in bytes.

    Attributes:
        total: The statistic, and what ``log_det`` with its derivatives needs.
        row: A row of an example while its micro-batch is collected.
        rows_at_once: Largest number of rows of an example that are in memory together. None: all.
        drops_rows: Whether only inner products of the rows remain after the last micro-batch.
    """

    total: int = 0
    row: int = 0
    rows_at_once: int | None = None
    drops_rows: bool = False


@dataclass(frozen=True)
class Differential(Generic[StatisticT]):
    """ℓ and its derivatives, computed between the two passes over the data.

    Attributes:
        log_det: ℓ, without a graph.
        cotangent: Derivatives of ℓ with respect to the statistic's tensors, as a statistic.
        gradients: Derivatives of ℓ with respect to the requested tensors, or None for a tensor on
            which ℓ does not depend.
    """

    log_det: LogDet
    cotangent: StatisticT
    gradients: Sequence[Tensor | None]


class Curvature(ABC, Generic[StatisticT]):
    """A method that computes or approximates ℓ from rows.

    A subclass implements ``collect`` and ``log_det``. ``Diagonal`` is the shortest example. The
    defaults of the other methods are correct for any curvature. Override them to save time or
    memory, or to support anchors.

    Attributes:
        name: Name of the structure. Estimator names begin with it.
        log_det_is: ``"exact"`` if the result is ℓ for the given rows, ``"bound"`` if it is at least
            ℓ (Theorem 1), or else ``"approximate"``.
        keeps_rows: Whether the statistic stores separate rows, which can be rescaled or used as
            anchors.
        counts_data: Whether the result depends on the number of examples, including examples
            without rows. If it does, padding is not removed.
        settings: Settings of ``Evidence`` that only this curvature uses.
        cheaper: Advice for users who run out of memory.
    """

    name: str
    log_det_is: ClassVar[Literal["exact", "bound", "approximate"]] = "approximate"
    keeps_rows: ClassVar[bool] = False
    counts_data: ClassVar[bool] = False
    settings: ClassVar[tuple[str, ...]] = ()
    cheaper: ClassVar[str] = "a smaller subset"

    # ------------------------------------------------------------ abstract methods

    @abstractmethod
    def collect(
        self, statistic: StatisticT | None, linearization: Linearization, root: RootRows
    ) -> StatisticT:
        """Return the sum of a statistic and the statistic of a micro-batch, as a new statistic.

        The first ``statistic`` is the result of ``empty``, or None. The result is differentiable if
        the rows or their scales are.
        """

    @abstractmethod
    def log_det(self, statistic: StatisticT, precisions: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return ℓ in nats, differentiable once.

        Each precision is a scalar, or broadcasts to the shape of its weight.
        """

    # ------------------------------------------------------------ methods with defaults

    def empty(self, purpose: Purpose, num_data: int) -> StatisticT | None:
        """Return the statistic of no rows, which determines what ``collect`` stores.

        The default is None, for a statistic that is the same for every purpose.

        Args:
            purpose: The purpose of the statistic.
            num_data: Number of examples whose rows will be collected, on all ranks together.
        """
        del purpose, num_data
        return None

    def rescaled(
        self,
        statistic: StatisticT,
        precisions: Mapping[str, Tensor],
        scale: Float[Tensor, " R"],
        parameters: Sequence[Tensor],
    ) -> tuple[StatisticT, Mapping[str, Tensor]]:
        """Return a statistic and precisions that have the ℓ of the rows multiplied by ``scale``.

        Args:
            statistic: Statistic of rows without a scale.
            precisions: As for ``log_det``.
            scale: Factor of each row.
            parameters: Parameters of the likelihood, which determine the factors.

        Raises:
            ConfigurationError: If the statistic is a sum over rows with different factors.
        """
        # Scaling H by r² has the same effect on the log-determinant as the precisions P0 / r².
        if not is_one_number(scale, parameters):
            raise ConfigurationError(
                f"{self.name!r} sums rows with different scales, so a kept pass cannot be reused"
                " after the likelihood's parameters change. Use an 'ntk' estimator, or a single"
                " noise for all outputs."
            )
        return statistic, {n: p / scale[0].square().to(p) for n, p in precisions.items()}

    def conditional(
        self,
        statistic: StatisticT,
        precisions: Mapping[str, Tensor],
        conditioning: Conditioning,
    ) -> LogDet:
        """Return the anchored bound ℓ(Z) + Σ_b w_b ℓ(B_b|Z). The default has no anchors.

        Raises:
            ConfigurationError: If the curvature does not support anchors.
        """
        del statistic, precisions, conditioning
        raise ConfigurationError(
            f"{self.name!r} does not support anchors. Use the structure 'ntk' instead."
        )

    def differentiate(
        self,
        statistic: StatisticT,
        precisions: Mapping[str, Tensor],
        arguments: Sequence[Tensor],
        conditioning: Conditioning | None = None,
    ) -> Differential[StatisticT]:
        """Return ℓ and its derivatives, from one factorization.

        Args:
            statistic: From ``collect``, without a graph. Its memory may be overwritten.
            precisions: As for ``log_det``.
            arguments: Tensors that determine the precisions. The result also contains derivatives
                with respect to these tensors.
            conditioning: Which rows are anchors, or None without anchors.
        """
        leaves = [tensor.detach().requires_grad_() for tensor in statistic.tensors()]
        with torch.enable_grad():
            leaf_statistic = cast(StatisticT, statistic.with_tensors(leaves))
            log_det = log_det_of(self, leaf_statistic, precisions, conditioning)
            inputs = [*leaves, *arguments]
            gradients = torch.autograd.grad(log_det.value, inputs, allow_unused=True)
        leaf_gradients, argument_gradients = gradients[: len(leaves)], gradients[len(leaves) :]
        filled = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, leaf_gradients, strict=True)
        ]
        cotangent = cast(StatisticT, statistic.with_tensors(filled))
        return Differential(
            replace(log_det, value=log_det.value.detach()), cotangent, argument_gradients
        )

    def inner(
        self, cotangent: StatisticT, data: slice, linearization: Linearization, root: RootRows
    ) -> Float[Tensor, ""]:
        """Return ⟨cotangent, the micro-batch's part of the statistic⟩, with a graph.

        The second pass calls this method for each micro-batch. Summed over micro-batches, the
        derivatives of the results with respect to the hyperparameters are the derivatives of ℓ.
        The values of the results have no meaning.

        Args:
            cotangent: From ``differentiate``.
            data: The micro-batch's positions among the examples of the statistic.
            linearization: The forward pass of the micro-batch, with a graph.
            root: The cotangents of the micro-batch's rows.
        """
        return inner_product(cotangent, self.collect(None, linearization, root))

    def cost(self, num_rows: int, purpose: Purpose, *, is_whole: bool = False) -> Cost:
        """Return the predicted memory for a block. The default is 0 bytes.

        Args:
            num_rows: Number of rows of the block, m times k.
            purpose: The purpose of the statistic.
            is_whole: Whether one micro-batch has all rows.
        """
        del num_rows, purpose, is_whole
        return Cost()

    def describe(self) -> dict[str, str]:
        """Return a short description of the curvature of each weight."""
        return {}


def log_det_of(
    curvature: Curvature[StatisticT],
    statistic: StatisticT,
    precisions: Mapping[str, Tensor],
    conditioning: Conditioning | None = None,
) -> LogDet:
    """Return ℓ of a block, or the anchored bound if there are anchors.

    Raises:
        ConfigurationError: If anchors are passed but not supported, or ``log_det`` does not
            return a real scalar tensor.
        NotPositiveDefiniteError: If PyTorch cannot factor a matrix in ``log_det``.
    """
    if conditioning is not None:
        return curvature.conditional(statistic, precisions, conditioning)
    try:
        value = curvature.log_det(statistic, precisions)
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise NotPositiveDefiniteError(
            f"{type(curvature).__name__}.log_det failed: {error} Check the precisions and the"
            " curvature for huge, tiny or NaN entries, and compute the matrix in float64. Or"
            " call evigrad.core.curvature.linalg.log_det_dense, which repairs rounding errors."
        ) from error
    if not isinstance(value, Tensor) or value.ndim > 0 or not value.is_floating_point():
        received = repr(value)
        if isinstance(value, Tensor):
            received = f"shape {tuple(value.shape)} and type {value.dtype}"
        raise ConfigurationError(
            f"{type(curvature).__name__}.log_det must return a real scalar tensor with a graph, got"
            f" {received}. Sum the terms with torch operations."
        )
    return LogDet(value)


def check_log_det(
    curvature: Curvature[StatisticT], statistic: StatisticT, precisions: Mapping[str, Tensor]
) -> None:
    """Compare derivatives of a curvature's ℓ with finite differences.

    Nothing is checked if ℓ is random or not finite.

    Raises:
        ConfigurationError: If a derivative is wrong, for instance because of ``detach``.
    """
    if not isinstance(statistic, Statistic):
        raise ConfigurationError(
            f"{type(curvature).__name__}.collect must return a Statistic, such as a BlockStatistic,"
            f" got a {type(statistic).__name__}."
        )
    arguments = {
        "the statistic": [tensor.detach() for tensor in statistic.tensors()],
        "the precisions": [precision.detach() for precision in precisions.values()],
    }

    def log_det(parts: Mapping[str, Sequence[Tensor]]) -> Tensor:
        named = dict(zip(precisions, parts["the precisions"], strict=True))
        changed = cast(StatisticT, statistic.with_tensors(parts["the statistic"]))
        return log_det_of(curvature, changed, named).value

    with torch.random.fork_rng(devices=[]):
        value = float(log_det(arguments))
        is_random = float(log_det(arguments)) != value
        if is_random or not math.isfinite(value):
            return
        for what, tensors in arguments.items():
            derivative, difference, tolerance = _derivatives(
                lambda parts, what=what: log_det({**arguments, what: parts}), tensors
            )
            size = max(abs(derivative), abs(difference))
            if abs(derivative - difference) > tolerance * (size + abs(value)):
                raise ConfigurationError(
                    f"{type(curvature).__name__}.log_det must be differentiable in {what}. Along"
                    f" one direction, its derivative is {derivative:.4g} by automatic"
                    f" differentiation, but {difference:.4g} by finite differences. Use torch"
                    f" operations, without detach, item or no_grad for {what}."
                )


def _derivatives(
    log_det: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]
) -> tuple[float, float, float]:
    """Return a derivative by autograd and by differences, and the tolerance for their difference.

    The direction multiplies tensor i by 1 + t (1 + i/n), so a semidefinite matrix remains one.
    """

    def at(t: Tensor) -> Tensor:
        scales = [1 + t * (1 + i / len(tensors)) for i in range(len(tensors))]
        pairs = zip(tensors, scales, strict=True)
        return log_det([x * scale.to(x) if x.is_floating_point() else x for x, scale in pairs])

    start = torch.zeros((), dtype=torch.float64, device="cpu")
    with torch.enable_grad():
        t = start.clone().requires_grad_()
        value = at(t)
        (slope,) = torch.autograd.grad(value, t) if value.requires_grad else (start,)
    step, tolerance = DIFFERENCES.get(value.dtype, DIFFERENCES[torch.float32])
    difference = (float(at(start + step)) - float(at(start - step))) / (2 * step)
    return float(slope), difference, tolerance


def inner_product(cotangent: Statistic, statistic: Statistic) -> Float[Tensor, ""]:
    """Return the inner product of two statistics whose tensors have the same shapes."""
    pairs = zip(cotangent.tensors(), statistic.tensors(), strict=True)
    return torch.stack([(c * t).sum() for c, t in pairs]).sum()


def by_entry(precision: Tensor, shape: torch.Size) -> Tensor:
    """Return a weight's precision as one number, or as one number per entry, (n,)."""
    return precision if precision.ndim == 0 else precision.expand(shape).reshape(-1)


def working_dtype(rows: torch.dtype, gram_dtype: torch.dtype | None) -> torch.dtype:
    """Return ``gram_dtype`` if given, or else the rows' dtype, widened to at least float32."""
    if gram_dtype is not None:
        return gram_dtype
    return torch.float32 if rows.itemsize < torch.float32.itemsize else rows


def bytes_of_row(weights: Iterable[Tensor]) -> int:
    """Return the bytes of a row with an entry for each entry of these weights."""
    return sum(weight.numel() * weight.element_size() for weight in weights)


def flatten_rows(rows: Tensor, dtype: torch.dtype) -> Float[Tensor, "R n"]:
    """Return the rows (m, k, *shape) of one parameter as a matrix."""
    return rows.reshape(rows.shape[0] * rows.shape[1], prod(rows.shape[2:])).to(dtype)


def scaled_rows(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "R n"]:
    """Return the rows (m, k, *shape) of one parameter as a matrix, multiplied by their scales."""
    flat = flatten_rows(rows, dtype)
    return flat if scale is None else flat * scale.reshape(-1, 1).to(dtype)
