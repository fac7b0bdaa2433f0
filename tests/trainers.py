"""The trainer of a run that has not started."""

from typing import Any

from torch import Tensor, nn

from evigrad.training import Settings, Trainer, prepare
from evigrad.training.learner import Learner
from evigrad.training.settings import grouped


def settings_of(**changes: Any) -> Settings:
    """The settings of ``fit`` with these keywords, without their groups."""
    return Settings(**grouped({n: value for n, value in changes.items() if n != "progress"}))


def trainer_of(model: nn.Module, data: tuple[Tensor, Tensor], **changes: Any) -> Trainer:
    """What ``fit`` would run with these keywords."""
    return prepare(model, data, settings_of(**changes))


def learner_of(trainer: Trainer) -> Learner:
    """What learns the hyperparameters of a trainer with an estimator."""
    assert trainer.learner is not None
    return trainer.learner
