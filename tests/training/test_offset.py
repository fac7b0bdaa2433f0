"""Targets far from zero: training starts with outputs around their mean."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.small_runs import SMALL, without_estimator

import evigrad
from evigrad import Optimization, Schedule
from evigrad.data import Scaling
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Categorical, Gaussian, Joint, Likelihood, Weighted
from evigrad.priors import GaussianPrior
from evigrad.training.settings import grouped

RUN: dict[str, Any] = SMALL | {"epochs": 4, "burn_in": 1, "every": 1, "lr": 1e-6}


def targets(mean: float, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, generator=generator), torch.randn(60, 1, generator=generator)
    return x, mean + spread * y


def net(bias: bool = True, num_outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, num_outputs, bias=bias))


def trained(model: nn.Module, data: Any, likelihood: str | Likelihood, **changes: Any) -> nn.Module:
    """Return the model after hardly any training, so that its outputs show the start."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Training has not converged")
        settings = RUN | changes
        if settings["estimator"] is None:
            settings = without_estimator(settings)
        evigrad.fit(model, data, likelihood=likelihood, **grouped(settings))
    return model


@pytest.mark.parametrize(
    ("likelihood", "estimator"), [("gaussian", None), ("student-t", "ntk-20-1")]
)
def test_outputs_start_at_the_mean_of_targets_far_from_zero(likelihood, estimator):
    x, y = targets(5.0)
    model = trained(net(), (x, y), likelihood, estimator=estimator)
    assert float(model(x).detach().mean()) == pytest.approx(float(y.mean()), abs=0.01)


def test_the_mean_of_a_heteroscedastic_output_starts_there_too():
    x, y = targets(5.0)
    before = net(num_outputs=2)(x).detach()
    after = trained(net(num_outputs=2), (x, y), "heteroscedastic")(x).detach()
    assert float(after[:, 0].mean()) == pytest.approx(float(y.mean()), abs=0.01)
    torch.testing.assert_close(after[:, 1], before[:, 1], atol=1e-3, rtol=0)


def test_heads_start_there_too_without_missing_targets_and_weights():
    x, y = targets(5.0)
    labels = torch.randint(2, (60,), generator=torch.Generator().manual_seed(0))
    y[3] = torch.nan
    size = Weighted(Gaussian(missing="nan"))
    likelihood = Joint({"kind": (2, Categorical()), "size": (1, size)})
    weighted = size.targets(y, torch.ones(60))
    data = x, likelihood.targets({"kind": labels, "size": weighted})
    after = trained(net(num_outputs=3), data, likelihood)(x).detach()
    assert float(after[:, 2].mean()) == pytest.approx(float(y.nanmean()), abs=0.01)


@pytest.mark.parametrize("mean", [0.0, 0.3])
def test_targets_near_zero_change_no_start(mean):
    x, y = targets(mean)
    before, after = net()(x), trained(net(), (x, y), "gaussian")(x)
    torch.testing.assert_close(after, before, atol=1e-3, rtol=0)


def test_a_model_that_fits_its_targets_starts_where_it_is():
    x, y = targets(5.0)
    model = net()
    with torch.no_grad():
        model[2].bias += y.mean() - model(x).mean()
    before = model(x).detach()
    torch.testing.assert_close(trained(model, (x, y), "gaussian")(x), before, atol=1e-3, rtol=0)


class Halved(nn.Module):
    """A model whose bias does not shift the outputs by its change."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.net(x)


@pytest.mark.parametrize("make", [lambda: net(bias=False), Halved])
def test_without_an_output_bias_a_warning_names_scaling(make):
    data = targets(5.0)
    with pytest.warns(EvigradWarning, match=r"starts 4\.\d.*no output bias.*Scaling\.of\(y\)"):
        trained(make(), data, "gaussian")
    scaling = Scaling.of(data[1])
    trained(make(), (data[0], scaling(data[1])), "gaussian")


@pytest.mark.parametrize("estimator", [None, "ntk-20-1"])
def test_without_precisions_to_learn_there_is_no_warning(estimator):
    prior = GaussianPrior(precision=1.0, learnable=False)
    trained(net(bias=False), targets(5.0), "gaussian", estimator=estimator, prior=prior)


@pytest.mark.long
def test_groups_get_the_precision_of_centered_targets():
    """A common shift of the embeddings must not count as their spread."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.groups, self.linear = nn.Embedding(20, 1), nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x[:, :1]) + self.groups(x[:, 1].long())

    generator = torch.Generator().manual_seed(0)
    group = torch.arange(100) % 20
    x = torch.stack([torch.randn(100, generator=generator), group.float()], 1)
    effects = 0.6 * torch.randn(20, generator=generator)
    y = (x[:, 0] + effects[group] + 0.5 * torch.randn(100, generator=generator))[:, None]
    learned = []
    for mean in (0.0, 3.0):
        result = evigrad.fit(
            Grouped(),
            (x, y - y.mean() + mean),
            likelihood="gaussian",
            estimator="ntk-N-C",
            schedule=Schedule(epochs=200),
            optimization=Optimization(start_decay=0.01),
            progress=False,
        )
        precision = result.history[-1]["precision/groups.weight"]
        assert precision is not None
        learned.append(precision**-0.5)
    assert learned[1] == pytest.approx(learned[0], rel=0.05)
