"""The setup that several commands share: threads, device, data and network."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jsonargparse import Namespace
from torch import nn

from evigrad.cli.parser import chosen
from evigrad.data import DataSet, load
from evigrad.errors import ConfigurationError
from evigrad.invariances import GENERATORS, AffineInvariance
from evigrad.invariances.affine import LIMITS
from evigrad.models import make_network

# More than a machine has. With about ten thousand, the OpenMP library ends the process.
MOST_THREADS = 1024
_LARGEST_SEED = 2**63 - 1
# More layers or channels than any network has.
_LARGEST_SIZE = 10**5
# The options in the groups of the help.
NETWORK = (
    *("data", "data_dir", "pixels", "target", "features", "drop", "categorical", "likelihood"),
    *("subset", "test_subset", "model", "depth", "width"),
)
INVARIANCE = ("invariance", "initial_range", "learn_invariance", "flip", "samples", "average")
MACHINE = ("seed", "device", "threads")
# Names of the width in networks that name it differently.
_WIDTHS = {"wide_resnet": "widen_factor"}


@dataclass(frozen=True)
class Invariance:
    """Settings of an average over affine transforms, which wraps a network.

    ``ranges`` maps generators, such as rotation, to their initial ranges. It is empty if images are
    only flipped. The other fields are options of ``set_up``.
    """

    ranges: dict[str, float]
    learn: bool
    flip: bool
    samples: int
    average: str

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Return the names of the learned hyperparameters in a wrapped network."""
        return ("invariance",) if self.learn and self.ranges else ()

    def as_record(self, fill: list[float]) -> dict[str, Any]:
        """Return the record for ``make_network``. ``fill`` is the color outside the image."""
        transform = {"ranges": self.ranges, "learn": self.learn, "flip": self.flip, "fill": fill}
        return {"transform": transform, "num_samples": self.samples, "average": self.average}

    def describe(self) -> str:
        """Return a description of the transforms, as a part of a sentence."""
        names = "all affine maps" if len(self.ranges) == len(GENERATORS) else ", ".join(self.ranges)
        what = " and ".join(part for part in (names, "flips" if self.flip else "") if part)
        return f"averaged over {self.samples} samples of {what}"


def read_invariance(
    text: str | None, initial: float, learn: bool, flip: bool, samples: int, average: str
) -> Invariance | None:
    """Return the invariance that the options specify, or None if there is none.

    ``text`` is ``affine`` (all generators) or a list of generators, separated by commas. Each can
    have a range, such as ``rotation=0.5``. ``initial`` is the range of generators for which
    ``text`` gives no range. The other arguments are fields of ``Invariance``.

    Raises:
        ConfigurationError: If a name does not exist, or a range is not a number within its limits.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not parts and not flip:
        return None
    ranges: dict[str, float] = {}
    for part in parts:
        name, equals_sign, value = part.partition("=")
        is_limit = value.strip() == "max"
        try:
            start = initial if is_limit or not equals_sign else float(value)
        except ValueError as error:
            raise ConfigurationError(
                f"invariance must have numbers or max as ranges, got '{value}' for {name}."
            ) from error
        for generator in GENERATORS if name == "affine" else (name,):
            ranges[generator] = LIMITS.get(generator, start) if is_limit else start
    try:
        AffineInvariance(ranges)
    except ConfigurationError as error:
        raise ConfigurationError(f"invariance cannot be '{text}'. {error}") from error
    return Invariance(ranges, learn, flip, samples, average)


@dataclass(frozen=True)
class Setup:
    """A data set on a device, and how to make networks for it.

    ``sizes`` holds the depth and width of the network if they differ from its defaults.
    ``invariance`` is the average over transforms that wraps the network.
    """

    data: DataSet
    device: torch.device
    model_name: str
    seed: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    invariance: Invariance | None = None

    @property
    def network(self) -> dict[str, Any]:
        """Return the network's record for ``evigrad.models.make_network``."""
        model = {
            "name": self.model_name,
            "input_shape": list(self.data.input_shape),
            "num_outputs": self.data.num_outputs,
            **self.sizes,
        }
        averaged = None
        if self.invariance is not None:
            # Black, like the region beyond the borders in variants of image sets: 0 for raw pixels.
            fill = ((0.0 - self.data.mean) / self.data.std).flatten().tolist()
            averaged = self.invariance.as_record(fill)
        return {"model": model, "invariance": averaged}

    def make_model(self) -> nn.Module:
        """Return the network with its initial weights, which are the same in every call."""
        return make_network(self.network, self.seed).to(self.device)

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Return the names of the hyperparameters that the network learns."""
        return () if self.invariance is None else self.invariance.hyperparameters

    def describe_model(self) -> str:
        """Return a description of the network."""
        sizes = " and ".join(f"{name} {size}" for name, size in self.sizes.items())
        words = f"{self.model_name} of {sizes}" if sizes else self.model_name
        return words if self.invariance is None else f"{words}, {self.invariance.describe()}"


def set_up(
    data: str = "digits",
    data_dir: str | None = None,
    target: str | None = None,
    features: str | None = None,
    drop: str | None = None,
    categorical: str | None = None,
    likelihood: str | None = None,
    subset: int | None = None,
    test_subset: int | None = None,
    model: str | None = None,
    depth: int | None = None,
    width: int | None = None,
    invariance: str | None = None,
    initial_range: float = 0.1,
    learn_invariance: bool = True,
    flip: bool = False,
    samples: int = 8,
    average: Literal["logits", "probabilities"] = "logits",
    seed: int = 0,
    device: str = "auto",
    threads: int | None = None,
    pixels: Literal["normalized", "raw"] = "normalized",
) -> Setup:
    """Load the data, and choose the device and the network.

    Args:
        data: Data set: digits, mnist5k, autompg (tabular), or the NAME of Parquet files in the data
            folder. If the folder lacks mnist, fashion_mnist, cifar10, cifar100 or tiny_imagenet,
            they are downloaded from the Hugging Face Hub. NAME:rotated90, NAME:rotated180,
            NAME:translated8 and NAME:scaled transform every image once. A path that ends in .csv,
            .tsv or .parquet is a table, whose features and numeric targets are standardized.
        data_dir: Folder with NAME_train.parquet and NAME_test.parquet. Default: the environment
            variable EVIGRAD_DATA.
        target: Column of a table to predict. Default: the column that the file names.
        features: Columns of a table to use as features, separated by commas. Default: the columns
            that the file names, or all others.
        drop: Columns of a table to ignore, separated by commas.
        categorical: Features of a table whose numbers are categories, separated by commas. Text
            features are always categories.
        likelihood: Likelihood of the targets. It determines whether the targets of a table are
            classes (categorical), numbers (gaussian, student-t, heteroscedastic, natural-gaussian)
            or counts (poisson). Default: text, yes/no, and at most 20 different whole numbers are
            classes.
        subset: Number of training examples, drawn at random. Default: all.
        test_subset: Number of test examples, drawn at random. Default: all.
        model: Network: mlp, digitsnet (8x8 images), mininet or lenet (28x28 images), cnn,
            resnet18, resnet50, wrn16-4, wide_resnet, transformer or gru. Default: mlp for tables,
            digitsnet or mininet for images of their sizes, and cnn for others.
        depth: Number of layers in cnn and wide_resnet. Default: the network's own.
        width: Channels of cnn and of the first layer of resnet18 and resnet50, widening factor of
            wide_resnet, features of transformer and gru. Default: the network's own.
        invariance: Random transforms of the images, over which the network's outputs are averaged:
            affine (all), or some of translation_x, translation_y, rotation, scale_x, scale_y and
            shear, such as rotation,shear. You can add initial ranges: rotation=0.5, or rotation=max
            for a full circle. Default: none.
        initial_range: Range of these transforms at the start, in half images (translation), radians
            (rotation), or natural logarithms of factors (scale, shear).
        learn_invariance: Whether the estimator learns these ranges.
        flip: Whether to also mirror images left to right at random.
        samples: Number of transforms per image.
        average: Whether logits or probabilities are averaged over the transforms.
        seed: Seed of the subset, the initial weights and all random draws in training.
        device: Device: cpu, cuda, or auto (cuda if available).
        threads: Number of CPU threads. Default: PyTorch's choice, one per core.
        pixels: Scale of the pixels of images: normalized to mean 0 and standard deviation 1 per
            channel over the training images, or raw between 0 and 1. The area beyond the borders of
            a transformed image is black for both.

    Returns:
        The data, the device and the settings of the network.

    Raises:
        ConfigurationError: If the data set, network or device does not exist.
    """
    if threads is not None:
        check_range("threads", threads, 1, MOST_THREADS)
        torch.set_num_threads(threads)
    check_range("seed", seed, 0, _LARGEST_SEED)
    for name, size in (("depth", depth), ("width", width), ("samples", samples)):
        if size is not None:
            check_range(name, size, 1, _LARGEST_SIZE)
    transforms = read_invariance(
        invariance, initial_range, learn_invariance, flip, samples, average
    )
    place = choose_device(device)
    columns: dict[str, Any] = {
        "target": target,
        "features": features,
        "drop": drop,
        "categorical": categorical,
    }
    loaded = load(data, data_dir, subset, seed, likelihood=likelihood, pixels=pixels, **columns)
    if transforms is not None and len(loaded.input_shape) != 3:
        raise ConfigurationError(
            f"--invariance and --flip need images, got inputs of shape {loaded.input_shape} in"
            f" {loaded.name}. Remove these options."
        )
    if test_subset is not None:
        loaded = loaded.with_test_subset(test_subset, seed)
    model = model or default_model(loaded.input_shape)
    sizes = sizes_of(model, depth, width)
    return Setup(loaded.to(place), place, model, seed, sizes, transforms)


def set_up_from(options: Namespace) -> Setup:
    """Return ``set_up`` of a command's options. Options without effect raise an error."""
    parameters = inspect.signature(set_up).parameters
    for name in INVARIANCE if options.invariance is None else ():
        is_used = name == "flip" or (options.flip and name in ("samples", "average"))
        if not is_used and options[name] != parameters[name].default:
            raise ConfigurationError(
                f"{name} has no effect without random transforms of the images, got"
                f" {options[name]}. Set invariance, or remove {name}."
            )
    return set_up(**chosen(set_up, options))


def default_model(input_shape: Sequence[int]) -> str:
    """Return the name of the default network for inputs of a shape."""
    if len(input_shape) == 1:
        return "mlp"
    by_size = {(8, 8): "digitsnet", (28, 28): "mininet"}
    return by_size.get((input_shape[-2], input_shape[-1]), "cnn")


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ConfigurationError unless an option's value is between ``least`` and ``most``."""
    if not least <= value <= most:
        end = f"at least {least}" if value < least else f"at most {most}"
        raise ConfigurationError(f"{name} must be {end}, got {value}.")


def sizes_of(model: str, depth: int | None, width: int | None) -> dict[str, int]:
    """Return depth and width under the names that a network uses. Omit values that are None."""
    sizes = {"depth": depth, _WIDTHS.get(model, "width"): width}
    return {name: size for name, size in sizes.items() if size is not None}


def device_name(name: str) -> str:
    """Return the name of a device. For auto, return cuda if it is available, or else cpu."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def choose_device(name: str) -> torch.device:
    """Return the named device, or raise ConfigurationError if it is not available."""
    try:
        device = torch.device(device_name(name))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        hint = "A GPU's name is cuda. " if name.startswith("gpu") else ""
        raise ConfigurationError(
            f"Device '{name}' is not available. {hint}Use cpu or auto, or cuda if PyTorch finds a"
            " GPU."
        ) from error
    return device
