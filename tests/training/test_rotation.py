"""Rotations of ranks: the same network, a smaller quadratic term, and fewer ranks."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evigrad import Evidence, Schedule, fit
from evigrad.likelihoods import Gaussian
from evigrad.priors import GaussianPrior
from evigrad.training.rotation import RankRotation, best_rotation

RANKS = {"ranks": {"down.weight": 0, "up.weight": 1}, "bias": "up.bias"}


class Ranked(nn.Module):
    """y = U act(V x) + b with eight ranks."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.down, self.act, self.up = nn.Linear(10, 8, bias=False), act, nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.act(self.down(x)))


def case(seed: int, act: nn.Module | None = None, **settings: Any) -> tuple[Ranked, Any]:
    """A network, and data of rank two."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Ranked(act or nn.Identity())
        x = torch.randn(300, 10)
        y = x @ torch.randn(10, 2) @ torch.randn(2, 6) + 0.3 * torch.randn(300, 6)
    return model, (x, y)


def rotation_of(model: Ranked, data: Any, structure: Any = RANKS) -> tuple[RankRotation, Evidence]:
    prior = GaussianPrior(structure)
    evidence = Evidence(model, Gaussian(), prior, estimator="diag-N-C", num_data=300)
    assert prior.log_precision is not None
    prior.log_precision.data.copy_(torch.linspace(-1, 1, len(prior.log_precision)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        evidence.map_loss(*data).backward()
        optimizer.step()
    return RankRotation(evidence, optimizer, data[0][:20]), evidence


def test_the_network_stays_and_the_log_prior_rises() -> None:
    model, data = case(0)
    rotation, evidence = rotation_of(model, data)
    old, weights = copy.deepcopy(model), evidence.weights()
    state = copy.deepcopy(rotation.optimizer.state)
    quadratic = float(evidence.prior.quadratic(weights).detach())
    for _ in range(2):
        rotation.rotate()
        torch.testing.assert_close(model(data[0]), old(data[0]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model.up.weight, old.up.weight, atol=0.01)
    assert float(evidence.prior.quadratic(weights).detach()) < quadratic
    # The eigenvectors are a basis of the singular vectors, with the largest ranks first.
    gram = model.up.weight.mT @ model.up.weight + model.down.weight @ model.down.weight.mT
    torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-4)
    assert torch.equal(gram.diagonal().argsort(descending=True), torch.arange(8))
    # First moments are gradients, which rotate like the weights.
    matrix = torch.linalg.lstsq(old.down.weight.mT, model.down.weight.mT).solution
    moment = rotation.optimizer.state[model.down.weight]["exp_avg"]
    before = next(s for p, s in state.items() if p.shape == model.down.weight.shape)["exp_avg"]
    torch.testing.assert_close(moment, matrix.mT @ before, rtol=1e-3, atol=1e-5)


def test_a_network_that_changes_is_restored() -> None:
    model, data = case(0, nn.Tanh())
    rotation, _ = rotation_of(model, data)
    assert rotation.pairs == [("up.weight", "down.weight")]
    old = copy.deepcopy(model.state_dict())
    rotation.rotate()
    assert rotation.pairs == []
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "structure",
    [
        "layerwise",
        "diagonal",
        {"all": "*"},
        {"ranks": {"down.weight": 1}, "rest": "*"},
        {"inputs": {"down.weight": 0}, "outputs": {"up.weight": 1}, "rest": "*"},
    ],
)
def test_only_groups_of_two_factors_are_rotated(structure: Any) -> None:
    assert rotation_of(*case(0), structure)[0].pairs == []


def test_fixed_precisions_are_not_rotated() -> None:
    model, _ = case(0)
    for learnable in (False, {"ranks": False}):
        prior = GaussianPrior(RANKS, learnable=learnable)
        prior.bind(dict(model.named_parameters()))
        assert prior.factor_pairs() == []


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))
def test_no_rotation_has_a_smaller_quadratic_term(seed: int, r: int, o: int, i: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right, precision, other = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((o, r), (r, i), (r,), (r, r))
    )
    precision = precision.exp()

    def quadratic(matrix: Tensor) -> float:
        squares = (left @ matrix).square().sum(0) + (matrix.mT @ right).square().sum(1)
        return float((precision * squares).sum())

    best = best_rotation(left, right, precision)
    torch.testing.assert_close(best @ best.mT, torch.eye(r, dtype=torch.float64))
    assert quadratic(best) <= quadratic(torch.linalg.qr(other).Q) * (1 + 1e-10)


def rank_norms(seed: int, **options: Any) -> Tensor:
    """Squared norms of the eight ranks after training on data of rank two, in descending order."""
    model, data = case(seed)
    prior = GaussianPrior(RANKS)
    fit(model, data, likelihood="gaussian", prior=prior, seed=seed, progress=False, **options)
    up, down = model.up.weight.detach(), model.down.weight.detach()
    return (up.square().sum(0) + down.square().sum(1)).sort(descending=True).values


@pytest.mark.filterwarnings("ignore:Training has not converged")
def test_two_of_eight_ranks_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(epochs=150, max_epochs=150, burn_in=20, every=5, steps=5)
    norms = rank_norms(0, estimator="kfac-N-C", schedule=schedule)
    assert float(norms[2]) < 0.25 * float(norms[1])
    monkeypatch.setattr(RankRotation, "rotate", lambda _: None)
    norms = rank_norms(0, estimator="kfac-N-C", schedule=schedule)
    assert float(norms[2]) > 0.5 * float(norms[1])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_two_of_eight_ranks_survive(seed: int) -> None:
    norms = rank_norms(seed)
    assert float(norms[2]) < 0.02 * float(norms[1])
