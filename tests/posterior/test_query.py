"""Gradients of predictions for inputs against central differences, and what has none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from network.test_second_derivatives import OnceSquare
from posterior.cases import case
from posterior.test_posterior import Masked
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evigrad import Posterior, Predictive
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import (
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from evigrad.posterior import STRUCTURES

STEP = 1e-5
QUANTITIES: dict[str, Callable[[Posterior, Any, Tensor], Tensor]] = {
    "mean": lambda p, x, y: p(x).mean,
    "covariance": lambda p, x, y: p(x).covariance,
    "variances": lambda p, x, y: p(x, correlated=False).std,
    "std": lambda p, x, y: p(x).std,
    "log_prob": lambda p, x, y: p(x, num_samples=5).log_prob(y),
    "sample": lambda p, x, y: p(x).sample(2),
    "joint mean": lambda p, x, y: p.joint(x).mean,
    "joint covariance": lambda p, x, y: p.joint(x).covariance,
    "joint sample": lambda p, x, y: p.joint(x[:, None], batch_dims=1).sample(2),
    "function": lambda p, x, y: p.draw()(x),
}
PROBABILITIES: dict[str, Callable[[Posterior, Any, Tensor], Tensor]] = {
    link: lambda p, x, y, link=link: p(x, link=link, num_samples=5).probabilities
    for link in ("monte-carlo", "probit", "plug-in")
}


class Cubic(Likelihood):
    """A custom likelihood, with only a density and its curvature."""

    name = "cubic"
    couples_outputs = False

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -0.5 * (f + f**3 - y).square().sum(1)

    def hessian(self, f: Tensor) -> Tensor:
        return (1.0 + 3.0 * f.square()).square().diag_embed()


def check(value: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare the gradient of a random combination of values with central differences."""
    leaf = x.clone().requires_grad_()
    result = value(leaf)
    factors = torch.randn(result.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((factors * result).sum(), leaf)
    direction = torch.randn_like(x)
    with torch.no_grad():
        torch.testing.assert_close(value(x), result, rtol=1e-12, atol=1e-12)
        ends = [(factors * value(x + step * direction)).sum() for step in (STEP, -STEP)]
    difference = (ends[0] - ends[1]) / (2 * STEP)
    torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-6, atol=1e-7)


@pytest.mark.each(1)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ("gaussian", "categorical", "custom"))
def test_gradients_for_inputs_are_those_of_differences(likelihood, structure):
    torch.manual_seed(0)
    small_case = case(Cubic() if likelihood == "custom" else likelihood)
    posterior = small_case.evidence.posterior(small_case.train, structure=structure)
    x, y = small_case.test, small_case.train[1][:5]
    quantities = QUANTITIES | (PROBABILITIES if likelihood == "categorical" else {})
    for quantity in quantities.values():
        check(lambda x, q=quantity: q(posterior, x, y), x)
    parameters = (*small_case.weights.values(), *small_case.evidence.hyperparameters().values())
    leaf = x.clone().requires_grad_()
    posterior(leaf).std.sum().backward()
    assert leaf.grad is not None and all(p.grad is None for p in parameters)


@pytest.mark.filterwarnings("ignore:The mean or the noise")
@pytest.mark.parametrize("likelihood", ("bernoulli", "poisson"))
def test_moments_of_targets_have_gradients(likelihood):
    small_case = case(likelihood)
    posterior = small_case.evidence.posterior(small_case.train, structure="diag")
    torch.manual_seed(0)
    check(lambda x: posterior(x).mean, small_case.test)
    check(lambda x: posterior(x).std, small_case.test)
    check(lambda x: posterior(x).log_prob(small_case.train[1][:5]), small_case.test)


# Three outputs and the layers' widths are those of ``case``.
DENSITIES: dict[str, tuple[Likelihood, Callable[[Tensor], Tensor], int]] = {
    "gaussian": (Gaussian(0.5), lambda y: y, 3),
    "student-t": (StudentT(0.5, degrees=4.0), lambda y: y, 3),
    "heteroscedastic": (HeteroscedasticGaussian(), lambda y: y[:, :1], 2),
    "ordinal": (Ordinal(3), lambda y: y[:, 0].clamp(0, 2).round().long(), 1),
    "poisson": (Poisson(), lambda y: y.exp().floor(), 3),
    "negative-binomial": (NegativeBinomial(), lambda y: y.exp().floor(), 3),
}


@pytest.mark.parametrize("link", ["monte-carlo", "plug-in"])
@pytest.mark.parametrize("name", DENSITIES)
def test_probabilities_and_quantiles_have_gradients(name, link):
    likelihood, targets, num_outputs = DENSITIES[name]
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, num_outputs))
    small_case = case(likelihood, model, structure="scalar")
    x, y = small_case.train
    y = targets(y)
    posterior = small_case.evidence.posterior((x, y), structure="diag")
    torch.manual_seed(0)
    check(lambda x: posterior(x, link=link, num_samples=5).cdf(y[:5]), small_case.test)
    leaf = small_case.test.clone().requires_grad_()
    if likelihood.has_whole_targets:  # constant almost everywhere
        assert not posterior(leaf, link=link, num_samples=5).quantile(0.3).requires_grad
    else:
        quantiles = (0.1, 0.5, 0.99)
        check(lambda x: posterior(x, link=link, num_samples=5).quantile(quantiles), small_case.test)
    for prediction in (posterior(leaf), posterior.joint(leaf)):
        with pytest.raises(ConfigurationError, match="Drawn targets have no derivative"):
            prediction.sample_targets(2)
        with torch.no_grad():
            assert not prediction.sample_targets(2).requires_grad


@pytest.mark.parametrize("likelihood", ("categorical", "poisson"))
@pytest.mark.filterwarnings("ignore:The mean or the noise")
def test_results_that_were_first_read_without_a_graph_have_one(likelihood):
    small_case = case(likelihood)
    posterior = small_case.evidence.posterior(small_case.train, structure="diag")
    leaf, gradients = small_case.test.clone().requires_grad_(), list[Tensor]()

    def values_of(p: Predictive) -> list[Tensor]:
        is_counted = likelihood == "poisson"
        return [p.sample(2), *([p.mean, p.std] if is_counted else [p.probabilities])]

    for is_read in (True, False):
        prediction = posterior(leaf)
        if is_read:
            with torch.no_grad():
                values_of(prediction)
        total = torch.stack([values.square().sum() for values in values_of(prediction)]).sum()
        gradients += torch.autograd.grad(total, leaf)
    torch.testing.assert_close(*gradients)


def test_a_cdf_without_a_derivative_raises_an_error():
    class Detached(StudentT):
        def cdf(self, f: Tensor, y: Tensor) -> Tensor:
            return super().cdf(f.detach(), y)

    small_case = case(Detached(0.5, degrees=4.0))
    posterior = small_case.evidence.posterior(small_case.train, structure="diag")
    prediction = posterior(small_case.test.clone().requires_grad_(), num_samples=5)
    for method, argument in ((prediction.cdf, 0.0), (prediction.quantile, 0.5)):
        with pytest.raises(ConfigurationError, match="cdf of Detached has no derivative"):
            method(argument)
        with torch.no_grad():
            method(argument)


def test_samples_have_gradients_if_eigenvalues_are_equal_or_zero():
    small_case = case(
        Gaussian(1.0), model=nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), structure="scalar"
    )
    posterior = small_case.evidence.posterior(small_case.train, structure="full")
    torch.manual_seed(0)
    values = torch.linalg.eigvalsh(posterior(small_case.test).covariance)
    assert (values[:, 2] - values[:, 0] < 1e-12).all()
    check(lambda x: posterior(x).sample(2), small_case.test)


def test_the_root_of_a_singular_covariance_has_a_gradient():
    thin = torch.randn(2, 4, 2).double().requires_grad_()  # of rank 2

    def product(a: Tensor) -> Tensor:
        root = Predictive(a[:, :, 0], a @ a.mT, Gaussian())._root
        return root @ root

    assert torch.autograd.gradcheck(product, thin, atol=1e-6)


class Unusual(nn.Module):
    """Weights without a closed form, dropout, and a part that runs again in a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: self.drop(self.first(x)).tanh(), x.flatten(1),
                            use_reentrant=False)  # fmt: skip
        assert isinstance(hidden, Tensor)
        return self.last(hidden)


@pytest.mark.parametrize("structure", ("full", "ntk"))
def test_weights_without_a_closed_form_get_no_gradient(structure):
    small_case = case("gaussian", model=Unusual())
    small_case.evidence.model.train()
    posterior = small_case.evidence.posterior(small_case.train, structure=structure)
    x = small_case.test.clone().requires_grad_()
    joint = posterior.joint(x)
    (posterior(x).std.sum() + joint.covariance.sum() + joint.sample(2).sum()).backward()
    assert x.grad is not None and all(w.grad is None for w in small_case.weights.values())
    torch.manual_seed(0)
    check(lambda x: posterior.joint(x).covariance, small_case.test)


def test_parts_of_trees_get_gradients():
    small_case = case("gaussian", model=Masked())
    (x, y), mask = small_case.train, torch.ones(9, 1, 4)
    posterior = small_case.evidence.posterior(({"values": x, "mask": mask}, y), structure="kfac")
    tokens = {"mask": mask[:5].long()}
    torch.manual_seed(0)
    check(lambda values: posterior(tokens | {"values": values}).covariance, small_case.test)


def test_only_inputs_that_require_a_gradient_have_a_graph():
    small_case = case("gaussian")
    posterior = small_case.evidence.posterior(small_case.train, structure="diag")
    x = small_case.test
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        without = [posterior(leaf), posterior.joint(leaf), posterior(x)]
    without += [posterior(x), posterior.joint(x)]
    assert not any(r.mean.requires_grad or r.covariance.requires_grad for r in without)
    assert not any(r.sample(2).requires_grad for r in without)
    joint = posterior.joint(leaf)
    with torch.no_grad():
        assert joint.covariance.requires_grad  # as when it was called
    covariance = joint.covariance.sum()
    (first,) = torch.autograd.grad(covariance, leaf, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(covariance, leaf)[0])
    with pytest.raises(ConfigurationError, match="only once with respect to the inputs"):
        torch.autograd.grad(posterior(leaf).std.sum(), leaf, create_graph=True)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.detach().flatten(1))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(OnceSquare.apply(self.first(x.flatten(1))))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Detached, "outputs have no derivative with"),
        (Twice, "'OnceSquare' cannot be differentiated"),
    ],
)
def test_models_without_derivatives_are_refused(model, words):
    small_case = case("gaussian", model=model())
    posterior = small_case.evidence.posterior(small_case.train, structure="full")
    x = small_case.test.clone().requires_grad_()
    for call in (posterior, lambda x: posterior.joint(x).mean, posterior.draw()):
        with pytest.raises(ConfigurationError, match=words):
            call(x)
    posterior(small_case.test)
