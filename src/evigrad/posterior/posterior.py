"""The posterior of a network's outputs, for any inputs, from one pass over all data."""

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evigrad.blocks.anchors import Anchoring, AnchorSelection
from evigrad.blocks.sources import as_source
from evigrad.core.algorithm import run_pass
from evigrad.core.curvature.base import ROWS_AT_ONCE
from evigrad.core.names import Estimator
from evigrad.core.protocols import Purpose
from evigrad.errors import (
    ConfigurationError,
    EvigradWarning,
    InputError,
    MemoryBudgetError,
    listed,
)
from evigrad.inputs import bare_names, noted_calls
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.weighted import unweighted
from evigrad.network import Linearization, model_outputs
from evigrad.network.modes import evaluation_run
from evigrad.network.network import PROBE_SIZE, InputPlan, Network
from evigrad.passes.checks import as_generator, check_choice, check_count, check_inputs
from evigrad.passes.evaluation import precisely
from evigrad.passes.intake import CheckedSource, Data, resolve
from evigrad.passes.kept import checksums
from evigrad.passes.memory import GIB, MicroBatches
from evigrad.passes.parameter_blocks import partition_names
from evigrad.passes.problem import Problem
from evigrad.passes.sweep import MicroBatchSweep
from evigrad.posterior.calibration import best_scales
from evigrad.posterior.covariances import Covariance, Diagonal, covariance_of
from evigrad.posterior.joint import JointPredictive, outputs_of
from evigrad.posterior.predictive import LINKS, Predictive
from evigrad.posterior.query import Factors, Query, constant_beside
from evigrad.posterior.updates import Update, observations, update_of, with_factors
from evigrad.posterior.variational import VariationalFit, fit_gaussian

# The estimator whose statistic each structure uses.
STRUCTURES = {
    "kfac": "kfac-N-C",
    "last-layer": "full-N-C",
    "diag": "diag-N-C",
    "full": "full-N-C",
    "ntk": "ntk-N-C",
}
DEFAULT_STRUCTURE = "kfac"
INFERENCES = ("laplace", "variational")
# Alternatives to each structure that take less memory and time.
_SMALLER = {
    "kfac": "structure='diag', or a smaller micro_batch of Memory",
    "last-layer": "structure='kfac' or 'diag'",
    "diag": "a smaller micro_batch of Memory",
    "full": "structure='kfac', 'last-layer' or 'diag'",
    "ntk": "fewer rows=..., or structure='kfac', 'last-layer' or 'diag'",
}

# We warn about a dense H that is predicted to take longer than this many seconds.
_SLOW_SECONDS = 60.0
# The speed of the machine is measured by a product of two square matrices of this size.
_TIMED_SIZE = 512

# Copies of the gradients and of the rows of a part of the outputs that are in memory together.
# Rows are converted to float64 and transformed.
_GRADIENT_COPIES, _ROW_COPIES = 2, 6
_SEEDS = 2**62
Result = TypeVar("Result")
_FEWER = "Add fewer observations at once, or use structure='last-layer' or 'ntk' with few weights."


class Posterior:
    """The linearized Laplace posterior f(x) ~ N(f(x; w*), J(x) Σ J(x)ᵀ) with Σ = (H + P0)⁻¹.

    H is the Gauss-Newton matrix, P0 contains the prior precisions, and J is the Jacobian of the
    outputs with respect to the weights.

    With ``inference="variational"``, Σ and the mean of the weights maximize a lower bound on the
    log evidence instead (see ``posterior.variational``).

    Call ``Evidence.posterior`` to make a posterior. The posterior stores Σ and a copy of the
    likelihood, so later changes to the precisions or the likelihood do not affect predictions. If
    the weights have changed, predictions raise an error. A model that draws noise, such as
    ``Averaged``, uses the same draws in every call.

    Attributes:
        structure: Structure of Σ: ``kfac``, ``last-layer``, ``diag``, ``full`` or ``ntk``.
        parameters: Names of the uncertain weights. All other weights are fixed.
        num_outputs: Number of outputs C.
        bounds: Lower bounds on the log evidence of the linearized network in nats, before the first
            variational step and after each step. Empty for Laplace's approximation.

    Examples:
        >>> import torch
        >>> from evigrad import Evidence
        >>> from evigrad.likelihoods import Gaussian
        >>> from evigrad.priors import GaussianPrior
        >>> x = torch.randn(20, 2)
        >>> y = x.sum(1, keepdim=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> evidence = Evidence(
        ...     model, Gaussian(), GaussianPrior(), estimator="full-N-C", num_data=20
        ... )
        >>> posterior = evidence.posterior((x, y), structure="full")
        >>> prediction = posterior(x[:3])
        >>> prediction.mean.shape, prediction.std.shape
        (torch.Size([3, 1]), torch.Size([3, 1]))

    See also: docs/posterior.md.
    """

    def __init__(
        self,
        problem: Problem,
        structure: str,
        covariance: Covariance,
        num_outputs: int,
        seed: int,
        weights: Mapping[str, int],
        shift: Mapping[str, Tensor] | None = None,
        bounds: Sequence[float] = (),
    ) -> None:
        """Initialize a posterior for ``Evidence.posterior``, with a ``posterior_problem``."""
        self.structure, self.num_outputs = structure, num_outputs
        self._problem, self._covariance = problem, covariance
        self._seed, self._weights = seed, dict(weights)
        self._shift, self.bounds, self._scale = dict(shift or {}), tuple(bounds), 1.0
        self._updates: tuple[Update, ...] = ()
        self._sizes = dict[tuple[int, bool], MicroBatches]()
        self._likelihood: Likelihood = copy.deepcopy(problem.model.likelihood).requires_grad_(False)

    @property
    def parameters(self) -> list[str]:
        """Return the names of the uncertain weights."""
        return list(self._problem.model.weights)

    @property
    def bound(self) -> float | None:
        """Return the lower bound on the log evidence of the linearized network, in nats.

        The result is None for Laplace's approximation, and after ``update``.
        """
        return self.bounds[-1] if self.bounds else None

    @property
    def batch_shape(self) -> torch.Size:
        """Return the shape of the sets of observations that ``update`` added, or ()."""
        return self._updates[-1].errors.shape[:-1] if self._updates else torch.Size()

    def __repr__(self) -> str:
        count = sum(weight.numel() for weight in self._problem.model.weights.values())
        return f"Posterior({self.structure!r}, weights={count:,}, num_outputs={self.num_outputs})"

    def __call__(
        self,
        x: Any,
        *,
        link: str = "monte-carlo",
        num_samples: int = 200,
        generator: torch.Generator | int | None = None,
        correlated: bool = True,
    ) -> Predictive:
        """Predict outputs and targets, in micro-batches of the evidence's ``Memory``.

        Args:
            x: Inputs (m, ...), as for ``Evidence.map_loss``.
            link: How probabilities are averaged over the outputs: ``monte-carlo`` (default),
                ``probit``, ``bridge``, ``bridge-norm`` or ``plug-in``. See ``Predictive``.
            num_samples: Number of samples of ``monte-carlo``. Default: 200.
            generator: CPU generator or seed for the samples. Default: the same seed in every call.
            correlated: Whether to compute covariances between the outputs of an example. Default:
                True. If False, ``Predictive.covariance`` contains only variances (m, ..., C), and
                outputs are treated as independent. With thousands of outputs, this takes far less
                memory.

        Returns:
            Mean and covariance of the outputs, and predictions of the targets. If inputs require a
            gradient, all of these have a graph to the inputs, and to nothing else.

        Raises:
            ConfigurationError: If the weights have changed, or the link is unknown.
            InputError: If the inputs do not match the model.
            MemoryBudgetError: If the covariances do not fit into the free memory.
        """
        check_choice("link", link, LINKS)
        check_count("num_samples", num_samples)
        self._check_plain("posterior(x)", "joint(x, batch_dims=...)")
        query = self._query(x, correlated=correlated)
        if correlated and self.num_outputs > ROWS_AT_ONCE:
            numbers = prod(query.shape) * self.num_outputs**2
            advice = "Predict fewer examples at once, or pass correlated=False."
            query.check_memory(numbers, advice)
        seed = self._seed
        if generator is not None:
            seed = int(torch.randint(_SEEDS, (), generator=as_generator(generator), device="cpu"))

        def moments(linearization: Linearization, factors: Factors) -> tuple[Tensor, ...]:
            f = linearization.outputs
            if not self._updates:
                return f, self._covariance.of_outputs(linearization, correlated).to(f)
            update_factors = factors(roots := self._covariance.roots(linearization))
            total: Any = 0
            for sign, root in with_factors(roots, update_factors).items():
                total = total + sign * (root @ root.mT if correlated else root.square().sum(2))
            return f, total.to(f), *update_factors

        f, covariance, *factors = query.results(moments)
        mean, covariance = query.mean(f, factors), covariance.unflatten(0, query.shape)
        likelihood = unweighted(self._likelihood)
        return Predictive(mean, covariance, likelihood, link, num_samples, seed)

    def joint(self, x: Any, *, batch_dims: int = 0) -> JointPredictive:
        """Predict the outputs for several inputs jointly, with covariances between the inputs.

        Args:
            x: Inputs (b..., q, ...), or a tree of these.
            batch_dims: Number of batch dimensions b. Each batch of q inputs has its own covariance,
                so time and memory are linear in the number of batches. Default: 0, so all inputs
                have one covariance.

        Returns:
            ``mean`` (b..., q, C), ``covariance`` (b..., q, C, q, C), ``noise`` and ``sample`` of
            the outputs. For classes, these are the logits. Results have a graph to inputs that
            require a gradient.

        Raises:
            ConfigurationError: If the weights have changed.
            InputError: If the inputs do not match the model or ``batch_dims``.
        """
        query = self._query(x, batch_dims)
        query = replace(query, x=query.x.clone())  # callers may change theirs before they read
        check = partial(self._check_weights, dict(self._weights))
        return JointPredictive(query, self._covariance, unweighted(self._likelihood), check)

    def update(self, x: Any, y: Any, *, batch_dims: int = 0) -> "Posterior":
        """Return the posterior after more observations, in closed form.

        The outputs of the linearized network are conditioned on the targets y (a Gaussian process,
        whose mean changes too). The network's weights and this posterior do not change. The result
        is equal to a posterior given all data if the structure is exact (``full``, ``ntk`` or
        ``last-layer``) and the weights, the precisions and the noise are the same.

        Args:
            x: Inputs (b..., q, ...), or a tree of these.
            y: Targets (s..., b..., q, ..., D) in the form that the likelihood expects, or as the
                inputs without D. ``KnownNoise.targets(y, noise=...)`` combines targets with known
                noise. Dimensions s count sets of targets for the same inputs (fantasies).
            batch_dims: Number of batch dimensions b. Each batch has its own observations. Default:
                0.

        Returns:
            A posterior for ``joint``, ``update`` and ``draw`` at inputs with the batches b or
            (s, b), and without batches also for all other methods. It has a graph to x and y if
            these require a gradient.

        Raises:
            ConfigurationError: If the noise is not Gaussian, or the weights have changed.
            InputError: If the inputs or targets do not match the model or each other.
            MemoryBudgetError: If the roots of the covariance do not fit into the free memory.
        """
        query, covariance = self._query(x, batch_dims), self._covariance
        query.check_memory(prod(query.shape) * self.num_outputs * covariance.width, _FEWER)
        signs = list[int]()

        def roots_of(linearization: Linearization, factors: Factors) -> tuple[Tensor, ...]:
            roots = covariance.roots(linearization)
            signs[:] = roots
            return linearization.outputs, *roots.values(), *factors(roots)

        f, *parts = query.results(roots_of)
        mean = query.mean(f, parts[len(signs) :])
        inner, temperature = query.inner_dims, self._problem.model.temperature
        gain, residuals = observations(self._likelihood, temperature, mean, y, inner)
        batches = query.batch_dims
        rows = [part.unflatten(0, query.shape).flatten(batches, -2) for part in parts]
        update = update_of(
            dict(zip(signs, rows, strict=False)),
            rows[len(signs) :],
            self._updates,
            gain.flatten(-1 - inner).to(rows[0]),
            residuals.flatten(-1 - inner).to(rows[0]),
        )
        result = copy.copy(self)
        result.bounds = ()
        *before, last = *self._updates, update
        if before and before[-1].is_plain and last.is_plain:
            result._updates = (before[-1].then(last),)
        else:
            result._updates = (*before, last)
        return result

    def calibrate(self, x: Any, y: Any, *, weights: Any = None) -> "Posterior":
        """Return a posterior of classes whose mean and covariance are scaled by held-out data.

        Two numbers maximize the log likelihood: a factor on the mean of the outputs, which is an
        inverse temperature, and one on their covariance. This posterior does not change. The factor
        on the mean suits this covariance, so do not use ``link="plug-in"``, which ignores it.

        Args:
            x: Inputs that were not used for training. Training data would give too confident
                predictions.
            y: Their targets, in the form that the likelihood expects.
            weights: Weight of each target. Default: 1.

        Returns:
            The calibrated posterior. It has no bound.

        Raises:
            ConfigurationError: If the targets are not classes, or the weights have changed.
            InputError: If the inputs or targets do not match the model or each other.
        """
        with torch.no_grad():
            prediction = self(x)
        mean_scale, covariance_scale = best_scales(prediction, y, weights)
        result = copy.copy(self)
        result.bounds, result._scale = (), self._scale * mean_scale
        result._covariance = self._covariance.scaled(covariance_scale)
        return result

    def sample(
        self, x: Any, n: int, generator: torch.Generator | int | None = None
    ) -> Float[Tensor, "n m ... C"]:
        """Draw outputs that are correlated within an example or position, but not between them.

        Args:
            x: Inputs (m, ...).
            n: Number of draws.
            generator: CPU generator or seed. Default: the same seed in every call.

        Returns:
            Outputs (n, m, ..., C), without the noise of the targets.

        Raises:
            ConfigurationError: If the weights have changed, or ``n`` is not a positive integer.
            InputError: If the inputs do not match the model.
        """
        check_count("n", n)
        return self(x).sample(n, generator)

    def variance_of(self, vector: Mapping[str, Tensor]) -> float:
        """Return the variance vᵀ Σ v of a linear function vᵀw of the uncertain weights.

        Args:
            vector: For each name in ``parameters``, a tensor of the weight's shape.

        Raises:
            ConfigurationError: If the weights have changed, or a tensor is missing or has the wrong
                shape.
        """
        self._check_weights(self._weights)
        for name, weight in self._problem.model.weights.items():
            if name not in vector or vector[name].shape != weight.shape:
                shape = tuple(vector[name].shape) if name in vector else "nothing"
                raise ConfigurationError(
                    f"vector must have a tensor of shape {tuple(weight.shape)} for {name!r}, got"
                    f" {shape}."
                )
        self._check_plain("variance_of", "joint(x, batch_dims=...)")
        with torch.no_grad():
            return self._covariance.of_vector(vector, self._updates)

    def diagonal_precisions(self) -> dict[str, tuple[Tensor, Tensor]] | None:
        """Return the means and precisions of independent weights by name, or None if correlated."""
        blocks = self._covariance.blocks
        if self._updates or self.structure != "diag" or self._scale != 1.0:
            return None
        means = self._means
        return {
            block.name: (
                means[block.name].clone(),
                block.std.square().reciprocal().view(means[block.name].shape),
            )
            for block in blocks
            if isinstance(block, Diagonal)
        }

    def sample_weights(
        self, n: int, generator: torch.Generator | int | None = None
    ) -> dict[str, Float[Tensor, "n *weight"]]:
        """Draw weights from N(w*, Σ), for ``torch.func.functional_call``.

        The posterior is for the linearized network. If you call the network itself with these
        weights, its outputs differ from ``draw`` and ``joint``.

        Args:
            n: Number of draws.
            generator: CPU generator or seed. Default: the same seed in every call.

        Returns:
            Weights (n, ...) by the names in ``parameters``. With the same seed, they belong to the
            functions from ``draw`` and ``joint(x).sample``.

        Raises:
            ConfigurationError: If the weights have changed, or ``n`` is not a positive integer.
        """
        check_count("n", n)
        self._check_weights(self._weights)
        generator = as_generator(self._seed if generator is None else generator)
        weights = self._means
        self._check_plain("sample_weights", "joint(x, batch_dims=...).sample(n)")
        if self._scale != 1.0:
            raise ConfigurationError(
                "Calibrated outputs do not belong to weights, because their mean is scaled by"
                f" {self._scale:.3g}. Use joint(x).sample(n) or draw(), or the posterior before"
                " calibrate."
            )
        parts = list(self._covariance.draws(n, generator, weights, self._updates))
        return {
            name: weight + torch.cat([part.changes[name] for part in parts]).to(weight)
            for name, weight in weights.items()
        }

    def draw(self, generator: torch.Generator | int | None = None) -> Callable[..., Tensor]:
        """Draw one function f(x) + J(x)(w − w*) of the linearized network.

        Args:
            generator: CPU generator or seed. Default: the same seed in every call.

        Returns:
            A function of inputs (b..., q, ...) and of ``batch_dims`` (default: 0), as for
            ``joint``. It returns outputs (b..., q, C), with a graph to inputs that require a
            gradient. It raises an error if the weights have changed.
        """
        generator = as_generator(self._seed if generator is None else generator)
        covariance = self._covariance
        (draws,) = covariance.draws(1, generator, self._problem.model.weights, self._updates)

        def function(x: Any, batch_dims: int = 0) -> Tensor:
            return outputs_of(self._query(x, batch_dims), covariance, draws)[0]

        return function

    @property
    def _means(self) -> dict[str, Tensor]:
        """Return the means of the uncertain weights, without a graph."""
        weights = {name: weight.detach() for name, weight in self._problem.model.weights.items()}
        return {n: w + self._shift[n].to(w) if n in self._shift else w for n, w in weights.items()}

    def _query(self, x: Any, batch_dims: int = 0, correlated: bool = True) -> Query:
        """Return the checked inputs, with the sizes of their micro-batches."""
        self._check_weights(self._weights)
        query = Query.of(self._problem, x, batch_dims, self._seed, self._updates)
        if query.plan.num_outputs != self.num_outputs:
            raise InputError(
                f"The inputs must have the shape of the posterior's data. The model has"
                f" {query.plan.num_outputs} outputs for these inputs, but had {self.num_outputs}"
                " for the posterior's data."
            )
        key = (query.plan.jacobian.numbers, correlated)
        if key not in self._sizes:
            self._sizes[key] = sizes_of(self._problem, query.plan, correlated)
        problem = replace(self._problem, sizes=self._sizes[key])
        return replace(
            query,
            problem=problem,
            shift=self._shift,
            scale=self._scale,
        )

    def _check_plain(self, what: str, instead: str) -> None:
        """Raise an error if there are several sets of observations, or one with a graph."""
        if not all(update.is_plain for update in self._updates):
            raise ConfigurationError(
                f"{what} needs a single set of observations without a graph, got sets of the shape"
                f" {tuple(self.batch_shape)}. Use {instead}, or call update with x and y that"
                " require no gradient."
            )

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return Σ, the likelihood and checksums of the weights, as tensors and plain types.

        ``evidence.posterior(state=...)`` restores the posterior without the data.
        """
        return {
            "structure": self.structure,
            "parameters": self.parameters,
            "num_outputs": self.num_outputs,
            "covariance": self._covariance.state(),
            "shift": dict(self._shift),
            "scale": self._scale,
            "bounds": list(self.bounds),
            "updates": [update.state() for update in self._updates],
            "likelihood": self._likelihood.state_dict(),
            "seed": self._seed,
            "weights": dict(self._weights),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of a posterior of the same model with the same weights.

        Raises:
            ConfigurationError: If the state has a different structure or different weights. In
                this case, the posterior does not change.
        """
        if missing := self.state_dict().keys() - state.keys():
            raise ConfigurationError(
                f"The state lacks {', '.join(sorted(missing))}. Use the result of"
                " posterior.state_dict()."
            )
        if (state["structure"], state["parameters"]) != (self.structure, self.parameters):
            raise ConfigurationError(
                f"The state must come from a {self.structure!r} posterior of the same"
                f" {len(self.parameters)} weight tensors, got a {state['structure']!r} posterior of"
                f" {len(state['parameters'])} tensors. To make a posterior from this state, use"
                " evidence.posterior(state=...)."
            )
        self._check_weights(state["weights"])
        likelihood = copy.deepcopy(self._likelihood)
        try:
            likelihood.load_state_dict(state["likelihood"])
        except RuntimeError as error:
            raise ConfigurationError(
                f"The saved state does not match the likelihood: {error} Use the likelihood of the"
                " saved posterior."
            ) from error
        device = self._problem.device
        moved, updates, shift = tree_map(
            lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf,
            (state["covariance"], state["updates"], state["shift"]),
        )
        self._shift, self.bounds = dict(shift), tuple(state["bounds"])
        self._scale = state["scale"]
        self._covariance = Covariance.from_state(moved)
        self._updates = tuple(Update(**update) for update in updates)
        self._likelihood, self._seed = likelihood, state["seed"]
        self._weights, self.num_outputs = dict(state["weights"]), state["num_outputs"]

    def _check_weights(self, expected: Mapping[str, int]) -> None:
        now = fingerprint(self._problem)
        if changed := [n for n in now.keys() | expected if now.get(n) != expected.get(n)]:
            raise ConfigurationError(
                f"The weights have changed since the posterior was made: {listed(sorted(changed))}."
                " Call evidence.posterior(data) again, or load the earlier weights."
            )


def fingerprint(problem: Problem) -> dict[str, int]:
    """Return a checksum of each parameter and buffer of the model, by name."""
    tensors = (*problem.network.model.named_parameters(), *problem.network.model.named_buffers())
    named = {name: tensor for name, tensor in tensors if tensor.layout == torch.strided}
    bare = bare_names(problem.network.model, named).values()
    return dict(zip(bare, checksums(list(named.values()), problem.device), strict=True))


def sizes_of(problem: Problem, plan: InputPlan, correlated: bool) -> MicroBatches:
    """Return the micro-batches of predictions, whose examples have rows of all weights."""
    if isinstance(problem.sizes.asked, int):
        return problem.sizes
    # A part of the rows at a time, and the products J Σ^{1/2} of all rows for covariances.
    num_weights = sum(weight.numel() for weight in problem.model.weights.values())
    numbers = _GRADIENT_COPIES * plan.jacobian.numbers + _ROW_COPIES * num_weights
    kept = plan.num_outputs * (plan.num_outputs + num_weights if correlated else 1)
    at_once = min(plan.num_outputs, ROWS_AT_ONCE)
    example_bytes = problem.dtype.itemsize * (at_once * numbers + kept)
    return MicroBatches("auto", problem.sizes.budget, example_bytes=example_bytes)


# ------------------------------------------------------------ passes over all data


def make_posterior(
    problem: Problem,
    data: object,
    structure: str = DEFAULT_STRUCTURE,
    rows: int | None = None,
    inference: str = "laplace",
) -> Posterior:
    """Return the posterior given all data. One number is drawn from the problem's generator."""
    check_choice("structure", structure, list(STRUCTURES))
    check_choice("inference", inference, INFERENCES)
    if rows is not None:
        check_count("rows", rows)
        if structure != "ntk":
            raise ConfigurationError(
                f"rows is only for structure='ntk', got rows={rows} for {structure!r}, which uses"
                " all rows. Omit rows."
            )
        if inference != "laplace":
            raise ConfigurationError(
                f"rows is only for inference='laplace', got rows={rows} for {inference!r}. Omit"
                " rows to use all, or use structure='kfac' or 'last-layer' if these are too many."
            )
    names = last_layer(problem, data) if structure == "last-layer" else list(problem.model.weights)
    seed = int(torch.randint(_SEEDS, (), generator=problem.generator, device="cpu"))
    laplace_problem = posterior_problem(problem, structure, rows, names)
    laplace_problem = replace(laplace_problem, generator=torch.Generator().manual_seed(seed))
    if STRUCTURES[structure] == "full-N-C":
        _warn_if_slow(laplace_problem, data, structure)
    dtype = laplace_problem.settings.gram_dtype or torch.float64

    def laplace(sweep: MicroBatchSweep) -> tuple[int, VariationalFit]:
        model = laplace_problem.model
        kept = precisely(sweep, partial(run_pass, model))
        covariance = covariance_of(kept.statistic, model.prior.precisions(), model.weights, dtype)
        return kept.num_outputs, VariationalFit(covariance, {}, ())

    def variational(sweep: MicroBatchSweep) -> tuple[int, VariationalFit]:
        sweep = sweep.verified()
        sizes = sizes_of(laplace_problem, sweep.plan, correlated=True)
        predictive = replace(sweep, problem=replace(laplace_problem, sizes=sizes))
        return sweep.plan.num_outputs, fit_gaussian(sweep, predictive, structure)

    with constant_beside(laplace_problem):
        work = laplace if inference == "laplace" else variational
        num_outputs, fit = collect(laplace_problem, data, structure, work)
    return Posterior(
        laplace_problem,
        structure,
        fit.covariance,
        num_outputs,
        seed,
        fingerprint(laplace_problem),
        fit.shift,
        fit.bounds,
    )


def load_posterior(problem: Problem, state: Mapping[str, Any]) -> Posterior:
    """Return the posterior that a ``Posterior.state_dict`` describes, without the data."""
    if not isinstance(state, Mapping) or not {"structure", "parameters"} <= state.keys():
        raise ConfigurationError(
            "state is not the result of posterior.state_dict(). Pass that result, or call"
            " evidence.posterior(data) to make a new posterior."
        )
    if strange := [name for name in state["parameters"] if name not in problem.model.weights]:
        raise ConfigurationError(
            f"The state must come from a posterior of this model, which has no weights named"
            f" {listed(strange)}. Use the model of the saved posterior."
        )
    laplace_problem = posterior_problem(problem, state["structure"], None, state["parameters"])
    empty = Posterior(laplace_problem, state["structure"], Covariance([]), 0, 0, {})
    empty.load_state_dict(state)
    return empty


def posterior_problem(
    problem: Problem, structure: str, rows: int | None, names: Sequence[str]
) -> Problem:
    """Return the problem for a posterior in which only the named weights are uncertain."""
    estimator, settings = _estimator(problem, structure, rows), problem.settings
    precise = torch.float32 if problem.device.type == "mps" else torch.float64
    settings = replace(
        settings,
        gram_dtype=settings.gram_dtype or precise,
        rows_dtype=settings.rows_dtype if estimator.structure_type.keeps_rows else None,
        rows_device=settings.rows_device if estimator.structure_type.keeps_rows else None,
        parameter_partition="tensor",  # that of all weights may be another
    )
    weights = {name: problem.network.weights[name] for name in names}
    model = problem.model
    return replace(
        problem,
        model=replace(model, weights=weights, estimator=estimator, root=estimator.default_root),
        settings=settings,
        purpose=Purpose.ROWS,
        network=Network(problem.network.model, weights),
        # All data at once are too many.
        sizes=MicroBatches(settings.micro_batch or "auto", settings.memory_budget),
        partitions={},
        curvatures={},
    )


def _estimator(problem: Problem, structure: str, rows: int | None) -> Estimator:
    """Return the estimator whose statistic the structure uses."""
    if rows is None:
        return Estimator.parse(defined_name(problem, STRUCTURES[structure]))
    if curvature_of_posterior(problem) == "ggn":
        return Estimator.parse(f"ntk-{rows}-rows-anchored")
    raise ConfigurationError(
        f"rows needs the Gauss-Newton matrix, got rows={rows} for"
        f" {problem.model.estimator.name} and a {type(problem.model.likelihood).__name__}"
        " without hessian(f). Omit rows, or define hessian(f)."
    )


def defined_name(problem: Problem, name: str) -> str:
    """Return an estimator's name that ends with C, with a curvature that the likelihood defines."""
    curvature = curvature_of_posterior(problem)
    if curvature == "ggn":
        return name
    return f"{name.removesuffix('C')}{problem.model.estimator.outputs}-{curvature}"


def curvature_of_posterior(problem: Problem) -> str:
    """Return ``ggn``, or the estimator's curvature if the likelihood does not define its Hessian.

    The Hessian of a density may depend on the targets, which ``ef`` and ``mc`` allow.
    """
    return "ggn" if problem.model.likelihood.defines_hessian else problem.model.estimator.curvature


def collect(
    problem: Problem, data: object, structure: str, work: Callable[[MicroBatchSweep], Result]
) -> Result:
    """Return the result of ``work`` for all data, or for one block if the estimator is anchored."""
    source = CheckedSource(problem, data, partial(_advice, problem))
    estimator = problem.model.estimator
    batches: Data = source
    if estimator.anchored:
        stream = AnchorSelection(
            Anchoring(),
            problem.model.num_data,
            estimator.subset or 0,
            problem.model.root,
            problem.model.likelihood,
            problem.last_layer,
            problem.generator,
        ).stream(source)
        batches = next(iter(stream))
    try:
        return work(resolve(problem, batches, None))
    except MemoryBudgetError as error:
        count = sum(weight.numel() for weight in problem.model.weights.values())
        raise MemoryBudgetError(
            f"The posterior {structure!r} over {count:,} weights is too large. {error.need}",
            f"Use {_SMALLER[structure]}.",
        ) from error


def _advice(problem: Problem, count: int) -> str:
    """Return advice for data that are only ``count`` of the N examples."""
    num_data, temperature = problem.model.num_data, problem.model.temperature
    scale_words = "" if temperature == 1 else f"{temperature:g} * "
    return (
        f"With num_data={count}, posterior variances would be up to {num_data / count:.3g} times"
        " too large. For a faster posterior, let a random subset count as all data:"
        f" evidence.with_estimator('kfac-N-C', num_data={count},"
        f" temperature={scale_words}{count} / {num_data}).posterior(subset)."
    )


def _warn_if_slow(problem: Problem, data: object, structure: str) -> None:
    """Warn, before any work, if a dense H would take minutes.

    P weights and R rows take 2 R P² operations for H and P³/3 for its factor.
    """
    size = sum(weight.numel() for weight in problem.model.weights.values())
    x = check_inputs(as_source(data).first(PROBE_SIZE)[0], problem.device)
    with constant_beside(problem):
        plan = problem.network.plan(x)
    rows = problem.partition(plan).block_rows / problem.ranks.count
    dtype = problem.settings.gram_dtype or torch.float64
    seconds = (2.0 * rows * size**2 + size**3 / 3) * _seconds_per_operation(dtype, problem.device)
    if seconds <= _SLOW_SECONDS:
        return
    needed = problem.curvature(plan).cost(problem.partition(plan).block_rows, Purpose.ROWS).total
    warnings.warn(
        f"The posterior {structure!r} over {size:,} weights takes about {seconds:,.0f} seconds"
        f" and {needed / GIB:.2g} GiB for a matrix of {size:,}² numbers. For a faster result, use"
        f" {_SMALLER[structure]}.",
        EvigradWarning,
        stacklevel=4,  # the caller of Evidence.posterior
    )


def _seconds_per_operation(dtype: torch.dtype, device: torch.device) -> float:
    """Return the time of one operation of a product of matrices, measured now."""
    matrix = torch.ones(_TIMED_SIZE, _TIMED_SIZE, dtype=dtype, device=device)
    float((matrix @ matrix)[0, 0])  # the first call prepares libraries
    times = list[float]()
    for _ in range(3):
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])
        times.append(time.perf_counter() - start)
    return min(times) / (2.0 * _TIMED_SIZE**3)


def last_layer(problem: Problem, data: object) -> list[str]:
    """Return the names of the weights in the last layer that the model calls."""
    x = check_inputs(as_source(data).first(PROBE_SIZE)[0], problem.device)
    problem.network.plan(x)  # checks the model
    owned = partition_names(list(problem.model.weights), "module")
    last: list[nn.Module] = []
    model = problem.network.model
    layers = [n for n in owned if not any(_is_below(other, n) for other in owned)]
    paths = bare_names(model, dict(model.named_modules()))
    modules = {model.get_submodule(path): name for path, name in paths.items() if name in layers}
    with (
        evaluation_run(model),
        torch.no_grad(),
        noted_calls(modules, lambda module, *_: last.append(module)),
    ):
        model_outputs(model, x, positions=True)
    if not last:
        raise ConfigurationError(
            "structure='last-layer' needs a module that has weights and is called by the"
            " model, but there is none. Use structure='kfac' or 'diag'."
        )
    return owned[modules[last[-1]]]


def _is_below(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(other + "."))
