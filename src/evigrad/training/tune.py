"""Learn the hyperparameters of a trained network without changing its weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from evigrad.blocks.anchors import Anchoring
from evigrad.core.names import AUTO
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.likelihoods import Likelihood
from evigrad.passes.settings import Memory
from evigrad.priors import GaussianPrior
from evigrad.training.effects import OF_TRAINING, refuse
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
        evidence: Evidence of the model, with the learned hyperparameters.
        history: One row per round, with the mean log evidence over its steps and the
            hyperparameters after the round (see ``FitResult.history``).

    See also: docs/fine_tuning.md.
    """

    evidence: Evidence
    history: list[Row]

    def __repr__(self) -> str:
        rounds = f"{len(self.history)} rounds"
        decay = self.evidence.temperature / self.evidence.num_data
        last = summary(self.history[-1], decay)
        return f"TuneResult({self.evidence.estimator.name}, {rounds}, {last})"


@explains_groups
def tune(
    model: nn.Module,
    data: Any,
    *,
    likelihood: str | Likelihood = "categorical",
    estimator: str = AUTO,
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
    """Learn the prior, noise and hyperparameters of a trained model without changing its weights.

    ``tune`` runs the same rounds as ``fit``, but without epochs between them. In a round, the steps
    on the prior and the noise share network passes. If the estimator uses all examples and outputs,
    as ``ntk-N-C`` does, a round needs one pass over the data, and the precisions converge to the
    optimum.

    Args:
        model: Model with trained weights, which do not change.
        data: Data that the model was trained on.
        likelihood: Likelihood of the targets. See ``fit``.
        estimator: Name of the evidence estimator. It cannot be None.
        prior: Prior of the weights. See ``fit``.
        precision: Initial prior precision. Default: 1.
        hyperparameters: Names of model parameters to learn.
        rounds: Number of rounds. Each round chooses new anchors and passes over the data again.
        steps: Number of hyperparameter steps per round.
        prior_blocks: Number of blocks over which all steps of a round average. See ``Schedule``.
        laplace: Temperature, root and details of the curvature.
        optimization: Learning rates of the hyperparameters, and ``prior_update``. Other settings
            have no effect and raise an error.
        memory: Batch sizes and data types of the passes that compute estimates.
        anchoring: How an anchored estimator chooses its anchors.
        seed: Seed of the blocks.

    Returns:
        The evidence and the history of the rounds.

    Raises:
        ConfigurationError: If a setting is invalid, before anything changes.
        InputError: If the data do not fit the model, the likelihood or the estimator.
        EvigradError: If an estimate fails.

    Examples:
        >>> import torch
        >>> import evigrad
        >>> x = torch.randn(50, 2)
        >>> y = x @ torch.tensor([[1.0], [-1.0]]) + 0.1 * torch.randn(50, 1)
        >>> model = torch.nn.Linear(2, 1)
        >>> with torch.no_grad():
        ...     _ = model.weight.copy_(torch.tensor([[1.0, -1.0]]))
        >>> result = evigrad.tune(model, (x, y), likelihood="gaussian", estimator="ntk-N-C")
        >>> result.history[-1]["round"]
        20

    See also: docs/fine_tuning.md.
    """
    check_integer("rounds", rounds, 1)
    if estimator is None:
        raise ConfigurationError(
            "estimator must be the name of an estimator, got None. Use a name such as ntk-N-C."
        )
    # One epoch per round: a round follows each epoch, and the weights take no steps here.
    schedule = Schedule(epochs=rounds, burn_in=0, every=1, steps=steps, prior_blocks=prior_blocks)
    settings = Settings.of(locals())
    words = "in evigrad.tune, which has no burn-in and does not change the weights"
    refuse([settings.optimization], [(OF_TRAINING, words, "Use evigrad.fit")])
    learner = prepare(model, data, settings, strict=True).learner
    assert learner is not None  # as there is an estimator
    _check_deviations(learner.evidence)
    history: list[Row] = []
    for number in range(1, rounds + 1):
        columns = round_columns(learner.evidence, learner.step(), learner.hyper_steps)
        history.append({"round": number, **columns})
    return TuneResult(learner.evidence, history)


def _check_deviations(evidence: Evidence) -> None:
    """Raise ConfigurationError if all weights equal the prior's mean."""
    prior = evidence.prior
    deviations = prior.deviations(evidence.weights())
    deviating_names = [name for name in prior.means() if bool(deviations[name].any())]
    if prior.means() and not deviating_names and prior.learnable:
        raise ConfigurationError(
            "The weights equal the prior's mean, so their precision has no finite optimum. Use the"
            " weights at the start of training as the mean, GaussianPrior(mean={name: tensor,"
            " ...}), or pass the prior of the training run (result.evidence.prior)."
        )
