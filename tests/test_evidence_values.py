"""Every structure's number and gradients against dense float64 matrices."""

import math
import warnings
from itertools import cycle
from typing import Any

import pytest
import torch
from likelihood_zoo import LIKELIHOODS, targets
from torch import Tensor, nn
from zoo import CASES, HYPERPARAMETERS, OUTPUTS, Case

from evigrad import Evidence, reference
from evigrad.core.names import STRUCTURES
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from evigrad.priors import GaussianPrior

TOLERANCE = 1e-8
# Their log-determinants are those of blocks of H, which the oracle forms.
DENSE = [name for name, facts in STRUCTURES.items() if facts.log_det_is != "approximate"]
PRIORS = ["scalar", "layerwise", "diagonal", "groups"]


def make(
    case: Case,
    likelihood: Likelihood,
    prior: GaussianPrior,
    estimator: str,
    m: int = 3,
    **kwargs: Any,
) -> tuple[Evidence, Tensor, Tensor]:
    model, x = case.build(m)
    names = [n for n in HYPERPARAMETERS if hasattr(model, n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if case.normalised else "error", EvigradWarning)
        evidence = Evidence(
            model,
            likelihood,
            prior,
            estimator=estimator,
            num_data=m,
            hyperparameters=names,
            generator=0,
            **kwargs,
        )
    y = targets(likelihood, m)
    with torch.no_grad():
        for parameter in prior.parameters():
            parameter += torch.linspace(-0.5, 0.7, parameter.numel()).reshape(parameter.shape)
    return evidence, x, y


def dense(
    evidence: Evidence,
    x: Tensor,
    y: Tensor,
    structure: str,
    by: str = "tensor",
    mean: Tensor | float = 0.0,
) -> Tensor:
    """The full-data log evidence with a graph, from dense matrices; the prior's mean is (P,)."""
    weights, likelihood = evidence.weights(), evidence.likelihood
    f = reference.outputs(evidence.model, x)
    jac = reference.jacobian(evidence.model, weights, x)
    if isinstance(likelihood, Categorical):
        hessian = reference.softmax_hessian(f)
        log_lik = f.log_softmax(-1).gather(1, y[:, None]).sum()
    elif isinstance(likelihood, Gaussian):
        variance = (2 * likelihood.log_noise).exp().expand(f.shape)
        hessian = torch.diag_embed(1 / variance)
        log_lik = -0.5 * ((y - f) ** 2 / variance + (2 * torch.pi * variance).log()).sum()
    elif isinstance(likelihood, Bernoulli):
        p = f.sigmoid()
        hessian = torch.diag_embed(p * (1 - p))
        log_lik = (y * p.log() + (1 - y) * (1 - p).log()).sum()
    elif isinstance(likelihood, Poisson):
        hessian = torch.diag_embed(f.exp())
        log_lik = torch.distributions.Poisson(f.exp()).log_prob(y).sum()
    else:  # of the tests themselves
        hessian, log_lik = likelihood.at(y).hessian(f), likelihood.log_prob(f, y).sum()
    t = evidence.temperature
    h = reference.ggn(jac, hessian / t)
    precision = reference.vector(evidence.prior.precisions(), weights)
    parts = reference.parameter_partition(structure, weights, by)
    flat = torch.cat([w.detach().flatten() for w in weights.values()])
    decay = (precision * (flat - mean) ** 2).sum()
    return log_lik / t - 0.5 * decay - 0.5 * reference.log_det(h, precision, parts)


def assert_gradients(evidence: Evidence, x: Tensor, y: Tensor, expected: Tensor) -> None:
    """Value and the gradient of every hyperparameter, norm-wise per tensor."""
    estimate = evidence.backward(x, y)
    assert estimate.log_evidence == pytest.approx(expected.item(), rel=TOLERANCE)
    parts = estimate.log_likelihood + estimate.log_prior - 0.5 * estimate.log_det
    assert parts == pytest.approx(estimate.log_evidence, rel=1e-12)
    named = evidence.hyperparameters()
    gradients = torch.autograd.grad(-expected / evidence.num_data, list(named.values()))
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        assert parameter.grad is not None
        error = (parameter.grad - gradient).norm() / gradient.norm()
        assert error < TOLERANCE, f"{name}: {error:.1e}"


@pytest.mark.one_in(3)  # test_zoo has the rows of every module
@pytest.mark.parametrize(
    ("name", "structure"),  # by turns; test_pairs has each pair of them
    list(zip(CASES, cycle(DENSE), strict=False)),
)
def test_every_module(name: str, structure: str) -> None:
    evidence, x, y = make(
        CASES[name], Categorical(), GaussianPrior("layerwise"), f"{structure}-N-C"
    )
    assert_gradients(evidence, x, y, dense(evidence, x, y, structure))


@pytest.mark.parametrize(
    ("likelihood", "structure", "prior"),  # by turns; check_likelihood has every derivative
    list(zip(LIKELIHOODS, cycle(DENSE), cycle(PRIORS[1:]), strict=False)),
)
def test_every_likelihood_and_prior(likelihood: str, structure: str, prior: str) -> None:
    groups: Any = {"body": ["body"], "head": ["head.*"]} if prior == "groups" else prior
    evidence, x, y = make(
        CASES["in-place"],
        LIKELIHOODS[likelihood](OUTPUTS),
        GaussianPrior(groups, precision=0.8),
        f"{structure}-N-C",
        m=4,
        temperature=0.7,
    )
    assert_gradients(evidence, x, y, dense(evidence, x, y, structure))


MEANS = {
    "initial": "initial",
    "some": {"body": "initial", "head.weight": "zero"},
    "tensor": {"body.*": "initial", "head.bias": torch.tensor([1.0, -2.0, 0.5])},
}


# A precision that varies in a Kronecker block has no log-determinant.
UNDER_A_MEAN = [(s, p) for s in [*DENSE, "kfac"] for p in PRIORS if (s, p) != ("kfac", "diagonal")]


@pytest.mark.each(1)
@pytest.mark.parametrize(("structure", "prior"), UNDER_A_MEAN)
def test_a_prior_with_a_mean(structure: str, prior: str) -> None:
    """Value, gradients and the training loss have the deviations from it."""
    groups: Any = {"body": ["body"], "head": ["head.*"]} if prior == "groups" else prior
    for name, mean_argument in MEANS.items():
        evidence, x, y = make(
            CASES["in-place"],
            Categorical(),
            GaussianPrior(groups, precision=0.8, mean=mean_argument),
            f"{structure}-N-C",
            m=4,
            temperature=0.7,
        )
        weights = evidence.weights()
        means = {n: torch.zeros_like(w) for n, w in weights.items()}
        means |= {n: w.detach().clone() for n, w in weights.items() if n.startswith("body")}
        if name == "initial":
            means = {n: w.detach().clone() for n, w in weights.items()}
        elif name == "tensor":
            means["head.bias"] = torch.tensor([1.0, -2.0, 0.5]).double()
        assert list(evidence.prior.means()) == [n for n in means if means[n].any()]
        with torch.no_grad():
            for w in weights.values():
                w += torch.sin(torch.arange(w.numel()).double()).reshape(w.shape)
        mean = torch.cat([m.flatten() for m in means.values()])
        flat = torch.cat([w.flatten() for w in weights.values()])
        precision = reference.vector(evidence.prior.precisions(), weights)
        quadratic = (precision * (flat - mean) ** 2).sum()
        if structure == "kfac":  # its log-determinant knows no mean
            zero = evidence.with_estimator("kfac-N-C", prior=GaussianPrior(groups))
            with torch.no_grad():
                for one, two in zip(
                    zero.prior.parameters(), evidence.prior.parameters(), strict=True
                ):
                    one.copy_(two)
            estimate, other = evidence.estimate(x, y), zero.estimate(x, y)
            assert estimate.log_prior == pytest.approx(-0.5 * quadratic.item())
            assert (estimate.log_det, estimate.log_likelihood) == (
                other.log_det,
                other.log_likelihood,
            )
        else:
            assert_gradients(evidence, x, y, dense(evidence, x, y, structure, mean=mean))
        loss = evidence.map_loss(x, y)
        nll = torch.nn.functional.cross_entropy(evidence.model(x), y)
        expected = nll + 0.7 / (2 * 4) * quadratic
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        gradients = torch.autograd.grad(expected, list(weights.values()))
        got = torch.autograd.grad(loss, list(weights.values()))
        for one, two in zip(got, gradients, strict=True):
            torch.testing.assert_close(one, two)


def test_the_gradient_under_a_mean_by_finite_differences() -> None:
    evidence, x, y = make(
        CASES["linear"], Categorical(), GaussianPrior(mean="initial"), "kfac-N-C", m=4
    )
    with torch.no_grad():
        for w in evidence.weights().values():
            w.mul_(1.5).add_(0.1)
    evidence.backward(x, y, wrt="prior")
    log_precision = evidence.hyperparameters()["prior.log_precision"]
    assert log_precision.grad is not None
    for index in range(len(log_precision)):
        values = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                log_precision[index] += step
                values.append(evidence.estimate(x, y).per_datum)
                log_precision[index] -= step
        slope = log_precision.grad[index].item()
        assert slope == pytest.approx((values[1] - values[0]) / 2e-4, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("structure", ["ntk", "diag"])
def test_only_prior_and_noise(structure: str) -> None:
    """Without a hyperparameter of the forward pass no graph is kept, and nothing is lost."""
    model, x = CASES["conv2d"].build(4)
    for name in HYPERPARAMETERS:
        getattr(model, name).requires_grad_(False)
    evidence = Evidence(
        model, Gaussian(0.7), GaussianPrior("layerwise"), estimator=f"{structure}-N-C", num_data=4
    )
    assert set(evidence.hyperparameters()) == {"prior.log_precision", "likelihood.log_noise"}
    y = torch.sin(torch.arange(4 * OUTPUTS, dtype=torch.float64)).reshape(4, OUTPUTS)
    assert_gradients(evidence, x, y, dense(evidence, x, y, structure))


def test_finite_differences_of_the_library_itself() -> None:
    """The gradient against central differences of estimate(), no autograd in the reference."""
    evidence, x, y = make(CASES["conv2d"], Gaussian(0.6), GaussianPrior("layerwise"), "ntk-N-C")
    evidence.backward(x, y)
    step = 1e-5
    for name, parameter in evidence.hyperparameters().items():
        direction = (
            torch.sin(torch.arange(parameter.numel()) + 1.0).reshape(parameter.shape).double()
        )
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * direction
                values.append(-evidence.estimate(x, y).per_datum)
                parameter -= sign * step * direction
        assert parameter.grad is not None
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx((parameter.grad * direction).sum().item(), rel=1e-6), name


@pytest.mark.usefixtures("by_h")
def test_linear_model_against_its_closed_form_evidence() -> None:
    """A Bayesian linear regression: y ~ N(0, σ² I + Φ P0⁻¹ Φᵀ) exactly, at the posterior mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(12, 1, generator=generator, dtype=torch.float64)
    noise, precision = 0.6, 1.7
    model = nn.Linear(4, 1).double()
    phi = torch.cat([x, torch.ones(12, 1, dtype=torch.float64)], dim=1)
    posterior = phi.T @ phi / noise**2 + precision * torch.eye(5, dtype=torch.float64)
    mean = torch.linalg.solve(posterior, phi.T @ y / noise**2)
    with torch.no_grad():
        model.weight.copy_(mean[:4].T)
        model.bias.copy_(mean[4])
    covariance = noise**2 * torch.eye(12, dtype=torch.float64) + phi @ phi.T / precision
    zero = torch.zeros(12, dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(zero, covariance).log_prob(y[:, 0]).item()
    for structure in ("ntk", "full"):
        likelihood = Gaussian(noise)
        evidence = Evidence(
            model,
            likelihood,
            GaussianPrior("scalar", precision),
            estimator=f"{structure}-N-C",
            num_data=12,
        )
        with torch.no_grad():  # made in float32
            likelihood.log_noise.fill_(math.log(noise))
        estimate = evidence.estimate(x, y)
        assert estimate.log_evidence == pytest.approx(exact, rel=1e-10)
        assert estimate.is_bound


def test_sampled_fisher_is_the_fisher_in_the_limit_of_many_samples() -> None:
    model, x = CASES["linear"].build(3)
    y = torch.zeros(3, dtype=torch.long)

    def log_det(estimator: str) -> float:
        evidence = Evidence(
            model, Categorical(), GaussianPrior(), estimator=estimator, num_data=3, generator=0
        )
        return evidence.estimate(x, y).log_det

    exact = log_det("full-N-C")
    assert log_det("full-N-2000-mc") == pytest.approx(exact, rel=0.03)
    assert log_det("full-N-1-mc") != pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("name", ["layer-norm", "bias-and-scale", "loose"])
def test_kfac_without_kronecker_factors_is_exact_by_tensor(name: str) -> None:
    """What has no Kronecker form gets its exact dense block: ℓ differs in the head alone."""
    log_dets = {}
    for structure in ("kfac", "blockdiag"):
        prior = GaussianPrior("layerwise")
        evidence, x, y = make(CASES[name], Categorical(), prior, f"{structure}-N-C")
        with torch.no_grad():  # a prior that pins the head's weight takes its block away
            pinned = prior.group_of["head.weight"]
            assert prior.log_precision is not None
            prior.log_precision[pinned] = 60.0
        log_dets[structure] = evidence.estimate(x, y).log_det
    assert log_dets["kfac"] == pytest.approx(log_dets["blockdiag"], rel=1e-9)


def test_exact_hessian_of_a_weight_held_by_reference() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2)
            self.held = [self.inner.weight]
            self.head = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(nn.functional.linear(x, self.held[0], self.inner.bias)))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Holds().double()
    plain = nn.Sequential(model.inner, nn.Tanh(), model.head)
    x, y = torch.linspace(-1, 1, 12).double().reshape(4, 3), torch.arange(4) % 3
    estimates = [
        Evidence(
            m, Categorical(), GaussianPrior(precision=8.0), estimator="full-N-C", num_data=4
        ).estimate(x, y)
        for m in (model, plain)
    ]
    assert estimates[0].log_det == pytest.approx(estimates[1].log_det, rel=1e-12)


@pytest.mark.parametrize("likelihood", [Gaussian, Categorical])
def test_sampled_fisher_has_the_fishers_gradient(likelihood: type[Likelihood]) -> None:
    """Also where the labels' distribution moves with the hyperparameter: many samples, one draw."""
    gradients = []
    for estimator in ("full-N-C", "full-N-2000-mc"):
        prior = GaussianPrior("scalar", precision=2.0)
        evidence, x, y = make(CASES["linear"], likelihood(), prior, estimator)
        evidence.backward(x, y)
        named = evidence.hyperparameters()
        gradients.append({name: p.grad for name, p in named.items()})
    for name, exact in gradients[0].items():
        assert exact is not None
        error = (gradients[1][name] - exact).norm()
        assert error < 0.1 * exact.norm() + 0.05, f"{name}: {error:.2f}"
