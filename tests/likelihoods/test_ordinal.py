"""Ordered classes: cumulative logits, their Fisher information, and learned thresholds."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, reference
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import Bernoulli, Gaussian, Joint, Likelihood, Ordinal, Weighted
from evigrad.measure.metrics import evaluate
from evigrad.posterior import Predictive
from evigrad.priors import GaussianPrior
from evigrad.training.history import known

N, K = 6, 4
THRESHOLDS = [-1.2, 0.1, 0.7]
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 3, 1, 2, 2, 0])


def ordinal() -> Ordinal:
    return Ordinal(K, thresholds=torch.tensor(THRESHOLDS, dtype=torch.float64)).double()


def enumerated(likelihood: Ordinal, f: Tensor) -> Tensor:
    """The probability of each class, as differences of sigmoids."""
    thresholds = likelihood.thresholds.to(f)
    zero, one = torch.zeros_like(f), torch.ones_like(f)
    cumulative = torch.cat([zero, (thresholds - f).sigmoid(), one], 1)
    return cumulative.diff(dim=1)


def fisher(likelihood: Ordinal, f: Tensor) -> Tensor:
    """Σ_k (p_k')² / p_k, by automatic differentiation of the probabilities, (m, 1, 1)."""
    p = enumerated(likelihood, f)
    slopes = torch.stack(
        [torch.autograd.grad(p[:, k].sum(), f, create_graph=True)[0][:, 0] for k in range(K)], 1
    )
    return (slopes.square() / p).sum(1)[:, None, None]


@st.composite
def likelihoods(draw: st.DrawFn) -> Ordinal:
    first = draw(st.floats(-3.0, 3.0))
    gaps = draw(st.lists(st.floats(0.05, 3.0), max_size=5))
    return Ordinal(len(gaps) + 2, thresholds=np.cumsum([first, *gaps]).tolist()).double()


@given(likelihood=likelihoods(), level=st.floats(-6.0, 6.0))
def test_densities_are_those_of_the_enumerated_classes(likelihood: Ordinal, level: float) -> None:
    classes = likelihood.num_classes
    f = torch.full((classes, 1), level, dtype=torch.float64)
    y = torch.arange(classes)
    likelihood.validate(f.shape, y)
    log_p = likelihood.log_prob(f, y).detach()
    torch.testing.assert_close(
        log_p.exp(), enumerated(likelihood, f)[0].detach(), atol=1e-14, rtol=1e-9
    )


@pytest.mark.parametrize("level", [-80.0, -50.0, -20.0, 20.0, 50.0, 80.0])
def test_tails_lose_no_digits_in_float32(level: float) -> None:
    """Value, score, information and all their gradients are those of float64."""
    results = []
    for dtype in (torch.float32, torch.float64):
        likelihood = Ordinal(K, thresholds=THRESHOLDS).to(dtype)
        f = torch.full((K, 1), level, dtype=dtype, requires_grad=True)
        y, numbers = torch.arange(K), list[Tensor]()
        values = (likelihood.log_prob(f, y), likelihood.hessian(f), likelihood._diagonal_root(f))
        for value in (*values, likelihood.score(f, y)):
            arguments = [f, likelihood.cuts]
            numbers += [value, *torch.autograd.grad(value.sum(), arguments, retain_graph=True)]
        results.append([number.detach().double() for number in numbers])
    for single, double in zip(*results, strict=True):
        assert bool(single.isfinite().all())
        # Gradients that cancel to zero are compared with the scale of their terms.
        torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-6)
    information = results[0][3]
    assert bool((information > 0).all())
    torch.testing.assert_close(information, results[1][3], rtol=1e-4, atol=0)


# ------------------------------------------------------------------ the evidence


class Gated(nn.Module):
    """One output of a small network with a hyperparameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.3))
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x * self.gate.exp())))


def evidence_of(
    estimator: str, likelihood: Likelihood | None = None, num_data: int = N, **options: Any
) -> Evidence:
    torch.manual_seed(0)
    return Evidence(
        Gated().double(),
        ordinal() if likelihood is None else likelihood,
        GaussianPrior("layerwise", precision=0.7),
        estimator=estimator,
        num_data=num_data,
        hyperparameters=["gate"],
        generator=0,
        **options,
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "estimator",
    [
        *("ntk-N-C", "full-3-1", "blockdiag-N-1-ef", "kfac-N-C", "kfac-N-1-ef", "full-4-rows"),
        *("diag-3-1-iid", "kfac-4-1-grouped", "ntk-4-rows-anchored"),
    ],
)
def test_value_and_gradient_are_those_of_dense_matrices(estimator: str) -> None:
    evidence = evidence_of(estimator, temperature=0.8)
    likelihood = evidence.likelihood
    assert isinstance(likelihood, Ordinal)
    for block in evidence.blocks((X, Y)).take(2):
        for parameter in evidence.hyperparameters().values():
            parameter.grad = None
        curvature: Any = {"curvature": lambda f: fisher(likelihood, f)}
        expected = reference.log_evidence(evidence, block, **curvature)
        gradients = reference.gradients(evidence, block, **curvature)
        estimate = evidence.backward(block)
        assert estimate.log_evidence == pytest.approx(expected.item(), rel=1e-9)
        assert set(gradients) == {"model.gate", "prior.log_precision", "likelihood.cuts"}
        for name, parameter in evidence.hyperparameters().items():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-7, atol=1e-9)


def test_every_draw_of_labels_gives_the_curvature_of_its_scores() -> None:
    """All labels that ``mc`` can draw for two examples. Their mean is the Fisher information."""
    x, mean = X[:2], torch.zeros(1, 1, dtype=torch.float64)
    for labels in map(torch.tensor, itertools.product(range(K), repeat=2)):
        likelihood = ordinal()
        likelihood.sample = lambda f, generator, labels=labels: labels  # pyright: ignore
        evidence = evidence_of("full-N-1-mc", likelihood, 2)
        weights = evidence.weights()
        f = reference.outputs(evidence.model, x).detach().requires_grad_()
        p = enumerated(likelihood, f).gather(1, labels[:, None])[:, 0]
        (scores,) = torch.autograd.grad(p.log().sum(), f)
        rows = reference.jacobian(evidence.model, weights, x)[:, 0].detach() * scores
        precision = reference.vector(evidence.prior.precisions(), weights)
        estimate = evidence.estimate(x, torch.zeros(2, dtype=torch.long))
        log_det = float(reference.log_det(rows.T @ rows, precision).detach())
        assert estimate.log_det == pytest.approx(log_det, rel=1e-9)
        mean = mean + p.prod().detach() * rows.T @ rows
    exact = evidence_of("full-N-C", num_data=2)
    jacobian = reference.jacobian(exact.model, exact.weights(), x).detach()
    f = reference.outputs(exact.model, x).detach()
    torch.testing.assert_close(mean, reference.ggn(jacobian, ordinal().hessian(f)).detach())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("estimator", ["ntk-3-1", "kfac-N-C", "full-N-1-ef", "ntk-4-rows-anchored"])
def test_two_classes_are_a_bernoulli(estimator: str) -> None:
    two = Ordinal(2, thresholds=[0.0], learnable=False).double()
    values = []
    for likelihood, y in ((two, Y > 1), (Bernoulli(), (Y > 1)[:, None])):
        y = y.long() if likelihood is two else y.double()
        evidence = evidence_of(estimator, likelihood)
        estimate = evidence.backward(next(iter(evidence.blocks((X, y)))))
        values.append(
            (estimate.log_evidence, *(p.grad for p in evidence.hyperparameters().values()))
        )
    for one, other in zip(*values, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


# ------------------------------------------------------------------ the posterior


@pytest.mark.parametrize("structure", ["full", "ntk", "diag"])
def test_the_posterior_is_that_of_dense_matrices(structure: str) -> None:
    evidence = evidence_of("full-N-C")
    likelihood = evidence.likelihood
    assert isinstance(likelihood, Ordinal)
    weights = evidence.weights()
    f = reference.outputs(evidence.model, X).detach().requires_grad_()
    jacobian = reference.jacobian(evidence.model, weights, X).detach()
    hessian = reference.ggn(jacobian, fisher(likelihood, f)).detach()
    hessian = hessian.diagonal().diag() if structure == "diag" else hessian
    precision = reference.vector(evidence.prior.precisions(), weights).detach()
    covariance = jacobian @ torch.linalg.inv(hessian + precision.diag()) @ jacobian.mT
    prediction = evidence.posterior((X, Y), structure=structure)(X)
    prediction = replace(prediction, num_samples=100_000)
    torch.testing.assert_close(prediction.covariance, covariance, rtol=1e-8, atol=1e-10)
    points, masses = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(40))
    spread = covariance[:, 0].sqrt() * points
    p = enumerated(likelihood, (f.detach() + spread).flatten()[:, None]).unflatten(0, (N, -1))
    expected = torch.einsum("nqk,q->nk", p, masses / masses.sum()).detach()
    torch.testing.assert_close(prediction.probabilities, expected, atol=3e-3, rtol=0)
    log_prob = expected.gather(1, Y[:, None])[:, 0].log()
    torch.testing.assert_close(prediction.log_prob(Y), log_prob, atol=1e-2, rtol=0)
    with pytest.raises(ConfigurationError, match="link='probit' does not support Ordinal"):
        replace(prediction, link="probit").probabilities  # noqa: B018


def test_kfac_is_exact_for_one_example() -> None:
    data = (X[:1], Y[:1])
    one = Evidence(nn.Linear(2, 1, bias=False).double(), ordinal(), GaussianPrior(), num_data=1)
    covariances = [
        one.posterior(data, structure=structure)(X).covariance for structure in ("kfac", "full")
    ]
    torch.testing.assert_close(*covariances)


# ------------------------------------------------------------------ heads, positions, weights


def test_a_head_of_a_joint_likelihood_may_miss_labels() -> None:
    joint = Joint({"depth": (1, Gaussian(0.5)), "stars": (1, ordinal())}).double()
    assert not joint.couples_outputs
    labels = Y.clone()
    labels[1] = -100
    f = torch.linspace(-1, 1, 2 * N, dtype=torch.float64).view(N, 2)
    y = joint.targets({"depth": torch.zeros(N, 1), "stars": labels})
    joint.validate(f.shape, y)
    expected = Gaussian(0.5).double().log_prob(f[:, :1], torch.zeros(N, 1))
    ordinal_part = ordinal().log_prob(f[:, 1:], Y)
    ordinal_part[1] = 0.0
    torch.testing.assert_close(joint.log_prob(f, y), expected + ordinal_part)
    metrics = joint.metrics(f, y)
    counted = torch.arange(N) != 1
    median = (ordinal().thresholds < f[:, 1:]).sum(1)
    error = (median - Y).abs()[counted].double().mean()
    assert metrics["stars/absolute_error"] == pytest.approx((float(error) * 5, 5))
    p = ordinal().probabilities(f[:, 1:]).argmax(1)
    assert metrics["stars/accuracy"] == (float((p == Y)[counted].sum()), 5)
    prediction = Predictive(f, torch.zeros(N, 2, 2, dtype=torch.float64), joint)["stars"]
    torch.testing.assert_close(prediction.probabilities, ordinal().probabilities(f[:, 1:]).detach())
    assert [name for name in joint.reported() if name.startswith("stars")] == [
        f"stars/threshold/{k}" for k in range(K - 1)
    ]
    with pytest.raises(InputError, match="labels of 'stars' must be integers"):
        joint.targets({"depth": torch.zeros(N, 1), "stars": labels.double()})
    with pytest.raises(InputError, match="Head 'stars': Target 4 at index 2 is outside 0 … 3"):
        joint.validate(f.shape, torch.where(y == 2, 4.0, y))


def test_labels_at_positions_are_examples() -> None:
    """A sequence with some labels that do not count, against its positions one by one."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    x, y = torch.randn(3, 4, 2).double(), torch.randint(K, (3, 4))
    y[0, 2:] = y[2, 1] = -100
    counts = y != -100
    values = []
    for inputs, labels in ((x, y), (x[counts], y[counts])):
        evidence = Evidence(
            model, ordinal(), GaussianPrior(), estimator="ntk-N-C", num_data=int(counts.sum())
        )
        metrics = evaluate(model, evidence.likelihood, (inputs, labels))
        predictive = evidence.posterior((inputs, labels), structure="full")(x)
        assert predictive.probabilities.shape == (3, 4, K)
        values.append([evidence.estimate(inputs, labels).log_evidence, *metrics.values()])
        assert list(metrics) == ["log_likelihood", "absolute_error", "accuracy"]
    assert values[0] == pytest.approx(values[1], rel=1e-10)


def test_weights_repeat_examples() -> None:
    weights = torch.tensor([2, 0, 1, 3, 1, 1])
    weighted = Weighted(ordinal())
    targets = weighted.targets(Y, weights)
    one = evidence_of("full-N-C", weighted)
    many = evidence_of("full-N-C", num_data=int(weights.sum()))
    repeated = (X.repeat_interleave(weights, 0), Y.repeat_interleave(weights))
    estimate, expected = one.backward(X, targets), many.backward(*repeated)
    assert estimate.log_evidence == pytest.approx(expected.log_evidence, rel=1e-10)
    slopes = []
    for evidence, name in ((one, "likelihood.cuts"), (many, "cuts")):
        slope = evidence.likelihood.get_parameter(name).grad
        assert slope is not None
        slopes.append(evidence.num_data * slope)
    torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------ settings and training


def test_thresholds_start_at_equal_classes() -> None:
    for num_classes in (2, 3, 7):
        p = Ordinal(num_classes).probabilities(torch.zeros(1, 1))
        torch.testing.assert_close(p.detach(), torch.full((1, num_classes), 1 / num_classes))


@pytest.mark.long
def test_thresholds_are_learned() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 2, generator=generator)
    y = Ordinal(K, thresholds=THRESHOLDS).sample(2 * x[:, :1], generator)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    result = evigrad.fit(
        model, (x, y), likelihood=Ordinal(K), estimator="full-N-C",
        schedule=evigrad.Schedule(epochs=100), optimization=evigrad.Optimization(lr=0.05),
        progress=False,
    )  # fmt: skip
    reported = known(result.history[-1])
    bias = float(model.bias.detach())
    learned = [reported[f"likelihood/threshold/{k}"] - bias for k in range(K - 1)]
    assert learned == pytest.approx(THRESHOLDS, abs=0.2)
    slope = model.weight.detach()[0].tolist()
    assert slope == pytest.approx([2.0, 0.0], abs=0.2)


def test_what_is_refused() -> None:
    broken: Any
    for broken in (1, 0, 2.0, True, "3", None):
        with pytest.raises(ConfigurationError, match="num_classes must be a whole number"):
            Ordinal(broken)
    for broken in ([0.0], [1.0, 0.0], [0.0, 0.0], [0.0, float("inf")], 3.0, "ab", [[0.0, 1.0]]):
        with pytest.raises(ConfigurationError, match="thresholds must be"):
            Ordinal(3, thresholds=broken)
    broken = 1
    with pytest.raises(ConfigurationError, match="learnable must be True or False"):
        Ordinal(3, learnable=broken)
    assert not Ordinal(3, learnable=False).cuts.requires_grad
    assert "num_classes=3, ignore_index=9" in repr(Ordinal(3, ignore_index=9))
    assert repr(Ordinal(3)) == "Ordinal(num_classes=3)"
    likelihood = Ordinal(3)
    for shape, y, words in (
        ((2, 1), torch.tensor([0, 3]), "Target 3 at index 1 is outside 0 … 2"),
        ((2, 1), torch.tensor([-1, 0]), "Target -1 at index 0 is outside 0 … 2"),
        ((2, 3), torch.tensor([0, 1]), "needs one output .* the model has 3 outputs"),
        ((2, 1), torch.zeros(2, 1, dtype=torch.long), r"Use y.squeeze\(1\)"),
        ((2, 1), torch.zeros(2), r"must be integers, got torch.float32"),
    ):
        with pytest.raises(InputError, match=words):
            likelihood.validate(shape, y)
