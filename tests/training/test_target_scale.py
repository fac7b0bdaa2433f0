"""Real targets that are not of unit scale: a warning with the way out, and that it is one."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from training.small_runs import SMALL, without_estimator

from evigrad.data import Scaling
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Gaussian
from evigrad.training import fit
from evigrad.training.settings import grouped


def regression(scale: float, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    return x, scale * (x.sum(1, keepdim=True) / 3**0.5) + offset


def net(num_outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, num_outputs))


# As of scikit-learn's diabetes, far from zero, and of a turbine's decay.
@pytest.mark.filterwarnings("ignore:The residuals")  # of a short training
def test_raw_targets_are_warned_of():
    for likelihood, scale, offset, is_data_set in [
        ("gaussian", 77.0, 152.0, False),
        ("heteroscedastic", 1.0, 30.0, True),
        ("natural-gaussian", 0.015, 0.0, False),
    ]:
        for settings in [without_estimator(SMALL), SMALL]:
            data, outputs = regression(scale, offset), 1 if likelihood == "gaussian" else 2
            train = list(zip(*data, strict=True)) if is_data_set else data
            with pytest.warns(EvigradWarning, match=r"unit scale.*Scaling\.of\(y\)"):
                fit(net(outputs), train, likelihood=likelihood, **grouped(settings))


def test_the_way_out():
    x, y = regression(77.0, 152.0)
    scaling = Scaling.of(y)
    torch.testing.assert_close(scaling.undo(scaling(y)), y)
    settings: dict[str, Any] = SMALL | {"epochs": 60, "burn_in": 10, "every": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Training has not converged")
        warnings.filterwarnings("ignore", "The residuals")  # of a short training
        result = fit(net(), (x, scaling(y)), likelihood="gaussian", **grouped(settings))
        fit(net(), (x, scaling(y)), likelihood=Gaussian(noise=0.01), **grouped(SMALL))
        fit(net(2), (x, scaling(y)), likelihood="heteroscedastic", **grouped(SMALL))
    with torch.no_grad():
        error = (scaling.undo(result.model(x)) - y).square().mean().sqrt()
    assert error < 0.3 * y.std()


def test_a_model_with_the_scale_of_its_targets_is_left_alone():
    x, y = regression(77.0, 0.0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 77.0 * self.net(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Training has not converged")
        warnings.filterwarnings("ignore", "The residuals")  # of a short training
        fit(Scaled(), (x, y), likelihood=Gaussian(noise=77.0), **grouped(SMALL))
