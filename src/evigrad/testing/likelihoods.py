"""The conformance suite for likelihoods."""

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad import reference
from evigrad.core.roots import ROOTS, checked_rows
from evigrad.errors import ConfigurationError, ConformanceError, InputError
from evigrad.likelihoods.base import Likelihood
from evigrad.likelihoods.calls import check_targets, log_probabilities
from evigrad.testing.comparison import (
    DIFFERENCES,
    EXACT,
    agree,
    difference_quotients,
    gradients,
    random,
    same_gradients,
    unit_directions,
)

# Targets that are drawn for each example, and the tolerated standard errors of their means.
_DRAWS, _DEVIATIONS = 2048, 6.0
# The gradient of a parameter is averaged over groups of draws, which have a standard error.
_GROUPS = 32
# A standard error is estimated, so means may also differ by this share.
_SLACK = 1e-2


def check_likelihood(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> None:
    """Check that a likelihood fulfills the contract of ``Likelihood``.

    The suite checks that

    - ``log_prob`` is a function of single examples with correct derivatives, and ``score`` is its
      gradient,
    - ``hessian`` is symmetric, positive semidefinite and differentiable, and equals −∇² of
      ``log_prob`` or, if this depends on the targets, its mean over targets,
    - ``root`` of every kind multiplies to ``hessian``, also for listed outputs, and ``row_norms``
      are its norms,
    - ``sample`` uses only its generator and draws from the normalized density,
    - ``probabilities`` and ``noise_variance`` agree with ``log_prob``,
    - ``cdf`` and ``moments`` agree with drawn targets.

    Derivatives are checked with respect to the outputs and the parameters. The mean over targets is
    computed from all labels, or from a few thousand targets that ``sample`` draws.

    Args:
        likelihood: The likelihood. The suite uses a copy in float64.
        outputs: Outputs (m, C) of moderate size, such as random numbers. m is at least 2.
        targets: Targets for these outputs.

    Raises:
        InputError: If there are fewer than two examples, or the targets are invalid.
        ConformanceError: If a result is wrong. The message states what differs, and by how much.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Poisson
        >>> from evigrad.testing import check_likelihood
        >>> check_likelihood(Poisson(), torch.randn(4, 2), torch.randint(5, (4, 2)))

    See also: docs/likelihoods.md.
    """
    if outputs.ndim != 2 or len(outputs) < 2:
        raise InputError(
            f"outputs must have the shape (m, C) with m of at least 2, got {tuple(outputs.shape)}."
        )
    f = outputs.detach().double().clone().requires_grad_()
    y = targets.double() if targets.is_floating_point() else targets
    suite = _Suite(copy.deepcopy(likelihood).double(), f, y)
    suite.check_density()
    suite.check_curvature()
    suite.check_roots()
    suite.check_targets()
    suite.check_predictions()


class _Suite:
    def __init__(self, likelihood: Likelihood, f: Float[Tensor, "m C"], y: Tensor) -> None:
        self.likelihood, self.f, self.y = likelihood, f, y
        self.name = type(likelihood).__name__
        check_targets(likelihood, f.shape, y, f.device)
        self.here = likelihood.at(y)
        parameters = {n: p for n, p in likelihood.named_parameters() if p.requires_grad}
        self.arguments = {"the outputs": f, **parameters}

    # ------------------------------------------------------------ derivatives

    def check_density(self) -> None:
        """Check ``log_prob`` and ``score``."""
        likelihood, f, y = self.likelihood, self.f, self.y
        value = log_probabilities(likelihood, f, y)
        self._check_dtype("log_prob", value)
        parts = [likelihood.log_prob(f[n : n + 1], y[n : n + 1]) for n in range(len(f))]
        agree(f"log_prob of {self.name} for a single example", torch.cat(parts), value)
        self._check_slopes("log_prob", lambda: likelihood.log_prob(f, y)[:, None])
        (slope,) = gradients(likelihood.log_prob(f, y).sum(), [f], graph=True)
        # The weights scale the rows, so they are not part of the score.
        weights = _weights(likelihood, f, y)
        score = likelihood.score(f, y)
        agree(f"score of {self.name}", weights * score, slope)
        probe = random(*f.shape, seed=2)
        pair = (probe * weights * score).sum(), (probe * slope).sum()
        same_gradients(f"score of {self.name}", *pair, self.arguments)

    def _check_dtype(self, what: str, value: Tensor) -> None:
        if value.dtype != self.f.dtype:
            raise ConformanceError(
                f"{what} of {self.name} must return {self.f.dtype} for outputs of this type, got"
                f" {value.dtype}. Convert targets with y.to(f), and create tensors with f.new_ones."
            )

    def _check_slopes(self, what: str, function: Callable[[], Tensor]) -> None:
        """Compare derivatives of a function (m, K) of single examples with finite differences."""
        value, words = function(), f"The derivative of {what} of {self.name} with respect to"
        probe = random(*value.shape, seed=3)
        slopes = gradients((probe * value).sum(), self.arguments.values())
        for (name, argument), slope in zip(self.arguments.items(), slopes, strict=True):
            if argument is self.f:
                # Examples are independent, so all of them move together.
                columns = torch.eye(argument.shape[1], dtype=argument.dtype, device="cpu")
                quotients = difference_quotients(function, argument, columns)
                expected = torch.stack([(probe * q).sum(1) for q in quotients], 1)
            else:
                quotients = difference_quotients(function, argument, unit_directions(argument))
                expected = torch.stack([(probe * q).sum() for q in quotients]).view_as(argument)
            agree(f"{words} {name}", slope, expected, DIFFERENCES)

    # ------------------------------------------------------------ the Hessian

    def check_curvature(self) -> None:
        """Check ``hessian``."""
        f, here = self.f, self.here
        words = f"hessian of {self.name}"
        hessian = here.hessian(f)
        self._check_dtype("hessian", hessian)
        shape = (*f.shape, f.shape[1])
        if hessian.shape != shape:
            raise ConformanceError(
                f"{words} must have the shape {shape}, got {tuple(hessian.shape)}."
            )
        agree(f"{words}, which must be symmetric,", hessian, hessian.mT)
        values = torch.linalg.eigvalsh(hessian.detach())
        lowest = torch.minimum(values[:, 0] / values.abs().amax().clamp(min=1e-30), f.new_zeros(()))
        agree(f"The lowest eigenvalue of the {words}, relative to the largest,", lowest, 0 * lowest)
        if not here.couples_outputs:
            diagonal = hessian.diagonal(dim1=1, dim2=2).diag_embed()
            agree(f"{words} with couples_outputs = False", hessian, diagonal)
        self._check_slopes("hessian", lambda: here.hessian(f).flatten(1))
        self._check_value(words, hessian)

    def _check_value(self, words: str, hessian: Float[Tensor, "m C C"]) -> None:
        """Compare Λ with −∇² log p(y|f), or with its mean over targets."""
        likelihood, f = self.likelihood, self.f
        pairs = [
            (_negative_hessian(likelihood, f, y), reference.used_hessian(likelihood, f, y).detach())
            for y in (self.y, self.y.roll(1, 0))
        ]
        targets = self._every_label() or self._drawn
        if targets is not None:
            y, shares = targets
            values = _negative_hessian(likelihood, f.detach().repeat(len(shares), 1), y)
            values = values.unflatten(0, (len(shares), -1))
            if not _are_equal(values):
                mean = f"{words}, the mean of −∇² log_prob over targets,"
                self._check_mean(mean, hessian, values, shares)
                return
            pairs.append((values[0], hessian))
        elif likelihood.weights(self.y) is None and not _are_equal(torch.stack(pairs[0])):
            if not _are_equal(torch.stack([value for value, _ in pairs])):
                raise ConformanceError(
                    f"{words} cannot be compared with its mean over targets, because −∇² log_prob"
                    f" depends on the targets, and {self.name} does not define sample(f,"
                    " generator). Define sample."
                )
        for value, weighted in pairs:
            agree(f"{words}, compared with −∇² log_prob,", weighted, value)

    def _check_mean(
        self, what: str, actual: Tensor, values: Float[Tensor, "S ..."], shares: Tensor
    ) -> None:
        """Compare with the mean of values, which are weighted by shares (S, m) or drawn (S, 1)."""
        shares = shares.view(*shares.shape, *[1] * (values.ndim - 2))
        mean = (shares * values).sum(0)
        tolerance: float | Tensor = EXACT
        if shares.shape[1] == 1:
            error = values.std(0) * len(values) ** -0.5
            tolerance = _DEVIATIONS * error + _SLACK * actual.detach().abs().amax()
        agree(what, actual, mean, tolerance)

    # ------------------------------------------------------------ roots

    def check_roots(self) -> None:
        """Check ``root``, ``num_rows`` and ``row_norms``."""
        f, here = self.f, self.here
        m, num_outputs = f.shape
        hessian = here.hessian(f)
        outputs = torch.arange(num_outputs, device="cpu")
        every = outputs.expand(m, -1)
        listed = torch.stack([outputs.roll(n) for n in range(m)])
        listed = listed[:, : max(1, num_outputs - 1)].clone()
        listed[0, -1] = -1
        inside = (listed[..., None] == outputs).any(1).to(f)
        restricted = hessian * inside[:, :, None] * inside[:, None]
        for kind in ROOTS:
            words = f"root of {self.name} with kind={kind!r}"
            whole = self._rows(every, kind)
            self._check_product(f"{words} and all columns", whole, hessian)
            rows = self._rows(None, kind)
            self._check_product(f"{words} and columns=None", rows, hessian)
            if rows.shape[1] != here.num_rows(num_outputs):
                raise ConformanceError(
                    f"{words} and columns=None must have num_rows({num_outputs}) ="
                    f" {here.num_rows(num_outputs)} columns, got {rows.shape[1]}."
                )
            norms = here.row_norms(f.detach(), kind)
            agree(f"row_norms of {self.name} with kind={kind!r}", norms, whole.square().sum(-1))
            rows = self._rows(listed, kind)
            if kind == "subblock":
                self._check_product(f"{words} and listed columns", rows, restricted)
            if kind != "subblock" or not here.couples_outputs:
                examples = torch.arange(m, device="cpu")[:, None]
                chosen = whole[examples, listed] * (listed >= 0)[..., None]
                agree(f"{words} and listed columns, compared with all columns,", rows, chosen)
            padding = rows[listed < 0]
            agree(f"{words} for the column -1", padding, 0 * padding)

    def _rows(self, columns: Tensor | None, kind: str) -> Float[Tensor, "m k C"]:
        root = self.here.root(self.f, columns, kind)
        return checked_rows(root, self.f, columns, self.name).scaled

    def _check_product(self, what: str, rows: Tensor, hessian: Tensor) -> None:
        """Compare R Rᵀ and its derivatives with Λ."""
        what = f"R Rᵀ of {what}"
        product = rows.mT @ rows
        agree(what, product, hessian)
        probe = random(*product.shape, seed=5)
        pair = (probe * product).sum(), (probe * hessian).sum()
        same_gradients(what, *pair, self.arguments)

    # ------------------------------------------------------------ targets

    def _every_label(self) -> tuple[Tensor, Float[Tensor, "K m"]] | None:
        """Return all labels of each example, one after the other, and their probabilities."""
        if not self.likelihood.has_labels or self.y.ndim > 1:
            return None
        f = self.f.detach()
        probabilities = self.here.probabilities(f)
        count = f.shape[1] if probabilities is None else probabilities.shape[1]
        y = torch.arange(count, device="cpu").repeat_interleave(len(f))
        shares = self.likelihood.log_prob(f.repeat(count, 1), y).exp().detach()
        return y, shares.view(count, -1)

    def _sample(self, copies: int, seed: int) -> Tensor | None:
        """Return targets drawn for copies of the examples, or None without ``sample``."""
        if "sample" in self.likelihood._inherited:
            return None
        here = self.likelihood.at(self.y.repeat(copies, *[1] * (self.y.ndim - 1)))
        try:
            return here.sample(self.f.repeat(copies, 1), torch.Generator().manual_seed(seed))
        except ConfigurationError:  # there is none, or none of a wrapped likelihood
            return None

    @cached_property
    def _drawn(self) -> tuple[Tensor, Float[Tensor, "S 1"]] | None:
        y = self._sample(_DRAWS, 0)
        return None if y is None else (y, self.f.detach().new_full((_DRAWS, 1), 1 / _DRAWS))

    def check_targets(self) -> None:
        """Check the normalization of the density, and ``sample``."""
        if (labels := self._every_label()) is not None:
            total = labels[1].sum(0)
            agree(f"The sum of exp(log_prob) of {self.name} over labels", total, total * 0 + 1)
        state = torch.get_rng_state()
        first, again, other = (self._sample(8, seed) for seed in (1, 1, 2))
        if first is None or again is None or other is None or self._drawn is None:
            return
        words = f"sample of {self.name}"
        if not torch.equal(torch.get_rng_state(), state):
            raise ConformanceError(f"{words} must draw from its generator only.")
        agree(f"{words} with the same seed", again, first)
        if torch.equal(first, other):
            raise ConformanceError(f"{words} must depend on the generator.")
        if first.requires_grad:
            raise ConformanceError(f"{words} must return targets without a graph.")
        self.likelihood.validate((len(first), self.f.shape[1]), first)
        self._check_distribution(words, *self._drawn)
        draws = self.here.plain_targets(self._drawn[0]).unflatten(0, (_DRAWS, -1))
        if not self.likelihood.has_labels and draws.ndim == 3:
            self._check_total(draws)
            with suppress(ConfigurationError):  # only parts of a joint likelihood have predictions
                self._check_numbers(draws)

    def _check_distribution(self, words: str, y: Tensor, shares: Tensor) -> None:
        """Check that the mean score is 0 and its covariance is Λ, as for a normalized density."""
        f = self.f.detach().repeat(_DRAWS, 1).requires_grad_()
        log_prob = self.likelihood.log_prob(f, y)
        (score,) = gradients(log_prob.sum(), [f])
        score = score.unflatten(0, (_DRAWS, -1))
        hessian = self.here.hessian(self.f).detach()
        variance = hessian.diagonal(dim1=1, dim2=2)
        errors = torch.maximum(score.var(0), variance).div(_DRAWS).sqrt()
        what = f"The mean gradient of log_prob over targets from {words}, with respect to"
        agree(f"{what} the outputs,", score.mean(0), 0 * variance, _DEVIATIONS * errors + 1e-6)
        squares = score[..., :, None] * score[..., None, :]
        covariance = f"The covariance of the gradient of log_prob over targets from {words}"
        self._check_mean(f"hessian of {self.name}. {covariance}", hessian, squares, shares)
        means = log_prob.view(_GROUPS, -1).mean(1)
        for name, parameter in self.likelihood.named_parameters():
            if parameter.requires_grad:
                slopes = torch.stack([gradients(mean, [parameter])[0] for mean in means])
                error = slopes.std(0) * _GROUPS**-0.5
                tolerance = _DEVIATIONS * error + 1e-6
                agree(f"{what} {name},", slopes.mean(0), 0 * parameter, tolerance)

    def _check_total(self, draws: Float[Tensor, "S m D"]) -> None:
        """Check that the density of single numbers integrates to 1, by importance sampling."""
        likelihood, (m, num_outputs) = self.likelihood, self.f.shape
        is_single = num_outputs == 1 and self.y.shape == self.f.shape
        if not is_single or likelihood.weights(self.y) is not None:
            return
        f, draws = self.f.detach(), draws[:, :, 0]
        words = f"The integral of exp(log_prob) of {self.name} over the middle half of its targets"
        if torch.equal(draws, draws.round()):  # probabilities of the observed targets
            words = f"exp(log_prob) of {self.name}, compared with frequencies of drawn targets,"
            values = (draws == self.y[:, 0]).to(f)
            expected = likelihood.log_prob(f, self.y).exp().detach()
        else:
            low, high = draws.to(f).quantile(draws.new_tensor([0.25, 0.75]).to(f), dim=0)
            log_prob = likelihood.log_prob(f.repeat(_DRAWS, 1), draws.reshape(-1, 1)).detach()
            inside = (draws >= low) & (draws <= high)
            values = inside * (-log_prob.view(_DRAWS, m)).exp() / (high - low)
            expected = torch.ones_like(low)
        error = values.std(0) * _DRAWS**-0.5
        agree(words, values.mean(0), expected, _DEVIATIONS * error + _SLACK)

    def _check_numbers(self, draws: Float[Tensor, "S m D"]) -> None:
        """Compare ``cdf`` and ``moments`` with drawn targets."""
        likelihood, here, f = self.likelihood, self.here, self.f.detach()
        plain = likelihood.plain_targets(self.y)
        if "cdf" not in likelihood._inherited and plain.shape == draws.shape[1:]:
            below = here.cdf(f, self.y)
            if below is not None:
                is_seen = ~plain.isnan()
                shares = (draws <= plain).to(f).mean(0)
                tolerance = _DEVIATIONS * 0.5 * _DRAWS**-0.5
                words = f"cdf of {self.name}, compared with drawn targets,"
                agree(words, below[is_seen], shares[is_seen], tolerance)
        if "moments" in likelihood._inherited:
            return
        zeros = f.new_zeros(*f.shape, f.shape[1])
        moments = here.moments(f, zeros)
        if moments is None:
            return
        words = f"moments of {self.name} without uncertainty of the outputs"
        if len(moments) != 3 or any(t.shape != draws.shape[1:] for t in moments):
            shapes = [tuple(t.shape) for t in moments]
            raise ConformanceError(
                f"{words} must be three tensors of shape {tuple(draws.shape[1:])}, got {shapes}."
            )
        mean, epistemic, noise = (t.detach() for t in moments)
        agree(f"{words}: the epistemic variance", epistemic, torch.zeros_like(epistemic))
        draws = draws.to(f)
        squares = (draws - mean).square()
        for name, value, numbers in (("mean", mean, draws), ("noise variance", noise, squares)):
            error = _DEVIATIONS * numbers.std(0) * _DRAWS**-0.5
            has_value = value.isfinite()
            tolerance = (error + 5 * _SLACK * value.abs())[has_value]
            agree(f"{words}: the {name}", value[has_value], numbers.mean(0)[has_value], tolerance)

    # ------------------------------------------------------------ predictions

    def check_predictions(self) -> None:
        """Check ``probabilities`` and ``noise_variance``."""
        f, here, likelihood = self.f.detach(), self.here, self.likelihood
        labels = self._every_label()
        try:
            probabilities, variance = here.probabilities(f), here.noise_variance(f)
        except ConfigurationError:  # only parts of a joint likelihood have predictions
            return
        if probabilities is not None and "probabilities" not in likelihood._inherited:
            agree(f"probabilities of {self.name}", probabilities, probabilities.clamp(0, 1))
            if labels is not None:
                expected = labels[1].mT
                words = f"probabilities of {self.name}, compared with exp(log_prob),"
                agree(words, probabilities, expected)
        plain = likelihood.plain_targets(self.y)
        if variance is None or "noise_variance" in likelihood._inherited or plain.shape != f.shape:
            return
        normal = torch.distributions.Normal(f, variance.detach().sqrt(), validate_args=False)
        expected = normal.log_prob(plain.to(f)).nan_to_num(nan=0.0).sum(1)
        if likelihood.weights(self.y) is None or bool(plain.isnan().any()):
            words = f"log_prob of {self.name}, compared with a Gaussian of its noise_variance,"
            agree(words, likelihood.log_prob(f, self.y), expected)


def _negative_hessian(
    likelihood: Likelihood, f: Float[Tensor, "m C"], y: Tensor
) -> Float[Tensor, "m C C"]:
    return reference.hessian(likelihood, f.detach(), y).detach()


def _weights(likelihood: Likelihood, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
    """Return the weight of each output."""
    weights = likelihood.weights(y)
    ones = torch.ones_like(f).detach()
    return ones if weights is None else ones * weights.to(f).view(len(f), -1)


def _are_equal(values: Tensor) -> bool:
    """Return whether tensors along dimension 0 are equal up to rounding."""
    scale = values.abs().amax().clamp(min=1e-12)
    return bool((values - values[:1]).abs().amax() <= EXACT * scale)
