"""The HTML page of a report: its figures, its tables, and the file."""

import base64
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, select_autoescape

from evigrad.errors import ConfigurationError, EvigradError
from evigrad.files import replacing, writing
from evigrad.plots import DARK, LIGHT, Palette
from evigrad.report.drawings import NOTHING, Drawing, curves, hyperparameters, show
from evigrad.report.images import (
    augmented_images,
    draw_transforms,
    examples_of,
    find_transform,
    rebuild,
)
from evigrad.report.runs import Run, read_runs
from evigrad.training.plan import BURN_IN_DECAY, burn_in_precision
from evigrad.training.settings import Optimization, current_record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.html"
FIGURES = "figures"
# Folder of the page of several runs, in the folder of the first run.
COMPARISON = "comparison"
# Dots per inch: sharp on the small pixels of a phone.
_RESOLUTION = 160

# A row of a table: its name, and a cell for each run or value.
Rows = list[list[str]]

# Decimals of nats per example: many, because runs differ little.
_NATS = 4
# Larger groups of hyperparameters are only in the figure and metrics.csv.
_MOST = 60


def write_report(
    run_dir: str | Path,
    *others: str | Path,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    examples: int = 6,
) -> Path:
    """Write an HTML page about one or more runs, and its figures as PNG files.

    The page shows learning curves, prior precisions, noise and ranges of invariances over the
    epochs. It also shows test images under the learned augmentation, and tables of metrics,
    hyperparameters and settings. The page needs no other files. An unfinished run is shown up to
    its last epoch. A run with ``compare_map`` is shown with its MAP run.

    Test images are shown for networks that ``evigrad train`` trained with random image transforms.
    They require the data that the run's ``config.yaml`` names, and the last checkpoint. If either
    is missing, the page says so.

    Args:
        run_dir: Folder of the run.
        *others: Folders of other runs.
        out: Folder for ``report.html``, and for PNG files in its subfolder ``figures``. Default:
            the folder of the run, or its subfolder ``comparison`` if there are other runs.
        data_dir: Folder of data sets, if it has moved since the run. Default: the run's folder of
            data sets.
        examples: Maximum number of test images under the learned augmentation. 0 shows none.

    Returns:
        The path of the page.

    Raises:
        ConfigurationError: If a folder does not belong to a run with a finished epoch, a file
            cannot be read or written, examples is negative, or matplotlib is missing.

    Examples:
        >>> import torch
        >>> import evigrad
        >>> from evigrad.report import write_report
        >>> data = torch.randn(40, 2), torch.arange(40) % 2
        >>> schedule = evigrad.Schedule(epochs=2)
        >>> options = {"schedule": schedule, "run_dir": "runs/page", "progress": False}
        >>> run = evigrad.fit(torch.nn.Linear(2, 2), data, **options)
        >>> write_report(run.run_dir).name
        'report.html'

    See also: docs/command_line.md.
    """
    if examples < 0:
        raise ConfigurationError(f"examples must be at least 0, got {examples}.")
    folder = Path(run_dir)
    runs = read_runs([folder, *others])
    if out is not None:
        folder = Path(out)
    elif others:
        folder = folder / COMPARISON
    groups = [group for run in runs for group in hyperparameters(run)]
    shown = {
        "curves": curves(runs),
        "learned": [group.drawing() for group in groups if group.is_learned],
    }
    shown["augmented"], without_images = _augmentations(runs, data_dir, examples)
    images = {
        drawing.name: [_png(drawing.make, colors) for colors in (LIGHT, DARK)]
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
    environment.filters["base64"] = lambda png: base64.b64encode(png).decode("ascii")
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
        figures.mkdir(parents=True, exist_ok=True)
        for name, (light, _) in images.items():
            (figures / f"{name}.png").write_bytes(light)
        with replacing(folder / REPORT) as file:
            file.write(page.encode("utf-8", errors="replace"))  # a name may hold half a character
    return folder / REPORT


def _augmentations(
    runs: Sequence[Run], data_dir: str | Path | None, examples: int
) -> tuple[list[Drawing], dict[str, Exception]]:
    """Return images under the random transform of each run that has one, and errors by run."""
    drawings: list[Drawing] = []
    missing: dict[str, Exception] = {}
    for run in runs:
        asked = run.options.get("invariance") or run.options.get("flip")
        # A MAP run keeps the initial transform of the run that is compared with it.
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
        shown = [images * data.std + data.mean for images in (x, draw_transforms(x, transform))]
        learned = any(group.is_learned for group in hyperparameters(run) if "range" in group.kind)
        title = run.titled(f"inputs under the {'learned' if learned else 'fixed'} augmentation")
        make = partial(augmented_images, *shown, names)
        drawings.append(Drawing(f"augmentation{run.suffix}", title, "augmentation", run, make))
    return drawings, missing


def _png(make: "Callable[[Palette], Figure]", palette: Palette) -> bytes:
    buffer = io.BytesIO()
    make(palette).savefig(buffer, dpi=_RESOLUTION, format="png")
    return buffer.getvalue()


def metrics(runs: Sequence[Run]) -> Rows:
    """Return a table of the final metrics, with a row per metric and a cell per run."""

    def last(column: str, factor: float = 1.0, digits: int = 0) -> Callable[[Run], str]:
        return lambda run: show(run.last(column), factor, digits)

    def evidence(run: Run) -> str:
        values = [show(run.last(f"log_evidence{end}"), digits=_NATS) for end in ("", "_sem")]
        return values[0] if NOTHING in values else " ± ".join(values)

    judged = [
        run.results["evidence"] for run in runs if isinstance(run.results.get("evidence"), dict)
    ]
    judges = {str(evaluation.get("estimator")) for evaluation in judged}
    # The estimator that evaluated all runs after training, if it was one.
    judge = f"by {next(iter(judges))}" if len(judges) == 1 else "after training"

    def common(run: Run) -> str:
        evaluated = run.results.get("evidence")
        if not isinstance(evaluated, dict):
            return NOTHING
        value = show(evaluated.get("per_datum"), digits=_NATS)
        return value if len(judges) == 1 else f"{value} by {evaluated.get('estimator')}"

    return _filled(
        runs,
        {
            "epochs": lambda run: f"{run.epochs} of {run.planned}",
            "test log likelihood (nats per example)": last("test_log_likelihood", digits=_NATS),
            "test accuracy (%)": last("test_accuracy", 100.0, 2),
            "test RMSE (units of the targets)": lambda run: show(run.results.get("test_rmse")),
            "test squared error": last("test_squared_error"),
            "train log likelihood (nats per example)": last("train_log_likelihood", digits=_NATS),
            "train accuracy (%)": last("train_accuracy", 100.0, 2),
            "train squared error": last("train_squared_error"),
            "training loss (nats per example)": last("loss", digits=_NATS),
            f"log evidence {judge} (nats per example)": common,
            "log evidence during training, last round (nats per example)": evidence,
            "mode gap (nats per example)": last("mode_gap", digits=_NATS),
            "hyperparameter steps": last("hyper_steps"),
            "training time (seconds)": last("seconds"),
        },
    )


def ends(run: Run) -> Rows:
    """Return a table of the hyperparameters of a run at its start and at its end."""
    rows = []
    for group in hyperparameters(run):
        of = "prior precision, " if group.kind == "prior_precision" else ""
        if len(group.columns) > _MOST:
            rows.append([f"{group.title} of {len(group.columns)} groups", *["in metrics.csv"] * 2])
            continue
        ends_by_name = group.ends
        rows += [[of + name, *ends_by_name[name]] for name in group.columns]
    return rows


def settings(runs: Sequence[Run]) -> Rows:
    """Return a table of the main settings, with a row per setting and a cell per run."""

    def setting(name: str) -> Callable[[Run], str]:
        return lambda run: show(run.settings.get(name))

    def option(name: str) -> Callable[[Run], str]:
        return lambda run: show(run.options.get(name))

    def optimizer(run: Run) -> str:
        name, first, last = (setting(key)(run) for key in ("optimizer", "lr", "lr_min"))
        return f"{name}, learning rate {first} to {last}"

    return _filled(
        runs,
        {
            "data": option("data"),
            "training examples": setting("num_data"),
            "network": option("model"),
            "invariance": _invariance,
            "weights": setting("num_weights"),
            "likelihood": setting("likelihood"),
            "estimator": lambda run: run.method,
            "learned": lambda run: show(run.settings.get("learned") or "only the weights"),
            "prior": setting("prior"),
            "prior precision at the start": _first_precision,
            "prior mean": setting("prior_mean"),
            "batch size": setting("batch_size"),
            "optimizer of the weights": optimizer,
            "rounds of hyperparameter steps": _rounds,
            "seed": setting("seed"),
            "device": setting("device"),
            "PyTorch": setting("torch"),
        },
    )


def all_settings(run: Run) -> Rows:
    """Return a table of all settings of a run, sorted by name."""
    settings = {**run.options, **run.settings}
    settings.pop("network", None)  # its record repeats the options
    return [[name, show(settings[name])] for name in sorted(settings)]


def _filled(runs: Sequence[Run], cells: dict[str, Callable[[Run], str]]) -> Rows:
    """Return the rows in which at least one run has something to show."""
    rows = [[words, *map(cell, runs)] for words, cell in cells.items()]
    return [row for row in rows if {*row[1:]} != {NOTHING}]


def _invariance(run: Run) -> str:
    options = run.options
    parts = (options.get("invariance"), "flips" if options.get("flip") else None)
    transforms = [str(part).replace(",", ", ") for part in parts if part]
    if not transforms:
        return NOTHING
    over = f"{show(options.get('samples'))} samples, {show(options.get('average'))} averaged"
    return f"{', '.join(transforms)}: {over}"


def _first_precision(run: Run) -> str:
    """Return the precision of the first epochs, which a burn-in overrides."""
    s = run.settings
    learned, num_data = s.get("learned"), s.get("num_data")
    is_learned = isinstance(learned, list) and "prior.log_precision" in learned
    has_burn_in = s.get("prior_update") == "fixed_point" and s.get("burn_in")
    if not (is_learned and has_burn_in and isinstance(num_data, int)):
        return show(s.get("precision"))
    if s.get("prior_mean") not in (None, "zero"):
        return "set by the burn-in"
    decay = Optimization(start_decay=s.get("start_decay")).start_decays or (BURN_IN_DECAY,)
    precisions = [show(burn_in_precision(start, num_data)) for start in decay]
    return f"{' or '.join(precisions)} (set by the burn-in)"


def _rounds(run: Run) -> str:
    s = run.settings
    estimator = current_record(s).get("estimator")
    if s.get("steps") is None or estimator in (None, "augerino"):
        return NOTHING

    def often(steps: object, every: object) -> str:
        return f"{show(steps)} every {'epoch' if every == 1 else f'{show(every)} epochs'}"

    text = often(s["steps"], s.get("every"))
    if s.get("hyper_steps") or s.get("hyper_every"):
        model_rounds = often(
            s.get("hyper_steps") or s["steps"], s.get("hyper_every") or s.get("every")
        )
        text = f"{text} (prior, noise), {model_rounds} (the network's own)"
    return f"{text}, from epoch {show(s.get('burn_in'))}"
