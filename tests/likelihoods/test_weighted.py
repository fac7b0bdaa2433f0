"""A datum of weight w against the same datum w times."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evigrad
from evigrad.errors import InputError
from evigrad.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Weighted,
)
from evigrad.priors import GaussianPrior

WEIGHTS = torch.tensor([2, 0, 1, 3, 1])
N, C = len(WEIGHTS), 2
LIKELIHOODS = [Categorical, Bernoulli, Gaussian, HeteroscedasticGaussian, Poisson]


def data(likelihood: Likelihood) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    f = torch.randn(N, C, generator=generator, dtype=torch.float64)
    return x, likelihood.double().sample(f, generator)


class Scaled(nn.Module):
    """A perceptron with a hyperparameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, C)).double()
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x * self.scale.exp())


def evidence(likelihood: Likelihood, estimator: str, num_data: int) -> evigrad.Evidence:
    prior = GaussianPrior("layerwise", precision=2.0)
    return evigrad.Evidence(
        Scaled(),
        likelihood,
        prior,
        estimator=estimator,
        num_data=num_data,
        hyperparameters=["scale"],
        generator=0,
    )


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", ["full-N-C", "ntk-N-C", "diag-N-C", "ntk-N-1-ef"])
@pytest.mark.parametrize("kind", LIKELIHOODS, ids=lambda kind: kind.name)
def test_weights_are_repetitions(kind: type[Likelihood], estimator: str) -> None:
    x, y = data(kind())
    weighted = Weighted(kind())
    one = evidence(weighted, estimator, N)
    other = evidence(kind(), estimator, int(WEIGHTS.sum()))
    estimate = one.backward([(x, weighted.targets(y, WEIGHTS))])
    repeated = (part.repeat_interleave(WEIGHTS, 0) for part in (x, y))
    expected = other.backward([tuple(repeated)])
    assert estimate.log_evidence == pytest.approx(expected.log_evidence, rel=1e-10)
    assert estimate.log_det == pytest.approx(expected.log_det, rel=1e-10)
    others = {n.replace("likelihood.", ""): p.grad for n, p in other.hyperparameters().items()}
    for name, parameter in one.hyperparameters().items():
        of_other = others[name.replace("likelihood.", "")]
        assert parameter.grad is not None
        assert of_other is not None
        torch.testing.assert_close(parameter.grad * N, of_other * float(WEIGHTS.sum()))


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", ["ntk-2-1", "ntk-4-rows-anchored", "kfac-2-C", "kfac-N-1-mc"])
@pytest.mark.parametrize("kind", LIKELIHOODS, ids=lambda kind: kind.name)
def test_weights_of_one_change_nothing(kind: type[Likelihood], estimator: str) -> None:
    x, y = data(kind())
    weighted = Weighted(kind())
    one, other = evidence(weighted, estimator, N), evidence(kind(), estimator, N)
    targets = weighted.targets(y, torch.ones(N))
    for block, of_other in zip(
        one.blocks((x, targets)).take(3), other.blocks((x, y)).take(3), strict=True
    ):
        assert one.backward(block).log_evidence == pytest.approx(
            other.backward(of_other).log_evidence, rel=1e-10
        )
    torch.testing.assert_close(one.map_loss(x, targets), other.map_loss(x, y))
    assert weighted.metrics(Scaled()(x), targets) == kind().double().metrics(Scaled()(x), y)


def test_curvature_of_kfac_is_weighted() -> None:
    x, y = data(Gaussian())
    weighted = Weighted(Gaussian())
    one = evidence(weighted, "kfac-N-C", N)
    light, heavy = (
        one.estimate([(x, weighted.targets(y, torch.full((N,), w)))]) for w in (1.0, 4.0)
    )
    assert heavy.log_det > light.log_det
    assert heavy.log_likelihood == pytest.approx(4 * light.log_likelihood)


def test_steps_on_the_noise_from_a_kept_pass() -> None:
    x, y = data(Gaussian())
    for estimator in ("ntk-N-C", "full-N-C"):
        weighted = Weighted(Gaussian())
        one = evidence(weighted, estimator, N)
        batches = [(x, weighted.targets(y, WEIGHTS))]
        kept = one.collect(batches, wrt=["prior", "likelihood"])
        with torch.no_grad():
            for parameter in weighted.parameters():
                parameter.add_(0.3)
        assert one.estimate_kept(kept).log_evidence == pytest.approx(
            one.estimate(batches).log_evidence, rel=1e-10
        )


def test_positions_of_no_weight_are_left_out() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, C)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x)

    x, y = torch.randn(4, 5, 3), torch.randint(C, (4, 5))
    weights = torch.ones(4, 5)
    weights[:, 3:] = 0
    y[0, 0] = -100
    likelihood = Weighted(Categorical())
    fitted = evigrad.fit(
        Tagger(),
        (x, likelihood.targets(y, weights)),
        likelihood=likelihood,
        estimator="ntk-5-1",
        schedule=evigrad.Schedule(epochs=2, burn_in=1, every=1, steps=1),
        progress=False,
    )
    assert fitted.evidence.num_data == 4 * 3 - 1


def test_posterior() -> None:
    x, y = data(Gaussian())
    weighted = Weighted(Gaussian())
    one = evidence(weighted, "ntk-N-C", N)
    other = evidence(Gaussian(), "ntk-N-C", int(WEIGHTS.sum()))
    prediction = one.posterior((x, weighted.targets(y, WEIGHTS)), structure="full")(x)
    repeated: Any = tuple(part.repeat_interleave(WEIGHTS, 0) for part in (x, y))
    expected = other.posterior(repeated, structure="full")(x)
    torch.testing.assert_close(prediction.variance, expected.variance)
    torch.testing.assert_close(prediction.log_prob(y), expected.log_prob(y))


def test_bad_weights() -> None:
    x, y = data(Categorical())
    weighted = Weighted(Categorical())
    one = evidence(weighted, "ntk-2-1", N)
    with pytest.raises(InputError, match="must be finite and at least 0"):
        one.map_loss(x, weighted.targets(y, -torch.ones(N)))
    with pytest.raises(InputError, match="must be finite"):
        one.map_loss(x, weighted.targets(y, torch.full((N,), torch.nan)))
    with pytest.raises(InputError, match=r"targets\(y, weights\)"):
        one.map_loss(x, y)
    with pytest.raises(InputError, match="one weight per target, got"):
        weighted.targets(y, torch.ones(N, C))
    with pytest.raises(InputError, match="outside 0"):
        one.map_loss(x, weighted.targets(y + C, torch.ones(N)))
