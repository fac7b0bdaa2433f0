"""Inner products of rows with cotangents: those of the rows themselves, value and derivative."""

from unittest import mock

import pytest
import torch
from network.dense import random, weights_of
from torch import nn
from zoo import CASES, HYPERPARAMETERS

from evigrad.errors import ConfigurationError
from evigrad.network import Linearization, convolutions, plan


def test_nothing_asked_for() -> None:
    model, x = CASES["linear"].build(4)
    weights = weights_of(model.eval(), HYPERPARAMETERS)
    linearization = Linearization(model, weights, x, plan(model, weights, x), True)
    assert linearization.inner(random(4, 2, 3), {}) == 0
    with pytest.raises(ConfigurationError, match="no weight named"):
        linearization.inner(random(4, 2, 3), {"body.0.weigth": random(4, 2, 4, 3)})


def test_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Tanh())
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(2 * 9, 3)).double()
    weights, x, vectors = weights_of(model), random(3, 3, 4, 4), random(3, 2, 3)
    jacobian_plan = plan(model, weights, x)
    cotangents = {name: random(3, 2, *w.shape) for name, w in weights.items()}
    rows = Linearization(model, weights, x, jacobian_plan, False).rows(vectors)
    for p in model.parameters():
        if p.dim() == 4:
            p.data = p.contiguous(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    for way in (0, 2**62):
        with mock.patch.object(convolutions, "_WORTH_A_CALL", way):
            linearization = Linearization(model, weights, x, jacobian_plan, True)
            assert all(linearization.is_closed(name) for name in weights)
            torch.testing.assert_close(linearization.rows(vectors), rows)
            value = torch.stack([(rows[n] * c).sum() for n, c in cotangents.items()]).sum()
            torch.testing.assert_close(linearization.inner(vectors, cotangents).detach(), value)
