"""Add observations to the Gaussian process of the outputs, in closed form.

The outputs have the mean m and the covariance K. The observations y at the inputs X have the noise
variances G⁻². With L Lᵀ = I + G K(X, X) G, the outputs given y have

    mean  m(x) + V(x) e,                e = L⁻¹ G (y − m(X)),
    covariance  K(x, x') − V(x) V(x')ᵀ,      V(x) = K(x, X) G L^{-ᵀ}.

K is a sum Σ_s s R_s R_sᵀ over the signs s of the roots from ``Covariance``. Therefore, V is linear
in the roots of x for any structure: V(x) = Σ_s R_s(x) A_sᵀ with A_s = s L⁻¹ G R_s(X). This is also
true after further observations, because V is then one more root with the sign −1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import ConfigurationError, InputError, NotPositiveDefiniteError
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import check_targets, noise_variance
from evigrad.likelihoods.targets import as_numbers
from evigrad.likelihoods.weighted import unweighted


@dataclass(frozen=True, eq=False)
class Update:
    """k observed outputs, for each of the batches b or s.

    Before the observations, a draw of the process has the coefficients z of the roots. After them,
    it also has the coefficients e − Σ_s A_s z_s − N ε of V (Matheron's rule). The noise ε is
    standard normal, with one number for each of the j outputs that were observed until then.
    """

    roots: Mapping[int, Float[Tensor, "*b k n"]]  # A_s
    errors: Float[Tensor, "*s k"]  # e
    noise: Float[Tensor, "*b k j"]  # N

    @property
    def is_plain(self) -> bool:
        """Whether there is one set of observations, without a graph."""
        return self.errors.ndim == 1 and not self.errors.requires_grad

    @property
    def batch(self) -> torch.Size:
        """The batches b, whose covariances differ."""
        return self.noise.shape[:-2]

    def factor(
        self, roots: Mapping[int, Float[Tensor, "m C _"]], batches: Tensor
    ) -> Float[Tensor, "m C k"]:
        """Return V for the roots of m examples, given the number of each example's batch."""
        total: Any = 0
        for sign, root in roots.items():
            sign_root = self.roots[sign]
            sign_root = sign_root.flatten(0, -3)[batches] if sign_root.ndim > 2 else sign_root
            total = total + root @ sign_root.mT
        return total

    def coefficients(
        self, drawn: Mapping[int, Float[Tensor, "p _"]], noise: Float[Tensor, "p j"]
    ) -> Float[Tensor, "p *s k"]:
        """Return the coefficients of V in p draws with the roots' coefficients ``drawn``."""
        total = self.errors
        pairs = [(self.roots[sign], z) for sign, z in drawn.items()]
        for matrix, z in (*pairs, (self.noise, noise[:, : self.noise.shape[-1]])):
            columns = z.view(len(z), *[1] * (self.errors.ndim - 1), -1, 1)
            total = total - (matrix @ columns).squeeze(-1)
        return total

    def then(self, other: "Update") -> "Update":
        """Return this update and a later one as a single update. Both must be plain."""
        roots = {sign: torch.cat([root, other.roots[sign]]) for sign, root in self.roots.items()}
        noise = torch.cat([_widened(self.noise, other.noise), other.noise])
        return Update(roots, torch.cat([self.errors, other.errors]), noise)

    def state(self) -> dict[str, Any]:
        """Return the arguments of an equal update without graphs."""
        roots = {sign: root.detach() for sign, root in self.roots.items()}
        return {"roots": roots, "errors": self.errors.detach(), "noise": self.noise.detach()}


def with_factors(
    roots: Mapping[int, Float[Tensor, "m C _"]], factors: Sequence[Float[Tensor, "m C _"]]
) -> dict[int, Float[Tensor, "m C _"]]:
    """Return the roots of the covariance after updates with these factors V."""
    negative = [roots[-1]] if -1 in roots else []
    return dict(roots) | ({-1: torch.cat([*negative, *factors], 2)} if factors else {})


def update_of(
    roots: Mapping[int, Float[Tensor, "*b r _"]],
    factors: Sequence[Float[Tensor, "*b r _"]],
    before: Sequence[Update],
    gain: Float[Tensor, "*g r"],
    residuals: Float[Tensor, "*s r"],
) -> Update:
    """Return the update for r outputs, from their roots, the gains G, and y − m(X).

    Args:
        roots: Roots R_s(X) before all updates.
        factors: V(X) of each earlier update.
        before: The earlier updates.
        gain: Inverse standard deviations of the noise.
        residuals: Residuals for each batch.

    Raises:
        NotPositiveDefiniteError: If rounding errors exceed the noise.
    """
    scaled = {sign: gain.unsqueeze(-1) * root for sign, root in roots.items()}
    scaled_factors = [gain.unsqueeze(-1) * factor for factor in factors]
    covariance: Any = sum(sign * (root @ root.mT) for sign, root in scaled.items())
    covariance = covariance - sum(factor @ factor.mT for factor in scaled_factors)
    eye = torch.eye(gain.shape[-1], dtype=gain.dtype, device=gain.device)
    cholesky, failures = torch.linalg.cholesky_ex(eye + covariance)
    if bool(failures.any()):
        raise NotPositiveDefiniteError(
            "The observations must be noisier than rounding errors of their covariance, whose"
            f" largest variance is {float(covariance.detach().abs().amax()):.3g} times the noise"
            " variance. Use a likelihood with more noise, or weights in float64."
        )

    def solved(right: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(cholesky, right, upper=False)

    solved_roots = {sign: sign * solved(root) for sign, root in scaled.items()}
    noise = solved(eye.expand_as(cholesky))
    earlier_noise = noise[..., :0]
    for update, factor in zip(before, scaled_factors, strict=True):
        explained = solved(factor)
        solved_roots = {s: root - explained @ update.roots[s] for s, root in solved_roots.items()}
        earlier_noise = _widened(earlier_noise, update.noise) - explained @ update.noise
    errors = solved((gain * residuals).unsqueeze(-1)).squeeze(-1)
    return Update(solved_roots, errors, torch.cat([earlier_noise, noise], -1))


def _widened(matrix: Tensor, other: Tensor) -> Tensor:
    """Return a matrix with columns of zeros, so that it has as many columns as another matrix."""
    return torch.nn.functional.pad(matrix, (0, other.shape[-1] - matrix.shape[-1]))


def observations(
    likelihood: Likelihood, temperature: float, mean: Tensor, y: Any, ndim: int
) -> tuple[Tensor, Tensor]:
    """Return the inverse standard deviations (*b, q, C) of the noise, and y − mean (*s, q, C).

    Args:
        likelihood: Likelihood of the posterior.
        temperature: Factor on the noise variances.
        mean: Predicted outputs.
        y: Targets in the form that the likelihood expects, with dimensions for batches.
        ndim: Number of the dimensions q.

    Raises:
        ConfigurationError: If the noise is not Gaussian.
        InputError: If the targets do not match the likelihood or the inputs.
    """
    if noise_variance(unweighted(likelihood), mean.detach().flatten(0, -2)) is None:
        raise ConfigurationError(
            "Observations can be added in closed form only if the targets are the outputs plus"
            f" Gaussian noise, got {type(likelihood).__name__}. Train with all data, and call"
            " evidence.posterior(data) again."
        )
    y = as_numbers(y).to(mean.device)
    y = y.unsqueeze(-1) if y.shape == mean.shape[:-1] else y
    try:
        shape = torch.broadcast_shapes(y.shape[:-1], mean.shape[:-1])
    except RuntimeError:
        shape = torch.Size()
    if y.shape[-1 - ndim : -1] != mean.shape[-1 - ndim : -1] or not shape:
        raise InputError(
            f"y must have the shape (..., {', '.join(map(str, mean.shape[:-1]))}, D) for these"
            f" inputs, got {tuple(y.shape)}. Pass one target for each input."
        )
    f = mean.expand(*shape, -1).flatten(0, -2)
    y = y.expand(*shape, -1).flatten(0, -2)
    check_targets(likelihood, f.shape, y, f.device)
    noise = noise_variance(unweighted(likelihood.at(y)), f.detach())
    assert noise is not None
    weights, plain = likelihood.weights(y), likelihood.plain_targets(y)
    gain = (temperature * noise).rsqrt()
    if weights is not None:
        gain = gain * weights.to(gain).view(len(f), -1).sqrt()
        plain = torch.where(gain > 0, plain, f.detach())  # a missing target may be NaN
    gain, residuals = gain.view(*shape, -1), (plain.to(f) - f).view(*shape, -1)
    first = gain[(0,) * (len(shape) - ndim)]
    return first if bool((gain == first).all()) else gain, residuals
