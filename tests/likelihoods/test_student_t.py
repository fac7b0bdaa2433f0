"""Student's t noise: its density, its Fisher information, and what it is for."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from evigrad.errors import ConfigurationError, EvigradWarning, InputError
from evigrad.likelihoods import StudentT
from evigrad.training import fit
from evigrad.training.convergence import tail_gain
from evigrad.training.settings import grouped

QUICK: dict[str, Any] = {"epochs": 150, "burn_in": 6, "every": 6, "steps": 3, "progress": False}
QUICK |= {"estimator": "full-N-C"}


@given(
    degrees=st.floats(2.1, 50.0),
    noises=st.lists(st.floats(0.1, 5.0), min_size=2, max_size=2),
    seed=st.integers(0, 10**6),
)
def test_the_density_is_the_one_of_torch(degrees: float, noises: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    f = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    y = f + 10 * torch.randn(5, 2, generator=generator, dtype=torch.float64)
    likelihood = StudentT(torch.tensor(noises, dtype=torch.float64), degrees=degrees).double()
    scales = likelihood.log_noise.exp()
    expected = torch.distributions.StudentT(degrees, f, scales).log_prob(y).sum(1)
    torch.testing.assert_close(likelihood.log_prob(f, y), expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=10)
@given(degrees=st.floats(2.5, 30.0), noise=st.floats(0.2, 3.0))
def test_it_is_normalized_and_its_curvature_is_the_mean_square_of_the_score(
    degrees: float, noise: float
) -> None:
    likelihood = StudentT(noise, degrees=degrees, learnable=False).double()
    # y = noise tan(u) maps a bounded interval to the line, with tails of any weight.
    u = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000 * math.pi - math.pi / 2
    y = (noise * u.tan())[:, None]
    weight = math.pi / 20_000 * noise / u.cos().square()
    f = torch.zeros_like(y)
    density = likelihood.log_prob(f, y).exp() * weight
    assert float(density.sum()) == pytest.approx(1.0, rel=1e-4)
    information = float((density * likelihood.score(f, y)[:, 0].square()).sum())
    assert float(likelihood.hessian(f[:1])) == pytest.approx(information, rel=1e-4)


def test_samples_have_the_variance_of_the_predictions() -> None:
    likelihood = StudentT(0.7, degrees=6, learnable=False).double()
    f = torch.ones(400_000, 1).double()
    samples = likelihood.sample(f, torch.Generator().manual_seed(0))
    moments = likelihood.moments(f[:1], torch.full((1, 1, 1), 0.3).double())
    assert float(samples.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(samples.var()) == pytest.approx(float(moments[2]), rel=0.02)
    assert (float(moments[0]), float(moments[1])) == pytest.approx((1.0, 0.3))


def test_what_are_no_degrees_of_freedom() -> None:
    for degrees in [2, 0, -1.0, math.inf, math.nan, "4", True, None]:
        with pytest.raises(
            ConfigurationError, match="degrees must be a finite number larger than 2"
        ):
            StudentT(degrees=degrees)  # pyright: ignore[reportArgumentType]


def test_errors_name_the_class() -> None:
    likelihood = StudentT(num_outputs=3)
    with pytest.raises(InputError, match=r"StudentT\(num_outputs=2\)"):
        likelihood.validate((4, 2), torch.zeros(4, 2))
    assert "degrees=4" in repr(likelihood)


def line(heavy: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator)
    noise = torch.randn(200, 1, generator=generator)
    return x, x[:, :1] + 0.3 * (noise**3 if heavy else noise)


def test_heavy_tails_are_named_and_student_t_finds_the_line() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(3, 1), nn.Linear(3, 1)]
    with pytest.warns(EvigradWarning, match='heavy tails: .* Try likelihood="student-t".*held-out'):
        fit(models[0], line(True), likelihood="gaussian", **grouped(QUICK))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Training has not converged")
        fit(models[1], line(True), likelihood="student-t", **grouped(QUICK))
        fit(nn.Linear(3, 1), line(False), likelihood="gaussian", **grouped(QUICK))
    truth = torch.tensor([[1.0, 0.0, 0.0]])
    errors = [float((model.weight.detach() - truth).norm()) for model in models]
    assert errors[1] < errors[0]


@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 1e3))
def test_the_gain_has_no_scale_and_normal_residuals_have_none(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(500, 2, generator=generator, dtype=torch.float64)
    assert tail_gain(scale * normal) == pytest.approx(tail_gain(normal), abs=1e-9)
    assert tail_gain(normal) < 0.05 < tail_gain(normal**3)
    assert tail_gain(torch.zeros(3, 1)) == 0.0
