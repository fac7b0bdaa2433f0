"""Fit the posterior of the linearized network by Gaussian variational inference.

The network is linear in its weights, f_n = f(x_n; w*) + J_n (w − w*). Among the distributions
q = N(μ, Σ) of a structure, the best one maximizes a lower bound on the log evidence of this model,

    E_q[(1/T) log p(y|f)] − KL(q ‖ N(w₀, P0⁻¹)).

Its precision matrix and its mean satisfy

    Σ⁻¹ = P0 + H,  H = Σ_n J_nᵀ E_q[Λ_n] J_n,      P0 (μ − w₀) = Σ_n J_nᵀ E_q[∇_f log p(y_n|f_n)] / T.

Steps alternate between both equations (M. E. Khan and H. Rue, 2023, *The Bayesian Learning Rule*).
The mean moves along natural gradients Σ g and along its last move, by Newton's method in this
plane, as in conjugate gradients. The expectations are sums over fixed nodes, so bounds can be
compared, and what lowers the bound is not done.

Weights have coordinates in which Σ is diagonal or has dense blocks: the eigenvectors of Laplace's
Kronecker factors for ``kfac``, and otherwise the weights themselves. Only the diagonal of H in
these coordinates changes Σ (T. George et al., 2018, arXiv:1806.03884). The Jacobian rows of all data
stay in memory if they fit, and are otherwise computed again. For every structure,

    KL(q ‖ N(w₀, P0⁻¹)) = ½ (μ − w₀)ᵀ P0 (μ − w₀) + ½ log|P0⁻¹ Σ⁻¹| − ½ Σ_n tr(E_q[Λ_n] J_n Σ J_nᵀ)

with the expectations E_q[Λ_n] from which Σ was computed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.quasirandom import SobolEngine

from evigrad.core.algorithm import run_pass
from evigrad.core.curvature.linalg import factor_identity_plus
from evigrad.core.curvature.rows import DenseRows
from evigrad.core.roots import hessian_rows
from evigrad.core.types import MicroBatch
from evigrad.errors import ConfigurationError, NotFiniteError, raised_in
from evigrad.passes.memory import available_bytes
from evigrad.passes.problem import Problem
from evigrad.passes.sweep import MicroBatchSweep
from evigrad.posterior.covariances import (
    Block,
    Covariance,
    Dense,
    Diagonal,
    Explained,
    Kronecker,
    covariance_of,
)
from evigrad.posterior.predictive import symmetric_root

# Steps end when the bound rises by less than this many nats per example.
TOLERANCE = 1e-3
MOST_STEPS = 20
# Moves of the mean for each Σ, Newton steps in the plane of a move, and lengths that they try.
_MOVES, _LENGTHS = 4, (1.0, 0.25, 0.05)
# Shares of the new expectations in Σ, the first of which raises the bound.
_SHARES = (1.0, 0.25, 0.05)
# Nodes of Gauss and Hermite in one and two dimensions. More dimensions take pairs of opposite
# quasi-random points, at least this many pairs and twice as many as outputs.
_HERMITE = {1: 32, 2: 20}
_PAIRS = 64
_NUMBERS_AT_ONCE = 2**20
# Share of the free memory for rows that are kept over steps.
_KEPT_SHARE = 0.35
State = TypeVar("State")


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
    check_hessian(sweep.problem)
    fitter = _Fitter(sweep, predictive, structure)
    state = fitter.start()
    bounds = [state.bound]
    while len(bounds) <= MOST_STEPS:
        # Most of the first step is due to the mean, so the first covariance is Laplace's.
        after = state if len(bounds) == 1 else fitter.with_better_covariance(state)
        after = fitter.with_better_mean(after)
        if after.bound <= state.bound:
            break
        state = after
        bounds.append(state.bound)
        if bounds[-1] - bounds[-2] < fitter.tolerance:
            break
    return VariationalFit(state.sigma.covariance(), fitter.in_weights(state.shift), bounds)


def check_hessian(problem: Problem) -> None:
    """Raise an error if the likelihood does not define its Hessian."""
    if not problem.likelihood.defines_hessian or problem.estimator.curvature != "ggn":
        raise ConfigurationError(
            "inference='variational' needs the Hessian of the likelihood, but"
            f" {type(problem.likelihood).__name__} does not define it. Define hessian(f), or use"
            " inference='laplace'."
        )


@dataclass(frozen=True, eq=False)
class _Sigma:
    """Σ, in coordinates."""

    covariance: Callable[[], Covariance]
    times: Callable[[Tensor], Tensor]  # Σ g
    sites: Float[Tensor, "N C C"]  # curvatures of the outputs, of which Σ is made
    roots: Float[Tensor, "N C C"]  # symmetric roots of J Σ Jᵀ for each example
    volume: float  # log|P0⁻¹ Σ⁻¹| − Σ_n tr(sites_n J_n Σ J_nᵀ)


@dataclass(frozen=True, eq=False)
class _State:
    """A distribution of the weights and of the outputs of all examples, and its bound."""

    sigma: _Sigma
    shift: Float[Tensor, " n"]  # μ − w*, in coordinates
    mean: Float[Tensor, "N C"]
    score: Float[Tensor, "N C"]  # expectations under the distribution, over T
    curvature: Float[Tensor, "N C C"]
    bound: float


class _Fitter:
    """Steps for one data set."""

    def __init__(
        self, sweep: MicroBatchSweep, predictive: MicroBatchSweep, structure: str
    ) -> None:
        self._predictive, self._problem = predictive, (problem := sweep.problem)
        self._shares = sweep.block.shares
        self._num_rows = problem.likelihood.num_rows(sweep.num_outputs)
        self.tolerance = TOLERANCE * problem.num_data
        outputs = list[tuple[Tensor, Tensor]]()
        outputs = sweep.fold(lambda p, b: [*p, (sweep.outputs(b), b.y)], outputs, label="outputs")
        f, targets = zip(*outputs, strict=True)
        self._dtype = problem.settings.gram_dtype or torch.float64
        self._f, self._y = torch.cat(f).to(self._dtype), torch.cat(targets)
        weights = {n: weight.detach().to(self._dtype) for n, weight in problem.weights.items()}
        precisions = problem.prior.precisions()
        flat = {n: precisions[n].detach().to(w).expand_as(w).flatten() for n, w in weights.items()}
        self._blocks: Sequence[Block] = [Diagonal(n, p.rsqrt()) for n, p in flat.items()]
        if structure == "kfac":
            statistic = run_pass(problem, sweep.curvature, sweep).statistic
            covariance = covariance_of(statistic, precisions, problem.weights, self._dtype)
            self._blocks = covariance.blocks
        elif structure in {"full", "last-layer"}:
            one = self._f.new_ones(1)
            self._blocks = [Dense(list(flat), one, one[None])]
        # The same blocks, of which every coordinate has the variance 1.
        units, self._spans, parts = list[Block](), list[slice](), list[Tensor]()
        rows_dtype = torch.promote_types(problem.dtype, torch.float32)
        for block in self._blocks:
            start = sum(map(len, parts))
            if isinstance(block, Kronecker):
                basis = [vectors.to(rows_dtype) for vectors in (block.inputs, block.gradients)]
                std = torch.ones_like(block.std, dtype=rows_dtype)
                units.append(Kronecker(block.name, *basis, std))
                parts.append(flat[block.name][:1].expand(std.numel()))
            else:
                parts += (of_block := [flat[name] for name in block.names])
                ones = [torch.ones_like(p, dtype=rows_dtype) for p in of_block]
                units += map(Diagonal, block.names, ones)
            self._spans.append(slice(start, sum(map(len, parts))))
        self._units, self._precision = Covariance(units), torch.cat(parts)
        self._deviation = self._coordinates(problem.prior.deviations(weights))
        needed = rows_dtype.itemsize * self._f.numel() * len(self._precision)
        free = available_bytes(problem.device)
        self._kept = None
        if structure == "ntk" or free is None or needed <= _KEPT_SHARE * free:
            rows = list[tuple[slice, Tensor]]()
            self._kept = self._over_rows(lambda kept, part, rows: [*kept, (part, rows)], rows)
        self._kernel = None
        if structure == "ntk":
            chunks = tuple(rows.flatten(0, 1) for _, rows in self._kept or [])
            self._kernel = DenseRows(chunks).gram(self._f, self._precision)

    # ------------------------------------------------------------ steps

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
            if after.bound > state.bound:
                return after
        return state

    def with_better_mean(self, state: _State) -> _State:
        """Return the state after moves of the mean that raise the bound."""
        before = state
        for number in range(_MOVES):
            gradient = self._pulled(state.score)
            gradient -= self._precision * (self._deviation + state.shift)
            direction = state.sigma.times(gradient)
            moves, changes = direction[None], self._changes(direction)[None]
            if number:
                moves = torch.stack([direction, state.shift - before.shift])
                changes = torch.cat([changes, (state.mean - before.mean)[None]])
            before, state = state, self._moved(state, moves, changes)
            if state.bound - before.bound < self.tolerance:
                break
        return state

    def _moved(
        self, state: _State, moves: Float[Tensor, "k n"], changes: Float[Tensor, "k N C"]
    ) -> _State:
        """Return the state after a Newton step along combinations of moves, if the bound rises."""
        weighted = self._precision * moves
        slope = torch.einsum("nc,anc->a", state.score, changes)
        curved = torch.einsum("anc,ncd,bnd->ab", changes, state.curvature, changes)
        slope, curved = self._total([slope, curved])
        slope = slope - weighted @ (self._deviation + state.shift)
        newton = torch.linalg.pinv(curved + weighted @ moves.mT, hermitian=True) @ slope
        for length in _LENGTHS:
            mean = state.mean + length * torch.tensordot(newton, changes, 1)
            after = self._state(state.sigma, state.shift + length * (newton @ moves), mean)
            if after.bound > state.bound:
                return after
        return state

    def _state(self, sigma: _Sigma, shift: Tensor, mean: Tensor) -> _State:
        value, score, curvature = self._expectations(mean, sigma.roots)
        quadratic = float((self._precision * (self._deviation + shift).square()).sum())
        bound = value - 0.5 * (quadratic + sigma.volume)
        if not math.isfinite(bound):
            raise NotFiniteError(
                f"The variational bound is {bound}, so outputs or precisions are too large. Look"
                " for weights or hyperparameters that have diverged."
            )
        return _State(sigma, shift, mean, score, curvature, bound)

    # ------------------------------------------------------------ coordinates and passes

    def _coordinates(self, vector: Mapping[str, Tensor]) -> Float[Tensor, " n"]:
        return self._units.roots_of_vector(vector)[1][0, 0].to(self._dtype)

    def in_weights(self, coordinates: Float[Tensor, " n"]) -> dict[str, Tensor]:
        """Return a vector of weights, by name, from its coordinates."""
        weights = self._problem.weights
        with torch.enable_grad():
            zeros = {n: torch.zeros_like(w, dtype=self._dtype) for n, w in weights.items()}
            leaves = {name: zero.requires_grad_() for name, zero in zeros.items()}
            total = self._coordinates(leaves) @ coordinates
            vectors = torch.autograd.grad(total, list(leaves.values()))
        return dict(zip(leaves, vectors, strict=True))

    def _over_rows(self, work: Callable[[State, slice, Tensor], State], state: State) -> State:
        """Do ``work`` on the rows (m, C, n) of all outputs, in coordinates."""
        if self._kept is not None:
            for part, rows in self._kept:
                state = work(state, part, rows)
            return state

        def step(state: State, batch: MicroBatch) -> State:
            linearization = self._predictive.linearize(batch, graph=False)
            return work(state, batch.data, self._units.roots(linearization)[1])

        return self._predictive.fold(step, state, label="predictive")

    def _changes(self, vector: Float[Tensor, " n"]) -> Float[Tensor, "N C"]:
        """Return J times a vector."""

        def add(parts: list[Tensor], _: slice, rows: Tensor) -> list[Tensor]:
            return [*parts, (rows @ vector.to(rows)).to(vector)]

        return torch.cat(self._over_rows(add, list[Tensor]()))

    def _pulled(self, values: Float[Tensor, "N C"]) -> Float[Tensor, " n"]:
        """Return Jᵀ times values of all outputs."""

        def add(total: Tensor, part: slice, rows: Tensor) -> Tensor:
            return total + values[part].flatten().to(rows) @ rows.flatten(0, 1)

        return self._total([self._over_rows(add, torch.zeros_like(self._precision))])[0]

    def _total(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._problem.ranks.sum(tensors) if self._shares > 1 else tensors

    # ------------------------------------------------------------ covariances

    def _sigma(self, sites: Float[Tensor, "N C C"]) -> _Sigma:
        """Return Σ for these curvatures of the outputs."""
        roots = hessian_rows(sites, None, "eigen")[:, : self._num_rows]
        if self._kernel is not None:
            return self._sigma_of_kernel(sites, roots, self._kernel)

        def add(sums: list[Tensor], part: slice, rows: Tensor) -> list[Tensor]:
            terms = list[Tensor]()
            for block, span in zip(self._blocks, self._spans, strict=True):
                of_block = rows[..., span]
                if isinstance(block, Dense):
                    weighted = (roots[part] @ of_block.to(roots)).flatten(0, 1)
                    terms.append(weighted.mT @ weighted)
                else:
                    weighted = sites[part].to(rows) @ of_block
                    terms.append((of_block * weighted).sum((0, 1)))
            return [total + term for total, term in zip(sums, terms, strict=True)]

        sums = self._total(self._over_rows(add, [self._f.new_zeros(()) for _ in self._blocks]))
        blocks, variance, log_det = list[Block](), torch.zeros_like(self._precision), 0.0
        dense = list[tuple[Dense, slice]]()
        for block, span, total in zip(self._blocks, self._spans, sums, strict=True):
            precision = self._precision[span]
            if isinstance(block, Dense):
                blocks.append(of_names := Dense.of(block.names, total, precision))
                dense.append((of_names, span))
                log_det += 2.0 * float(of_names.factor.diagonal().log().sum())
                continue
            total, counts = _averaged(total, block)
            log_det += float((counts * (total / precision).log1p()).sum())
            variance[span] = 1.0 / (total + precision)
            blocks.append(replace(block, std=variance[span].sqrt().view_as(block.std)))

        def covariances(parts: list[Tensor], _: slice, rows: Tensor) -> list[Tensor]:
            total = sites.new_zeros(())
            if len(dense) < len(blocks):
                total = ((rows * variance.to(rows)) @ rows.mT).to(sites)
            for block, span in dense:
                scaled = (rows[..., span].to(sites) * block.root).flatten(0, 1).mT
                white = torch.linalg.solve_triangular(block.factor, scaled, upper=False)
                white = white.mT.unflatten(0, rows.shape[:2])
                total = total + white @ white.mT
            return [*parts, total]

        def times(vector: Tensor) -> Tensor:
            result = variance * vector
            for block, span in dense:
                scaled = (block.root * vector[span]).unsqueeze(1)
                solved = torch.cholesky_solve(scaled, block.factor).squeeze(1)
                result[span] = block.root * solved
            return result

        covariance = torch.cat(self._over_rows(covariances, list[Tensor]()))
        return self._sigma_of(lambda: Covariance(blocks), times, sites, covariance, log_det)

    def _sigma_of_kernel(self, sites: Tensor, roots: Tensor, kernel: Tensor) -> _Sigma:
        """Return Σ from the kernel J P0⁻¹ Jᵀ of all outputs, which stays the same."""
        (n, k, c), precision = roots.shape, self._precision
        cross = (roots @ kernel.view(n, c, n * c)).flatten(0, 1)  # A P0⁻¹ Jᵀ
        inner = (roots @ cross.mT.reshape(n, c, n * k)).flatten(0, 1)
        factor = factor_identity_plus(inner)
        explained = torch.linalg.solve_triangular(factor, cross, upper=False)
        explained = explained.mT.unflatten(0, (n, c))
        every = torch.arange(n, device=kernel.device)
        covariance = kernel.view(n, c, n, c)[every, :, every] - explained @ explained.mT

        def times(vector: Tensor) -> Tensor:
            of_rows = roots @ self._changes(vector / precision).unsqueeze(2)
            solved = torch.cholesky_solve(of_rows.view(-1, 1), factor).view(n, k, 1)
            return (vector - self._pulled((roots.mT @ solved).squeeze(2))) / precision

        def whole() -> Covariance:
            rows = [(roots[p].to(rows) @ rows).flatten(0, 1) for p, rows in self._kept or []]
            of_names = {
                block.names[0]: [chunk[:, span] for chunk in rows]
                for block, span in zip(self._blocks, self._spans, strict=True)
            }
            return Covariance(
                self._blocks, Explained(of_names, kernel.new_ones(len(factor)), factor)
            )

        log_det = 2.0 * float(factor.diagonal().log().sum())
        return self._sigma_of(whole, times, sites, covariance, log_det)

    def _sigma_of(
        self,
        whole: Callable[[], Covariance],
        times: Callable[[Tensor], Tensor],
        sites: Tensor,
        covariance: Tensor,
        log_det: float,
    ) -> _Sigma:
        (trace,) = self._total([(sites * covariance).sum()])
        return _Sigma(whole, times, sites, symmetric_root(covariance), log_det - float(trace))

    # ------------------------------------------------------------ expectations

    def _mean_curvature(
        self, f: Float[Tensor, "km C"], y: Tensor, shares: Float[Tensor, " k"]
    ) -> Float[Tensor, "m C C"]:
        """Return the mean of Λ over k nodes of each example, over T."""
        likelihood, m = self._problem.likelihood, len(f) // len(shares)
        with raised_in(f"hessian of {type(likelihood).__name__}"):
            hessian = likelihood.at(y).hessian(f).detach()
        curvature = (shares @ hessian.view(len(shares), -1)).view(m, *hessian.shape[1:])
        curvature = curvature / self._problem.temperature
        weights = likelihood.weights(y[:m])
        if weights is None:
            return curvature
        factors = weights.to(f).sqrt().view(m, -1)  # of examples, or of outputs
        return factors.unsqueeze(2) * curvature * factors.unsqueeze(1)

    def _expectations(self, mean: Tensor, root: Tensor) -> tuple[float, Tensor, Tensor]:
        """Return the expectations of the log likelihood, its gradient and Λ, over T.

        The outputs are N(mean, R Rᵀ) with the root R. The log likelihood is summed over examples.
        """
        problem, (num_data, num_outputs) = self._problem, mean.shape
        points, shares = (t.to(mean) for t in nodes(num_outputs))
        size = max(1, _NUMBERS_AT_ONCE // (len(points) * num_outputs**2))
        value, scores, curvatures = mean.new_zeros(()), list[Tensor](), list[Tensor]()
        for start in range(0, num_data, size):
            part = slice(start, start + size)
            f = (mean[part] + torch.einsum("kd,mcd->kmc", points, root[part])).flatten(0, 1)
            y = self._y[part]
            m, y = len(y), y.repeat(len(points), *[1] * (y.ndim - 1))
            of_rows = shares.repeat_interleave(m) / problem.temperature
            with torch.enable_grad():
                leaf = f.requires_grad_()
                total = (of_rows * problem.log_probabilities(leaf, y)).sum()
                (score,) = torch.autograd.grad(total, leaf)
            value += total.detach()
            scores.append(score.view(-1, m, num_outputs).sum(0))
            curvatures.append(self._mean_curvature(f.detach(), y, shares))
        (value,) = self._total([value])
        return float(value), torch.cat(scores), torch.cat(curvatures)


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


def _averaged(
    curvature: Float[Tensor, " n"], block: Diagonal | Kronecker
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return the curvature of each coordinate, and how many directions the coordinate stands for.

    The columns of I − UUᵀ stand for fewer directions than there are columns. The curvature is
    averaged over them, because their variances are equal.
    """
    counts = torch.ones_like(curvature)
    if not isinstance(block, Kronecker):
        return curvature, counts
    curvature, counts = curvature.view_as(block.std), counts.view_as(block.std)
    for dim, vectors in ((1, block.gradients), (2, block.inputs)):
        size, rank = vectors.shape[-2:]
        if rank < size:
            inside, outside = curvature.split([rank, size], dim)
            mean = outside.sum(dim, keepdim=True) / (size - rank)
            curvature = torch.cat([inside, mean.expand_as(outside)], dim)
            counts.narrow(dim, rank, size).mul_(1 - rank / size)
    return curvature.flatten(), counts.flatten()
