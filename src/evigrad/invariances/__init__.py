"""Random transforms of the inputs whose size is learned, and the average over them.

``Averaged(model, AffineInvariance(), num_samples=20)`` maps an input to the mean of the model's
outputs over random transformations of it. The width of these is a hyperparameter like any other:
``Evidence(..., hyperparameters=["invariance"])`` learns it on the training data.
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
