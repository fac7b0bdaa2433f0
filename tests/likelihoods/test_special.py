"""The incomplete beta function against SciPy's."""

import numpy as np
import pytest
import torch
from scipy import special

from evigrad.likelihoods.special import betainc


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_the_incomplete_beta_function_is_that_of_scipy(size: float) -> None:
    draw = np.random.default_rng(0)
    a, b = size * draw.random((2, 4000)) + 0.01
    x = draw.random(4000)
    values = betainc(*(torch.tensor(v) for v in (a, b, x, 1 - x)))
    np.testing.assert_allclose(values, special.betainc(a, b, x), atol=1e-11, rtol=1e-9)


def test_ends_and_numbers_that_overflow() -> None:
    x = torch.tensor([0.0, 1.0, 0.4, 1e-300], dtype=torch.float64)
    a, b = (torch.tensor(v, dtype=torch.float64) for v in ([2, 2, 2, 2], [3, 1, 1e5, 0.5]))
    assert betainc(a, b, x, 1 - x).tolist() == [0.0, 1.0, 1.0, 0.0]
