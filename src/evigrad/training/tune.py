"""Learn the hyperparameters of a trained network, whose weights stay as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from evigrad.blocks.anchors import Anchoring
from evigrad.core.names import DEFAULT_ESTIMATOR
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.likelihoods import Likelihood
from evigrad.passes.allocator import kept_memory
from evigrad.passes.settings import Memory
from evigrad.priors import GaussianPrior
from evigrad.training.fit import prepare
from evigrad.training.history import Row, round_columns
from evigrad.training.progress import summary
from evigrad.training.settings import (
    Laplace,
    Optimization,
    Schedule,
    Settings,
    check_integer,
    explains_groups,
)


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


@explains_groups
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
    prior_blocks: int | None = None,
    laplace: Laplace | None = None,
    optimization: Optimization | None = None,
    memory: Memory | None = None,
    anchoring: Anchoring | None = None,
    seed: int = 0,
) -> TuneResult:
    """Learn prior, noise and hyperparameters of a trained model by the evidence, weights fixed.

    The hyperparameter steps are those of ``fit``, without the epochs between them. In a round,
    steps on prior and noise share equal passes: with an estimator of all data and outputs, as
    ``ntk-N-C``, one pass serves a round, and the precisions converge to the optimum.

    Args:
        model: As for ``fit``, with trained weights, which are not changed.
        data: The data that it was trained on.
        likelihood: As for ``fit``.
        estimator: As for ``fit``, but not None.
        prior: As for ``fit``.
        precision: Prior precision at the start, as for ``fit``.
        hyperparameters: As for ``fit``.
        rounds: Rounds of steps. Each chooses new anchors and passes over the data again.
        steps: Steps of a round.
        prior_blocks: As in ``Schedule``.
        laplace: As for ``fit``.
        optimization: Rates of the hyperparameters, and ``prior_update``; what it says of the
            weights is not used.
        memory: As for ``fit``.
        anchoring: As for ``fit``.
        seed: Seed of the blocks.

    Returns:
        The evidence, and the history of the rounds.

    Raises:
        ConfigurationError: If a setting does not exist or does not fit, before anything changes.
        InputError: If the data do not fit the model, the likelihood or the estimator.
        EvigradError: If an estimate fails.
    """
    check_integer("rounds", rounds, 1)
    if estimator is None:
        raise ConfigurationError(
            "tune learns by the estimate of a named estimator, as ntk-N-C, not None."
        )
    # As many epochs as rounds: a round follows each, and the weights take no steps here.
    schedule = Schedule(epochs=rounds, burn_in=0, every=1, steps=steps, prior_blocks=prior_blocks)
    settings = Settings(
        likelihood=likelihood,
        estimator=estimator,
        prior=prior,
        precision=precision,
        hyperparameters=hyperparameters,
        laplace=laplace or Laplace(),
        schedule=schedule,
        optimization=optimization or Optimization(),
        memory=memory or Memory(),
        anchoring=anchoring,
        seed=seed,
    )
    with kept_memory():
        learner = prepare(model, data, settings).learner
        assert learner is not None  # as there is an estimator
        _check_deviations(learner.evidence)
        history: list[Row] = []
        for number in range(1, rounds + 1):
            hyper_round = learner.step()
            history.append({"round": number, **round_columns(learner, hyper_round)})
    return TuneResult(learner.evidence, history)


def _check_deviations(evidence: Evidence) -> None:
    """Refuse weights that all are the prior's mean, as those of ``"initial"`` are here."""
    prior = evidence.prior
    deviations = prior.deviations(evidence.weights())
    deviating_names = [name for name in prior.means() if bool(deviations[name].any())]
    if prior.means() and not deviating_names and prior.learnable:
        raise ConfigurationError(
            "The weights are the prior's mean, so that their precision has no finite optimum: give"
            " the weights that training began with, GaussianPrior(mean={name: tensor, ...}), or the"
            " prior that they were trained with (result.evidence.prior)."
        )
