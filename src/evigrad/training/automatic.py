"""Subsets as large as the memory holds: names with ``auto`` in the place of SUBSET."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from evigrad.curvature import available_bytes
from evigrad.errors import ConfigurationError, MemoryBudgetError
from evigrad.estimators import EstimatorSpec
from evigrad.evidence import Evidence
from evigrad.micro_batches import FREE_SHARE
from evigrad.training.estimator_options import as_bytes, is_automatic
from evigrad.training.run_directory import RunDirectory
from evigrad.training.settings import Settings

# Of what is free, the part that micro_batch="auto" leaves to what an estimator keeps: its passes
# take as many data at once as the rest holds.
KEPT_SHARE = 0.5

Some = TypeVar("Some", bound=Settings)


def with_subset(name: str, subset: int) -> str:
    """An automatic name with a number.

    Args:
        name: As ``ntk-auto-1``.
        subset: The number.

    Returns:
        As ``ntk-700-1``.

    Raises:
        ConfigurationError: If that is no estimator.
    """
    structure, _, *rest = name.split("-")
    return EstimatorSpec.parse("-".join([structure, str(subset), *rest])).name


def largest_subset(
    evidence: Evidence,
    estimator: str,
    x: Tensor,
    y: Tensor,
    micro_batch: int | str | None = None,
    memory_budget: int | str | None = None,
) -> str:
    """The name with the largest subset that the memory holds.

    What counts is what the estimator keeps of a block and works with, as predicted where a
    structure that would not fit is refused, and what its passes take at once.

    Args:
        evidence: Of the same estimator with some subset.
        estimator: As ``ntk-auto-1``.
        x: Inputs of two data or more.
        y: Their targets.
        micro_batch: As for ``fit``.
        memory_budget: As for ``fit``.

    Returns:
        The name with a number, at most that of the data.

    Raises:
        ConfigurationError: If the system does not tell how much memory is free, and
            ``memory_budget`` does not say it.
        MemoryBudgetError: If not even a subset of one fits.
    """
    budget = as_bytes("memory_budget", memory_budget)
    if budget is None:
        free = available_bytes(x.device)
        if free is None:
            raise ConfigurationError(
                f"{estimator}: this system does not tell how much memory is free; say it as"
                " memory_budget=..., or name a number in the place of auto."
            )
        budget = int(FREE_SHARE * free)
        if micro_batch == "auto":
            budget = int(KEPT_SHARE * budget)
    per_datum = 0.0 if micro_batch == "auto" else evidence.pass_bytes(x[:2], y[:2])
    at_once = micro_batch if isinstance(micro_batch, int) else evidence.num_data

    def needed(subset: int) -> float:
        kept = evidence.predicted_bytes(x, estimator=with_subset(estimator, subset))
        return kept + per_datum * min(subset, at_once)

    least, most = 1, evidence.num_data
    if needed(least) > budget:
        raise MemoryBudgetError(
            f"{estimator}: a subset of one needs {needed(least) / 2**20:.3g} MiB, and there are"
            f" {budget / 2**20:.3g} for it. Take another structure, or more memory_budget."
        )
    while least < most:
        middle = (least + most + 1) // 2
        if needed(middle) <= budget:
            least = middle
        else:
            most = middle - 1
    return with_subset(estimator, least)


def with_largest_subset(settings: Some, evidence: Evidence, x: Tensor, y: Tensor) -> Some:
    """The settings with a number in the place of ``auto``.

    Args:
        settings: With an automatic estimator.
        evidence: As for ``largest_subset``.
        x: Inputs of two data or more.
        y: Their targets.

    Returns:
        Settings of a run that can be repeated.
    """
    asked, micro_batch = settings.estimator or "", settings.micro_batch
    found = largest_subset(evidence, asked, x, y, micro_batch, settings.memory_budget)
    return _chosen(settings, found)


def recorded_estimator(settings: Settings, run_dir: str | Path | RunDirectory | None) -> Settings:
    """The settings with the subset that a run was begun with, where it was automatic.

    Args:
        settings: Of the call.
        run_dir: Folder of the run.

    Returns:
        The same, or with the recorded name of the estimator.
    """
    asked = settings.estimator
    if asked is None or run_dir is None or not is_automatic(asked):
        return settings
    path = run_dir.path if isinstance(run_dir, RunDirectory) else Path(run_dir)
    try:
        found = json.loads((path / "config.json").read_text(encoding="utf-8"))["estimator"]
        subset = EstimatorSpec.parse(found).subset
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return settings  # no run as yet, or nothing that can be read
    if subset is None or with_subset(asked, subset) != found:
        return settings
    return _chosen(settings, found)


def _chosen(settings: Some, estimator: str) -> Some:
    """Settings with an estimator in the place of an automatic one."""
    # A budget for the subset alone is used up.
    budget = settings.memory_budget if settings.micro_batch == "auto" else None
    return replace(settings, estimator=estimator, memory_budget=budget)
