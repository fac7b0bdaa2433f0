"""Small convolutional networks, free of normalisation layers: a Gaussian prior suits them."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from evigrad.errors import ConfigurationError
from evigrad.models.shapes import image_shape


def digitsnet(input_shape: Sequence[int], num_outputs: int) -> nn.Sequential:
    """A network made for 8x8 digits: two 3x3 convolutions, each with ReLU and pooling.

    6,090 parameters on (1, 8, 8) and 10 classes.

    Args:
        input_shape: (channels, height, width), height and width at least 4.
        num_outputs: Number of outputs C.

    Returns:
        A module (m, *input_shape) -> (m, C).

    Raises:
        ConfigurationError: If the input is no image or too small.
    """
    channels, height, width = image_shape("digitsnet", input_shape, smallest=4)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 16, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            output=nn.Linear(32 * (height // 4) * (width // 4), num_outputs),
        )
    )


def mininet(input_shape: Sequence[int], num_outputs: int) -> nn.Sequential:
    """The paper's network for its illustrations on MNIST (Appendix B.1).

    14,538 parameters on (1, 28, 28) and 10 classes: no convolution is padded, so that 28 pixels
    shrink to 24, 12, 10, 5 and 1, and the last layer sees 32 features.

    Args:
        input_shape: (channels, height, width), height and width at least 28.
        num_outputs: Number of outputs C.

    Returns:
        A module (m, *input_shape) -> (m, C).

    Raises:
        ConfigurationError: If the input is no image or too small.
    """
    channels, height, width = image_shape("mininet", input_shape, smallest=28)

    def remaining(size: int) -> int:
        return ((size - 4) // 2 - 2) // 2 - 4

    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 8, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(8, 16, 3),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(16, 32, 5),
            flatten=nn.Flatten(),
            relu3=nn.ReLU(),
            output=nn.Linear(32 * remaining(height) * remaining(width), num_outputs),
        )
    )


def lenet(input_shape: Sequence[int], num_outputs: int) -> nn.Sequential:
    """LeNet-5 (LeCun et al., 1998) with ReLU and max-pooling, no convolution padded.

    The second convolution is 5x5 as in the original on 32 pixels and more, and 3x3 below, as the
    paper's authors have it for MNIST: 28 as well as 32 pixels shrink to 1 before the last layers.
    60,170 parameters on (1, 28, 28) and 62,006 on (3, 32, 32), with 10 classes.

    Args:
        input_shape: (channels, height, width), height and width at least 28.
        num_outputs: Number of outputs C.

    Returns:
        A module (m, *input_shape) -> (m, C).

    Raises:
        ConfigurationError: If the input is no image or too small.
    """
    channels, height, width = image_shape("lenet", input_shape, smallest=28)
    kernel = 5 if min(height, width) >= 32 else 3

    def remaining(size: int) -> int:
        return ((size - 4) // 2 - kernel + 1) // 2 - 4

    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, kernel),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(16, 120, 5),
            flatten=nn.Flatten(),
            relu3=nn.ReLU(),
            linear=nn.Linear(120 * remaining(height) * remaining(width), 84),
            relu4=nn.ReLU(),
            output=nn.Linear(84, num_outputs),
        )
    )


def cnn(
    input_shape: Sequence[int], num_outputs: int, depth: int = 3, width: int = 16
) -> nn.Sequential:
    """A plain network of any depth and width: 3x3 convolutions with ReLU, the mean, a linear layer.

    A pooling follows each of the first two convolutions, as long as the image has 4 pixels or
    more. The mean over the image follows the last one, so that the size of the last layer depends
    on the width alone.

    Args:
        input_shape: (channels, height, width).
        num_outputs: Number of outputs C.
        depth: Number of convolutions, at least 1.
        width: Channels of each convolution, at least 1.

    Returns:
        A module (m, *input_shape) -> (m, C).

    Raises:
        ConfigurationError: If the input is no image, or depth or width is below 1.
    """
    channels, height, across = image_shape("cnn", input_shape, smallest=1)
    if depth < 1 or width < 1:
        raise ConfigurationError(f"cnn: depth={depth}, width={width}: both must be 1 or more")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    smallest = min(height, across)
    for number in range(1, depth + 1):
        layers[f"conv{number}"] = nn.Conv2d(channels, width, 3, padding=1)
        layers[f"relu{number}"] = nn.ReLU()
        if number <= 2 and smallest >= 4:
            layers[f"pool{number}"] = nn.MaxPool2d(2)
            smallest //= 2
        channels = width
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["output"] = nn.Linear(width, num_outputs)
    return nn.Sequential(layers)
