"""Read runs, draw their figures, and write the page."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from evigrad.errors import ConfigurationError, EvigradError
from evigrad.plots import DARK, LIGHT, Palette
from evigrad.report.content import Drawing, Section, listed
from evigrad.report.gallery import augmented_images, examples_under, find_transform
from evigrad.report.page import render
from evigrad.report.ranges import PREFIX
from evigrad.report.rebuild import rebuild
from evigrad.report.records import Record, read_runs
from evigrad.report.sections import (
    curve_section,
    has_transform,
    invariance_section,
    noise_section,
    precision_section,
)
from evigrad.report.tables import (
    all_settings,
    hyperparameter_table,
    metrics_table,
    settings_table,
)
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
    records = read_runs([folder, *others])
    sections = [
        curve_section(records),
        precision_section(records),
        noise_section(records),
        invariance_section(records),
        _augmentation_section(records, data_dir, examples),
    ]
    images = {
        drawing.name: (_png(drawing.make, LIGHT), _png(drawing.make, DARK))
        for section in sections
        for drawing in section.drawings
    }
    page = render(
        title=_title(records),
        lead=_lead(records),
        parts=[
            metrics_table(records),
            *sections,
            *[hyperparameter_table(record) for record in records if not record.is_baseline],
            settings_table(records),
        ],
        folded=[*map(all_settings, records)],
        images=images,
    )
    figures = folder / FIGURES
    with writing(folder / REPORT):
        figures.mkdir(exist_ok=True)
        for name, (light, _) in images.items():
            (figures / f"{name}.png").write_bytes(light)
        with replacing(folder / REPORT) as file:
            file.write(page.encode("utf-8"))
    return folder / REPORT


def _title(records: Sequence[Record]) -> str:
    runs = [record for record in records if not record.is_baseline] or records
    labels = [run.label for run in runs]
    if len(runs) > 1:
        return f"Runs {listed(labels)}"
    names = [str(runs[0].options[key]) for key in ("data", "model") if runs[0].options.get(key)]
    return ", ".join([*names, *labels])


def _lead(records: Sequence[Record]) -> list[str]:
    """The paragraphs under the title."""
    return [
        f"{record.label} is not finished, or was ended early: it is shown up to epoch"
        f" {record.epochs} of {record.planned}."
        for record in records
        if record.epochs < record.planned
    ]


def _augmentation_section(
    records: Sequence[Record], data_dir: str | Path | None, examples: int
) -> Section:
    """Images under the random transform of each run that has one."""
    drawings: list[Drawing] = []
    notes = []
    # A MAP run keeps the transform that the run compared with it started with.
    chosen = [r for r in records if has_transform(r) and not r.is_baseline] if examples else []
    for record in chosen:
        try:
            data, model = rebuild(record, data_dir)
        except (EvigradError, OSError) as error:
            notes.append(f"{record.label}: no images can be shown. {error}")
            continue
        transform = find_transform(data, model)
        if transform is None:
            continue
        alone = len(chosen) == 1
        suffix, of = ("", "") if alone else (f"-{record.key}", f", {record.label}")
        learned = record.changes([*record.columns(PREFIX).values()])
        kind = "learned" if learned else "fixed"
        drawings.append(
            Drawing(
                name=f"augmentation{suffix}",
                title=f"inputs under the {kind} augmentation{of}",
                sentence=(
                    f"{record.label}: test images, and random transforms of them with the ranges of"
                    " the last checkpoint. The network averages its outputs over such transforms of"
                    " an input. What comes in from beyond the borders has the mean colour of the"
                    " training data."
                ),
                make=partial(augmented_images, *examples_under(data, transform, examples)),
            )
        )
    return Section("Inputs under the augmentation", drawings, notes)


def _png(make: "Callable[[Palette], Figure]", palette: Palette) -> bytes:
    buffer = io.BytesIO()
    make(palette).savefig(buffer, dpi=_RESOLUTION, format="png")
    return buffer.getvalue()
