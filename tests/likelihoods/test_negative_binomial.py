"""Counts with a learned dispersion."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import evigrad
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import NegativeBinomial, Poisson, make_likelihood

LEVELS = st.floats(-3.0, 3.0)
COUNTS = torch.arange(4000, dtype=torch.float64)[:, None]


@given(LEVELS, st.floats(-2.0, 1.5))
def test_it_is_a_density_with_the_stated_moments_and_information(f: float, log_d: float) -> None:
    likelihood = NegativeBinomial(float(torch.tensor(log_d).exp())).double()
    with torch.no_grad():
        likelihood.log_dispersion.fill_(log_d)
    outputs = torch.full((len(COUNTS), 1), f, dtype=torch.float64)
    p = likelihood.log_prob(outputs, COUNTS).exp().detach()
    mean = float(torch.tensor(f, dtype=torch.float64).exp())
    torch.testing.assert_close(p.sum(), torch.tensor(1.0, dtype=torch.float64))
    counts = COUNTS[:, 0]
    assert float((p * counts).sum()) == pytest.approx(mean, rel=1e-5)
    variance = float((p * (counts - mean) ** 2).sum())
    d = float(likelihood.log_dispersion.detach().exp())
    assert variance == pytest.approx(mean + d * mean**2, rel=1e-4)
    score = likelihood.score(outputs, COUNTS)[:, 0].detach()
    information = float((p * score.square()).sum())
    assert float(likelihood.hessian(outputs[:1]).detach()) == pytest.approx(information, rel=1e-5)


def test_a_small_dispersion_is_a_poisson() -> None:
    f, y = torch.randn(5, 2, dtype=torch.float64), torch.randint(0, 9, (5, 2))
    likelihood = NegativeBinomial(1e-7).double()
    close: Any = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(likelihood.log_prob(f, y), Poisson().log_prob(f, y), **close)
    torch.testing.assert_close(likelihood.hessian(f), Poisson().hessian(f), **close)


def test_samples_and_predicted_moments() -> None:
    likelihood, generator = NegativeBinomial(0.8).double(), torch.Generator().manual_seed(0)
    variance = 0.3
    f = 0.5 + variance**0.5 * torch.randn(400_000, 1, generator=generator, dtype=torch.float64)
    y = likelihood.sample(f, generator)
    outputs = torch.full((1, 1), 0.5, dtype=torch.float64)
    mean, epistemic, noise = likelihood.moments(outputs, variance * torch.ones_like(outputs)[None])
    assert float(y.mean()) == pytest.approx(float(mean), rel=0.01)
    total = float((epistemic + noise).detach())
    assert float(y.var()) == pytest.approx(total, rel=0.05)


@pytest.mark.long
def test_the_dispersion_is_learned() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 2, generator=generator)
    truth = NegativeBinomial(0.6)
    y = truth.sample(1.0 + 0.7 * x[:, :1], generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    schedule = evigrad.Schedule(epochs=100)
    result = evigrad.fit(
        model, (x, y), likelihood="negative-binomial", schedule=schedule, progress=False
    )
    assert result.history[-1]["likelihood/dispersion"] == pytest.approx(0.6, abs=0.05)  # from 0.5


def test_what_is_refused() -> None:
    assert isinstance(make_likelihood("negative-binomial"), NegativeBinomial)
    broken: Any
    for broken in (0.0, -1.0, float("inf"), "1", True):
        with pytest.raises(ConfigurationError, match="dispersion must be positive"):
            NegativeBinomial(broken)
    with pytest.raises(InputError, match="must be a count"):
        NegativeBinomial().validate((1, 1), torch.tensor([[0.5]]))
