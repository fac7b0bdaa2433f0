"""Jobs of experiments and their results. Each job is a folder, whose name is a hash of the job."""

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from evigrad.errors import ConfigurationError
from evigrad.files import replacing
from experiments.trainings import digest, resolved, stored

# Number of blocks of a partition whose mean is the estimate at the end of a training. Figure 1 and
# the training figures share it, because they share trainings.
BLOCKS = 30
OVER_SUBSETS = "standard error over its subsets"  # the header of its column
RANGE = "range/"  # prefix of the metrics of learned ranges
# Estimators of trainings that have no estimate of the evidence.
WITHOUT_ESTIMATE = (None, "map", "augerino")
_RECORD = "job.json"  # the job, with its result or the reason of its failure


@dataclass(frozen=True, eq=False)
class Job:
    """Work with a stored result, identified by everything that the result depends on.

    Attributes:
        kind: ``train``, or ``evaluate``, ``curve``, ``curves`` or ``time`` of a trained network.
        training: All options of ``evigrad train`` for the training.
        options: Options of the work with the trained network.
    """

    kind: str
    training: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        """Return everything that identifies the job."""
        return {"kind": self.kind, "training": self.training, **self.options}

    @cached_property
    def id(self) -> str:
        """Return the identity: equal for equal work, different for any other work."""
        return digest(self.content)

    @property
    def needs(self) -> "Job | None":
        """Return the job that must be done before."""
        return None if self.kind == "train" else Job("train", self.training)

    @property
    def label(self) -> str:
        """Return a name for people."""
        training = self.training
        data, subset = training["data"], training["subset"]
        if subset is not None:
            data = f"{subset} of {data}"
        keys = ("estimator", "hyperparameter")
        details = [str(self.options[key]) for key in keys if key in self.options]
        if "estimators" in self.options:
            details.insert(0, f"{len(self.options['estimators'])} estimators")
        names = [training["estimator"] or "map", data, training["model"] or "default network"]
        return f"{self.kind} {' along '.join(details)}{' of ' if details else ''}" + ", ".join(
            [*names, f"seed {training['seed']}"]
        )


def is_kept(metric: str) -> bool:
    """Return whether a training stores this metric for all epochs. Its run has the rest."""
    return metric == "log_evidence" or metric.startswith(("test_", "train_", RANGE))


def training(*options: Mapping[str, Any], seed: int) -> Job:
    """Return a training by options of ``evigrad train``. Later options replace earlier ones."""
    together = {name: value for part in options for name, value in part.items()}
    return Job("train", _resolved(json.dumps(together)) | {"seed": seed})


@cache
def _resolved(options: str) -> dict[str, Any]:
    return resolved(json.loads(options))


def evaluation(trained: Job, estimator: str | None = None, blocks: int | None = None) -> Job:
    """Return the job for the log evidence of a trained network.

    Args:
        trained: Training.
        estimator: Name of the estimator. Default: the estimator of the training.
        blocks: Maximum number of blocks of a partition. None for all.
    """
    name = estimator or trained.training["estimator"]
    return Job("evaluate", trained.training, {"estimator": name, "blocks": blocks})


def with_estimate(trained: Job, blocks: int | None = None) -> dict[str, Job]:
    """Return a training as ``train`` and, if it has an estimator, its estimate as ``estimate``."""
    has_none = trained.training["estimator"] in WITHOUT_ESTIMATE
    estimate = {} if has_none else {"estimate": evaluation(trained, blocks=blocks)}
    return {"train": trained} | estimate


def final_numbers(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers that tables and figures show from the results of ``with_estimate``.

    Returns:
        Log evidence and its standard error over subsets (None for a baseline), test log
        likelihood in nats per example, test accuracy in percent, seconds, and number of weights.
    """
    trained = results["train"]
    estimate = results.get("estimate", {})
    return {
        "log_evidence": estimate.get("per_datum"),
        OVER_SUBSETS: estimate.get("sem"),
        "log_likelihood": trained["test"]["log_likelihood"],
        "accuracy": 100 * trained["test"]["accuracy"],
        "seconds": trained["seconds"],
        "weights": float(trained["num_weights"]),
    }


def timing(trained: Job) -> Job:
    """Return the job for the time of an estimate with its gradient."""
    return Job("time", trained.training)


def curves(trained: Job, estimators: list[str], along: str, grid: list[float]) -> Job:
    """Return the job for several bounds along a hyperparameter, which one kernel serves.

    Args:
        trained: Training.
        estimators: Bounds.
        along: Name of a range.
        grid: Values of the range.
    """
    return Job("curves", trained.training, {"estimators": estimators, **_along(along, grid)})


def curve(trained: Job, estimator: str, along: str, grid: list[float], blocks: int | None) -> Job:
    """Return the job for a bound along a hyperparameter, for the weights of a training.

    Args:
        trained: Training.
        estimator: Bound.
        along: ``precision``, or the name of a range.
        grid: Values of the hyperparameter.
        blocks: Maximum number of blocks of a partition. None for all.
    """
    options = {"estimator": estimator, **_along(along, grid), "blocks": blocks}
    return Job("curve", trained.training, options)


def _along(hyperparameter: str, grid: list[float]) -> dict[str, Any]:
    return {"hyperparameter": hyperparameter, "grid": grid}


def _job_of(content: Mapping[str, Any]) -> Job:
    """Return the job with this content."""
    options = dict(content)
    return Job(options.pop("kind"), options.pop("training"), options)


def exported(file: Path) -> list[tuple[Job, dict[str, Any]]]:
    """Return the jobs of a file that ``Store.export`` wrote, with their results.

    Raises:
        ConfigurationError: If the file cannot be read.
    """
    if not file.is_file():
        raise ConfigurationError(f"There is no file {file}.")
    try:
        lines = gzip.decompress(file.read_bytes()).decode("utf-8").splitlines()
        return [(_job_of(line["job"]), dict(line["result"])) for line in map(json.loads, lines)]
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"{file} holds no readable results ({error}). Use a file that --export wrote."
        ) from error


def distinct(jobs: Iterable[Job]) -> list[Job]:
    """Return all jobs and the jobs that they need, each once, in a possible order of work."""
    chains = ([job] if job.needs is None else [job.needs, job] for job in jobs)
    return list({job.id: job for chain in chains for job in chain}.values())


class Store:
    """Results of jobs in a folder. It contains no paths to other places.

    Args:
        path: Folder, created when the first job begins.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def folder(self, job: Job) -> Path:
        """Return the folder of a job, which may not exist yet."""
        return self.path / "workspace" / job.id

    def result(self, job: Job) -> dict[str, Any] | None:
        """Return the result of a job. None if it is not done."""
        return self._record(job).get("result")

    def failure(self, job: Job) -> str | None:
        """Return why a job without a result failed the last time."""
        return self._record(job).get("failure")

    def begin(self, job: Job) -> Path:
        """Make the folder of a job.

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
        return folder

    def finish(self, job: Job, result: dict[str, Any]) -> None:
        """Store the result of a job: plain numbers, texts, lists and dictionaries of them."""
        self._write(job, {"result": result})

    def fail(self, job: Job, reason: str) -> None:
        """Store why a job failed."""
        self._write(job, {**self._record(job), "failure": reason})

    def export(self, file: Path) -> int:
        """Write all results, without the trained networks, which may be large.

        Args:
            file: File with a line of JSON per result, compressed by gzip. Equal results make an
                equal file.

        Returns:
            Number of results.

        Raises:
            ConfigurationError: If there are no results, or if one cannot be read.
            OSError: If the file cannot be written.
        """
        records = map(stored, self.path.glob(f"workspace/*/{_RECORD}"))
        finished = [(r["job"], r["result"]) for r in records if "result" in r]
        if not finished:
            raise ConfigurationError(f"There is no result in {self.path}. Run an experiment first.")
        lines = [
            json.dumps({"job": job, "result": result}, sort_keys=True) + "\n"
            for job, result in finished
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as opened:
            opened.write(gzip.compress("".join(sorted(lines)).encode("utf-8"), mtime=0))
        return len(finished)

    def take(self, file: Path) -> int:
        """Add results from a file of ``export`` that are not here.

        Args:
            file: File that ``export`` wrote.

        Returns:
            Number of new results.

        Raises:
            ConfigurationError: If the file cannot be read.
        """
        new = [(job, result) for job, result in exported(file) if self.result(job) is None]
        for job, result in new:
            self.finish(job, result)
        return len(new)

    def _record(self, job: Job) -> dict[str, Any]:
        path = self.folder(job) / _RECORD
        return stored(path) if path.exists() else {}

    def _write(self, job: Job, record: Mapping[str, Any]) -> None:
        with replacing(self.begin(job) / _RECORD) as file:
            file.write(json.dumps({"job": job.content, **record}).encode("utf-8"))
