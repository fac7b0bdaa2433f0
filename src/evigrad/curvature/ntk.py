"""The kernel side: ℓ = log|I + S| with S the Gram matrix of the rows (Theorem 3 of the paper).

S = D (Σ_g G_g / δ_g) D with D the diagonal of the rows' scales and G_g the Gram matrix of the rows
of prior group g. Where the rows carry no graph the G_g are kept, so that further steps on the
precisions and on the scale (the noise) touch neither the network nor the rows: R²L + R³/3
operations each, R rows and L groups.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from evigrad.curvature.base import (
    LinearizationLike,
    RootLike,
    Statistic,
    Structure,
    flatten_rows,
    working_dtype,
)
from evigrad.curvature.linalg import first_order_only, log_det_identity_plus
from evigrad.errors import ConfigurationError

# The Grams of the prior groups are kept where they are no larger than the rows that they stand for,
# or than this: a gibibyte saves repeated passes over the rows on any machine that trains networks.
GRAM_CACHE_BYTES = 2**30
# R x R matrices that live at once besides the statistic when ℓ is differentiated: the unscaled sum,
# S, its factor, the inverse, and one product.
GRAM_WORKING_COPIES = 5


@dataclass(frozen=True)
class NtkStatistic(Statistic):
    """The rows of every micro-batch, without prior and scale.

    Attributes:
        rows: Per parameter, one (R_i, n) matrix per micro-batch.
        scales: One vector (R_i,) per micro-batch, or None for 1.
        grams: The Gram matrices kept so far; a cache, filled by ``Ntk.log_det``.
    """

    rows: dict[str, tuple[Tensor, ...]]
    scales: tuple[Tensor | None, ...]
    grams: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        """R, the rows so far."""
        return sum(len(chunk) for chunk in next(iter(self.rows.values())))

    @property
    def carries_graph(self) -> bool:
        """Whether the rows themselves (not their scale) are differentiable."""
        return any(chunk.requires_grad for chunks in self.rows.values() for chunk in chunks)

    def scale(self) -> Float[Tensor, " R"] | None:
        """The scales of all rows, or None where all are 1."""
        if all(scale is None for scale in self.scales):
            return None
        chunks = next(iter(self.rows.values()))
        return torch.cat(
            [
                chunk.new_ones(len(chunk)) if scale is None else scale
                for scale, chunk in zip(self.scales, chunks, strict=True)
            ]
        )

    def with_scale(self, scale: Float[Tensor, " R"]) -> "NtkStatistic":
        """The same rows under another scale (a step on the noise); the kept Grams stay valid.

        Args:
            scale: For all rows, in the order in which they were accumulated.

        Returns:
            Another statistic, which shares rows and kept Grams with this one.
        """
        sizes = [len(chunk) for chunk in next(iter(self.rows.values()))]
        return replace(self, scales=tuple(scale.split(sizes)))

    def tensors(self) -> list[Tensor]:
        """All rows, then the scales that are not None."""
        rows = [chunk for chunks in self.rows.values() for chunk in chunks]
        return rows + [scale for scale in self.scales if scale is not None]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "NtkStatistic":
        """The same statistic with other rows and scales; nothing is kept from the old ones."""
        rest = iter(tensors)
        rows = {name: tuple(next(rest) for _ in chunks) for name, chunks in self.rows.items()}
        scales = tuple(None if scale is None else next(rest) for scale in self.scales)
        return NtkStatistic(rows, scales)


class Ntk(Structure[NtkStatistic]):
    """The exact ℓ of a block from the Gram matrix of its R rows.

    Args:
        weights: The parameters.
        precision_groups: Of each parameter whose prior precision is one number, a label of its
            prior group; those of one label share one precision and one Gram. A parameter that is
            missing has a precision that varies inside it.
        gram_dtype: Dtype of S and its factor; None takes that of the rows.
    """

    name = "ntk"
    cheaper = (
        "a smaller subset, one output per block ('ntk-...-1'), or 'kfac', whose memory does not"
        " grow with the subset"
    )

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        precision_groups: Mapping[str, Hashable],
        gram_dtype: torch.dtype | None = None,
    ) -> None:
        self._numel = {name: weight.numel() for name, weight in weights.items()}
        self._itemsize = max((weight.dtype.itemsize for weight in weights.values()), default=4)
        self._gram_dtype = gram_dtype
        self._groups: dict[Hashable, list[str]] = {}
        for name in weights:
            if name in precision_groups:
                self._groups.setdefault(precision_groups[name], []).append(name)
        self._varying = [name for name in weights if name not in precision_groups]

    def accumulate(
        self, statistic: NtkStatistic | None, linearization: LinearizationLike, root: RootLike
    ) -> NtkStatistic:
        """See ``Structure.accumulate``; the rows themselves are kept."""
        names = list(self._numel)
        found = linearization.rows(root.vectors, names)
        # Padding is left out here, where the cost is cubic in the rows.
        present = slice(None) if root.present is None else root.present.reshape(-1)
        rows = {name: (flatten_rows(found[name], found[name].dtype)[present],) for name in names}
        scales = (None if root.scale is None else root.scale.reshape(-1)[present],)
        if statistic is None:
            return NtkStatistic(rows, scales)
        # The Grams between the new rows and the old are missing from those kept: drop them.
        together = {name: statistic.rows[name] + rows[name] for name in names}
        return NtkStatistic(together, statistic.scales + scales)

    def log_det(
        self, statistic: NtkStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """See ``Structure.log_det``; equal to that of ``full`` (Theorem 3)."""
        dtype = working_dtype(next(iter(statistic.rows.values()))[0].dtype, self._gram_dtype)
        keep = self._keeps_grams(statistic, dtype)
        parts: list[Tensor] = []
        alone = list(self._varying)
        for group, names in self._groups.items():
            self._check_shared(group, names, precisions)
            if keep:
                gram = self._kept_gram(statistic, names, dtype)
                parts.append(gram * precisions[names[0]].to(dtype).reciprocal())
            else:
                alone += names
        for name in alone:
            precision = precisions[name].reshape(-1)
            parts.append(_Gram.apply(dtype, precision, *statistic.rows[name]))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        scale = statistic.scale()
        if scale is not None:
            scale = scale.to(dtype)
            total = scale[:, None] * total * scale
        return log_det_identity_plus(total)

    def predicted_bytes(self, num_rows: int) -> int:
        """See ``Structure.predicted_bytes``: the rows, the Grams that are kept, and S."""
        item = self._itemsize if self._gram_dtype is None else self._gram_dtype.itemsize
        rows = num_rows * sum(self._numel.values()) * self._itemsize
        # One parameter's rows at a time are copied into one matrix.
        rows += num_rows * max(self._numel.values(), default=0) * item
        square = num_rows**2 * item
        kept = len(self._groups) * square
        kept = kept if kept <= max(rows, GRAM_CACHE_BYTES) else 0
        return rows + kept + GRAM_WORKING_COPIES * square

    def describe(self) -> dict[str, str]:
        """See ``Structure.describe``."""
        words = dict.fromkeys(self._varying, "scaled rows")
        for group, names in self._groups.items():
            shared = f" of group {group!r}" if len(names) > 1 else ""
            words.update(dict.fromkeys(names, f"gram{shared}"))
        return {name: words[name] for name in self._numel}

    def _keeps_grams(self, statistic: NtkStatistic, dtype: torch.dtype) -> bool:
        if statistic.carries_graph:
            return False
        grams = len(self._groups) * statistic.num_rows**2 * dtype.itemsize
        rows = sum(
            chunk.numel() * chunk.dtype.itemsize
            for chunks in statistic.rows.values()
            for chunk in chunks
        )
        return grams <= max(rows, GRAM_CACHE_BYTES)

    @staticmethod
    def _kept_gram(
        statistic: NtkStatistic, names: list[str], dtype: torch.dtype
    ) -> Float[Tensor, "R R"]:
        # Another structure may read the same statistic with other groups or another dtype.
        key = (*names, dtype)
        if key not in statistic.grams:
            with torch.no_grad():
                first = next(iter(statistic.rows.values()))[0]
                size = statistic.num_rows
                gram = first.new_zeros(size, size, dtype=dtype)
                for name in names:
                    rows = torch.cat([chunk.to(dtype) for chunk in statistic.rows[name]])
                    gram.addmm_(rows, rows.mT)
            statistic.grams[key] = gram
        return statistic.grams[key]

    @staticmethod
    def _check_shared(group: Hashable, names: list[str], precisions: Mapping[str, Tensor]) -> None:
        shared = all(precisions[name].ndim == 0 for name in names)
        if shared and len(names) > 1:
            values = torch.stack([precisions[name].detach() for name in names])
            shared = bool((values == values[0]).all())
        if not shared:
            raise ConfigurationError(
                f"the parameters {names} of precision group {group!r} do not have one and the same"
                " precision: give the groups of the prior that the precisions come from."
            )


class _Gram(Function):
    """A P0^{-1} Aᵀ of the rows A of one parameter in several chunks.

    Keeps nothing but its inputs for the backward pass (autograd would keep a scaled copy of all
    rows), and reads the rows once for both cotangents.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, precision: Tensor, *chunks: Tensor) -> Tensor:
        ctx.dtype = dtype
        ctx.save_for_backward(precision, *chunks)
        rows = torch.cat([chunk.to(dtype) for chunk in chunks])
        rows.mul_(precision.to(dtype).rsqrt())
        return rows @ rows.mT

    @staticmethod
    @first_order_only
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        precision, *chunks = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        inverse = precision.to(ctx.dtype).reciprocal()
        rows = torch.cat([chunk.to(ctx.dtype) for chunk in chunks])
        # ⟨S̄, A P0^{-1} Aᵀ⟩ has the cotangent (S̄ + S̄ᵀ) A P0^{-1} for A.
        product = ((cotangent + cotangent.mT) @ rows).mul_(inverse)
        precision_cotangent = None
        if wanted[1]:
            per_element = (product * rows).sum(0).mul_(-0.5 * inverse)
            total = per_element if precision.numel() > 1 else per_element.sum(0, keepdim=True)
            precision_cotangent = total.to(precision.dtype)
        sizes = [len(chunk) for chunk in chunks]
        rows_cotangents = [
            part.to(chunk.dtype) if want else None
            for part, chunk, want in zip(product.split(sizes), chunks, wanted[2:], strict=True)
        ]
        return None, precision_cotangent, *rows_cotangents
