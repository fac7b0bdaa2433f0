"""The two generic ways are each other's twins, and both the dense Jacobian."""

import pytest
import torch
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import nn
from zoo import CASES, HYPERPARAMETERS

from evigrad.network.generic import loop_rows, vmap_rows
from evigrad.network.modes import model_run

NOT_VECTORISED = ("lstm", "gru")


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_generic_rows(case: str, k: int) -> None:
    model, x = CASES[case].build(4)
    model.eval()
    weights = weights_of(model, HYPERPARAMETERS)
    vectors = random(4, k, 3)
    expected = rows(jacobian(model, weights, x), vectors)
    for compute in (loop_rows, vmap_rows):
        if compute is vmap_rows and case in NOT_VECTORISED:
            continue
        with model_run(model):
            assert_rows(compute(model, weights, list(weights), x, vectors, False), expected)
            all_but_first = list(weights)[1:]
            assert_rows(
                compute(model, weights, all_but_first, x, vectors, False),
                {n: expected[n] for n in all_but_first},
            )


def test_loop_against_finite_differences() -> None:
    """The reference of everything else, against differences of outputs."""
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
