"""Gradients in some of the hyperparameters: parts of the whole gradient, for less work."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.one_graph import OneGraph
from evigrad import Evidence, Memory
from evigrad.core import algorithm
from evigrad.errors import ConfigurationError, EvigradError, InputError
from evigrad.invariances import AdditiveNoise, Averaged
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.passes.kept import KeptPass
from evigrad.passes.sweep import MicroBatchSweep
from evigrad.priors import GaussianPrior
from evigrad.training.rounds import why_not_kept

N, OUTPUTS = 10, 3
CHOICES = [
    ["prior"],
    ["likelihood"],
    ["model"],
    ["prior", "likelihood"],
    ["prior.log_precision", "model.invariance.raw_level"],
]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4))
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.gate * x)


def network() -> nn.Module:
    """Two hyperparameters of its own: a gate and a level of noise on the inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Averaged(Gated(), AdditiveNoise(4, 0.3), num_samples=2).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, dtype=torch.float64, generator=generator)
    return x, torch.randn(N, OUTPUTS, dtype=torch.float64, generator=generator)


def make(estimator: str, likelihood: Likelihood | None = None, **settings: Any) -> Evidence:
    return settings.pop("kind", Evidence)(
        network(),
        likelihood or Gaussian(0.6),
        GaussianPrior("layerwise", 0.5),
        estimator=estimator,
        num_data=N,
        hyperparameters=["invariance", "model.gate"],
        generator=0,
        **settings,
    )


def gradients(evidence: Evidence, x: Any, **keywords: Any) -> tuple[float, dict[str, Tensor]]:
    """From the same draws each time."""
    state = evidence.generator.get_state()
    backward = evidence.backward_kept if isinstance(x, KeptPass) else evidence.backward
    estimate = backward(x, **keywords)
    evidence.generator.set_state(state)
    gradients_by_name = {
        n: p.grad for n, p in evidence.hyperparameters().items() if p.grad is not None
    }
    for p in evidence.hyperparameters().values():
        p.grad = None
    return estimate.log_evidence, gradients_by_name


@pytest.mark.each(1)
@pytest.mark.parametrize("kind", [Evidence, OneGraph])
@pytest.mark.parametrize(
    "estimator", ["ntk-4-1", "kfac-4-1", "kfac-N-C", "full-4-C", "diag-4-2-mc", "ntk-N-1-ef"]
)
def test_parts_are_those_of_the_whole(estimator: str, kind: type[Evidence]) -> None:
    evidence = make(estimator, kind=kind, memory=Memory(micro_batch=3))
    block = next(iter(evidence.blocks(data())))
    value, whole = gradients(evidence, block)
    assert len(whole) == 4
    for names in CHOICES:
        part_value, part = gradients(evidence, block, wrt=names)
        assert part_value == pytest.approx(value, rel=1e-12)
        assert part.keys() == {n for n in whole if n.startswith(tuple(names))}
        for name, gradient in part.items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-9, atol=1e-12)


def test_the_gradients_of_the_others_stay() -> None:
    evidence = make("ntk-4-1")
    block = next(iter(evidence.blocks(data())))
    for p in evidence.hyperparameters().values():
        p.grad = torch.full_like(p, 7.0)
    evidence.backward(block, wrt="prior")
    for name, p in evidence.hyperparameters().items():
        assert p.grad is not None
        assert bool((p.grad == 7.0).all()) != name.startswith("prior.")
        assert p.requires_grad


def passes_of(evidence: Evidence, monkeypatch: pytest.MonkeyPatch, **keywords: Any) -> list[str]:
    kinds: list[str] = []
    run = MicroBatchSweep.fold

    def counted(sweep, step, start, *, graph=False):
        kinds.append("second" if graph else "first")
        return run(sweep, step, start, graph=graph)

    with monkeypatch.context() as patch:
        patch.setattr(MicroBatchSweep, "fold", counted)
        evidence.backward(next(iter(evidence.blocks(data()))), **keywords)
    return kinds


@pytest.mark.parametrize("estimator", ["ntk-4-1", "kfac-4-C"])
def test_precisions_and_noise_take_no_second_pass(estimator, monkeypatch) -> None:
    evidence = make(estimator)
    assert passes_of(evidence, monkeypatch, wrt=["prior"]) == ["first"]
    assert passes_of(evidence, monkeypatch, wrt=["prior", "likelihood"]) == ["first"]
    assert passes_of(evidence, monkeypatch, wrt=["model"]) == ["first", "second"]
    assert passes_of(evidence, monkeypatch) == ["first", "second"]


def test_scores_have_no_graph_where_the_noise_is_not_asked_for(monkeypatch) -> None:
    """Rows that depend on the noise: also they take one pass for precisions alone."""
    seen = []
    run_pass = algorithm.run_pass

    def record(*arguments, **settings):
        block_pass = run_pass(*arguments, **settings)
        seen.append(any(t.requires_grad for t in block_pass.statistic.tensors()))
        return block_pass

    evidence = make("kfac-4-1-ef")
    block = next(iter(evidence.blocks(data())))
    monkeypatch.setattr(algorithm, "run_pass", record)
    evidence.backward(block, wrt="prior")
    assert seen == [False]


# ------------------------------------------------------------------ kept passes


@pytest.mark.parametrize("estimator", ["ntk-4-1", "kfac-4-2", "diag-N-C"])
def test_passes_kept_for_the_prior_and_the_noise(estimator: str) -> None:
    evidence = make(estimator)
    block = next(iter(evidence.blocks(data())))
    names = ["prior", "likelihood"]
    assert why_not_kept(evidence, data()[0], names) is None
    state = evidence.generator.get_state()
    kept = evidence.collect(block, wrt=names)
    evidence.generator.set_state(state)
    for change in (0.0, 0.4):
        with torch.no_grad():
            for name, p in evidence.hyperparameters().items():
                if not name.startswith("model."):
                    p += change
        value, got = gradients(evidence, kept, wrt=names)
        expected_value, expected = gradients(evidence, block, wrt=names)
        assert value == pytest.approx(expected_value, rel=1e-11)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)
    assert evidence.estimate_kept(kept).log_evidence == pytest.approx(value, rel=1e-12)


def test_a_kept_pass_knows_what_it_does_not_follow() -> None:
    evidence = make("ntk-4-1")
    block = next(iter(evidence.blocks(data())))
    kept = evidence.collect(block, wrt=["prior", "likelihood"])
    with pytest.raises(ConfigurationError, match=r"has no gradient for model\..*wrt=\['likelihood"):
        evidence.backward_kept(kept)
    hyperparameters = evidence.hyperparameters()
    assert all(p.grad is None for p in hyperparameters.values())
    with torch.no_grad():
        hyperparameters["model.invariance.raw_level"].add_(0.1)
    for attempt in (evidence.estimate_kept, lambda k: evidence.backward_kept(k, wrt="prior")):
        with pytest.raises(InputError, match="hyperparameters outside the pass.s wrt"):
            attempt(kept)


def test_a_pass_kept_for_the_prior_alone_has_the_noise_in_it() -> None:
    """Also where steps on the noise could not be followed."""
    evidence = make("kfac-4-2", Gaussian([0.5, 1.0, 2.0]))
    block = next(iter(evidence.blocks(data())))
    with pytest.raises(ConfigurationError, match="sums rows with different scales"):
        evidence.collect(block, wrt=["prior", "likelihood"])
    state = evidence.generator.get_state()
    kept = evidence.collect(block, wrt="prior")
    evidence.generator.set_state(state)
    value, got = gradients(evidence, kept, wrt="prior")
    expected_value, expected = gradients(evidence, block, wrt="prior")
    assert value == pytest.approx(expected_value, rel=1e-12)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        evidence.hyperparameters()["likelihood.log_noise"].add_(0.1)
    with pytest.raises(InputError, match="have changed since"):
        evidence.estimate_kept(kept)


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("priors", "Did you mean 'prior'"),
        (["model.invariance.level"], "no learnable hyperparameter matches"),
        (["likelihood"], "no learnable hyperparameter matches 'likelihood'"),
    ],
)
def test_names_that_stand_for_nothing(names: Any, words: str) -> None:
    evidence = make("ntk-4-1", Categorical())
    x, _ = data()
    y = torch.arange(N) % OUTPUTS
    block = next(iter(evidence.blocks((x, y))))
    before = evidence.generator.get_state()
    for attempt in (
        lambda: evidence.backward(block, wrt=names),
        lambda: evidence.collect(block, wrt=names),
        lambda: why_not_kept(evidence, x, names),
        lambda: evidence.map_loss(x, y, wrt=names),
    ):
        with pytest.raises(ConfigurationError, match=words):
            attempt()
    assert torch.equal(evidence.generator.get_state(), before)


def test_parameters_are_learnable_again_after_an_error() -> None:
    evidence = make("ntk-4-1")
    block = next(iter(evidence.blocks(data())))
    with torch.no_grad():
        evidence.hyperparameters()["prior.log_precision"].fill_(float("nan"))
    with pytest.raises(EvigradError, match="NaN or infinite"):
        evidence.backward(block, wrt="model")
    assert len(evidence.hyperparameters()) == 4


def test_the_training_loss_reaches_what_is_asked_for() -> None:
    evidence = make("ntk-4-1")
    x, y = data()
    hyperparameters = evidence.hyperparameters()
    for wrt, reached in (
        ((), set()),
        (["model.invariance"], {"model.invariance.raw_level"}),
        ("model", {"model.invariance.raw_level", "model.model.gate"}),
    ):
        with torch.random.fork_rng(devices=[]):
            evidence.map_loss(x, y, wrt=wrt).backward()
        assert {name for name, p in hyperparameters.items() if p.grad is not None} == reached
        evidence.model.zero_grad()
