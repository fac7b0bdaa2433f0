"""Train a network and learn its hyperparameters in one call."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from evigrad.blocks.anchors import Anchoring
from evigrad.blocks.positions import by_target
from evigrad.core.names import AUTO
from evigrad.distributed import Group, Ranks, check_whole
from evigrad.errors import ConfigurationError, EvigradWarning
from evigrad.evidence import Evidence
from evigrad.likelihoods import Likelihood, make_likelihood
from evigrad.likelihoods.calls import lacks_a_column
from evigrad.measure.bracket import check_bracket
from evigrad.measure.metrics import probe_outputs
from evigrad.network.arguments import check_mode
from evigrad.network.network import PROBE_SIZE
from evigrad.passes.checks import check_inputs
from evigrad.passes.parameters import trainable
from evigrad.passes.settings import Memory
from evigrad.priors import STRUCTURES, GaussianPrior, not_a_prior
from evigrad.training.checkpoint import shared_settings
from evigrad.training.data import RunData, stream
from evigrad.training.data_checks import check_data, learns_likelihood, warn_of_data
from evigrad.training.effects import refuse, refuse_idle, refuse_without_estimator
from evigrad.training.observers import Callback
from evigrad.training.plan import plan, plan_estimator, planned
from evigrad.training.run_directory import RunDirectory
from evigrad.training.settings import Laplace, Optimization, Schedule, Settings, explains_groups
from evigrad.training.trainer import FitResult, Trainer
from evigrad.training.trials import check_choice, choose_weight

T = TypeVar("T", bound=Trainer)


@explains_groups
def fit(
    model: nn.Module,
    train: Any,
    *,
    likelihood: str | Likelihood = "categorical",
    estimator: str | None = AUTO,
    prior: str | GaussianPrior = "layerwise",
    precision: float | None = None,
    hyperparameters: Sequence[str] = (),
    laplace: Laplace | None = None,
    schedule: Schedule | None = None,
    optimization: Optimization | None = None,
    memory: Memory | None = None,
    anchoring: Anchoring | None = None,
    test: Any = None,
    validation_fraction: float | None = None,
    validation: Any = None,
    seed: int = 0,
    run_dir: str | Path | RunDirectory | None = None,
    resume: bool = False,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    process_group: Group | None = None,
) -> FitResult:
    """Train a network and learn its hyperparameters at the same time.

    The optimizer minimizes the mean negative log likelihood plus the prior's weight decay. Between
    epochs, rounds of steps update the hyperparameters by the gradient of the estimated log
    evidence. Prior precisions follow MacKay's fixed-point update, or Adam as in Immer et al.
    (2023). Noise and the model's own hyperparameters use Adam. Only the data in ``train`` are used
    for training.

    ``fit`` does not change the global random state. Separate random streams, derived from ``seed``,
    determine the order of the data, the blocks and the model's own draws (such as dropout). The
    initial weights are the model's current weights. If the targets of a regression are far from
    zero, the output bias starts at their mean (docs/fit.md).

    Args:
        model: Module that maps inputs (m, ...) to outputs (m, C), or to (m, ..., C) with a target
            at each position. It is trained in place, on its device. Frozen parameters do not
            change.
        train: Training data: a pair (x, y) of tensors or NumPy arrays, a ``TensorDataset``, or a
            map-style data set of (x, y) items. Items are read again in every epoch and for every
            evidence block. ``seed`` also seeds random transforms that use the global generators of
            PyTorch, NumPy or Python. For a model with one output, regression targets may have the
            shape (m,).
        likelihood: Distribution of the targets given the outputs: categorical, bernoulli, gaussian,
            student-t (heavy tails), poisson (counts), heteroscedastic or natural-gaussian
            (input-dependent noise). Outputs of poisson are log rates. Outputs of heteroscedastic
            are a mean and a log variance per target. natural-gaussian is more robust on small data
            sets.
        estimator: Evidence estimator, named STRUCTURE-SUBSET-OUTPUTS, such as ntk-100-1 or
            kfac-N-C. Default: "auto", which is kfac-400-C-scaled if there are more examples than
            weights (from 15,000 examples on, than half of the weights) and over 4,000 Jacobian
            rows, and ntk-400-rows-anchored otherwise. With over 5 Jacobian rows per example, the
            former uses fewer than 400 examples. The latter is exact for at most 400 Jacobian rows.
            None trains by plain MAP, without hyperparameter steps.
        prior: Which weights share a prior precision (weight decay): scalar (all weights), layerwise
            (the weights of each parameter tensor) or diagonal (none). Use a ``GaussianPrior`` for
            other groups, a hyperprior, or a nonzero mean (``mean="initial"`` for fine-tuning).
        precision: Value of the prior precision if it is fixed, or its initial value if it is
            learned with ``Optimization(prior_update="adam")`` or without a burn-in. Otherwise, the
            precisions start from ``Optimization(start_decay=...)``. Weight decay is precision / N.
            Default: 5e-4 N if it is fixed, 1 if it is learned.
        hyperparameters: Names, or prefixes of names, of model parameters that are learned from the
            evidence instead of the training loss. Without an estimator they keep their values.
        laplace: Temperature, root and details of the curvature.
        schedule: Epochs, batches, rounds of hyperparameter steps, evaluations and checkpoints.
        optimization: Optimizers and learning rates.
        memory: Batch sizes and data types of the passes that compute estimates.
        anchoring: How an anchored estimator chooses its anchors.
        test: Test data in the format of ``train``. They are used only for evaluation and do not
            affect training.
        validation_fraction: Share of the training data, such as 0.5, that choose the weight of the
            log-determinant (``Laplace.log_det_weight``). Three to six trials train on the other
            data and predict this part. Then, the network trains on all data. With 0.5, all trials
            together take one to two times as long. Default: None, which keeps the weight of
            ``laplace``.
        validation: Other ways to choose this weight: positions of training examples, or a mask,
            instead of a random share. Or data in the format of ``train``, on which the network
            never trains. Or "prequential": the trials predict each part of the training data by
            the data before it.
        seed: Seed of all random draws in training.
        run_dir: Folder for configuration, metrics (one row per epoch) and checkpoint. If it is not
            empty, the run uses the first free name among NAME-2, NAME-3, ..., unless ``resume`` is
            set. None writes nothing.
        resume: Whether to resume the run in ``run_dir`` from its last checkpoint, with the same
            results as without the interruption. Model, data and settings must be the same, except
            ``checkpoint_every``. If the folder has no checkpoint, the run starts from the
            beginning. If the run is complete, its result is returned.
        progress: Whether to show the plan, the progress and the remaining time on standard error.
        callbacks: Functions called after every epoch with its row of metrics. A resumed run calls
            them again for the epochs since the last checkpoint. While several starts are tried, no
            function is called. The rows of the start that continues follow afterwards.
        process_group: Processes that train together, each on a part of every batch, as for
            ``Evidence``. All processes must call ``fit`` with the same model, data and settings.
            They get the same result. Only the first process provides the parameters, writes files,
            shows progress and calls ``callbacks``. You can resume the run with a different number
            of processes.

    Returns:
        The trained model, its evidence, the history and the final metrics.

    Raises:
        ConfigurationError: If a setting is invalid or has no effect, before anything is computed or
            written.
        InputError: If the data do not fit the model, the likelihood or the estimator.
        EvigradError: If training diverges. The metrics of earlier epochs are kept.

    Examples:
        >>> import torch
        >>> import evigrad
        >>> x = torch.randn(200, 3)
        >>> y = (x[:, 0] > 0).long()
        >>> model = torch.nn.Linear(3, 2)
        >>> schedule = evigrad.Schedule(epochs=4)
        >>> result = evigrad.fit(model, (x, y), schedule=schedule, progress=False)
        >>> [weight.name for weight in result.evidence.describe()]
        ['weight', 'bias']

    See also: docs/fit.md.
    """
    settings = Settings.of(locals())
    if run_dir is None:
        words = "without run_dir, because checkpoints are files in that folder"
        refuse([settings.schedule], [(("checkpoint_every",), words, "Set run_dir")])
    make_trainer = partial(prepare, model, process_group=process_group)
    chooses = validation_fraction is not None or validation is not None
    if chooses:
        check_choice(settings, validation_fraction, validation)
    trainer, choice = make_trainer(train, settings, test=test, strict=True), None
    if chooses:
        if isinstance(run_dir, str | Path) and trainer.evidence.ranks.is_first:
            run_dir = RunDirectory(run_dir, resume=resume)
        # The trainer above has given the warnings that concern data and settings.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EvigradWarning)
            choice = choose_weight(
                make_trainer,
                trainer,
                validation_fraction if validation is None else validation,
                run_dir,
                progress=progress,
            )
        trainer.weigh_log_det(choice.weight)
    result = trainer.train(run_dir, resume=resume, progress=progress, callbacks=callbacks)
    return replace(result, weight_choice=choice)


def prepare(
    model: nn.Module,
    train: Any,
    settings: Settings,
    *,
    test: Any = None,
    network: Mapping[str, Any] | None = None,
    process_group: Group | None = None,
    make: Callable[..., T] = Trainer,
    strict: bool = False,
) -> T:
    """Return a trainer after checks, without training the network or writing files.

    ``model``, ``train``, ``test`` and ``process_group`` are the arguments of ``fit``. ``network``
    is the record of the model if ``evigrad.models.make_network`` built it. ``make`` creates the
    trainer from the arguments of ``Trainer``. If ``strict`` is True, settings without effect raise
    an error.
    """
    check_mode()
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
        evidence, settings = prepare_evidence(model, data, settings, process_group, strict)
        if held_out is not None:  # read next when training is over
            held_out.is_column = data.is_column
            check_data(evidence, held_out, place, len(held_out))
        if settings.schedule.bracket_every:
            check_bracket(evidence.estimator)
        return make(evidence, data, settings, held_out, network)


def prepare_evidence(
    model: nn.Module,
    data: RunData,
    settings: Settings,
    process_group: Group | None = None,
    strict: bool = True,
) -> tuple[Evidence, Settings]:
    """Check the data, and return the initial evidence of a run and its complete settings."""
    place = place_of(model)
    if strict and settings.estimator is None:
        refuse_without_estimator(settings)
    weights = trainable(model, {})  # raises for lazy and frozen models before a pass
    x, y = data.first(PROBE_SIZE)
    check_inputs(x, place)
    likelihood = make_likelihood(settings.likelihood)
    # The model's outputs decide what counts as an example.
    shape = probe_outputs(model, x).shape[1:]
    data.is_column = lacks_a_column(likelihood, shape, y)
    num_data = len(by_target(data, likelihood, shape))
    size = sum(weight.numel() for weight in weights.values())
    name = plan_estimator(settings, len(data), likelihood.num_rows(shape[-1]), size)
    settings = replace(settings, estimator=name)
    chosen, settings = settings, plan(settings, num_data, len(data))
    evidence = make_evidence(model, num_data, settings, process_group)
    if strict and settings.estimator is not None:
        refuse_idle(chosen, settings, evidence)
    if settings.optimization.noise_on_loss and not learns_likelihood(evidence.likelihood):
        raise ConfigurationError(
            "noise_on_loss requires a likelihood with learnable parameters, such as the noise of a"
            f" Gaussian. The likelihood {evidence.likelihood.name} has none. Remove noise_on_loss."
        )
    # Reading all items of a data set takes as long as an epoch. They are checked as they are read.
    outputs = check_data(evidence, data, place, len(data) if data.is_held else PROBE_SIZE)
    warn_of_data(evidence, data, outputs)
    return evidence, settings


def make_evidence(
    model: nn.Module,
    num_data: int,
    settings: Settings,
    process_group: Group | None = None,
) -> Evidence:
    """Return the initial evidence of a run. It has a placeholder estimator if the run has none."""
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
    """Return the device of a model, or raise ConfigurationError if the model has no parameters."""
    first = next(model.parameters(), None)
    if first is None:
        raise ConfigurationError(
            "model must have parameters to train, got none. Use a module with weights."
        )
    return first.device


def _make_prior(settings: Settings) -> GaussianPrior:
    prior, precision = settings.prior, settings.precision
    if not isinstance(prior, GaussianPrior):
        if not isinstance(prior, Mapping) and not (isinstance(prior, str) and prior in STRUCTURES):
            kinds = f"a GaussianPrior, one of {', '.join(STRUCTURES)}, or a dict of groups"
            raise ConfigurationError(not_a_prior(f"prior must be {kinds}", prior))
        return GaussianPrior(prior, planned(precision), mean=settings.prior_mean)
    if precision is not None or settings.prior_mean != "zero":
        raise ConfigurationError(
            "precision and prior_mean cannot be combined with a GaussianPrior object. Pass"
            " precision and mean to GaussianPrior(...), or use a name such as prior='layerwise'."
        )
    return prior
