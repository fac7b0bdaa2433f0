"""What the posterior of the outputs says of targets."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import (
    check_targets,
    class_probabilities,
    log_probabilities,
    moments,
    noise_variance,
)
from evigrad.likelihoods.positions import is_batch, targets_at

LINKS = ("monte-carlo", "probit", "plug-in")
# Numbers of sampled outputs at once, 128 MiB in float64.
_NUMBERS_AT_ONCE = 2**24


@dataclass(frozen=True, eq=False)
class Predictive:
    """The outputs of some data, f ~ N(outputs, covariance), and what they say of the targets.

    Outputs (m, …, C) at several positions of each datum are each on their own.

    Attributes:
        outputs: The outputs of the network itself.
        covariance: Covariance of each datum's outputs that the weights' posterior leaves, their
            epistemic part.
        likelihood: Of the posterior; read only.
        link: How probabilities and densities of targets are averaged over the outputs.
            ``monte-carlo``: over samples of them. ``probit``: at the outputs
            f / √(1 + π/8 · variance), for a sigmoid by MacKay (1992) and for a softmax the mean
            field of it; no samples, and no correlations. ``plug-in``: at the outputs, without
            uncertainty. Gaussian targets need none, as theirs are in closed form. Mean and
            variances are the same for every link.
        num_samples: Samples of ``monte-carlo``.
        seed: Of these samples, so that a prediction is the same whenever it is read.
    """

    outputs: Float[Tensor, "m ... C"]
    covariance: Float[Tensor, "m ... C C"]
    likelihood: Likelihood = field(repr=False)
    link: str = "monte-carlo"
    num_samples: int = 200
    seed: int = field(default=0, repr=False)

    @property
    def mean(self) -> Float[Tensor, "m ... D"]:
        """The mean of targets that are numbers, in their units; else the outputs.

        It is the network's own for normal noise, and exp(f + variance/2) for counts.
        """
        return self._moments[0]

    @property
    def epistemic_variance(self) -> Float[Tensor, "m ... D"]:
        """The variance that the weights' posterior leaves of the mean; more data lower it."""
        return self._moments[1]

    @property
    def noise_variance(self) -> Float[Tensor, "m ... D"] | None:
        """The variance of the targets given the outputs, on average, at every temperature.

        None where targets are no numbers.
        """
        return self._moments[2]

    @property
    def variance(self) -> Float[Tensor, "m ... D"]:
        """Variances of targets that are numbers, epistemic and noise; else of the outputs."""
        noise = self.noise_variance
        return self.epistemic_variance if noise is None else self.epistemic_variance + noise

    @property
    def std(self) -> Float[Tensor, "m ... D"]:
        """The square root of ``variance``, in the units of the targets or outputs."""
        return self.variance.sqrt()

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Mean, epistemic variance and noise, of the targets or of the outputs."""
        f, covariance = self.outputs.flatten(0, -2), self.covariance.flatten(0, -3)
        target_moments = moments(self.likelihood, f, covariance)
        if target_moments is None:
            return self.outputs, self._variance, None
        mean, epistemic, noise = (e.unflatten(0, self.outputs.shape[:-1]) for e in target_moments)
        return mean, epistemic, noise

    @property
    def _variance(self) -> Float[Tensor, "m ... C"]:
        return self.covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0.0)

    @cached_property
    def probabilities(self) -> Float[Tensor, "m ... K"]:
        """The probability of each class (Categorical), or of each label being 1 (Bernoulli).

        Raises:
            ConfigurationError: If the likelihood has no probabilities of classes.
        """
        if self.outputs.dim() > 2:
            return self._flat.probabilities.unflatten(0, self.outputs.shape[:-1])
        if self.link != "monte-carlo":
            return class_probabilities(self.likelihood, self._one_output())
        # Classes need not be as many as outputs.
        total, m = self.outputs.new_zeros(()), len(self.outputs)
        for f in self._samples(self.num_samples, self.seed):
            sample_probabilities = class_probabilities(self.likelihood, f.flatten(0, 1))
            total = total + sample_probabilities.unflatten(0, (-1, m)).sum(0)
        return total / self.num_samples

    @property
    def _flat(self) -> "Predictive":
        """All positions of all data, each as a datum."""
        return self._at(torch.ones(self.outputs.shape[:-1], dtype=torch.bool, device="cpu"))

    def _at(self, where: Bool[Tensor, "m ..."]) -> "Predictive":
        where = where.to(self.outputs.device)
        return replace(self, outputs=self.outputs[where], covariance=self.covariance[where])

    def log_prob(self, y: Tensor) -> Float[Tensor, "m ..."]:
        """The log predictive density of the targets, averaged over the outputs.

        Args:
            y: Targets as the likelihood takes them.

        Returns:
            One number for each datum, in nats; of all its outputs together. With outputs
            (m, …, C) one for each position, (m, …), and NaN for one without a target. A sequence
            without targets is NaN at all of its positions.

        Raises:
            ConfigurationError: If the link is ``probit`` and targets are no classes.
            InputError: If the targets do not fit.
        """
        if self.outputs.dim() > 2 and is_batch(y, len(self.outputs)):
            shape, device = self.outputs.shape, self.outputs.device
            targets, counts = targets_at(self.likelihood, shape[1:], y, device)
            where = counts.view(shape[:-1])
            log_densities = self.outputs.new_full(where.shape, math.nan)
            if len(targets):
                log_densities[where] = self._at(where).log_prob(targets)
            return log_densities
        check_targets(self.likelihood, self.outputs.shape, y, self.outputs.device)
        noise = noise_variance(self.likelihood, self.outputs)
        if noise is not None and self.link != "plug-in":
            return self._normal_log_prob(y, noise)
        if self.link != "monte-carlo":
            return log_probabilities(self.likelihood, self._one_output(), y).detach()
        total, m = self.outputs.new_full((len(self.outputs),), -math.inf), len(self.outputs)
        for f in self._samples(self.num_samples, self.seed):
            repeated = y.repeat(len(f), *[1] * (y.ndim - 1))
            log_densities = log_probabilities(self.likelihood, f.flatten(0, 1), repeated).detach()
            total = total.logaddexp(log_densities.unflatten(0, (-1, m)).logsumexp(0))
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
        if self.outputs.dim() > 2:
            return self._flat.sample(n, generator).view(n, *self.outputs.shape)
        return torch.cat(list(self._samples(n, self.seed if generator is None else generator)))

    def _one_output(self) -> Tensor:
        """The outputs of the links without samples."""
        if self.link == "plug-in":
            return self.outputs
        if not self.likelihood.is_classification:
            raise ConfigurationError(
                f"link='probit' is for classes, and {type(self.likelihood).__name__} has"
                " is_classification = False: take 'monte-carlo' or 'plug-in'."
            )
        return self.outputs * (1.0 + math.pi / 8.0 * self._variance).rsqrt()

    def _samples(self, n: int, generator: torch.Generator | int) -> Iterator[Tensor]:
        """So many draws (·, m, C), in parts."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        step = max(1, _NUMBERS_AT_ONCE // self.outputs.numel())
        for start in range(0, n, step):
            shape = (min(step, n - start), *self.outputs.shape)
            noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
            moved = torch.einsum("mcd,nmd->nmc", self._root, noise.to(self._root))
            yield self.outputs + moved.to(self.outputs)

    @cached_property
    def _root(self) -> Float[Tensor, "m C C"]:
        """A square root of each covariance, by eigenvalues: it may be singular."""
        values, vectors = torch.linalg.eigh(_precise(self.covariance))
        return vectors * values.clamp(min=0.0).sqrt().unsqueeze(1)

    def _normal_log_prob(self, y: Tensor, noise: Tensor) -> Tensor:
        """N(y; outputs, covariance + noise)."""
        spread = _precise(self.covariance) + _precise(noise).diag_embed()
        factor = torch.linalg.cholesky(spread)
        error = _precise(y.to(self.outputs) - self.outputs).unsqueeze(2)
        solved = torch.linalg.solve_triangular(factor, error, upper=False).squeeze(2)
        logs = factor.diagonal(dim1=1, dim2=2).log().sum(1)
        constant = 0.5 * y.shape[1] * math.log(2.0 * math.pi)
        return -(0.5 * solved.square().sum(1) + logs + constant).to(self.outputs)


def _precise(values: Tensor) -> Tensor:
    """In float64, where the device has it."""
    return values if values.device.type == "mps" else values.double()
