"""A likelihood of several targets of different kinds."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from evigrad.core.roots import RootRows, check_root, checked_rows
from evigrad.errors import ConfigurationError, InputError, nearest
from evigrad.likelihoods.base import Likelihood, Metric
from evigrad.likelihoods.calls import noise_variance
from evigrad.likelihoods.targets import as_numbers, check_whole_labels, like, total
from evigrad.likelihoods.weighted import Weighted, unweighted


class Head(NamedTuple):
    """A part of the outputs with its own likelihood.

    Attributes:
        name: Name of the part.
        likelihood: Its likelihood.
        outputs: Its columns of the outputs.
        targets: Its columns of the joint targets.
        has_labels: Whether its targets are labels (m,).
    """

    name: str
    likelihood: Likelihood
    outputs: slice
    targets: slice
    has_labels: bool


class Joint(Likelihood):
    """Several targets per example, each with its own outputs and likelihood.

    Given the outputs, the targets are independent, so log densities add up and Λ is block-diagonal.
    The learned noise of each head determines its weight relative to the other heads, so you need
    no task weights. A target may be missing: NaN for heads with ``missing="nan"``, and
    ``ignore_index`` for labels. N counts examples, including those with missing targets.

    Args:
        heads: Number of outputs and likelihood of each head, by name. The first head has the first
            outputs of the model, and so on.

    Raises:
        ConfigurationError: If there is no head, or a name, a number of outputs or a likelihood is
            invalid.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Categorical, Gaussian, Joint
        >>> likelihood = Joint({"depth": (1, Gaussian()), "kind": (3, Categorical())})
        >>> y = likelihood.targets({"depth": torch.zeros(2, 1), "kind": torch.tensor([0, 2])})
        >>> likelihood.log_prob(torch.zeros(2, 4), y).shape
        torch.Size([2])

    See also: docs/likelihoods.md.
    """

    name = "joint"

    def __init__(self, heads: Mapping[str, tuple[int, Likelihood]]) -> None:
        super().__init__()
        if not heads:
            raise ConfigurationError(
                "A joint likelihood needs at least one head, got none. Use"
                ' Joint({"depth": (1, Gaussian()), ...}).'
            )
        for name, head in heads.items():
            if not re.fullmatch(r"\w+", str(name)):
                raise ConfigurationError(
                    f"The name of a head must have letters, digits and underscores only, got"
                    f" {name!r}."
                )
            is_pair = isinstance(head, tuple) and len(head) == 2
            if not (is_pair and isinstance(head[0], int) and isinstance(head[1], Likelihood)):
                raise ConfigurationError(
                    f"The head {name!r} must be a number of outputs and a likelihood, such as"
                    f" (1, Gaussian()), got {head!r}."
                )
            if head[0] < 1:
                raise ConfigurationError(
                    f"The head {name!r} must have at least one output, got {head[0]}."
                )
        self.sizes = {name: size for name, (size, _) in heads.items()}
        self.heads = nn.ModuleDict()
        # ``ModuleDict`` itself refuses names such as "type", because modules have such attributes.
        self.heads._modules.update({name: likelihood for name, (_, likelihood) in heads.items()})
        self.has_conditions = any(likelihood.has_conditions for _, likelihood in heads.values())
        self.couples_outputs = any(  # pyright: ignore[reportAttributeAccessIssue]
            likelihood.couples_outputs for _, likelihood in heads.values()
        )

    @cached_property
    def _parts(self) -> list[Head]:
        parts, first_output, first_target = list[Head](), 0, 0
        for name, size in self.sizes.items():
            likelihood = self.heads[name]
            assert isinstance(likelihood, Likelihood)
            f = torch.zeros(1, size, device="cpu")
            try:
                y = likelihood.sample(f, torch.Generator().manual_seed(0))
            except ConfigurationError:  # a custom likelihood without this method
                y = likelihood.reference_targets(f)[0]
            width = 1 if y.ndim == 1 else y.shape[1]
            outputs = slice(first_output, first_output + size)
            targets = slice(first_target, first_target + width)
            parts.append(Head(name, likelihood, outputs, targets, y.ndim == 1))
            first_output, first_target = outputs.stop, targets.stop
        return parts

    def targets(self, y: Mapping[str, Any]) -> Float[Tensor, "m D"]:
        """Return the targets of all heads in one tensor.

        Args:
            y: Targets of each head, tensors or arrays of shape (m,) or (m, D), as its likelihood
                expects them.

        Returns:
            A float64 tensor with the columns of all heads.

        Raises:
            InputError: If a head has no targets, or targets of another shape.
        """
        if set(y) != set(self.sizes):
            raise InputError(
                f"Targets must have the heads {', '.join(self.sizes)}, got {', '.join(y)}."
            )
        columns: list[Tensor] = []
        for head in self._parts:
            width = head.targets.stop - head.targets.start
            part = as_numbers(y[head.name])
            if head.has_labels and part.is_floating_point():
                raise InputError(
                    f"The labels of {head.name!r} must be integers, got {part.dtype}. Mark missing"
                    " labels with the ignore_index, -100."
                )
            part = part.unsqueeze(1) if part.ndim == 1 and width == 1 else part
            if part.ndim != 2 or part.shape[1] != width:
                raise InputError(
                    f"The targets of {head.name!r} must have {width} columns, got the shape"
                    f" {tuple(part.shape)}."
                )
            columns.append(part.double())
        if len({len(column) for column in columns}) > 1:
            sizes = {name: len(part) for name, part in y.items()}
            raise InputError(f"All heads must have the same number of targets, got {sizes}.")
        return torch.cat(columns, 1)

    def at(self, y: Tensor) -> Likelihood:
        if not self.has_conditions:
            return self
        here = copy.copy(self)
        here._parts = [
            head._replace(likelihood=head.likelihood.at(_of_head(head, y))) for head in self._parts
        ]
        return here

    def split(self, y: Float[Tensor, "m D"]) -> dict[str, Tensor]:
        """Return the targets of each head, by name."""
        return {head.name: _of_head(head, y) for head in self._parts}

    def part(self, prediction: Any, name: str) -> Any:
        """Return the prediction of one head. Use ``prediction[name]``."""
        if name not in self.sizes:
            raise ConfigurationError(
                f"There is no head {name!r}. The heads are {', '.join(self.sizes)}."
                f"{nearest(name, self.sizes)}"
            )
        (head,) = (head for head in self._parts if head.name == name)
        columns = head.outputs
        both = (columns, columns) if prediction.correlated else (columns,)
        return replace(
            prediction,
            outputs=prediction.outputs[..., columns],
            covariance=prediction.covariance[..., *both],
            likelihood=unweighted(head.likelihood),
        )

    def by_head(self, f: Tensor, y: Tensor) -> Iterator[tuple[Head, Tensor, Tensor, Tensor | None]]:
        """Yield each head with its outputs, its targets, and which of these count (None: all)."""
        for head in self._parts:
            targets = _of_head(head, y)
            counts = head.likelihood.counted(targets)
            if counts is not None and bool(counts.all()):
                counts = None
            elif counts is not None:
                targets = _where(counts, targets)
            if not isinstance(head.likelihood, Weighted):  # which separates labels from weights
                targets = like(f, targets)
            yield head, f[:, head.outputs], targets, counts

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        """Return the sum of the heads' log densities."""
        return sum(
            (
                _where(counts, head.likelihood.log_prob(head_outputs, targets))
                for head, head_outputs, targets, counts in self.by_head(f, y)
            ),
            f.new_zeros(len(f)),
        )

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return the scores of all heads side by side."""
        scores = [
            _where(counts, head.likelihood.score(head_outputs, targets))
            for head, head_outputs, targets, counts in self.by_head(f, y)
        ]
        return torch.cat(scores, 1)

    def weights(self, y: Tensor) -> Float[Tensor, "m C"] | None:
        """Return the factor of each output. It is 0 where the head's target is missing."""
        factors, are_ones = list[Tensor](), True
        for head in self._parts:
            targets, size = _of_head(head, y), self.sizes[head.name]
            factor, counts = head.likelihood.weights(targets), head.likelihood.counted(targets)
            are_ones &= factor is None and (counts is None or bool(counts.all()))
            factor = y.new_ones(len(y)) if factor is None else factor.to(y)
            factor = factor.unsqueeze(1) if factor.ndim == 1 else factor
            factors.append(_where(counts, factor).expand(-1, size))
        return None if are_ones else torch.cat(factors, 1)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check the number of outputs, and the targets of each head."""
        is_real = isinstance(y, Tensor) and y.is_floating_point()
        super().validate(f_shape, y.nan_to_num(nan=0.0) if is_real else y)
        width, size = self._parts[-1].targets.stop, sum(self.sizes.values())
        if f_shape[1] != size:
            raise InputError(
                f"The heads need {size} outputs ({_listed(self.sizes)}), got {f_shape[1]}. Change"
                " the last layer of the model."
            )
        if y.ndim != 2 or y.shape[1] != width or not is_real:
            raise InputError(
                f"Targets of the heads must be joined in one tensor, got {y.dtype} of shape"
                f" {tuple(y.shape)}. Use likelihood.targets({{name: targets, ...}})."
            )
        for head in self._parts:
            if head.has_labels:
                check_whole_labels(y[:, head.targets], f" of {head.name!r}")
            targets = _of_head(head, y)
            counts = head.likelihood.counted(targets)
            targets = targets if counts is None else targets[counts]
            if len(targets):
                try:
                    head.likelihood.validate((len(targets), self.sizes[head.name]), targets)
                except InputError as error:
                    raise InputError(f"Head {head.name!r}: {error}") from error

    def check_derivatives(self, f: Float[Tensor, "m C"], y: Tensor, curvature: str = "ggn") -> None:
        for head, head_outputs, targets, counts in self.by_head(f, y):
            which = slice(None) if counts is None else counts
            if len(targets[which]):
                head.likelihood.check_derivatives(head_outputs[which], targets[which], curvature)

    @property
    def defines_hessian(self) -> bool:
        return all(head.likelihood.defines_hessian for head in self._parts)

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return the block-diagonal matrix of the heads' Hessians."""
        padded = []
        for head in self._parts:
            beside = (head.outputs.start, f.shape[1] - head.outputs.stop)
            padded.append(pad(head.likelihood.hessian(f[:, head.outputs]), (*beside, *beside)))
        return torch.stack(padded).sum(0)

    def root(
        self, f: Float[Tensor, "m C"], columns: Tensor | None = None, kind: str = "subblock"
    ) -> RootRows:
        """Return columns of the block-diagonal matrix of the heads' roots."""
        check_root(kind)
        roots, inside = list[RootRows](), list[Tensor]()
        for head in self._parts:
            start, stop = head.outputs.start, head.outputs.stop
            head_columns = None
            if columns is not None:
                inside.append((columns >= start) & (columns < stop))
                head_columns = torch.where(inside[-1], columns - start, -1)
            part, likelihood = f[:, start:stop], head.likelihood
            root = likelihood.root(part, head_columns, kind)
            root = checked_rows(root, part, head_columns, type(likelihood).__name__)
            roots.append(replace(root, vectors=pad(root.vectors, (start, f.shape[1] - stop))))
        scales = [root.factors for root in roots]
        has_scale = any(root.scale is not None for root in roots)
        if columns is None:
            vectors = torch.cat([root.vectors for root in roots], 1)
            return RootRows(vectors, torch.cat(scales, 1) if has_scale else None)
        scale = torch.ones_like(scales[0])
        for where, factor in zip(inside, scales, strict=True):
            scale = torch.where(where, factor, scale)
        vectors = torch.stack([root.vectors for root in roots]).sum(0)
        return RootRows(vectors, scale if has_scale else None)

    def noise_variance(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"] | None:
        """Return the noise of all heads side by side, or None if one is not Gaussian."""
        variances = [noise_variance(unweighted(h.likelihood), f[:, h.outputs]) for h in self._parts]
        numbers = [variance for variance in variances if variance is not None]
        return torch.cat(numbers, 1) if len(numbers) == len(variances) else None

    def moments(self, *arguments: Any, **named: Any) -> None:
        """Raise an error, because only single heads have means, probabilities and quantiles.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(self._only_by_head())

    probabilities = cdf = moments

    def _only_by_head(self) -> str:
        return (
            f"A joint prediction has heads: {', '.join(self.sizes)}. Select one by name, as in"
            f" prediction[{next(iter(self.sizes))!r}]."
        )

    def num_rows(self, num_outputs: int) -> int:
        """Return the sum of the heads' numbers of rows."""
        return sum(head.likelihood.num_rows(self.sizes[head.name]) for head in self._parts)

    def row_norms(self, f: Float[Tensor, "m C"], kind: str) -> Float[Tensor, "m C"]:
        """Return the norms of all heads side by side."""
        norms = [head.likelihood.row_norms(f[:, head.outputs], kind) for head in self._parts]
        return torch.cat(norms, 1)

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Tensor:
        """Draw targets of all heads, joined in one tensor."""
        draws = {
            head.name: head.likelihood.sample(f[:, head.outputs], generator) for head in self._parts
        }
        return self.targets(draws)

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> Mapping[str, Metric]:
        """Return the joint ``log_likelihood``, and the metrics of each head under HEAD/METRIC.

        Log likelihoods are sums over the observed targets, so the heads' values add up. Means of
        other metrics are over the observed targets.
        """
        sums: dict[str, Metric] = {"log_likelihood": total(self.log_prob(f.detach(), y))}
        for head, head_outputs, targets, counts in self.by_head(f, y):
            which = slice(None) if counts is None else counts
            count = len(targets[which])
            for name, value in head.likelihood.metrics(head_outputs[which], targets[which]).items():
                if name != "log_likelihood" and not isinstance(value, tuple):
                    value = (value, count)
                sums[f"{head.name}/{'accuracy' if name == 'correct' else name}"] = value
        return sums

    def reported(self) -> dict[str, float]:
        """Return the parameters of each head under HEAD/PARAMETER."""
        return {
            f"{head.name}/{name}": value
            for head in self._parts
            for name, value in head.likelihood.reported().items()
        }


def _of_head(head: Head, y: Tensor) -> Tensor:
    columns = y[:, head.targets]
    return columns.squeeze(1).long() if head.has_labels else columns


def _where(counts: Tensor | None, values: Tensor) -> Tensor:
    """Return values (m, ...), with zeros for examples that do not count."""
    if counts is None:
        return values
    return torch.where(counts.view(-1, *[1] * (values.ndim - 1)), values, 0)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
