"""The jobs of cases: trainings, and what is done with the trained networks."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from evigrad.errors import ConfigurationError
from evigrad.experiments.configuration import resolved
from evigrad.experiments.jobs import Job
from evigrad.training.settings import BASELINES


def training(*options: Mapping[str, Any], seed: int) -> Job:
    """A training.

    Args:
        *options: Of ``evigrad train``; later ones replace earlier ones.
        seed: Of data, weights, and all that is random.

    Returns:
        Its job.
    """
    together = {name: value for part in options for name, value in part.items()}
    config = resolved({**together, "seed": seed})
    words = [config["estimator"] or "map", config["data"], config["model"] or "default network"]
    if config["subset"] is not None:
        words.insert(2, f"{config['subset']} data")
    return Job("train", config, label=", ".join([*words, f"seed {seed}"]))


def evaluation(of: Job, estimator: str | None = None, blocks: int | None = None) -> Job:
    """The log evidence of a trained network.

    Args:
        of: The training.
        estimator: Default: its own.
        blocks: Of a partition, at most; None for all.

    Returns:
        The job.
    """
    name = estimator or of.config["estimator"]
    config = {"estimator": name, "blocks": blocks, "seed": of.config["seed"]}
    return Job("evaluate", config, of, f"{name} of {of.label}")


def with_estimate(of: Job, blocks: int | None = None) -> dict[str, Job]:
    """A training, and its own estimate at the end where it has an estimator.

    Args:
        of: The training.
        blocks: As for ``evaluation``.

    Returns:
        The jobs ``train`` and maybe ``estimate``.
    """
    jobs = {"train": of}
    if of.config["estimator"] not in BASELINES:
        jobs["estimate"] = evaluation(of, blocks=blocks)
    return jobs


def final_numbers(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What tables and figures show of ``with_estimate``.

    Args:
        results: Of its jobs.

    Returns:
        Log evidence (None of a baseline) and test log likelihood in nats per datum, test accuracy
        in percent, seconds of the training.
    """
    test = results["train"]["test"]
    return {
        "log_evidence": results["estimate"]["per_datum"] if "estimate" in results else None,
        "log_likelihood": test["log_likelihood"],
        "accuracy": 100 * test["accuracy"],
        "seconds": results["train"]["seconds"],
    }


def timing(of: Job, repeats: int = 5) -> Job:
    """The time of an estimate with its gradient by a training's own estimator.

    Args:
        of: The training.
        repeats: How often, at most.

    Returns:
        The job.
    """
    steps = of.config["hyper_steps"] or of.config["steps"]
    return Job("time", {"repeats": repeats, "round": steps}, of, of.label)


def curve(
    of: Job, estimator: str, hyperparameter: str, grid: list[float], blocks: int | None
) -> Job:
    """A bound along a hyperparameter, for the weights of a training.

    Args:
        of: The training.
        estimator: The bound.
        hyperparameter: ``precision``, or the name of a range.
        grid: Its values.
        blocks: Of a partition, at most; None for all.

    Returns:
        The job.
    """
    config = {
        "estimator": estimator,
        "hyperparameter": hyperparameter,
        "grid": grid,
        "blocks": blocks,
        "seed": of.config["seed"],
    }
    return Job("curve", config, of, f"{estimator} along {hyperparameter}, {of.label}")


def grid_of(settings: Mapping[str, Any]) -> list[float]:
    """Values from the words of a file.

    Args:
        settings: ``start``, ``stop``, ``count``, and ``log`` for a logarithmic grid.

    Returns:
        The values, with six digits.

    Raises:
        ConfigurationError: If one of them is missing or makes no sense.
    """
    try:
        start, stop = float(settings["start"]), float(settings["stop"])
        count, log = settings["count"], settings.get("log", False)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"A grid has numbers start, stop and count, and log: yes or no, not {settings}."
        ) from error
    if type(count) is not int or count < 2:
        raise ConfigurationError(f"A grid has 2 points or more, not {count}.")
    if not math.isfinite(start) or not math.isfinite(stop) or not start < stop:
        raise ConfigurationError(f"A grid goes up, not from {start:g} to {stop:g}.")
    if not isinstance(log, bool):
        raise ConfigurationError(f"A grid is logarithmic or not: yes or no, not {log!r}.")
    if log and start <= 0:
        raise ConfigurationError(f"A logarithmic grid begins above 0, not at {start:g}.")
    values = np.geomspace(start, stop, count) if log else np.linspace(start, stop, count)
    return [float(f"{value:.6g}") for value in values]
