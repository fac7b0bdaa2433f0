"""The folder of a run: configuration, metrics, checkpoint, figures."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evigrad.errors import ConfigurationError
from evigrad.training.metrics import MetricsFile


class RunDirectory:
    """A folder that belongs to one run.

    A folder that holds something already is never written into: the run then gets the first free
    one of ``name-2``, ``name-3``, ... beside it.

    Attributes:
        path: The folder that was made, maybe a numbered one.
    """

    def __init__(self, path: str | Path) -> None:
        """Make the folder.

        Args:
            path: Where the run should go.

        Raises:
            ConfigurationError: If the folder cannot be made.
        """
        self.path = _unused(Path(path))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"The run directory {self.path} cannot be made ({error.strerror}); name another."
            ) from error

    @property
    def checkpoint(self) -> Path:
        """The file with the state of the last checkpoint."""
        return self.path / "checkpoint.pt"

    @property
    def metrics(self) -> Path:
        """The file with one row for each epoch."""
        return self.path / "metrics.csv"

    @property
    def figures(self) -> Path:
        """The folder of the figures, made on demand."""
        folder = self.path / "figures"
        folder.mkdir(exist_ok=True)
        return folder

    def open_metrics(self, columns: Sequence[str]) -> MetricsFile:
        """Start ``metrics.csv``.

        Args:
            columns: Names of the values.

        Returns:
            The open file.
        """
        return MetricsFile(self.metrics, columns)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a file of settings or results.

        Args:
            name: The file's name.
            content: What to write.
        """
        text = json.dumps(dict(content), indent=2, default=str) + "\n"
        (self.path / name).write_text(text, encoding="utf-8")

    def write_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint, so that a whole one is on the disk at every moment.

        Args:
            state: Tensors, numbers, strings, and lists and dictionaries of them.
        """
        partial = self.checkpoint.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.checkpoint)


def _unused(path: Path) -> Path:
    """The path itself, or the first numbered one beside it that is absent or empty."""
    number, candidate = 1, path
    while candidate.exists() and not _is_empty_folder(candidate):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
