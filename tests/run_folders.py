"""Folders of runs, written without training anything."""

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def make_rows(
    epochs: int = 20,
    *,
    groups: int = 3,
    learned: bool = True,
    regression: bool = False,
    ranges: Mapping[str, float] | None = None,
) -> Rows:
    """Metrics as training has them: evaluated every 5 epochs, and learned from the fifth on.

    Precisions go from 1 to 10^g, the noise from 1 to 1/e, and ranges from 0.1 to what is given.
    """
    rows = []
    last = "squared_error" if regression else "accuracy"
    for epoch in range(1, epochs + 1):
        due = epoch % 5 == 0
        part = epoch / epochs if learned and epoch >= 5 else 0.0
        row: dict[str, Any] = {
            "epoch": epoch,
            "seconds": 0.5 * epoch,
            "loss": 2.0 * math.exp(-epoch / 5),
            "log_evidence": -1.0 - 1.0 / epoch if due and learned else None,
            "log_evidence_sem": 0.1 if due and learned else None,
            "hyper_steps": 10 * (epoch // 5) if learned else 0,
            "train_log_likelihood": -0.5 / epoch if due else None,
            f"train_{last}": 0.9 if due else None,
            "test_log_likelihood": -1.0 / epoch if due else None,
            f"test_{last}": 0.8 if due else None,
        }
        row |= {f"precision/layer{g}": 10.0 ** (g * part) for g in range(groups)}
        if regression:
            row["noise"] = math.exp(-part)
        for name, end in (ranges or {}).items():
            row[f"range/{name}"] = 0.1 + (end - 0.1) * part
        rows.append(row)
    return rows


def write_run(
    folder: Path,
    rows: Rows | None = None,
    *,
    estimator: str | None = "ntk-100-1",
    options: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Write metrics and settings of a run, and what the command line adds where that is given."""
    rows = make_rows(learned=estimator is not None) if rows is None else rows
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    defaults = {"estimator": estimator, "epochs": len(rows), "num_data": 12345, "lr": 1e-3}
    (folder / "config.json").write_text(json.dumps(defaults | settings), encoding="utf-8")
    if options is not None:
        # Every JSON is a YAML too.
        (folder / "config.yaml").write_text(json.dumps(options), encoding="utf-8")
    if results is not None:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder
