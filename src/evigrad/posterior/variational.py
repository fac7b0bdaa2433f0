"""Fit the posterior of the linearized network by Gaussian variational inference.

The network is linear in its weights, f_n = f(x_n; w*) + J_n (w − w*). Among the distributions
q = N(μ, Σ) of a structure, the best one maximizes a lower bound on the log evidence of this model,

    E_q[(1/T) log p(y|f)] − KL(q ‖ N(w₀, P0⁻¹)).

Its precision matrix and its mean satisfy

    Σ⁻¹ = P0 + Σ_n J_nᵀ E_q[Λ_n] J_n,      P0 (μ − w₀) = Σ_n J_nᵀ E_q[∇_f log p(y_n|f_n)] / T.

Steps alternate between the two equations (M. E. Khan and H. Rue, 2023, *The Bayesian Learning
Rule*). The mean takes Newton steps in the plane of the natural gradient and its last move. Changes
that lower the bound are omitted. Expectations are sums over fixed nodes, so bounds are comparable.

For ``kfac``, Σ is diagonal in coordinates along the eigenvectors of Laplace's Kronecker factors
(T. George et al., 2018, arXiv:1806.03884). Otherwise, the coordinates are the weights.
With the expectations E_q[Λ_n] that Σ was set by, tr(P0 Σ) − P = −Σ_n tr(E_q[Λ_n] J_n Σ J_nᵀ).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.quasirandom import SobolEngine

from evigrad.core.algorithm import run_pass
from evigrad.core.curvature.dense import BlockStatistic
from evigrad.core.curvature.ntk import NtkStatistic
from evigrad.core.curvature.rows import DenseRows
from evigrad.core.roots import hessian_rows
from evigrad.errors import ConfigurationError, NotFiniteError, raised_in
from evigrad.likelihoods.calls import log_probabilities
from evigrad.passes.memory import available_bytes
from evigrad.passes.sweep import MicroBatchSweep
from evigrad.posterior.covariances import Covariance, Dense, Diagonal, Kronecker, covariance_of
from evigrad.posterior.predictive import symmetric_root

# Steps end when the bound rises by less than this many nats per example.
TOLERANCE = 5e-3
MOST_STEPS = 20
# Moves of the mean in a step. The first of these shares of a change that raises the bound is taken.
_MOVES, _SHARES = 4, (1.0, 0.25, 0.05)
# Jacobian rows stay in memory if they take at most this share of the free memory.
_KEPT_SHARE = 0.35
# Nodes of Gauss and Hermite in one and two dimensions. More dimensions take pairs of opposite
# quasi-random points, at least this many pairs and twice as many as outputs.
_HERMITE, _PAIRS = {1: 32, 2: 20}, 32
_NUMBERS_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class VariationalFit:
    """The fitted distribution N(w* + shift, Σ)."""

    covariance: Covariance
    shift: Mapping[str, Tensor]  # μ − w*, by name
    bounds: Sequence[float]  # in nats, before the first step and after each step


def fit_gaussian(
    sweep: MicroBatchSweep, predictive: MicroBatchSweep, structure: str
) -> VariationalFit:
    """Return the best Gaussian distribution of the weights.

    Args:
        sweep: Passes over all data that collect rows.
        predictive: The same passes, in micro-batches for predictions with covariances.
        structure: Structure of Σ.

    Raises:
        ConfigurationError: If the likelihood does not define its Hessian.
        NotFiniteError: If the bound is not finite.
    """
    likelihood, estimator = sweep.problem.model.likelihood, sweep.problem.model.estimator
    if not likelihood.defines_hessian or estimator.curvature != "ggn":
        raise ConfigurationError(
            "inference='variational' needs the Hessian of the likelihood, but"
            f" {type(likelihood).__name__} does not define it. Define hessian(f), or use"
            " inference='laplace'."
        )
    fitter = _Fitter(sweep, predictive, structure)
    state = fitter.start()
    bounds, rise = [state.bound], math.inf
    while rise >= fitter.tolerance and len(bounds) <= MOST_STEPS:
        # The first step keeps Laplace's covariance, because most of its gain is due to the mean.
        after = state if len(bounds) == 1 else fitter.with_better_covariance(state)
        after = fitter.with_better_mean(after)
        if (rise := after.bound - state.bound) > 0.0:
            state = after
            bounds.append(state.bound)
    return VariationalFit(*fitter.in_weights(state), bounds)


@dataclass(frozen=True, eq=False)
class _Sigma:
    """Σ, in coordinates."""

    covariance: Covariance
    sites: Float[Tensor, "N C C"]  # curvatures of the outputs that Σ was set by
    roots: Float[Tensor, "N C C"]  # symmetric roots of J Σ Jᵀ for each example
    log_det: float  # log|P0⁻¹ Σ⁻¹|


@dataclass(frozen=True, eq=False)
class _State:
    """A distribution of the weights and of the outputs of all examples, and its bound."""

    sigma: _Sigma
    shift: Float[Tensor, " P"]  # μ − w*, in coordinates
    mean: Float[Tensor, "N C"]
    score: Float[Tensor, "N C"]  # expectations under the distribution, over T
    curvature: Float[Tensor, "N C C"]
    bound: float


class _Fitter:
    """Steps for one data set."""

    def __init__(self, sweep: MicroBatchSweep, predictive: MicroBatchSweep, structure: str) -> None:
        self._predictive, self._problem, model = predictive, sweep.problem, sweep.problem.model
        self._shares, self._structure = sweep.block.shares, structure
        self._num_rows = model.likelihood.num_rows(sweep.plan.num_outputs)
        self.tolerance = TOLERANCE * model.num_data
        outputs = list[tuple[Tensor, Tensor]]()
        outputs = sweep.fold(lambda p, b: [*p, (sweep.outputs(b), b.y)], outputs, label="outputs")
        f, self._y = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        self._f = f.to(self._problem.settings.gram_dtype or torch.float64)
        row_dtype = torch.promote_types(f.dtype, torch.float32)
        self._one = one = f.new_ones((), dtype=row_dtype)
        weights, prior = model.weights, dict(model.prior.precisions())
        deviations = model.prior.deviations(weights)
        self._covariance_of = partial(
            covariance_of, precisions=prior, weights=weights, dtype=self._f.dtype
        )
        # The variance of every coordinate is 1.
        self._units: dict[str, Any] = {
            n: Diagonal(n, one.expand(w.numel())) for n, w in weights.items()
        }
        self._dense = {""} if structure in {"full", "last-layer"} else set[str]()
        if structure == "kfac":
            statistic = run_pass(model, sweep.curvature, sweep).statistic
            for block in self._covariance_of(statistic).blocks:
                if isinstance(block, Kronecker):
                    inputs, gradients = (
                        torch.linalg.qr(vectors, mode="complete").Q.to(one)
                        for vectors in (block.inputs, block.gradients)
                    )
                    std = one.expand(*gradients.shape[:2], inputs.shape[1])
                    if (scale := block.prior_std) is not None:
                        # The coordinates of weights w are P0^{1/2} w along the eigenvectors.
                        deviations[block.name] = deviations[block.name] * prior[block.name]
                        scale, prior[block.name] = scale.to(one), one
                    self._units[block.name] = Kronecker(block.name, inputs, gradients, std, scale)
                elif isinstance(block, Dense):
                    self._dense.update(block.names)
        flat = {n: prior[n].detach().to(self._f).expand_as(w).flatten() for n, w in weights.items()}
        self._precision = torch.cat(list(flat.values()))
        ends = np.cumsum([0, *map(len, flat.values())]).tolist()
        self._spans = dict(zip(flat, map(slice, ends, ends[1:]), strict=False))
        self._unit = Covariance(list(self._units.values()))
        self._deviation = self._coordinates(deviations)
        free = available_bytes(self._problem.device)
        needed = one.itemsize * f.numel() * len(self._precision)
        self._kept: Any = None
        if free is None or needed <= _KEPT_SHARE * free:
            self._kept = self._over_rows(lambda k, part, rows: [*k, (part, rows)], list[Any]())

    def start(self) -> _State:
        """Return Laplace's approximation, in coordinates."""
        sites = self._mean_curvature(self._f, self._y, self._f.new_ones(1))
        return self._state(self._sigma(sites), torch.zeros_like(self._precision), self._f)

    def with_better_covariance(self, state: _State) -> _State:
        """Return the state with Σ of the present expectations, if this raises the bound."""
        before = state.sigma.sites
        for share in _SHARES:
            sigma = self._sigma(before + share * (state.curvature - before))
            after = self._state(sigma, state.shift, state.mean)
            if after.bound > state.bound - self.tolerance:  # smaller steps would gain little
                return after if after.bound > state.bound else state
        return state

    def with_better_mean(self, state: _State) -> _State:
        """Return the state after moves of the mean that raise the bound."""
        before = state
        for number in range(_MOVES):
            gradient = self._pulled(state.score)
            gradient -= self._precision * (self._deviation + state.shift)
            ascent = state.sigma.covariance.times(self._named(gradient))
            direction = torch.cat([ascent[name] for name in self._spans])
            fast = direction.to(self._one)
            moves, changes = direction[None], self._of_outputs(lambda rows, v=fast: rows @ v)[None]
            if number:
                moves = torch.stack([direction, state.shift - before.shift])
                changes = torch.cat([changes, (state.mean - before.mean)[None]])
            weighted, before = self._precision * moves, state
            slope = torch.einsum("nc,anc->a", state.score, changes)
            hessian = torch.einsum("anc,ncd,bnd->ab", changes, state.curvature, changes)
            slope, hessian = self._total([slope, hessian])
            slope = slope - weighted @ (self._deviation + state.shift)
            newton = torch.linalg.pinv(hessian + weighted @ moves.mT, hermitian=True) @ slope
            for share in _SHARES:
                mean = before.mean + share * torch.tensordot(newton, changes, 1)
                after = self._state(before.sigma, before.shift + share * (newton @ moves), mean)
                if after.bound > before.bound:
                    state = after
                    break
            if state.bound - before.bound < self.tolerance:
                break
        return state

    def _state(self, sigma: _Sigma, shift: Tensor, mean: Tensor) -> _State:
        value, score, curvature = self._expectations(mean, sigma.roots)
        trace, value = self._total([(sigma.sites * (sigma.roots @ sigma.roots)).sum(), value])
        quadratic = (self._precision * (self._deviation + shift).square()).sum()
        bound = float(value - 0.5 * (quadratic - trace + sigma.log_det))
        if not math.isfinite(bound):
            raise NotFiniteError(
                f"The variational bound is {bound}, so outputs or precisions are too large. Look"
                " for weights or hyperparameters that have diverged."
            )
        return _State(sigma, shift, mean, score, curvature, bound)

    def _coordinates(self, vector: Mapping[str, Tensor]) -> Float[Tensor, " P"]:
        return self._unit.roots_of_vector(vector)[1][0, 0].to(self._f)

    def _named(self, values: Float[Tensor, "*r P"]) -> dict[str, Float[Tensor, "*r _"]]:
        return {name: values[..., span] for name, span in self._spans.items()}

    def in_weights(self, state: _State) -> tuple[Covariance, dict[str, Tensor]]:
        """Return Σ and μ − w* in the weights."""
        covariance, weights = state.sigma.covariance, self._problem.model.weights
        leaves = {n: torch.zeros_like(w, dtype=self._f.dtype) for n, w in weights.items()}
        with torch.enable_grad():
            coordinates = self._coordinates({n: z.requires_grad_() for n, z in leaves.items()})
            shift = torch.autograd.grad(coordinates @ state.shift, list(leaves.values()))
        blocks: list[Any] = list(covariance.blocks)
        for i, block in enumerate(blocks):
            if isinstance(unit := self._units[block.names[0]], Kronecker):
                std = block.std.view_as(unit.std)
                blocks[i] = replace(
                    unit, inputs=unit.inputs.to(std), gradients=unit.gradients.to(std), std=std
                )
        return Covariance(blocks, covariance.explained), dict(zip(leaves, shift, strict=True))

    def _over_rows(self, work: Callable[[Any, slice, Tensor], Any], state: Any) -> Any:
        """Do ``work`` on the rows (m, C, P) of all outputs, in coordinates."""
        if self._kept is not None:
            for part, rows in self._kept:
                state = work(state, part, rows)
            return state

        def step(state: Any, batch: Any) -> Any:
            linearization = self._predictive.linearize(batch, graph=False)
            return work(state, batch.data, self._unit.roots(linearization)[1])

        return self._predictive.fold(step, state, label="predictive")

    def _of_outputs(self, work: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the results of ``work`` on the rows of all examples."""

        def add(parts: list[Tensor], _: slice, rows: Tensor) -> list[Tensor]:
            return [*parts, work(rows).to(self._f)]

        return torch.cat(self._over_rows(add, list[Tensor]()))

    def _pulled(self, values: Float[Tensor, "N C"]) -> Float[Tensor, " P"]:
        """Return Jᵀ times values of all outputs."""

        def add(total: Tensor, part: slice, rows: Tensor) -> Tensor:
            return total + values[part].flatten().to(rows) @ rows.flatten(0, 1)

        return self._total([self._over_rows(add, torch.zeros_like(self._precision))])[0]

    def _total(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._problem.ranks.sum(tensors) if self._shares > 1 else tensors

    def _sigma(self, sites: Float[Tensor, "N C C"]) -> _Sigma:
        """Return Σ for these curvatures of the outputs."""
        root = hessian_rows(sites, None, "eigen")[:, : self._num_rows]
        groups = {"": slice(None)} if "" in self._dense else self._spans  # of one block of H
        is_kernel = self._structure == "ntk"

        def add(sums: dict[str, Any], part: slice, rows: Tensor) -> dict[str, Any]:
            weighted = (root[part].to(rows) @ rows).flatten(0, 1)
            terms = {name: weighted[:, span] for name, span in groups.items()}
            if is_kernel:
                return {name: (*sums[name], term) for name, term in terms.items()}
            for name, t in terms.items():
                if name in self._dense:
                    terms[name] = sums[name] + t.mT.to(sites) @ t.to(sites)
                else:
                    terms[name] = sums[name] + torch.linalg.vecdot(t, t, dim=0)
            return terms

        sums = self._over_rows(add, dict.fromkeys(groups, () if is_kernel else sites.new_zeros(())))
        if is_kernel:
            statistic = NtkStatistic({n: DenseRows(c) for n, c in sums.items()}, None, ())
        else:
            statistic = BlockStatistic(dict(zip(sums, self._total([*sums.values()]), strict=True)))
        covariance = self._covariance_of(statistic)
        # Sums of positive terms need no double precision.
        dtype, blocks = (self._f if is_kernel else self._one).dtype, covariance.blocks
        fast = [replace(b, std=b.std.to(dtype)) if isinstance(b, Diagonal) else b for b in blocks]

        def covariances(rows: Tensor) -> Any:
            pairs = ((block, self._named(rows)) for block in fast)
            return covariance._of_rows(pairs, rows.shape[1])

        factors = [] if covariance.explained is None else [covariance.explained.factor.diagonal()]
        for block in covariance.blocks:
            prior = self._precision[self._spans[block.names[0]]]
            is_dense = isinstance(block, Dense)
            factors.append(block.factor.diagonal() if is_dense else prior.rsqrt() / block.std)
        log_det = 2.0 * float(torch.cat(factors).log().sum())
        roots = symmetric_root(self._of_outputs(covariances))
        return _Sigma(covariance, sites, roots, log_det)

    def _mean_curvature(
        self, f: Float[Tensor, "km C"], y: Tensor, shares: Float[Tensor, " k"]
    ) -> Float[Tensor, "m C C"]:
        """Return the mean of Λ over k nodes of each example, over T."""
        likelihood, m = self._problem.model.likelihood, len(f) // len(shares)
        with raised_in(f"hessian of {type(likelihood).__name__}"):
            hessian = likelihood.at(y).hessian(f).detach()
        curvature = (shares @ hessian.view(len(shares), -1)).view(m, *hessian.shape[1:])
        curvature = curvature / self._problem.model.temperature
        weights = likelihood.weights(y[:m])
        if weights is None:
            return curvature
        factors = weights.to(f).sqrt().view(m, -1)  # of examples, or of outputs
        return factors.unsqueeze(2) * curvature * factors.unsqueeze(1)

    def _expectations(self, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the expectations of the log likelihood, its gradient and Λ, over T.

        The outputs are N(mean, R Rᵀ) with the root R. The log likelihood is summed over examples.
        """
        model, (num_data, num_outputs) = self._problem.model, mean.shape
        points, shares = (t.to(mean) for t in nodes(num_outputs))
        size = max(1, _NUMBERS_AT_ONCE // (len(points) * num_outputs**2))
        value, scores, curvatures = mean.new_zeros(()), list[Tensor](), list[Tensor]()
        for start in range(0, num_data, size):
            part = slice(start, start + size)
            f = (mean[part] + torch.einsum("kd,mcd->kmc", points, root[part])).flatten(0, 1)
            y = self._y[part]
            m, y = len(y), y.repeat(len(points), *[1] * (y.ndim - 1))
            row_shares = shares.repeat_interleave(m) / model.temperature
            with torch.enable_grad():
                leaf = f.requires_grad_()
                values = log_probabilities(model.likelihood, leaf, y, compare=False)
                total = (row_shares * values).sum()
                (score,) = torch.autograd.grad(total, leaf)
            value += total.detach()
            scores.append(score.view(-1, m, num_outputs).sum(0))
            curvatures.append(self._mean_curvature(f.detach(), y, shares))
        return value, torch.cat(scores), torch.cat(curvatures)


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
