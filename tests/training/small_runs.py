"""Small runs of every kind, to be interrupted."""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evigrad.errors import EvigradWarning
from evigrad.invariances import Averaged, InputScale, Transform
from evigrad.training import FitResult, fit
from evigrad.training.settings import grouped

SMALL: dict[str, Any] = {
    "estimator": "ntk-20-1",
    "epochs": 5,
    "batch_size": 20,
    "burn_in": 2,
    "every": 2,
    "steps": 3,
    "lr": 0.02,
    "progress": False,
}
RECORDED = SMALL | {"checkpoint_every": 1}  # in a folder
_OF_ROUNDS = ("burn_in", "every", "steps")


def without_estimator(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without an estimator, and without those that only rounds use."""
    return {n: v for n, v in settings.items() if n not in _OF_ROUNDS} | {"estimator": None}


def net(seed: int = 0, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = nn.BatchNorm1d(8) if norm else nn.Dropout(dropout)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), hidden, nn.Linear(8, 3))


class Jitter(Transform):
    """A transform with a scale to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    @property
    def ranges(self) -> Tensor:
        return self.scale[None]

    def named_ranges(self) -> dict[str, float]:
        return {"scale": self.scale.item()}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, 4, generator=generator)

    def forward(self, x: Tensor, eps: Tensor) -> Tensor:
        return x + self.scale * eps


class Careless(nn.Module):
    """Draws from every global generator, and counts in a buffer that no state_dict holds."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = net(seed)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            x = x * (1 + 0.1 * float(np.random.rand()) + 0.1 * random.random())
            x = x + 0.1 * torch.randn_like(x) / self.seen
        return self.net(x)


def averaged(seed: int = 0) -> nn.Module:
    return Averaged(net(seed), Jitter(), num_samples=3)


# Name → how to make the network from a seed, and what differs in the settings.
CASES: dict[str, tuple[Callable[[int], nn.Module], dict[str, Any]]] = {
    "map": (net, {"estimator": None}),
    "ntk": (net, {}),
    "kfac": (net, {"estimator": "kfac-20-1", "prior": "scalar"}),
    "kfac, full batch": (net, {"estimator": "kfac-N-C", "steps": 5}),
    "sampled Fisher": (net, {"estimator": "diag-20-1-mc", "prior": "diagonal"}),
    "fixed point": (net, {"prior_update": "fixed_point"}),
    "prior blocks": (net, {"prior_blocks": 2, "every": 1}),
    "dropout": (lambda seed: net(seed, dropout=0.4), {"eval_every": 2}),
    "batch normalisation": (lambda seed: net(seed, norm=True), {"estimator": "full-30-C"}),
    "anchored": (net, {"estimator": "ntk-20-rows-anchored"}),
    "anchored, prior blocks": (
        net,
        {"estimator": "ntk-20-rows-anchored", "prior_blocks": 2, "every": 1},
    ),
    "anchored, learned model": (
        averaged,
        {"estimator": "ntk-20-rows-anchored", "hyperparameters": ["invariance"], "every": 1},
    ),
    "bounds": (net, {"bracket_every": 2}),
    "momentum": (net, {"optimizer": "sgd"}),
    "learned model": (averaged, {"hyperparameters": ["invariance"], "estimator": "kfac-20-1"}),
    "separate rounds": (
        averaged,
        {"hyperparameters": ["invariance"], "every": 3, "hyper_every": 1, "hyper_steps": 1},
    ),
    "map, learned noise": (
        net,
        {"estimator": None, "noise_on_loss": True, "likelihood": "gaussian"},
    ),
    "automatic choices": (
        lambda seed: nn.Sequential(InputScale(4), net(seed)),
        {"hyperparameters": ["0"], "micro_batch": "auto", "memory_budget": "4kB"},
    ),
    "careless": (Careless, {}),
}


def train(case: str, data: Any, folder: Path, *, seed: int = 0, **changes: Any) -> FitResult:
    make, settings = CASES[case]
    # What a process finds in the global generators is anything.
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The model has normalization", EvigradWarning)
        if settings.get("likelihood") == "gaussian":
            data = [(x, x[:, 1:].square()) for x, _ in data]
        options = {"run_dir": folder, "test": data[1], **RECORDED, **settings, **changes}
        if options["estimator"] is None:
            options = without_estimator(options)
        return fit(make(seed), data[0], **grouped(options))
