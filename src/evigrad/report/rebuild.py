"""Data and network of a run, made again from its folder."""

from pathlib import Path

from torch import nn

from evigrad import data as data_sets
from evigrad.data import DataSet
from evigrad.errors import ConfigurationError
from evigrad.report.records import Record
from evigrad.training import load


def rebuild(record: Record, data_dir: str | Path | None = None) -> tuple[DataSet, nn.Module]:
    """Data and network of a run of the command line, as at its last checkpoint, on the CPU.

    Args:
        record: The run.
        data_dir: Folder of data sets, where the run's own folder is not here any more.

    Returns:
        The data and the network.

    Raises:
        ConfigurationError: If the run was started from Python, has no checkpoint yet, or its data
            are not here.
    """
    options = record.options
    if not options:
        raise ConfigurationError(
            "The run has no config.yaml, which says what its data and its network are: it was"
            " started from Python."
        )
    loaded = data_sets.load(
        options["data"],
        data_dir or options.get("data_dir"),
        options.get("subset"),
        options.get("seed", 0),
        target=options.get("target"),
        likelihood=options.get("likelihood"),
    )
    if (test_subset := options.get("test_subset")) is not None:
        loaded = loaded.with_test_subset(test_subset, options.get("seed", 0))
    return loaded, load(record.path, device="cpu").model
