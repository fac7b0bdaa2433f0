"""Learn the hyperparameters of a trained network, whose weights stay as they are."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import torch
from torch import nn

from evigrad.engine.allocator import kept_memory
from evigrad.errors import ConfigurationError, nearest
from evigrad.estimators import DEFAULT_ESTIMATOR
from evigrad.evidence import Evidence
from evigrad.likelihoods import Likelihood
from evigrad.priors import GaussianPrior
from evigrad.training.estimator_options import ANCHOR_OPTIONS, ESTIMATOR_OPTIONS
from evigrad.training.fit import fit, prepare
from evigrad.training.metrics import Row
from evigrad.training.progress import summary
from evigrad.training.run import evidence_columns
from evigrad.training.settings import BASELINES, Settings
from evigrad.training.tracking import hyperparameter_values

# Keywords of ``fit`` on the learning of hyperparameters, beside those of the estimator.
_RATES = ("prior_lr", "prior_lr_min", "hyper_lr", "hyper_lr_min")
_OPTIONS = (*ESTIMATOR_OPTIONS, *ANCHOR_OPTIONS, *_RATES, "prior_blocks", "hold_data")


@dataclass(frozen=True)
class TuneResult:
    """The result of ``tune``.

    Attributes:
        evidence: The model's evidence, with the learned hyperparameters.
        history: One row for each round: the mean log evidence over its steps, and the
            hyperparameters after it, as in ``FitResult.history``.
    """

    evidence: Evidence
    history: list[Row]

    def __repr__(self) -> str:
        rounds = f"{len(self.history)} rounds"
        return f"TuneResult({self.evidence.spec.name}, {rounds}, {summary(self.history[-1])})"


def tune(
    model: nn.Module,
    data: Any,
    *,
    likelihood: str | Likelihood = "categorical",
    estimator: str = DEFAULT_ESTIMATOR,
    prior: str | GaussianPrior = "layerwise",
    precision: float | None = None,
    hyperparameters: Sequence[str] = (),
    rounds: int = 20,
    steps: int = 10,
    prior_update: str | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    **options: Any,
) -> TuneResult:
    """Learn prior, noise and hyperparameters of a trained model by the evidence, weights fixed.

    The hyperparameter steps are those of ``fit``, without the epochs between them. In a round,
    steps on prior and noise share equal passes: with an estimator of all data and outputs, as
    ``ntk-N-C``, one pass serves a round, and the precisions converge to the optimum.

    Args:
        model: As for ``fit``, with trained weights, which are not changed.
        data: The data that it was trained on.
        likelihood: As for ``fit``.
        estimator: As for ``fit``; a baseline is refused.
        prior: As for ``fit``.
        precision: Prior precision at the start, as for ``fit``.
        hyperparameters: As for ``fit``.
        rounds: Rounds of steps. Each chooses new anchors and passes over the data again.
        steps: Steps of a round.
        prior_update: As for ``fit``. Default: fixed_point, or adam for a prior with a hyperprior or
            without anything to learn.
        seed: Seed of the blocks.
        device: As for ``fit``.
        **options: Other keywords of ``fit`` that concern estimator, anchors, rates of the
            hyperparameters, ``prior_blocks`` and ``hold_data``.

    Returns:
        The evidence, and the history of the rounds.

    Raises:
        ConfigurationError: If a setting does not exist or does not fit, before anything changes.
        InputError: If the data do not fit the model, the likelihood or the estimator.
        EvigradError: If an estimate fails.
    """
    for name in options:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"tune has no setting '{name}'.{nearest(name, _OPTIONS)} Those of the weights'"
                " training are fit's."
            )
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ConfigurationError(f"rounds must be an integer of at least 1, not {rounds}.")
    if estimator is None or estimator in BASELINES:
        raise ConfigurationError(
            f"tune learns by the estimate of a named estimator, as ntk-N-C, not {estimator!r}."
        )
    if prior_update is None:
        fixed = not isinstance(prior, GaussianPrior) or (prior.learnable and not prior.hyperprior)
        prior_update = "fixed_point" if fixed else "adam"
    known = {each.name for each in fields(Settings)}
    given: dict[str, Any] = {
        name: parameter.default
        for name, parameter in signature(fit).parameters.items()
        if name in known
    }
    given |= {
        **options,
        "likelihood": likelihood,
        "estimator": estimator,
        "prior": prior,
        "precision": precision,
        "hyperparameters": hyperparameters,
        "steps": steps,
        "prior_update": prior_update,
        "seed": seed,
        # As many epochs as rounds: a round follows each, and the weights take no steps here.
        "epochs": rounds,
        "burn_in": 0,
        "every": 1,
    }
    with kept_memory():
        loop = prepare(model, data, Settings(**given), device=device).loop
        history: list[Row] = []
        for number in range(1, rounds + 1):
            loop.data.epoch = number
            learned = loop.learn(number)
            row: Row = {"round": number, **evidence_columns(learned)}
            row["hyper_steps"] = loop.hyper_steps
            history.append(row | hyperparameter_values(loop.evidence))
    return TuneResult(loop.evidence, history)
