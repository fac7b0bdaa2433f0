"""The folder of a run: configuration, metrics, checkpoint, figures."""

import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from evigrad.errors import ConfigurationError, EvigradError, EvigradWarning
from evigrad.files import PARTIAL, is_intact, replacing, seal, sole_writer
from evigrad.training.checkpoint import CHECKPOINT_FORMAT
from evigrad.training.history import MetricsFile, Row
from evigrad.training.observers import Observer, Run

# Share of the time that checkpoints may take by default.
_SHARE = 0.05

# A folder with one of these belongs to a run: the command line and ``fit`` write them first.
CONFIGURATIONS = ("config.json", "config.yaml")


class RunDirectory:
    """A folder that belongs to one run.

    If a folder is not empty, only the resumed run may write into it. A new run uses the first free
    folder among ``name-2``, ``name-3``, ... instead.

    Every file is replaced as a whole, except ``metrics.csv``, to which rows are appended one by
    one.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        """Create the folder. With ``resume``, use it as it is if it holds a run or is empty."""
        self.path, number = Path(path), 1
        while not resume and not _is_free(self.path):
            number += 1
            self.path = Path(path).with_name(f"{Path(path).name}-{number}")
        self.checkpoint = self.path / "checkpoint.pt"
        self.checkpoint_before = self.path / "checkpoint_before.pt"  # in case that one is damaged
        self.metrics = self.path / "metrics.csv"
        self._lock: ExitStack | None = None
        if not _is_free(self.path) and not _contents(self.path).intersection(CONFIGURATIONS):
            raise ConfigurationError(
                f"{self.path} holds no run to resume: it has no {' and no '.join(CONFIGURATIONS)}."
                " Use the folder of a run, or an empty folder."
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot create the run folder {self.path} ({error.strerror}). Use another folder."
            ) from error

    @property
    def figures(self) -> Path:
        """Return the folder of the figures, and create it on first use."""
        folder = self.path / "figures"
        folder.mkdir(exist_ok=True)
        return folder

    @contextmanager
    def locked(self, wait: bool = False) -> Iterator[None]:
        """Lock the folder if it is not locked yet. With ``wait``, wait until it is free."""
        if self._lock is not None:
            yield
            return
        with ExitStack() as self._lock:
            try:
                self._lock.enter_context(sole_writer(self.path, wait))
                yield
            finally:
                self._lock = None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write settings or results to a JSON file."""
        self.write_text(name, json.dumps(dict(content), indent=2, default=str) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file."""
        with replacing(self.path / name) as file:
            file.write(text.encode("utf-8"))

    def write_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of tensors and plain values, and also keep the previous checkpoint."""
        write_state(self.checkpoint, state, self.checkpoint_before)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """Return the last checkpoint that can be read, or None if there is no checkpoint."""
        reasons: list[str] = []
        for path in (self.checkpoint, self.checkpoint_before):
            try:
                state = read_state(path)
            except FileNotFoundError:
                continue
            except (ConfigurationError, OSError) as error:
                reasons.append(f"{path} cannot be read: {error}.")
                continue
            if reasons:
                warnings.warn(
                    f"{' '.join(reasons)} The run resumes from the previous checkpoint, after"
                    f" epoch {state.get('epoch')}, and repeats the epochs since then.",
                    EvigradWarning,
                    stacklevel=2,
                )
            return state
        if reasons:
            raise ConfigurationError(f"{' '.join(reasons)} Start a new run in another folder.")
        return None


def write_state(path: Path, state: Mapping[str, Any], before: Path | None = None) -> None:
    """Write tensors and plain values with a digest, and rename the previous file to ``before``."""
    with replacing(path, before) as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # from the unfinished archive, hides the system's own
            cause = error.__context__
            raise (cause if isinstance(cause, OSError) else error) from None
        seal(file)


def read_state(path: Path) -> dict[str, Any]:
    """Return what ``write_state`` wrote.

    Raises:
        ConfigurationError: If the file is damaged.
        OSError: If it cannot be read.
    """
    intact = is_intact(path)
    if intact is False:
        raise ConfigurationError("the file is damaged (its content does not match its digest)")
    try:
        # Loads no code: a checkpoint from somebody else can do no harm.
        state = torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # without a digest, it may be damaged in any way
        if isinstance(error, OSError):
            raise
        kind = type(error).__name__
        raise ConfigurationError(f"the file is truncated, or not a checkpoint ({kind})") from error
    if not isinstance(state, dict):
        raise ConfigurationError("the file does not contain the state of a run")
    # Checkpoints of older versions may have no digest.
    if intact is None and state.get("format") not in range(CHECKPOINT_FORMAT):
        raise ConfigurationError("the file is damaged (its digest is missing)")
    return state


@contextmanager
def naming_files(directory: RunDirectory, history: Sequence[Row]) -> Iterator[None]:
    """Add the path of the metrics to errors, and instructions for resuming to interruptions."""
    try:
        yield
    except EvigradError as error:
        if not history:
            raise
        kept = f"The metrics up to epoch {len(history)} are in {directory.metrics}."
        raise type(error)(f"{error} {kept}") from error
    except KeyboardInterrupt as error:
        again = f"run_dir={str(directory.path)!r}, resume=True"
        error.add_note(f"To resume from the last checkpoint, make the same call with {again}.")
        raise


class Metrics(Observer):
    """Write the metrics of a run while it trains."""

    def __init__(self, run: Run, path: Path) -> None:
        super().__init__(run)
        self._path = path
        self._file: MetricsFile | None = None

    def begin(self) -> None:
        """Write the finished epochs, and drop the rows of epochs that will run again."""
        self.close()
        self._file, history = None, self._run.history
        if history:
            self._file = MetricsFile(self._path, list(history[0]), history)
        else:
            self._path.unlink(missing_ok=True)

    def epoch(self, row: Row) -> None:
        self._file = self._file or MetricsFile(self._path, list(row))
        self._file.write(row)

    def restart(self, row: Row | None) -> None:
        self.begin()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class Checkpoints(Observer):
    """Write the checkpoints of a run while it trains.

    If ``Schedule.checkpoint_every`` is None, a checkpoint is due when writing it takes at most 5 %
    of the time since the previous checkpoint.
    """

    def __init__(self, run: Run, directory: RunDirectory) -> None:
        super().__init__(run)
        self._directory, self._is_unsaved = directory, not run.history
        self._written = time.monotonic()  # time of the last checkpoint
        self._cost = 0.0  # seconds that the last checkpoint took

    def begin(self) -> None:
        """Write the initial weights, which are kept nowhere else."""
        if not self._is_unsaved:
            return
        self._write()
        try:
            self._directory.read_checkpoint()
        except ConfigurationError as error:
            warnings.warn(
                "This run cannot be resumed: its checkpoints hold objects that a file cannot"
                " restore, such as extra state of the model that is neither tensors nor numbers."
                f" Convert such state to tensors or numbers. ({error})",
                EvigradWarning,
                stacklevel=2,
            )

    def epoch(self, row: Row) -> None:
        self._is_unsaved, every = True, self._run.settings.schedule.checkpoint_every
        is_cheap = time.monotonic() - self._written >= self._cost / _SHARE
        if is_cheap if every is None else int(row["epoch"] or 0) % every == 0:
            self._write()

    def end(self, is_complete: bool) -> None:
        """Write the last checkpoint. After training, remove the one before it."""
        if self._is_unsaved:
            self._write()
        if is_complete:
            self._directory.checkpoint_before.unlink(missing_ok=True)

    def _write(self) -> None:
        start = time.monotonic()
        self._directory.write_checkpoint(self._run.state())
        self._written = time.monotonic()
        self._cost, self._is_unsaved = self._written - start, False


def _is_free(path: Path) -> bool:
    """Return whether a path does not exist, or is an empty folder."""
    return not (_contents(path) if path.is_dir() else path.exists())


def _contents(path: Path) -> set[str]:
    """Return the names in a folder, without leftovers of a crash at the start of a run."""
    begun = {name + PARTIAL for name in CONFIGURATIONS}
    return {entry.name for entry in path.iterdir()} - begun if path.is_dir() else set()
