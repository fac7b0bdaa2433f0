"""The settings of an evidence, checked once."""

from dataclasses import dataclass

import torch

from evigrad.blocks.anchors import Anchoring
from evigrad.curvature import ParameterPartition
from evigrad.engine.checks import check_choice, check_count, check_positive
from evigrad.errors import ConfigurationError
from evigrad.estimators import ROOTS, EstimatorSpec


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
    micro_batch: int | str | None = None
    memory_budget: int | None = None
    gram_dtype: torch.dtype | None = None
    rows_dtype: torch.dtype | None = None
    rows_device: torch.device | None = None
    autocast: torch.dtype | None = None
    gradient: str = "two-pass"
    anchoring: Anchoring | None = None

    def __post_init__(self) -> None:
        check_count("num_data", self.num_data)
        _check_spec(self.spec, self.num_data)
        check_choice("root", self.root, ROOTS)
        _check_anchored(self.spec, self.root, self.anchoring)
        check_choice("sharing", self.sharing, ("expand", "reduce"))
        check_positive("temperature", self.temperature)
        _check_passes(
            self.spec,
            self.micro_batch,
            self.memory_budget,
            self.gram_dtype,
            self.rows_dtype,
            self.autocast,
        )
        _check_rows(self.spec, self.rows_dtype, self.rows_device)
        check_choice("gradient", self.gradient, ("two-pass", "one-graph"))


def _check_passes(
    spec: EstimatorSpec,
    micro_batch: object,
    memory_budget: object,
    gram_dtype: object,
    rows_dtype: object,
    autocast: object,
) -> None:
    """Refuse sizes and types of passes over the data that do not exist."""
    if micro_batch not in (None, "auto"):
        if isinstance(micro_batch, str):
            raise ConfigurationError(
                f"micro_batch is a positive integer, 'auto' or None, not '{micro_batch}'."
            )
        check_count("micro_batch", micro_batch)
    if memory_budget is not None:
        check_count("memory_budget", memory_budget)
    if memory_budget is not None and micro_batch != "auto":
        raise ConfigurationError(
            "memory_budget is what micro_batch='auto' keeps to: say micro_batch='auto', or leave"
            " memory_budget away."
        )
    # Not float16: derivatives of an evidence span more orders of magnitude than it has.
    if rows_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise ConfigurationError(
            "rows_dtype is torch.bfloat16, torch.float32, torch.float64 or None, not"
            f" {rows_dtype!r}."
        )
    if autocast not in (None, torch.bfloat16):
        raise ConfigurationError(f"autocast is torch.bfloat16 or None, not {autocast!r}.")
    if autocast is not None and spec.curvature == "hessian":
        raise ConfigurationError(f"{spec.name}: second derivatives are not taken under autocast.")
    if gram_dtype not in (None, torch.float32, torch.float64):
        raise ConfigurationError(
            f"gram_dtype is torch.float32, torch.float64 or None, not {gram_dtype!r}."
        )


def _check_rows(spec: EstimatorSpec, dtype: torch.dtype | None, device: object) -> None:
    """Refuse settings of kept rows for a structure that keeps none."""
    if spec.structure != "ntk" and (dtype is not None or device is not None):
        raise ConfigurationError(
            f"{spec.name} keeps no rows: rows_dtype and rows_device are for ntk estimators."
        )


def _check_spec(spec: EstimatorSpec, num_data: int) -> None:
    """Refuse subsets that are larger than the data."""
    if spec.subset is not None and not spec.rows and spec.subset > num_data:
        raise ConfigurationError(
            f"{spec.name} takes subsets of {spec.subset} data, but num_data is {num_data}; use a"
            " smaller subset, or N for all the data."
        )


def _check_anchored(spec: EstimatorSpec, root: str, anchoring: object) -> None:
    """Refuse settings of anchors without anchors, and a root whose rows change between blocks."""
    if anchoring is not None and not spec.anchored:
        raise ConfigurationError(
            f"{spec.name} has no anchors: leave anchoring=... away, or take a name as"
            " 'ntk-400-rows-anchored'."
        )
    if spec.anchored and root == "subblock":
        raise ConfigurationError(
            f"{spec.name}: a 'subblock' root has other rows in every block, which can be no"
            " anchors. Take root='eigen' or root='fisher'."
        )
