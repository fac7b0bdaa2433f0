"""The loop of a run that has not started."""

from dataclasses import fields
from inspect import signature
from typing import Any

from torch import Tensor, nn

from evigrad.training import Settings, fit, prepare
from evigrad.training.loop import Loop

DEFAULTS = {name: parameter.default for name, parameter in signature(fit).parameters.items()}


def settings_of(**changes: Any) -> Settings:
    """The settings of ``fit`` with these keywords."""
    given = DEFAULTS | changes
    return Settings(**{field.name: given[field.name] for field in fields(Settings)})


def loop_of(model: nn.Module, data: tuple[Tensor, Tensor], **changes: Any) -> Loop:
    """What ``fit`` would run with these keywords."""
    return prepare(model, data, settings_of(**changes)).loop
