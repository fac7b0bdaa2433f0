"""Random transforms of inputs with learned ranges, and models that average over transforms.

``Averaged(model, AffineInvariance(), num_samples=20)`` maps an input to the mean of the model's
outputs over random transforms of it. To learn the ranges of the transforms on the training data,
name them as hyperparameters: ``Evidence(..., hyperparameters=["invariance"])``.
"""

from evigrad.invariances.affine import GENERATORS, AffineInvariance
from evigrad.invariances.averaged import AVERAGES, Averaged
from evigrad.invariances.transform import AdditiveNoise, InputScale, Transform

__all__ = [
    "AVERAGES",
    "GENERATORS",
    "AdditiveNoise",
    "AffineInvariance",
    "Averaged",
    "InputScale",
    "Transform",
]
