"""Loops of one's own that forget the prior's decay, or have two."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from evigrad import Evidence, Learner, Schedule
from evigrad.errors import EvigradWarning
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

N = 12


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    return x, x[:, :3].argmax(1)


def evidence_of(**changes: Any) -> Evidence:
    model = nn.Linear(4, 3)
    settings: dict[str, Any] = {"estimator": "ntk-N-C", "num_data": N, "generator": 0, **changes}
    return Evidence(model, Categorical(), GaussianPrior(), **settings)


def train(evidence: Evidence, kind: str, optimizer: torch.optim.Optimizer) -> None:
    """One step of the weights."""
    x, y = data()
    optimizer.zero_grad()
    if kind == "map":
        loss = evidence.map_loss(x, y)
    else:
        loss = cross_entropy(evidence.model(x), y)
    loss.backward()
    if kind == "added":
        evidence.add_weight_decay(optimizer)
    optimizer.step()


def optimizer_of(evidence: Evidence, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(evidence.weights().values(), **{"weight_decay": 0.0, **settings})


def test_a_forgotten_decay_is_said_once() -> None:
    evidence = evidence_of()
    optimizer = optimizer_of(evidence)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            train(evidence, "plain", optimizer)
            evidence.backward(*data())
    assert [str(w.message) for w in caught if w.category is EvigradWarning] == [
        "The weights are trained without the prior's weight decay, which the evidence assumes."
        " Call evidence.add_weight_decay() after loss.backward(), or minimize"
        " evidence.map_loss(x, y)."
    ]
    assert caught[0].filename == __file__


def test_a_loop_that_clears_the_gradients_after_each_step() -> None:
    evidence = evidence_of()
    optimizer = optimizer_of(evidence)
    evidence.backward(*data())
    for _ in range(6):
        train(evidence, "plain", optimizer)
        optimizer.zero_grad()
    with pytest.warns(EvigradWarning, match="without the prior's weight decay"):
        evidence.backward(*data())


def test_a_learner_says_it_too() -> None:
    evidence = evidence_of()
    learner = Learner(evidence, data(), Schedule(epochs=3, burn_in=1, every=1, steps=1))
    optimizer = optimizer_of(evidence)
    with pytest.warns(EvigradWarning, match="without the prior's weight decay"):
        for _ in range(3):
            train(evidence, "plain", optimizer)
            learner.step()


@pytest.mark.parametrize("kind", ["map", "added", "groups", "of another view"])
def test_a_decay_in_any_way_is_no_mistake(kind: str) -> None:
    evidence = evidence_of()
    learned = evidence.with_estimator("kfac-N-C") if kind == "of another view" else evidence
    if kind == "groups":
        decays = evidence.weight_decay()
        groups = [
            {"params": [w], "weight_decay": decays[name].item()}
            for name, w in evidence.weights().items()
        ]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.1)
    else:
        optimizer = optimizer_of(evidence)
    for _ in range(3):
        train(evidence, {"groups": "plain", "of another view": "map"}.get(kind, kind), optimizer)
        learned.backward(*data())


def test_weights_that_nobody_trains_between_gradients() -> None:
    """Those of a trained network, with the gradients of training left, and of some checkpoints."""
    evidence = evidence_of()
    train(evidence, "plain", optimizer_of(evidence))
    for _ in range(2):
        evidence.backward(*data())
    evidence = evidence_of()
    for _ in range(3):
        evidence.model.load_state_dict(nn.Linear(4, 3).state_dict())
        evidence.backward(*data())


@pytest.mark.parametrize("by", ["add_weight_decay", "map_loss"])
def test_an_optimizer_with_a_decay_of_its_own(by: str) -> None:
    evidence = evidence_of()
    optimizer = optimizer_of(evidence, weight_decay=0.01)

    def decay() -> None:
        if by == "map_loss":
            evidence.map_loss(*data(), optimizer=optimizer)
        else:
            evidence.add_weight_decay(optimizer)

    with pytest.warns(EvigradWarning, match=r"weight_decay=0.01 for weights that the prior"):
        decay()
    decay()  # once
    # A decay of other parameters is the caller's.
    other = nn.Parameter(torch.ones(2))
    groups = [{"params": [other], "weight_decay": 0.1}, {"params": evidence.weights().values()}]
    evidence_of().add_weight_decay(torch.optim.SGD(groups, lr=0.1))


def averaged(**settings: Any) -> Averaged:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    return Averaged(network, AffineInvariance({"rotation": 0.5}, **settings), num_samples=2)


def test_a_range_that_the_training_loss_would_learn() -> None:
    settings: dict[str, Any] = {"estimator": "ntk-N-C", "num_data": N}

    def make(model: nn.Module, **changes: Any) -> Evidence:
        return Evidence(model, Categorical(), GaussianPrior(), **settings, **changes)

    with pytest.warns(EvigradWarning, match=r"hyperparameters=\['invariance'\]") as caught:
        evidence = make(averaged())
    assert len(caught) == 1
    assert "'invariance.rotation'" in str(caught[0].message)
    evidence.with_estimator("kfac-N-C")
    # Learned on the evidence, or on purpose on the training loss by ``wrt``; or fixed.
    make(averaged(), hyperparameters=["invariance"])
    make(averaged(learn=False))
