"""The sections of a report: figures with a sentence each, under headings."""

from collections.abc import Mapping, Sequence
from functools import partial

from evigrad.plots import History, precision_paths, series
from evigrad.report.content import Drawing, Section, listed, show
from evigrad.report.curves import (
    ACCURACY,
    BRACKET,
    LOG_EVIDENCE,
    LOG_LIKELIHOOD,
    LOSS,
    SQUARED_ERROR,
    WIDTH,
    Quantity,
    is_cut,
    quantity_curves,
    value_paths,
)
from evigrad.report.ranges import PREFIX, range_drawings, used_ranges
from evigrad.report.records import Record

PRECISION, MODEL = "precision/", "model/"

_CURVES = (
    (
        "loss",
        LOSS,
        "What the weights minimise: the mean negative log likelihood and the prior's decay.",
    ),
    (
        "log_likelihood",
        LOG_LIKELIHOOD,
        "The mean log probability of the targets; higher is better. Where the training data are"
        " far above the test data, the network overfits.",
    ),
    ("accuracy", ACCURACY, "The share of the data whose class is predicted; higher is better."),
    (
        "squared_error",
        SQUARED_ERROR,
        "The squared distance of predictions and targets, summed over the outputs; lower is"
        " better.",
    ),
    (
        "log_evidence",
        LOG_EVIDENCE,
        "What the hyperparameters maximise, as the run's own estimator sees it on the training"
        " data: the mean over the steps of a round. Those of different estimators cannot be"
        " compared.",
    ),
    (
        "log_evidence_bounds",
        BRACKET,
        "The exact log evidence of the linearised Laplace approximation lies between the two lines,"
        " whatever the run's estimator: these can be compared.",
    ),
)


def curve_section(records: Sequence[Record]) -> Section:
    """Learning curves of all runs: a figure for each recorded quantity."""
    histories = {record.label: record.history for record in records}
    drawings = []
    for name, quantity, sentence in _CURVES:
        ends = _ends(records, quantity)
        if ends:
            drawings.append(
                Drawing(
                    name=name,
                    title=quantity.title,
                    sentence=f"{sentence} {_details(records, quantity)}At the end: {ends}.",
                    make=partial(quantity_curves, histories, quantity),
                )
            )
    return Section("Learning curves", drawings)


def precision_section(records: Sequence[Record]) -> Section:
    """A figure of prior precisions for each run that changed them; a note for the others."""
    drawings, notes = [], []
    for record, suffix, of in _named(records):
        columns = record.columns(PRECISION)
        if not columns:
            continue
        if not record.changes([*columns.values()]):
            notes.append(_unchanged(record, "prior precisions", [*columns.values()]))
            continue
        last = {name: record.last(column) or 0.0 for name, column in columns.items()}
        low, high = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
        title = f"prior precision{of}"
        ends = f"{low} ({show(last[low])})"
        if low != high:
            ends = f"from {show(last[low])} ({low}) to {show(last[high])} ({high})"
        drawings.append(
            Drawing(
                name=f"prior_precision{suffix}",
                title=title,
                sentence=(
                    "How strongly the prior pulls the weights of each group to zero, learned from"
                    f" the training data. At the end: {ends}."
                ),
                make=lambda palette, h=record.history, t=title: precision_paths(
                    h, t, WIDTH, palette
                ),
            )
        )
    return Section("Prior precision", drawings, notes)


def noise_section(records: Sequence[Record]) -> Section:
    """A figure of the observation noise for each run that changed it; a note for the others."""
    drawings, notes = [], []
    for record, suffix, of in _named(records):
        columns = _noise(record)
        if not columns:
            continue
        if not record.changes([*columns.values()]):
            notes.append(_unchanged(record, "noise", [*columns.values()]))
            continue
        title = f"observation noise{of}"
        drawings.append(
            Drawing(
                name=f"noise{suffix}",
                title=title,
                sentence=(
                    "The standard deviation that the likelihood gives to the targets around the"
                    " predictions, learned from the training data, in the units of the"
                    f" standardised targets. {_from_to(record, columns)}"
                ),
                make=_paths(record.history, columns, title, "standard deviation"),
            )
        )
    return Section("Observation noise", drawings, notes)


def invariance_section(records: Sequence[Record]) -> Section:
    """Figures of the network's hyperparameters, as ranges, that changed; notes for other runs."""
    drawings, notes = [], []
    for record, suffix, of in _named(records):
        fixed = [each for each in used_ranges(record) if not record.changes([each.column])]
        drawings += range_drawings(record, suffix, of)
        if fixed:
            values = listed([f"{each.name} {each.kind.words(each.last)}" for each in fixed])
            notes.append(f"{record.label} has left as they were: {values}.")
        columns = record.columns(MODEL)
        if record.changes([*columns.values()]):
            title = f"hyperparameters of the network{of}"
            drawings.append(
                Drawing(
                    name=f"model{suffix}",
                    title=title,
                    sentence=(
                        "What else the network learns beside its weights; of parameters with"
                        f" several entries the Euclidean norm. {_from_to(record, columns)}"
                    ),
                    make=_paths(record.history, columns, title, "value or norm"),
                )
            )
    return Section("Invariances", drawings, notes)


def has_transform(record: Record) -> bool:
    """Whether a run was started with a random transform, or its metrics have a range."""
    asked = record.options.get("invariance") or record.options.get("flip")
    return bool(asked or record.columns(PREFIX))


def _named(records: Sequence[Record]) -> list[tuple[Record, str, str]]:
    """Runs with the ends of their files' names and titles, which are empty for a single run."""
    main = [record for record in records if not record.is_baseline]
    named = [(record, f"-{record.key}", f", {record.label}") for record in records]
    if len(main) == 1:
        return [(r, "", "") if r is main[0] else (r, suffix, of) for r, suffix, of in named]
    return named


def _ends(records: Sequence[Record], quantity: Quantity) -> str:
    """The last values of a quantity, in words; empty without any."""
    digits = 2 if quantity.factor == 100.0 else 0
    unit = " %" if quantity.factor == 100.0 else ""
    parts = []
    for record in records:
        values = [
            (f"{kind} " if len(quantity.columns) > 1 else "")
            + show(record.last(column), quantity.factor, digits)
            + unit
            for kind, column in quantity.columns.items()
            if record.last(column) is not None
        ]
        if values:
            label = f"{record.label} " if len(records) > 1 else ""
            parts.append(label + ", ".join(values))
    return "; ".join(parts)


def _details(records: Sequence[Record], quantity: Quantity) -> str:
    """Further sentences about a figure, with a space behind them."""
    histories = {record.label: record.history for record in records}
    said = "The first values lie below the axes. " if is_cut(histories, quantity) else ""
    if quantity is BRACKET:
        shaded = any(series(r.history, "bracket_lower_sem")[0] for r in records)
        return said + ("Shaded: ± one standard error of the lower one. " if shaded else "")
    if quantity is LOG_EVIDENCE:
        shaded = any(series(r.history, "log_evidence_sem")[0] for r in records)
        return said + ("Shaded: ± one standard error of that mean. " if shaded else "")
    columns = quantity.columns.values()
    counts = [len(series(r.history, column)[0]) for r in records for column in columns]
    if quantity is not LOSS and max(counts) == 1:
        return said + "It was computed only once: --eval-every 5 (eval_every=5) gives curves. "
    return said


def _unchanged(record: Record, what: str, columns: Sequence[str]) -> str:
    values = sorted({value for column in columns if (value := record.last(column)) is not None})
    shown = listed([show(value) for value in values]) if len(values) <= 4 else "as it started"
    if record.method != "MAP" and record.epochs < record.planned:
        return f"{record.label} has not changed its {what} so far: {shown}."
    return f"{record.label} kept its {what}: {shown}."


def _noise(record: Record) -> dict[str, str]:
    columns = record.columns("noise")
    return {
        "noise" if name == "" else f"output {name.lstrip('/')}": column
        for name, column in columns.items()
    }


def _from_to(record: Record, columns: Mapping[str, str]) -> str:
    """The first and the last values, if they are few."""
    if len(columns) > 4:
        return ""
    parts = [
        f"{name} from {show(series(record.history, column)[1][0])} to {show(record.last(column))}"
        for name, column in columns.items()
    ]
    return f"It went: {listed(parts)}." if len(columns) > 1 else f"It went: {parts[0]}."


def _paths(history: History, columns: Mapping[str, str], title: str, unit: str):
    return lambda palette: value_paths(history, columns, title, unit, palette=palette)
