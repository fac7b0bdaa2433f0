"""Keywords of ``Evidence`` that say how it computes, as ``fit`` and the command line take them."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from evigrad.blocks.anchors import Anchoring
from evigrad.errors import ConfigurationError, nearest

# Keywords of ``Evidence``, of ``fit`` and options of the command line alike.
ESTIMATOR_OPTIONS = (
    "temperature",
    "root",
    "sharing",
    "parameter_partition",
    "micro_batch",
    "memory_budget",
    "gram_dtype",
    "rows_dtype",
    "rows_device",
    "autocast",
)
# Keywords of ``fit`` and options of the command line that make up ``Evidence``'s ``anchoring``.
ANCHOR_OPTIONS = ("anchor_share", "anchor_choice")
DTYPES = ("bfloat16", "float32", "float64")
UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def estimator_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords for ``Evidence``: names of types as types, amounts of memory as bytes.

    Args:
        given: The estimator's name, all of ``ESTIMATOR_OPTIONS`` and ``ANCHOR_OPTIONS``; other
            keys are ignored.

    Returns:
        The keywords of ``ESTIMATOR_OPTIONS``, and ``anchoring`` for an anchored estimator.

    Raises:
        ConfigurationError: If a value does not exist; ``Evidence`` checks the rest.
    """
    options = {name: given[name] for name in ESTIMATOR_OPTIONS}
    for name in ("gram_dtype", "rows_dtype", "autocast"):
        options[name] = as_dtype(name, options[name])
    options["memory_budget"] = as_bytes("memory_budget", options["memory_budget"])
    if isinstance(options["rows_device"], str):
        try:
            options["rows_device"] = torch.device(options["rows_device"])
        except RuntimeError as error:
            raise ConfigurationError(
                f"rows_device '{given['rows_device']}' does not exist: say cpu, or leave it away."
            ) from error
    if "anchored" in str(given["estimator"]).split("-"):
        options["anchoring"] = Anchoring(given["anchor_share"], given["anchor_choice"])
    return options


def as_dtype(what: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """The floating-point type named as ``"bfloat16"``; ``what`` names the setting in an error."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigurationError(
            f"{what} is one of {', '.join(DTYPES)}, not '{value}'.{nearest(name, DTYPES)}"
        )
    return getattr(torch, name)


def as_bytes(what: str, value: int | str | None) -> int | None:
    """Bytes from a number or a text such as ``"8GiB"``; ``what`` names the setting in an error."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", value.strip().lower())
    if match is None or match[2] not in UNITS or float(match[1]) * UNITS[match[2]] < 1:
        raise ConfigurationError(
            f"{what} is a number of bytes, or an amount as 8GiB or 500MB, not '{value}'."
        )
    return int(float(match[1]) * UNITS[match[2]])
