"""One record of what every pass over the data needs."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from evigrad.engine.micro_batches import MicroBatches
from evigrad.engine.plans import Plans
from evigrad.engine.settings import Settings
from evigrad.likelihoods import Likelihood
from evigrad.priors import GaussianPrior


@dataclass(frozen=True, eq=False)
class Problem:
    """A model with its weights, likelihood and prior, and how its evidence is computed.

    Attributes:
        model: The user's.
        weights: Its trainable parameters that are no hyperparameters, by name.
        likelihood: Gives the curvature of the outputs.
        prior: Bound to the weights.
        settings: How the evidence is computed.
        generator: The source of every random choice.
        plans: The plan for each shape of inputs.
        sizes: How many data pass through the network at once.
    """

    model: nn.Module
    weights: Mapping[str, nn.Parameter]
    likelihood: Likelihood
    prior: GaussianPrior
    settings: Settings
    generator: torch.Generator
    plans: Plans
    sizes: MicroBatches

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.weights.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the first weight."""
        return next(iter(self.weights.values())).dtype
