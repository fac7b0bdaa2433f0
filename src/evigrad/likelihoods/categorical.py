"""A likelihood for labels that are one of C classes."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from evigrad.core.roots import (
    TOP_CLASSES,
    RootRows,
    check_root,
    condensed_logits,
    one_hot,
    softmax_rows,
    top_norms,
)
from evigrad.errors import InputError
from evigrad.inputs import MISSING_LABELS, refuse_where
from evigrad.likelihoods.base import Likelihood, Metric
from evigrad.likelihoods.targets import total


class Categorical(Likelihood):
    """One of C classes with logits f: p(y=c|f) = softmax(f)_c. Targets are integers (m,).

    Args:
        ignore_index: Label for positions without a target, such as padding, if outputs (m, …, C)
            have labels (m, …). Default: −100.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Categorical
        >>> Categorical().log_prob(torch.zeros(1, 2), torch.tensor([1]))
        tensor([-0.6931])

    See also: docs/likelihoods.md.
    """

    name = "categorical"
    is_classification = True

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def extra_repr(self) -> str:
        """Return ``ignore_index`` for the module's repr, unless it has its default value."""
        return "" if self.ignore_index == -100 else f"ignore_index={self.ignore_index}"

    def counted(self, y: Tensor) -> Bool[Tensor, "..."]:
        """Return which labels are not ``ignore_index``."""
        return y != self.ignore_index

    def log_prob(self, f: Float[Tensor, "m C"], y: Integer[Tensor, " m"]) -> Float[Tensor, " m"]:
        return f.log_softmax(dim=1).gather(1, y.long().unsqueeze(1)).squeeze(1)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that each example has one integer label from 0 to C − 1, and that C ≥ 2."""
        super().validate(f_shape, y)
        num_data, num_outputs = f_shape
        if num_outputs == 1:
            raise InputError(
                "Categorical needs at least two outputs, but the model has only one, and its"
                " softmax is always 1. For numeric targets (regression), use"
                ' likelihood="gaussian". For two classes, use Bernoulli() with'
                " y.float().unsqueeze(1), or a model with two outputs."
            )
        if y.ndim != 1:
            hint = ""
            if y.shape == (num_data, 1):
                hint = ". Use y.squeeze(1)"
            elif y.shape == (num_data, num_outputs):
                hint = (
                    ". If an example may have several labels or none, use"
                    ' likelihood="bernoulli" with y.float()'
                )
                if bool((y.sum(1) == 1).all()):
                    hint = f". For one-hot targets, use y.argmax(1){hint}"
                if bool(((y != 0) & (y != 1)).any()):
                    hint = (
                        ". Smoothed labels or probabilities are not targets, because their"
                        " cross-entropy is not a log density. Use the labels, y.argmax(1)"
                    )
            raise InputError(
                f"Class labels must have the shape ({num_data},), got {tuple(y.shape)}{hint}."
            )
        what = f" (the model has {num_outputs} outputs)"
        check_labels(y, num_outputs, self.ignore_index, what, "Number the labels from 0")

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return Λ = diag(p) − ppᵀ."""
        p = f.softmax(dim=1)
        return p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return the label's unit vector minus the probabilities."""
        return one_hot(f, y.long().unsqueeze(1)).squeeze(1) - f.softmax(dim=1)

    def probabilities(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
        """Return the softmax of f."""
        return f.softmax(dim=1)

    def _num_correct(self, f: Tensor, y: Tensor) -> Metric | None:
        # The largest logit, because rounding makes nearly equal probabilities equal.
        if type(self).probabilities is Categorical.probabilities and not self._inherited:
            return total(f.argmax(dim=1) == y)
        return super()._num_correct(f, y)

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Int[Tensor, " m"]:
        """Draw labels from the softmax of f."""
        p = f.detach().softmax(dim=1).to(generator.device)
        return p.multinomial(1, generator=generator).squeeze(1).to(f.device)

    def root(
        self,
        f: Float[Tensor, "m C"],
        columns: Int[Tensor, "m k"] | None = None,
        kind: str = "subblock",
    ) -> RootRows:
        """Return the columns in closed form (see ``softmax_rows``)."""
        check_root(kind)
        return RootRows(softmax_rows(f, columns, kind))

    def num_rows(self, num_outputs: int) -> int:
        """Return C − 1, which is the rank of Λ, or C if a subclass overrides ``root``."""
        is_own = type(self).root is not Categorical.root
        return num_outputs if is_own else max(num_outputs - 1, 1)

    def row_norms(self, f: Float[Tensor, "m C"], kind: str) -> Float[Tensor, "m C"]:
        check_root(kind)
        p = f.detach().softmax(dim=1)
        if kind != "eigen":
            return _score_norms(p)
        if f.shape[1] <= TOP_CLASSES:
            return super().row_norms(f, kind)
        p = p.sort(dim=1, descending=True).values
        return torch.cat([top_norms(p), _score_norms(p)[:, TOP_CLASSES:]], dim=1)

    def condensed(self, f: Float[Tensor, "m C"], kind: str) -> Float[Tensor, "m D"]:
        """Return f, or the largest logits and one logit for the rest if ``kind`` is "eigen"."""
        check_root(kind)
        return condensed_logits(f.detach()) if kind == "eigen" else f

    def row_scores(
        self, condensed: Float[Tensor, "m D"], kind: str
    ) -> tuple[Float[Tensor, "m K"], Float[Tensor, " m"] | None]:
        """Return the squared norms of columns (see ``Likelihood.row_scores``).

        For the "eigen" root of at most ``TOP_CLASSES`` classes, the last column is omitted. It is
        zero because Λ 1 = 0.
        """
        if kind != "eigen":
            return super().row_scores(condensed, kind)
        if condensed.shape[1] <= TOP_CLASSES:
            return self.row_norms(condensed, kind)[:, :-1], None
        p = condensed.softmax(dim=1)
        others = p[:, TOP_CLASSES]
        return top_norms(p), others * (1.0 + p.square().sum(dim=1))


def _score_norms(p: Float[Tensor, "m C"]) -> Float[Tensor, "m C"]:
    """Return p_d |e_d − p|², with 1 − 2 p_d + |p|² as a sum of squares."""
    squares = p.square()
    others = squares.sum(dim=1, keepdim=True) - squares
    return p * ((1.0 - p).square() + others.clamp(min=0.0))


def check_labels(y: Tensor, num_classes: int, ignore_index: int, what: str, fix: str) -> None:
    """Raise an InputError unless labels (m,) are integers from 0 to ``num_classes`` − 1.

    ``what`` explains the range and ``fix`` says how to change it.

    Raises:
        InputError: If the type or a label is wrong.
    """
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        advice = f" NaN cannot be converted. {MISSING_LABELS}." if y.is_floating_point() else ""
        raise InputError(f"Class labels must be integers, got {y.dtype}. Use y.long().{advice}")
    label = y.long()
    nearest_label = label.clamp(0, num_classes - 1)
    if torch.equal(label, nearest_label):
        return
    outside = label != nearest_label
    refuse_where(
        outside & (label == ignore_index),
        label,
        "is the ignore_index of missing labels. Labels may be missing at positions of outputs"
        " (m, …, C) and in heads of a Joint likelihood. Otherwise, remove the example",
    )
    words = f"is outside 0 … {num_classes - 1}{what}. {fix}"
    refuse_where(label < 0, label, f"{words}. {MISSING_LABELS}")
    refuse_where(outside, label, words)
