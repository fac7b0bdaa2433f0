"""The model for BoTorch: distributions, updates, and BoTorch's own acquisition functions."""

from typing import Any

import pytest
import torch
from late import Late, needs
from peak_bytes import PeakBytes
from torch import Tensor, nn

from evigrad import Evidence, Schedule
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Gaussian, KnownNoise
from evigrad.priors import GaussianPrior

pytestmark = [
    needs("botorch"),
    pytest.mark.filterwarnings("ignore::botorch.exceptions.BotorchWarning"),
]
acquisition, generation = Late("botorch.acquisition"), Late("botorch.generation")
objective, optim = Late("botorch.acquisition.objective"), Late("botorch.optim")
sampling, transforms = Late("botorch.sampling"), Late("botorch.models.transforms")
ours = Late("evigrad.botorch")
# What BoTorch tests its own models with.
helpers, testing = Late("botorch.utils.test_helpers"), Late("botorch.utils.testing")

BOUNDS = torch.tensor([[0.0, 0.0], [1.0, 2.0]]).double()


def data(n: int = 8, m: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.rand(n, 2).double() * BOUNDS[1]
    return x, 3 + 2 * torch.stack([(x[:, 0] * (i + 1) + x[:, 1]).sin() for i in range(m)], 1)


def made(m: int = 1, noise: Tensor | None = None, structure: str = "ntk", hidden: int = 6) -> Any:
    """A model without training, with both transforms."""
    x, y = data(m=m)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, m)).double()
    inputs, outcomes = transforms.Normalize(2), transforms.Standardize(m)
    likelihood = Gaussian(0.3, num_outputs=m) if noise is None else KnownNoise(0.3, num_outputs=m)
    targets, variance = outcomes(y, noise)
    mean_variance = None if variance is None else variance.mean(0)
    if variance is not None:
        targets = likelihood.targets(targets, noise=variance.sqrt())
    evidence = Evidence(network, likelihood, GaussianPrior(), estimator="ntk-N-C", num_data=8)
    posterior = evidence.posterior((inputs(x), targets), structure=structure)
    return ours.EvidenceModel(
        posterior, input_transform=inputs, outcome_transform=outcomes, known_variance=mean_variance
    )


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("m", (1, 2))
def test_distributions_are_those_of_the_posterior(m):
    model, (x, y) = made(m), data(m=m)
    test = (torch.rand(3, 4, 2).double() * BOUNDS[1]).requires_grad_()
    joint = model.laplace.joint((test - x.amin(0)) / (x.amax(0) - x.amin(0)), batch_dims=1)
    scale, batch = y.std(0), model.posterior(test)
    close(batch.mean, y.mean(0) + scale * joint.mean)
    covariance = joint.covariance * scale[:, None, None] * scale
    close(batch.distribution.covariance_matrix, covariance.reshape(3, 4 * m, 4 * m))
    noisy = model.posterior(test, observation_noise=True)
    close(noisy.variance - batch.variance, (0.09 * scale.square()).expand(3, 4, m))
    fixed = model.posterior(test, observation_noise=torch.full((4, m), 0.5).double())
    close(fixed.variance - batch.variance, (0.5 * scale.square()).expand(3, 4, m))
    (gradient,) = torch.autograd.grad(batch.rsample(torch.Size([2])).sum(), test)
    assert gradient.abs().min() > 0 and model.batch_shape == ()

    weights = torch.ones(m).double()
    summed = model.posterior(
        test, posterior_transform=objective.ScalarizedPosteriorTransform(weights)
    )
    close(summed.mean[..., 0], batch.mean.sum(-1))
    last = model.subset_output([m - 1])
    assert last.num_outputs == 1 and model.num_outputs == m
    for part in (last.posterior(test), model.posterior(test, output_indices=[m - 1])):
        close(part.mean, batch.mean[..., -1:])
        close(part.variance, batch.variance[..., -1:])
    if m > 1:
        close(last.posterior(test, observation_noise=True).variance, noisy.variance[..., -1:])
        with pytest.raises(ConfigurationError, match="must have all 2 outputs"):
            last.condition_on_observations(x, y[:, :1])


def test_observations_and_fantasies_are_those_of_the_posterior():
    model, y = made(2), data(m=2)[1]
    new, values = torch.rand(3, 2, 2).double(), y.mean(0) + torch.randn(4, 3, 2, 2).double()
    conditioned = model.condition_on_observations(new, values)
    assert conditioned.batch_shape == (4, 3)
    test = torch.rand(4, 3, 5, 2).double()
    batch = conditioned.posterior(test)
    for s, b in ((0, 0), (3, 2)):
        alone = model.condition_on_observations(new[b], values[s, b]).posterior(test[s, b])
        close(batch.mean[s, b], alone.mean)
        close(batch.distribution.covariance_matrix[s, b], alone.distribution.covariance_matrix)
    sampler = sampling.SobolQMCNormalSampler(torch.Size([4]), seed=0)
    fantasies = model.fantasize(new, sampler)
    expected = sampler(model.posterior(new, observation_noise=True))
    conditioned = model.condition_on_observations(new, expected)
    close(fantasies.posterior(test).mean, conditioned.posterior(test).mean)
    with pytest.raises(ConfigurationError, match="noise needs a model with known noise"):
        model.condition_on_observations(new, values, noise=torch.ones(2))


def test_known_noise_is_the_noise_of_each_target():
    x, y = data()
    variances = torch.linspace(0.1, 2, 8).double()[:, None]
    model = made(noise=variances)
    later, of_later = torch.rand(2, 2).double(), torch.tensor([[0.5], [1.5]]).double()
    scale = y.std().square()
    conditioned = model.condition_on_observations(later, y[:2], noise=of_later / scale)
    likelihood = model.likelihood
    targets = likelihood.targets((y[:2] - y.mean()) / y.std(), noise=(of_later / scale).sqrt())
    inputs = model.transform_inputs(later)
    expected = model.laplace.update(inputs, targets).joint(inputs)
    close(conditioned.posterior(later).mean, y.mean() + y.std() * expected.mean)
    noise = (
        model.posterior(later, observation_noise=True).variance - model.posterior(later).variance
    )
    close(noise, (0.09 * scale + variances.mean()).expand(2, 1))
    fantasies = model.fantasize(later, sampling.SobolQMCNormalSampler(torch.Size([3]), seed=0))
    assert fantasies.posterior(later).variance.max() < model.posterior(later).variance.max()


@pytest.mark.parametrize("name", ("qLogNEI", "qUCB", "qKG", "LogEI"))
def test_acquisition_functions_are_optimized(name):
    model, (x, y) = made(structure="kfac" if name == "qUCB" else "ntk"), data()
    torch.manual_seed(0)
    sampler = sampling.SobolQMCNormalSampler(torch.Size([16]), seed=0)
    function = {
        "qLogNEI": lambda: acquisition.qLogNoisyExpectedImprovement(
            model, x[:4], sampler=sampler, prune_baseline=True
        ),
        "qUCB": lambda: acquisition.qUpperConfidenceBound(model, beta=2.0, sampler=sampler),
        "qKG": lambda: acquisition.qKnowledgeGradient(model, num_fantasies=3),
        "LogEI": lambda: acquisition.LogExpectedImprovement(model, best_f=y.max()),
    }[name]()
    q = 1 if name == "LogEI" else 2
    start = torch.rand(3, function.get_augmented_q_batch_size(q) if name == "qKG" else q, 2)
    leaf = (start.double() * BOUNDS[1]).requires_grad_()
    value, step = function(leaf), torch.randn(leaf.shape).double()
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    with torch.no_grad():
        ends = [function(leaf + t * step).sum() for t in (1e-5, -1e-5)]
    torch.testing.assert_close(
        (gradient * step).sum(), (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=1e-6
    )
    candidates, _ = optim.optimize_acqf(
        function, BOUNDS, q=q, num_restarts=2, raw_samples=4, options={"maxiter": 2}
    )
    assert candidates.shape == (q, 2)
    assert testing.get_max_violation_of_bounds(candidates[None], BOUNDS) <= 0


def test_samples_have_the_moments_of_the_distribution():
    model, sample_shape = made(), torch.Size([20_000])
    distribution = model.posterior(torch.rand(3, 2).double())
    torch.manual_seed(0)
    mean, covariance = helpers.get_sample_moments(
        distribution.rsample(sample_shape)[..., 0], sample_shape
    )
    expected = distribution.distribution.covariance_matrix
    variance = float(expected.diagonal().max())
    torch.testing.assert_close(
        mean, distribution.mean[:, 0], rtol=0, atol=5 * (variance / 20_000) ** 0.5
    )
    torch.testing.assert_close(
        covariance, expected, rtol=0, atol=5 * variance * (2 / 20_000) ** 0.5
    )


def test_many_candidates_take_less_than_a_gibibyte():
    model = made(hidden=700)  # has more weights than the default network
    model.posterior(torch.rand(2, 1, 2).double())
    with PeakBytes() as peak, torch.no_grad():
        assert model.posterior(torch.rand(10_000, 1, 2).double()).variance.shape == (10_000, 1, 1)
    assert peak.most < 2**30


def test_thompson_sampling():
    model, _ = made(), data()
    candidates = torch.rand(50, 2).double()
    chosen = generation.MaxPosteriorSampling(model, replacement=False)(candidates, num_samples=3)
    assert len({tuple(row) for row in chosen.tolist()}) == 3
    function = model.laplace.draw(1)
    inputs = model.transform_inputs(candidates)
    close(function(inputs), model.laplace.joint(inputs).sample(1, 1)[0])


def test_a_model_is_trained_and_learns_its_noise():
    x, y = data(30, 2)
    model = ours.EvidenceModel.fit(x[:20], y[:20], schedule=Schedule(epochs=60, batch_size=20))
    error = (model.posterior(x[20:]).mean - y[20:]).square().mean().sqrt()
    assert error < 0.8 * y.std() and bool((model.likelihood.noise != 0.1).all())
    again = ours.EvidenceModel.fit(
        x[:20], y[:20], torch.full_like(y[:20], 0.01), structure="last-layer",
        schedule=Schedule(epochs=3, batch_size=20),
    )  # fmt: skip
    close(again.known_variance, 0.01 / y[:20].var(0))
