"""What a curvature structure is, and what it reads.

Conventions of the whole package. A *row* of index (n, j) is ``scale[n, j] * vectors[n, j]ᵀ J_n``
over all weights, before the prior; H is the sum of the outer products of the rows, and
ℓ = log|I + P0^{-1/2} H P0^{-1/2}| = log|I + S| is what every structure computes or approximates, in
nats, for the rows that it was given and nothing else (no factor N/m). The temperature is part of
``scale``. A row of zeros (padding) adds nothing to H.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Generic, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.curvature.conditional import Conditioning, LogDet
from evigrad.errors import ConfigurationError
from evigrad.jacobians import ExactHessian, Linearization
from evigrad.likelihoods import RootRows

# Copies of a dense n x n block that live at once besides the statistic, when a log-determinant is
# taken and differentiated: the scaled matrix, its factor, the inverse and one product.
DENSE_WORKING_COPIES = 4


class Statistic(ABC):
    """What a structure keeps of the data: small, additive, enough for the log-determinant."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The tensors through which a log-determinant depends on the data, in a fixed order."""

    @abstractmethod
    def with_tensors(self, tensors: Sequence[Tensor]) -> "Statistic":
        """The same statistic with other tensors.

        Args:
            tensors: As many as ``tensors()`` gives, of the same shapes and in the same order.
        """


StatisticT = TypeVar("StatisticT", bound=Statistic)


@dataclass(frozen=True)
class Differential(Generic[StatisticT]):
    """ℓ and its derivatives: the small step between the two passes over the data.

    Attributes:
        log_det: ℓ, without a graph.
        cotangent: Derivatives of ℓ in the tensors of a statistic, as a statistic of these shapes.
        gradients: Derivatives of ℓ in the tensors that were asked for, None where there is none.
    """

    log_det: LogDet
    cotangent: StatisticT
    gradients: Sequence[Tensor | None]


class Structure(ABC, Generic[StatisticT]):
    """One way to compute or approximate ℓ from rows.

    Attributes:
        name: How an estimator's name spells it.
        cheaper: What to take instead where memory does not suffice.
        keeps_rows: Whether the statistic holds the rows themselves.
    """

    name: str
    cheaper: ClassVar[str]
    keeps_rows: ClassVar[bool] = False

    @abstractmethod
    def accumulate(
        self, statistic: StatisticT | None, linearization: Linearization, root: RootRows
    ) -> StatisticT:
        """Add a micro-batch; differentiable wherever its rows or its scale are.

        Args:
            statistic: What was accumulated so far, None at the start. It is not changed.
            linearization: The forward pass of the micro-batch.
            root: Its cotangents.

        Returns:
            The statistic of everything so far.
        """

    @abstractmethod
    def log_det(self, statistic: StatisticT, precisions: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """ℓ of the rows in the statistic, in nats; differentiable (once) in both arguments.

        Args:
            statistic: From ``accumulate``.
            precisions: Prior precision of each parameter, 0-dimensional or of its shape.

        Returns:
            A scalar.
        """

    def evaluate(
        self,
        statistic: StatisticT,
        precisions: Mapping[str, Tensor],
        conditioning: Conditioning | None = None,
    ) -> LogDet:
        """ℓ of a block, given its anchors where it has some: then ℓ(Z) + Σ_b w_b ℓ(B_b|Z).

        Args:
            statistic: From ``accumulate``.
            precisions: As for ``log_det``.
            conditioning: Which of the rows are anchors, or None.

        Returns:
            The value, differentiable as that of ``log_det``.

        Raises:
            ConfigurationError: Of this structure ℓ is not a function of the rows' products.
        """
        self.check_conditioning(conditioning)
        return LogDet(self.log_det(statistic, precisions))

    def check_conditioning(self, conditioning: Conditioning | None) -> None:
        """Refuse anchors where ℓ is not a function of the rows' products."""
        if conditioning is not None:
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
        """ℓ with its derivatives in a statistic, from one factorisation.

        Args:
            statistic: From ``accumulate``, without a graph. It may be used up.
            precisions: As for ``log_det``.
            arguments: Leaves of the precisions' graph to differentiate in as well.
            conditioning: As for ``evaluate``.

        Returns:
            The value and the derivatives.
        """
        leaves = [tensor.detach().requires_grad_() for tensor in statistic.tensors()]
        with torch.enable_grad():
            leaf_statistic = cast(StatisticT, statistic.with_tensors(leaves))
            log_det = self.evaluate(leaf_statistic, precisions, conditioning)
            found = torch.autograd.grad(log_det.value, [*leaves, *arguments], allow_unused=True)
        of_leaves, of_arguments = found[: len(leaves)], found[len(leaves) :]
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
        """⟨cotangent, the part of a micro-batch in the statistic⟩, for its derivative.

        The second pass: its gradient in the hyperparameters, summed over micro-batches, is that
        of ℓ. The value itself has no meaning where only derivatives are computed.

        Args:
            cotangent: From ``differentiate``.
            data: Positions of the micro-batch among the data of the statistic.
            linearization: The forward pass of the micro-batch, with a graph.
            root: Its cotangents.

        Returns:
            A scalar with a graph.
        """
        return inner_product(cotangent, self.accumulate(None, linearization, root))

    def summarise(self, linearization: Linearization, root: RootRows) -> StatisticT:
        """The condensed statistic of a block that is a single micro-batch.

        Args:
            linearization: The forward pass of the block, without a graph.
            root: Its cotangents; the scale may have a graph.

        Returns:
            What ``condense`` would give, without holding what it throws away.
        """
        return self.condense(self.accumulate(None, linearization, root))

    def condense(self, statistic: StatisticT) -> StatisticT:
        """What is left of a statistic that only steps on the prior and on the scale will read.

        Args:
            statistic: Without a graph.

        Returns:
            A smaller one with the same log-determinants, or the same.
        """
        return statistic

    def keeps_products(self, num_rows: int) -> bool:
        """Whether steps on prior and scale read no more of a statistic than products of its rows.

        Args:
            num_rows: Rows of the whole block.

        Returns:
            False where each step reads the rows, or where ℓ is not a function of their products.
        """
        return False

    @abstractmethod
    def predicted_bytes(self, num_rows: int) -> int:
        """Bytes of the statistic and of the working copies of a differentiated ``log_det``.

        The forward pass and the rows of one micro-batch come on top, and where the rows carry a
        graph, what autograd keeps of it and the cotangents of the rows.

        Args:
            num_rows: Rows of the whole block, m times k.
        """

    @property
    def contracted(self) -> Collection[str]:
        """Parameters that need a closed form in every pass, as no rows of them are formed."""
        return ()

    def summarised_bytes(self, num_rows: int) -> int:
        """The same for ``summarise`` and what is left of it.

        Args:
            num_rows: Rows of the whole block.

        Returns:
            Bytes.
        """
        return self.predicted_bytes(num_rows)

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """In words, what each parameter gets."""

    def accumulate_hessian(self, statistic: StatisticT | None, hessian: ExactHessian) -> StatisticT:
        """Add the exact Hessian of a micro-batch in the place of the products of its rows.

        Args:
            statistic: What was accumulated so far, None at the start.
            hessian: The Hessian of the micro-batch.

        Raises:
            ConfigurationError: This structure is made of rows, which a Hessian does not have.
        """
        raise ConfigurationError(
            f"the exact Hessian has no {self.name!r} form: it is not a sum over rows. Take"
            " 'full', 'blockdiag' or 'diag', or the GGN."
        )


def inner_product(cotangent: Statistic, statistic: Statistic) -> Float[Tensor, ""]:
    """Σ ⟨cotangent, tensor⟩ over the tensors of two statistics of the same shapes."""
    pairs = zip(cotangent.tensors(), statistic.tensors(), strict=True)
    return torch.stack([(c * t).sum() for c, t in pairs]).sum()


def working_dtype(rows: torch.dtype, gram_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of matrices made of rows.

    Args:
        rows: The dtype of the rows.
        gram_dtype: What the user asked for.

    Returns:
        ``gram_dtype``, else that of the rows; half precisions have no Cholesky and become float32.
    """
    if gram_dtype is not None:
        return gram_dtype
    return torch.float32 if rows.itemsize < torch.float32.itemsize else rows


def flatten_rows(rows: Tensor, dtype: torch.dtype) -> Float[Tensor, "R n"]:
    """The rows of one parameter, (m, k, *shape), as a matrix."""
    return rows.reshape(rows.shape[0] * rows.shape[1], prod(rows.shape[2:])).to(dtype)


def scaled_rows(rows: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Float[Tensor, "R n"]:
    """The rows of one parameter times their scale, as a matrix.

    Args:
        rows: Of shape (m, k, *shape).
        scale: Of shape (m, k), or None for 1.
        dtype: Of the result.

    Returns:
        m times k rows, the parameter flattened.
    """
    flat = flatten_rows(rows, dtype)
    return flat if scale is None else flat * scale.reshape(-1, 1).to(dtype)
