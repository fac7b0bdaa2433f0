"""What several commands do first: threads, device, data, network."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from evigrad.data import DataSet, load
from evigrad.errors import ConfigurationError
from evigrad.models import make_model

# Types of the options below, and of those of ``evigrad.fit``, on the command line.
SETUP_TYPES: dict[str, Any] = {
    "data": str,
    "data_dir": str | None,
    "subset": int | None,
    "model": str,
    "seed": int,
    "device": str,
    "threads": int | None,
}


@dataclass(frozen=True)
class Setup:
    """Data and the way to make networks for it.

    Attributes:
        data: The data set, on the device.
        device: Where to compute.
        model_name: Name of the network.
        seed: Seed of initial weights.
    """

    data: DataSet
    device: torch.device
    model_name: str
    seed: int

    def make_model(self) -> nn.Module:
        """The network with its initial weights, the same ones at every call."""
        shape, outputs = self.data.input_shape, self.data.num_outputs
        return make_model(self.model_name, shape, outputs, self.seed).to(self.device)


def set_up(
    data: str = "digits",
    data_dir: str | None = None,
    subset: int | None = None,
    model: str = "digitsnet",
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
) -> Setup:
    """Load data and choose a device.

    Args:
        data: Data set: digits, mnist5k, or the NAME of Parquet files in the data folder; mnist,
            fashion_mnist, cifar10, cifar100 and tiny_imagenet come from the Hugging Face hub where
            the folder lacks them. NAME:rotated90, NAME:rotated180, NAME:translated8 and NAME:scaled
            are image sets with every image transformed once.
        data_dir: Folder with NAME_train.parquet and NAME_test.parquet. Default: the environment
            variable EVIGRAD_DATA.
        subset: Number of training data, drawn at random. Default: all.
        model: Network: mlp, digitsnet (8x8 images) or mininet (28x28 images).
        seed: Seed of the subset, the initial weights and everything random in training.
        device: Where to compute: cpu, cuda, or auto (cuda if there is one).
        threads: CPU threads. Default: as many as PyTorch takes, one for each core.

    Returns:
        What the commands work with.

    Raises:
        ConfigurationError: If there is no such data set, network or device.
    """
    if threads is not None:
        if threads < 1:
            raise ConfigurationError(f"threads must be at least 1, not {threads}.")
        torch.set_num_threads(threads)
    if seed < 0:
        raise ConfigurationError(f"seed must be 0 or more, not {seed}.")
    place = _device(device)
    loaded = load(data, data_dir, subset, seed)
    return Setup(loaded.to(place), place, model, seed)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"The device '{name}' cannot be used here. Say cpu, auto, or cuda where PyTorch finds a"
            " GPU."
        ) from error
    return device
