"""The settings of an evidence, checked once."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch

from evigrad.blocks.anchors import Anchoring
from evigrad.curvature import ParameterPartition
from evigrad.engine.checks import as_device, check_choice, check_count, check_positive
from evigrad.errors import ConfigurationError, nearest
from evigrad.estimators import ROOTS, EstimatorSpec

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
    """The settings of an ``Evidence``, which says what each means.

    Raises:
        ConfigurationError: If a value does not exist or does not fit.
    """

    spec: EstimatorSpec
    num_data: int
    root: str
    sharing: str
    parameter_partition: ParameterPartition
    temperature: float
    micro_batch: int | Literal["auto"] | None = None
    memory_budget: int | None = None
    gram_dtype: torch.dtype | None = None
    rows_dtype: torch.dtype | None = None
    rows_device: torch.device | None = None
    autocast: torch.dtype | None = None
    plain_curvature: bool = False
    anchoring: Anchoring | None = None

    def __post_init__(self) -> None:
        spec = self.spec
        check_count("num_data", self.num_data)
        if spec.subset is not None and not spec.rows and spec.subset > self.num_data:
            raise ConfigurationError(
                f"{spec.name} takes subsets of {spec.subset} data, but num_data is {self.num_data};"
                " use a smaller subset, or N for all the data."
            )
        check_choice("root", self.root, ROOTS)
        if self.anchoring is not None and not spec.anchored:
            raise ConfigurationError(
                f"{spec.name} has no anchors: leave anchoring=... away, or take a name as"
                " 'ntk-400-rows-anchored'."
            )
        if spec.anchored and self.root == "subblock":
            raise ConfigurationError(
                f"{spec.name}: a 'subblock' root has other rows in every block, which can be no"
                " anchors. Take root='eigen' or root='fisher'."
            )
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        check_positive("temperature", self.temperature)
        self._check_micro_batches()
        self._check_types()

    def _check_micro_batches(self) -> None:
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

    def _check_types(self) -> None:
        spec = self.spec
        # Not float16: derivatives of an evidence span more orders of magnitude than it has.
        if self.rows_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
            raise ConfigurationError(
                "rows_dtype is torch.bfloat16, torch.float32, torch.float64 or None, not"
                f" {self.rows_dtype!r}."
            )
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigurationError(f"autocast is torch.bfloat16 or None, not {self.autocast!r}.")
        if self.autocast is not None and spec.curvature == "hessian":
            raise ConfigurationError(
                f"{spec.name}: second derivatives are not taken under autocast."
            )
        if self.gram_dtype not in (None, torch.float32, torch.float64):
            raise ConfigurationError(
                f"gram_dtype is torch.float32, torch.float64 or None, not {self.gram_dtype!r}."
            )
        if not spec.facts.keeps_rows and (self.rows_dtype or self.rows_device) is not None:
            raise ConfigurationError(
                f"{spec.name} keeps no rows: rows_dtype and rows_device are for ntk estimators."
            )
