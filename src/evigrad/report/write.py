"""Read runs, draw their figures, and write the page."""

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, select_autoescape

from evigrad.errors import ConfigurationError, EvigradError
from evigrad.plots import DARK, LIGHT, Palette
from evigrad.report.drawings import Drawing, curves, hyperparameters
from evigrad.report.images import (
    augmented_images,
    draw_transforms,
    examples_of,
    find_transform,
    rebuild,
)
from evigrad.report.runs import Run, read_runs
from evigrad.report.tables import all_settings, ends, metrics, settings
from evigrad.training.files import replacing, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.html"
FIGURES = "figures"
# Dots per inch: sharp on the small pixels of a phone.
_RESOLUTION = 160


def write_report(
    run_dir: str | Path,
    *others: str | Path,
    data_dir: str | Path | None = None,
    examples: int = 6,
) -> Path:
    """Make one HTML page of a run, or of several beside each other, and its figures as PNGs.

    The page has learning curves, prior precisions, noise and ranges of invariances over the
    epochs, test images under the learned augmentation, and tables of metrics, hyperparameters and
    settings. It needs no other file. An unfinished run is shown up to its last epoch, and a run
    with ``compare_map`` beside its MAP run.

    Images are drawn for networks with random transforms of images that ``evigrad train`` has
    trained: from the data that the run's ``config.yaml`` names and its last checkpoint. Where one
    of them is missing the page says so.

    Args:
        run_dir: Folder of the run; gets ``report.html``, and PNGs in its folder ``figures``.
        *others: Folders of other runs.
        data_dir: Folder of data sets, where the run's is not here any more. Default: the run's.
        examples: Test images that are shown under the learned augmentation, at most; 0 shows none.

    Returns:
        The page.

    Raises:
        ConfigurationError: If a folder is not that of a run with a finished epoch, one of its files
            cannot be read, the first one cannot be written into, examples is negative, or
            matplotlib is not installed.
    """
    if examples < 0:
        raise ConfigurationError(f"examples must be 0 or more, not {examples}.")
    folder = Path(run_dir)
    runs = read_runs([folder, *others])
    groups = [group for run in runs for group in hyperparameters(run)]
    shown = {
        "curves": curves(runs),
        "learned": [group.drawing() for group in groups if group.is_learned],
    }
    shown["augmented"], without_images = _augmentations(runs, data_dir, examples)
    images = {
        drawing.name: [_png(drawing.make, colours) for colours in (LIGHT, DARK)]
        for drawings in shown.values()
        for drawing in drawings
    }
    environment = Environment(
        loader=PackageLoader("evigrad.report", "."),
        autoescape=select_autoescape(["html.jinja"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["inlined"] = _inlined
    page = environment.get_template("page.html.jinja").render(
        light=LIGHT,
        dark=DARK,
        runs=runs,
        trained=[run for run in runs if not run.is_baseline] or runs,
        **shown,
        unlearned=[group for group in groups if not group.is_learned],
        without_images=without_images,
        images=images,
        metrics=metrics(runs),
        ends={run.label: ends(run) for run in runs if not run.is_baseline},
        settings=settings(runs),
        all_settings={run.label: all_settings(run) for run in runs},
    )
    figures = folder / FIGURES
    with writing(folder / REPORT):
        figures.mkdir(exist_ok=True)
        for name, (light, _) in images.items():
            (figures / f"{name}.png").write_bytes(light)
        with replacing(folder / REPORT) as file:
            file.write(page.encode("utf-8"))
    return folder / REPORT


def _augmentations(
    runs: Sequence[Run], data_dir: str | Path | None, examples: int
) -> tuple[list[Drawing], dict[str, Exception]]:
    """Images under the random transform of each run that has one, and why a run has none."""
    drawings: list[Drawing] = []
    missing: dict[str, Exception] = {}
    for run in runs:
        asked = run.options.get("invariance") or run.options.get("flip")
        # A MAP run keeps the transform that the run compared with it started with.
        if not examples or not (asked or run.columns("range/")) or run.is_baseline:
            continue
        try:
            data, model = rebuild(run, data_dir)
        except (EvigradError, OSError) as error:
            missing[run.label] = error
            continue
        transform = find_transform(data, model)
        if transform is None:
            continue
        x, names = examples_of(data, examples)
        shown = [each * data.std + data.mean for each in (x, draw_transforms(x, transform))]
        learned = any(group.is_learned for group in hyperparameters(run) if "range" in group.kind)
        title = run.titled(f"inputs under the {'learned' if learned else 'fixed'} augmentation")
        make = partial(augmented_images, *shown, names)
        drawings.append(Drawing(f"augmentation{run.suffix}", title, "augmentation", run, make))
    return drawings, missing


def _png(make: "Callable[[Palette], Figure]", palette: Palette) -> bytes:
    buffer = io.BytesIO()
    make(palette).savefig(buffer, dpi=_RESOLUTION, format="png")
    return buffer.getvalue()


def _inlined(png: bytes) -> str:
    """The address of an image that lies in the page itself."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
