"""What a prediction says of targets: in closed form, by samples, and in limits."""

import math
import warnings

import numpy as np
import pytest
import torch
from posterior.cases import case
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import evigrad
from evigrad import Evidence
from evigrad.errors import ConfigurationError, EvigradWarning, InputError
from evigrad.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from evigrad.posterior import Predictive
from evigrad.priors import GaussianPrior


def predictive(likelihood: Likelihood, link: str = "monte-carlo", size: float = 1.0, **options):
    torch.manual_seed(0)
    mean, root = torch.randn(4, 3).double(), size * torch.randn(4, 3, 3).double()
    return Predictive(mean, root @ root.mT, likelihood, link, **options)


def test_regression_is_normal_with_noise_added():
    prediction = predictive(Gaussian([0.5, 1.0, 2.0]).double())
    noise, y = torch.tensor([0.25, 1.0, 4.0]).double(), torch.randn(4, 3).double()
    variance = prediction.covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(prediction.epistemic_variance, variance)
    torch.testing.assert_close(prediction.noise_variance, noise.expand(4, 3))
    torch.testing.assert_close(prediction.variance, variance + noise)
    torch.testing.assert_close(prediction.std.square(), variance + noise)
    expected = MultivariateNormal(prediction.mean, prediction.covariance + noise.diag()).log_prob(y)
    torch.testing.assert_close(prediction.log_prob(y), expected)
    with pytest.raises(ConfigurationError, match="Gaussian has no class probabilities"):
        _ = prediction.probabilities


@pytest.mark.parametrize("likelihood", (Categorical(), Bernoulli()))
@pytest.mark.parametrize("link", ("monte-carlo", "probit", "plug-in"))
def test_links_agree_where_nothing_is_uncertain(likelihood, link):
    prediction = predictive(likelihood, link, size=1e-7)
    y = torch.tensor([0, 1, 2, 0])
    y = y if isinstance(likelihood, Categorical) else torch.eye(3)[y].double()
    expected = likelihood.probabilities(prediction.mean)
    torch.testing.assert_close(prediction.probabilities, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(prediction.log_prob(y), likelihood.log_prob(prediction.mean, y))
    assert prediction.noise_variance is None and torch.equal(
        prediction.variance, prediction.epistemic_variance
    )


def test_samples_come_to_the_integral_and_probit_comes_near():
    """One label: the integral of a sigmoid under a normal density, by quadrature."""
    mean, std = torch.tensor([[1.0], [-3.0]]).double(), 2.0
    points = torch.linspace(-12, 12, 20001).double()
    density = (-0.5 * points.square()).exp() / math.sqrt(2 * math.pi)
    values = torch.sigmoid(mean + std * points)
    expected = torch.trapezoid(values * density, points)[:, None]
    covariance = torch.full((2, 1, 1), std**2).double()
    by_link = {
        link: Predictive(mean, covariance, Bernoulli(), link, 200_000) for link in
        ("monte-carlo", "probit")
    }  # fmt: skip
    torch.testing.assert_close(by_link["monte-carlo"].probabilities, expected, atol=3e-3, rtol=0)
    torch.testing.assert_close(by_link["probit"].probabilities, expected, atol=2e-2, rtol=0)
    for prediction in by_link.values():
        log_prob = prediction.log_prob(torch.ones(2, 1).double())
        torch.testing.assert_close(log_prob.exp(), prediction.probabilities[:, 0])


@pytest.mark.parametrize("link", ("bridge", "bridge-norm"))
def test_the_laplace_bridge_inverts_the_approximation_of_a_dirichlet(link):
    for k in (2, 3, 5):
        # The Laplace approximation in logits that add up to 0.
        alpha, centered = torch.linspace(0.4, 3.0, k).double(), torch.eye(k).double() - 1 / k
        f, covariance = centered @ alpha.log(), centered @ alpha.reciprocal().diag() @ centered
        expected = alpha / alpha.sum()
        if link == "bridge-norm":  # the bridge for logits with this mean variance
            scale = math.sqrt(k / 2) / covariance.diagonal().mean()
            unit = Predictive(f[None], scale * covariance[None], Categorical(), "bridge")
            expected = unit.probabilities[0]
            f, covariance = 3.0 * f, 9.0 * scale * covariance
        # A softmax does not depend on a shift of all logits.
        prediction = Predictive(f[None] + 3.0, covariance[None] + 7.0, Categorical(), link)
        torch.testing.assert_close(prediction.probabilities[0], expected)
        log_prob = prediction.log_prob(torch.tensor([1]))
        torch.testing.assert_close(log_prob.exp(), prediction.probabilities[:, 1])
    # Certain outputs have no Dirichlet distribution, but probabilities and finite gradients.
    outputs = torch.randn(2, 3).double().requires_grad_()
    variances = torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.2, 0.3]]).double()
    prediction = Predictive(outputs, variances, Categorical(), link)
    torch.testing.assert_close(prediction.probabilities[0], outputs[0].softmax(0))
    (gradient,) = torch.autograd.grad(prediction.probabilities[:, 0].sum(), outputs)
    assert bool(gradient.isfinite().all()) and bool((gradient[1] != 0).all())
    with pytest.raises(ConfigurationError, match="needs the likelihood Categorical, got Bernoulli"):
        _ = predictive(Bernoulli(), link).probabilities


def test_probabilities_of_samples_add_up_and_are_less_sure():
    prediction, sure = (
        predictive(Categorical(), num_samples=500),
        predictive(Categorical(), "plug-in"),
    )
    torch.testing.assert_close(prediction.probabilities.sum(1), torch.ones(4).double())
    assert bool((prediction.probabilities.amax(1) < sure.probabilities.amax(1)).all())
    y = torch.tensor([0, 1, 2, 0])
    expected = prediction.probabilities.gather(1, y[:, None]).squeeze(1).log()
    torch.testing.assert_close(prediction.log_prob(y), expected)


def test_samples_have_the_moments_and_their_generator_decides():
    prediction = predictive(Categorical())
    f = prediction.sample(100_000, 3)
    torch.testing.assert_close(f.mean(0), prediction.mean, atol=0.03, rtol=0.02)
    centred = f - f.mean(0)
    covariance = torch.einsum("nmc,nmd->mcd", centred, centred) / len(f)
    torch.testing.assert_close(covariance, prediction.covariance, atol=0.05, rtol=0.05)
    assert torch.equal(prediction.sample(5), prediction.sample(5))
    assert torch.equal(
        prediction.sample(5, 1), prediction.sample(5, torch.Generator().manual_seed(1))
    )
    assert not torch.equal(prediction.sample(5, 1), prediction.sample(5, 2))


def test_a_posterior_draws_by_its_generator():
    small_case = case()
    posterior = small_case.evidence.posterior(small_case.train, structure="full")
    state = torch.get_rng_state()
    x = small_case.test
    for draw in (
        lambda g: posterior(x, generator=g).probabilities,
        lambda g: posterior.sample(x, 4, g),
    ):
        assert torch.equal(draw(None), draw(None)) and torch.equal(draw(1), draw(1))
        assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert posterior.sample(x, 4).shape == (4, 5, 3)


@pytest.mark.filterwarnings("ignore:The mean or the noise")
@pytest.mark.parametrize("likelihood", (HeteroscedasticGaussian(), Poisson()))
def test_moments_of_targets_are_those_of_samples(likelihood):
    torch.manual_seed(1)
    root = 0.4 * torch.randn(3, 4, 4).double()
    prediction = Predictive(0.5 * torch.randn(3, 4).double(), root @ root.mT, likelihood, "plug-in")
    f = prediction.sample(400_000, 2).flatten(0, 1)
    mean, none, noise = likelihood.moments(f, torch.zeros_like(f).diag_embed())
    y = likelihood.sample(f, torch.Generator().manual_seed(0)).unflatten(0, (-1, 3))
    mean, noise = (moment.unflatten(0, (-1, 3)) for moment in (mean, noise))
    assert not none.count_nonzero() and prediction.noise_variance is not None
    torch.testing.assert_close(prediction.mean, mean.mean(0), atol=0.01, rtol=0.01)
    torch.testing.assert_close(prediction.epistemic_variance, mean.var(0), atol=0.02, rtol=0.03)
    torch.testing.assert_close(prediction.noise_variance, noise.mean(0), atol=0.02, rtol=0.02)
    torch.testing.assert_close(prediction.mean, y.mean(0), atol=0.02, rtol=0.02)
    torch.testing.assert_close(prediction.std, y.std(0), atol=0.02, rtol=0.03)


@pytest.mark.filterwarnings("ignore:The mean or the noise")
def test_the_means_of_a_heteroscedastic_network_are_its_own():
    mean, root = torch.randn(5, 6).double(), torch.randn(5, 6, 6).double()
    prediction = Predictive(mean, root @ root.mT, HeteroscedasticGaussian())
    assert torch.equal(prediction.mean, mean[:, :3]) and prediction.std.shape == (5, 3)
    assert torch.equal(
        prediction.epistemic_variance, prediction.covariance.diagonal(dim1=1, dim2=2)[:, :3]
    )


@pytest.mark.parametrize("likelihood", (HeteroscedasticGaussian(), Poisson()))
def test_densities_of_numbers_are_averaged_over_the_outputs(likelihood):
    """Two outputs: the integral over a grid of both."""
    y = torch.tensor([[2.0, 1.0]] if isinstance(likelihood, Poisson) else [[2.0]]).double()
    f, covariance = torch.tensor([[0.5, -0.4]]), torch.tensor([[[0.3, 0.1], [0.1, 0.2]]])
    prediction = Predictive(f.double(), covariance.double(), likelihood, num_samples=100_000)
    points = torch.linspace(-5, 5, 400).double()
    grid = torch.cartesian_prod(points, points)
    weights = (
        MultivariateNormal(prediction.outputs[0], prediction.covariance[0])
        .log_prob(grid)
        .softmax(0)
    )
    density = likelihood.log_prob(grid, y.expand(len(grid), -1)).exp()
    expected = (weights * density).sum().log().item()
    assert prediction.log_prob(y).item() == pytest.approx(expected, abs=0.01)
    plain = Predictive(prediction.outputs, prediction.covariance, likelihood, "plug-in")
    torch.testing.assert_close(plain.log_prob(y), likelihood.log_prob(prediction.outputs, y))
    with pytest.raises(ConfigurationError, match="probit' needs a classification likelihood"):
        Predictive(prediction.outputs, prediction.covariance, likelihood, "probit").log_prob(y)


def test_the_plug_in_prediction_is_that_of_certain_outputs() -> None:
    prediction = predictive(Poisson(exposure=True), num_samples=50)
    rates = prediction.outputs.exp()
    plug_in = prediction.plug_in
    torch.testing.assert_close(plug_in.mean, rates)
    torch.testing.assert_close(plug_in.variance, rates)
    torch.testing.assert_close(plug_in.with_conditions(exposure=3.0).mean, 3 * rates)
    y = Poisson(exposure=True).targets(torch.ones(4, 3), exposure=2.0)
    certain = Predictive(prediction.outputs, 0 * prediction.covariance, prediction.likelihood)
    torch.testing.assert_close(plug_in.log_prob(y), certain.log_prob(y))
    torch.testing.assert_close(
        predictive(Categorical()).plug_in.probabilities,
        predictive(Categorical(), "plug-in").probabilities,
    )
    noisy = Predictive(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, 2), HeteroscedasticGaussian())
    noise = noisy.plug_in.noise_variance
    assert noise is not None and noise.item() == pytest.approx(math.e)
    positions = Predictive(torch.zeros(2, 5, 1), torch.ones(2, 5, 1, 1), Poisson()).plug_in
    assert torch.equal(positions.mean, torch.ones(2, 5, 1))


@pytest.mark.parametrize(
    ("likelihood", "limit"),
    [
        (Poisson(), 1.0),
        (NegativeBinomial(), 1.0),
        (HeteroscedasticGaussian(), 4.0),  # of log variances: their deviations are √ of them
    ],
)
@pytest.mark.parametrize("correlated", [True, False])
def test_log_rates_that_are_too_uncertain_for_a_mean(
    likelihood: Likelihood, limit: float, correlated: bool
) -> None:
    def mean(variance: float) -> Tensor:
        variances = torch.tensor([[0.1, 0.1], [0.1, variance]])
        covariance = variances.diag_embed() if correlated else variances
        return Predictive(torch.zeros(2, 2), covariance, likelihood).mean

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean(limit)
        for unaffected in (Gaussian(), StudentT(), Categorical()):
            assert predictive(unaffected, size=50.0).std.isfinite().all()
        prediction = Predictive(torch.zeros(2, 2), 60 * torch.ones(2, 2, 2), likelihood)
        assert prediction.plug_in.std.isfinite().all()
        y = torch.ones(2, 1 if limit == 4.0 else 2)
        assert prediction.log_prob(y).isfinite().all()
    with pytest.warns(EvigradWarning, match=r"For 1 of 2 .*at most .*prediction.plug_in"):
        mean(limit + 0.1)


def test_totals_of_counts_are_sums_of_plug_in_rates() -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 3, dtype=torch.float64)
    y = torch.poisson((x[:, :1] - 1).exp())
    schedule = evigrad.Schedule(epochs=100)
    model, lr = nn.Linear(3, 1).double(), evigrad.Optimization(lr=0.05)
    result = evigrad.fit(
        model, (x, y), likelihood="poisson", schedule=schedule, optimization=lr, progress=False
    )
    prediction = result.evidence.posterior((x, y))(x)
    total = prediction.plug_in.mean.sum().item()
    assert total == pytest.approx(y.sum().item(), rel=0.05)
    assert prediction.mean.sum().item() > 1.01 * total


class Counts(Likelihood):
    name, couples_outputs = "counts", False

    def log_prob(self, f, y):
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(1)


class Laplacian(Gaussian):
    def log_prob(self, f, y):
        return -(y - f).abs().sum(1)


def test_a_density_of_ones_own_is_averaged_over_samples():
    prediction, y = predictive(Counts(), num_samples=1000), torch.ones(4, 3).double()
    f = prediction.sample(1000)
    log_probs = torch.stack([Counts().log_prob(one, y) for one in f])
    torch.testing.assert_close(prediction.log_prob(y), log_probs.logsumexp(0) - math.log(1000))
    with pytest.raises(ConfigurationError, match="Counts has no class probabilities"):
        _ = prediction.probabilities


def test_an_inherited_noise_is_that_of_another_density():
    prediction = predictive(Laplacian().double())
    assert prediction.noise_variance is None
    with pytest.raises(InputError, match="shape of the outputs"):
        prediction.log_prob(torch.zeros(4).double())


def test_arrays_and_targets_without_a_column_as_fit_takes_them() -> None:
    torch.manual_seed(0)
    x, y = np.random.default_rng(0).normal(size=(30, 2)), np.arange(30.0)
    model = nn.Linear(2, 1)
    evidence = Evidence(model, Gaussian(), GaussianPrior(), estimator="full-N-C", num_data=30)
    posterior = evidence.posterior((x, y), structure="full")
    tensors = torch.tensor(x).float(), torch.tensor(y).float()
    expected = evidence.posterior((tensors[0], tensors[1][:, None]), structure="full")
    prediction = posterior(x[:5])
    assert torch.equal(prediction.std, expected(tensors[0][:5]).std)
    with_column = prediction.log_prob(tensors[1][:5, None])
    assert torch.equal(prediction.log_prob(tensors[1][:5]), with_column)
    gap = evidence.mode_gap((x, y), structure="full")
    assert gap == pytest.approx(evidence.mode_gap((tensors[0], tensors[1][:, None])), rel=1e-5)
    with pytest.raises(InputError, match="Targets must have the shape"):
        prediction.log_prob(torch.zeros(5, 2))
