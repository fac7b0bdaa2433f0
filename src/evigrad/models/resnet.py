"""Residual networks (He et al., 2016) with Fixup, with a first layer made for small images."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, nearest
from evigrad.models.fixup import (
    Bias,
    Scale,
    convolution,
    initialise_branch,
    initialise_he,
    zero_head,
)
from evigrad.models.shapes import image_shape

SHORTCUTS = ("pad", "conv")


class Subsample(nn.Module):
    """A shortcut without parameters: every stride-th pixel, and channels of zeros added."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.missing, self.stride = outputs - inputs, stride

    def forward(self, x: Tensor) -> Tensor:
        """The input in the shape of the branch's output."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))


class Block(nn.Module):
    """relu(shortcut + branch), with activations between the convolutions of the branch.

    Args:
        inputs: Channels of the input.
        width: Channels inside.
        stride: Stride of the first 3x3 convolution and of the shortcut.
        shortcut: ``"pad"`` or ``"conv"``, where the shape changes.
    """

    expansion = 1  # output channels / width
    kernels: Sequence[int] = (3, 3)

    def __init__(self, inputs: int, width: int, stride: int, shortcut: str) -> None:
        super().__init__()
        outputs = width * self.expansion
        channels = [inputs] + [width] * (len(self.kernels) - 1) + [outputs]
        strided = self.kernels.index(3)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, kernel in enumerate(self.kernels):
            if i:
                layers |= {f"bias{i}b": Bias(), f"relu{i}": nn.ReLU(), f"bias{i + 1}a": Bias()}
            step = stride if i == strided else 1
            layers[f"conv{i + 1}"] = convolution(channels[i], channels[i + 1], kernel, step)
        layers |= {"scale": Scale(), f"bias{len(self.kernels)}b": Bias()}
        self.bias = Bias()
        self.branch = nn.Sequential(layers)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            if shortcut == "conv":
                self.shortcut = convolution(inputs, outputs, 1, stride)
            else:
                self.shortcut = Subsample(inputs, outputs, stride)

    def convolutions(self) -> list[nn.Conv2d]:
        """The convolutions of the branch, in their order."""
        return [layer for layer in self.branch if isinstance(layer, nn.Conv2d)]

    def forward(self, x: Tensor) -> Tensor:
        """From (m, inputs, H, W) to (m, outputs, H / stride, W / stride)."""
        biased = self.bias(x)
        passed = x if self.shortcut is None else self.shortcut(biased)
        return F.relu(self.branch(biased) + passed)


class Bottleneck(Block):
    """A block whose 3x3 convolution works on a quarter of the channels."""

    expansion = 4
    kernels = (1, 3, 1)


@dataclass(frozen=True)
class _Layout:
    block: type[Block]
    counts: Sequence[int]  # blocks in each of the four stages
    shortcut: str


# 18: shortcuts without parameters, as in Fixup's networks for CIFAR. 50: with parameters, as in its
# networks for ImageNet; only these give the 23.9 million parameters that the paper names.
LAYOUTS = {
    18: _Layout(Block, (2, 2, 2, 2), "pad"),
    50: _Layout(Bottleneck, (3, 4, 6, 3), "conv"),
}


class ResNet(nn.Module):
    """A residual network with Fixup in place of normalisation.

    A 3x3 convolution of stride 1; four stages, of which each but the first halves the image and
    doubles the channels; the mean over the image and a linear layer. The outputs of a new network
    are zero.

    Args:
        depth: Layers with weights: 18 (two 3x3 convolutions in a block) or 50 (bottlenecks).
        in_channels: Channels of an image.
        num_outputs: Number of outputs C.
        width: Channels of the first layer.
        shortcut: Where the shape changes in a block: ``"pad"`` drops pixels and adds channels of
            zeros, ``"conv"`` is a 1x1 convolution. None takes ``"pad"`` for 18 layers and
            ``"conv"`` for 50.

    Raises:
        ConfigurationError: If the depth or the shortcut does not exist, or the width is below 1.
    """

    def __init__(
        self,
        depth: int,
        in_channels: int,
        num_outputs: int,
        width: int = 16,
        shortcut: str | None = None,
    ) -> None:
        super().__init__()
        if depth not in LAYOUTS:
            known = ", ".join(map(str, LAYOUTS))
            raise ConfigurationError(f"depth={depth}: choose one of {known}")
        layout = LAYOUTS[depth]
        shortcut = layout.shortcut if shortcut is None else shortcut
        if shortcut not in SHORTCUTS:
            raise ConfigurationError(
                f"Unknown shortcut '{shortcut}'.{nearest(shortcut, SHORTCUTS)} "
                f"Choose one of {', '.join(SHORTCUTS)}"
            )
        if width < 1:
            raise ConfigurationError(f"width={width}: must be 1 or more")
        self.conv1 = convolution(in_channels, width, 3)
        self.bias1 = Bias()
        channels, stages = width, []
        for stage, count in enumerate(layout.counts):
            blocks: list[nn.Module] = []
            for block in range(count):
                stride = 2 if stage and block == 0 else 1
                inside = width * 2**stage
                blocks.append(layout.block(channels, inside, stride, shortcut))
                channels = inside * layout.block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.bias2 = Bias()
        self.output = zero_head(channels, num_outputs)

        initialise_he(self.conv1)
        for module in self.modules():
            if isinstance(module, Block):
                initialise_branch(module.convolutions(), sum(layout.counts))
                if isinstance(module.shortcut, nn.Conv2d):
                    initialise_he(module.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """From images (m, channels, H, W) to outputs (m, C)."""
        x = self.stages(F.relu(self.bias1(self.conv1(x))))
        return self.output(self.bias2(x.mean((2, 3))))


def resnet18(
    input_shape: Sequence[int],
    num_outputs: int,
    width: int = 16,
    shortcut: str = "pad",
) -> ResNet:
    """The Fixup ResNet-18 of the paper's CIFAR-10 subsets (Figure 7), 8 blocks of 2 convolutions.

    With 16 initial channels 688,356 parameters on (3, 32, 32) and 10 classes.

    Args:
        input_shape: (channels, height, width), height and width at least 8.
        num_outputs: Number of outputs C.
        width: Channels of the first layer.
        shortcut: ``"pad"`` or ``"conv"``, see `ResNet`.

    Returns:
        A module (m, *input_shape) -> (m, C).

    Raises:
        ConfigurationError: If the input is no image or too small, or a setting does not exist.
    """
    channels, _, _ = image_shape("resnet18", input_shape, smallest=8)
    return ResNet(18, channels, num_outputs, width, shortcut)


def resnet50(
    input_shape: Sequence[int],
    num_outputs: int,
    width: int = 16,
    shortcut: str = "conv",
) -> ResNet:
    """The Fixup ResNet-50 of the paper's TinyImageNet (Table 2), 16 bottlenecks.

    On 200 classes 1,568,490 parameters with 16 initial channels and 23,857,146 with 64, whatever
    the size of the images.

    Args:
        input_shape: (channels, height, width), height and width at least 8.
        num_outputs: Number of outputs C.
        width: Channels of the first layer.
        shortcut: ``"pad"`` or ``"conv"``, see `ResNet`.

    Returns:
        A module (m, *input_shape) -> (m, C).

    Raises:
        ConfigurationError: If the input is no image or too small, or a setting does not exist.
    """
    channels, _, _ = image_shape("resnet50", input_shape, smallest=8)
    return ResNet(50, channels, num_outputs, width, shortcut)
