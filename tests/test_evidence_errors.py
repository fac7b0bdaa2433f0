"""Bad input gets an EvigradError that says what and how to mend it, before any state changes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence, Memory
from evigrad.blocks.anchors import Anchoring
from evigrad.core.names import DEFAULT_ESTIMATOR
from evigrad.errors import ConfigurationError, EvigradError, InputError, MemoryBudgetError
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.priors import GaussianPrior

N = 8


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def build(estimator: str = "ntk-4-1", **kwargs: Any) -> Evidence:
    arguments = {
        "model": network(),
        "likelihood": Categorical(),
        "prior": GaussianPrior(),
        **kwargs,
    }
    model, likelihood, prior = (arguments.pop(n) for n in ("model", "likelihood", "prior"))
    return Evidence(
        model,
        likelihood,
        prior,
        estimator=estimator,
        **{"num_data": N, "generator": 0, **arguments},
    )


X = torch.linspace(-1, 1, 2 * N).reshape(N, 2)
Y = torch.arange(N) % 3


def log_precision(evidence: Evidence) -> nn.Parameter:
    return evidence.hyperparameters()["prior.log_precision"]


def with_value(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[1, 0] = value
    return x


def test_what_an_evidence_was_made_with_cannot_be_replaced() -> None:
    for name, value in [
        ("temperature", 0.5),
        ("num_data", 2 * N),
        ("root", "fisher"),
        ("likelihood", Gaussian()),
        ("prior", GaussianPrior()),
        ("model", nn.Linear(2, 3)),
        ("estimator", "kfac-4-1"),
        ("generator", torch.Generator()),
        ("ranks", None),
    ]:
        # ``map_loss`` followed an assignment and ``estimate`` did not.
        evidence = build("kfac-N-C")
        before = evidence.estimate(X, Y), evidence.map_loss(X, Y), getattr(evidence, name)
        with pytest.raises(ConfigurationError, match=f"{name} .*with_estimator"):
            setattr(evidence, name, value)
        assert (evidence.estimate(X, Y), evidence.map_loss(X, Y), getattr(evidence, name)) == before
        assert evidence.with_estimator("kfac-N-C", temperature=0.5).temperature == 0.5


def test_the_default_estimator_is_that_of_fit() -> None:
    evidence = Evidence(network(), Categorical(), GaussianPrior(), num_data=N)
    assert evidence.estimator.name == DEFAULT_ESTIMATOR
    assert evidence.estimate(next(iter(evidence.blocks((X, Y))))).num_data == N


def test_empty_and_too_large_sets() -> None:
    evidence = build()
    with pytest.raises(InputError, match="empty"):
        evidence.estimate(X[:0], Y[:0])
    with pytest.raises(InputError, match="9"):
        evidence.estimate(torch.zeros(9, 2), torch.zeros(9, dtype=torch.long))
    with pytest.raises(InputError, match="empty"):
        build("ntk-N-1").estimate(iter([]))
    with pytest.raises(
        InputError, match="num_data is 8, but the data set has 5.*Pass all training data"
    ):
        evidence.blocks((X[:5], Y[:5]))
    with pytest.raises(InputError, match="has 16 examples. Pass the training data only, or set"):
        evidence.blocks((torch.cat([X, X]), torch.cat([Y, Y])))


def test_n_needs_all_the_data() -> None:
    evidence = build("kfac-N-C")
    with pytest.raises(InputError, match="all 8"):
        evidence.estimate(X[:7], Y[:7])
    with pytest.raises(InputError, match="7 examples, but kfac-N-C needs all 8"):
        evidence.backward([(X[:3], Y[:3]), (X[3:7], Y[3:7])])
    with pytest.raises(InputError, match="more than the expected 8"):
        evidence.backward([(X, Y), (X[:1], Y[:1])])
    assert log_precision(evidence).grad is None
    with pytest.raises(InputError, match="estimators with N in their name"):
        build("kfac-4-C").estimate([(X, Y)])


def test_subset_larger_than_the_data() -> None:
    with pytest.raises(EvigradError, match="subsets of 9.*num_data is 8"):
        build("ntk-9-1")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), "Add a dimension for the single output"),
        (nn.Unflatten(1, (1, 2)), "trainable weights"),
        (
            nn.Sequential(nn.Linear(2, 4), nn.Unflatten(1, (2, 2))),
            "the shape of the outputs' positions",
        ),
    ],
)
def test_outputs_must_be_a_matrix(model: nn.Module, words: str) -> None:
    with pytest.raises(EvigradError, match=words):
        build(model=model, likelihood=Gaussian()).estimate(X[:4], torch.zeros(4, 1))


def test_unknown_names_and_bad_settings() -> None:
    for build_it, words in [
        (lambda: build("kfacc-4-1"), "kfac-4-1"),
        (lambda: build("ntk-4"), "OUTPUTS"),
        (lambda: build("ntk-4-rows-anchored", root="subblock"), "cannot be anchors"),
        (lambda: build("ntk-4-1", anchoring=Anchoring()), "has no anchors. Omit anchoring"),
        (lambda: build("kfac-4-rows-anchored"), "as in 'ntk-4-rows-anchored'"),
        (lambda: build(root="fischer"), "fisher"),
        (lambda: build(sharing="reduced"), "reduce"),
        (lambda: build("blockdiag-4-1", parameter_partition="tensors"), "tensor"),
        (lambda: build("ntk-4-1", parameter_partition="tensors"), "tensor"),
        (lambda: build(temperature=0.0), "temperature must be a positive number"),
        (lambda: build(memory=Memory(micro_batch=0)), "micro_batch must be a positive integer"),
        (lambda: build(num_data=0), "num_data must be a positive integer"),
        (lambda: build(hyperparameters=["0.wieght"]), "0.weight"),
        (lambda: build(hyperparameters="0.weight"), "list of names"),
        (lambda: build(hyperparameters=["0", "2"]), "no trainable weights"),
        (lambda: GaussianPrior("layerwize"), "layerwise"),
        (lambda: build("ntk-4-4").estimate(X, Y), "only 3"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            evidence = build_it()
            evidence.estimate(X[:4], Y[:4])  # what depends on the inputs' shape is checked here
        assert words in str(caught.value)


@pytest.mark.usefixtures("by_h")  # by its four rows it would fit
def test_predicted_memory_above_what_is_free() -> None:
    model = nn.Sequential(nn.Linear(2, 400), nn.Tanh(), nn.Linear(400, 400), nn.Linear(400, 3))
    evidence = build("full-4-1", model=model)
    with pytest.raises(MemoryBudgetError, match="GiB") as caught:
        evidence.estimate(X[:4], Y[:4])
    assert "blockdiag" in str(caught.value) or "ntk" in str(caught.value)


def test_nothing_to_learn() -> None:
    evidence = build(prior=GaussianPrior(learnable=False))
    with pytest.raises(ConfigurationError, match="no hyperparameter to learn"):
        evidence.backward(X[:4], Y[:4])
    assert evidence.estimate(X[:4], Y[:4]).log_evidence < 0


def test_objects_of_the_wrong_type() -> None:
    """In a process of its own, without the checker of annotations that the tests install."""
    here = Path(__file__).parent
    process = subprocess.run(
        [sys.executable, str(here / "wrong_types.py")],
        env={**os.environ, "PYTHONPATH": str(here.parent / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = process.stdout.splitlines()
    assert len(lines) > 20
    assert not [line for line in lines if not line.startswith("ok: ")]


def test_a_kept_pass_of_another_evidence() -> None:
    model = network()
    collected = build("ntk-N-C", model=model).collect(X, Y)
    with pytest.raises(InputError, match="another evidence"):
        build("diag-N-C", model=model).estimate_kept(collected)


def test_blocks_with_columns_that_do_not_exist() -> None:
    evidence = build("ntk-4-1")
    block = next(iter(evidence.blocks((X, Y))))
    assert block.columns is not None
    for columns in (block.columns + 5, block.columns - 3):
        with pytest.raises(InputError, match="columns must be 0 to 2"):
            evidence.estimate(replace(block, columns=columns))
    with pytest.raises(InputError, match="different lengths"):
        evidence.estimate(replace(block, inputs=X[:2], targets=Y[:2]))


def test_the_generator_stays_where_it_was_when_an_estimate_fails() -> None:
    evidence = build("ntk-N-1")
    evidence.describe(X)
    state = evidence.generator.get_state()
    for batches in ([(X[:3], Y[:3])], [(X[:4], Y[:4]), (X[4:], Y[4:] + 7)]):
        for call in (evidence.estimate, evidence.backward):
            with pytest.raises(InputError):
                call(batches)
            assert torch.equal(evidence.generator.get_state(), state)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    evidence = build(likelihood=Gaussian())
    before = evidence.state_dict()["prior"]["log_precision"].clone()
    other = build(likelihood=Gaussian([1.0, 2.0, 3.0]), generator=7)
    with torch.no_grad():
        log_precision(other).add_(1)
    with pytest.raises(ConfigurationError, match="does not match the likelihood"):
        evidence.load_state_dict(other.state_dict())
    assert torch.equal(evidence.state_dict()["prior"]["log_precision"], before)


def test_trainable_parameters_that_changed_since() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    evidence = build(model=model)
    evidence.estimate(X[:4], Y[:4])
    model[0].requires_grad_(True)
    with pytest.raises(ConfigurationError, match="new: '0.weight', '0.bias'"):
        evidence.estimate(X[:4], Y[:4])


@pytest.mark.parametrize("structure", ["full", "blockdiag", "diag"])
def test_rows_of_a_pass_count_as_memory(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is kept, but all rows of a pass would be formed at once."""
    model = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 3))
    x, y = torch.randn(4000, 2), torch.zeros(4000, dtype=torch.long)
    free = 6 * 2**20
    monkeypatch.setattr("evigrad.passes.memory.SMALL_BYTES", 0)
    monkeypatch.setattr("evigrad.passes.memory._free_bytes", lambda device: free)
    arguments = {"model": model, "num_data": 4000}
    with pytest.raises(MemoryBudgetError, match="micro_batch"):
        build(f"{structure}-N-C", **arguments).estimate(x, y)
    build(f"{structure}-N-C", memory=Memory(micro_batch=100), **arguments).estimate(x, y)


def test_memory_is_that_of_the_data_given() -> None:
    model = nn.Sequential(nn.Linear(2, 300), nn.Tanh(), nn.Linear(300, 3))
    evidence = build("ntk-2-C", model=model, num_data=10**9)
    x, y = torch.zeros(10**6, 1).expand(10**6, 2), torch.zeros(10**6, dtype=torch.long)
    with pytest.raises(MemoryBudgetError, match="2000000 rows"):
        evidence.estimate(x, y)


class Wrong(Likelihood):
    """A density of the user's own, with a mistake."""

    name = "wrong"
    couples_outputs = False

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def log_prob(self, f: Any, y: Any) -> Any:
        value = -0.5 * (y - f) ** 2
        return {"none": value, "all": value.sum(), "right": value.sum(1)}[self.mistake]


def test_density_of_the_wrong_shape() -> None:
    for mistake in ["none", "all"]:
        for method in ["estimate", "map_loss"]:
            evidence = build("ntk-N-C", model=nn.Linear(2, 1), likelihood=Wrong(mistake))
            with pytest.raises(ConfigurationError, match="one number per example"):
                getattr(evidence, method)(X, torch.zeros(N, 1))


def test_targets_that_broadcast_against_the_other_data() -> None:
    evidence = build("ntk-N-C", model=nn.Linear(2, 1), likelihood=Wrong("right"))
    y = torch.linspace(0, 3, N)
    with pytest.raises(InputError, match="unsqueeze"):
        evidence.estimate(X, y)
    assert evidence.estimate(X, y[:, None]).log_likelihood < 0
    with pytest.raises(InputError, match="unsqueeze"):
        evidence.estimate(X, y)


def test_an_example_is_compared_by_itself_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    likelihood, sizes = Wrong("right"), []
    evidence = build("ntk-N-C", model=nn.Linear(2, 1), likelihood=likelihood)
    log_prob = likelihood.log_prob

    def counting(f: Any, y: Any) -> Any:
        sizes.append(len(f))
        return log_prob(f, y)

    monkeypatch.setattr(likelihood, "log_prob", counting)
    y = torch.linspace(0, 3, N)[:, None]
    calls = []
    for _ in range(3):
        evidence.estimate(X, y)
        calls.append((sizes.count(1), sizes.count(N)))
        sizes.clear()
    assert calls[0][0] == calls[1][0] + 1 and calls[1] == calls[2]
