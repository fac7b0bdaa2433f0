"""A likelihood for labels that are one of K ordered classes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods.base import Likelihood, Metric, by_entry
from evigrad.likelihoods.categorical import check_labels
from evigrad.likelihoods.targets import total


class Ordinal(Likelihood):
    """One of K ordered classes, such as a rating: p(y ≤ k | f) = sigmoid(θ_k − f).

    The model has one output f, and the K − 1 increasing thresholds θ are learned. Targets are
    integers (m,) from 0 to K − 1. A larger output makes higher classes more probable. This is the
    cumulative logit or proportional odds model (P. McCullagh, 1980, "Regression models for ordinal
    data"). The second derivative of −log p(y|f) depends on the targets. Λ is therefore its mean
    over the targets, the Fisher information.

    Args:
        num_classes: Number of classes K, at least 2.
        thresholds: K − 1 increasing thresholds at the start. Default: thresholds that make all
            classes equally probable at f = 0.
        learnable: Whether the thresholds are learned. Default: True.
        ignore_index: Label for positions without a target, such as padding, if outputs (m, …, 1)
            have labels (m, …). Default: −100.

    Attributes:
        cuts: The first threshold and the logarithms of the gaps between thresholds, (K − 1,).

    Raises:
        ConfigurationError: If there are fewer than two classes, the thresholds are not K − 1
            increasing finite numbers, or ``learnable`` is not a bool.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Ordinal
        >>> Ordinal(3, thresholds=[-1.0, 1.0]).probabilities(torch.zeros(1, 1))
        tensor([[0.2689, 0.4621, 0.2689]], grad_fn=<ExpBackward0>)

    See also: docs/likelihoods.md.
    """

    name = "ordinal"
    couples_outputs = False
    is_classification = True
    has_whole_targets = True

    def __init__(
        self,
        num_classes: int,
        thresholds: Sequence[float] | Tensor | None = None,
        learnable: bool = True,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 2:
            raise ConfigurationError(
                f"num_classes must be a whole number of at least 2, got {num_classes!r}."
            )
        if not isinstance(learnable, bool):
            raise ConfigurationError(f"learnable must be True or False, got {learnable!r}.")
        start = _equal(num_classes) if thresholds is None else _checked(thresholds, num_classes)
        self.num_classes, self.ignore_index = num_classes, ignore_index
        cuts = torch.cat([start[:1], start.diff().log()]).to(torch.get_default_dtype())
        self.cuts = nn.Parameter(cuts, requires_grad=learnable)

    def extra_repr(self) -> str:
        """Return the settings for the module's repr."""
        ignored = "" if self.ignore_index == -100 else f", ignore_index={self.ignore_index}"
        return f"num_classes={self.num_classes}{ignored}"

    @property
    def has_labels(self) -> bool:
        """Return True, because the targets are single labels (m,)."""
        return True

    @property
    def thresholds(self) -> Float[Tensor, " J"]:
        """Return the K − 1 thresholds θ, differentiable in ``cuts``."""
        steps = torch.cat([self.cuts[:1], self.cuts[1:].exp()])
        # Not cumsum, which has no deterministic version on GPUs.
        return steps.expand(len(steps), -1).tril().sum(1)

    def counted(self, y: Tensor) -> Bool[Tensor, "..."]:
        """Return which labels are not ``ignore_index``."""
        return y != self.ignore_index

    def _log_p(self, f: Float[Tensor, "m 1"]) -> Float[Tensor, "m K"]:
        """Return the log probability of each class.

        With a = θ_{k−1} − f and b = θ_k − f, the probability σ(b) − σ(a) of a class is equal to
        σ(b) σ(−a) (1 − exp(a − b)). The logarithm of this product loses no digits in the tails.
        """
        distances = self.thresholds.to(f) - f
        gaps = (-(-self.cuts[1:].to(f).exp()).expm1()).log()
        below, above = logsigmoid(distances), logsigmoid(-distances)
        return pad(below, (0, 1)) + pad(above, (1, 0)) + pad(gaps, (1, 1))

    def _log_information(self, f: Float[Tensor, "m 1"]) -> Float[Tensor, "m 1"]:
        """Return log Λ, where Λ = Σ_k σ'(θ_k − f) (p_k + p_{k+1}) is a sum of positive terms."""
        distances, log_p = self.thresholds.to(f) - f, self._log_p(f)
        slopes = logsigmoid(distances) + logsigmoid(-distances)
        beside = torch.logaddexp(log_p[:, :-1], log_p[:, 1:])
        return (slopes + beside).logsumexp(dim=1, keepdim=True)

    def log_prob(self, f: Float[Tensor, "m 1"], y: Integer[Tensor, " m"]) -> Float[Tensor, " m"]:
        return self._log_p(f).gather(1, y.long().unsqueeze(1)).squeeze(1)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that there is one output and one integer label from 0 to K − 1 per example."""
        super().validate(f_shape, y)
        num_data, num_outputs = f_shape
        if num_outputs != 1:
            raise InputError(
                "Ordinal needs one output for all classes, because its thresholds separate the"
                f" classes, but the model has {num_outputs} outputs. For several ordered targets,"
                " use Joint with one Ordinal for each."
            )
        if y.ndim != 1:
            hint = ". Use y.squeeze(1)" if y.shape == (num_data, 1) else ""
            raise InputError(
                f"Class labels must have the shape ({num_data},), got {tuple(y.shape)}{hint}."
            )
        fix = "Number the labels from 0, or set num_classes"
        check_labels(y, self.num_classes, self.ignore_index, "", fix)

    def hessian(self, f: Float[Tensor, "m 1"]) -> Float[Tensor, "m 1 1"]:
        """Return the Fisher information, differentiable in f and in the thresholds."""
        return self._log_information(f).exp().unsqueeze(2)

    def reference_targets(self, f: Float[Tensor, "m 1"]) -> tuple[Tensor, Tensor]:
        """Return the first and the last label, for subclasses with another density."""
        label = torch.zeros(len(f), dtype=torch.long, device=f.device)
        return label, label + self.num_classes - 1

    def score(self, f: Float[Tensor, "m 1"], y: Tensor) -> Float[Tensor, "m 1"]:
        """Return σ(θ_{y−1} − f) − σ(f − θ_y), without the term of a threshold that does not exist.

        The score is positive if the label is higher than the output suggests.
        """
        distances = self.thresholds.to(f) - f
        scores = pad(distances.sigmoid(), (1, 0)) - pad((-distances).sigmoid(), (0, 1))
        return scores.gather(1, y.long().unsqueeze(1))

    def probabilities(self, f: Float[Tensor, "m 1"]) -> Float[Tensor, "m K"]:
        """Return the probability of each class."""
        return self._log_p(f).exp()

    def cdf(self, f: Float[Tensor, "m 1"], y: Tensor) -> Float[Tensor, " m"]:
        """Return sigmoid(θ_k − f) for the last class k ≤ y, or 0 if there is none."""
        ends = pad((self.thresholds.to(f) - f).sigmoid(), (1, 1))
        ends = ends.index_fill(1, torch.tensor(self.num_classes, device=f.device), 1.0)
        last = y.to(f).floor().clamp(-1, self.num_classes - 1).long()
        return ends.gather(1, last.unsqueeze(1) + 1).squeeze(1)

    def probit_outputs(self, f: Tensor, variance: Tensor) -> Tensor:
        """Raise an error, because MacKay's formula would also have to scale the thresholds.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            "link='probit' does not support Ordinal, because it scales the outputs but not the"
            " thresholds. Use link='monte-carlo' or 'plug-in'."
        )

    def metrics(self, f: Float[Tensor, "m 1"], y: Tensor) -> Mapping[str, Metric]:
        """Return the sums ``log_likelihood``, ``correct`` and ``absolute_error`` (in classes).

        The error is the distance between the label and the median of the predicted classes.
        """
        median = (self.thresholds.detach().to(f) < f.detach()).sum(1)
        return {**super().metrics(f, y), "absolute_error": total((median - y).abs())}

    def sample(self, f: Float[Tensor, "m 1"], generator: torch.Generator) -> Int[Tensor, " m"]:
        """Draw labels: the number of thresholds below f plus logistic noise."""
        uniform = torch.rand(f.shape, generator=generator, device=generator.device, dtype=f.dtype)
        latent = f.detach() + uniform.logit().to(f.device)
        return (self.thresholds.detach().to(f) < latent).sum(1)

    def _diagonal_root(self, f: Float[Tensor, "m 1"]) -> Float[Tensor, "m 1"]:
        return (0.5 * self._log_information(f)).exp()

    def reported(self) -> dict[str, float]:
        """Return each threshold as ``threshold/INDEX``."""
        return by_entry("threshold", self.thresholds.detach())


def _equal(num_classes: int) -> Float[Tensor, " J"]:
    """Return the thresholds of equally probable classes at f = 0."""
    levels = torch.arange(1, num_classes, dtype=torch.float64, device="cpu") / num_classes
    return levels.logit()


def _checked(thresholds: Any, num_classes: int) -> Float[Tensor, " J"]:
    """Return thresholds in float64, or raise an error if they do not separate the classes."""
    try:
        device = thresholds.device if isinstance(thresholds, Tensor) else "cpu"
        values = torch.as_tensor(thresholds, dtype=torch.float64, device=device).detach()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"thresholds must be numbers, got {thresholds!r}.") from error
    is_increasing = values.ndim == 1 and bool((values.diff() > 0).all())
    if values.shape != (num_classes - 1,) or not is_increasing or not values.isfinite().all():
        raise ConfigurationError(
            f"thresholds must be {num_classes - 1} increasing finite numbers for {num_classes}"
            f" classes, got {thresholds!r}."
        )
    return values
