"""full and blockdiag by H and by the Grams of their rows: one number, whichever is cheaper."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from likelihood_zoo import targets
from passes.test_kept_passes import assert_follows
from passes.test_two_pass import M, assert_twins, evidence_of
from torch import nn
from zoo import CASES, OUTPUTS

from evigrad import Evidence, Memory
from evigrad.core.curvature import BlockDiagonal, BlockKernel, ntk
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior


@contextmanager
def forced(by_rows: bool) -> Iterator[None]:
    """Every ``full`` and ``blockdiag`` in one form; one graph is by H in any case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ntk, "is_cheaper", lambda *_: by_rows)
        yield


@pytest.fixture(params=[False, True], ids=["by H", "by rows"])
def form(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both forms in turn."""
    with forced(request.param):
        yield request.param


def structure_of(evidence: Evidence) -> Any:
    plan = evidence.problem.network.latest()
    assert plan is not None
    return evidence.problem.curvature(plan)


# ------------------------------------------------------------------ passes that are kept


@pytest.mark.usefixtures("form")
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "prior", "partition", "micro_batch"),  # each pair that is allowed
    [
        ("blockdiag-4-2", "scalar", "tensor", 4),
        ("blockdiag-N-C", "scalar", "module", None),
        ("full-4-2", "scalar", "tensor", None),
        ("blockdiag-4-2", "layerwise", "module", None),
        ("blockdiag-N-C", "layerwise", "tensor", 4),
        ("full-4-2", "layerwise", "tensor", 4),
        ("blockdiag-4-2", "diagonal", "module", 4),
        ("blockdiag-N-C", "diagonal", "tensor", None),
        ("full-4-2", "diagonal", "tensor", None),
    ],
)
def test_steps_on_a_kept_pass(
    name: str, prior: str, partition: str, micro_batch: int | None
) -> None:
    settings = {
        "prior": prior,
        "parameter_partition": partition,
        "memory": Memory(micro_batch=micro_batch),
    }
    assert_follows(name, Gaussian(0.6), **settings)


def test_a_kept_pass_holds_grams_alone() -> None:
    model, x = CASES["linear"].build(M)
    with forced(True):
        evidence = Evidence(
            model, Categorical(), GaussianPrior(), estimator="blockdiag-7-1", num_data=M
        )
        (block,) = evidence.blocks((x, targets(Categorical(), M))).take(1)
        statistic = evidence.collect(block).statistic
    assert not statistic.rows
    assert len(statistic.grams) == len(evidence.weights())


# ------------------------------------------------------------------ layers without rows


@pytest.mark.usefixtures("form")
def test_layers_without_rows() -> None:
    """Wide layers on few data: each block's Gram from inputs and gradients alone."""
    model, x = wide()
    for name in ("blockdiag-7-1", "full-7-2"):
        assert_twins(model, Categorical(), x, name, (1, 3, None))


def wide() -> tuple[nn.Module, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)

        class Wide(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate = nn.Parameter(torch.zeros(20))
                self.body = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, OUTPUTS))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.body(x * self.gate.exp())

        return Wide().double(), torch.randn(M, 20, dtype=torch.float64)


# ------------------------------------------------------------------ which one is taken


@pytest.mark.parametrize("name", ["blockdiag", "full"])
def test_few_rows_of_many_weights_are_by_rows_for_any_number_of_data(name: str) -> None:
    """The choice is that of the name; more or fewer data than that are as right as before."""
    model, x = wide()
    y = targets(Categorical(), M)
    evidence = evidence_of(model, Categorical(), f"{name}-2-1", num_data=100)
    (block,) = evidence.blocks((x.repeat(15, 1)[:100], y.repeat(15)[:100])).take(1)
    evidence.estimate(block)
    assert isinstance(structure_of(evidence), BlockKernel)
    words = {report.name: report.curvature for report in evidence.describe()}
    assert "by the Gram of its rows, contracted" in words["body.0.weight"]
    with forced(False):
        dense = evidence_of(model, Categorical(), f"{name}-2-1", num_data=100)
        for data in (slice(0, 1), slice(0, 5), slice(0, 7)):
            dense.generator.set_state(evidence.generator.get_state())
            value = evidence.estimate(x[data], y[data]).log_evidence
            assert value == pytest.approx(dense.estimate(x[data], y[data]).log_evidence, rel=1e-10)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("blockdiag-2000-C", {"num_data": 2000}),
        ("full-2000-C", {"num_data": 2000}),
    ],
)
def test_many_rows_are_by_h(name: str, settings: Any) -> None:
    model, x = wide()
    evidence = evidence_of(model, Categorical(), name, **settings)
    evidence.describe(x)
    assert isinstance(structure_of(evidence), BlockDiagonal)


def test_a_run_that_is_taken_up_chooses_alike() -> None:
    model, x = wide()
    y = targets(Categorical(), M)
    evidence = evidence_of(model, Categorical(), "blockdiag-7-1")
    evidence.backward(x, y)
    other = evidence_of(model, Categorical(), "blockdiag-7-1")
    other.load_state_dict(evidence.state_dict())
    assert evidence.estimate(x, y) == other.estimate(x, y)
    assert type(structure_of(evidence)) is type(structure_of(other))
