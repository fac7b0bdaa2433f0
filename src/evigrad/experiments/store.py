"""The folder of all results: one for each job, by its identity. It can be moved as a whole."""

import json
from pathlib import Path
from typing import Any

from evigrad.errors import ConfigurationError
from evigrad.experiments.jobs import Job
from evigrad.training.files import replacing

RESULT = "result.json"
# What the result was computed from, for people and for a second look.
CONFIG = "job.json"
# Why it could not be done the last time.
FAILURE = "failure.json"


class Store:
    """Results of jobs under one folder.

    Nothing in it names a place outside of it.

    Args:
        folder: Made on demand.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)

    def folder(self, job: Job) -> Path:
        """The folder of a job, which may not exist yet.

        Args:
            job: Any.

        Returns:
            The path.
        """
        return self.path / job.kind / job.id

    def is_begun(self, job: Job) -> bool:
        """Whether there is something of a job.

        Args:
            job: Any.

        Returns:
            True from its first file on.
        """
        return (self.folder(job) / CONFIG).exists()

    def result(self, job: Job) -> dict[str, Any] | None:
        """The result of a job.

        Args:
            job: Any.

        Returns:
            What was kept, or None where it is not done.

        Raises:
            ConfigurationError: If the file cannot be read.
        """
        path = self.folder(job) / RESULT
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path} cannot be read ({error}). Remove it: its job will be done again."
            ) from error

    def begin(self, job: Job) -> Path:
        """Make the folder of a job.

        Args:
            job: Any.

        Returns:
            The folder, with the job's configuration in it.

        Raises:
            ConfigurationError: If it cannot be made.
        """
        folder = self.folder(job)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"The folder of results {self.path} cannot be written ({error.strerror}); name"
                " another: --results DIR."
            ) from error
        if not self.is_begun(job):
            content = {"kind": job.kind, "label": job.label, "config": job.config}
            if job.needs is not None:
                content["needs"] = f"{job.needs.kind}/{job.needs.id}"
            write_json(folder / CONFIG, content)
        return folder

    def finish(self, job: Job, result: dict[str, Any]) -> None:
        """Keep the result of a job.

        Args:
            job: Any, begun.
            result: Plain numbers, texts, lists and dictionaries of them.
        """
        write_json(self.folder(job) / RESULT, result)
        (self.folder(job) / FAILURE).unlink(missing_ok=True)

    def fail(self, job: Job, reason: str) -> None:
        """Keep why a job could not be done.

        Args:
            job: Any.
            reason: In words.
        """
        write_json(self.begin(job) / FAILURE, {"reason": reason})

    def failure(self, job: Job) -> str | None:
        """Why a job without a result could not be done the last time.

        Args:
            job: Any.

        Returns:
            The reason in words, or None.
        """
        path = self.folder(job) / FAILURE
        return json.loads(path.read_text(encoding="utf-8"))["reason"] if path.exists() else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is whole at every moment.

    Args:
        path: The file.
        content: What to write.
    """
    with replacing(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode("utf-8"))
