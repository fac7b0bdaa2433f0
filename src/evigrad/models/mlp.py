"""Fully connected networks."""

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
    """A fully connected network; an input of several dimensions is flattened first.

    Args:
        input_shape: Shape of one input.
        num_outputs: Number of outputs C.
        hidden: Widths of the hidden layers; empty gives a linear model.
        activation: Name of the non-linearity after each hidden layer, a key of `ACTIVATIONS`.

    Returns:
        A module (m, *input_shape) -> (m, C).

    Raises:
        ConfigurationError: If the activation is unknown or a width is below 1.
    """
    if activation not in ACTIVATIONS:
        raise ConfigurationError(
            f"Unknown activation '{activation}'.{nearest(activation, ACTIVATIONS)} "
            f"Choose one of {', '.join(ACTIVATIONS)}"
        )
    if any(width < 1 for width in hidden):
        raise ConfigurationError(f"hidden={list(hidden)}: every width must be 1 or more")
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = prod(input_shape)
    for index, units in enumerate(hidden, start=1):
        layers[f"linear{index}"] = nn.Linear(width, units)
        layers[f"{activation}{index}"] = ACTIVATIONS[activation]()
        width = units
    layers["output"] = nn.Linear(width, num_outputs)
    return nn.Sequential(layers)
