"""Train a network and learn its hyperparameters, in one call."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.engine.checks import check_inputs
from evigrad.engine.plans import PROBE_SIZE
from evigrad.errors import ConfigurationError, EvigradWarning
from evigrad.estimators import DEFAULT_ESTIMATOR
from evigrad.evidence import Evidence
from evigrad.likelihoods import Categorical, Gaussian, Likelihood, make_likelihood
from evigrad.likelihoods.calls import check_targets, log_probabilities
from evigrad.priors import GaussianPrior
from evigrad.priors.groups import matches
from evigrad.training.augerino import range_parameters
from evigrad.training.bracket import check_bracket
from evigrad.training.data import RunData
from evigrad.training.estimator_options import estimator_options
from evigrad.training.loop import Loop
from evigrad.training.metrics import probe_outputs
from evigrad.training.randomness import stream
from evigrad.training.run import Callback, FitResult, Run
from evigrad.training.run_directory import RunDirectory
from evigrad.training.settings import OptimizerFactory, Settings

# Items of a data set that are checked at once.
_AT_ONCE = 1000
# Number of data whose targets' scale is measured, and the factor beyond which a warning follows.
_COMPARED = 100
_FAR = 10.0


def fit(
    model: nn.Module,
    train: Any,
    *,
    likelihood: str | Likelihood = "categorical",
    estimator: str | None = DEFAULT_ESTIMATOR,
    prior: str | GaussianPrior = "layerwise",
    precision: float | None = None,
    hyperparameters: Sequence[str] = (),
    epochs: int | None = None,
    batch_size: int = 100,
    optimizer: str | OptimizerFactory = "adam",
    lr: float | None = None,
    lr_min: float = 1e-6,
    momentum: float = 0.9,
    scalar_lr_factor: float = 0.1,
    burn_in: int | None = None,
    every: int | None = None,
    steps: int = 10,
    hyper_every: int | None = None,
    hyper_steps: int | None = None,
    prior_blocks: int | None = None,
    prior_update: str = "adam",
    prior_lr: float = 0.1,
    prior_lr_min: float = 0.01,
    hyper_lr: float = 0.05,
    hyper_lr_min: float = 0.005,
    augerino_weight: float = 0.01,
    temperature: float = 1.0,
    root: str | None = None,
    sharing: str = "expand",
    parameter_partition: str | Mapping[str, Sequence[str]] = "tensor",
    micro_batch: int | str | None = None,
    memory_budget: int | str | None = None,
    gram_dtype: torch.dtype | str | None = None,
    rows_dtype: torch.dtype | str | None = None,
    rows_device: torch.device | str | None = None,
    autocast: torch.dtype | str | None = None,
    anchor_share: float = 0.9,
    anchor_choice: str = "auto",
    test: Any = None,
    hold_data: bool = False,
    eval_every: int | None = None,
    bracket_every: int = 0,
    bracket_rows: int = 400,
    seed: int = 0,
    device: str | torch.device | None = None,
    run_dir: str | Path | RunDirectory | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
) -> FitResult:
    """Train the weights by MAP and, between epochs, the hyperparameters by the evidence.

    The paper's interleaved scheme: the weights minimise the mean negative log likelihood plus the
    prior's decay; after ``burn_in`` epochs, and every ``every`` epochs from there, ``steps`` steps
    of Adam on the prior's log precisions, the noise and the model's own hyperparameters, along
    the gradient of the estimator's log evidence (or of MacKay's fixed-point update, for the
    precisions). All of it sees the training data alone; test data are evaluated, and nothing
    depends on the result.

    The global random state is not touched: ``seed`` gives the order of the data, the blocks and
    what the model draws (dropout) each a stream of its own. The initial weights are the model's.

    Args:
        model: Any module that maps inputs (m, ...) to outputs (m, C). It is trained in place;
            frozen parameters stay as they are.
        train: Training data: a pair (x, y) of tensors, a ``TensorDataset``, or a map-style data
            set of (x, y) items, which is read anew in every epoch, and for blocks of the evidence
            their own data. Random transforms that draw from the global generators of PyTorch,
            NumPy or Python are seeded by ``seed``.
        likelihood: Of the targets: categorical, gaussian or bernoulli.
        estimator: Name of the evidence estimator, STRUCTURE-SUBSET-OUTPUTS, as ntk-100-1 or
            kfac-N-C; ntk-400-rows-anchored is exact where there are 400 rows or fewer. Baselines:
            None or map trains by MAP only, the same without hyperparameter steps; map-noise too,
            but the noise of a gaussian is learned on the training loss; augerino learns the ranges
            of a transform on the training loss, with a reward for wide ones.
        prior: What has its own prior precision (weight decay): scalar (one for all weights),
            layerwise (one for each parameter tensor) or diagonal (one for each weight).
        precision: Prior precision at the start. Weight decay in the usual sense is precision / N.
            Default: 1 where it is learned; 5e-4 N, the usual weight decay, where it is kept.
        hyperparameters: Names, or prefixes of names, of parameters of the model that the evidence
            learns instead of the MAP. Without an estimator they keep their values.
        epochs: Passes over the training data. Default: as many as are 2000 steps of the weights,
            but 100 at least.
        batch_size: Data in a step of the weights, at most; all batches are about as large.
        optimizer: Optimiser of the weights: adam or sgd. (In Python also a function that makes
            one from the named weights.)
        lr: Learning rate of the weights at the start. Default: 0.003, of regression 0.01.
        lr_min: Learning rate of the weights at the end; a cosine leads there, epoch by epoch.
        momentum: Momentum of sgd.
        scalar_lr_factor: Learning rate of Fixup's scalar biases and multipliers, over that of the
            other weights. (In Python an optimiser of your own has its own rates.)
        burn_in: Epochs before the first steps on the hyperparameters. Default: a tenth of all, of
            regression half.
        every: Epochs from one round of hyperparameter steps to the next. Default: as many as make
            20 rounds.
        steps: Hyperparameter steps in a round, each on a block of its own.
        hyper_every: Epochs from one round of steps on the model's own hyperparameters, as the
            ranges of an invariance, to the next. Default: as every.
        hyper_steps: Steps in such a round, after those on prior and noise. Default: as steps. With
            neither hyper_every nor hyper_steps a step is one on all hyperparameters together.
        prior_blocks: Blocks that a round passes over once, all its steps being on their mean: as
            many steps as you like for the price of these passes. Only for rounds of prior and
            noise alone (see hyper_steps). Default: a block for each step, or one for all of them
            where every block is the same.
        prior_update: How precisions are learned: adam, or fixed_point, MacKay's update from the
            effective number of parameters. Noise and the model's own hyperparameters keep Adam.
        prior_lr: Learning rate of log precisions and log noise (Adam) at the start.
        prior_lr_min: The same at the last step; a cosine leads there, step by step.
        hyper_lr: Learning rate of the model's own hyperparameters (Adam) at the start.
        hyper_lr_min: The same at the last step.
        augerino_weight: Weight of augerino's reward for wide ranges, in nats per datum.
        temperature: T of the likelihood p^(1/T).
        root: How the curvature of a datum is split over outputs: subblock, fisher or eigen.
            Default: the estimator's own.
        sharing: Weight sharing in KFAC: expand or reduce.
        parameter_partition: Blocks of blockdiag: tensor or module (in Python also groups of name
            prefixes).
        micro_batch: Data in a pass of an estimate, or auto, as many as the memory holds; changes
            memory, not results. Default: all.
        memory_budget: Memory that such a pass may take, with micro_batch auto: bytes, or an amount
            as 8GiB. Default: most of what is free.
        gram_dtype: Type of kernels and factors: float32 or float64. Default: the weights'.
        rows_dtype: Type in which ntk keeps its rows, as bfloat16 for half the memory. Default: the
            weights'.
        rows_device: Where ntk keeps its rows: cpu is the host's memory. Default: where the weights
            are.
        autocast: Type of mixed-precision passes, as bfloat16; kernels and factors keep theirs.
            Default: none.
        anchor_share: Part of the rows of an anchored estimator that are anchors.
        anchor_choice: Which rows become anchors: greedy for always the one with most left to tell
            by the kernel of the last layer, score for those of the data that the network is unsure
            of, k-centre for data spread over all inputs, random for any, auto for greedy, but
            k-centre where all scores are the same, as in regression.
        test: Test data, like ``train``.
        hold_data: Whether data sets are read once and kept in memory: faster where reading is
            slow, but random transforms keep their first draws for all epochs.
        eval_every: Epochs between evaluations on training and test data; 0 is only at the end.
            Default: a tenth of all epochs.
        bracket_every: Epochs between bounds, lower and upper, on the exact log evidence; 0 is none.
        bracket_rows: Rows of the kernel that these bounds may take at once: more of them bring the
            bounds together.
        seed: Seed of everything random in training.
        device: Where to train, as cpu or cuda. Default: where the model is.
        run_dir: Folder for configuration, metrics (one row for each epoch, as they come) and
            checkpoint. One that holds something is not written into: the first free one of
            NAME-2, NAME-3, ... is taken, unless to ``resume``. None writes nothing.
        resume: Whether to go on with the run in ``run_dir`` from its last checkpoint, which gives
            the same numbers as a run that was never interrupted; for that model, data and settings
            have to be the same (``checkpoint_every`` may differ). A folder without a checkpoint
            gets the run from its beginning, and of one that is complete the result is read.
        checkpoint_every: Epochs between checkpoints; the last epoch has one in any case. Default:
            as few as cost a twentieth of the time, which is one for most networks.
        progress: Whether to show progress on standard error.
        callbacks: Called after every epoch with its row of metrics; after an interruption again
            for the epochs since the last checkpoint.

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
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        lr=lr,
        lr_min=lr_min,
        momentum=momentum,
        scalar_lr_factor=scalar_lr_factor,
        burn_in=burn_in,
        every=every,
        steps=steps,
        hyper_every=hyper_every,
        hyper_steps=hyper_steps,
        prior_blocks=prior_blocks,
        prior_update=prior_update,
        prior_lr=prior_lr,
        prior_lr_min=prior_lr_min,
        hyper_lr=hyper_lr,
        hyper_lr_min=hyper_lr_min,
        augerino_weight=augerino_weight,
        temperature=temperature,
        root=root,
        sharing=sharing,
        parameter_partition=parameter_partition,
        micro_batch=micro_batch,
        memory_budget=memory_budget,
        gram_dtype=gram_dtype,
        rows_dtype=rows_dtype,
        rows_device=rows_device,
        autocast=autocast,
        anchor_share=anchor_share,
        anchor_choice=anchor_choice,
        hold_data=hold_data,
        eval_every=eval_every,
        bracket_every=bracket_every,
        bracket_rows=bracket_rows,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    run = prepare(model, train, settings, test=test, device=device)
    return run.train(run_dir, resume=resume, progress=progress, callbacks=callbacks)


def prepare(
    model: nn.Module,
    train: Any,
    settings: Settings,
    *,
    test: Any = None,
    device: str | torch.device | None = None,
    network: Mapping[str, Any] | None = None,
) -> Run:
    """Check all that can be checked; compute and write nothing.

    The arguments are those of ``fit``. ``network`` records how ``evigrad.models.make_network``
    made the model, where it did.

    Returns:
        The run, to be started by its ``train``.

    Raises:
        ConfigurationError: If a setting does not exist or does not fit.
        InputError: If the data do not fit the model, the likelihood or the estimator.
    """
    place = place_model(model, device)
    seed, hold = settings.seed, settings.hold_data
    data = RunData(train, place, seed, hold=hold)
    settings = settings.for_data(len(data))
    held_out = None if test is None else RunData(test, place, seed, hold=hold)
    if settings.estimator == "augerino":
        ranges = [n for n in range_parameters(model) if not _names(settings.hyperparameters, n)]
        settings = replace(settings, hyperparameters=[*settings.hyperparameters, *ranges])
    evidence = make_evidence(model, len(data), settings)
    if settings.estimator == "map-noise" and not learns_noise(evidence.likelihood):
        raise ConfigurationError(
            f"map-noise learns the noise of a likelihood, and {evidence.likelihood.name} has none"
            " to learn: say map."
        )
    # Reading all items of a data set takes as long as an epoch: they are checked as they are read.
    outputs = _check_data(evidence, data, place, len(data) if data.is_held else PROBE_SIZE)
    if isinstance(evidence.likelihood, Categorical):
        _warn_of_probabilities(outputs)
    if isinstance(evidence.likelihood, Gaussian):
        _warn_of_scale(evidence, evidence.likelihood, data)
    if held_out is not None:  # which is read next when training is over
        _check_data(evidence, held_out, place, len(held_out))
    if settings.bracket_every:
        check_bracket(evidence.spec)
    if settings.baseline is None:
        _check_learnable(evidence)
        evidence.blocks(data)  # raises now what the first round would, epochs later
    return Run(Loop(evidence, data, settings), held_out, network)


def learns_noise(likelihood: str | Likelihood) -> bool:
    """Whether a likelihood has learned parameters: a Gaussian, unless its noise is fixed."""
    return any(p.requires_grad for p in make_likelihood(likelihood).parameters())


def make_evidence(model: nn.Module, num_data: int, settings: Settings) -> Evidence:
    """The initial evidence of a run; a placeholder's for a baseline without an estimator."""
    name = settings.estimator
    if name is None or settings.baseline is not None:
        # An estimator that fits any data; a baseline never evaluates it.
        name = f"ntk-{min(num_data, 100)}-1"
    return Evidence(
        model,
        make_likelihood(settings.likelihood),
        _make_prior(settings.prior, settings.precision),
        estimator=name,
        num_data=num_data,
        hyperparameters=settings.hyperparameters,
        generator=stream(settings.seed, "evidence"),
        **estimator_options(vars(settings)),
    )


def _names(patterns: Sequence[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def place_model(model: nn.Module, device: str | torch.device | None) -> torch.device:
    """Move a model to ``device``, unless that is None.

    Returns:
        Where the model is now.

    Raises:
        ConfigurationError: If the device cannot be used, or the model has no parameters.
    """
    first = next(model.parameters(), None)
    if first is None:
        raise ConfigurationError("The model has no parameters: there is nothing to train.")
    if device is None:
        return first.device
    try:
        model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"The device '{device}' cannot be used: {error}") from error
    return next(model.parameters()).device


def _make_prior(prior: str | GaussianPrior, precision: float | None) -> GaussianPrior:
    if not isinstance(prior, GaussianPrior):
        assert precision is not None  # by ``Settings.for_data``
        return GaussianPrior(structure=prior, precision=precision)
    if precision is not None:
        raise ConfigurationError(
            "The prior is given with its precision; leave precision=... away, or name the prior's"
            " structure instead."
        )
    return prior


def _check_data(evidence: Evidence, data: RunData, device: torch.device, count: int) -> Tensor:
    """Refuse unfit data before the first step; returns the outputs for a few of them."""
    probe, y = data.first(2)
    check_inputs(probe, device)
    f = probe_outputs(evidence.model, probe)
    check_targets(evidence.likelihood, f.shape, y, f.device)
    log_probabilities(evidence.likelihood, f, y)
    for indices in torch.arange(min(count, len(data))).split(count if data.is_held else _AT_ONCE):
        x, y = data.fetch(indices)
        check_inputs(x, device)
        check_targets(evidence.likelihood, (len(x), f.shape[1]), y, f.device)
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
            stacklevel=4,  # the caller of fit
        )


def _warn_of_scale(evidence: Evidence, likelihood: Gaussian, data: RunData) -> None:
    """Warn of real targets far from unit scale, for which networks, rates and priors are made."""
    positions = torch.linspace(0, len(data) - 1, min(len(data), _COMPARED)).long()
    x, y = data.fetch(positions)
    error = (y - probe_outputs(evidence.model, x)).square().mean(0).sqrt()
    noise = likelihood.log_noise.detach().exp().expand_as(error)
    spread = y.std(0, correction=0)
    far = (error > _FAR * noise.clamp(min=1)) | ((spread > 0) & (_FAR * spread < noise))
    if not bool(far.any()):
        return
    first = int(far.nonzero()[0])
    warnings.warn(
        f"The targets have a standard deviation of {float(spread[first]):.3g} and differ by"
        f" {float(error[first]):.3g} (root mean square) from the outputs before training, and the"
        f" noise begins at {float(noise[first]):.3g}: networks, learning rates and priors are made"
        " for targets of about unit scale, and others are hardly fitted. Train on (x, scaling(y)),"
        " with scaling = evigrad.data.Scaling.of(y) of the training targets; scaling.undo(outputs)"
        " are predictions in their own units. (Of targets that are right as they are, say the"
        " noise: likelihood=Gaussian(noise=...).)",
        EvigradWarning,
        stacklevel=4,  # the caller of fit
    )


def _check_learnable(evidence: Evidence) -> None:
    if not evidence.hyperparameters():
        raise ConfigurationError(
            "There is nothing for the estimator to learn: prior and likelihood are fixed and no"
            " parameter of the model is named in hyperparameters. Say estimator=None for MAP"
            " training, or make the prior learnable."
        )
