"""The loop over examples, the reference of every other way, against differences of outputs."""

import torch
from network.dense import random, weights_of
from torch import nn

from evigrad.network.generic import loop_rows


def test_loop_against_finite_differences() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    weights, x, vectors = weights_of(model), random(3, 3), random(3, 2, 2, seed=1)
    looped_rows = loop_rows(model, weights, list(weights), x, vectors, False)
    for name, w in weights.items():
        direction = random(*w.shape, seed=2)
        outputs = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                w += step * direction
                outputs.append(model(x))
                w -= step * direction
        slope = torch.einsum("nkc,nc->nk", vectors, (outputs[0] - outputs[1]) / 2e-6)
        product = (looped_rows[name] * direction).flatten(2).sum(2)
        torch.testing.assert_close(product, slope, rtol=1e-7, atol=1e-8)
