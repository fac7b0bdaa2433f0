"""What training does where nobody says otherwise, and on few data."""

import math
from dataclasses import fields
from importlib import import_module
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Anchoring, Evidence, Schedule
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.likelihoods import Categorical, Gaussian, Joint, Likelihood, Weighted
from evigrad.priors import GaussianPrior
from evigrad.training import FitResult, fit
from evigrad.training.plan import plan_estimator, plan_optimization, plan_schedule
from evigrad.training.settings import Optimization, Settings, grouped

Data = tuple[Tensor, Tensor]


def data_of(outputs: int, num_data: int = 12) -> Data:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_data, 4, generator=generator)
    return x, x[:, :outputs].sin() + 0.3 * torch.randn(num_data, outputs, generator=generator)


def net(outputs: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs))


@pytest.mark.parametrize(
    ("function", "lacking"),
    [
        ("evigrad.fit", set()),
        ("evigrad.tune", {"schedule"}),
        ("evigrad.lightning.EvidenceCallback", {"precision"}),
        ("evigrad.transformers.EvidenceCallback", {"precision"}),
    ],
)
def test_arguments_become_the_settings_of_the_same_name(function: str, lacking: set[str]) -> None:
    """Their defaults agree too. ``Settings.of`` ignores arguments of other names."""
    module, _, name = function.rpartition(".")
    try:
        parameters = signature(getattr(import_module(module), name)).parameters
    except EvigradError:
        pytest.skip("an extra is not installed")
    settings = {setting.name for setting in fields(Settings)} - {"prior_mean"}
    assert settings - parameters.keys() == lacking
    defaults = {name: parameters[name].default for name in settings - lacking}
    assert Settings.of(defaults) == Settings()


@pytest.mark.parametrize(
    ("prior", "sizes", "expected"),
    [
        ("layerwise", (40_000, 1, 20_000), "kfac-400-C-scaled"),
        ("layerwise", (40_000, 9, 20_000), "kfac-222-C-scaled"),
        ("layerwise", (40_000, 999, 20_000), "kfac-100-C-scaled"),
        ("scalar", (500, 9, 499), "kfac-222-C-scaled"),
        ("layerwise", (40_000, 2, 79_999), "kfac-400-C-scaled"),
        (GaussianPrior({"all": ["*"]}), (40_000, 1, 20_000), "kfac-400-C-scaled"),
        ("layerwise", (90, 99, 401), "ntk-400-rows-anchored"),
        ("layerwise", (500, 9, 500), "ntk-400-rows-anchored"),  # they can be memorized
        ("layerwise", (14_999, 2, 15_000), "ntk-400-rows-anchored"),
        ("layerwise", (40_000, 2, 80_000), "ntk-400-rows-anchored"),
        ("layerwise", (4000, 1, 1000), "ntk-400-rows-anchored"),
        ("layerwise", (40_000, 1, 400), "ntk-400-rows-anchored"),
        ("diagonal", (40_000, 1, 20_000), "ntk-400-rows-anchored"),
        (GaussianPrior(shape="g-prior"), (40_000, 1, 20_000), "ntk-400-rows-anchored"),
    ],
)
def test_the_estimator_depends_on_the_sizes(
    prior: Any, sizes: tuple[int, int, int], expected: str
) -> None:
    assert plan_estimator(Settings(prior=prior), *sizes) == expected
    anchored = Settings(prior=prior, anchoring=Anchoring())
    assert plan_estimator(anchored, *sizes) == "ntk-400-rows-anchored"


def test_fit_chooses_the_estimator() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 80), nn.Tanh(), nn.Linear(80, 1))
    schedule = Schedule(epochs=2, batch_size=1000)
    x = torch.randn(4001, 4, generator=torch.Generator().manual_seed(0))
    data = x, x[:, :1] + 0.1 * torch.randn(4001, 1, generator=torch.Generator().manual_seed(1))
    result = fit(model, data, likelihood="gaussian", schedule=schedule, progress=False)
    assert result.estimator == result.evidence.estimator.name == "kfac-400-C-scaled"
    few = data[0][:400], data[1][:400]
    result = fit(model, few, likelihood="gaussian", schedule=schedule, progress=False)
    assert result.estimator == "ntk-400-rows-anchored"


def regression(num_data: int = 12, **options: Any) -> FitResult:
    data = data_of(1, num_data)
    return fit(net(1), data, likelihood="gaussian", progress=False, **grouped(options))


def test_epochs_follow_from_steps_and_the_rest_from_epochs():
    for num_data, named, planned in [
        (50, (None, None, None), (2000, 200, 90)),
        (1000, (None, None, None), (200, 20, 9)),
        (1030, (None, None, None), (182, 18, 8)),
        (20_000, (None, None, None), (100, 10, 4)),
        (60_000, (None, None, None), (34, 3, 1)),
        (160_000, (None, None, None), (13, 1, 1)),
        (10_000_000, (None, None, None), (10, 1, 1)),
        (60_000, (100, None, None), (100, 10, 4)),
        (1000, (5, None, None), (5, 1, 1)),
        (1000, (1, None, None), (1, 1, 1)),
        (1000, (100, 10, 7), (100, 10, 7)),
        (1000, (100, 0, None), (100, 0, 5)),
    ]:
        epochs, burn_in, every = named
        schedule = Schedule(epochs=epochs, burn_in=burn_in, every=every)
        planned_schedule = plan_schedule(schedule, num_data)
        assert (
            planned_schedule.epochs,
            planned_schedule.burn_in,
            planned_schedule.every,
        ) == planned


def test_many_data_need_fewer_epochs():
    for num_data, num_items, options, epochs in [
        (20_000, None, {"batch_size": 1}, 100),  # few data, whatever the size of the batches
        (40_000, None, {"batch_size": 10}, 50),  # 2,000,000 examples
        (40_000, None, {"batch_size": 1000}, 100),  # 4,000 steps
        (160_000, None, {"batch_size": 1000}, 100),
        (10**8, None, {"epoch_size": 50_000}, 40),
        (10**8, None, {"epoch_size": 5000}, 100),
        (100_000, 1000, {}, 100),  # 100 positions with a target in each item
    ]:
        assert plan_schedule(Schedule(**options), num_data, num_items).epochs == epochs


def test_there_are_two_starts_if_any_noise_is_learned_from_few_data():
    for likelihood, starts in [
        (Gaussian(), (0.01, 0.001)),
        (Gaussian(learnable=False), (0.01,)),
        (Categorical(), (0.01,)),
        (Weighted(Gaussian()), (0.01, 0.001)),
        (Joint({"a": (2, Categorical()), "b": (1, Gaussian())}), (0.01, 0.001)),
        (Joint({"a": (2, Categorical()), "b": (1, Weighted(Gaussian()))}), (0.01, 0.001)),
        (Joint({"a": (2, Categorical()), "b": (1, Gaussian(learnable=False))}), (0.01,)),
    ]:
        for num_data, expected in [(14_999, starts), (15_000, starts[-1:])]:
            planned = plan_optimization(Optimization(), likelihood, "layerwise", num_data)
            assert planned.start_decay == expected


@pytest.mark.each(1)
@pytest.mark.parametrize("name", ["ntk-400-rows", "ntk-36-rows-anchored", "ntk-400-rows-anchored"])
@pytest.mark.parametrize("likelihood", [Categorical, Gaussian])
def test_more_rows_than_there_are_is_all_of_them(name: str, likelihood: type[Likelihood]):
    x, y = (part.double() for part in data_of(3))
    data = (x, y if likelihood is Gaussian else y.argmax(1))
    values_and_gradients = []
    for estimator in (name, "ntk-N-C"):
        model = net(3).double()
        evidence = Evidence(
            model, likelihood(), GaussianPrior(precision=0.3), estimator=estimator, num_data=12
        )
        estimate = evidence.backward(next(iter(evidence.blocks(data))))
        assert evidence.estimator.name == estimator
        named = evidence.hyperparameters().values()
        gradients = [p.grad.flatten() for p in named if p.grad is not None]
        values = (estimate.log_evidence, estimate.log_likelihood, estimate.log_det)
        values_and_gradients.append(torch.cat([torch.tensor(values).double(), *gradients]))
    torch.testing.assert_close(*values_and_gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("epochs", [1, 5])
def test_the_default_estimator_is_exact_on_few_data_and_learns_in_few_epochs(epochs: int):
    default, exact = (
        regression(epochs=epochs, **options)
        for options in ({}, {"estimator": "ntk-N-C", "burn_in": 1, "every": 1})
    )
    assert default.estimator == "ntk-400-rows-anchored"
    assert default.history[-1]["hyper_steps"] == exact.history[-1]["hyper_steps"] != 0
    for ours, theirs in zip(
        default.evidence.hyperparameters().values(),
        exact.evidence.hyperparameters().values(),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"estimator": "ntk-100-1"}, "num_data is 12. Use 'ntk-N-1', which uses all"),
        ({"epochs": 5, "burn_in": 6}, "Lower burn_in or raise epochs"),
        ({"burn_in": 3000}, "at most epochs = 2000, got"),
    ],
)
def test_what_was_said_is_refused_with_the_way_out(options: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        regression(**options)


def test_map_learns_its_noise_by_maximum_likelihood():
    result = regression(80, estimator=None, noise_on_loss=True, epochs=250, lr=0.02)
    noise = result.evidence.hyperparameters()["likelihood.log_noise"].exp().item()
    assert noise == pytest.approx(math.sqrt(result.train_metrics["squared_error"]), rel=0.02)
    assert noise != pytest.approx(1.0, rel=0.1)
    assert result.evidence.prior.precisions()["0.weight"].unique().item() == pytest.approx(0.04)
    assert result.estimator is None
    assert result.history[-1]["hyper_steps"] == 0


def test_noise_that_is_not_there_cannot_be_learned():
    settings: dict[str, Any] = grouped({"estimator": None, "noise_on_loss": True})
    for likelihood in ("categorical", Gaussian(learnable=False)):
        x, y = data_of(3)
        data = (x, y.argmax(1) if likelihood == "categorical" else y)
        with pytest.raises(ConfigurationError, match="has none. Remove noise_on_loss"):
            fit(net(3), data, likelihood=likelihood, **settings, progress=False)
