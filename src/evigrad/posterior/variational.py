"""Fit the posterior of the linearized network by Gaussian variational inference.

The network is linear in its weights, f_n = f(x_n; w*) + J_n (w − w*). Among the distributions
q = N(μ, Σ) of a structure, the best one maximizes a lower bound on the log evidence of this model,

    E_q[(1/T) log p(y|f)] − KL(q ‖ N(w₀, P0⁻¹)).

Its precision matrix and its mean satisfy

    Σ⁻¹ = P0 + Σ_n J_nᵀ E_q[Λ_n] J_n,      P0 (μ − w₀) = Σ_n J_nᵀ E_q[∇_f log p(y_n|f_n)] / T.

A step of natural gradients sets Σ by the current expectations, and moves μ by Σ times the gradient
of the bound (M. E. Khan and H. Rue, 2023, *The Bayesian Learning Rule*). Along this direction, the
bound is concave if log p is, and takes no further pass. If the bound falls, a step mixes the old
and the new expectations. The expectations are sums over fixed nodes, so bounds can be compared.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.quasirandom import SobolEngine

from evigrad.core.block import MicroBatch
from evigrad.core.roots import RootRows, hessian_rows
from evigrad.errors import ConfigurationError, NotFiniteError, raised_in
from evigrad.likelihoods.calls import log_probabilities
from evigrad.passes.problem import Problem
from evigrad.passes.sweep import MicroBatchSweep
from evigrad.posterior.covariances import Covariance, Dense, Diagonal, covariance_of
from evigrad.posterior.predictive import symmetric_root

# Steps end when the bound rises by less than this many nats per example.
TOLERANCE = 1e-3
MOST_STEPS = 20
# Share of the new expectations in a step. It is divided by 4 while the bound falls.
_LEAST_SHARE = 0.05
# The search along a direction ends when the slope has fallen to this share, or after this many
# evaluations.
_SLOPE, _EVALUATIONS = 0.05, 8
# Nodes of Gauss and Hermite in one and two dimensions. More dimensions take pairs of opposite
# quasi-random points, at least this many pairs and twice as many as outputs.
_HERMITE = {1: 32, 2: 20}
_PAIRS = 64
_NUMBERS_AT_ONCE = 2**22


@dataclass(frozen=True, eq=False)
class VariationalFit:
    """The fitted distribution N(w* + shift, Σ).

    Attributes:
        covariance: Covariances under Σ.
        shift: μ − w*, by name.
        bounds: Lower bound in nats before the first step, and after each step.
    """

    covariance: Covariance
    shift: Mapping[str, Tensor]
    bounds: Sequence[float]


def fit_gaussian(sweep: MicroBatchSweep, predictive: MicroBatchSweep) -> VariationalFit:
    """Return the best Gaussian distribution of the weights.

    Args:
        sweep: Passes over all data that collect rows.
        predictive: The same passes, in micro-batches for predictions with covariances.

    Raises:
        ConfigurationError: If the likelihood does not define its Hessian.
        NotFiniteError: If the bound is not finite.
    """
    check_hessian(sweep.problem)
    fitter = _Fitter(sweep, predictive)
    state = fitter.start()
    bounds = [state.bound]
    while len(bounds) <= MOST_STEPS and (after := fitter.step(state)) is not None:
        state = after
        bounds.append(state.bound)
        if bounds[-1] - bounds[-2] < TOLERANCE * sweep.problem.model.num_data:
            break
    return VariationalFit(state.covariance, state.shift, bounds)


def check_hessian(problem: Problem) -> None:
    """Raise an error if the likelihood does not define its Hessian."""
    if not problem.model.likelihood.defines_hessian or problem.model.estimator.curvature != "ggn":
        raise ConfigurationError(
            "inference='variational' needs the Hessian of the likelihood, but"
            f" {type(problem.model.likelihood).__name__} does not define it. Define hessian(f), or"
            " use inference='laplace'."
        )


@dataclass(frozen=True, eq=False)
class _State:
    """A distribution of the weights and of the outputs of all examples, and its bound."""

    covariance: Covariance
    shift: dict[str, Tensor]
    mean: Float[Tensor, "N C"]
    sites: Float[Tensor, "N C C"]  # whose curvature belongs to the covariance
    score: Float[Tensor, "N C"]  # expectations under the distribution
    curvature: Float[Tensor, "N C C"]
    bound: float


class _Fitter:
    """Steps for one data set."""

    def __init__(self, sweep: MicroBatchSweep, predictive: MicroBatchSweep) -> None:
        self._sweep, self._predictive, self._problem = sweep, predictive, sweep.problem
        problem = sweep.problem
        self._dtype = problem.settings.gram_dtype or torch.float64
        weights = {
            name: weight.detach().to(self._dtype) for name, weight in problem.model.weights.items()
        }
        precisions = problem.model.prior.precisions()
        self._precisions = {name: precisions[name].detach().to(w) for name, w in weights.items()}
        self._deviations = problem.model.prior.deviations(weights)
        self._flat = {
            name: self._precisions[name].expand(w.shape).reshape(-1) for name, w in weights.items()
        }
        outputs = list[tuple[Tensor, Tensor]]()
        outputs = sweep.fold(lambda p, b: [*p, (sweep.outputs(b), b.y)], outputs, label="outputs")
        f, targets = zip(*outputs, strict=True)
        self._f, self._y = torch.cat(f).to(self._dtype), torch.cat(targets)

    def start(self) -> _State:
        """Return Laplace's approximation."""
        f = self._f
        sites = self._mean_curvature(f, self._y, torch.ones_like(f[:, 0]), len(f))
        sites = sites / self._problem.model.temperature
        covariance, gradient = self._collected(sites, torch.zeros_like(f), {})
        covariances, _ = self._predicted(covariance, gradient)
        shift = {name: torch.zeros_like(d) for name, d in self._deviations.items()}
        return self._state(covariance, shift, f, sites, symmetric_root(covariances))

    def step(self, state: _State) -> _State | None:
        """Return the state after a step that raises the bound, or None if there is none."""
        share = 1.0
        while share >= _LEAST_SHARE:
            sites = state.sites + share * (state.curvature - state.sites)
            covariance, gradient = self._collected(sites, state.score, state.shift)
            covariances, change = self._predicted(covariance, gradient)
            root, direction = symmetric_root(covariances), covariance.times(gradient)
            length = self._length(state, root, change, direction)
            shift = {n: s + length * direction[n].to(s) for n, s in state.shift.items()}
            mean = state.mean + length * change
            after = self._state(covariance, shift, mean, sites, root)
            if after.bound > state.bound:
                return after
            share /= 4.0
        return None

    def _state(
        self,
        covariance: Covariance,
        shift: dict[str, Tensor],
        mean: Tensor,
        sites: Tensor,
        root: Tensor,
    ) -> _State:
        value, score, curvature = self._expectations(mean, root, curved=True)
        assert curvature is not None
        bound = value - 0.5 * (self._quadratic(shift) + divergence(covariance, self._flat))
        if not math.isfinite(bound):
            raise NotFiniteError(
                f"The variational bound is {bound}, so outputs or precisions are too large. Look"
                " for weights or hyperparameters that have diverged."
            )
        return _State(covariance, shift, mean, sites, score, curvature, bound)

    def _quadratic(self, shift: Mapping[str, Tensor]) -> float:
        """Return (μ − w₀)ᵀ P0 (μ − w₀)."""
        return sum(
            float((self._precisions[name] * (deviation + shift[name]).square()).sum())
            for name, deviation in self._deviations.items()
        )

    def _length(
        self, state: _State, root: Tensor, change: Tensor, direction: Mapping[str, Tensor]
    ) -> float:
        """Return the length of a step of the mean that nearly maximizes the bound."""

        def evaluated(length: float) -> tuple[float, float]:
            moved = state.mean + length * change
            value, score, _ = self._expectations(moved, root, curved=False)
            (of_data,) = self._total([(score * change).sum()])
            value -= length * linear + 0.5 * length**2 * quadratic
            return value, float(of_data) - linear - length * quadratic

        linear, quadratic = 0.0, 0.0
        for name, along in direction.items():
            weighted = self._precisions[name] * along
            linear += float((weighted * (self._deviations[name] + state.shift[name])).sum())
            quadratic += float((weighted * along).sum())
        value, first = evaluated(0.0)
        best, length = (value, 0.0), 1.0
        low, high = (0.0, first), (math.inf, -math.inf)  # lengths with their slopes
        for _ in range(_EVALUATIONS if first > 0.0 else 0):
            value, slope = evaluated(length)
            best = max(best, (value, length))
            if abs(slope) <= _SLOPE * first:
                break
            low, high = ((length, slope), high) if slope > 0.0 else (low, (length, slope))
            if high[0] == math.inf:
                length *= 2.0
                continue
            # The slope falls fast at first, so the secant alone would stay at the far end.
            secant = low[0] + (high[0] - low[0]) * low[1] / (low[1] - high[1])
            length = min(secant, 0.5 * (low[0] + high[0]))
        return best[1]

    # ------------------------------------------------------------ passes

    def _collected(
        self, sites: Tensor, score: Tensor, shift: Mapping[str, Tensor]
    ) -> tuple[Covariance, dict[str, Tensor]]:
        """Return Σ for these curvatures of the outputs, and the gradient of the bound in μ."""
        sweep, problem = self._sweep, self._problem
        size = problem.model.likelihood.num_rows(sites.shape[1])

        def add(
            sums: tuple[Any, dict[str, Tensor]], batch: MicroBatch
        ) -> tuple[Any, dict[str, Tensor]]:
            linearization = sweep.linearize(batch, graph=False)
            f = linearization.outputs
            vectors = hessian_rows(sites[batch.data], None, "eigen")[:, :size].to(f)
            statistic = sweep.curvature.collect(sums[0], linearization, RootRows(vectors))
            rows = linearization.rows(score[batch.data].unsqueeze(1).to(f))
            return statistic, {
                name: total + rows[name].sum((0, 1), dtype=self._dtype)
                for name, total in sums[1].items()
            }

        zeros = {name: torch.zeros_like(d) for name, d in self._deviations.items()}
        count = sweep.block.num_collected(sweep.curvature.counts_data)
        statistic, sums = sweep.fold(add, (sweep.curvature.empty(sweep.purpose, count), zeros))
        statistic = sweep.total(statistic)
        gradient = {
            name: total - self._precisions[name] * (self._deviations[name] + shift.get(name, 0.0))
            for name, total in zip(sums, self._total(list(sums.values())), strict=True)
        }
        precisions = problem.model.prior.precisions()
        return covariance_of(statistic, precisions, problem.model.weights, self._dtype), gradient

    def _predicted(
        self, covariance: Covariance, gradient: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return J Σ Jᵀ of each example, and J Σ times the gradient."""
        of_gradient = covariance.roots_of_vector(gradient)

        def add(
            parts: list[tuple[Tensor, Tensor]], batch: MicroBatch
        ) -> list[tuple[Tensor, Tensor]]:
            linearization = self._predictive.linearize(batch, graph=False)
            roots = covariance.roots(linearization)
            covariances = [sign * (root @ root.mT) for sign, root in roots.items()]
            changes = [sign * (root @ of_gradient[sign][0, 0]) for sign, root in roots.items()]
            return [*parts, (torch.stack(covariances).sum(0), torch.stack(changes).sum(0))]

        parts = self._predictive.fold(add, list[tuple[Tensor, Tensor]](), label="predictive")
        covariances, change = zip(*parts, strict=True)
        return torch.cat(covariances), torch.cat(change)

    def _total(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._problem.ranks.sum(tensors) if self._sweep.block.shares > 1 else tensors

    # ------------------------------------------------------------ expectations

    def _mean_curvature(self, f: Tensor, y: Tensor, of_rows: Tensor, m: int) -> Tensor:
        """Return the sum of Λ times ``of_rows`` over the nodes of each of m examples."""
        likelihood = self._problem.model.likelihood
        with raised_in(f"hessian of {type(likelihood).__name__}"):
            hessian = likelihood.at(y).hessian(f).detach()
        curvature = (of_rows.view(-1, 1, 1) * hessian).unflatten(0, (-1, m)).sum(0)
        weights = likelihood.weights(y[:m])
        if weights is None:
            return curvature
        factors = weights.to(f).sqrt().view(m, -1)  # of examples, or of outputs
        return factors.unsqueeze(2) * curvature * factors.unsqueeze(1)

    def _expectations(
        self, mean: Tensor, root: Tensor, *, curved: bool
    ) -> tuple[float, Tensor, Tensor | None]:
        """Return the expectations of the log likelihood, its gradient and Λ, over T.

        The outputs are N(mean, R Rᵀ) with the root R. The log likelihood is summed over examples.
        """
        problem, (num_data, num_outputs) = self._problem, mean.shape
        points, shares = (t.to(mean) for t in nodes(num_outputs))
        size = max(
            1, _NUMBERS_AT_ONCE // (len(points) * num_outputs * (num_outputs if curved else 1))
        )
        value, scores, curvatures = mean.new_zeros(()), list[Tensor](), list[Tensor]()
        for start in range(0, num_data, size):
            part = slice(start, start + size)
            f = (mean[part] + torch.einsum("kd,mcd->kmc", points, root[part])).flatten(0, 1)
            y = self._y[part]
            m, y = len(y), y.repeat(len(points), *[1] * (y.ndim - 1))
            of_rows = shares.repeat_interleave(m) / problem.model.temperature
            with torch.enable_grad():
                leaf = f.requires_grad_()
                total = (
                    of_rows * log_probabilities(problem.model.likelihood, leaf, y, compare=False)
                ).sum()
                (score,) = torch.autograd.grad(total, leaf)
            value += total.detach()
            scores.append(score.view(-1, m, num_outputs).sum(0))
            if curved:
                curvatures.append(self._mean_curvature(f.detach(), y, of_rows, m))
        (value,) = self._total([value])
        return float(value), torch.cat(scores), torch.cat(curvatures) if curved else None


@cache
def nodes(num_outputs: int) -> tuple[Float[Tensor, "K C"], Float[Tensor, " K"]]:
    """Return nodes and weights of an expectation over N(0, I). Means and covariances are exact."""
    if num_outputs in _HERMITE:
        one, weights = np.polynomial.hermite_e.hermegauss(_HERMITE[num_outputs])
        line = torch.as_tensor(one, device="cpu")
        shares = torch.as_tensor(weights / weights.sum(), device="cpu")
        if num_outputs == 1:
            return line.unsqueeze(1), shares
        return torch.cartesian_prod(line, line), torch.outer(shares, shares).flatten()
    count = max(_PAIRS, 2 * num_outputs)
    uniform = SobolEngine(num_outputs, scramble=True, seed=0).draw(count, dtype=torch.float64)
    half = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
    factor = torch.linalg.cholesky(half.mT @ half / count)
    half = torch.linalg.solve_triangular(factor, half.mT, upper=False).mT
    return torch.cat([half, -half]), half.new_full((2 * count,), 0.5 / count)


def divergence(covariance: Covariance, precisions: Mapping[str, Float[Tensor, " n"]]) -> float:
    """Return tr(P0 Σ) − P − log|P0 Σ|, which is twice the divergence without its mean."""
    if covariance.explained is not None:
        return _of_factor(covariance.explained.factor)
    total = 0.0
    for block in covariance.blocks:
        if isinstance(block, Dense):
            total += _of_factor(block.factor)
            continue
        precision = precisions[block.name]
        if isinstance(block, Diagonal):
            relative, counts = block.std.square() * precision, torch.ones_like(precision)
        else:  # the precision of a Kronecker block is one number
            relative = block.std.square()
            if block.prior_std is None:
                relative = relative * precision[0]
            of_gradients, of_inputs = map(_multiplicities, (block.gradients, block.inputs))
            counts = torch.outer(of_gradients, of_inputs).expand_as(relative)
        total += float((counts * (relative - 1.0 - relative.log())).sum())
    return total


def _of_factor(factor: Float[Tensor, "n n"]) -> float:
    """Return tr(A⁻¹) − n + log|A| from the Cholesky factor of A."""
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    return float(inverse.square().sum() - len(factor) + 2.0 * factor.diagonal().log().sum())


def _multiplicities(vectors: Float[Tensor, "G n r"]) -> Tensor:
    """Return how many eigenvalues each column of ``Kronecker.std`` stands for."""
    size, rank = vectors.shape[-2:]
    ones = vectors.new_ones(rank)
    return ones if rank == size else torch.cat([ones, vectors.new_full((size,), 1 - rank / size)])
