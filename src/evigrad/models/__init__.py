"""Networks by name: small ones, the paper's residual networks with Fixup, and sequences."""

from evigrad.models.catalogue import MODELS, make_model, make_network
from evigrad.models.convolutional import cnn, digitsnet, lenet, mininet
from evigrad.models.fixup import fixup_scalars
from evigrad.models.mlp import ACTIVATIONS, mlp
from evigrad.models.resnet import ResNet, resnet18, resnet50
from evigrad.models.sequences import GRU, gru, transformer
from evigrad.models.wide_resnet import WideResNet, wide_resnet, wrn16_4

__all__ = [
    "ACTIVATIONS",
    "GRU",
    "MODELS",
    "ResNet",
    "WideResNet",
    "cnn",
    "digitsnet",
    "fixup_scalars",
    "gru",
    "lenet",
    "make_model",
    "make_network",
    "mininet",
    "mlp",
    "resnet18",
    "resnet50",
    "transformer",
    "wide_resnet",
    "wrn16_4",
]
