"""A curvature from outside the package: errors for wrong ones, and what it takes part in."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traces import Traces

import evigrad
from evigrad import Evidence, Learner, Memory, Schedule
from evigrad.core.curvature import Curvature
from evigrad.core.curvature.base import scaled_rows
from evigrad.core.curvature.dense import BlockStatistic
from evigrad.errors import ConfigurationError, NotPositiveDefiniteError
from evigrad.likelihoods import Gaussian
from evigrad.priors import GaussianPrior

N = 12
X = torch.linspace(-1, 1, 2 * N).reshape(N, 2)
Y = X.sin()


def build(curvature: Any, estimator: str | None = "traces-N-C", **settings: Any) -> Evidence:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    if curvature is Traces:
        curvature = Traces(dict(model.named_parameters()))
    if estimator is not None:
        settings["estimator"] = estimator
    return Evidence(
        model, Gaussian(), GaussianPrior("layerwise"), num_data=N, curvature=curvature, **settings
    )


class Unnamed(Traces):
    name = ""


class ReturnsNumber(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Any:
        return super().log_det(statistic, precisions).item()


class ReturnsVector(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        return super().log_det(statistic, precisions)[None]


class ReturnsComplex(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        return super().log_det(statistic, precisions) + 0j


class Negative(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        return -super().log_det(statistic, precisions)


class Detached(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        return super().log_det(statistic, precisions).detach()


class DetachedPrecisions(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        return super().log_det(statistic, {n: p.detach() for n, p in precisions.items()})


class DetachedBias(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        detached = {"0.bias": precisions["0.bias"].detach()}
        return super().log_det(statistic, {**precisions, **detached})


class DetachedStatistic(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        fixed = statistic.with_tensors([t.detach() for t in statistic.tensors()])
        return super().log_det(fixed, precisions)


class Noisy(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        return super().log_det(statistic, precisions) * (1 + 0.01 * torch.rand(()))


class Plain(Traces):
    """Its statistic is a dictionary."""

    def collect(self, *arguments: Any, **keywords: Any) -> Any:
        return super().collect(*arguments, **keywords).blocks


class Indefinite(Traces):
    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        value = super().log_det(statistic, precisions)
        return torch.linalg.cholesky(value * -torch.eye(2)).diagonal().log().sum()


@pytest.mark.parametrize(
    ("estimator", "settings", "words"),
    [
        (None, {}, ["is a Traces", "must begin with 'traces-'", "'traces-100-C'", "ntk-400-rows"]),
        ("diag-N-C", {}, ["must begin with 'traces-'", "got 'diag-N-C'"]),
        ("traces", {}, ["must begin with 'traces-'"]),
        ("traces-4", {}, ["OUTPUTS is missing", "STRUCTURE is traces.", "'traces-N-C'"]),
        ("traces-N-C", {"memory": Memory(gram_dtype="float64")}, ["gram_dtype", "scaled_rows"]),
        ("traces-N-C", {"memory": Memory(rows_dtype="bfloat16")}, ["does not store rows"]),
    ],
)
def test_settings(estimator: str | None, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build(Traces, estimator, **settings)
    for word in words:
        assert word in str(caught.value)
    assert "blockdiag" not in str(caught.value)


def test_a_class_instead_of_an_object() -> None:
    kind: Any = type("Bare", (Traces,), {})
    with pytest.raises(ConfigurationError, match=r"such as Traces\(\), got <class"):
        Evidence(
            nn.Linear(2, 2), Gaussian(), GaussianPrior(), curvature=kind, num_data=N, estimator="a"
        )


def test_a_missing_name() -> None:
    class Nameless(Curvature[Any]):
        def collect(self, *arguments: Any, **keywords: Any) -> Any: ...

        def log_det(self, *arguments: Any, **keywords: Any) -> Any: ...

    for curvature, received in ((Nameless(), "None"), (Unnamed({}), "''")):
        with pytest.raises(ConfigurationError, match=f"needs a name.*got {received}"):
            build(curvature)


@pytest.mark.parametrize(
    ("kind", "received"),
    [
        (ReturnsNumber, r"\d+\.\d+\."),
        (ReturnsVector, r"shape \(1,\)"),
        (ReturnsComplex, r"shape \(\) and type torch.complex64"),
    ],
)
def test_a_log_det_that_is_no_scalar_tensor(kind: type[Traces], received: str) -> None:
    weights = build(Traces).weights()
    with pytest.raises(ConfigurationError, match=f"{kind.__name__}.log_det must.*got {received}"):
        build(kind(weights)).backward(X, Y)


@pytest.mark.each(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Detached, "Detached.log_det must be differentiable in the statistic.* is 0 by automatic"),
        (DetachedPrecisions, "DetachedPrecisions.log_det .* in the precisions.* is 0 by automatic"),
        (DetachedBias, "DetachedBias.log_det must be differentiable in the precisions"),
        (DetachedStatistic, "DetachedStatistic.log_det must be differentiable in the statistic"),
        (Negative, "log-determinant of 'traces-N-C' must not be negative, got -"),
        (Plain, "Plain.collect must return a Statistic, such as a BlockStatistic, got a dict"),
    ],
)
def test_a_log_det_that_is_wrong_changes_no_gradient(
    kind: type[Traces], words: str, dtype: torch.dtype
) -> None:
    evidence = build(kind(build(Traces).weights()))
    evidence.model.to(dtype)
    for method in (evidence.estimate, evidence.backward):
        with pytest.raises(ConfigurationError, match=words):
            method(X.to(dtype), Y.to(dtype))
    assert all(p.grad is None for p in evidence.hyperparameters().values())


def test_derivatives_are_compared_once_and_not_those_of_a_random_log_det(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    log_det = Traces.log_det

    def counted(self: Traces, statistic: Any, precisions: Any) -> Tensor:
        calls.append("log_det")
        return log_det(self, statistic, precisions)

    monkeypatch.setattr(Traces, "log_det", counted)
    evidence, numbers = build(Traces), []
    for _ in range(3):
        evidence.backward(X, Y)
        numbers.append(len(calls))
        calls.clear()
    assert numbers == [9, 1, 1]
    noisy = build(Noisy(evidence.weights()))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        noisy.estimate(X, Y)
        after = torch.rand(())
        torch.manual_seed(1)
        torch.rand(())  # by the estimate, and none by the comparison
        assert after == torch.rand(())


def test_a_name_of_a_built_in_structure() -> None:
    class Kfac(Traces):
        name = "kfac"

    with pytest.raises(ConfigurationError, match="name of a Kfac must differ .* got 'kfac'"):
        build(Kfac({}), "kfac-N-C")


@pytest.mark.parametrize("function", [evigrad.fit, evigrad.tune])
def test_training_that_takes_no_curvature(function: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"custom curvature needs Evidence\(.*Learner"):
        function(model, (X, Y), likelihood="gaussian", estimator="traces-4-C")
    with pytest.raises(ConfigurationError, match=r"no argument curvature.*Learner"):
        function(model, (X, Y), likelihood="gaussian", estimator="traces-4-C", curvature=Traces({}))


def test_another_estimator_of_the_same_model() -> None:
    """It keeps the curvature that its name begins with, and no other."""
    evidence = build(Traces)
    other = evidence.with_estimator("traces-4-C")
    assert other.estimator.custom is evidence.estimator.custom
    assert evidence.with_estimator("diag-N-C").estimator.custom is None
    with pytest.raises(ConfigurationError, match="unknown structure 'trace'"):
        evidence.with_estimator("trace-4-C")


def test_a_learner() -> None:
    """Training with a custom curvature, and how to continue it."""
    evidence = build(Traces, "traces-4-C", generator=0)
    learner = Learner(evidence, (X, Y), Schedule(epochs=4, burn_in=1, every=1, steps=2))
    optimizer = torch.optim.Adam(evidence.weights().values(), lr=1e-2)
    before = evidence.prior.precisions()["0.weight"].item()
    for _ in range(4):
        optimizer.zero_grad()
        evidence.map_loss(X, Y).backward()
        optimizer.step()
        learner.step()
    assert evidence.prior.precisions()["0.weight"].item() != before
    assert "log_evidence" in learner.history[-1]


class InDouble(Traces):
    """The statistic is in float64, whatever the type of the weights."""

    def collect(self, statistic: Any, linearization: Any, root: Any) -> BlockStatistic:
        traces = {} if statistic is None else dict(statistic.blocks)
        for name, rows in linearization.rows(root.vectors).items():
            trace = scaled_rows(rows, root.scale, torch.float64).square().sum()
            traces[name] = traces.get(name, 0) + trace
        return BlockStatistic(traces)

    def log_det(self, statistic: Any, precisions: Any) -> Tensor:
        return super().log_det(statistic, {name: p.double() for name, p in precisions.items()})


def test_a_statistic_in_float64() -> None:
    """Both passes take it, in several micro-batches and with a hyperparameter of the model."""
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)
        evidence = Evidence(
            model,
            Gaussian(),
            GaussianPrior("layerwise", precision=1e-6),
            estimator="traces-N-C",
            curvature=InDouble({n: w for n, w in model.named_parameters() if n != "0.bias"}),
            num_data=N,
            hyperparameters=["0.bias"],
            memory=Memory(micro_batch=5),
        )
        estimate = evidence.backward(X.to(dtype), Y.to(dtype))
        gradients = [p.grad for p in evidence.hyperparameters().values() if p.grad is not None]
        results.append([torch.tensor([estimate.log_det]), *(g.double() for g in gradients)])
    assert len(results[0]) == 4
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["estimate", "backward"])
def test_a_matrix_without_a_factor(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    evidence = build(Indefinite(dict(model.named_parameters())))
    with pytest.raises(
        NotPositiveDefiniteError, match=r"Indefinite.log_det failed: .*log_det_dense"
    ):
        getattr(evidence, method)(X, Y)
