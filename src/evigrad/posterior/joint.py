"""Predict the outputs for several inputs jointly, as a Gaussian process."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from evigrad.errors import InputError
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import noise_variance
from evigrad.likelihoods.targets import as_numbers, precisely
from evigrad.network import Linearization
from evigrad.passes.checks import as_generator, check_count
from evigrad.posterior.covariances import Covariance, Draws
from evigrad.posterior.predictive import Predictive, normal_log_prob, targets_of
from evigrad.posterior.query import Factors, Query
from evigrad.posterior.updates import observations, with_factors


@dataclass(frozen=True, eq=False)
class JointPredictive:
    """The outputs f ~ N(mean, covariance) of q inputs, with covariances between the inputs.

    ``Posterior.joint`` returns this object. The outputs are the values of a Gaussian process, the
    linearized network f(x) + J(x)(w − w*) with uncertain weights w (A. Immer, M. Korzepa and
    M. Bauer, 2021, arXiv:2008.08646). For classes, they are logits, and for counts log rates.

    Each batch of q inputs has its own covariance. For outputs (m, …, C), the positions … follow q
    in all shapes. Results are computed when you read them. They have a graph to inputs that require
    a gradient, and to nothing else. After ``Posterior.update`` with several sets of observations,
    the mean and samples also have the dimensions that count these sets.

    Examples:
        >>> import torch
        >>> from evigrad import Evidence
        >>> from evigrad.likelihoods import Gaussian
        >>> from evigrad.priors import GaussianPrior
        >>> x, model = torch.randn(20, 2), torch.nn.Linear(2, 1)
        >>> evidence = Evidence(
        ...     model, Gaussian(), GaussianPrior(), estimator="full-N-C", num_data=20
        ... )
        >>> posterior = evidence.posterior((x, x.sum(1, keepdim=True)), structure="full")
        >>> joint = posterior.joint(torch.randn(5, 3, 2), batch_dims=1)
        >>> joint.mean.shape, joint.covariance.shape, joint.sample(4).shape
        (torch.Size([5, 3, 1]), torch.Size([5, 3, 1, 3, 1]), torch.Size([4, 5, 3, 1]))

    See also: docs/posterior.md.
    """

    _query: Query = field(repr=False)
    _covariance: Covariance = field(repr=False)
    _likelihood: Likelihood = field(repr=False)
    _check: Callable[[], None] = field(repr=False)  # raises an error if the weights have changed

    @property
    def mean(self) -> Float[Tensor, "*b q C"]:
        """Return the outputs at the mean weights."""
        return self._moments[0]

    @property
    def covariance(self) -> Float[Tensor, "..."]:
        """Return the covariance of all outputs of a batch due to uncertain weights (epistemic).

        Raises:
            ConfigurationError: If the weights have changed.
            MemoryBudgetError: If the covariance does not fit into the free memory.
        """
        return self._moments[1]

    @cached_property
    def noise(self) -> Float[Tensor, "*b q C"] | None:
        """Return the noise variance of each target, whose noise is independent of all others.

        The result is None if targets are not outputs plus normal noise, such as classes.
        """
        noise = noise_variance(self._likelihood, self.mean.flatten(0, -2))
        return None if noise is None else noise.view(self.mean.shape)

    def sample(
        self, n: int, generator: torch.Generator | int | None = None
    ) -> Float[Tensor, "n *b q C"]:
        """Draw functions, and evaluate them at the inputs without computing the covariance.

        Args:
            n: Number of functions. Each function is the same in all batches.
            generator: CPU generator or seed. A seed gives the same functions for all inputs.
                Default: the same seed in every call.

        Returns:
            Outputs (n, b..., q, C), without the noise of the targets.

        Raises:
            ConfigurationError: If ``n`` is not a positive integer, or the weights have changed.
        """
        check_count("n", n)
        self._check()
        generator = as_generator(self._query.seed if generator is None else generator)
        query = self._query
        draws = self._covariance.draws(n, generator, query.problem.model.weights, query.updates)
        return torch.cat([outputs_of(query, self._covariance, part) for part in draws])

    def sample_targets(
        self, n: int, generator: torch.Generator | int | None = None
    ) -> Shaped[Tensor, "..."]:
        """Draw functions as in ``sample``, and targets with noise for each function.

        Args:
            n: Number of functions.
            generator: CPU generator or seed. Default: the same seed in every call.

        Returns:
            Targets in their units without a graph: numbers (n, b..., q, D), or labels (n, b..., q).

        Raises:
            ConfigurationError: As for ``sample``, or if the likelihood has no ``sample``, or the
                inputs require a gradient.
        """
        generator = as_generator(self._query.seed if generator is None else generator)
        f = self.sample(n, generator)
        return targets_of(self._likelihood, f.flatten(1, -2), generator).unflatten(1, f.shape[1:-1])

    def log_prob(
        self, y: Any, num_samples: int = 200, generator: torch.Generator | int | None = None
    ) -> Float[Tensor, "*b"]:
        """Return the log predictive density of all targets of a batch together.

        Gaussian noise has a closed form. Other densities are averaged over functions. The estimate
        is too small if q is so large that few functions fit all targets.

        Args:
            y: Targets (b..., q, ...) in the form that the likelihood expects.
            num_samples: Number of functions. Default: 200.
            generator: CPU generator or seed of the functions. Default: the same seed in every call.

        Returns:
            One number per batch, in nats. Positions without a target do not count.

        Raises:
            ConfigurationError: As for ``sample``.
            InputError: If the targets do not match the likelihood or the inputs.
        """
        query = self._query
        if self.noise is not None:
            gain, residuals = observations(self._likelihood, 1.0, self.mean, y, query.inner_dims)
            gain, residuals = (
                precisely(t).flatten(-1 - query.inner_dims) for t in (gain, residuals)
            )
            shape = (*query.shape[: query.batch_dims], *2 * gain.shape[-1:])
            covariance = precisely(self.covariance).reshape(shape)
            return normal_log_prob(residuals, covariance, gain).to(self.mean)
        y, size = as_numbers(y), query.batch_dims + 1
        if y.shape[:size] != query.shape[:size]:
            raise InputError(
                f"y must have the first dimensions {query.shape[:size]} of the inputs, got"
                f" {tuple(y.shape)}. Pass one target for each input."
            )
        y = y.flatten(0, query.batch_dims)
        total = self.mean.new_full(query.shape[: query.batch_dims], -math.inf)
        for f in self.sample(num_samples, generator):
            rows = f.flatten(0, query.batch_dims)
            logs = Predictive(rows, rows, self._likelihood).plug_in.log_prob(y)
            total = total.logaddexp(logs.view(*total.shape, -1).nansum(-1))
        return total - math.log(num_samples)

    def with_conditions(self, **conditions: Any) -> "JointPredictive":
        """Return the prediction under conditions, such as exposures, for noise and targets.

        Args:
            **conditions: Conditions by name: one number, or numbers in the shape of ``mean``
                without C. See ``Predictive.with_conditions``.

        Raises:
            ConfigurationError: If the likelihood has no conditions.
            InputError: If there is no such condition, or a value or a shape is wrong.
        """
        changed = Predictive(self.mean, self.mean, self._likelihood).with_conditions(**conditions)
        return replace(self, _likelihood=changed.likelihood)

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        query, shape = self._query, (*self._query.shape, self._query.plan.num_outputs)
        size = prod(query.shape[query.batch_dims :])
        rows = size * shape[-1]
        before: dict[int, Tensor] = {}  # roots of a batch that is not complete

        def moments(linearization: Linearization, factors: Factors) -> tuple[Tensor, ...]:
            nonlocal before
            f, roots = linearization.outputs, self._covariance.roots(linearization)
            update_factors = factors(roots)
            roots = with_factors(roots, update_factors)
            if before:
                roots = {sign: torch.cat([before[sign], root]) for sign, root in roots.items()}
            stop, total = len(roots[1]) // size * size, f.new_zeros(())
            for sign, root in roots.items():
                whole = root[:stop].reshape(-1, rows, root.shape[2])
                total = total + sign * (whole @ whole.mT)
            before = {sign: root[stop:].clone() for sign, root in roots.items()}
            return f, total.to(f), *update_factors

        self._check()
        advice = "Use batch_dims, or sample functions with sample(n), which needs no covariance."
        query.check_memory(rows * (prod(shape) // rows * rows + self._covariance.width), advice)
        with torch.set_grad_enabled(query.differentiable):
            f, covariance, *factors = query.results(moments)
            mean = query.mean(f, factors)
            return mean, covariance.view(*shape, *shape[query.batch_dims :])


def outputs_of(query: Query, covariance: Covariance, draws: Draws) -> Float[Tensor, "n *b q C"]:
    """Return the outputs of n drawn functions."""

    def outputs(linearization: Linearization, factors: Factors) -> tuple[Tensor, ...]:
        f = linearization.outputs
        values = f.unsqueeze(1) + linearization.times(draws.changes).to(f)
        if not draws.coefficients:
            return (values,)
        return values, *factors(covariance.roots(linearization))[-len(draws.coefficients) :]

    values, *update_factors = query.results(outputs)
    return query.moved(values.movedim(1, 0), update_factors, draws.coefficients)
