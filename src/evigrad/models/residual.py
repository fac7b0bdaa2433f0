"""Residual networks with Fixup instead of normalization, and a first layer for small images.

With normalization layers, the outputs of a network do not depend on the scale of its weights, but a
Gaussian prior assumes a scale. Fixup does not need normalization (Zhang, Dauphin and Ma, 2019,
*Fixup Initialization: Residual Learning Without Normalization*). The last layer of each residual
branch starts at zero. The other layers of a branch start with smaller weights if the network has
more branches. In addition, Fixup adds scalar biases and multipliers.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.models.feedforward import image_shape


class Bias(nn.Module):
    """Add a learned number, which starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Scale(nn.Module):
    """Multiply by a learned number, which starts at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def fixup_scalars(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return Fixup's biases and multipliers. They are trained at a tenth of the learning rate."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(model.get_submodule(name.rpartition(".")[0]), Bias | Scale)
    }


class Subsample(nn.Module):
    """A shortcut without parameters that keeps every stride-th pixel and adds channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.missing, self.stride = outputs - inputs, stride

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.missing))


class Block(nn.Module):
    """A residual block, relu(shortcut + branch).

    The branch consists of convolutions with activations between them. It has ``width`` channels
    inside. Its first 3x3 convolution and the shortcut have the stride ``stride``.
    """

    expansion = 1  # output channels / width
    kernels: Sequence[int] = (3, 3)
    activates_input = False  # whether the block activates its input instead of its output
    # If the shape changes: a 1x1 convolution, or every stride-th pixel and channels of zeros, as
    # in Fixup's networks for CIFAR.
    shortcut_has_weights = False

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        channels = [inputs] + [width] * (len(self.kernels) - 1) + [outputs]
        strided = self.kernels.index(3)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, kernel in enumerate(self.kernels):
            if i:
                layers |= {f"bias{i}b": Bias(), f"relu{i}": nn.ReLU(), f"bias{i + 1}a": Bias()}
            step = stride if i == strided else 1
            layers[f"conv{i + 1}"] = _convolution(channels[i], channels[i + 1], kernel, step)
        layers |= {"scale": Scale(), f"bias{len(self.kernels)}b": Bias()}
        self.bias = Bias()
        self.branch = nn.Sequential(layers)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            if self.shortcut_has_weights:
                self.shortcut = _convolution(inputs, outputs, 1, stride)
            else:
                self.shortcut = Subsample(inputs, outputs, stride)

    def initialise(self, num_branches: int) -> None:
        """Set the last of the branch's m convolutions to zero. Scale the others by L^(-1/(2m-2)).

        L is ``num_branches``, the number of residual branches in the network.
        """
        *others, last = (layer for layer in self.branch if isinstance(layer, nn.Conv2d))
        for layer in others:
            _initialize(layer, num_branches ** (-1 / (2 * len(others))))
        nn.init.zeros_(last.weight)
        if isinstance(self.shortcut, nn.Conv2d):
            _initialize(self.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Map (m, inputs, H, W) to (m, outputs, H / stride, W / stride)."""
        z = self.bias(x)
        z = F.relu(z) if self.activates_input else z
        sum = self.branch(z) + (x if self.shortcut is None else self.shortcut(z))
        return sum if self.activates_input else F.relu(sum)


class Bottleneck(Block):
    """A residual block whose 3x3 convolution has a quarter of the block's output channels.

    Shortcuts have weights, as in Fixup's networks for ImageNet. With these weights, ResNet-50 has
    23.9 million parameters, as in the paper.
    """

    expansion = 4
    kernels = (1, 3, 1)
    shortcut_has_weights = True


class WideBlock(Block):
    """A block of wide residual networks, in which each convolution follows an activation."""

    activates_input = True
    shortcut_has_weights = True


class ResNet(nn.Module):
    """A residual network (He et al., 2016) with Fixup instead of normalization.

    It has a 3x3 convolution of stride 1, several stages, a mean over the image and a linear layer.
    Each stage except the first halves height and width and doubles the channels. The outputs of a
    new network are zero. ``counts`` contains the number of blocks of each stage, ``stem`` is the
    number of channels of the first layer, and ``width`` is the number of channels inside the blocks
    of the first stage.
    """

    def __init__(
        self,
        block: type[Block],
        counts: Sequence[int],
        in_channels: int,
        num_outputs: int,
        stem: int,
        width: int,
    ) -> None:
        super().__init__()
        if width < 1:
            raise ConfigurationError(f"width must be at least 1, got {width}.")
        self.conv1 = _convolution(in_channels, stem, 3)
        self.bias1 = Bias()
        channels, self.stages = stem, nn.Sequential()
        for stage, count in enumerate(counts):
            blocks = nn.Sequential()
            for place in range(count):
                inside, stride = width * 2**stage, 2 if stage and place == 0 else 1
                blocks.append(block(channels, inside, stride))
                channels = inside * block.expansion
            self.stages.append(blocks)
        self.bias2 = Bias()
        self.output = nn.Linear(channels, num_outputs)
        self.activates_input = block.activates_input
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        _initialize(self.conv1)
        for module in self.modules():
            if isinstance(module, Block):
                module.initialise(sum(counts))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (m, channels, H, W) to outputs (m, C)."""
        x = self.bias1(self.conv1(x))
        x = F.relu(self.stages(x)) if self.activates_input else self.stages(F.relu(x))
        return self.output(self.bias2(x.mean((2, 3))))


def resnet18(input_shape: Sequence[int], num_outputs: int, width: int = 16) -> ResNet:
    """Return the Fixup ResNet-18 of the paper's CIFAR-10 experiments (Figure 7).

    ``width`` is the number of channels of the first layer. With 16 channels, the network has
    688,356 parameters for inputs (3, 32, 32) and 10 classes. The height and width of the images
    must be at least 8.
    """
    channels, _, _ = image_shape("resnet18", input_shape, smallest=8)
    return ResNet(Block, (2, 2, 2, 2), channels, num_outputs, width, width)


def resnet50(input_shape: Sequence[int], num_outputs: int, width: int = 16) -> ResNet:
    """Return the Fixup ResNet-50 of the paper's TinyImageNet experiments (Table 2).

    ``width`` is the number of channels of the first layer. For RGB images and 200 classes, the
    network has 1,568,490 parameters with 16 channels, and 23,857,146 with 64. The height and width
    of the images must be at least 8.
    """
    channels, _, _ = image_shape("resnet50", input_shape, smallest=8)
    return ResNet(Bottleneck, (3, 4, 6, 3), channels, num_outputs, width, width)


def wide_resnet(
    input_shape: Sequence[int], num_outputs: int, depth: int = 16, widen_factor: int = 4
) -> ResNet:
    """Return a Fixup Wide ResNet, such as the paper's 16-4 for CIFAR (Table 1).

    It has three stages (Zagoruyko and Komodakis, 2016). By default, it has depth 16 and widening
    factor 4, and 2,745,306 parameters for inputs (3, 32, 32) and 10 classes.

    Args:
        input_shape: (channels, height, width), with height and width of at least 8.
        num_outputs: Number of outputs C.
        depth: Number of layers with weights, 6 n + 4 for n blocks per stage: 10, 16, 22, 28, ...
        widen_factor: Factor that multiplies the stages' 16, 32 and 64 channels.

    Raises:
        ConfigurationError: If the input is not an image or too small, or the depth is invalid.
    """
    channels, _, _ = image_shape("wide_resnet", input_shape, smallest=8)
    if depth < 10 or (depth - 4) % 6:
        raise ConfigurationError(f"depth must be one of 10, 16, 22, 28, ..., got {depth}.")
    if widen_factor < 1:
        raise ConfigurationError(f"widen_factor must be at least 1, got {widen_factor}.")
    counts = [(depth - 4) // 6] * 3
    return ResNet(WideBlock, counts, channels, num_outputs, 16, 16 * widen_factor)


def wrn16_4(input_shape: Sequence[int], num_outputs: int) -> ResNet:
    """Return `wide_resnet` with depth 16 and widening factor 4, called WRN-16-4."""
    return wide_resnet(input_shape, num_outputs)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without bias whose output has the size of its input / stride."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _initialize(layer: nn.Conv2d, scale: float = 1.0) -> None:
    """Draw weights of variance scale² · 2 / (outputs · kernel size) (He et al., 2015)."""
    fan_out = layer.out_channels * prod(layer.kernel_size)
    nn.init.normal_(layer.weight, std=scale * sqrt(2 / fan_out))
