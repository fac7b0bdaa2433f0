"""Small networks, fully connected and convolutional.

The networks have no normalization layers, so a Gaussian prior is suitable.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

from torch import nn

from evigrad.errors import ConfigurationError, nearest

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}


def mlp(
    input_shape: Sequence[int],
    num_outputs: int,
    hidden: Sequence[int] = (64, 64),
    activation: str = "relu",
) -> nn.Sequential:
    """Return a fully connected network, which flattens inputs of several dimensions.

    Args:
        input_shape: Shape of one input.
        num_outputs: Number of outputs C.
        hidden: Widths of the hidden layers. An empty sequence gives a linear model.
        activation: Name of the non-linearity after each hidden layer, a key of `ACTIVATIONS`.

    Raises:
        ConfigurationError: If the activation is unknown or a width is below 1.
    """
    if activation not in ACTIVATIONS:
        raise ConfigurationError(
            f"Unknown activation '{activation}'.{nearest(activation, ACTIVATIONS)} "
            f"Use one of {', '.join(ACTIVATIONS)}."
        )
    if any(width < 1 for width in hidden):
        raise ConfigurationError(f"Every width in hidden must be at least 1, got {list(hidden)}.")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = prod(input_shape)
    for index, units in enumerate(hidden, start=1):
        layers[f"linear{index}"] = nn.Linear(width, units)
        layers[f"{activation}{index}"] = ACTIVATIONS[activation]()
        width = units
    layers["output"] = nn.Linear(width, num_outputs)
    return nn.Sequential(layers)


def image_shape(model: str, input_shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """Return (channels, height, width). Raise an error if inputs are too small or not images."""
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ConfigurationError(
            f"'{model}' needs images (channels, height, width) of at least {smallest}x{smallest}"
            f" pixels, got inputs of shape {tuple(input_shape)}. Use 'mlp' for other shapes."
        )
    channels, height, width = input_shape
    return channels, height, width


def digitsnet(input_shape: Sequence[int], num_outputs: int) -> nn.Sequential:
    """Return a network made for 8x8 digits: two 3x3 convolutions, each with ReLU and pooling.

    The network has 6,090 parameters for inputs (1, 8, 8) and 10 classes. Images must have at least
    4x4 pixels.
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
    """Return the network of the paper's illustrations on MNIST (Appendix B.1).

    It has 14,538 parameters for inputs (1, 28, 28) and 10 classes. Convolutions are not padded, so
    28 pixels shrink to 24, 12, 10, 5 and 1, and the last layer has 32 inputs. Images must have at
    least 28x28 pixels.
    """
    shape = image_shape("mininet", input_shape, smallest=28)
    layers, features = _three_convolutions(shape, (8, 16, 32), kernel=3)
    return nn.Sequential(layers | {"output": nn.Linear(features, num_outputs)})


def lenet(input_shape: Sequence[int], num_outputs: int) -> nn.Sequential:
    """Return LeNet-5 (LeCun et al., 1998) with ReLU, max-pooling and unpadded convolutions.

    For images of at least 32x32 pixels, the second convolution is 5x5, as in the original. For
    smaller images, it is 3x3, as in the MNIST network of Immer et al. (2023). So both 28 and 32
    pixels shrink to 1 before the last layers. For 10 classes, the network has 60,170 parameters for
    inputs (1, 28, 28), and 62,006 for inputs (3, 32, 32). Images must have at least 28x28 pixels.
    """
    shape = image_shape("lenet", input_shape, smallest=28)
    layers, features = _three_convolutions(shape, (6, 16, 120), 5 if min(shape[1:]) >= 32 else 3)
    layers |= {"linear": nn.Linear(features, 84), "relu4": nn.ReLU()}
    return nn.Sequential(layers | {"output": nn.Linear(84, num_outputs)})


def _three_convolutions(
    shape: tuple[int, int, int], widths: tuple[int, int, int], kernel: int
) -> tuple[OrderedDict[str, nn.Module], int]:
    """Return unpadded convolutions, 5x5, ``kernel`` and 5x5, and the number of their features."""
    channels, height, width = shape
    first, second, third = widths

    def remaining(size: int) -> int:
        return ((size - 4) // 2 - kernel + 1) // 2 - 4

    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(channels, first, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(first, second, kernel),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(second, third, 5),
        flatten=nn.Flatten(),
        relu3=nn.ReLU(),
    )
    return layers, third * remaining(height) * remaining(width)


def cnn(
    input_shape: Sequence[int], num_outputs: int, depth: int = 3, width: int = 16
) -> nn.Sequential:
    """Return a network of 3x3 convolutions with ReLU, the mean over the image, and a linear layer.

    Pooling follows each of the first two convolutions if height and width are still at least 4. The
    mean over the image follows the last convolution, so the size of the last layer depends only on
    ``width``.

    Args:
        input_shape: (channels, height, width).
        num_outputs: Number of outputs C.
        depth: Number of convolutions, at least 1.
        width: Number of channels of each convolution, at least 1.

    Raises:
        ConfigurationError: If the input is not an image, or depth or width is below 1.
    """
    channels, height, across = image_shape("cnn", input_shape, smallest=1)
    if depth < 1 or width < 1:
        raise ConfigurationError(f"depth and width must be at least 1, got {depth} and {width}.")
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
