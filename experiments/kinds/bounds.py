"""Bounds on the log evidence along a hyperparameter, for fixed weights (Figures 3 to 6)."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from evigrad.core.names import Estimator
from experiments import figures
from experiments.along import make_grid
from experiments.cases import Case, Mean, Row
from experiments.definition import FOLDER, Experiment, Options
from experiments.jobs import curve, curves, training
from experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Relative differences of log evidences below this are rounding errors of single precision.
_ROUNDING = 2e-6
# Ends the labels of bounds on subsets that are filled class by class.
_GROUPED = ", grouped"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values of a hyperparameter between two limits, possibly on a logarithmic scale."""

    start: float
    stop: float
    count: int
    log: bool = False

    def __post_init__(self) -> None:
        self.values()  # raises an error for an invalid grid

    def values(self) -> list[float]:
        """Return the values, with six digits."""
        return make_grid(self.start, self.stop, self.count, self.log)


@dataclass(frozen=True, kw_only=True)
class BoundPanel:
    """A panel: the hyperparameter of its horizontal axis, and options of its training.

    Attributes:
        together: Estimators of one job, which one kernel per point serves. Experiments share the
            job if their lists are equal.
        seeds: Seeds. Default: the seeds of the experiment.
    """

    axis: str
    hyperparameter: str
    grid: Grid
    title: str = ""
    training: Options = field(default_factory=dict)
    together: list[str] = field(default_factory=list)
    seeds: list[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Bounds(Experiment):
    """Bounds along hyperparameters.

    Attributes:
        panels: Panels by name.
        curves: Estimator to the label of its curve, in all panels.
        orderings: Lists of estimators in the order that the theory demands, higher bounds first.
        blocks: Maximum number of blocks of a partition. None for all.
        paper: Figures of the paper whose curves are drawn and compared.
    """

    panels: dict[str, BoundPanel]
    curves: dict[str, str | None]
    orderings: list[list[str]] = field(default_factory=list)
    blocks: int | None = None
    paper: list[str] = field(default_factory=list)

    def cases(self) -> list[Case]:
        """Return a curve for each panel, estimator and seed."""
        cases = []
        for name, panel in self.panels.items():
            grid = panel.grid.values()
            for seed in panel.seeds or self.seeds:
                trained = training(self.training, panel.training, seed=seed)
                for estimator, label in self.curves.items():
                    if estimator in panel.together and self.blocks is None:
                        job = curves(trained, panel.together, panel.hyperparameter, grid)
                        read = partial(_read, estimator=estimator)
                    else:
                        job = curve(trained, estimator, panel.hyperparameter, grid, self.blocks)
                        read = _read
                    keys = {"panel": name, "estimator": estimator, "label": label or estimator}
                    cases.append(Case(keys, seed, {"curve": job}, read))
        return cases

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """Return the experiment with other seeds, also in panels with their own seeds."""
        panels = {name: replace(panel, seeds=None) for name, panel in self.panels.items()}
        return replace(self, seeds=list(seeds), panels=panels)

    def figure(self, rows: list[Row]) -> "Figure":
        """Return panels side by side, with one line per estimator. Grouped subsets are below."""
        is_grouped = {name: Estimator.parse(name).grouped for name in self.curves}
        drawn = [self._panels([row for row in rows if not is_grouped[row["estimator"]]])]
        if any(is_grouped.values()):
            compared = [
                r for r in rows if is_grouped[r["estimator"]] or r["label"] in self.reference
            ]
            drawn.append(self._panels(compared, _GROUPED))
        drawn = [row for row in drawn if row]
        return figures.panels(drawn, reference=self.reference, ordered=self.ordered, mark_tops=True)

    def _panels(self, rows: list[Row], ending: str = "") -> list[figures.Panel]:
        """Return a panel per hyperparameter, with labels that lose their ending."""
        drawn = []
        for name, panel in self.panels.items():
            curves = [
                figures.Curve(
                    row["label"].removesuffix(ending),
                    panel.grid.values(),
                    row["log_evidence"].mean,
                    row["draw_error"].mean,
                )
                for row in rows
                if row["panel"] == name
            ]
            curves += [
                figures.Curve(row["label"].removesuffix(ending), *published, published=True)
                for row in rows
                if row["panel"] == name and (published := self._published(row))
            ]
            unit = "" if drawn else "log evidence bound\n(nats per example)"
            title = (panel.title or name) + ending
            if curves:
                drawn.append(figures.Panel(title, panel.axis, unit, curves, panel.grid.log, True))
        return drawn

    def table(self, rows: list[Row]) -> Table:
        """Return the maximum of each bound and its position, in the order of the legend.

        With curves of the paper, also return their maxima, the lowest and highest maximum of a
        seed, and the largest distance between the curves at the positions that the paper's picture
        shows.
        """
        names = ["panel", "estimator", "maximum, nats per example", "at hyperparameter", "seeds"]
        if self.paper:
            names += ["maxima of the seeds"]
            names += ["paper: maximum", "paper: at hyperparameter", "largest distance"]
        cells = []
        for row in self.in_order(rows, "panel", list(self.panels)):
            panel, values = self.panels[row["panel"]], row["log_evidence"]
            top, place = _top(panel.grid.values(), values.mean)
            cells.append([row["panel"], row["label"], f"{top:.3f}", place, str(values.count)])
            if not self.paper:
                continue
            tops = sorted(max(curve) for curve in values.by_seed.values())
            cells[-1].append(f"{tops[0]:.2f} to {tops[-1]:.2f}" if len(tops) > 1 else "–")
            if published := self._published(row):
                top, place = _top(*published)
                gap = _largest_gap(panel.grid, values.mean, *published)
                cells[-1] += [f"{top:.2f}", place, f"{gap:.2f}"]
            else:
                cells[-1] += ["–", "–", "–"]
        return Table([Column(name) for name in names], cells, [cell[0] for cell in cells])

    def _closest_seeds(self, rows: list[Row]) -> Iterator[str]:
        """Yield for each panel the seed whose maxima are closest to the paper's."""
        for panel in self.panels:
            gaps: dict[int, list[tuple[float, str]]] = {}
            shown = [(row, self._published(row)) for row in rows if row["panel"] == panel]
            compared = [(row, published) for row, published in shown if published is not None]
            for row, (_, theirs) in compared:
                for seed, ours in row["log_evidence"].by_seed.items():
                    gaps.setdefault(seed, []).append((abs(max(ours) - max(theirs)), row["label"]))
            # Seeds that lack a curve are not comparable.
            whole = {
                seed: max(seed_gaps)
                for seed, seed_gaps in gaps.items()
                if len(seed_gaps) == len(compared)
            }
            if len(whole) > 1:
                seed = min(whole, key=lambda seed: whole[seed][0])
                gap, label = whole[seed]
                yield (
                    f"Seed {seed} of {len(whole)} seeds is closest to the paper ({panel}). Its"
                    f" maxima differ by at most {gap:.2f} nats per example ({label})."
                )

    def _published(self, row: Row) -> tuple[list[float], list[float]] | None:
        """Return positions and values of the paper's curve, if its pictures show it."""
        curves = published_curves()
        keys = [(figure, row["panel"], row["estimator"]) for figure in self.paper]
        return next((curves[key] for key in keys if key in curves), None)

    def remarks(self, rows: list[Row]) -> list[str]:
        """Return whether the orderings hold, and which seed is closest to the paper's maxima."""
        remarks, broken, seeds = [*self._closest_seeds(rows)], list[str](), set[int]()
        for chain, panel in product(self.orderings, self.panels):
            bounds = {r["estimator"]: r["log_evidence"] for r in rows if r["panel"] == panel}
            chosen = [name for name in chain if name in bounds]
            for upper, lower in zip(chosen, chosen[1:], strict=False):
                common, points, gaps = _gaps(bounds[upper], bounds[lower])
                seeds |= common
                if gaps:
                    broken.append(
                        f"{upper} lies below {lower} at {len(gaps)} of {points} points ({panel}),"
                        f" by {max(gaps):.2g} nats per example at most."
                    )
        if seeds and not broken:
            remarks.append("All orderings of the theory hold at every point, for every seed.")
        return remarks + broken


@cache
def published_curves() -> dict[tuple[str, str, str], tuple[list[float], list[float]]]:
    """Return positions and values of the paper's curves by figure, panel and estimator.

    The curves are read off Figures 3 and 4 of Immer et al. (2023), *Stochastic Marginal Likelihood
    Gradients using Neural Tangent Kernels*, to about 0.02 nats and 3 % of a precision. Points that
    other curves or a legend cover are missing.
    """
    published: dict[tuple[str, str, str], tuple[list[float], list[float]]] = {}
    with (FOLDER / "curves.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            key = (line["figure"], line["panel"], line["estimator"])
            x, y = published.setdefault(key, ([], []))
            x.append(float(line["hyperparameter"]))
            y.append(float(line["log_evidence"]))
    return published


def _top(x: Sequence[float], y: Sequence[float]) -> tuple[float, str]:
    """Return the maximum of a curve and its position, as text."""
    best = max(range(len(y)), key=y.__getitem__)
    return y[best], f"{x[best]:.3g}"


def _largest_gap(
    grid: Grid, ours: Sequence[float], x: Sequence[float], theirs: Sequence[float]
) -> float:
    """Return the largest distance of a curve from the points (x, theirs) within its grid.

    The curve is interpolated linearly.
    """
    scale = np.log if grid.log else np.asarray
    at = np.interp(scale(x), scale(grid.values()), ours, left=np.nan, right=np.nan)
    return float(np.nanmax(np.abs(at - theirs)))


def _read(results: Mapping[str, dict[str, Any]], estimator: str | None = None) -> dict[str, Any]:
    bound = results["curve"] if estimator is None else results["curve"][estimator]
    return {"log_evidence": bound["mean"], "draw_error": bound["sem"]}


def _gaps(above: Mean, below: Mean) -> tuple[set[int], int, list[float]]:
    """Return common seeds, number of points, and the size of each violation of the order."""
    seeds = above.by_seed.keys() & below.by_seed.keys()
    pairs = [
        pair
        for seed in seeds
        for pair in zip(above.by_seed[seed], below.by_seed[seed], strict=True)
    ]
    return seeds, len(pairs), [b - a for a, b in pairs if b - a > _ROUNDING * max(1.0, abs(a))]
