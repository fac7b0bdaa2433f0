"""What the preparation of an evidence keeps: plans, and when they are checked."""

import io
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evigrad.network.network as networks
from evigrad import Evidence
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.network.layers import RULES, Linear, Match
from evigrad.priors import GaussianPrior

N = 24


class Wrong(Linear):
    """A closed form that is wrong for inputs as no plan is made with."""

    def rows(self, slot: str, match: Match, gradient: Tensor) -> Tensor:
        right = super().rows(slot, match, gradient)
        if slot == "bias" or match.input.shape[1] != 3:
            return right
        return right * (1 + (match.input[:, 0] > 1).to(right))[:, None, None, None]


@pytest.fixture(autouse=True)
def wrong_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, F.linear, Wrong())


def network(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            OrderedDict(first=nn.Linear(3, 4), tanh=nn.Tanh(), last=nn.Linear(4, 3))
        ).double()


def make(seed: int) -> Evidence:
    return Evidence(
        network(seed),
        Categorical(),
        GaussianPrior(),
        estimator="ntk-12-1",
        num_data=N,
        generator=0,
    )


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = 2.0
    x[:3, 0] = -1.0  # where the plan is made
    return x, torch.arange(N) % 3


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def paths(evidence: Evidence) -> dict[str, str]:
    return {report.name: report.rows for report in evidence.describe()}


def step(evidence: Evidence, data: tuple[Tensor, Tensor]) -> tuple[float, Tensor]:
    (block,) = evidence.blocks(data).take(1)
    log_precision = evidence.hyperparameters()["prior.log_precision"]
    log_precision.grad = None
    estimate = evidence.backward(block)
    assert log_precision.grad is not None
    return estimate.log_evidence, log_precision.grad


@pytest.mark.parametrize("seen", [False, True])
def test_what_checks_found_holds_in_the_evidence_that_takes_up_the_state(seen: bool) -> None:
    data = make_data()
    one = make(0)
    with pytest.warns(EvigradWarning, match=r"The fast derivatives of .first\."):
        for _ in range(5):
            step(one, data)
    assert paths(one)["first.weight"] == "generic: loop"
    assert paths(one)["last.weight"] == "linear"
    state = through_a_file(one.state_dict())
    assert state["preparation"]["passes"] == 5

    other = make(7)  # whose own plan is made with other weights
    if seen:
        other.blocks(data)
        assert paths(other)["first.weight"] == "linear"
    other.model.load_state_dict(one.model.state_dict())
    other.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left to find
        for _ in range(4):
            expected, actual = step(one, data), step(other, data)
            assert actual[0] == expected[0]
            assert torch.equal(actual[1], expected[1])
    assert paths(other) == paths(one)
    again = other.state_dict()["preparation"]
    assert again == one.state_dict()["preparation"]
    assert again["passes"] == 9


def test_a_state_without_plans_is_taken_up_too() -> None:
    """As a version that knew none has left it."""
    one, other, data = make(0), make(0), make_data()
    state = one.state_dict()
    state.pop("preparation")
    other.load_state_dict(state)
    with pytest.warns(EvigradWarning, match="fast derivatives"):
        for _ in range(3):
            step(other, data)


@pytest.mark.filterwarnings("ignore:The model has normalization layers")
@pytest.mark.parametrize("kind", ["gru", "transformer"])
def test_lengths_share_what_was_checked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, F.linear, Linear())
    torch.manual_seed(0)
    model = make_model(kind, (40,), 3, width=4, vocabulary=9)

    def evidence() -> Evidence:
        return Evidence(model, Categorical(), GaussianPrior(), estimator="ntk-5-1", num_data=N)

    one, plans = evidence(), []
    counted = vars(networks)["plan"]
    monkeypatch.setattr(networks, "plan", lambda *args: plans.append(1) or counted(*args))
    y = torch.arange(5) % 3
    monkeypatch.setattr(networks, "KEPT_PLANS", 2)
    batches = [torch.randint(9, (5, length)) for length in (3, 6, 2, 5)]
    for x in batches:
        one.estimate(x, y)
    assert len(plans) == 1
    assert len(one.state_dict()["preparation"]["plans"]) == 2
    # The same plan as one that is made for this length.
    other = evidence()
    other.estimate(batches[-1], y)
    assert paths(one) == paths(other)
    latest = [planned.problem.network.latest() for planned in (one, other)]
    assert latest[0] is not None and latest[1] is not None
    assert latest[0].jacobian == latest[1].jacobian


def test_a_length_with_other_operations_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, F.linear, Linear())

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x[:, :, None])
            return h.mean(1) if x.shape[1] < 5 else h.amax(1)

    model, plans = Branch(), []
    counted = vars(networks)["plan"]
    monkeypatch.setattr(networks, "plan", lambda *args: plans.append(1) or counted(*args))
    one = Evidence(model, Categorical(), GaussianPrior(), estimator="ntk-5-1", num_data=N)
    for length in (3, 4, 5, 6):
        one.estimate(torch.randn(5, length), torch.arange(5) % 3)
    assert len(plans) == 2
