"""Fixtures: a tiny classification problem and a network for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor]


@pytest.fixture(scope="session")
def blobs() -> tuple[Data, Data]:
    """Three overlapping clusters in four dimensions: 60 data to train, 40 to test."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(100) % 3
    centres = 1.5 * torch.randn(3, 4, generator=generator)
    x = centres[y] + torch.randn(100, 4, generator=generator)
    return (x[:60], y[:60]), (x[60:], y[60:])


@pytest.fixture
def make_net() -> Callable[..., nn.Sequential]:
    def make(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))

    return make
