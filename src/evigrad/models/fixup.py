"""Fixup, which replaces normalisation layers in residual networks.

Normalisation makes a network blind to the scale of its weights, and a Gaussian prior is a belief
about just that scale. Fixup (Zhang, Dauphin and Ma, 2019, *Fixup Initialization: Residual
Learning Without Normalization*) does without: each residual branch starts at zero, its other layers
are scaled down by the number of branches, and scalar biases and multipliers do the rest.
"""

from collections.abc import Sequence
from math import prod, sqrt

import torch
from torch import Tensor, nn


class Bias(nn.Module):
    """x + b with one number b, which starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """The input plus b."""
        return x + self.bias


class Scale(nn.Module):
    """x · s with one number s, which starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """The input times s."""
        return x * self.scale


def fixup_scalars(model: nn.Module) -> dict[str, nn.Parameter]:
    """The scalar biases and multipliers of Fixup, which learn at a tenth of the others' rate.

    Args:
        model: Any module; networks with Fixup may be anywhere in it.

    Returns:
        The parameters by their names in the model, each shared one once; empty without Fixup.
    """
    ids = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Bias | Scale)
        for parameter in module.parameters(recurse=False)
    }
    return {name: p for name, p in model.named_parameters() if id(p) in ids}


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias whose output has the size of its input / stride."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def initialise_branch(convolutions: Sequence[nn.Conv2d], num_branches: int) -> None:
    """Start a branch of m convolutions at zero; scale those before the last by L^(-1/(2m-2)).

    Args:
        convolutions: All m convolutions of the branch, in their order.
        num_branches: L, the residual branches of the network.
    """
    *others, last = convolutions
    for layer in others:
        initialise_he(layer, num_branches ** (-1 / (2 * len(convolutions) - 2)))
    nn.init.zeros_(last.weight)


def initialise_he(layer: nn.Conv2d, scale: float = 1.0) -> None:
    """Normal weights of variance 2 / (outputs · kernel size) times scale² (He et al., 2015)."""
    fan_out = layer.out_channels * prod(layer.kernel_size)
    nn.init.normal_(layer.weight, std=scale * sqrt(2 / fan_out))


def zero_head(inputs: int, outputs: int) -> nn.Linear:
    """A last layer that starts at zero."""
    head = nn.Linear(inputs, outputs)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
