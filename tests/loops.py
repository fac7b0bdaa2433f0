"""The loop of a run that has not started."""

from typing import Any

from torch import Tensor, nn

from evigrad.training import Settings, prepare
from evigrad.training.learner import Learner
from evigrad.training.loop import Loop
from evigrad.training.settings import grouped


def settings_of(**changes: Any) -> Settings:
    """The settings of ``fit`` with these keywords, without their groups."""
    return Settings(**grouped({n: value for n, value in changes.items() if n != "progress"}))


def loop_of(model: nn.Module, data: tuple[Tensor, Tensor], **changes: Any) -> Loop:
    """What ``fit`` would run with these keywords."""
    return prepare(model, data, settings_of(**changes)).loop


def learner_of(loop: Loop) -> Learner:
    """What learns the hyperparameters of a loop that is no baseline's."""
    assert loop.learner is not None
    return loop.learner
