"""Checks of what a user gives, each with words on how to mend it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from evigrad.errors import ConfigurationError, InputError, nearest
from evigrad.estimators import EstimatorSpec


def check_inputs(x: Tensor, device: torch.device) -> None:
    """Inputs of at least one datum, finite, and where the weights are."""
    if x.ndim == 0 or len(x) == 0:
        raise InputError("The set of inputs is empty: give at least one datum, (m, ...).")
    if x.device != device:
        raise InputError(f"Inputs are on {x.device}, weights on {device}: move one of them.")
    if x.is_floating_point() and not torch.isfinite(x).all():
        raise InputError("Inputs hold NaN or infinite values: clean or impute them.")


def check_outputs(f: object, x: Tensor) -> None:
    """Outputs (m, C) for inputs (m, ...)."""
    if not isinstance(f, Tensor) or f.ndim != 2 or len(f) != len(x):
        got = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise InputError(
            f"The model must map inputs of {len(x)} data to outputs ({len(x)}, C); it returned"
            f" {got}. Flatten or unsqueeze the outputs: one row of C numbers for each datum."
        )


def check_finite(what: str, value: Tensor) -> None:
    """No NaN, no infinity."""
    if not torch.isfinite(value).all():
        raise InputError(f"{what} hold NaN or infinite values: training has diverged.")


def check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    """One of the named choices."""
    if value not in choices:
        raise ConfigurationError(
            f"{what} is one of {', '.join(choices)}, not '{value}'.{nearest(value, choices)}"
        )


def check_positive(what: str, value: float) -> None:
    """A positive finite number."""
    if not 0 < value < float("inf"):
        raise ConfigurationError(f"{what} must be a positive number, not {value}.")


def check_count(what: str, value: int) -> None:
    """A positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{what} must be a positive integer, not {value!r}.")


def check_spec(spec: EstimatorSpec, num_data: int) -> None:
    """An estimator that exists, on subsets no larger than the data."""
    if spec.anchored:
        raise ConfigurationError(
            f"{spec.name}: the anchored bound is not available yet; use the estimator without"
            " -anchored."
        )
    if spec.subset is not None and not spec.rows and spec.subset > num_data:
        raise ConfigurationError(
            f"{spec.name} takes subsets of {spec.subset} data, but num_data is {num_data}; use a"
            " smaller subset, or N for all the data."
        )


def as_generator(generator: torch.Generator | int | None) -> torch.Generator:
    """A CPU generator from one, a seed, or PyTorch's initial seed."""
    if isinstance(generator, torch.Generator):
        if generator.device.type != "cpu":
            raise ConfigurationError("The generator must be a CPU generator.")
        return generator
    seed = torch.initial_seed() if generator is None else generator
    return torch.Generator().manual_seed(seed)
