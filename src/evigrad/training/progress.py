"""Progress of a run: a live line in a terminal, or a few plain lines elsewhere."""

import importlib.util
import sys

from evigrad.training.history import Row, known

# Plain output has about this many lines, whatever the number of epochs.
_PLAIN_LINES = 10
# A terminal with at least this many columns has room for the bar and the values.
_WIDE = 120


class PlainProgress:
    """Print about ten lines of text to standard error during a run."""

    def __init__(self, title: str, epochs: int) -> None:
        self.title, self.epochs = title, epochs
        self.interval = max(1, -(-epochs // _PLAIN_LINES))
        # The last value of each metric. Not all metrics are computed in every epoch.
        self.known: Row = {}

    def update(self, row: Row) -> None:
        """Print an epoch's metrics if a line is due."""
        self.known = latest(self.known, row)
        epoch = int(row["epoch"] or 0)
        if epoch == 1 or epoch == self.epochs or epoch % self.interval == 0:
            count = f"{epoch:>{len(str(self.epochs))}}/{self.epochs}"
            line = f"{self.title}: epoch {count}  {summary(self.known)}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""


class RichProgress:
    """Show a progress bar with the latest values, redrawn in place."""

    def __init__(self, title: str, epochs: int) -> None:
        # Imported here, because the core must work without rich.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining
        from rich.table import Column

        console = Console(stderr=True)
        # Without room for both, the values are worth more than the bar.
        wide = console.width >= _WIDE
        remaining = Remaining(compact=True, elapsed_when_finished=True)
        count = Column(min_width=2 * len(str(epochs)) + 1)
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(min_width=len(title))),
            *([BarColumn(bar_width=20)] if wide else []),
            MofNCompleteColumn(table_column=count),
            *([remaining] if wide else []),
            TextColumn("{task.fields[values]}", table_column=Column(no_wrap=True)),
            console=console,
        )
        self._known: Row = {}
        self._task = self._progress.add_task(title, total=epochs, values="")
        self._progress.start()

    def update(self, row: Row) -> None:
        """Show an epoch's metrics."""
        self._known = latest(self._known, row)
        values = summary(self._known)
        self._progress.update(self._task, completed=row["epoch"] or 0, values=values)

    def close(self) -> None:
        """Stop the bar, and leave its last state on the screen."""
        self._progress.stop()


def latest(before: Row, row: Row) -> Row:
    """Return the last value of each metric. Epoch 1 forgets the values of another start."""
    return {**({} if row["epoch"] == 1 else before), **known(row)}


def make_progress(title: str, epochs: int) -> PlainProgress | RichProgress:
    """Return a bar if rich is installed and standard error is a terminal, or else plain lines."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return RichProgress(title, epochs)
    return PlainProgress(title, epochs)


def summary(row: Row) -> str:
    """Return the main values of a row as text, such as loss, log evidence and precisions."""
    parts = [_part(row, "loss", "loss", ".4f"), _part(row, "log_evidence", "log evidence", ".3f")]
    lower, upper = row.get("bracket_lower"), row.get("bracket_upper")
    if lower is not None and upper is not None:
        parts.append(f"exact in {lower:.3f}..{upper:.3f}")
    precisions = [v for name, v in row.items() if name.startswith("precision/") and v is not None]
    if precisions:
        least, most = min(precisions), max(precisions)
        text = f"{least:.3g}" if most <= least * 1.001 else f"{least:.3g}..{most:.3g}"
        parts.append(f"precision {text}")
    parts.append(_part(row, "test_log_likelihood", "test log lik.", ".3f"))
    return "  ".join(part for part in parts if part)


def _part(row: Row, name: str, label: str, form: str) -> str:
    value = row.get(name)
    return "" if value is None else f"{label} {value:{form}}"
