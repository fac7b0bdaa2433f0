"""Train a network and learn its hyperparameters, in one call."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from evigrad.blocks.anchors import Anchoring
from evigrad.blocks.positions import by_target
from evigrad.distributed import Group, Ranks, check_whole
from evigrad.engine.checks import check_inputs
from evigrad.engine.parameters import trainable
from evigrad.engine.problem import PROBE_SIZE
from evigrad.engine.settings import Memory
from evigrad.errors import ConfigurationError, EvigradError, EvigradWarning
from evigrad.estimators import DEFAULT_ESTIMATOR
from evigrad.evidence import Evidence
from evigrad.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Weighted,
    make_likelihood,
)
from evigrad.likelihoods.calls import (
    check_targets,
    log_probabilities,
    moments,
    summed_metrics,
)
from evigrad.likelihoods.positions import counted, flattened
from evigrad.likelihoods.weighted import unweighted
from evigrad.measure.bracket import check_bracket
from evigrad.measure.metrics import probe_outputs
from evigrad.priors import GaussianPrior, matches
from evigrad.training.augerino import range_parameters
from evigrad.training.checkpoint import shared_settings
from evigrad.training.data import RunData, stream
from evigrad.training.loop import Loop
from evigrad.training.run import Callback, FitResult, Run
from evigrad.training.run_directory import RunDirectory
from evigrad.training.settings import (
    Laplace,
    Optimization,
    PlannedSettings,
    Schedule,
    Settings,
    explains_groups,
)

# Items of a data set that are checked at once.
_AT_ONCE = 1000
# Number of data whose targets' scale is measured, and the factor beyond which a warning follows.
_COMPARED = 100
_FAR = 10.0
# Means of weights this near to 1 change a learned noise by less than estimates do.
_MEAN_WEIGHT_TOLERANCE = 0.05


@explains_groups
def fit(
    model: nn.Module,
    train: Any,
    *,
    likelihood: str | Likelihood = "categorical",
    estimator: str | None = DEFAULT_ESTIMATOR,
    prior: str | GaussianPrior = "layerwise",
    precision: float | None = None,
    hyperparameters: Sequence[str] = (),
    laplace: Laplace | None = None,
    schedule: Schedule | None = None,
    optimization: Optimization | None = None,
    memory: Memory | None = None,
    anchoring: Anchoring | None = None,
    test: Any = None,
    seed: int = 0,
    run_dir: str | Path | RunDirectory | None = None,
    resume: bool = False,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    process_group: Group | None = None,
) -> FitResult:
    """Train the weights by MAP and, between epochs, the hyperparameters by the evidence.

    The paper's interleaved scheme: the weights minimise the mean negative log likelihood plus the
    prior's decay; after ``burn_in`` epochs, and every ``every`` epochs from there, ``steps`` steps
    on the hyperparameters by the gradient of the estimator's log evidence: MacKay's fixed-point
    update of the prior's precisions (or Adam, as in the paper), and Adam for the noise and the
    model's own hyperparameters. All of it sees the training data alone; test data are evaluated,
    and nothing depends on the result.

    The global random state is not touched: ``seed`` gives the order of the data, the blocks and
    what the model draws (dropout) each a stream of its own. The initial weights are the model's.

    Args:
        model: Any module that maps inputs (m, ...) to outputs (m, C), or to (m, …, C) with a target
            at each position. It is trained in place, on the device where it is; frozen parameters
            stay as they are.
        train: Training data: a pair (x, y) of tensors or NumPy arrays, a ``TensorDataset``, or a
            map-style data set of (x, y) items, which is read anew in every epoch, and for blocks of
            the evidence their own data. Random transforms that draw from the global generators of
            PyTorch, NumPy or Python are seeded by ``seed``. If the model has one output, targets
            of a regression may have the shape (m,).
        likelihood: Of the targets: categorical, bernoulli, gaussian, heteroscedastic (normal noise
            that depends on the input; the outputs are a mean and a log variance of each target),
            natural-gaussian (the same in parameters that small tables can bear) or poisson (counts;
            the outputs are log rates).
        estimator: Name of the evidence estimator, STRUCTURE-SUBSET-OUTPUTS, as ntk-100-1 or
            kfac-N-C; ntk-400-rows-anchored is exact where there are 400 rows or fewer. Baselines:
            None or map trains by MAP only, the same without hyperparameter steps; map-noise too,
            but the noise of a gaussian is learned on the training loss; augerino learns the ranges
            of a transform on the training loss, with a reward for wide ones.
        prior: What has its own prior precision (weight decay): scalar (one for all weights),
            layerwise (one for each parameter tensor) or diagonal (one for each weight). A
            ``GaussianPrior`` has more: groups, a hyperprior, and a mean other than zero, as the
            weights that training begins with (fine-tuning, ``mean="initial"``).
        precision: Prior precision where it is kept, or at the start of steps of Adam
            (``Optimization(prior_update="adam")``); by default learned precisions need no start.
            Weight decay in the usual sense is precision / N. Default: 5e-4 N, the usual weight
            decay, where it is kept; 1 for Adam.
        hyperparameters: Names, or prefixes of names, of parameters of the model that the evidence
            learns instead of the MAP. Without an estimator they keep their values.
        laplace: Temperature, root and details of the curvature.
        schedule: Epochs, batches, rounds of hyperparameter steps, evaluations and checkpoints.
        optimization: Optimisers and learning rates.
        memory: Sizes and types of the estimates' passes.
        anchoring: How an anchored estimator chooses its anchors.
        test: Test data, like ``train``.
        seed: Seed of everything random in training.
        run_dir: Folder for configuration, metrics (one row for each epoch, as they come) and
            checkpoint. One that holds something is not written into: the first free one of
            NAME-2, NAME-3, ... is taken, unless to ``resume``. None writes nothing.
        resume: Whether to go on with the run in ``run_dir`` from its last checkpoint, which gives
            the same numbers as a run that was never interrupted; for that model, data and settings
            have to be the same (``checkpoint_every`` may differ). A folder without a checkpoint
            gets the run from its beginning, and of one that is complete the result is read.
        progress: Whether to show progress on standard error.
        callbacks: Called after every epoch with its row of metrics; after an interruption again
            for the epochs since the last checkpoint.
        process_group: Processes that train together, as for ``Evidence``, each with a part of every
            batch. All call ``fit`` with the same model, data and settings and get the same result.
            The parameters are those of the first one, which alone writes, shows progress and calls
            back; a run goes on with any number of them.

    Returns:
        The trained model, its evidence, the history and the final metrics.

    Raises:
        ConfigurationError: If a setting does not exist or does not fit, before anything is
            computed or written.
        InputError: If the data do not fit the model, the likelihood or the estimator.
        EvigradError: If training diverges; the metrics of the epochs before are kept.
    """
    settings = Settings(
        likelihood=likelihood,
        estimator=estimator,
        prior=prior,
        precision=precision,
        hyperparameters=hyperparameters,
        laplace=laplace or Laplace(),
        schedule=schedule or Schedule(),
        optimization=optimization or Optimization(),
        memory=memory or Memory(),
        anchoring=anchoring,
        seed=seed,
    )
    run = prepare(model, train, settings, test=test, process_group=process_group)
    return run.train(run_dir, resume=resume, progress=progress, callbacks=callbacks)


def prepare(
    model: nn.Module,
    train: Any,
    settings: Settings,
    *,
    test: Any = None,
    network: Mapping[str, Any] | None = None,
    process_group: Group | None = None,
) -> Run:
    """Return a checked run, to be started by its ``train``; compute and write nothing.

    The arguments are those of ``fit``. ``network`` records how ``evigrad.models.make_network``
    made the model, where it did.

    Raises:
        ConfigurationError: If a setting does not exist or does not fit.
        InputError: If the data do not fit the model, the likelihood or the estimator.
    """
    check_whole(model)
    place, seed, ranks = place_of(model), settings.seed, Ranks(process_group)
    tensors = [*model.parameters(), *model.buffers()]
    with ranks.together() as alike:
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), None)
        data = RunData(train, place, seed, dtype)
        held_out = None if test is None else RunData(test, place, seed, dtype)
        alike["model"] = [(tuple(t.shape), t.dtype) for t in tensors if not is_lazy(t)]
        alike.update(shared_settings(settings.as_record()))
        if ranks.count > 1:
            alike["training data"] = data.fingerprint()
            alike["test data"] = None if held_out is None else held_out.fingerprint()
    ranks.share([t for t in tensors if not is_lazy(t)])
    with ranks.together():
        evidence, planned = prepare_evidence(model, data, settings, process_group)
        if held_out is not None:  # which is read next when training is over
            held_out.is_column = data.is_column
            _check_data(evidence, held_out, place, len(held_out))
        if planned.schedule.bracket_every:
            check_bracket(evidence.spec)
        return Run(Loop(evidence, data, planned), held_out, network)


def prepare_evidence(
    model: nn.Module,
    data: RunData,
    settings: Settings,
    process_group: Group | None = None,
) -> tuple[Evidence, PlannedSettings]:
    """Return the initial evidence of a run, and its settings for the data, which are checked.

    ``settings`` may be those of a baseline.

    Raises:
        ConfigurationError: If a setting does not exist or does not fit.
        InputError: If the data do not fit the model, the likelihood or the estimator.
    """
    place = place_of(model)
    trainable(model, {})  # refuses lazy and frozen models before a pass
    x, y = data.first(PROBE_SIZE)
    check_inputs(x, place)
    likelihood = make_likelihood(settings.likelihood)
    # The model's outputs say what counts as a datum.
    shape = probe_outputs(model, x).shape[1:]
    data.is_column = _lacks_a_column(likelihood, shape, y)
    num_data = len(by_target(data, likelihood, shape))
    planned = settings.for_data(num_data)
    if planned.estimator == "augerino":
        ranges = [n for n in range_parameters(model) if not _names(planned.hyperparameters, n)]
        planned = replace(planned, hyperparameters=[*planned.hyperparameters, *ranges])
    evidence = make_evidence(model, num_data, planned, process_group)
    if planned.estimator == "map-noise" and not learns_likelihood(evidence.likelihood):
        raise ConfigurationError(
            "map-noise learns the parameters of a likelihood, as a Gaussian's noise, and"
            f" {evidence.likelihood.name} has none to learn: say map."
        )
    # Reading all items of a data set takes as long as an epoch: they are checked as they are read.
    outputs = _check_data(evidence, data, place, len(data) if data.is_held else PROBE_SIZE)
    if isinstance(evidence.likelihood, Categorical):
        _warn_of_probabilities(outputs)
    if isinstance(unweighted(evidence.likelihood), Gaussian | HeteroscedasticGaussian):
        _warn_of_real_targets(evidence, data)
    return evidence, planned


def _lacks_a_column(likelihood: Likelihood, shape: Sequence[int], y: Tensor) -> bool:
    """Whether targets (m,) fit a likelihood as (m, 1) only."""
    if y.ndim != 1 or len(shape) != 1:
        return False

    def fits(targets: Tensor) -> bool:
        try:
            check_targets(likelihood, (len(y), *shape), targets, y.device)
        except EvigradError:
            return False
        return True

    return not fits(y) and fits(y.unsqueeze(1))


def learns_likelihood(likelihood: str | Likelihood) -> bool:
    """Whether a likelihood has parameters that require a gradient, as a Gaussian's noise."""
    return any(p.requires_grad for p in make_likelihood(likelihood).parameters())


def make_evidence(
    model: nn.Module,
    num_data: int,
    settings: Settings,
    process_group: Group | None = None,
) -> Evidence:
    """The initial evidence of a run; a placeholder's for a baseline without an estimator."""
    name, anchoring = settings.estimator, settings.anchoring
    if name is None or settings.baseline is not None:
        # An estimator that fits any data; a baseline never evaluates it.
        name, anchoring = f"ntk-{min(num_data, 100)}-1", None
    return Evidence(
        model,
        make_likelihood(settings.likelihood),
        _make_prior(settings),
        estimator=name,
        num_data=num_data,
        hyperparameters=settings.hyperparameters,
        memory=settings.memory,
        anchoring=anchoring,
        generator=stream(settings.seed, "evidence"),
        process_group=process_group,
        **vars(settings.laplace),
    )


def _names(patterns: Sequence[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def place_of(model: nn.Module) -> torch.device:
    """Where a model is; raises ConfigurationError if it has no parameters."""
    first = next(model.parameters(), None)
    if first is None:
        raise ConfigurationError("The model has no parameters: there is nothing to train.")
    return first.device


def _make_prior(settings: Settings) -> GaussianPrior:
    prior, precision = settings.prior, settings.precision
    if not isinstance(prior, GaussianPrior):
        assert precision is not None  # by ``Settings.for_data``
        return GaussianPrior(structure=prior, precision=precision, mean=settings.prior_mean)
    if precision is not None or settings.prior_mean != "zero":
        raise ConfigurationError(
            "The prior is given with its precision and its mean; leave precision=... and"
            " prior_mean=... away, or name the prior's structure instead."
        )
    return prior


def _check_data(evidence: Evidence, data: RunData, device: torch.device, count: int) -> Tensor:
    """Refuse unfit data before the first step; returns the outputs for a few of them."""
    probe, y = data.first(2)
    check_inputs(probe, device)
    f, likelihood = probe_outputs(evidence.model, probe), evidence.likelihood
    source = by_target(data, likelihood, f.shape[1:])  # which checks targets at positions
    if source is not data:
        probe, y = source.first(2)
        f = probe_outputs(evidence.model, probe)
    check_targets(likelihood, f.shape, y, f.device)
    log_probabilities(likelihood, f, y)
    summed_metrics(likelihood, f, y)  # before training, as the first evaluation comes later
    for indices in torch.arange(min(count, len(data)), device="cpu").split(
        count if data.is_held else _AT_ONCE
    ):
        x, y = data.fetch(indices)
        check_inputs(x, device)
        if source is data:
            check_targets(likelihood, (len(x), f.shape[1]), y, f.device)
    return f


def _warn_of_probabilities(f: Tensor) -> None:
    """Warn of outputs that went through a softmax: the likelihood takes them for logits."""
    sums = f.sum(1)
    if f.shape[1] > 1 and bool((f >= 0).all()) and torch.allclose(sums, torch.ones_like(sums)):
        warnings.warn(
            "The model's outputs are probabilities: each row is non-negative and sums to 1. The"
            " categorical likelihood takes logits and has a softmax of its own: leave the model's"
            " last softmax out.",
            EvigradWarning,
            stacklevel=6,  # the caller of fit
        )


def _warn_of_real_targets(evidence: Evidence, data: RunData) -> None:
    """Warn of targets that are no numbers of about unit scale."""
    x, y = data.spread(_COMPARED)
    f = probe_outputs(evidence.model, x)
    positions = f.shape[1:-1]
    f, y = flattened(evidence.likelihood, f, y)
    if not len(f):
        return
    likelihood, y, weights = _split(evidence.likelihood, y)
    _warn_of_scale(likelihood, f, y)
    has_two_values = len(_columns_of_two_values(y)) > 0
    if data.is_held and (has_two_values or weights is not None):
        # A sample may lack rare values.
        y = data.targets()
        y = y.flatten(0, len(positions))[counted(evidence.likelihood, positions, y).flatten()]
        likelihood, y, weights = _split(evidence.likelihood, y)
    if not len(y):  # all weights are zero
        return
    if has_two_values:
        _warn_of_two_values(y)
    if weights is not None and isinstance(likelihood, Gaussian) and learns_likelihood(likelihood):
        _warn_of_weights(weights.double())


def _split(likelihood: Likelihood, y: Tensor) -> tuple[Likelihood, Tensor, Tensor | None]:
    """Return the likelihood and the targets of single examples, and their weights if any."""
    if not isinstance(likelihood, Weighted):
        return likelihood, y, None
    return likelihood.likelihood, *likelihood.split(y)


def _warn_of_weights(weights: Tensor) -> None:
    """Warn of positive weights that may mean known noises, of which only the ratios count."""
    mean = float(weights.mean())
    if bool((weights != weights.round()).any()) and abs(mean - 1.0) > _MEAN_WEIGHT_TOLERANCE:
        warnings.warn(
            f"The positive weights average {mean:.3g} and are not whole numbers, and the Gaussian's"
            " noise is learned. Weighted takes a weight for the number of times that an example was"
            " seen. If weights are 1/σ² of known noises instead, the learned noise is too small by"
            f" the factor √{mean:.3g} = {mean**0.5:.3g}. Divide the weights by {mean:.3g}, so that"
            " they average 1. The noise of an example is then noise / √weight.",
            EvigradWarning,
            stacklevel=7,  # the caller of fit
        )


def _columns_of_two_values(y: Tensor) -> Tensor:
    """Return the columns of targets (n, D) with two values, each of them twice at least."""
    is_least, is_largest = y == y.amin(0), y == y.amax(0)
    often = (is_least.sum(0) > 1) & (is_largest.sum(0) > 1) & ~(is_least & is_largest).any(0)
    return (often & (is_least | is_largest).all(0)).nonzero().flatten()


def _warn_of_two_values(y: Tensor) -> None:
    """Warn of yes and no as real numbers, which a regression memorizes."""
    columns = _columns_of_two_values(y).tolist()
    if columns:
        warnings.warn(
            f"Column {columns[0]} of the targets has only two values. A Gaussian takes them"
            " for real numbers: its noise falls toward zero, and the network memorizes them. For"
            ' yes or no, use likelihood="bernoulli" (evigrad.likelihoods.Bernoulli) with targets'
            ' 0.0 and 1.0. For classes, use likelihood="categorical" or'
            " evigrad.sklearn.EvidenceClassifier.",
            EvigradWarning,
            stacklevel=7,  # the caller of fit
        )


def _warn_of_scale(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """Warn of real targets far from unit scale, for which networks, rates and priors are made."""
    # One zero, as C² for each example may be gigabytes.
    certain = f.new_zeros(()).expand(*f.shape, f.shape[1])
    output_moments = moments(likelihood, f, certain)
    if output_moments is None:  # a subclass with another density
        return
    error, noise = (y - output_moments[0]).square().mean(0).sqrt(), output_moments[2].mean(0).sqrt()
    spread = y.std(0, correction=0)
    far = (error > _FAR * noise.clamp(min=1)) | ((spread > 0) & (_FAR * spread < noise))
    if not bool(far.any()):
        return
    first = int(far.nonzero()[0])
    way = "say the noise: likelihood=Gaussian(noise=...)"
    if isinstance(likelihood, HeteroscedasticGaussian):
        way = "begin with outputs that fit them"
    warnings.warn(
        f"The targets have a standard deviation of {float(spread[first]):.3g} and differ by"
        f" {float(error[first]):.3g} (root mean square) from the outputs before training, and the"
        f" noise begins at {float(noise[first]):.3g}: networks, learning rates and priors are made"
        " for targets of about unit scale, and others are hardly fitted. Train on (x, scaling(y)),"
        " with scaling = evigrad.data.Scaling.of(y) of the training targets; scaling.undo(means)"
        f" are predictions in their own units. (Of targets that are right as they are, {way}.)",
        EvigradWarning,
        stacklevel=7,  # the caller of fit
    )
