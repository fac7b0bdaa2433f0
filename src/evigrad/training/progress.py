"""Progress of a run: its plan, its parts, and its values and time at regular intervals."""

import importlib.util
import sys
import time

from evigrad.training.history import Row, known
from evigrad.training.observers import Observer, Run
from evigrad.training.settings import label_of

# Plain output has about this many lines, whatever the number of epochs. In long epochs, a line
# follows after this many seconds.
_PLAIN_LINES, _PLAIN_SECONDS = 10, 300.0
# The time of a run is estimated after this many seconds, and shown if it is at least this long.
_FIRST_SECONDS, _LONG_SECONDS = 1.0, 10.0
# Seconds between updates of a live line, at the ends of epochs and within long epochs.
_LIVE_SECONDS, _LIVE_STEP_SECONDS = 0.1, 1.0
# A terminal with at least this many columns has room for the bar and the values.
_WIDE = 120


class PlainDisplay:
    """Print lines of text that begin with a title to standard error."""

    is_live = False

    def __init__(self, title: str) -> None:
        self._title = title

    def say(self, line: str) -> None:
        """Print a line."""
        print(f"{self._title}: {line}", file=sys.stderr, flush=True)

    def show(self, text: str, share: float) -> None:
        """Print the current state as a line."""
        del share  # which only a bar shows
        self.say(text)

    def close(self) -> None:
        """Do nothing, because there is nothing to close."""


class RichDisplay:
    """Print lines of text, and show the current state below them, redrawn in place."""

    is_live = True

    def __init__(self, title: str) -> None:
        # Imported here, because the core must work without rich.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        console = Console(stderr=True, highlight=False)
        # Without room for both, the values are worth more than the bar.
        bar = [BarColumn(bar_width=20)] if console.width >= _WIDE else []
        self._column = Column(no_wrap=True)
        text = TextColumn("{task.description}", table_column=self._column, markup=False)
        self._title, self._task = title, None
        self._progress = Progress(*bar, text, console=console)

    def say(self, line: str) -> None:
        """Print a line above the live one."""
        self._progress.console.print(f"{self._title}: {line}", markup=False)

    def show(self, text: str, share: float) -> None:
        """Redraw the live line."""
        line = f"{self._title}: {text}"
        if self._task is None:
            self._task = self._progress.add_task(line, total=1.0)
            self._progress.start()
        self._progress.update(self._task, completed=share, description=line)

    def close(self) -> None:
        """Stop the live line, and leave all of its last state on the screen."""
        self._column.no_wrap = False
        self._progress.stop()


def make_display(title: str) -> PlainDisplay | RichDisplay:
    """Return a live display if rich is installed and standard error is a terminal."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        return RichDisplay(title)
    return PlainDisplay(title)


class Pace:
    """The time of a run so far, and an estimate of the time that is left.

    Epochs with a round of hyperparameter steps take longer than others, so their times are averaged
    separately. The first step is not timed, because it also loads libraries.

    Args:
        before: Seconds of the run in earlier processes.
    """

    def __init__(self, before: float = 0.0) -> None:
        self._before, self._begin = before, time.perf_counter()
        self._last = self._begin
        self._done, self._skipped = 0.0, 0.0  # share of the current epoch
        # Time and number of the epochs without (False) and with a round (True).
        self._seconds = dict.fromkeys((False, True), 0.0)
        self._count = dict.fromkeys((False, True), 0.0)

    @property
    def here(self) -> float:
        """Return the seconds of the run in this process."""
        return time.perf_counter() - self._begin

    @property
    def elapsed(self) -> float:
        """Return the seconds of the run in all processes."""
        return self._before + self.here

    @property
    def has_rounds(self) -> bool:
        """Return whether a round has been timed."""
        return self._count[True] > 0

    def step(self, share: float) -> None:
        """Note that a share of the current epoch is done."""
        if not any(self._count.values()) and not self._done:
            self._last, self._skipped = time.perf_counter(), share
        self._done = share

    def epoch(self, has_round: bool) -> None:
        """Note that the current epoch is done."""
        now = time.perf_counter()
        self._seconds[has_round] += now - self._last
        self._count[has_round] += 1.0 - self._skipped
        self._last, self._done, self._skipped = now, 0.0, 0.0

    def left(self, epochs: int, rounds: int) -> float | None:
        """Return the seconds that are left, or None if nothing has been timed.

        Args:
            epochs: Number of epochs that are left, including the current one.
            rounds: Number of these epochs with a round.
        """
        now = time.perf_counter() - self._last
        means = [self._seconds[kind] / count for kind, count in self._count.items() if count]
        timed = self._done - self._skipped
        if not means and timed > 0:
            means = [now / timed]
        if not means:
            return None
        # An epoch with a round counts like one without until a round has been timed.
        total = (epochs - rounds) * means[0] + rounds * means[-1]
        return max(0.0, total - self._done * means[0])


class Progress(Observer):
    """Show the plan of a run, announce its parts, and show values and time during training.

    Args:
        run: The run, before its first epoch in this process.
        is_resumed: Whether the run continues from a checkpoint.
    """

    def __init__(self, run: Run, is_resumed: bool = False) -> None:
        super().__init__(run)
        self._display = make_display(label_of(run.settings.estimator))
        self._is_resumed, self._last = is_resumed, run.epochs
        self._pace = Pace(run.seconds)
        self._interval = max(1, -(-self._last // _PLAIN_LINES))
        self._values: Row = {}  # the last value of each metric, as not all are in every row
        self._epochs, self._rounds, self._all = 0, 0, 0  # the first two are left
        self._is_estimated = False
        self._shown = 0.0  # time of the last line

    def begin(self) -> None:
        """Show the plan of a run at its start, and announce its first part."""
        self._count()
        self._all = self._epochs
        history, starts = self._run.history, self._run.starts
        if self._is_resumed:
            self.say(
                f"resuming after epoch {len(history)} of {self._last}"
                if len(history) < self._last
                else f"all {self._last} epochs are done"
            )
        if not history and not starts.scores:
            for line in self._plan():
                self.say(line)
        if starts.are_tried:
            self.say(starts.trial())

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self._display.say(line)
        self._shown = self._pace.here

    def step(self, share: float) -> None:
        """Show that a share of the current epoch is done, if a line is due."""
        self._pace.step(share)
        since = self._pace.here - self._shown
        if since >= (_LIVE_STEP_SECONDS if self._display.is_live else _PLAIN_SECONDS):
            self._show(len(self._run.history) + share)
        self._estimate()

    def epoch(self, row: Row) -> None:
        """Show an epoch's values, if a line is due, and announce epochs that are added."""
        epoch = int(row["epoch"] or 0)
        has_round = self._has_round(epoch)
        self._pace.epoch(has_round)
        self._epochs, self._rounds = self._epochs - 1, self._rounds - has_round
        # Epoch 1 forgets the values of another start.
        self._values = {**({} if epoch == 1 else self._values), **known(row)}
        is_due = epoch % self._interval == 0 or epoch == self._run.epochs
        if self._display.is_live:
            is_due = is_due or self._pace.here - self._shown >= _LIVE_SECONDS
        if is_due:
            self._show(epoch)
        self._estimate()
        if self._last < self._run.epochs:
            self._count()
            self._last = self._run.epochs
            self._all += self._last - epoch
            words = f"Continuing with epochs {epoch + 1} to {self._last}."
            self.say(f"Training has not settled. {words}")

    def restart(self, row: Row | None) -> None:
        """Announce the end of a start, and the next one or the one that continues."""
        super().restart(row)
        self._count()
        starts = self._run.starts
        self.say(starts.end_of_trial())
        self.say(starts.trial() if starts.are_tried else starts.choice(self._run.epochs))

    def end(self, is_complete: bool) -> None:
        """Tell whether training that may be extended has settled."""
        epoch, cycles = len(self._run.history), self._run.cycles
        if not is_complete or cycles.most == cycles.first:
            return
        if epoch < cycles.most:
            self.say(f"Training has settled after epoch {epoch:,} of at most {cycles.most:,}.")
        else:
            self.say(
                f"Training has reached the maximum of {epoch:,} epochs. If there is no warning, you"
                " can use the result."
            )

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._display.close()

    def _has_round(self, epoch: int) -> bool:
        learner = self._run.learner
        return learner is not None and learner.is_due(epoch)

    def _count(self) -> None:
        """Count the epochs and rounds that are left."""
        run = self._run
        left = run.starts.epochs_left(len(run.history), run.epochs)
        self._epochs = sum(map(len, left))
        self._rounds = sum(self._has_round(epoch) for part in left for epoch in part)

    def _plan(self) -> list[str]:
        """Return the plan of the run, in a few lines."""
        run, steps = self._run, self._run.steps
        last, starts = run.epochs, run.starts
        words = f"{_counted(last, 'epoch')} of {_counted(steps, 'step')}"
        if starts.are_tried:
            words += f", with {len(starts.decays)} start decays in epochs 1 to {starts.until}"
        words += f", so {_counted(self._epochs * steps, 'step')} in total"
        if run.cycles.most > last:
            words += f", and up to {run.cycles.most:,} epochs if training has not settled"
        lines = [f"{words}. Loss and log evidence are in nats per example."]
        if (learner := run.learner) is not None and self._rounds:
            first = next(epoch for epoch in range(1, last + 1) if learner.is_due(epoch))
            lines.append(
                f"{_counted(self._rounds, 'round')} of hyperparameter steps with"
                f" {run.settings.estimator}, the first after epoch {first}."
            )
        return lines

    def _estimate(self) -> None:
        """Show the time of the run once it can be estimated."""
        if self._is_estimated or self._pace.here < _FIRST_SECONDS:
            return
        left = self._pace.left(self._epochs, self._rounds)
        if left is None:
            return
        self._is_estimated = True
        if (total := self._pace.elapsed + left) >= _LONG_SECONDS:
            lacks_rounds = self._rounds and not self._pace.has_rounds
            without = ", not counting the rounds" if lacks_rounds else ""
            self.say(f"Estimated time: about {_rough(total)}{without}.")

    def _show(self, epoch: float) -> None:
        run, last = self._run, self._run.epochs
        count = f"{epoch:.0f}" if epoch == int(epoch) else f"{epoch:.2f}"
        left = self._pace.left(self._epochs, self._rounds)
        more = "over " if self._rounds and not self._pace.has_rounds else ""
        times = f"{clock(self._pace.elapsed)} elapsed"
        times += f", {more}{clock(left)} left" if left is not None and self._epochs else ""
        values = summary(self._values, run.evidence.temperature / run.evidence.num_data)
        text = f"epoch {count:>{len(str(last))}}/{last}  {times}  {values}"
        self._display.show(text, 1 - self._epochs / max(1, self._all))
        self._shown = self._pace.here


def summary(row: Row, decay: float) -> str:
    """Return the main values of a row as text: loss, log evidence, weight decays and noise.

    Args:
        row: Values by name.
        decay: Weight decay of a prior precision of 1, which is T/N.
    """
    parts = [_part(row, "loss", "loss"), _part(row, "log_evidence", "log evidence")]
    lower, upper = row.get("bracket_lower"), row.get("bracket_upper")
    if lower is not None and upper is not None:
        parts.append(f"exact in {lower:.3f}..{upper:.3f}")
    decays = [decay * v for k, v in row.items() if k.startswith("precision/") and v is not None]
    if decays:
        least, most = min(decays), max(decays)
        text = f"{least:.3g}" if most <= least * 1.001 else f"{least:.3g} to {most:.3g}"
        parts.append(f"weight decay {text}")
    parts.append(_part(row, "noise", "noise"))
    parts.append(_part(row, "test_log_likelihood", "test log lik."))
    return "  ".join(part for part in parts if part)


def nats(*values: float) -> list[str]:
    """Return log likelihoods or log evidences as text, with at least three digits."""
    digits = 2 if max(map(abs, values), default=0.0) >= 1 else 3
    return [f"{value:.{digits}f}" for value in values]


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds, such as 4:05, or with hours, such as 1:04:05."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _rough(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _part(row: Row, name: str, label: str) -> str:
    value = row.get(name)
    return "" if value is None else f"{label} {nats(value)[0]}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
