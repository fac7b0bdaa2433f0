"""Networks by name: small ones, made for the data sets that evigrad ships or names."""

from evigrad.models.catalogue import MODELS, make_model
from evigrad.models.convolutional import digitsnet, mininet
from evigrad.models.mlp import ACTIVATIONS, mlp

__all__ = ["ACTIVATIONS", "MODELS", "digitsnet", "make_model", "mininet", "mlp"]
