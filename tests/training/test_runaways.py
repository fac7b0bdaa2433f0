"""Hyperparameters of the model that run away: told by name, skipped, and warned of."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence, Learner, Schedule
from evigrad.errors import EvigradWarning, InputError, NotFiniteError
from evigrad.invariances import AffineInvariance, Averaged, InputScale, Transform
from evigrad.likelihoods import Categorical
from evigrad.measure.metrics import hyperparameter_values
from evigrad.priors import GaussianPrior
from evigrad.training.runaways import free_hyperparameters

N = 30
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
NAME = "model.invariance.c"


class Contrast(Transform):
    """x · exp(c ε)."""

    def __init__(self, c: float = 0.1) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.tensor(c))

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, 1, generator=generator)

    def forward(self, x: Tensor, eps: Tensor) -> Tensor:
        return x * (self.c * eps).exp()


class BoundedContrast(Contrast):
    bounds = {"c": (0.0, 1.0)}


def learner_of(invariance: nn.Module | None = None, **changes: Any) -> Learner:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model = Averaged(network, Contrast() if invariance is None else invariance, num_samples=2)
    settings = {"estimator": "ntk-10-1", "num_data": N, "generator": 0, **changes}
    evidence = Evidence(
        model, Categorical(), GaussianPrior(), hyperparameters=["invariance"], **settings
    )
    return Learner(evidence, (X, Y), Schedule(epochs=9, burn_in=0, every=1, steps=2))


def put(learner: Learner, value: float) -> None:
    with torch.no_grad():
        for name, parameter in learner.evidence.hyperparameters().items():
            if name.startswith("model."):
                parameter.fill_(value)
    learner.load_state_dict(learner.state_dict())  # whose model may differ from that at the start


@pytest.mark.parametrize("verb", ["estimate", "backward"])
def test_an_estimate_of_overflown_inputs_names_the_hyperparameter(verb: str) -> None:
    learner = learner_of()
    put(learner, 1e4)
    with pytest.raises(InputError, match=rf"outputs contain NaN.*{NAME} = 1e\+04") as caught:
        getattr(learner.evidence, verb)(X[:10], Y[:10])
    assert isinstance(caught.value, NotFiniteError)


def test_a_first_call_and_a_posterior_name_the_hyperparameter_too() -> None:
    words = rf"outputs contain NaN.*{NAME} = 1e\+04"
    evidence = learner_of().evidence
    fresh = Evidence(
        evidence.model,
        Categorical(),
        GaussianPrior(),
        estimator="ntk-10-1",
        num_data=N,
        hyperparameters=["invariance"],
    )
    with torch.no_grad():
        evidence.hyperparameters()[NAME].fill_(1e4)
    with pytest.raises(NotFiniteError, match=words):
        fresh.estimate(X[:10], Y[:10])
    with pytest.raises(NotFiniteError, match=words):
        fresh.posterior((X, Y))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("estimator", ["ntk-10-1", "kfac-10-1", "ntk-20-rows-anchored"])
def test_steps_on_overflown_inputs_are_skipped_and_a_second_round_ends_by_name(estimator) -> None:
    learner = learner_of(estimator=estimator)
    learner.step()
    put(learner, 1e4)
    with (
        pytest.warns(EvigradWarning, match="is 1e\\+04 and started at 0.1"),
        pytest.warns(EvigradWarning, match=f"{NAME} = 1e.* skipped 2 of 2 hyperparameter steps"),
    ):
        failed_round = learner.step()
    assert failed_round is not None and (failed_round.skipped, failed_round.estimates) == (2, [])
    with pytest.raises(NotFiniteError, match=f"Hyperparameter step after epoch 3.*{NAME} = 1e"):
        learner.step()


@pytest.mark.parametrize(
    ("invariance", "value"), [(Contrast(), 3.5), (Contrast(0.0), -3.5), (InputScale(4), 4.0)]
)
def test_growth_by_a_factor_of_thirty_is_warned_of_once(invariance, value) -> None:
    learner = learner_of(invariance)
    put(learner, value)
    with pytest.warns(
        EvigradWarning, match=r"and started at 0.*Transform.bounds.*such as kfac-100-1"
    ):
        learner.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.step()


@pytest.mark.parametrize(
    ("invariance", "value"),
    [(Contrast(), 2.5), (Contrast(0.5), 0.0), (InputScale(4), -4.0), (BoundedContrast(), 3.5)],
)
def test_what_shrinks_or_grows_a_little_or_has_bounds_is_no_runaway(invariance, value) -> None:
    learner = learner_of(invariance)
    put(learner, value)
    learner.step()


def test_ranges_are_no_runaways_and_bounded_values_are_reported_inside() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    model = Averaged(network, AffineInvariance(), num_samples=2)
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior(),
        estimator="ntk-10-1",
        num_data=N,
        hyperparameters=["invariance"],
    )
    assert not free_hyperparameters(evidence)
    learner = learner_of(BoundedContrast())
    put(learner, 1.75)
    assert hyperparameter_values(learner.evidence)["model/invariance.c"] == 0.25


def images_of(ranges: dict[str, float]) -> Learner:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    evidence = Evidence(
        Averaged(network, AffineInvariance(ranges), num_samples=2),
        Categorical(),
        GaussianPrior(),
        estimator="kfac-10-1",
        num_data=N,
        hyperparameters=["invariance"],
        generator=0,
    )
    return Learner(evidence, (torch.rand(N, 1, 4, 4), Y), Schedule(epochs=9, burn_in=0, every=1))


@pytest.mark.parametrize(("name", "value"), [("translation_x", 0.97), ("scale_y", -1.95)])
def test_a_range_near_its_limit_is_warned_of_once(name: str, value: float) -> None:
    learner = images_of({name: 0.1})
    put(learner, value)
    names = ["model.invariance." + name]
    words = rf"After epoch 3, {names[0]} is {abs(value)}, near its limit [12]\. .*learnable=False"
    with pytest.warns(EvigradWarning, match=words):
        learner._runaways.check(3, names, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner._runaways.check(4, names, [])


@pytest.mark.parametrize(
    ("name", "start", "value"),
    [("translation_x", 0.1, 0.9), ("rotation", 0.1, 3.1), ("shear", 2.0, 1.95)],
)
def test_a_range_inside_or_of_a_full_circle_or_from_its_limit_is_fine(name, start, value) -> None:
    learner = images_of({name: start})
    put(learner, value)
    learner._runaways.check(3, ["model.invariance." + name], [])


def test_a_fall_of_the_training_likelihood_is_warned_of() -> None:
    learner = learner_of()
    learner.step()
    with torch.no_grad():
        learner.evidence.weights()["model.2.bias"].add_(30 * torch.arange(3))
    learner.step()  # one round may be a bad draw
    with pytest.warns(EvigradWarning, match=rf"likelihood fell to -.* while {NAME} changed"):
        learner.step()


def test_starts_are_those_of_the_run_that_goes_on() -> None:
    learner = learner_of()
    learner.step()
    resumed = learner_of(Contrast(2.0))
    resumed.load_state_dict(learner.state_dict())
    put(resumed, 3.5)
    with pytest.warns(EvigradWarning, match="is 3.* and started at 0.1"):
        resumed.step()
    old = {k: v for k, v in learner.state_dict().items() if k not in ("starts", "best")}
    learner_of().load_state_dict(old)
