"""Image classification: pixels and labels to a normalised `DataSet`."""

import numpy as np
import torch
from torch import Tensor

from evigrad.data.dataset import DataSet
from evigrad.data.variants import BATCH, transformed


def image_data_set(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    class_names: tuple[str, ...],
    rows: np.ndarray,
    variant: str | None = None,
    largest: int = 255,
) -> DataSet:
    """Scale pixels to [0, 1], then standardise each channel with the train set's statistics.

    Args:
        name: Name of the data set, without the variant's.
        train: Pixels (n, channels, height, width) uint8, and labels (n,).
        test: The same for the test data, all of them.
        class_names: Words for the classes, in the order of the labels.
        rows: Positions of the train data in the whole train set, (n,): a variant transforms an
            image in the same way in every subset.
        variant: One of `evigrad.data.variants.VARIANTS`, made before anything else; None leaves
            the images as they are.
        largest: The pixel value that becomes 1.

    Returns:
        The data set, float32.
    """
    if variant is None:
        mean, std = _channel_statistics(train[0], largest)
        train_images = _scaled(torch.from_numpy(train[0]), largest)
        test_images = _scaled(torch.from_numpy(test[0]), largest)
    else:
        everything = np.arange(len(test[1]))
        train_images = _scaled(transformed(train[0], variant, "train", rows), largest)
        test_images = _scaled(transformed(test[0], variant, "test", everything), largest)
        mean, std = _real_statistics(train_images)
    return DataSet(
        name=name if variant is None else f"{name}:{variant}",
        # In place: a large set fits in memory once, not several times.
        train=(train_images.sub_(mean).div_(std), torch.from_numpy(train[1]).long()),
        test=(test_images.sub_(mean).div_(std), torch.from_numpy(test[1]).long()),
        num_outputs=len(class_names),
        input_shape=train[0].shape[1:],
        likelihood="categorical",
        class_names=class_names,
        mean=mean,
        std=std,
    )


def _scaled(pixels: Tensor, largest: int) -> Tensor:
    return pixels.to(torch.float32).div_(largest)


def _channel_statistics(pixels: np.ndarray, largest: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of the scaled pixels, (channels, 1, 1) float32."""
    values = np.arange(256) / largest
    means, stds = [], []
    for channel in range(pixels.shape[1]):
        # From the histogram: exact in float64, with no floating-point copy of the whole set.
        counts = np.bincount(pixels[:, channel].ravel(), minlength=256)
        shares = counts / counts.sum()
        mean = float(shares @ values)
        std = float(np.sqrt(shares @ (values - mean) ** 2))
        means.append(mean)
        stds.append(std if np.count_nonzero(counts) > 1 else 1.0)
    return _per_channel(means), _per_channel(stds)


def _real_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_channel_statistics``, for images with too many different values for a histogram."""
    means, stds = [], []
    for channel in range(images.shape[1]):
        values = images[:, channel]
        # Sums in float64 over a few images at a time, without such a copy of the whole set.
        mean = sum(part.double().sum().item() for part in values.split(BATCH)) / values.numel()
        square = sum((part.double() - mean).square().sum().item() for part in values.split(BATCH))
        lowest, highest = values.aminmax()
        means.append(mean)
        stds.append((square / values.numel()) ** 0.5 if lowest < highest else 1.0)
    return _per_channel(means), _per_channel(stds)


def _per_channel(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)
