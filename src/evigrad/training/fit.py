"""Train a network and learn its hyperparameters, in one call."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from evigrad.blocks.anchors import Anchoring
from evigrad.blocks.positions import by_target
from evigrad.core.names import DEFAULT_ESTIMATOR
from evigrad.distributed import Group, Ranks, check_whole
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.likelihoods import Likelihood, make_likelihood
from evigrad.measure.bracket import check_bracket
from evigrad.measure.metrics import probe_outputs
from evigrad.network.network import PROBE_SIZE
from evigrad.passes.checks import check_inputs
from evigrad.passes.parameters import trainable
from evigrad.passes.settings import Memory
from evigrad.priors import GaussianPrior
from evigrad.training.checkpoint import shared_settings
from evigrad.training.data import RunData, stream
from evigrad.training.data_checks import check_data, lacks_a_column, learns_likelihood, warn_of_data
from evigrad.training.plan import plan, planned
from evigrad.training.run_directory import RunDirectory
from evigrad.training.settings import Laplace, Optimization, Schedule, Settings, explains_groups
from evigrad.training.trainer import Callback, FitResult, Trainer

T = TypeVar("T", bound=Trainer)


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
            kfac-N-C; ntk-400-rows-anchored is exact where there are 400 rows or fewer. None is
            plain MAP training, the same without hyperparameter steps.
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
    trainer = prepare(model, train, settings, test=test, process_group=process_group)
    return trainer.train(run_dir, resume=resume, progress=progress, callbacks=callbacks)


def prepare(
    model: nn.Module,
    train: Any,
    settings: Settings,
    *,
    test: Any = None,
    network: Mapping[str, Any] | None = None,
    process_group: Group | None = None,
    make: Callable[..., T] = Trainer,
) -> T:
    """Return a checked trainer, to be started by its ``train``; compute and write nothing.

    The arguments are those of ``fit``. ``network`` records how ``evigrad.models.make_network``
    made the model, where it did. ``make`` makes a ``Trainer`` of the arguments of that.
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
        evidence, settings = prepare_evidence(model, data, settings, process_group)
        if held_out is not None:  # which is read next when training is over
            held_out.is_column = data.is_column
            check_data(evidence, held_out, place, len(held_out))
        if settings.schedule.bracket_every:
            check_bracket(evidence.spec)
        return make(evidence, data, settings, held_out, network)


def prepare_evidence(
    model: nn.Module,
    data: RunData,
    settings: Settings,
    process_group: Group | None = None,
) -> tuple[Evidence, Settings]:
    """Return the initial evidence of a run, and the ``plan`` for its data, which are checked."""
    place = place_of(model)
    trainable(model, {})  # refuses lazy and frozen models before a pass
    x, y = data.first(PROBE_SIZE)
    check_inputs(x, place)
    likelihood = make_likelihood(settings.likelihood)
    # The model's outputs say what counts as a datum.
    shape = probe_outputs(model, x).shape[1:]
    data.is_column = lacks_a_column(likelihood, shape, y)
    num_data = len(by_target(data, likelihood, shape))
    settings = plan(settings, num_data)
    evidence = make_evidence(model, num_data, settings, process_group)
    if settings.optimization.noise_on_loss and not learns_likelihood(evidence.likelihood):
        raise ConfigurationError(
            "noise_on_loss learns the parameters of a likelihood, such as the noise of a Gaussian,"
            f" and {evidence.likelihood.name} has none to learn. Remove noise_on_loss."
        )
    # Reading all items of a data set takes as long as an epoch: they are checked as they are read.
    outputs = check_data(evidence, data, place, len(data) if data.is_held else PROBE_SIZE)
    warn_of_data(evidence, data, outputs)
    return evidence, settings


def make_evidence(
    model: nn.Module,
    num_data: int,
    settings: Settings,
    process_group: Group | None = None,
) -> Evidence:
    """Return the initial evidence of a run; without an estimator it has a placeholder of one."""
    name, anchoring = settings.estimator, settings.anchoring
    if name is None:  # it fits any data, and is never evaluated
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


def place_of(model: nn.Module) -> torch.device:
    """Where a model is; raises ConfigurationError if it has no parameters."""
    first = next(model.parameters(), None)
    if first is None:
        raise ConfigurationError("The model has no parameters: there is nothing to train.")
    return first.device


def _make_prior(settings: Settings) -> GaussianPrior:
    prior, precision = settings.prior, settings.precision
    if not isinstance(prior, GaussianPrior):
        return GaussianPrior(prior, planned(precision), mean=settings.prior_mean)
    if precision is not None or settings.prior_mean != "zero":
        raise ConfigurationError(
            "The prior is given with its precision and its mean; leave precision=... and"
            " prior_mean=... away, or name the prior's structure instead."
        )
    return prior
