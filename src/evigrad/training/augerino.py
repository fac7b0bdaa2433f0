"""Augerino, a baseline without evidence: ranges learned on the training loss, with a reward.

G. Benton, M. Finzi, P. Izmailov and A. G. Wilson (2020), *Learning Invariances in Neural Networks
from Training Data*, NeurIPS. The ranges of the augmentation are trained together with the weights,
by the training loss minus λ times the Euclidean norm of the widths of the uniform distributions
that transforms are drawn from. Without this reward the loss would prefer no augmentation.

The authors' published code, and where this one differs:

- Widths reach from one end to the other: twice the ranges of ``evigrad.invariances``, which are
  half widths. Translations count in tenths of half the image. λ is 0.01 by default (0.1 for
  rotated MNIST).
- There is no reward while any width is 10 or more. Here the limits of the affine ranges keep
  widths below 2π, so that only a user's own transforms can get there.
- Adam learns weights and widths at one rate (0.01 on CIFAR-10, 0.1 on rotated MNIST), with weight
  decay on the weights alone. Here the ranges have the rates of the model's hyperparameters,
  ``hyper_lr`` to ``hyper_lr_min`` by a cosine over the epochs, and a step in every batch.
- A softplus keeps their widths positive; here the ranges are reflected at 0.
"""

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.inputs import named_parameters
from evigrad.invariances.transform import Ranged, learnable_ranges, ranged_modules

# From this width on there is no reward, as in the authors' code.
WIDEST = 10.0


class Augerino:
    """The ranges that the training loss learns, and their reward.

    ``evidence`` has a model with transforms whose ranges are among the hyperparameters; ``weight``
    is λ, in nats per datum and unit of width.
    """

    def __init__(self, evidence: Evidence, weight: float) -> None:
        self.weight = weight
        model = evidence.model
        self._transforms = [
            (module, learnable_ranges(module)) for module in ranged_modules(model).values()
        ]
        ids = {id(named_parameters(model)[name]) for name in range_parameters(model)}
        self.names = [name for name, p in evidence.hyperparameters().items() if id(p) in ids]

    def regulariser(self) -> Tensor:
        """The term −λ‖2η‖ of the loss over the learned ranges η, or 0 beyond ``WIDEST``."""
        widths = 2 * torch.cat([_learned(module, names) for module, names in self._transforms])
        reward = torch.linalg.vector_norm(widths)
        return -self.weight * torch.where((widths < WIDEST).all(), reward, 0.0 * reward)


def range_parameters(model: nn.Module) -> list[str]:
    """Names of the ranges that a model learns; ConfigurationError if there are none."""
    names = [
        f"{path}.{name}" if path else name
        for path, module in ranged_modules(model).items()
        for name in learnable_ranges(module)
    ]
    if not names:
        raise ConfigurationError(
            "augerino learns the ranges of a transform, and the model has none: wrap it, as"
            " Averaged(model, AffineInvariance(), num_samples=8), on the command line"
            " --invariance affine with its ranges learned."
        )
    return names


def _learned(module: nn.Module, names: list[str]) -> Tensor:
    assert isinstance(module, Ranged)
    positions = [i for i, name in enumerate(module.named_ranges()) if name in names]
    return module.ranges[positions].double()
