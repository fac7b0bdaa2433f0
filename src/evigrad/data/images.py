"""Image classification: pixels and labels to a normalised `DataSet`."""

import numpy as np
import torch
from torch import Tensor

from evigrad.data.dataset import DataSet


def image_data_set(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    class_names: tuple[str, ...],
    largest: int = 255,
) -> DataSet:
    """Scale pixels to [0, 1], then standardise each channel with the train set's statistics.

    Args:
        name: Name of the data set.
        train: Pixels (n, channels, height, width) uint8, and labels (n,).
        test: The same for the test data.
        class_names: Words for the classes, in the order of the labels.
        largest: The pixel value that becomes 1.

    Returns:
        The data set, float32.
    """
    mean, std = _channel_statistics(train[0], largest)
    return DataSet(
        name=name,
        train=(_normalise(train[0], mean, std, largest), torch.from_numpy(train[1]).long()),
        test=(_normalise(test[0], mean, std, largest), torch.from_numpy(test[1]).long()),
        num_outputs=len(class_names),
        input_shape=train[0].shape[1:],
        likelihood="categorical",
        class_names=class_names,
        mean=mean,
        std=std,
    )


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
    shape = (-1, 1, 1)
    return (
        torch.tensor(means, dtype=torch.float32).reshape(shape),
        torch.tensor(stds, dtype=torch.float32).reshape(shape),
    )


def _normalise(pixels: np.ndarray, mean: Tensor, std: Tensor, largest: int) -> Tensor:
    # In place: a large set fits in memory once, not several times.
    return torch.from_numpy(pixels).to(torch.float32).div_(largest).sub_(mean).div_(std)
