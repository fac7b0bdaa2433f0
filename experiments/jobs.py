"""What experiments are made of: jobs, each a state point of a signac project, and their results."""

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import signac
from signac.job import Job as SignacJob
from signac.job import calc_id

from evigrad.errors import ConfigurationError
from evigrad.files import replacing
from experiments.trainings import resolved, stored

# Of a partition, that the estimate at the end of a training is the mean of, for Figure 1 and the
# training figures, which have trainings in common.
BLOCKS = 30
OVER_SUBSETS = "standard error over its subsets"  # of an estimate, and the head of its column
RANGE = "range/"  # what the metrics of learned ranges begin with
# Estimators of trainings that have no estimate of the evidence.
WITHOUT_ESTIMATE = (None, "map", "augerino")


@dataclass(frozen=True, eq=False)
class Job:
    """A piece of work with a result that is kept, known by all that this depends on.

    Attributes:
        kind: ``train``; or ``evaluate``, ``curve``, ``curves`` and ``time``, of a trained network.
        training: All options of the training, as of ``evigrad train``.
        options: Of what is done with it.
    """

    kind: str
    training: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def statepoint(self) -> dict[str, Any]:
        """What signac knows it by."""
        return {"kind": self.kind, "training": self.training, **self.options}

    @cached_property
    def id(self) -> str:
        """The same for the same work, another for any other."""
        return calc_id(self.statepoint)

    @property
    def needs(self) -> "Job | None":
        """The job that has to be done before."""
        return None if self.kind == "train" else Job("train", self.training)

    @property
    def label(self) -> str:
        """Words for people."""
        of = self.training
        data = of["data"] if of["subset"] is None else f"{of['subset']} of {of['data']}"
        own = [str(self.options[n]) for n in ("estimator", "hyperparameter") if n in self.options]
        if "estimators" in self.options:
            own.insert(0, f"{len(self.options['estimators'])} estimators")
        names = [of["estimator"] or "map", data, of["model"] or "default network"]
        return f"{self.kind} {' along '.join(own)}{' of ' if own else ''}" + ", ".join(
            [*names, f"seed {of['seed']}"]
        )


def is_kept(metric: str) -> bool:
    """Whether a training keeps this of all epochs; the rest is in the folder of its run."""
    return metric == "log_evidence" or metric.startswith(("test_", "train_", RANGE))


def training(*options: Mapping[str, Any], seed: int) -> Job:
    """A training by options of ``evigrad train``, of which later ones replace earlier ones."""
    together = {name: value for part in options for name, value in part.items()}
    return Job("train", _resolved(json.dumps(together)) | {"seed": seed})


@cache
def _resolved(options: str) -> dict[str, Any]:
    return resolved(json.loads(options))


def evaluation(of: Job, estimator: str | None = None, blocks: int | None = None) -> Job:
    """The log evidence of a trained network by its own estimator, or by another one.

    Args:
        of: The training.
        estimator: Default: its own.
        blocks: Of a partition, at most; None for all.
    """
    name = estimator or of.training["estimator"]
    return Job("evaluate", of.training, {"estimator": name, "blocks": blocks})


def with_estimate(of: Job, blocks: int | None = None) -> dict[str, Job]:
    """A training as ``train``; its own estimate as ``estimate`` where it has an estimator."""
    has_none = of.training["estimator"] in WITHOUT_ESTIMATE
    return {"train": of} | ({} if has_none else {"estimate": evaluation(of, blocks=blocks)})


def final_numbers(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What tables and figures show of the results of ``with_estimate``.

    Returns:
        Log evidence and its standard error over subsets (None of a baseline), and test log
        likelihood in nats per datum, test accuracy in percent, seconds of the training, and its
        number of weights.
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


def timing(of: Job) -> Job:
    """The time of an estimate with its gradient by a training's own estimator."""
    return Job("time", of.training)


def curves(of: Job, estimators: list[str], along: str, grid: list[float]) -> Job:
    """Several bounds along a hyperparameter of the model, which one kernel serves.

    Args:
        of: The training.
        estimators: The bounds.
        along: The name of a range.
        grid: Its values.
    """
    return Job("curves", of.training, {"estimators": estimators, **_along(along, grid)})


def curve(of: Job, estimator: str, along: str, grid: list[float], blocks: int | None) -> Job:
    """A bound along a hyperparameter, for the weights of a training.

    Args:
        of: The training.
        estimator: The bound.
        along: ``precision``, or the name of a range.
        grid: Its values.
        blocks: Of a partition, at most; None for all.
    """
    options = {"estimator": estimator, **_along(along, grid), "blocks": blocks}
    return Job("curve", of.training, options)


def _along(hyperparameter: str, grid: list[float]) -> dict[str, Any]:
    return {"hyperparameter": hyperparameter, "grid": grid}


def _of(statepoint: Mapping[str, Any]) -> Job:
    """The job that signac knows by this."""
    options = dict(statepoint)
    return Job(options.pop("kind"), options.pop("training"), options)


def distinct(jobs: Iterable[Job]) -> list[Job]:
    """All jobs with what they need, each once, in an order in which they can be done."""
    chains = ([job] if job.needs is None else [job.needs, job] for job in jobs)
    return list({each.id: each for chain in chains for each in chain}.values())


class Store:
    """Results of jobs in a signac project. Nothing in it names a place outside of it.

    Args:
        path: Its folder, made when the first job begins.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def folder(self, job: Job) -> Path:
        """The folder of a job, which may not exist yet."""
        return self.path / "workspace" / job.id

    def result(self, job: Job) -> dict[str, Any] | None:
        """What was kept of a job; None where it is not done."""
        return self._document(job).get("result")

    def failure(self, job: Job) -> str | None:
        """Why a job without a result could not be done the last time, in words."""
        return self._document(job).get("failure")

    def begin(self, job: Job) -> Path:
        """Make the folder of a job.

        Raises:
            ConfigurationError: If it cannot be made.
        """
        return Path(self._opened(job).path)

    def finish(self, job: Job, result: dict[str, Any]) -> None:
        """Keep the result of a job: plain numbers, texts, lists and dictionaries of them."""
        self._opened(job).document.reset({"result": result})

    def fail(self, job: Job, reason: str) -> None:
        """Keep why a job could not be done."""
        self._opened(job).document["failure"] = reason

    def export(self, file: Path) -> int:
        """Write all results, without the trained networks, which may be large.

        Args:
            file: A line of JSON for each, compressed by gzip; the same results make the same file.

        Returns:
            How many.

        Raises:
            ConfigurationError: If there is none, or one cannot be read.
            OSError: If the file cannot be written.
        """
        there = self.project() if self.path.exists() else ()
        jobs = [_of(each.cached_statepoint) for each in there]
        found = [(job, result) for job in jobs if (result := self.result(job)) is not None]
        if not found:
            raise ConfigurationError(f"There is no result in {self.path}; run an experiment first.")
        lines = [
            json.dumps({"job": job.statepoint, "result": result}, sort_keys=True) + "\n"
            for job, result in found
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as opened:
            opened.write(gzip.compress("".join(sorted(lines)).encode("utf-8"), mtime=0))
        return len(found)

    def take(self, file: Path) -> int:
        """Keep results that ``export`` has written, those of them that are not here.

        Args:
            file: As ``export`` writes it.

        Returns:
            How many were not here.

        Raises:
            ConfigurationError: If the file cannot be read.
        """
        if not file.is_file():
            raise ConfigurationError(f"There is no file {file}.")
        try:
            lines = gzip.decompress(file.read_bytes()).decode("utf-8").splitlines()
            known = [(_of(each["job"]), dict(each["result"])) for each in map(json.loads, lines)]
        except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"{file} holds no results that can be read ({error}). Give one that --export wrote."
            ) from error
        new = [(job, result) for job, result in known if self.result(job) is None]
        for job, result in new:
            self.finish(job, result)
        return len(new)

    def _opened(self, job: Job) -> SignacJob:
        return self.project().open_job(job.statepoint).init()

    def project(self) -> signac.Project:
        """The signac project, made where there is none: before several processes want it.

        Raises:
            ConfigurationError: If it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return signac.init_project(str(self.path))
        except OSError as error:
            raise ConfigurationError(
                f"The folder of results {self.path} cannot be written ({error.strerror}); name"
                " another: --results DIR."
            ) from error

    def _document(self, job: Job) -> dict[str, Any]:
        # Read without signac, which would make a folder for it.
        path = self.folder(job) / SignacJob.FN_DOCUMENT
        return stored(path) if path.exists() else {}
