"""The bounds and their relations (Figure 2)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evigrad.plots import LIGHT, new_figure
from experiments.cases import Case, Row
from experiments.definition import Experiment
from experiments.tables import Column, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Box:
    """A bound in the overview.

    Attributes:
        title: Title.
        formula: Term that replaces ℓ(I) in the log evidence.
        names: Estimators.
        source: Theorem or argument for the bound.
        code: Modules under ``src/evigrad``.
        place: Column and row in the figure.
        is_bound: Whether the theory guarantees the bound.
        is_new: Whether the bound is not in the paper.
    """

    title: str
    formula: str
    names: str
    source: str
    code: str
    place: tuple[int, int]
    is_bound: bool = True
    is_new: bool = False


BOXES = {
    "exact": Box(
        "linearized Laplace",
        r"$\ell(I)=\log|I+P_0^{-1}H|=\log|I+S|$",
        "full-N-C = ntk-N-C",
        "equation 4 and its dual, the kernel form",
        "core/curvature/dense.py, ntk.py",
        (1, 2),
    ),
    "blocks": Box(
        "blocks of parameters",
        r"$\Sigma_b\,\log|I+P_{0,b}^{-1}H_{bb}|$",
        "blockdiag-N-C, diag-N-C",
        "Theorem 1",
        "core/curvature/dense.py, diagonal.py",
        (0, 1),
    ),
    "kfac": Box(
        "Kronecker factors",
        r"$\Sigma_b\,\log|I+P_{0,b}^{-1}A_b\otimes G_b|$",
        "kfac-N-C, kfac-m-1, …",
        "an approximation",
        "core/curvature/kfac.py",
        (0, 0),
        is_bound=False,
    ),
    "subsets": Box(
        "subsets of data",
        r"$\Sigma_m\,\ell(B_m)$, estimated by $M\,\ell(B_m)$",
        "ntk-m-C, ntk-m-C-grouped",
        "Theorem 2",
        "core/partition.py, core/curvature/ntk.py",
        (2, 1),
    ),
    "outputs": Box(
        "subsets of outputs",
        r"rows $(n,d)$ of one or some outputs $d$",
        "ntk-m-1, ntk-m-k, …-iid",
        "Theorem 2 (root fisher or eigen)",
        "core/partition.py, core/roots.py",
        (2, 0),
        is_bound=False,
    ),
    "anchored": Box(
        "anchored rows",
        r"$\ell(Z)+\Sigma_m\,\ell(B_m|Z)$",
        "ntk-k-rows-anchored",
        "conditioning never increases an entropy",
        "blocks/anchors/, core/curvature/anchored.py",
        (1, 1),
        is_new=True,
    ),
    "doubly": Box(
        "both partitions",
        r"$\Sigma_m\,\Sigma_b\,\log|I+P_{0,b}^{-1}H_{bb}^{(m)}|$",
        "blockdiag-m-C, diag-m-C, …",
        "Theorem 3 and the doubly lower bound",
        "core/curvature/ × core/partition.py",
        (1, 0),
    ),
}
ARROWS = (
    ("exact", "blocks"),
    ("exact", "anchored"),
    ("exact", "subsets"),
    ("anchored", "subsets"),
    ("blocks", "kfac"),
    ("blocks", "doubly"),
    ("subsets", "doubly"),
    ("subsets", "outputs"),
)
_WIDTH, _HEIGHT = 0.92, 0.74


@dataclass(frozen=True, kw_only=True)
class Overview(Experiment):
    """The overview of the bounds, which needs no runs."""

    def cases(self) -> list[Case]:
        """Return no cases."""
        return []

    def figure(self, rows: list[Row]) -> "Figure":
        """Return a box for each bound, with arrows to looser bounds."""
        drawn = new_figure(11.5, 4.9)
        axes = drawn.add_subplot()
        axes.set_axis_off()
        for box in BOXES.values():
            _draw(axes, box)
        for start, end in ARROWS:
            (x0, y0), (x1, y1) = BOXES[start].place, BOXES[end].place
            across, down = x1 - x0, y1 - y0
            begin = (x0 + across * _WIDTH / 2, y0 + down * _HEIGHT / 2)
            stop = (x1 - across * _WIDTH / 2, y1 - down * _HEIGHT / 2)
            style = {"arrowstyle": "-|>", "color": LIGHT.muted, "linewidth": 1.2}
            axes.annotate("", xy=stop, xytext=begin, arrowprops=style)
        axes.text(
            0,
            2,
            "Arrows point to looser bounds on the log evidence.\n"
            "Dashed: not a guaranteed bound.\nShaded: the anchored bound of evigrad.",
            ha="center",
            va="center",
            fontsize=9,
            color=LIGHT.muted,
        )
        axes.set_xlim(-0.55, 2.55)
        axes.set_ylim(-0.5, 2.5)
        return drawn

    def table(self, rows: list[Row]) -> Table:
        """Return a row for each bound."""
        columns = ["bound", "estimators", "follows from", "guaranteed", "code, under src/evigrad"]
        cells = [
            [b.title, f"`{b.names}`", b.source, "yes" if b.is_bound else "no", f"`{b.code}`"]
            for b in BOXES.values()
        ]
        return Table([Column(name) for name in columns], cells)


def _draw(axes: "Axes", box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = box.place
    patch = FancyBboxPatch(
        (x - _WIDTH / 2, y - _HEIGHT / 2),
        _WIDTH,
        _HEIGHT,
        boxstyle="round,pad=0,rounding_size=0.05",
        linewidth=1.4,
        linestyle="-" if box.is_bound else (0, (4, 2)),
        edgecolor=LIGHT.lines[0],
        facecolor="#e4eef6" if box.is_new else LIGHT.paper,
    )
    axes.add_patch(patch)
    lines: tuple[tuple[float, str, dict[str, Any]], ...] = (
        (0.2, box.title, {"fontsize": 11, "weight": "bold"}),
        (0.06, box.formula, {"fontsize": 10}),
        (-0.07, box.names, {"fontsize": 9, "family": "monospace", "color": LIGHT.lines[0]}),
        (-0.2, box.source, {"fontsize": 8}),
    )
    for shift, text, style in lines:
        axes.text(x, y + shift, text, ha="center", va="center", **style)
