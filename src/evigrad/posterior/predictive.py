"""What the posterior of the outputs says of targets."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import (
    check_targets,
    class_probabilities,
    log_probabilities,
    noise_variance,
)
from evigrad.likelihoods.positions import is_batch, targets_at

LINKS = ("monte-carlo", "probit", "plug-in")
# Numbers of sampled outputs at once, 128 MiB in float64.
_NUMBERS_AT_ONCE = 2**24


@dataclass(frozen=True, eq=False)
class Predictive:
    """The outputs of some data, f ~ N(mean, covariance), and what they say of the targets.

    Outputs (m, …, C) at several positions of each datum are each on their own.

    Attributes:
        mean: The outputs of the network itself.
        covariance: Covariance of each datum's outputs that the weights' posterior leaves, their
            epistemic part.
        likelihood: Of the posterior; read only.
        link: How probabilities and densities of targets are averaged over the outputs.
            ``monte-carlo``: over samples of them. ``probit``: at the outputs
            f / √(1 + π/8 · variance), for a sigmoid by MacKay (1992) and for a softmax the mean
            field of it; no samples, and no correlations. ``plug-in``: at the mean, without
            uncertainty. Gaussian targets need none, as theirs are in closed form.
        num_samples: Samples of ``monte-carlo``.
        seed: Of these samples, so that a prediction is the same whenever it is read.
    """

    mean: Float[Tensor, "m ... C"]
    covariance: Float[Tensor, "m ... C C"]
    likelihood: Likelihood = field(repr=False)
    link: str = "monte-carlo"
    num_samples: int = 200
    seed: int = field(default=0, repr=False)

    @property
    def epistemic_variance(self) -> Float[Tensor, "m ... C"]:
        """Variances of the outputs by the weights' posterior, which more data lower."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0.0)

    @property
    def noise_variance(self) -> Float[Tensor, "m ... C"] | None:
        """σ² of the targets given the outputs, at every temperature; None but for a Gaussian."""
        noise = noise_variance(self.likelihood, self.mean.flatten(0, -2))
        return None if noise is None else noise.view_as(self.mean)

    @property
    def variance(self) -> Float[Tensor, "m ... C"]:
        """Variances of the targets of regression, epistemic and noise; else of the outputs."""
        noise = self.noise_variance
        return self.epistemic_variance if noise is None else self.epistemic_variance + noise

    @property
    def std(self) -> Float[Tensor, "m ... C"]:
        """The square root of ``variance``, in the units of the targets or outputs."""
        return self.variance.sqrt()

    @cached_property
    def probabilities(self) -> Float[Tensor, "m ... C"]:
        """The probability of each class (Categorical), or of each label being 1 (Bernoulli).

        Raises:
            ConfigurationError: If the likelihood has no probabilities of classes.
        """
        if self.mean.dim() > 2:
            return self._flat.probabilities.view_as(self.mean)
        if self.link != "monte-carlo":
            return class_probabilities(self.likelihood, self._one_output())
        total, m = torch.zeros_like(self.mean), len(self.mean)
        for f in self._samples(self.num_samples, self.seed):
            found = class_probabilities(self.likelihood, f.flatten(0, 1))
            total = total + found.unflatten(0, (-1, m)).sum(0)
        return total / self.num_samples

    @property
    def _flat(self) -> "Predictive":
        """All positions of all data, each as a datum."""
        return self._at(torch.ones(self.mean.shape[:-1], dtype=torch.bool))

    def _at(self, where: Bool[Tensor, "m ..."]) -> "Predictive":
        """Some positions, each as a datum."""
        where = where.to(self.mean.device)
        return replace(self, mean=self.mean[where], covariance=self.covariance[where])

    def log_prob(self, y: Tensor) -> Float[Tensor, "m ..."]:
        """The log predictive density of the targets, averaged over the outputs.

        Args:
            y: Targets as the likelihood takes them.

        Returns:
            One number for each datum, in nats; of all its outputs together. With outputs
            (m, …, C) one for each position, (m, …), and NaN for one without a target.

        Raises:
            InputError: If the targets do not fit.
        """
        if self.mean.dim() > 2 and is_batch(y, len(self.mean)):
            shape, device = self.mean.shape, self.mean.device
            targets, counts = targets_at(self.likelihood, shape[1:], y, device)
            where = counts.view(shape[:-1])
            found = self.mean.new_full(where.shape, math.nan)
            found[where] = self._at(where).log_prob(targets)
            return found
        check_targets(self.likelihood, self.mean.shape, y, self.mean.device)
        if self.noise_variance is not None and self.link != "plug-in":
            return self._normal_log_prob(y)
        if self.link != "monte-carlo":
            return log_probabilities(self.likelihood, self._one_output(), y).detach()
        total, m = self.mean.new_full((len(self.mean),), -math.inf), len(self.mean)
        for f in self._samples(self.num_samples, self.seed):
            repeated = y.repeat(len(f), *[1] * (y.ndim - 1))
            found = log_probabilities(self.likelihood, f.flatten(0, 1), repeated).detach()
            total = total.logaddexp(found.unflatten(0, (-1, m)).logsumexp(0))
        return total - math.log(self.num_samples)

    def sample(
        self, n: int, generator: torch.Generator | int | None = None
    ) -> Float[Tensor, "n m ... C"]:
        """Draw outputs, correlated within a datum, but not between its positions or with others.

        Args:
            n: How many draws of each.
            generator: CPU generator or seed. Default: the seed of this prediction.

        Returns:
            Outputs, without noise of the targets.
        """
        if self.mean.dim() > 2:
            return self._flat.sample(n, generator).view(n, *self.mean.shape)
        return torch.cat(list(self._samples(n, self.seed if generator is None else generator)))

    def _one_output(self) -> Tensor:
        if self.link == "plug-in":
            return self.mean
        return self.mean * (1.0 + math.pi / 8.0 * self.epistemic_variance).rsqrt()

    def _samples(self, n: int, generator: torch.Generator | int) -> Iterator[Tensor]:
        """So many draws (·, m, C), in parts."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        step = max(1, _NUMBERS_AT_ONCE // self.mean.numel())
        for start in range(0, n, step):
            shape = (min(step, n - start), *self.mean.shape)
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            moved = torch.einsum("mcd,nmd->nmc", self._root, noise.to(self._root))
            yield self.mean + moved.to(self.mean)

    @cached_property
    def _root(self) -> Float[Tensor, "m C C"]:
        """A square root of each covariance, by eigenvalues: it may be singular."""
        values, vectors = torch.linalg.eigh(_precise(self.covariance))
        return vectors * values.clamp(min=0.0).sqrt().unsqueeze(1)

    def _normal_log_prob(self, y: Tensor) -> Tensor:
        """N(y; mean, covariance + σ²)."""
        noise = _precise(self.variance - self.epistemic_variance)
        factor = torch.linalg.cholesky(_precise(self.covariance) + noise.diag_embed())
        error = _precise(y.to(self.mean) - self.mean).unsqueeze(2)
        solved = torch.linalg.solve_triangular(factor, error, upper=False).squeeze(2)
        logs = factor.diagonal(dim1=1, dim2=2).log().sum(1)
        constant = 0.5 * y.shape[1] * math.log(2.0 * math.pi)
        return -(0.5 * solved.square().sum(1) + logs + constant).to(self.mean)


def _precise(values: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return values if values.device.type == "mps" else values.double()
