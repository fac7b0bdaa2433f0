"""The rows of a report's tables: what each is called, and a cell for each run or value."""

from collections.abc import Callable, Sequence

from evigrad.report.drawings import NOTHING, hyperparameters, show
from evigrad.report.runs import Run
from evigrad.training.settings import BASELINES

Rows = list[list[str]]

# Decimals of nats per datum: many, as runs differ little.
_NATS = 4
# A larger group of hyperparameters is left to the figure and metrics.csv.
_MOST = 60


def metrics(runs: Sequence[Run]) -> Rows:
    """The final metrics: a row for each metric, with its unit, and a cell for each run."""

    def last(column: str, factor: float = 1.0, digits: int = 0) -> Callable[[Run], str]:
        return lambda run: show(run.last(column), factor, digits)

    def evidence(run: Run) -> str:
        values = [show(run.last(f"log_evidence{end}"), digits=_NATS) for end in ("", "_sem")]
        return values[0] if NOTHING in values else " ± ".join(values)

    judged = [
        run.results["evidence"] for run in runs if isinstance(run.results.get("evidence"), dict)
    ]
    judges = {str(each.get("estimator")) for each in judged}
    # The estimator that evaluated all runs after training, if it was one.
    judge = f"by {judges.pop()}" if len(judges) == 1 else "after training"

    def common(run: Run) -> str:
        found = run.results.get("evidence")
        return show(found.get("per_datum"), digits=_NATS) if isinstance(found, dict) else NOTHING

    return _filled(
        runs,
        {
            "epochs": lambda run: f"{run.epochs} of {run.planned}",
            "test log likelihood (nats per datum)": last("test_log_likelihood", digits=_NATS),
            "test accuracy (%)": last("test_accuracy", 100.0, 2),
            "test squared error": last("test_squared_error"),
            "train log likelihood (nats per datum)": last("train_log_likelihood", digits=_NATS),
            "train accuracy (%)": last("train_accuracy", 100.0, 2),
            "train squared error": last("train_squared_error"),
            "training loss (nats per datum)": last("loss", digits=_NATS),
            f"log evidence {judge} (nats per datum)": common,
            "log evidence while training, last round (nats per datum)": evidence,
            "hyperparameter steps": last("hyper_steps"),
            "time of training (seconds)": last("seconds"),
        },
    )


def ends(run: Run) -> Rows:
    """The hyperparameters of a run at its start and its end: prior, noise, ranges, others."""
    rows = []
    for group in hyperparameters(run):
        of = "prior precision, " if group.kind == "prior_precision" else ""
        if len(group.columns) > _MOST:
            rows.append([f"{group.title} of {len(group.columns)} groups", *["in metrics.csv"] * 2])
            continue
        found = group.ends
        rows += [[of + name, *found[name]] for name in group.columns]
    return rows


def settings(runs: Sequence[Run]) -> Rows:
    """The main settings: a row for each, a cell for each run."""

    def setting(name: str) -> Callable[[Run], str]:
        return lambda run: show(run.settings.get(name))

    def option(name: str) -> Callable[[Run], str]:
        return lambda run: show(run.options.get(name))

    def optimiser(run: Run) -> str:
        name, first, last = (setting(key)(run) for key in ("optimizer", "lr", "lr_min"))
        return f"{name}, learning rate {first} to {last}"

    return _filled(
        runs,
        {
            "data": option("data"),
            "training data": setting("num_data"),
            "network": option("model"),
            "invariance": _invariance,
            "weights": setting("num_weights"),
            "likelihood": setting("likelihood"),
            "estimator": lambda run: run.method,
            "learned": lambda run: show(run.settings.get("learned") or "nothing but the weights"),
            "prior": setting("prior"),
            "prior precision at the start": setting("precision"),
            "batch size": setting("batch_size"),
            "optimiser of the weights": optimiser,
            "rounds of hyperparameter steps": _rounds,
            "seed": setting("seed"),
            "device": setting("device"),
            "PyTorch": setting("torch"),
        },
    )


def all_settings(run: Run) -> Rows:
    """Every setting of a run, under its name in Python and on the command line."""
    known = {**run.options, **run.settings}
    known.pop("network", None)  # its record repeats the options
    return [[name, show(known[name])] for name in sorted(known)]


def _filled(runs: Sequence[Run], cells: dict[str, Callable[[Run], str]]) -> Rows:
    """The rows in which a run has something to show."""
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


def _rounds(run: Run) -> str:
    s = run.settings
    if s.get("steps") is None or run.method in BASELINES.values():
        return NOTHING

    def often(steps: object, every: object) -> str:
        return f"{show(steps)} every {'epoch' if every == 1 else f'{show(every)} epochs'}"

    text = often(s["steps"], s.get("every"))
    if s.get("hyper_steps") or s.get("hyper_every"):
        own = often(s.get("hyper_steps") or s["steps"], s.get("hyper_every") or s.get("every"))
        text = f"{text} (prior, noise), {own} (the network's own)"
    return f"{text}, from epoch {show(s.get('burn_in'))}"
