"""The variational posterior of the linearized network, against dense matrices and quadrature."""

import io
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as for_any
from hypothesis import strategies as st
from posterior.cases import Case, case
from properties import examples
from torch import Tensor, nn

import evigrad
from evigrad import reference
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Bernoulli
from evigrad.posterior import variational
from evigrad.priors import GaussianPrior


@pytest.fixture
def to_convergence(monkeypatch):
    monkeypatch.setattr(variational, "TOLERANCE", 1e-13)
    monkeypatch.setattr(variational, "MOST_STEPS", 100)


def dense_solution(
    small_case: Case, names: list[str], diagonal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The bound, μ − w* and Σ of the fixed point, by averages over the same nodes."""
    evidence, (x, y) = small_case.evidence, small_case.train
    chosen = small_case.span(names)
    rows = small_case.rows(x)[:, :, chosen]
    f = evidence.model(x).detach()
    precision = small_case.precision()[chosen]
    weights = reference.vector(small_case.weights, small_case.weights).detach()[chosen]
    points, shares = variational.nodes(f.shape[1])
    shift, sites = torch.zeros_like(weights), torch.zeros(*f.shape, f.shape[1]).double()
    bound, sigma = torch.tensor(0.0), precision.diag()
    for _ in range(80):
        inverse = precision.diag() + torch.einsum("ncp,ncd,ndq->pq", rows, sites, rows)
        newton = torch.linalg.inv(inverse)
        sigma = inverse.diagonal().reciprocal().diag() if diagonal else newton
        values, vectors = torch.linalg.eigh(rows @ sigma @ rows.mT)
        root = vectors @ values.clamp(min=0).sqrt().diag_embed() @ vectors.mT
        draws = (f + rows @ shift) + torch.einsum("ncd,kd->knc", root, points)
        flat, times = draws.flatten(0, 1).requires_grad_(), len(points)
        repeated = y.repeat(times, *[1] * (y.ndim - 1))
        of_draws = (shares / evidence.temperature).repeat_interleave(len(f))
        expected = (of_draws * evidence.likelihood.log_prob(flat, repeated)).sum()
        score = torch.autograd.grad(expected, flat)[0].view(times, *f.shape).sum(0)
        hessians = evidence.likelihood.hessian(flat.detach()).detach()
        curvature = (of_draws[:, None, None] * hessians).view(times, *sites.shape).sum(0)
        of_prior = precision * (weights + shift)
        divergence = (of_prior * (weights + shift)).sum() + (precision * sigma.diag()).sum()
        divergence = divergence - len(weights) - torch.logdet(sigma) - precision.log().sum()
        bound = expected - 0.5 * divergence
        gradient = torch.einsum("ncp,nc->p", rows, score) - of_prior
        sites = 0.2 * sites + 0.8 * curvature
        shift = shift + 0.8 * newton @ gradient
    return bound.detach(), shift, sigma


@pytest.mark.each(1)
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@pytest.mark.parametrize("structure", ["full", "ntk", "last-layer", "diag"])
@pytest.mark.usefixtures("to_convergence")
def test_the_fit_is_the_fixed_point_of_dense_matrices(likelihood, structure, monkeypatch):
    # Accurate quadrature, because the best value of an inaccurate one is not at the fixed point.
    line, shares = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(9))
    points = torch.cartesian_prod(line, line, line)
    products = torch.cartesian_prod(*[shares / shares.sum()] * 3).prod(1)
    monkeypatch.setattr(variational, "nodes", lambda _: (points, products))
    small_case = case(likelihood, temperature=1.5)
    posterior = small_case.evidence.posterior(
        small_case.train, structure=structure, inference="variational"
    )
    names = posterior.parameters
    bound, shift, sigma = dense_solution(small_case, names, structure == "diag")
    rows = small_case.rows(small_case.test)[:, :, small_case.span(names)]
    prediction = posterior(small_case.test)
    mean = small_case.evidence.model(small_case.test).detach() + rows @ shift
    assert posterior.bound == pytest.approx(float(bound), abs=1e-6)
    assert torch.allclose(prediction.outputs, mean, atol=1e-6)
    assert torch.allclose(prediction.covariance, rows @ sigma @ rows.mT, atol=1e-6)


@pytest.mark.each(1)
@pytest.mark.parametrize("structure", ["full", "ntk", "last-layer", "kfac", "diag"])
@pytest.mark.parametrize("likelihood", ["categorical", "poisson"])
def test_the_bound_never_falls(likelihood, structure):
    small_case = case(likelihood)
    posterior = small_case.evidence.posterior(
        small_case.train, structure=structure, inference="variational"
    )
    assert posterior.bound == posterior.bounds[-1] > posterior.bounds[0]
    assert all(a < b for a, b in zip(posterior.bounds, posterior.bounds[1:], strict=False))


@pytest.mark.parametrize("structure", ["full", "ntk", "kfac"])
def test_rows_that_do_not_fit_into_memory_are_computed_again(structure, monkeypatch):
    small_case = case("categorical")
    options = {"structure": structure, "inference": "variational"}
    fitted = small_case.evidence.posterior(small_case.train, **options)
    monkeypatch.setattr(variational, "_KEPT_SHARE", 0.0)
    again = small_case.evidence.posterior(small_case.train, **options)
    assert again.bounds == pytest.approx(fitted.bounds, abs=1e-9)


@pytest.mark.usefixtures("to_convergence")
def test_kfac_is_the_best_diagonal_along_the_eigenvectors_of_laplace():
    # The inputs have orthogonal columns, and the other inputs are a rotation of them.
    torch.manual_seed(0)
    x = torch.linalg.qr(torch.randn(8, 3).double()).Q * torch.tensor([1.0, 3.0, 5.0])
    rotation = torch.linalg.qr(torch.randn(3, 3).double()).Q
    y, weight = (torch.rand(8, 1) < 0.5).double(), torch.randn(1, 3).double()
    predictions = list[evigrad.Predictive]()
    for structure, turn in (("diag", torch.eye(3).double()), ("kfac", rotation)):
        model = nn.Linear(3, 1, bias=False).double()
        model.weight.data = weight @ turn
        prior = GaussianPrior(precision=2.0)
        evidence = evigrad.Evidence(model, Bernoulli(), prior, estimator="full-N-C", num_data=8)
        fitted = evidence.posterior((x @ turn, y), structure=structure, inference="variational")
        predictions.append(fitted(x @ turn))
    diagonal, kfac = predictions
    assert torch.allclose(kfac.outputs, diagonal.outputs, atol=1e-6)
    assert torch.allclose(kfac.covariance, diagonal.covariance, atol=1e-6)


@pytest.mark.usefixtures("to_convergence")
@pytest.mark.parametrize("structure", ["kfac", "diag", "full"])
def test_precisions_along_an_axis_are_scales_of_the_inputs(structure: str):
    torch.manual_seed(0)
    x, y = torch.randn(8, 3).double(), (torch.rand(8, 1) < 0.5).double()
    weight, root = torch.randn(1, 3).double(), torch.tensor([0.5, 2.0, 4.0]).double()
    predictions, bounds = list[evigrad.Predictive](), []
    for groups, scale in (({"inputs": {"weight": 1}}, 1.0), ("layerwise", root)):
        model = nn.Linear(3, 1, bias=False).double()
        model.weight.data = weight * scale
        prior = GaussianPrior(groups)
        evidence = evigrad.Evidence(model, Bernoulli(), prior, estimator="full-N-C", num_data=8)
        assert prior.log_precision is not None
        if groups != "layerwise":
            prior.log_precision.data.copy_(root.square().log())
        inputs = x / scale
        fitted = evidence.posterior((inputs, y), structure=structure, inference="variational")
        bounds.append(fitted.bound)
        predictions.append(fitted(inputs))
    along, scaled = predictions
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-9)
    torch.testing.assert_close(along.outputs, scaled.outputs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(along.covariance, scaled.covariance, rtol=1e-6, atol=1e-7)


@examples(6)
@for_any(
    st.lists(st.tuples(st.floats(-4, 4), st.floats(-4, 4), st.booleans()), min_size=1, max_size=6),
    st.floats(-3, 3),
    st.sampled_from([1, 2]),
)
def test_the_bound_is_below_the_evidence_by_quadrature(rows, log_precision, size):
    x = torch.tensor([row[:size] for row in rows]).double()
    y = torch.tensor([[float(row[2])] for row in rows]).double()
    model = nn.Linear(size, 1, bias=False).double()
    prior = GaussianPrior(precision=math.exp(log_precision))
    evidence = evigrad.Evidence(model, Bernoulli(), prior, estimator="full-N-C", num_data=len(x))
    posterior = evidence.posterior((x, y), structure="full", inference="variational")
    line, shares = (torch.as_tensor(a) for a in np.polynomial.hermite_e.hermegauss(150))
    shares = shares.log() - shares.sum().log()
    w, log_share = line[:, None], shares
    if size == 2:
        w = torch.cartesian_prod(line, line)
        log_share = (shares[:, None] + shares).flatten()
    f = x @ w.mT * math.exp(-0.5 * log_precision)
    log_prob = -torch.nn.functional.softplus(torch.where(y > 0, -f, f)).sum(0)
    exact = float((log_prob + log_share).logsumexp(0))
    assert posterior.bound is not None
    assert posterior.bound <= exact + 1e-4


@pytest.mark.parametrize("structure", ["full", "ntk"])
def test_gaussian_noise_gives_the_exact_posterior_of_the_linearized_network(structure):
    small_case = case("gaussian")
    (x, y), prior = small_case.train, small_case.precision()
    posterior = small_case.evidence.posterior((x, y), structure=structure, inference="variational")
    rows = small_case.rows(x).flatten(0, 1)
    weights = reference.vector(small_case.weights, small_case.weights).detach()
    variance = small_case.evidence.likelihood.noise_variance(y)
    assert variance is not None
    noise = variance.detach().expand_as(y).flatten()
    residual = (y - small_case.evidence.model(x).detach()).flatten() + rows @ weights
    spread = (rows / prior) @ rows.mT + noise.diag()
    normal = torch.distributions.MultivariateNormal(torch.zeros_like(residual), spread)
    assert posterior.bound == pytest.approx(float(normal.log_prob(residual)), abs=1e-9)
    shift = rows.mT @ torch.linalg.solve(spread, residual) / prior - weights
    expected = small_case.evidence.model(small_case.test).detach()
    expected = expected + small_case.rows(small_case.test) @ shift
    assert torch.allclose(posterior(small_case.test).mean, expected, atol=1e-9)


@pytest.mark.parametrize("structure", ["ntk", "kfac", "diag"])
def test_joint_samples_weights_gradients_and_states_have_the_moved_mean(structure):
    small_case = case("categorical")
    x, evidence = small_case.test, small_case.evidence
    fitted = evidence.posterior(small_case.train, structure=structure, inference="variational")
    prediction, weights = fitted(x), fitted.sample_weights(3, 1)
    assert torch.allclose(fitted.joint(x).mean, prediction.outputs)
    start = reference.vector(small_case.weights, small_case.weights).detach()
    flat = torch.cat([weights[name].flatten(1) for name in small_case.weights], 1) - start
    linear = evidence.model(x).detach() + (small_case.rows(x) @ flat.mT).movedim(2, 0)
    assert torch.allclose(fitted.joint(x).sample(3, 1), linear)
    file = io.BytesIO()
    torch.save(fitted.state_dict(), file)
    file.seek(0)
    again = evidence.posterior(state=torch.load(file, weights_only=True))
    assert torch.equal(again(x).outputs, prediction.outputs)
    assert again.bounds == fitted.bounds
    leaf, step = x[:1].clone().requires_grad_(), 1e-5 * torch.ones_like(x[:1])
    (slope,) = torch.autograd.grad(fitted(leaf).outputs.sum(), leaf)
    rise = (fitted(x[:1] + step).outputs - fitted(x[:1] - step).outputs).sum()
    assert float(2 * (slope * step).sum()) == pytest.approx(float(rise), rel=1e-5)


def test_what_cannot_be_fitted_is_refused():
    small_case = case("categorical")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"inference": "exact"}, "inference must be"),
        ({"structure": "ntk", "rows": 5, "inference": "variational"}, "rows is only for inference"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            small_case.evidence.posterior(small_case.train, **options)
