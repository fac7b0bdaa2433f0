"""Predict targets from the posterior of the outputs."""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from evigrad.errors import ConfigurationError, EvigradWarning, InputError
from evigrad.likelihoods import Categorical, Conditional, Likelihood
from evigrad.likelihoods.calls import (
    check_targets,
    class_probabilities,
    cumulative,
    in_columns,
    log_probabilities,
    moments,
    noise_variance,
    of_outputs,
    sampled_targets,
)
from evigrad.likelihoods.positions import is_batch, targets_at
from evigrad.likelihoods.targets import as_numbers, like, precisely
from evigrad.likelihoods.weighted import unweighted
from evigrad.passes.checks import as_generator, check_count
from evigrad.posterior.quantiles import check_levels, differentiable, smallest

LINKS = ("monte-carlo", "probit", "bridge", "bridge-norm", "plug-in")
# Number of sampled outputs at once, 128 MiB in float64.
_NUMBERS_AT_ONCE = 2**24
# Half of the mean of a log-normal distribution comes from values above exp(f + variance). At a
# variance of 1, only 16 % of the posterior lies there, and the mean is 1.65 times exp(f).
_WIDE_LOG = 1.0


Result = TypeVar("Result")


def _with_graph(method: Callable[["Predictive"], Result]) -> Callable[["Predictive"], Result]:
    """Return a method whose result has the graph of the outputs, also under ``no_grad``."""

    @wraps(method)
    def wrapped(self: "Predictive") -> Result:
        with torch.set_grad_enabled(self.outputs.requires_grad):
            return method(self)

    return wrapped


@dataclass(frozen=True, eq=False)
class Predictive:
    """Outputs f ~ N(outputs, covariance) of some examples, and predictions of their targets.

    Calling a ``Posterior`` returns this object. If the outputs (m, …, C) have several positions per
    example, each position is predicted separately.

    Attributes:
        outputs: Outputs of the trained network.
        covariance: Covariance of each example's outputs due to uncertain weights (epistemic). For
            ``correlated=False``, the variances (m, …, C) of outputs that are treated as
            independent.
        likelihood: Likelihood of the posterior. It is not modified.
        link: How probabilities and densities of targets are averaged over the outputs.
            ``monte-carlo`` averages over samples of the outputs. ``probit`` uses the scaled outputs
            f / √(1 + π/8 · variance) instead, and ignores correlations between outputs. This is the
            formula of MacKay (1992) for a sigmoid and the mean-field formula for a softmax.
            ``bridge`` is the mean of the Dirichlet distribution of the Laplace bridge for
            ``Categorical``, and ``bridge-norm`` normalizes the variances first (M. Hobbhahn,
            A. Kristiadi and P. Hennig, 2022, arXiv:2003.01227). ``plug-in`` ignores the uncertainty
            of the outputs. For Gaussian targets, all other links have the same closed form. The
            mean and the variances do not depend on the link.
        num_samples: Number of samples for ``monte-carlo``.
        seed: Seed of the samples, so that a prediction does not change between reads.

    Examples:
        >>> import torch
        >>> from evigrad import Predictive
        >>> from evigrad.likelihoods import Gaussian
        >>> prediction = Predictive(torch.zeros(1, 1), torch.full((1, 1, 1), 3.0), Gaussian())
        >>> prediction.std.item()  # 3 epistemic, 1 noise
        2.0

    See also: docs/posterior.md.
    """

    outputs: Float[Tensor, "m ... C"]
    covariance: Float[Tensor, "m ... C C"] | Float[Tensor, "m ... C"]
    likelihood: Likelihood = field(repr=False)
    link: str = "monte-carlo"
    num_samples: int = 200
    seed: int = field(default=0, repr=False)

    def __getitem__(self, name: str) -> "Predictive":
        """Return the prediction of a head of a ``Joint`` likelihood."""
        prediction: Predictive = self.likelihood.part(self, name)
        return prediction

    def with_conditions(self, **conditions: Any) -> "Predictive":
        """Return the prediction under conditions, such as the exposures of the new examples.

        Args:
            **conditions: Conditions by name: one number, or tensors or arrays (m,), (m, …) or
                (m, …, D). See ``evigrad.likelihoods.Conditional``. Other conditions do not change.

        Raises:
            ConfigurationError: If the likelihood has no conditions.
            InputError: If there is no such condition, or a value or a shape is wrong.

        Examples:
            >>> import torch
            >>> from evigrad import Predictive
            >>> from evigrad.likelihoods import Poisson
            >>> rates = Predictive(torch.zeros(1, 1), torch.zeros(1, 1, 1), Poisson(exposure=True))
            >>> rates.with_conditions(exposure=3.0).mean.item()  # 3 times exp(0)
            3.0
        """
        likelihood = unweighted(self.likelihood)
        if not isinstance(likelihood, Conditional):
            raise ConfigurationError(
                f"{type(likelihood).__name__} has no conditions. For a head of a Joint likelihood,"
                " use prediction[name].with_conditions(...)."
            )
        rows = {name: self._in_rows(name, values) for name, values in conditions.items()}
        return replace(self, likelihood=likelihood.with_conditions(**rows))

    def _in_rows(self, name: str, values: Any) -> Tensor:
        """Return conditions of all positions of all examples, (n, D), or one number."""
        shape, values = self.outputs.shape[:-1], as_numbers(values)
        if values.ndim == 0:
            return values
        if values.shape == shape[:1]:
            values = values.view(-1, *[1] * len(shape)).expand(*shape, 1)
        elif values.shape == shape:
            values = values.unsqueeze(-1)
        elif values.shape[:-1] != shape:
            raise InputError(
                f"{name} must be one number, or have the shape {tuple(shape)} or"
                f" {(*shape, '…')}, got {tuple(values.shape)}."
            )
        return values.flatten(0, -2)

    @property
    def mean(self) -> Float[Tensor, "m ... D"]:
        """Return the mean of numeric targets in their units. For other targets, return the outputs.

        The mean equals the outputs for Gaussian noise, and exp(f + variance/2) for counts. To
        predict a total of counts, add up ``plug_in.mean`` instead, because the means of the
        training data add up to more than the number of events. A warning is shown if the variance
        of a log rate is too large for a mean.
        """
        return self._moments[0]

    @property
    def plug_in(self) -> "Predictive":
        """Return the prediction without uncertainty of the weights (the MAP prediction).

        Its ``mean`` is the rate exp(f) for counts, and its ``noise_variance`` is the noise of the
        network's outputs. The epistemic variance is zero.

        Examples:
            >>> import torch
            >>> from evigrad import Predictive
            >>> from evigrad.likelihoods import Poisson
            >>> prediction = Predictive(torch.zeros(1, 1), torch.ones(1, 1, 1), Poisson())
            >>> prediction.mean.item(), prediction.plug_in.mean.item()
            (1.6487212181091309, 1.0)
        """
        zeros = self.outputs.new_zeros(()).expand(self.outputs.shape)
        return replace(self, covariance=zeros, link="plug-in")

    @property
    def epistemic_variance(self) -> Float[Tensor, "m ... D"]:
        """Return the variance of the mean due to uncertain weights. More data reduce it."""
        return self._moments[1]

    @property
    def noise_variance(self) -> Float[Tensor, "m ... D"] | None:
        """Return the variance of the targets due to noise, or None if targets are not numbers.

        If the noise depends on the outputs, the variance is averaged over the outputs. The
        temperature does not affect it.
        """
        return self._moments[2]

    @property
    def variance(self) -> Float[Tensor, "m ... D"]:
        """Return the sum of the epistemic variance and the noise variance.

        If targets are not numbers, return the variance of the outputs.
        """
        noise = self.noise_variance
        return self.epistemic_variance if noise is None else self.epistemic_variance + noise

    @property
    def std(self) -> Float[Tensor, "m ... D"]:
        """Return the standard deviation, which is the square root of ``variance``."""
        return self.variance.sqrt()

    @cached_property
    @_with_graph
    def _moments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return mean, epistemic variance and noise, of the targets or of the outputs."""
        f = self.outputs.flatten(0, -2)
        noise = None if self.correlated else noise_variance(self.likelihood, f)
        if noise is not None:
            return self.outputs, self._variance, noise.view(self.outputs.shape)
        # Variances become matrices, of a few examples at once. Conditions belong to all examples.
        whole = self.correlated or self.likelihood.has_conditions
        size = len(f) if whole else max(1, _NUMBERS_AT_ONCE // f.shape[1] ** 2)
        covariances = self.covariance.flatten(0, self.outputs.dim() - 2)
        parts, largest = [], []
        for outputs, part in zip(f.split(size), covariances.split(size), strict=True):
            covariance = part if self.correlated else part.diag_embed()
            if (target_moments := moments(self.likelihood, outputs, covariance)) is None:
                return self.outputs, self._variance, None
            parts.append(target_moments)
            log_variances = self.likelihood.variance_of_logs(covariance)
            largest.append(f.new_zeros(0) if log_variances is None else log_variances.amax(1))
        self._warn_of_wide_logs(torch.cat(largest).detach())
        shape = self.outputs.shape[:-1]
        mean, epistemic, noise = (
            torch.cat(p).unflatten(0, shape) for p in zip(*parts, strict=True)
        )
        return mean, epistemic, noise

    def _warn_of_wide_logs(self, variances: Float[Tensor, " m"]) -> None:
        """Warn if the mean of an exponential is mostly due to the tails of the posterior."""
        if not bool((wide := variances > _WIDE_LOG).any()):
            return
        warnings.warn(
            "The mean or the noise averages exponentials over the posterior. For"
            f" {int(wide.sum()):,} of {len(wide):,} examples, the logarithm has a variance above"
            f" {_WIDE_LOG:g} (at most {float(variances.max()):.3g}). The tails of the posterior"
            " then determine the average, which can be far too large. Use prediction.plug_in, which"
            " ignores the uncertainty of the weights. log_prob(y) is not affected.",
            EvigradWarning,
            stacklevel=6,  # the caller of mean
        )

    @property
    def _variance(self) -> Float[Tensor, "m ... C"]:
        if not self.correlated:
            return self.covariance.clamp(min=0.0)
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0.0)

    @property
    def correlated(self) -> bool:
        """Whether ``covariance`` contains covariances between the outputs of an example."""
        return self.covariance.dim() > self.outputs.dim()

    @cached_property
    @_with_graph
    def probabilities(self) -> Float[Tensor, "m ... K"]:
        """Return the probability of each class.

        For ``Bernoulli``, return the probability that each label is 1.

        Raises:
            ConfigurationError: If the likelihood has no class probabilities.
        """
        if self.outputs.dim() > 2:
            return self._flat.probabilities.unflatten(0, self.outputs.shape[:-1])
        if self.link != "monte-carlo":
            return class_probabilities(self.likelihood, self._one_output())
        # The number of classes may differ from the number of outputs.
        total, m = self.outputs.new_zeros(()), len(self.outputs)
        # Conditions belong to the examples, so each draw is evaluated by itself.
        num_examples = m if self.likelihood.has_conditions else None
        for f in self._samples(self.num_samples, self.seed):
            flat = f.flatten(0, 1)
            parts = flat.split(num_examples or len(flat))
            draws = torch.cat([class_probabilities(self.likelihood, part) for part in parts])
            total = total + draws.unflatten(0, (-1, m)).sum(0)
        return total / self.num_samples

    @property
    def _flat(self) -> "Predictive":
        """Return all positions of all examples, each as an example, without weights."""
        flat = self._at(torch.ones(self.outputs.shape[:-1], dtype=torch.bool, device="cpu"))
        return replace(flat, likelihood=unweighted(self.likelihood))

    def _at(self, where: Bool[Tensor, "m ..."]) -> "Predictive":
        where = where.to(self.outputs.device)
        return replace(self, outputs=self.outputs[where], covariance=self.covariance[where])

    def log_prob(self, y: Tensor) -> Float[Tensor, "m ..."]:
        """Return the log predictive density, averaged over the distribution of the outputs.

        Args:
            y: Targets in the form that the likelihood expects. If they contain conditions, these
                replace the conditions that you passed to ``with_conditions``.

        Returns:
            One number per example, in nats, for all outputs of the example. For outputs (m, …, C),
            one number per position, with shape (m, …) and NaN at positions without a target.

        Raises:
            ConfigurationError: If the link does not support the likelihood.
            InputError: If the targets do not match the likelihood or the outputs.
        """
        if self.outputs.dim() > 2 and is_batch(y, len(self.outputs)):
            shape, device = self.outputs.shape, self.outputs.device
            targets, counts = targets_at(self.likelihood, shape[1:], y, device)
            where = counts.view(shape[:-1])
            log_densities = self.outputs.new_full(where.shape, math.nan)
            if len(targets):
                log_densities[where] = self._at(where).log_prob(targets)
            return log_densities
        y = in_columns(self.likelihood, self.outputs.shape[1:], y)
        check_targets(self.likelihood, self.outputs.shape, y, self.outputs.device)
        noise = noise_variance(self.likelihood.at(y), self.outputs)
        if noise is not None and self.link != "plug-in":
            return self._normal_log_prob(self.likelihood.plain_targets(y), noise)
        if self.link != "monte-carlo":
            f = self._one_output()
            return of_outputs(log_probabilities(self.likelihood, f, y, allowed=False), f)
        total, m = self.outputs.new_full((len(self.outputs),), -math.inf), len(self.outputs)
        for f in self._samples(self.num_samples, self.seed):
            repeated = y.repeat(len(f), *[1] * (y.ndim - 1))
            log_densities = of_outputs(
                log_probabilities(self.likelihood, f.flatten(0, 1), repeated, allowed=False), f
            )
            total = total.logaddexp(log_densities.unflatten(0, (-1, m)).logsumexp(0))
        return total - math.log(self.num_samples)

    def sample(
        self, n: int, generator: torch.Generator | int | None = None
    ) -> Float[Tensor, "n m ... C"]:
        """Draw outputs that are correlated within an example or position, but not between them.

        Args:
            n: Number of draws.
            generator: CPU generator or seed. Default: the seed of this prediction.

        Returns:
            Outputs (n, m, ..., C), without the noise of the targets.
        """
        if self.outputs.dim() > 2:
            return self._flat.sample(n, generator).view(n, *self.outputs.shape)
        return torch.cat(list(self._samples(n, self.seed if generator is None else generator)))

    def sample_targets(
        self, n: int, generator: torch.Generator | int | None = None
    ) -> Shaped[Tensor, "n m ..."]:
        """Draw targets, including their noise, for outputs drawn as in ``sample``.

        Args:
            n: Number of draws.
            generator: CPU generator or seed. Default: the seed of this prediction.

        Returns:
            Targets in their units without a graph: numbers (n, m, ..., D), or labels (n, m, ...).
            ``Joint.split`` separates the targets of heads.

        Raises:
            ConfigurationError: If ``n`` is not positive, the likelihood has no ``sample``, or the
                inputs require a gradient.
        """
        check_count("n", n)
        flat = self._flat
        generator = as_generator(self.seed if generator is None else generator)
        samples = flat._samples(n, generator)
        if self.link != "monte-carlo" and (self.link == "plug-in" or flat._normal is None):
            samples = [flat._one_output().expand(n, *flat.outputs.shape)]
        draws = [targets_of(flat.likelihood, f, generator) for f in samples]
        return torch.cat(draws).unflatten(1, self.outputs.shape[:-1])

    def cdf(self, y: Any) -> Float[Tensor, "m ..."]:
        """Return the probability that a target is at most y, for each target by itself.

        The distribution is the one of ``log_prob``, under the conditions of ``with_conditions``.

        Args:
            y: One number, or numbers in the shape of the targets without conditions.

        Returns:
            Probabilities in the shape of the targets, with NaN for targets of NaN.

        Raises:
            ConfigurationError: If targets have no order, or a custom likelihood has no ``cdf``.
            InputError: If y has another shape.
        """
        form, values = self._form, as_numbers(y)
        shape = (*self.outputs.shape[:-1], *form.shape[1:])
        values = values.expand(shape) if values.ndim == 0 else values
        if values.shape not in (shape, shape[:-1]) or values.numel() != form.numel():
            raise InputError(
                f"y must be one number, or have the shape {shape} of the targets without"
                f" conditions, got {tuple(values.shape)}."
            )
        values = values.to(precisely(self.outputs)).reshape(form.shape)
        p = torch.where(values.isnan(), math.nan, self._flat._cdf(values.unsqueeze(0))[0])
        return p.to(self.outputs).view(shape)

    def quantile(self, q: Any) -> Shaped[Tensor, "..."]:
        """Return the smallest value that each target does not exceed with probability q.

        Args:
            q: Probability between 0 and 1, or k probabilities in a sequence or a tensor (k,).

        Returns:
            Quantiles in the units of the targets, (m, ..., D), or (m, ...) for ordered classes. The
            first dimension counts several probabilities. Counts and classes have no graph, because
            their quantiles are constant almost everywhere.

        Raises:
            ConfigurationError: If targets have no order, or a custom likelihood has no ``cdf``.
            InputError: If a probability is not between 0 and 1.
        """
        flat, form, levels = self._flat, self._form, check_levels("q", q)
        rows = levels.to(precisely(self.outputs)).view(-1, *[1] * form.ndim)
        if (normal := flat._normal) is not None:
            values = normal[0] + normal[1] * torch.special.ndtri(rows)
        else:
            values, is_whole = torch.zeros_like(rows + form), flat.likelihood.has_whole_targets
            with torch.no_grad():
                for part in (flat.plug_in, flat) if flat.link == "monte-carlo" else (flat,):
                    values = smallest(part._cdf, rows, values, is_whole)
            if torch.is_grad_enabled() and flat.outputs.requires_grad and not is_whole:
                values = differentiable(flat._cdf, values)
        values = values.to(form.dtype).unflatten(1, self.outputs.shape[:-1])
        return values if levels.ndim else values[0]

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the lower and upper ends of the central interval of each target.

        Args:
            level: Probability of the interval. Counts and ordered classes have at least this one.

        Returns:
            Two quantiles in the shape and the units of the targets.

        Raises:
            ConfigurationError: As for ``quantile``.
            InputError: If the level is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise InputError(f"level must be between 0 and 1, such as 0.95, got {level!r}.")
        lower, upper = self.quantile([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        return lower, upper

    @property
    def _form(self) -> Shaped[Tensor, "n ..."]:
        """Return targets of all positions, with the shape and the type that predictions have."""
        likelihood, f = unweighted(self.likelihood), self.outputs.flatten(0, -2)
        return like(f, likelihood.plain_targets(likelihood.reference_targets(f)[0]))

    @property
    def _normal(self) -> tuple[Tensor, Tensor] | None:
        """Return means and standard deviations if all targets are normal, or else None."""
        if (noise := noise_variance(self.likelihood, self.outputs)) is None:
            return None
        epistemic = 0.0 if self.link == "plug-in" else precisely(self._variance)
        return precisely(self.outputs), (precisely(noise) + epistemic).sqrt()

    def _cdf(self, y: Shaped[Tensor, "k m ..."]) -> Float[Tensor, "k m ..."]:
        """Return P(target ≤ y) of k values for each plain target of examples."""
        if (normal := self._normal) is not None:
            return torch.special.ndtr((precisely(y) - normal[0]) / normal[1])
        is_sampled, values, m = self.link == "monte-carlo", list(y), y.shape[1]
        if isinstance(self.likelihood, Conditional):
            values = [self.likelihood.combined(part, self.outputs) for part in y]
        totals = list(torch.zeros_like(y, dtype=precisely(self.outputs).dtype))
        for f in self._samples(self.num_samples, self.seed) if is_sampled else [self._one_output()]:
            rows = precisely(f).reshape(-1, f.shape[-1])
            times = len(rows) // m
            for i, value in enumerate(values):
                repeated = value.repeat(times, *[1] * (value.ndim - 1))
                p = cumulative(self.likelihood, rows, repeated, (len(rows), *y.shape[2:]))
                totals[i] = totals[i] + p.unflatten(0, (times, m)).sum(0)
        return torch.stack(totals) / (self.num_samples if is_sampled else 1)

    def _one_output(self) -> Tensor:
        """Return the outputs of the links without samples."""
        if self.link == "plug-in":
            return self.outputs
        if self.link != "probit":
            return self._bridge_outputs()
        return self.likelihood.probit_outputs(self.outputs, self._variance)

    def _bridge_outputs(self) -> Tensor:
        """Return logits of the mean of the Laplace bridge's Dirichlet distribution."""
        if not isinstance(self.likelihood, Categorical):
            raise ConfigurationError(
                f"link={self.link!r} needs the likelihood Categorical, got"
                f" {type(self.likelihood).__name__}. Use link='monte-carlo' or 'plug-in'."
            )
        covariance = self.covariance if self.correlated else self._variance.diag_embed()
        f, covariance = precisely(self.outputs), precisely(covariance)
        # Condition on logits that add up to 0. A softmax does not depend on their sum.
        with_sum = covariance.sum(-1)
        total = with_sum.sum(-1, keepdim=True)
        gain = with_sum / torch.where(total > 0, total, 1.0)
        f = f - gain * f.sum(-1, keepdim=True)
        variance = covariance.diagonal(dim1=-2, dim2=-1) - gain * with_sum
        is_certain = variance.amin(-1, keepdim=True) <= 0
        variance, k = torch.where(is_certain, 1.0, variance), f.shape[-1]
        if self.link == "bridge-norm":
            scale = variance.mean(-1, keepdim=True) / math.sqrt(k / 2)
            f, variance = f / scale.sqrt(), variance / scale
        logs = f + (-f).logsumexp(-1, keepdim=True) - 2 * math.log(k)
        logs = logs.logaddexp(logs.new_tensor(1 - 2 / k).log())
        return torch.where(is_certain, self.outputs, logs - variance.log()).to(self.outputs)

    def _samples(self, n: int, generator: torch.Generator | int) -> Iterator[Tensor]:
        """Yield n draws (·, m, C), in parts."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        step = max(1, _NUMBERS_AT_ONCE // self.outputs.numel())
        for start in range(0, n, step):
            shape = (min(step, n - start), *self.outputs.shape)
            noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            if self.correlated:
                moved = torch.einsum("mcd,nmd->nmc", self._root, noise.to(self._root))
            else:
                moved = precisely(self._variance).sqrt() * noise.to(self.outputs.device)
            yield self.outputs + moved.to(self.outputs)

    @cached_property
    @_with_graph
    def _root(self) -> Float[Tensor, "m C C"]:
        return symmetric_root(precisely(self.covariance))

    def _normal_log_prob(self, y: Tensor, noise: Tensor) -> Tensor:
        """Return log N(y; outputs, covariance + noise) of the targets that are not NaN."""
        missing = y.isnan()
        errors = precisely(torch.where(missing, 0.0, y.to(self.outputs) - self.outputs))
        if not self.correlated:
            variance = precisely(self._variance) + precisely(noise)
            densities = -0.5 * (errors.square() / variance + (2.0 * math.pi * variance).log())
            return torch.where(missing, 0.0, densities).sum(1).to(self.outputs)
        gain = precisely(noise).rsqrt().masked_fill(missing, 0.0)
        return normal_log_prob(errors, precisely(self.covariance), gain).to(self.outputs)


def symmetric_root(covariance: Float[Tensor, "m C C"]) -> Float[Tensor, "m C C"]:
    """Return the symmetric root of each covariance, which may be singular."""
    values, vectors = torch.linalg.eigh(covariance.detach())
    roots = values.clamp(min=0.0).sqrt()
    root = roots.diag_embed()
    if covariance.requires_grad:
        # dΛ = dR R + R dR in the eigenbasis. Equal eigenvalues have no unique eigenvectors.
        change = vectors.mT @ (covariance - covariance.detach()) @ vectors
        sums = roots.unsqueeze(2) + roots.unsqueeze(1)
        root = root + change / sums.masked_fill(sums == 0, torch.inf)
    return vectors @ root @ vectors.mT


def normal_log_prob(
    errors: Float[Tensor, "*s k"], covariance: Float[Tensor, "*b k k"], gain: Float[Tensor, "*g k"]
) -> Float[Tensor, "*s"]:
    """Return log N(errors; 0, covariance + gain⁻²) of the numbers whose gain is not 0."""
    scaled = gain.unsqueeze(-1) * covariance * gain.unsqueeze(-2)
    factor = torch.linalg.cholesky(
        scaled + torch.eye(gain.shape[-1], dtype=gain.dtype, device=gain.device)
    )
    whitened = (gain * errors).unsqueeze(-1)
    solved = torch.linalg.solve_triangular(factor, whitened, upper=False).squeeze(-1)
    constant = 0.5 * math.log(2.0 * math.pi) * (gain > 0).to(gain)
    logs = torch.where(gain > 0, gain, 1.0).log() - constant
    logs = logs - factor.diagonal(dim1=-2, dim2=-1).log()
    return (logs - 0.5 * solved.square()).sum(-1)


def targets_of(
    likelihood: Likelihood, f: Float[Tensor, "n m C"], generator: torch.Generator
) -> Shaped[Tensor, "n m ..."]:
    """Draw a target for each output of each drawn function, under the likelihood's conditions."""
    if torch.is_grad_enabled() and f.requires_grad:
        raise ConfigurationError(
            "Drawn targets have no derivative, but the inputs require a gradient. Call"
            " sample_targets under torch.no_grad(), or add noise to the outputs of sample(n)."
        )
    if isinstance(likelihood, Conditional):
        conditions = likelihood.reference_targets(f[0])[0]
        likelihood = likelihood.at(conditions.repeat(len(f), 1))
    y = sampled_targets(likelihood, f.flatten(0, 1), generator)
    return like(f, y).unflatten(0, f.shape[:2])
