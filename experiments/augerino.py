"""Augerino, a baseline without evidence: ranges learned on the training loss, with a reward.

G. Benton, M. Finzi, P. Izmailov and A. G. Wilson (2020), *Learning Invariances in Neural Networks
from Training Data*, NeurIPS. Augerino trains the ranges of the augmentation together with the
weights. Its loss is the training loss minus λ times the Euclidean norm of the widths of the uniform
distributions of the transforms. Without this reward, the loss would prefer no augmentation.

Differences from the authors' published code:

- Widths reach from one end to the other. They are twice the ranges of ``evigrad.invariances``,
  which are half widths. Translations count in tenths of half the image. λ is 0.01 by default (0.1
  for rotated MNIST).
- There is no reward if any width is 10 or more. Here the limits of the affine ranges keep widths
  below 2π, so only custom transforms can get there.
- Their Adam learns weights and widths at one rate (0.01 on CIFAR-10, 0.1 on rotated MNIST), with
  weight decay only on the weights. Here the ranges have the rates of the model's hyperparameters,
  ``hyper_lr`` to ``hyper_lr_min``, by a cosine over the epochs. They take a step in every batch.
- Their softplus keeps widths positive. Here the ranges are reflected at 0.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.inputs import named_parameters
from evigrad.invariances.transform import learnable_ranges, ranged_modules
from evigrad.priors import matches
from evigrad.training import FitResult, Settings, Trainer, prepare

NAME = "augerino"  # instead of the name of an estimator
WEIGHT = 0.01
# From this width on there is no reward, as in the authors' code.
WIDEST = 10.0


class AugerinoTrainer(Trainer):
    """Learns the ranges of transforms on the training loss.

    The model's ranges are among the hyperparameters. ``weight`` is λ, in nats per example and unit
    of width. ``Trainer`` has the same positional arguments.
    """

    def __init__(self, *arguments: Any, weight: float) -> None:
        super().__init__(*arguments)
        if not 0 <= weight < math.inf:
            raise ConfigurationError(f"The weight of the reward must be 0 or more, not {weight}.")
        self._weight, model = weight, self.evidence.model
        self._transforms = [
            (module, learnable_ranges(module)) for module in ranged_modules(model).values()
        ]
        ids = {id(named_parameters(model)[name]) for name in range_parameters(model)}
        learned = self.evidence.hyperparameters()
        self.weights.on_loss = [name for name, p in learned.items() if id(p) in ids]

    @property
    def record(self) -> dict[str, Any]:
        """Return the settings by name, including the ones of Augerino."""
        return super().record | {"estimator": NAME, "augerino_weight": self._weight}

    def loss(self, x: Tensor, y: Tensor, indices: Tensor, scale: float) -> Tensor:
        """Return the loss of a batch less the reward."""
        return super().loss(x, y, indices, scale) - self.reward()

    def reward(self) -> Tensor:
        """The reward λ‖2η‖ for the learned ranges η, or 0 beyond ``WIDEST``."""
        widths = 2 * torch.cat([_learned(module, names) for module, names in self._transforms])
        norm = torch.linalg.vector_norm(widths)
        return self._weight * torch.where((widths < WIDEST).all(), norm, 0.0 * norm)


def fit_augerino(
    model: nn.Module,
    train: Any,
    *,
    weight: float = WEIGHT,
    test: Any = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **settings: Any,
) -> FitResult:
    """Train the weights by MAP and the ranges of the model's transforms by the training loss.

    Args:
        model: Model that averages over transforms with learned ranges.
        train: Training data for ``evigrad.fit``.
        weight: λ, in nats per example and unit of width.
        test: Test data. They are only evaluated.
        run_dir: Folder of the run.
        resume: Whether to resume the run in that folder.
        progress: Whether to show progress.
        **settings: Other keywords of ``evigrad.training.Settings``.

    Returns:
        The result.
    """
    trainer = prepare_augerino(
        model, train, Settings(estimator=None, **settings), weight, test=test
    )
    return trainer.train(run_dir, resume=resume, progress=progress)


def prepare_augerino(
    model: nn.Module, train: Any, settings: Settings, weight: float = WEIGHT, **options: Any
) -> AugerinoTrainer:
    """Return a checked trainer from ``settings`` without estimator and ``prepare``'s options."""
    settings = replace(settings, hyperparameters=with_ranges(model, settings.hyperparameters))
    make = partial(AugerinoTrainer, weight=weight)
    return prepare(model, train, settings, make=make, **options)


def with_ranges(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return hyperparameters by name or prefix, with the ranges that a model learns."""
    ranges = range_parameters(model)
    return [*names, *(r for r in ranges if not any(matches(name, r) for name in names))]


def range_parameters(model: nn.Module) -> list[str]:
    """Return the names of the learned ranges. Raise ConfigurationError if there are none."""
    names = [
        f"{path}.{name}" if path else name
        for path, module in ranged_modules(model).items()
        for name in learnable_ranges(module)
    ]
    if not names:
        raise ConfigurationError(
            "Augerino learns the ranges of a transform, and the model has none: wrap it, as"
            " Averaged(model, AffineInvariance(), num_samples=8), in an experiment"
            " invariance: affine with its ranges learned."
        )
    return names


def _learned(module: Any, names: list[str]) -> Tensor:
    positions = [i for i, name in enumerate(module.named_ranges()) if name in names]
    return module.ranges[positions].double()
