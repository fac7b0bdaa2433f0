"""The settings of an evidence, checked once."""

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
    """How much memory estimates take, and in which types they compute.

    Types are given by name or as those of PyTorch.

    Attributes:
        micro_batch: Data in a forward pass of an estimate, or auto, as many as the memory holds;
            half of them from where memory fails. It changes memory, not results. Default: all.
        memory_budget: Memory that such a pass may take, with micro_batch auto: bytes, or an amount
            as 8GiB. Default: most of what is free.
        gram_dtype: Type of kernels and factors: float32 or float64. Default: the weights'.
        rows_dtype: Type in which ntk keeps its rows, as bfloat16 for half the memory; products are
            computed in gram_dtype. Default: the weights'.
        rows_device: Where ntk keeps its rows: cpu is the host's memory, pinned beside a GPU.
            Default: where the weights are.
        autocast: Type of mixed-precision passes, as bfloat16; kernels and factors keep theirs.
            Default: none.
    """

    micro_batch: int | Literal["auto"] | None = None
    memory_budget: int | str | None = None
    gram_dtype: torch.dtype | Literal["float32", "float64"] | None = None
    rows_dtype: torch.dtype | Literal["bfloat16", "float32", "float64"] | None = None
    rows_device: torch.device | str | None = None
    autocast: torch.dtype | Literal["bfloat16"] | None = None

    def resolved(self) -> dict[str, Any]:
        """Return the fields for ``Settings``: types and devices for names, amounts in bytes.

        Raises:
            ConfigurationError: If a name or an amount does not exist.
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


@dataclass(frozen=True)
class Settings:
    """How an ``Evidence``, which says what each means, computes estimates.

    Raises:
        ConfigurationError: If a value does not exist.
    """

    sharing: str
    parameter_partition: ParameterPartition
    micro_batch: int | Literal["auto"] | None = None
    memory_budget: int | None = None
    gram_dtype: torch.dtype | None = None
    rows_dtype: torch.dtype | None = None
    rows_device: torch.device | None = None
    autocast: torch.dtype | None = None
    plain_curvature: bool = False

    def __post_init__(self) -> None:
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        size, budget = self.micro_batch, self.memory_budget
        if isinstance(size, str) and size != "auto":
            raise ConfigurationError(
                f"micro_batch is a positive integer, 'auto' or None, not '{size}'."
            )
        if size not in (None, "auto"):
            check_count("micro_batch", size)
        if budget is not None:
            check_count("memory_budget", budget)
            if size != "auto":
                raise ConfigurationError(
                    "memory_budget is what micro_batch='auto' keeps to: say micro_batch='auto', or"
                    " leave memory_budget away."
                )
        # Not float16: derivatives of an evidence span more orders of magnitude than it has.
        if self.rows_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
            raise ConfigurationError(
                "rows_dtype is torch.bfloat16, torch.float32, torch.float64 or None, not"
                f" {self.rows_dtype!r}."
            )
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigurationError(f"autocast is torch.bfloat16 or None, not {self.autocast!r}.")
        if self.gram_dtype not in (None, torch.float32, torch.float64):
            raise ConfigurationError(
                f"gram_dtype is torch.float32, torch.float64 or None, not {self.gram_dtype!r}."
            )

    def check_fits(self, estimator: Estimator) -> None:
        """Refuse settings that an estimator has no use for."""
        rows_are_stored = (self.rows_dtype or self.rows_device) is not None
        if rows_are_stored and not estimator.kind.keeps_rows:
            raise ConfigurationError(
                f"{estimator.name} keeps no rows: rows_dtype and rows_device are for ntk"
                " estimators."
            )


def check_model(
    estimator: Estimator,
    num_data: int,
    root: str,
    temperature: float,
    anchoring: Anchoring | None = None,
) -> None:
    """Refuse numbers and roots that do not exist or do not fit the estimator."""
    check_count("num_data", num_data)
    if estimator.subset is not None and not estimator.rows and estimator.subset > num_data:
        raise ConfigurationError(
            f"{estimator.name} takes subsets of {estimator.subset} data, but num_data is"
            f" {num_data}; use a smaller subset, or N for all the data."
        )
    check_choice("root", root, ROOTS)
    if anchoring is not None and not estimator.anchored:
        raise ConfigurationError(
            f"{estimator.name} has no anchors: leave anchoring=... away, or take a name as"
            " 'ntk-400-rows-anchored'."
        )
    if estimator.anchored and root == "subblock":
        raise ConfigurationError(
            f"{estimator.name}: a 'subblock' root has other rows in every block, which can be no"
            " anchors. Take root='eigen' or root='fisher'."
        )
    check_positive("temperature", temperature)
