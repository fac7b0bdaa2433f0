"""Bounds on the log evidence along a hyperparameter, for weights trained once (Figures 3 to 6)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from evigrad.experiments.cases import Case, Mean, Row
from evigrad.experiments.definition import Experiment
from evigrad.experiments.figures import bound_curves
from evigrad.experiments.plan import curve, grid_of, training
from evigrad.experiments.styles import in_order
from evigrad.experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Of a value in nats per datum: less than this is rounding in single precision.
_ROUNDING = 2e-6


def cases(experiment: Experiment) -> list[Case]:
    """A curve for each panel, estimator and seed.

    Args:
        experiment: Of this kind.

    Returns:
        The cases.
    """
    shared = experiment.take("training")
    found = []
    for name, panel in experiment.take("panels").items():
        for estimator, label in experiment.take("curves").items():
            for seed in experiment.seeds:
                trained = training(shared, panel.get("training", {}), seed=seed)
                job = curve(
                    trained,
                    estimator,
                    panel["hyperparameter"],
                    grid_of(panel["grid"]),
                    experiment.content.get("blocks"),
                )
                keys = {"panel": name, "estimator": estimator, "label": label or estimator}
                found.append(Case(keys, seed, {"curve": job}, _read))
    return found


def _read(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    found = results["curve"]
    return {"log_evidence": found["mean"], "draw_error": found["sem"]}


def figure(experiment: Experiment, rows: list[Row]) -> "Figure":
    """Panels side by side, one line for each estimator.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        The figure.
    """
    return bound_curves(experiment, rows)


def table(experiment: Experiment, rows: list[Row]) -> Table:
    """Where each bound is highest, and how high.

    Args:
        experiment: Of this kind.
        rows: Its results.

    Returns:
        A row for each curve, in the order of the legend.
    """
    labels = in_order([row["label"] for row in rows], experiment)
    panels = list(experiment.take("panels"))
    rows = sorted(rows, key=lambda r: (panels.index(r["panel"]), labels.index(r["label"])))
    cells = []
    for row in rows:
        panel = experiment.take("panels")[row["panel"]]
        values = row["log_evidence"]
        best = max(range(len(values.mean)), key=values.mean.__getitem__)
        cells.append(
            [
                row["panel"],
                row["label"],
                f"{values.mean[best]:.3f}",
                f"{grid_of(panel['grid'])[best]:.3g}",
                str(values.count),
            ]
        )
    names = ("panel", "estimator", "highest, nats per datum", "there, hyperparameter", "seeds")
    return Table([Column(name) for name in names], cells, [row["panel"] for row in rows])


def remarks(experiment: Experiment, rows: list[Row]) -> list[str]:
    """Whether the orderings hold that theory demands.

    Args:
        experiment: With ``orderings``: lists of estimators, the higher bounds first.
        rows: Its results.

    Returns:
        What holds and what does not, in words.
    """
    found = []
    for chain in experiment.content.get("orderings", []):
        for panel in experiment.take("panels"):
            by_name = {
                row["estimator"]: row["log_evidence"] for row in rows if row["panel"] == panel
            }
            chosen = [(name, by_name[name]) for name in chain if name in by_name]
            pairs = list(zip(chosen, chosen[1:], strict=False))
            broken, seeds = [], set[int]()
            for (upper, above), (lower, below) in pairs:
                seeds |= above.by_seed.keys() & below.by_seed.keys()
                points, gaps = _gaps(above, below)
                if gaps:
                    broken.append(
                        f"{upper} lies below {lower} at {len(gaps)} of {points} points, by"
                        f" {max(gaps):.2g} nats per datum at most"
                    )
            if seeds:
                words = " ≥ ".join(name for name, _ in chosen)
                each = f"holds for each of {len(seeds)} seeds" if len(seeds) > 1 else "holds"
                verdict = "; ".join(broken) if broken else f"{each} at every point of the grid"
                found.append(f"{panel}: {words}: {verdict}.")
    return found


def _gaps(above: Mean, below: Mean) -> tuple[int, list[float]]:
    """Points of the curves of all common seeds, and by how much some of them are in disorder."""
    pairs = [
        pair
        for seed in above.by_seed.keys() & below.by_seed.keys()
        for pair in zip(above.by_seed[seed], below.by_seed[seed], strict=True)
    ]
    return len(pairs), [b - a for a, b in pairs if b - a > _ROUNDING * max(1.0, abs(a))]
