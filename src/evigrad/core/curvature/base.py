"""The interface of a curvature.

Conventions of the whole package. A *row* of index (n, j) is ``scale[n, j] * vectors[n, j]ᵀ J_n``
over all weights, before the prior; H is the sum of the outer products of the rows. Every curvature
computes or approximates ℓ = log|I + P0^{-1/2} H P0^{-1/2}| = log|I + S|, in nats, for the rows that
it was given and nothing else (no factor N/m). The temperature is part of ``scale``. A row of zeros
(padding) adds nothing to H.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Generic, Literal, Self, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.block import Conditioning
from evigrad.core.curvature.anchored import LogDet
from evigrad.core.roots import RootRows
from evigrad.core.types import Linearization
from evigrad.errors import ConfigurationError

# Copies of a dense n x n block beside the statistic while a log-determinant is differentiated: the
# scaled matrix, its factor, the inverse and one product.
DENSE_WORKING_COPIES = 4


class Statistic(ABC):
    """What a structure keeps of the data: additive, and enough for the log-determinant."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The tensors through which a log-determinant depends on the data, in a fixed order."""

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor]) -> "Statistic":
        """A copy of this statistic whose ``tensors()`` are these, in the same order and shapes."""

    def reduced(self, total: Callable[[Sequence[Tensor]], list[Tensor]]) -> Self:
        """Return the sum of the statistics of several parts of the data, without a graph.

        ``total`` sums tensors over the parts, of which this is one.
        """
        return cast(Self, self.with_tensors(total(self.tensors())))


StatisticT = TypeVar("StatisticT", bound=Statistic)


@dataclass(frozen=True)
class Differential(Generic[StatisticT]):
    """ℓ and its derivatives: the step between the two passes over the data.

    Attributes:
        log_det: ℓ, without a graph.
        cotangent: The derivatives of ℓ in the statistic's tensors, as a statistic of these shapes.
        gradients: Derivatives of ℓ in the tensors that were asked for, None where there is none.
    """

    log_det: LogDet
    cotangent: StatisticT
    gradients: Sequence[Tensor | None]


class Curvature(ABC, Generic[StatisticT]):
    """One way to compute or approximate ℓ from rows.

    A subclass implements ``collect`` and ``log_det`` (``Diagonal`` is the shortest example). The
    other methods have defaults that are right for any curvature: override them only to be faster or
    smaller, or for anchors.

    Attributes:
        name: As in an estimator's name.
        log_det_is: Whether ℓ of given rows is exact, at least as large (Theorem 1), or neither.
        keeps_rows: Whether the statistic holds the rows one by one, so that each can be rescaled
            and some can be anchors.
        counts_data: Whether data without rows count too, so that padding must keep its place.
        settings: Settings of ``Evidence`` that are of use to this curvature only.
        cheaper: What to take instead where memory does not suffice.
        takes_anchors: Whether ``evaluate`` and ``differentiate`` can condition on anchors.
        rows_at_once: The most rows of an example whose gradients exist at once. None: all rows.
        formed: The weights whose rows exist at once while a micro-batch is collected.
    """

    name: str
    log_det_is: ClassVar[Literal["exact", "bound", "approximate"]] = "approximate"
    keeps_rows: ClassVar[bool] = False
    counts_data: ClassVar[bool] = False
    settings: ClassVar[tuple[str, ...]] = ()
    cheaper: ClassVar[str] = "a smaller subset"
    rows_at_once: ClassVar[int | None] = None
    takes_anchors: bool = False
    formed: Sequence[str] = ()

    # ------------------------------------------------------------ what a curvature writes

    @abstractmethod
    def collect(
        self,
        statistic: StatisticT | None,
        linearization: Linearization,
        root: RootRows,
        *,
        alone: bool = False,
    ) -> StatisticT:
        """Return a new statistic with a micro-batch added to the old one (None: the first).

        It is differentiable wherever the rows or their scale are. ``alone`` says that no other
        micro-batch of the block has rows, that these have no graph, and that ``condense`` follows
        at once: a curvature may then put off what ``condense`` would drop.
        """

    @abstractmethod
    def log_det(self, statistic: StatisticT, precisions: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """ℓ in nats, differentiable once; each precision is 0-dimensional or like its weight."""

    # ------------------------------------------------------------ what follows

    def evaluate(
        self,
        statistic: StatisticT,
        precisions: Mapping[str, Tensor],
        conditioning: Conditioning | None = None,
    ) -> LogDet:
        """Return ℓ of a block; with anchors, ℓ(Z) + Σ_b w_b ℓ(B_b|Z).

        Raises:
            ConfigurationError: Anchors were given, and this curvature cannot use them.
        """
        self.check_conditioning(conditioning)
        return LogDet(self.log_det(statistic, precisions))

    def check_conditioning(self, conditioning: Conditioning | None) -> None:
        """Refuse anchors where a curvature cannot use them."""
        if conditioning is not None and not self.takes_anchors:
            raise ConfigurationError(
                f"{self.name!r} has no anchored form: take 'ntk', whose rows can be anchors."
            )

    def differentiate(
        self,
        statistic: StatisticT,
        precisions: Mapping[str, Tensor],
        arguments: Sequence[Tensor],
        conditioning: Conditioning | None = None,
    ) -> Differential[StatisticT]:
        """Return ℓ with its derivatives in a statistic, from one factorisation.

        Args:
            statistic: From ``collect``, without a graph. Its memory may be overwritten.
            precisions: As for ``log_det``.
            arguments: Leaves of the precisions' graph to differentiate in as well.
            conditioning: Which of the rows are anchors, or None.
        """
        leaves = [tensor.detach().requires_grad_() for tensor in statistic.tensors()]
        with torch.enable_grad():
            leaf_statistic = cast(StatisticT, statistic.with_tensors(leaves))
            log_det = self.evaluate(leaf_statistic, precisions, conditioning)
            inputs = [*leaves, *arguments]
            gradients = torch.autograd.grad(log_det.value, inputs, allow_unused=True)
        of_leaves, of_arguments = gradients[: len(leaves)], gradients[len(leaves) :]
        filled = [
            torch.zeros_like(leaf) if gradient is None else gradient
            for leaf, gradient in zip(leaves, of_leaves, strict=True)
        ]
        cotangent = cast(StatisticT, statistic.with_tensors(filled))
        return Differential(replace(log_det, value=log_det.value.detach()), cotangent, of_arguments)

    def inner(
        self,
        cotangent: StatisticT,
        data: slice,
        linearization: Linearization,
        root: RootRows,
    ) -> Float[Tensor, ""]:
        """Return ⟨cotangent, the micro-batch's part of the statistic⟩, with a graph.

        This is the second pass: summed over micro-batches, its gradient in the hyperparameters is
        that of ℓ. Only the derivative matters; the value itself has no meaning.

        Args:
            cotangent: From ``differentiate``.
            data: The micro-batch's positions among the data of the statistic.
            linearization: The forward pass of the micro-batch, with a graph.
            root: Its cotangents.
        """
        return inner_product(cotangent, self.collect(None, linearization, root))

    def condense(self, statistic: StatisticT) -> StatisticT:
        """A smaller statistic (or the same) with the same ℓ, for steps on prior and scale."""
        return statistic

    def condenses(self, num_rows: int) -> bool:
        """Whether ``condense`` keeps nothing of so many rows but their inner products."""
        return False

    def predicted_bytes(self, num_rows: int) -> int:
        """Return the bytes of the statistic and of what a differentiated ``log_det`` takes.

        ``passes.sweep`` adds the ``formed`` rows of one micro-batch, and where they carry a graph
        what autograd keeps of it and the cotangents of the rows.

        Args:
            num_rows: Rows of the whole block, m times k.
        """
        del num_rows
        return 0

    def condensed_bytes(self, num_rows: int) -> int:
        """Bytes of collecting and condensing a micro-batch ``alone``, as ``predicted_bytes``."""
        return self.predicted_bytes(num_rows)

    def describe(self) -> dict[str, str]:
        """What each weight of the model gets, in words."""
        return {}


def inner_product(cotangent: Statistic, statistic: Statistic) -> Float[Tensor, ""]:
    """Σ ⟨cotangent, tensor⟩ over the tensors of two statistics of the same shapes."""
    pairs = zip(cotangent.tensors(), statistic.tensors(), strict=True)
    return torch.stack([(c * t).sum() for c, t in pairs]).sum()


def working_dtype(rows: torch.dtype, gram_dtype: torch.dtype | None) -> torch.dtype:
    """``gram_dtype``, else that of the rows; float32 for halves, which have no Cholesky."""
    if gram_dtype is not None:
        return gram_dtype
    return torch.float32 if rows.itemsize < torch.float32.itemsize else rows


def flatten_rows(rows: Tensor, dtype: torch.dtype) -> Float[Tensor, "R n"]:
    """The rows of one parameter, (m, k, *shape), as a matrix."""
    return rows.reshape(rows.shape[0] * rows.shape[1], prod(rows.shape[2:])).to(dtype)


def scaled_rows(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "R n"]:
    """The rows (m, k, *shape) of one parameter as a matrix, times their scale (m, k)."""
    flat = flatten_rows(rows, dtype)
    return flat if scale is None else flat * scale.reshape(-1, 1).to(dtype)
