"""Where the words of a figure are once it is drawn."""

from itertools import combinations
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text


def problems(figure: Any) -> list[str]:
    """Words that another word, a line or the edge of the figure cuts, in words."""
    FigureCanvasAgg(figure).draw()
    names = {text: text for legend in figure.legends for text in legend.get_texts()}
    titles = [text for axes in figure.axes for text in (axes._left_title, axes.yaxis.label)]
    words = [*names, *titles, *(axes.xaxis.label for axes in figure.axes)]
    # The words alone: an annotation's own extent includes the line that leads to it.
    words += [text for axes in figure.axes for text in axes.texts]
    boxes = {text: Text.get_window_extent(text) for text in words if text.get_text()}
    edge = figure.bbox.padded(1)
    faults = [
        f"cut: {text.get_text()!r}"
        for text, box in boxes.items()
        if not (edge.x0 <= box.x0 and box.x1 <= edge.x1 and edge.y0 <= box.y0 and box.y1 <= edge.y1)
    ]
    faults += [
        f"on each other: {a.get_text()!r}, {b.get_text()!r}"
        for a, b in combinations(boxes, 2)
        if boxes[a].overlaps(boxes[b])
    ]
    faults += [
        f"on the axes: {text.get_text()!r}"
        for text in names
        for axes in figure.axes
        if boxes[text].overlaps(axes.bbox)
    ]
    arrows = [text.arrow_patch for axes in figure.axes for text in axes.texts if text.arrow_patch]
    faults += [
        f"struck through: {text.get_text()!r}"
        for arrow in arrows
        for text, box in boxes.items()
        if arrow.get_path().transformed(arrow.get_transform()).intersects_bbox(box.padded(-2))
    ]
    small = [axes for axes in figure.axes if min(axes.bbox.width, axes.bbox.height) < 1.2 * 100]
    return faults + ["the axes are small"] * bool(small)
