"""The exact log evidence lies between the two bounds of a bracket."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from likelihood_zoo import LIKELIHOODS, targets
from properties import examples
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, Memory
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Categorical, Likelihood
from evigrad.measure import evaluate_evidence
from evigrad.priors import GaussianPrior

N, C = 30, 3


def data(likelihood: Likelihood, num_data: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.randn(num_data, 4, generator=generator, dtype=torch.float64)
    return x, targets(likelihood, num_data, C)


def evidence_of(
    likelihood: Likelihood, estimator: str = "full-N-C", gain: float = 1.0, num_data: int = N
) -> Evidence:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C)).double()
        with torch.no_grad():
            for w in model.parameters():
                w *= gain
    return Evidence(
        model,
        likelihood,
        GaussianPrior("layerwise", precision=0.5),
        estimator=estimator,
        num_data=num_data,
        temperature=0.8,
        log_det_weight=0.7,
        generator=0,
    )


@given(
    name=st.sampled_from(sorted(LIKELIHOODS)),
    num_data=st.integers(2, 10),
    rows=st.integers(1, 10 * C + 5),
    root=st.sampled_from(["fisher", "eigen"]),
    gain=st.floats(0.2, 5.0),
    seed=st.integers(0, 99),
)
@examples(6)
@pytest.mark.usefixtures("by_h")
def test_the_exact_number_is_between(
    name: str, num_data: int, rows: int, root: str, gain: float, seed: int
) -> None:
    likelihood = LIKELIHOODS[name](C)
    evidence = evidence_of(likelihood, gain=gain, num_data=num_data)
    pair = data(likelihood, num_data)
    exact = evidence.estimate(*pair).log_evidence
    bounds = evigrad.bracket(evidence, pair, rows=rows, blocks=None, root=root, seed=seed)
    room = 1e-8 * (1 + abs(exact))
    assert bounds.lower <= exact + room
    assert exact <= bounds.upper + room
    assert bounds.lower_error == 0
    assert bounds.rows == min(rows, num_data * C)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(LIKELIHOODS))
@pytest.mark.usefixtures("by_h")
def test_all_rows_are_the_exact_number(name: str) -> None:
    likelihood = LIKELIHOODS[name](C)
    evidence, pair = evidence_of(likelihood), data(likelihood)
    exact = evidence.estimate(*pair).log_evidence
    bounds = evigrad.bracket(evidence, pair, rows=10**6)
    assert bounds.lower == pytest.approx(exact, rel=1e-10)
    assert bounds.upper == pytest.approx(exact, rel=1e-10)
    assert bounds.lower_per_datum == pytest.approx(exact / N, rel=1e-10)
    assert bounds.upper_per_datum == pytest.approx(exact / N, rel=1e-10)
    assert bounds.blocks == 1


@pytest.mark.long
def test_some_blocks_estimate_the_bound_of_all_with_the_error_that_is_told() -> None:
    """Over many seeds, as each has a partition of its own; all of them have nearly one bound."""
    evidence, pair = evidence_of(Categorical()), data(Categorical())
    differences = []
    for seed in range(10):
        whole = evigrad.bracket(evidence, pair, rows=12, blocks=None, seed=seed)
        sampled = evigrad.bracket(evidence, pair, rows=12, blocks=6, seed=seed)
        assert sampled.blocks == 6
        assert sampled.lower_error > 0
        differences.append((sampled.lower - whole.lower) / sampled.lower_error)
    # Studentised means of six skewed values: wide, but centred and of about unit scale.
    scores = torch.tensor(differences)
    assert abs(float(scores.median())) < 1.0
    assert 0.4 < float(scores.abs().median()) < 1.5


def test_it_leaves_the_evidence_as_it_is_whatever_its_estimator() -> None:
    pair = data(Categorical())
    evidence = evidence_of(Categorical(), "kfac-10-1")
    state = evidence.generator.get_state()
    bounds = evigrad.bracket(evidence, pair, rows=20, blocks=None)
    again = evigrad.bracket(evidence, pair, rows=20, blocks=None)
    assert (bounds.lower, bounds.upper) == (again.lower, again.upper)
    assert torch.equal(evidence.generator.get_state(), state)
    assert all(p.grad is None for p in evidence.model.parameters())


def test_what_cannot_be() -> None:
    pair = data(Categorical())
    evidence = evidence_of(Categorical())
    with pytest.raises(ConfigurationError, match="rows"):
        evigrad.bracket(evidence, pair, rows=0)
    with pytest.raises(ConfigurationError, match="blocks"):
        evigrad.bracket(evidence, pair, rows=5, blocks=0)
    with pytest.raises(ConfigurationError, match=r"GGN.*with_estimator\('diag-5-1'\)"):
        evigrad.bracket(evidence_of(Categorical(), "diag-5-1-ef"), pair)
    with pytest.raises(ConfigurationError, match="subblock"):
        evigrad.bracket(evidence, pair, rows=5, root="subblock")


def test_another_estimator_takes_a_budget_only_where_it_chooses_by_it() -> None:
    pair = data(Categorical())
    evidence = Evidence(
        nn.Linear(4, C).double(),
        Categorical(),
        GaussianPrior(),
        estimator="ntk-10-1",
        num_data=N,
        memory=Memory(micro_batch="auto", memory_budget=10**6),
        generator=0,
    )
    exact = evidence.with_estimator("full-N-C").estimate(*pair).log_evidence
    without_budget = (
        evidence.with_estimator("full-N-C", memory=Memory(micro_batch=4))
        .estimate(*pair)
        .log_evidence
    )
    assert without_budget == pytest.approx(exact, rel=1e-10)
    value = evaluate_evidence(evidence, pair, "full-N-C")
    assert value.per_datum == pytest.approx(exact / N, rel=1e-10)
