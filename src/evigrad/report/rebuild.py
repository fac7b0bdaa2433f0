"""Data and network of a run, made again from what its folder holds."""

from pathlib import Path

from torch import nn

from evigrad.cli.setup import SETUP_TYPES, set_up
from evigrad.data import DataSet
from evigrad.errors import ConfigurationError
from evigrad.report.records import Record
from evigrad.training.run_directory import RunDirectory


def rebuild(record: Record, data_dir: str | Path | None = None) -> tuple[DataSet, nn.Module]:
    """Data and network of a run that the command line started, by the way that it makes them.

    Args:
        record: The run.
        data_dir: Folder of data sets, where the run's is not here any more.

    Returns:
        The data, and the network as it was at the last checkpoint, both on the CPU.

    Raises:
        ConfigurationError: If the run was started from Python, has no checkpoint yet, its data are
            not here, or the checkpoint is one of another network.
    """
    if not record.options:
        raise ConfigurationError(
            "The run has no config.yaml, which says what its data and its network are: it was"
            " started from Python."
        )
    state = RunDirectory(record.path, resume=True).read_checkpoint()
    if state is None:
        raise ConfigurationError("The run has no checkpoint yet.")
    options = {name: record.options[name] for name in SETUP_TYPES if name in record.options}
    # Of this machine and this process, not of those that trained.
    options |= {"device": "cpu", "threads": None}
    if data_dir is not None:
        options["data_dir"] = str(data_dir)
    setup = set_up(**options)
    model = setup.make_model()
    try:
        model.load_state_dict(state["model"])
    except (KeyError, RuntimeError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            "The checkpoint does not fit the network that config.yaml names."
        ) from error
    return setup.data, model.eval()
