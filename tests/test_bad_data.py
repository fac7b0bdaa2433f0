"""Every verb refuses data that do not fit, before anything changes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import evigrad
from evigrad import Evidence, Schedule, fit
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from evigrad.priors import GaussianPrior

N, C = 40, 3
BAD = 37  # behind the data that a model is probed with
X = torch.linspace(-1, 1, 2 * N).reshape(N, 2)
LABELS = torch.arange(N) % C
NUMBERS = torch.linspace(-1, 1, N * C).reshape(N, C)


class Items(Dataset[tuple[Tensor, Tensor]]):
    """A data set that is read item by item."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def build(likelihood: Likelihood, estimator: str) -> Evidence:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, C))
    prior = GaussianPrior()
    return Evidence(model, likelihood, prior, estimator=estimator, num_data=N, generator=0)


def good_targets(likelihood: Likelihood) -> Tensor:
    if isinstance(likelihood, Categorical):
        return LABELS
    return NUMBERS if isinstance(likelihood, Gaussian) else NUMBERS.clamp(0).ceil()


def put(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed[BAD] = value
    return changed


# Verb → name of an estimator and the call, on tensors of all the data.
VERBS: dict[str, tuple[str, Callable[[Evidence, Tensor, Tensor], Any]]] = {
    "estimate": ("ntk-N-1", Evidence.estimate),
    "backward": ("ntk-N-1", Evidence.backward),
    "collect": ("kfac-N-C", Evidence.collect),
    "batches": ("diag-N-C", lambda e, x, y: e.estimate([(x[:9], y[:9]), (x[9:], y[9:])])),
    "blocks": ("ntk-4-1", lambda e, x, y: list(e.blocks((x, y)).epoch())),
    "blocks, anchored": ("ntk-6-rows-anchored", lambda e, x, y: list(e.blocks((x, y)).epoch())),
    "items": ("ntk-8-1", lambda e, x, y: list(e.blocks(Items(x, y)).epoch())),
    "items, anchored": ("ntk-6-rows-anchored", lambda e, x, y: next(iter(e.blocks(Items(x, y))))),
    "bracket": ("kfac-N-C", lambda e, x, y: evigrad.bracket(e, (x, y), rows=12)),
    "bracket, items": ("kfac-N-C", lambda e, x, y: evigrad.bracket(e, Items(x, y), rows=12)),
    "fit": (
        "ntk-4-1",
        lambda e, x, y: fit(
            e.model,
            (x, y),
            likelihood=e.likelihood,
            estimator="ntk-4-1",
            schedule=Schedule(epochs=10),
            progress=False,
        ),
    ),
    "fit, test": (
        "ntk-4-1",
        lambda e, x, y: fit(
            e.model,
            (X, good_targets(e.likelihood)),
            test=(x, y),
            likelihood=e.likelihood,
            estimator="ntk-4-1",
            schedule=Schedule(epochs=10),
            progress=False,
        ),
    ),
}
DATA: dict[str, tuple[Likelihood, Tensor, Tensor]] = {
    "label 7": (Categorical(), X, put(LABELS, 7)),
    "label -1": (Categorical(), X, put(LABELS, -1)),
    "label -100": (Categorical(), X, put(LABELS, -100)),
    "one-hot": (Categorical(), X, nn.functional.one_hot(LABELS)),
    "labels as numbers": (Categorical(), X, LABELS.float()),
    "NaN in inputs": (Categorical(), put(X, float("nan")), LABELS),
    "too many": (Categorical(), X[[*range(N), 0]], LABELS[[*range(N), 0]]),
    "too few": (Categorical(), X[:-1], LABELS[:-1]),
    "another width": (Categorical(), X[:, :1], LABELS),
    "NaN in targets": (Gaussian(), X, put(NUMBERS, float("nan"))),
    "integer targets": (Gaussian(), X, NUMBERS.long()),
    "one target": (Gaussian(), X, NUMBERS[:, 0]),
    "must be 0 or 1": (Bernoulli(), X, put(NUMBERS.clamp(0).ceil(), 2)),
}


def all_that_can_change(evidence: Evidence) -> dict[str, Any]:
    state = evidence.state_dict()
    del state["preparation"]  # what is known of inputs of this shape does not depend on the data
    return {"evidence": state, "model": evidence.model.state_dict()}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


# ``fit`` takes as many data as there are.
REFUSED = [(v, k) for v in VERBS for k in DATA if not (v.startswith("fit") and k.startswith("too"))]


@pytest.mark.each(1)
@pytest.mark.parametrize(("verb", "kind"), REFUSED)
def test_bad_data_are_refused_before_anything_changes(verb: str, kind: str) -> None:
    (estimator, call), (likelihood, x, y) = VERBS[verb], DATA[kind]
    evidence = build(likelihood, estimator)
    before = copy.deepcopy(all_that_can_change(evidence))
    with pytest.raises(InputError):
        call(evidence, x, y)
    if verb in ("blocks", "items"):  # which draw a partition before they read its data
        evidence.generator.set_state(before["evidence"]["generator"])
    assert same(all_that_can_change(evidence), before)
    parameters = [*evidence.model.parameters(), *evidence.hyperparameters().values()]
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("estimator", ["ntk-6-rows-anchored", "kfac-N-C"])
def test_inputs_that_are_single_numbers(estimator: str) -> None:
    """(N,) in regression, which a model makes (N, 1) of."""
    model = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    evidence = Evidence(
        model, Gaussian(), GaussianPrior(), estimator=estimator, num_data=N, generator=0
    )
    pair = X[:, 0], NUMBERS[:, :1]
    assert evigrad.bracket(evidence, pair, rows=N).lower == pytest.approx(
        evidence.with_estimator("ntk-N-C").estimate(*pair).log_evidence, rel=1e-5
    )
    for block in evidence.blocks(pair).take(2):
        evidence.backward(block)


WHOLE = ("estimate", "backward", "collect", "blocks", "blocks, anchored", "bracket", "fit")
OTHERS: dict[str, tuple[str, Callable[[Evidence, Any, Any], Any]]] = {
    "fit, test": VERBS["fit, test"],
    "map_loss": ("ntk-N-1", lambda e, x, y: e.map_loss(x, y)),
    "posterior": ("ntk-N-1", lambda e, x, y: e.posterior((x, y), structure="diag")),
    "mode_gap": ("ntk-N-1", lambda e, x, y: e.mode_gap((x, y))),
    "predict": ("ntk-N-1", lambda e, x, y: e.posterior((X, LABELS), structure="diag")(x)),
    "item": ("ntk-N-1", lambda e, x, y: e.blocks([(x, y)] * N)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("verb", [*WHOLE, *OTHERS])
@pytest.mark.filterwarnings("ignore:.*Nested|.*nested")
def test_data_that_are_not_dense_are_refused_with_words(verb: str) -> None:
    estimator, call = VERBS.get(verb) or OTHERS[verb]
    evidence = build(Categorical(), estimator)
    strided, jagged = (
        torch.nested.nested_tensor(list(X), layout=layout)
        for layout in (torch.strided, torch.jagged)
    )
    labels = torch.nested.nested_tensor(list(LABELS.float()[:, None]))
    cases: list[tuple[Any, Any, str]] = [
        (strided, LABELS, "must be dense, got a nested tensor.*to_padded_tensor"),
        (jagged, LABELS, "must be dense, got a nested tensor"),
        ({"input": strided}, LABELS, "'input' of the inputs must be dense, got a nested"),
        (X.to_sparse(), LABELS, r"must be dense, got a sparse tensor. Call to_dense\(\)"),
        (X, labels, "must be dense, got a nested tensor"),
        (X, LABELS.to_sparse(), "must be dense, got a sparse tensor"),
    ]
    for x, y, words in cases[:4] if verb == "predict" else cases:
        if verb == "item" and type(x) is dict:
            words = "must be dense"
        inputs: Any = x
        with pytest.raises(InputError, match=words):
            call(evidence, inputs, y)


@pytest.mark.parametrize("verb", ["blocks", "blocks, anchored", "estimate", "fit", "posterior"])
def test_errors_contain_shapes_of_all_data(verb: str) -> None:
    """Not those of the examples on which evigrad tries the model or the density first."""

    class NotSummed(Gaussian):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return -(f - y).square()

    estimator, call = VERBS.get(verb) or OTHERS[verb]
    cases: list[tuple[Likelihood, Tensor, str]] = [
        (Categorical(), LABELS[:, None], r"must have the shape \(40,\), got \(40, 1\)"),
        (Gaussian(), NUMBERS[:, :2], r"shape of the outputs, \(40, 3\), got \(40, 2\)"),
        (NotSummed(), NUMBERS, r"in the shape \(m,\) for outputs \(m, 3\), got \(m, 3\)"),
    ]
    for likelihood, y, words in cases:
        with pytest.raises((InputError, ConfigurationError), match=words):
            call(build(likelihood, estimator), X, y)
    with pytest.raises(InputError, match=r"given \d+ examples of shape \(1,\) and type"):
        call(build(Categorical(), estimator), X[:, :1], LABELS)


def test_a_missing_label_in_a_list_of_pairs_is_named_by_its_item() -> None:
    generator = torch.Generator().manual_seed(0)
    for item in (4, 70):
        pairs = [(torch.randn(3, generator=generator), n % 2) for n in range(100)]
        pairs[item] = (pairs[item][0], -1)
        with pytest.raises(InputError, match=f"^Target -1 at index {item} is outside"):
            fit(nn.Linear(3, 2), pairs, progress=False)
