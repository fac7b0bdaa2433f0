"""Define and check the settings of an evidence."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch

from evigrad.blocks.anchors import Anchoring
from evigrad.core.names import Estimator
from evigrad.core.roots import ROOTS
from evigrad.errors import ConfigurationError, nearest
from evigrad.passes.checks import as_device, check_choice, check_count, check_positive
from evigrad.passes.parameter_blocks import ParameterPartition

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


@dataclass(frozen=True)
class Memory:
    """Memory limits and data types for estimates.

    Data types are names or PyTorch dtypes.

    Attributes:
        micro_batch: Number of examples per forward pass of an estimate, or auto to limit the number
            by memory_budget. If a pass runs out of memory, it is repeated with half the number of
            examples, and later passes keep the smaller number. Results do not depend on this
            number. Default: all examples of a block.
        memory_budget: Memory for the gradients and rows of a pass if micro_batch is auto, in bytes
            or as an amount such as 8GiB. Default: 512 MiB on a CPU, or less if less is free. On a
            GPU, auto then starts with all examples of a block.
        gram_dtype: Data type of kernels and factors, float32 or float64. Default: the data type of
            the weights.
        rows_dtype: Data type in which ntk estimators store Jacobian rows. With bfloat16, rows take
            half the memory of float32. Products are computed in gram_dtype. Default: the data type
            of the weights.
        rows_device: Device on which ntk estimators store Jacobian rows. The device cpu stores them
            in the memory of the host. Default: the device of the weights.
        autocast: Data type of mixed-precision passes, which must be bfloat16. It does not affect
            kernels and factors. Default: no mixed precision.

    Examples:
        >>> from evigrad import Memory
        >>> Memory(micro_batch="auto", memory_budget="8GiB", rows_dtype="bfloat16").rows_dtype
        'bfloat16'

    See also: docs/scale.md.
    """

    micro_batch: int | Literal["auto"] | None = None
    memory_budget: int | str | None = None
    gram_dtype: torch.dtype | Literal["float32", "float64"] | None = None
    rows_dtype: torch.dtype | Literal["bfloat16", "float32", "float64"] | None = None
    rows_device: torch.device | str | None = None
    autocast: torch.dtype | Literal["bfloat16"] | None = None

    def resolved(self) -> dict[str, Any]:
        """Return the fields of ``Settings``, with names and amounts converted.

        Raises:
            ConfigurationError: If a name or an amount is invalid.
        """
        return {
            "micro_batch": self.micro_batch,
            "memory_budget": as_bytes("memory_budget", self.memory_budget),
            "gram_dtype": as_dtype("gram_dtype", self.gram_dtype),
            "rows_dtype": as_dtype("rows_dtype", self.rows_dtype),
            "rows_device": as_device("rows_device", self.rows_device),
            "autocast": as_dtype("autocast", self.autocast),
        }


def as_dtype(what: str, value: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype with a name such as ``"bfloat16"``.

    Raises:
        ConfigurationError: If the name is invalid. The message names the setting ``what``.
    """
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigurationError(
            f"{what} must be one of {', '.join(DTYPES)}, got '{value}'.{nearest(name, DTYPES)}"
        )
    return getattr(torch, name)


def as_bytes(what: str, value: int | str | None) -> int | None:
    """Return an amount of memory, such as ``"8GiB"``, as a number of bytes.

    Raises:
        ConfigurationError: If the amount is invalid. The message names the setting ``what``.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", value.strip().lower())
    if match is None or match[2] not in UNITS or float(match[1]) * UNITS[match[2]] < 1:
        raise ConfigurationError(
            f"{what} must be a number of bytes, or an amount such as 8GiB or 500MB, got '{value}'."
        )
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True)
class Settings:
    """How an ``Evidence`` computes estimates. The docstring of ``Evidence`` explains the fields.

    Raises:
        ConfigurationError: If a value is invalid.
    """

    sharing: str
    parameter_partition: ParameterPartition
    micro_batch: int | Literal["auto"] | None = None
    memory_budget: int | None = None
    gram_dtype: torch.dtype | None = None
    rows_dtype: torch.dtype | None = None
    rows_device: torch.device | None = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        size, budget = self.micro_batch, self.memory_budget
        if isinstance(size, str) and size != "auto":
            raise ConfigurationError(
                f"micro_batch must be a positive integer, 'auto' or None, got '{size}'."
            )
        if size not in (None, "auto"):
            check_count("micro_batch", size)
        if budget is not None:
            check_count("memory_budget", budget)
            if size != "auto":
                raise ConfigurationError(
                    "memory_budget has no effect without micro_batch='auto'. Set"
                    " micro_batch='auto', or omit memory_budget."
                )
        # float16 is not an option, because derivatives of an evidence would exceed its range.
        if self.rows_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
            raise ConfigurationError(
                "rows_dtype must be torch.bfloat16, torch.float32, torch.float64 or None, got"
                f" {self.rows_dtype!r}."
            )
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigurationError(
                f"autocast must be torch.bfloat16 or None, got {self.autocast!r}."
            )
        if self.gram_dtype not in (None, torch.float32, torch.float64):
            raise ConfigurationError(
                f"gram_dtype must be torch.float32, torch.float64 or None, got {self.gram_dtype!r}."
            )

    def check_fits(self, estimator: Estimator) -> None:
        """Raise an error for settings that the estimator does not use."""
        rows_are_stored = (self.rows_dtype or self.rows_device) is not None
        if rows_are_stored and not estimator.structure_type.keeps_rows:
            raise ConfigurationError(
                f"{estimator.name} does not store rows. Use rows_dtype and rows_device only with"
                " ntk estimators."
            )
        uses_partition = "parameter_partition" in estimator.structure_type.settings
        if self.parameter_partition != "tensor" and not uses_partition:
            raise ConfigurationError(
                f"parameter_partition has no effect with {estimator.name}, got"
                f" {self.parameter_partition!r}. Use an estimator of the structure blockdiag, or"
                " remove parameter_partition."
            )
        if self.gram_dtype is not None and estimator.custom is not None:
            raise ConfigurationError(
                f"gram_dtype has no effect on the custom curvature {estimator.structure!r}. Omit"
                " it, and convert the rows in the curvature's collect, for example with"
                " scaled_rows(rows, root.scale, torch.float64)."
            )


def check_model(
    estimator: Estimator,
    num_data: int,
    root: str,
    temperature: float,
    anchoring: Anchoring | None = None,
    log_det_weight: float = 1.0,
) -> None:
    """Raise an error for settings that are invalid or do not match the estimator."""
    check_count("num_data", num_data)
    if estimator.exceeds(num_data):
        full_name = estimator.name.replace(f"-{estimator.subset}-", "-N-", 1)
        raise ConfigurationError(
            f"{estimator.name} uses subsets of {estimator.subset} examples, but num_data is"
            f" {num_data}. Use {full_name!r}, which uses all examples, or a smaller subset."
        )
    check_choice("root", root, ROOTS)
    if anchoring is not None and not estimator.anchored:
        raise ConfigurationError(
            f"{estimator.name} has no anchors. Omit anchoring=..., or use an estimator with"
            " anchors, such as 'ntk-400-rows-anchored'."
        )
    if estimator.anchored and root == "subblock":
        raise ConfigurationError(
            f"{estimator.name} cannot use root='subblock', because the rows of this root differ"
            " between blocks and cannot be anchors. Use root='eigen' or root='fisher'."
        )
    check_positive("temperature", temperature)
    check_positive("log_det_weight", log_det_weight)
