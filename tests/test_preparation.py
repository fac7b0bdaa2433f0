"""What the preparation of an evidence keeps: plans, and when they are checked."""

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

N = 24


class Sorting(nn.Module):
    """Sorts its data on the way, which the fast paths take for one row's work on another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort(stable=True)
        return self.last(torch.tanh(self.first(x))[order])[order.argsort()]


def make(seed: int) -> Evidence:
    return Evidence(
        Sorting(seed),
        Categorical(),
        GaussianPrior(),
        estimator="ntk-12-1",
        num_data=N,
        generator=0,
    )


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    x[:3, 0] = 1.0  # tied where the plan is made
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
    with pytest.warns(EvigradWarning, match=r"The fast derivatives of .last\."):
        for _ in range(5):
            step(one, data)
    assert paths(one)["last.weight"] == "generic: loop"
    assert paths(one)["first.weight"] == "linear"
    state = through_a_file(one.state_dict())
    assert state["preparation"]["passes"] == 5

    other = make(7)  # whose own plan is made with other weights
    if seen:
        other.blocks(data)
        assert paths(other)["last.weight"] == "linear"
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
