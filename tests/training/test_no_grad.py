"""Calls inside of ``torch.no_grad()`` work, and those in inference mode name the way out."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from evigrad import Evidence, Learner, Schedule, bracket, fit, tune
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

N = 20
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(3, 2)


def evidence(model: nn.Module) -> Evidence:
    prior = GaussianPrior()
    return Evidence(model, Categorical(), prior, estimator="ntk-5-1", num_data=N, generator=0)


def fitted(model: nn.Module, **settings: Any) -> Any:
    settings = {"schedule": Schedule(epochs=3), **settings}
    return fit(model, (X, Y), progress=False, **settings).history[-1]["loss"]


def learned(model: nn.Module) -> Any:
    learner = Learner(evidence(model), (X, Y), Schedule(epochs=1, burn_in=0, steps=2))
    learner.step()
    return learner.history[-1]["log_evidence"]


CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "fit": lambda model: fitted(model, estimator="ntk-5-1"),
    "fit by MAP": lambda model: fitted(model, estimator=None),
    "tune": lambda model: tune(model, (X, Y), estimator="ntk-N-C", rounds=1).history[-1],
    "Learner": learned,
    "backward": lambda model: evidence(model).backward(X[:5], Y[:5]),
    "estimate": lambda model: evidence(model).estimate(X[:5], Y[:5]),
    "mode_gap": lambda model: evidence(model).mode_gap((X, Y)),
    "bracket": lambda model: bracket(evidence(model), (X, Y), rows=9).lower,
    "posterior": lambda model: evidence(model).posterior((X, Y))(X).probabilities.tolist(),
    "an estimator of scikit-learn": lambda model: (
        import_module("evigrad.sklearn")
        .EvidenceClassifier((), epochs=2, random_state=0)
        .fit(X.numpy(), Y.numpy())
        .predict_proba(X.numpy())
        .tolist()
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_grad_changes_nothing(call):
    expected = CALLS[call](net())
    model = net()
    with torch.no_grad():
        assert CALLS[call](model) == expected
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("call", CALLS)
def test_inference_mode_is_refused_before_anything_changes(call):
    model = net()
    before = [p.clone() for p in model.parameters()]
    with (
        torch.inference_mode(),
        pytest.raises(ConfigurationError, match=r"Remove this context, or use torch\.no_grad"),
    ):
        CALLS[call](model)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_models_from_inference_mode_are_refused():
    with torch.inference_mode():
        model = net()
    for call in (CALLS["fit by MAP"], CALLS["estimate"]):
        with pytest.raises(ConfigurationError, match="'weight', 'bias' cannot have gradients"):
            call(model)
