"""Weights as known noises: right where they average 1, and a warning where they do not."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.small_runs import SMALL, without_estimator

import evigrad
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Gaussian, Weighted
from evigrad.priors import GaussianPrior
from evigrad.training.settings import grouped

N = 12


class KnownNoise(Gaussian):
    """Normal noise σ/√w, with w behind each target."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        sigma = self.log_noise.exp() / y[:, 1:].sqrt()
        return torch.distributions.Normal(f, sigma).log_prob(y[:, :1]).sum(1)


def data() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True)
    return x, y, torch.rand(N, generator=generator, dtype=torch.float64) + 0.1


def test_weights_of_mean_one_are_known_noises() -> None:
    """log N(y|f, σ²/w) and w log N(y|f, σ²) differ by what no hyperparameter changes."""
    x, y, weights = data()
    weights = weights / weights.mean()
    model = nn.Linear(3, 1).double()
    likelihood = Weighted(Gaussian(0.3))
    targets = likelihood.targets(y, weights)
    known_noise = KnownNoise(0.3)
    gradients, scores = [], []
    for density in (likelihood, known_noise):
        f = model(x).detach().requires_grad_()
        total = density.log_prob(f, targets).sum()
        score, gradient = torch.autograd.grad(total, [f, *density.parameters()])
        gradients.append(gradient)
        scores.append(score)
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(*scores)  # and so its derivative, the curvature
    one = evigrad.Evidence(
        model, likelihood, GaussianPrior("scalar"), estimator="full-N-C", num_data=N
    )
    block = next(iter(one.blocks((x, targets))))
    rows = torch.cat([x, torch.ones(N, 1).double()], 1) * weights.sqrt()[:, None] / 0.3
    expected = torch.logdet(torch.eye(4).double() + rows.mT @ rows)
    assert one.estimate(block).log_det == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("factor", "learnable", "is_warned"),
    [(50.0, True, True), (1.0, True, False)] + [(50.0, False, False)],
)
def test_weights_of_another_mean(factor: float, learnable: bool, is_warned: bool) -> None:
    x, y, weights = data()
    likelihood = Weighted(Gaussian(learnable=learnable))
    targets = likelihood.targets(y, factor * weights / weights.mean())
    settings: dict[str, Any] = grouped(without_estimator(SMALL))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EvigradWarning)
        evigrad.fit(nn.Linear(3, 1).double(), (x, targets), likelihood=likelihood, **settings)
    words = "The positive weights average 50"
    assert [str(warning.message)[: len(words)] for warning in caught] == [words] * is_warned
    assert all(warning.filename == __file__ for warning in caught)


def test_targets_that_do_not_count_are_not_averaged() -> None:
    """Weights average 1 where targets count, and are zero at the other positions."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, 3, generator=generator, dtype=torch.float64)
    weights = torch.rand(N, 4, generator=generator, dtype=torch.float64) + 0.1
    weights[:, 2:] = 0.0
    weights = weights / weights[:, :2].mean()
    likelihood = Weighted(Gaussian())
    for inputs, w in ((x, weights), (x[:, 0], weights[:, 0] / weights[6:, 0].mean())):
        if w.ndim == 1:
            w[:6] = 0.0
        targets = likelihood.targets(inputs.sum(-1, keepdim=True), w)
        evigrad.fit(
            nn.Linear(3, 1).double(),
            (inputs, targets),
            likelihood=likelihood,
            **grouped(without_estimator(SMALL)),
        )


def test_two_values_among_targets_that_count() -> None:
    """Targets of the left-out positions have other values, and are not looked at."""
    x = torch.randn(N, 4, 3, generator=torch.Generator().manual_seed(0)).double()
    y = (torch.arange(4 * N).view(N, 4, 1) % 2).double() - 0.5
    weights = torch.ones(N, 4)
    y[:, 2:], weights[:, 2:] = 0.3, 0.0
    likelihood = Weighted(Gaussian())
    with pytest.warns(EvigradWarning, match="has only two values"):
        evigrad.fit(
            nn.Linear(3, 1).double(),
            (x, likelihood.targets(y, weights)),
            likelihood=likelihood,
            **grouped(without_estimator(SMALL)),
        )


def test_repetitions_are_left_alone() -> None:
    x, y, _ = data()
    likelihood = Weighted(Gaussian())
    targets = likelihood.targets(y, torch.arange(N) % 4)
    evigrad.fit(
        nn.Linear(3, 1).double(),
        (x, targets),
        likelihood=likelihood,
        **grouped(without_estimator(SMALL)),
    )
