"""The tables of a report: the metrics of each run, what it learned, and its settings."""

from collections.abc import Callable, Sequence

from evigrad.plots import series
from evigrad.report.content import NOTHING, Table, show
from evigrad.report.ranges import used_ranges
from evigrad.report.records import Record
from evigrad.report.sections import MODEL, PRECISION
from evigrad.training.settings import BASELINES

# The head of the column of values in a report of one run.
_VALUE = "value"
# Decimals of nats per datum: many, as runs differ little.
_NATS = 4
# More groups than this are left to the figure and metrics.csv.
_MOST_GROUPS = 60


def metrics_table(records: Sequence[Record]) -> Table:
    """The final metrics: a row for each metric, with its unit, and a column for each run."""

    def error(record: Record) -> str:
        value = show(record.last("log_evidence"), digits=_NATS)
        sem = record.last("log_evidence_sem")
        return value if sem is None or value == NOTHING else f"{value} ± {show(sem, digits=_NATS)}"

    def common(record: Record) -> str:
        found = record.results.get("evidence")
        return show(found.get("per_datum"), digits=_NATS) if isinstance(found, dict) else NOTHING

    rows: list[tuple[str, Callable[[Record], str]]] = [
        ("epochs", lambda r: f"{r.epochs} of {r.planned}"),
        ("test log likelihood (nats per datum)", _last("test_log_likelihood", digits=_NATS)),
        ("test accuracy (%)", _last("test_accuracy", 100.0, 2)),
        ("test squared error", _last("test_squared_error")),
        ("train log likelihood (nats per datum)", _last("train_log_likelihood", digits=_NATS)),
        ("train accuracy (%)", _last("train_accuracy", 100.0, 2)),
        ("train squared error", _last("train_squared_error")),
        ("training loss (nats per datum)", _last("loss", digits=_NATS)),
        (f"log evidence{_judges(records)} (nats per datum)", common),
        ("log evidence while training, last round (nats per datum)", error),
        ("hyperparameter steps", lambda r: show(_whole(r.last("hyper_steps")))),
        ("time of training (seconds)", _last("seconds")),
    ]
    shown = [(words, [cell(record) for record in records]) for words, cell in rows]
    return Table(
        "Final metrics",
        ("", *_heads(records)),
        [[words, *cells] for words, cells in shown if any(cell != NOTHING for cell in cells)],
        "Of log likelihood and log evidence the higher value is the better one. The test data are"
        " only evaluated.",
    )


def hyperparameter_table(record: Record) -> Table:
    """The hyperparameters of a run at its start and its end: groups of the prior, noise, ranges."""
    rows = []
    precisions = record.columns(PRECISION)
    note = ""
    if len(precisions) > _MOST_GROUPS:
        note = f"The {len(precisions)} prior precisions are in metrics.csv."
        precisions = {}
    for columns, words in (
        (precisions, "prior precision, {}"),
        (record.columns("noise"), "noise {}"),
        (record.columns(MODEL), "{}"),
    ):
        for name, column in columns.items():
            values = series(record.history, column)[1]
            text = words.format(name.lstrip("/")).strip()
            rows.append([text, show(values[0]), show(values[-1])])
    for each in used_ranges(record):
        rows.append([each.name, each.kind.words(each.first), each.kind.words(each.last)])
    return Table(
        f"Hyperparameters, {record.label}",
        ("", "epoch 1", f"epoch {record.epochs}"),
        rows,
        note,
    )


def settings_table(records: Sequence[Record]) -> Table:
    """The main settings: a row for each, a column for each run."""
    rows: list[tuple[str, Callable[[Record], str]]] = [
        ("data", _option("data")),
        ("training data", _setting("num_data")),
        ("network", _option("model")),
        ("invariance", _invariance),
        ("weights", _setting("num_weights")),
        ("likelihood", _setting("likelihood")),
        ("estimator", lambda r: show(r.method)),
        ("learned", lambda r: show(r.settings.get("learned") or "nothing but the weights")),
        ("prior", _setting("prior")),
        ("prior precision at the start", _setting("precision")),
        ("batch size", _setting("batch_size")),
        ("optimiser of the weights", lambda r: _rates(r, "optimizer", "lr")),
        ("rounds of hyperparameter steps", _rounds),
        ("seed", _setting("seed")),
        ("device", _setting("device")),
        ("PyTorch", _setting("torch")),
    ]
    shown = [(words, [cell(record) for record in records]) for words, cell in rows]
    return Table(
        "Settings",
        ("", *_heads(records)),
        [[words, *cells] for words, cells in shown if any(cell != NOTHING for cell in cells)],
    )


def all_settings(record: Record) -> Table:
    """Every setting of a run, under its name in Python and on the command line."""
    known = {**record.options, **record.settings}
    return Table(
        f"All settings, {record.label}",
        ("name", _VALUE),
        [[name, show(known[name])] for name in sorted(known) if not isinstance(known[name], dict)],
    )


def _heads(records: Sequence[Record]) -> list[str]:
    return [record.label for record in records]


def _last(column: str, factor: float = 1.0, digits: int = 0) -> Callable[[Record], str]:
    return lambda record: show(record.last(column), factor, digits)


def _setting(name: str) -> Callable[[Record], str]:
    return lambda record: show(record.settings.get(name))


def _option(name: str) -> Callable[[Record], str]:
    return lambda record: show(record.options.get(name))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _judges(records: Sequence[Record]) -> str:
    """The title's end: the estimator that evaluated all runs after training, if it was one."""
    found = [r.results["evidence"] for r in records if isinstance(r.results.get("evidence"), dict)]
    names = {str(each.get("estimator")) for each in found}
    return f" by {names.pop()}" if len(names) == 1 else " after training"


def _rates(record: Record, name: str, rate: str) -> str:
    first, last = (show(record.settings.get(key)) for key in (rate, f"{rate}_min"))
    return f"{show(record.settings.get(name))}, learning rate {first} to {last}"


def _invariance(record: Record) -> str:
    options = record.options
    parts = (options.get("invariance"), "flips" if options.get("flip") else None)
    transforms = [str(part).replace(",", ", ") for part in parts if part]
    if not transforms:
        return NOTHING
    over = f"{show(options.get('samples'))} samples, {show(options.get('average'))} averaged"
    return f"{', '.join(transforms)}: {over}"


def _rounds(record: Record) -> str:
    s = record.settings
    if s.get("steps") is None or record.method in BASELINES.values():
        return NOTHING

    def often(steps: object, every: object) -> str:
        return f"{show(steps)} every {'epoch' if every == 1 else f'{show(every)} epochs'}"

    text = often(s["steps"], s.get("every"))
    if s.get("hyper_steps") or s.get("hyper_every"):
        own = often(s.get("hyper_steps") or s["steps"], s.get("hyper_every") or s.get("every"))
        text = f"{text} (prior, noise), {own} (the network's own)"
    return f"{text}, from epoch {show(s.get('burn_in'))}"
