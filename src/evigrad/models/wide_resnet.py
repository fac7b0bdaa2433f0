"""Wide residual networks (Zagoruyko and Komodakis, 2016) with Fixup."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.models.fixup import (
    Bias,
    Scale,
    convolution,
    initialise_branch,
    initialise_he,
    zero_head,
)
from evigrad.models.shapes import image_shape

_STEM = 16  # channels of the first layer, whatever the widening


class WideBlock(nn.Module):
    """shortcut + branch, with activations before each convolution.

    Where the shape changes, the shortcut is a 1x1 convolution of the activated input.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Stride of the first convolution and of the shortcut.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bias1 = Bias()
        self.conv1 = convolution(inputs, outputs, 3, stride)
        self.bias2, self.bias3 = Bias(), Bias()
        self.conv2 = convolution(outputs, outputs, 3)
        self.scale, self.bias4 = Scale(), Bias()
        changes = stride != 1 or inputs != outputs
        self.shortcut = convolution(inputs, outputs, 1, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        """From (m, inputs, H, W) to (m, outputs, H / stride, W / stride)."""
        activated = F.relu(self.bias1(x))
        branch = self.bias3(F.relu(self.bias2(self.conv1(activated))))
        branch = self.bias4(self.scale(self.conv2(branch)))
        return branch + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(nn.Module):
    """A wide residual network with Fixup in place of normalisation.

    A 3x3 convolution to 16 channels; three stages of (depth − 4) / 6 blocks with 16, 32 and 64
    times the widening factor channels, of which the last two halve the image; the mean over the
    image and a linear layer. The outputs of a new network are zero.

    Args:
        in_channels: Channels of an image.
        num_outputs: Number of outputs C.
        depth: Layers with weights, 6 n + 4.
        widen_factor: Factor on the channels of all stages.

    Raises:
        ConfigurationError: If there is no network of this depth, or the widening is below 1.
    """

    def __init__(
        self, in_channels: int, num_outputs: int, depth: int = 16, widen_factor: int = 4
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ConfigurationError(f"depth={depth}: must be one of 10, 16, 22, 28, ...")
        if widen_factor < 1:
            raise ConfigurationError(f"widen_factor={widen_factor}: must be 1 or more")
        count = (depth - 4) // 6
        self.conv1 = convolution(in_channels, _STEM, 3)
        self.bias1 = Bias()
        channels, stages = _STEM, []
        for stage in range(3):
            outputs = 16 * widen_factor * 2**stage
            blocks: list[nn.Module] = []
            for block in range(count):
                stride = 2 if stage and block == 0 else 1
                blocks.append(WideBlock(channels, outputs, stride))
                channels = outputs
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.bias2 = Bias()
        self.output = zero_head(channels, num_outputs)

        initialise_he(self.conv1)
        for module in self.modules():
            if isinstance(module, WideBlock):
                initialise_branch([module.conv1, module.conv2], 3 * count)
                if module.shortcut is not None:
                    initialise_he(module.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """From images (m, channels, H, W) to outputs (m, C)."""
        x = F.relu(self.stages(self.bias1(self.conv1(x))))
        return self.output(self.bias2(x.mean((2, 3))))


def wide_resnet(
    input_shape: Sequence[int], num_outputs: int, depth: int = 16, widen_factor: int = 4
) -> WideResNet:
    """The Fixup Wide ResNet of the paper's CIFAR experiments (Table 1), there 16-4.

    At 16-4 it has 2,745,306 parameters on (3, 32, 32) and 10 classes.

    Args:
        input_shape: (channels, height, width), height and width at least 8.
        num_outputs: Number of outputs C.
        depth: Layers with weights: 10, 16, 22, 28, ...
        widen_factor: Factor on the channels of all stages.

    Returns:
        A module (m, *input_shape) -> (m, C).

    Raises:
        ConfigurationError: If the input is no image or too small, or there is no such depth.
    """
    channels, _, _ = image_shape("wide_resnet", input_shape, smallest=8)
    return WideResNet(channels, num_outputs, depth, widen_factor)


def wrn16_4(input_shape: Sequence[int], num_outputs: int) -> WideResNet:
    """`wide_resnet` of depth 16 and widening 4, by its name in the literature.

    Args:
        input_shape: (channels, height, width), height and width at least 8.
        num_outputs: Number of outputs C.

    Returns:
        A module (m, *input_shape) -> (m, C).
    """
    return wide_resnet(input_shape, num_outputs)
