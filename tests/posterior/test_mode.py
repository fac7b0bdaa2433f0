"""The mode gap, against dense Newton steps."""

import pytest
import torch
from posterior.cases import LIKELIHOODS, Case, case
from torch import Tensor, nn
from torch.distributions import Normal

from evigrad import Evidence, reference
from evigrad.errors import ConfigurationError, NotFiniteError
from evigrad.likelihoods import Gaussian, Likelihood
from evigrad.posterior import STRUCTURES
from evigrad.priors import GaussianPrior


def gradient(of: Case) -> Tensor:
    """Return the gradient of the log joint density by automatic differentiation, (P,)."""
    x, y = of.train
    f = of.evidence.model(x)
    log_prob = of.evidence.likelihood.log_prob(f, y).sum() / of.evidence.temperature
    deviations = of.evidence.prior.deviations(of.weights)
    precisions = of.evidence.prior.precisions()
    decay = sum((precisions[n] * d.square()).sum() for n, d in deviations.items())
    parts = torch.autograd.grad(log_prob - 0.5 * decay, list(of.weights.values()))
    return torch.cat([part.flatten() for part in parts])


def expected(of: Case) -> float:
    """Return ½ gᵀ (H + P0)⁻¹ g by dense matrices."""
    g, matrix = gradient(of), of.hessian() + of.precision().diag()
    return 0.5 * float(g @ torch.linalg.solve(matrix, g))


@pytest.mark.each(1)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_exact_structures_agree_with_a_dense_newton_step(likelihood, temperature):
    of = case(likelihood, temperature=temperature)
    for structure in ("full", "ntk"):
        gap = of.evidence.mode_gap(of.train, structure=structure) * len(of.train[0])
        assert gap == pytest.approx(expected(of), rel=1e-8)
    assert expected(of) > 1e-3


@pytest.mark.parametrize("structure", ["kfac", "diag"])
def test_approximations_are_exact_for_one_weight(structure):
    model = nn.Linear(1, 1, bias=False).double()
    x, y = torch.randn(7, 1).double(), torch.randn(7, 1).double()
    prior = GaussianPrior(precision=0.3)
    evidence = Evidence(model, Gaussian(0.5), prior, estimator="full-N-C", num_data=7)
    exact = evidence.mode_gap((x, y), structure="full")
    assert evidence.mode_gap((x, y), structure=structure) == pytest.approx(exact, rel=1e-8)


def test_fewer_rows_give_an_upper_bound():
    of = case("categorical")
    gaps = [of.evidence.mode_gap(of.train, rows=rows) for rows in (3, 9, 18, 27)]
    exact = of.evidence.mode_gap(of.train)
    assert all(gap >= exact - 1e-12 for gap in gaps)
    assert gaps[-1] == pytest.approx(exact, rel=1e-8)
    assert gaps[0] > gaps[-1]


@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
def test_some_examples_represent_all_in_the_curvature_but_not_in_the_gradient(structure):
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    prior = GaussianPrior("layerwise", precision=0.7)
    x, y = torch.randn(1, 2).double().expand(12, 2), torch.randn(12, 1).double()
    evidence = Evidence(
        model, Gaussian(0.4), prior, estimator="full-N-C", num_data=12, temperature=0.5
    )
    whole = evidence.mode_gap((x, y), structure=structure)
    part = evidence.mode_gap((x, y), structure=structure, examples=3)
    assert part == pytest.approx(whole, rel=1e-9)
    assert evidence.mode_gap((x, y), structure=structure, examples=99) == whole
    with pytest.raises(ConfigurationError, match="examples must be a positive integer"):
        evidence.mode_gap((x, y), structure=structure, examples=0)


def test_a_linear_model_gains_what_the_gap_says_and_then_nothing():
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(11, 3).double(), torch.randn(11, 2).double()
    prior = GaussianPrior("layerwise", precision=0.7)
    evidence = Evidence(model, Gaussian(0.4), prior, estimator="ntk-N-C", num_data=11)
    before = evidence.estimate(x, y, at_mode=True)
    assert before.at_mode is not None
    gap = evidence.mode_gap((x, y))
    assert before.at_mode == pytest.approx(before.log_evidence + 11 * gap, rel=1e-12)
    # One Newton step reaches the mode of a model that is linear in its weights.
    step = Case(evidence, (x, y), x)
    move = torch.linalg.solve(step.hessian() + step.precision().diag(), gradient(step))
    with torch.no_grad():
        for weight, part in zip(
            evidence.weights().values(),
            move.split([w.numel() for w in evidence.weights().values()]),
            strict=True,
        ):
            weight += part.view_as(weight)
    after = evidence.estimate(x, y, at_mode=True)
    assert after.log_evidence == pytest.approx(before.at_mode, rel=1e-10)
    assert evidence.mode_gap((x, y)) == pytest.approx(0.0, abs=1e-12)
    # At the mode of a linear Gaussian model, the log evidence is the exact log marginal likelihood.
    jacobian = reference.jacobian(model, evidence.weights(), x).detach().flatten(0, 1)
    covariance = (
        jacobian @ step.precision().reciprocal().diag() @ jacobian.T + 0.4**2 * torch.eye(22)
    ).double()
    normal = torch.distributions.MultivariateNormal(torch.zeros(22).double(), covariance)
    assert after.log_evidence == pytest.approx(float(normal.log_prob(y.flatten())), rel=1e-6)


def test_a_weight_without_dimensions_counts():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    x, y = torch.randn(6, 1).double(), torch.randn(6, 1).double()
    prior = GaussianPrior(precision=2.0)
    evidence = Evidence(Shifted(), Gaussian(1.0), prior, estimator="full-N-C", num_data=6)
    slope = float((y - x - 0.5).sum()) - 2.0 * 0.5
    for structure in ("full", "ntk", "diag"):
        gap = evidence.mode_gap((x, y), structure=structure)
        assert gap == pytest.approx(0.5 * slope**2 / (6 + 2) / 6, rel=1e-10)


def test_the_generator_and_the_mode_of_the_model_stay():
    of = case("gaussian")
    of.evidence.model.train()
    state = of.evidence.generator.get_state()
    of.evidence.mode_gap(of.train, rows=9)
    assert torch.equal(of.evidence.generator.get_state(), state)
    assert of.evidence.model.training
    assert all(weight.grad is None for weight in of.weights.values())


def test_at_mode_names_the_estimators_that_have_it():
    of = case("gaussian")
    x, y = of.train
    for estimator, size in (("ntk-3-1", 3), ("blockdiag-N-C", len(x))):
        evidence = of.evidence.with_estimator(estimator)
        with pytest.raises(ConfigurationError, match=f"ntk-N-C. Here the estimator is {estimator}"):
            evidence.estimate(x[:size], y[:size], at_mode=True)
    assert of.evidence.estimate(*of.train).at_mode is None


def test_a_vector_needs_all_weights_in_their_shapes():
    of = case("gaussian")
    posterior = of.evidence.posterior(of.train, structure="diag")
    with pytest.raises(ConfigurationError, match="vector must have a tensor of shape"):
        posterior.variance_of({})
    zeros = {name: torch.zeros_like(weight) for name, weight in of.weights.items()}
    assert posterior.variance_of(zeros) == 0.0


def test_a_gap_that_overflows_is_refused():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 1e10)
    prior = GaussianPrior(precision=1e300)
    evidence = Evidence(model, Gaussian(), prior, estimator="full-N-C", num_data=2)
    x, y = torch.ones(2, 1).double(), torch.zeros(2, 1).double()
    with pytest.raises(NotFiniteError, match="The gap to the mode is nan"):
        evidence.mode_gap((x, y))


class Mixture(Likelihood):
    """A mixture of two normal densities, whose Hessian depends on the target."""

    name = "mixture"

    def _parts(self, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share, mean, log_std = f.split(2, 1)
        return share.log_softmax(1), mean, log_std

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        share, mean, log_std = self._parts(f)
        return (share + Normal(mean, log_std.exp()).log_prob(y)).logsumexp(1)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        share, mean, log_std = self._parts(f.detach())
        kind = share.exp().multinomial(1, generator=generator)
        noise = torch.randn(len(f), 1, generator=generator, dtype=f.dtype)
        return mean.gather(1, kind) + log_std.exp().gather(1, kind) * noise


def mixture(estimator: str) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 6)).double()
    data = torch.randn(9, 2).double(), torch.randn(9, 1).double()
    prior = GaussianPrior(precision=2.0)
    evidence = Evidence(model, Mixture(), prior, estimator=estimator, num_data=9, generator=0)
    return Case(evidence, data, data[0][:4])


def test_a_hessian_that_depends_on_targets_has_the_posterior_of_its_scores():
    of = mixture("kfac-N-1-ef")
    x, y = of.train
    scores = of.evidence.likelihood.score(of.evidence.model(x).detach(), y)
    rows = torch.einsum("nc,ncp->np", scores, of.rows(x))
    covariance = of.covariance(rows.mT @ rows)
    g, matrix = gradient(of), rows.mT @ rows + of.precision().diag()
    expected_gap = 0.5 * float(g @ torch.linalg.solve(matrix, g))
    for structure in ("full", "ntk"):
        prediction = of.evidence.posterior(of.train, structure=structure)(of.test)
        torch.testing.assert_close(prediction.covariance, covariance, rtol=1e-8, atol=1e-10)
        gap = 9 * of.evidence.mode_gap(of.train, structure=structure)
        assert gap == pytest.approx(expected_gap, rel=1e-8)
    with pytest.raises(ConfigurationError, match=r"rows needs the Gauss-Newton.*Omit rows"):
        of.evidence.mode_gap(of.train, rows=3)


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", ["kfac-N-1-ef", "diag-4-2-mc"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_has_a_posterior_of_scores(structure, estimator):
    of = mixture(estimator)
    posterior = of.evidence.posterior(of.train, structure=structure)
    variance = posterior(of.test).variance
    assert bool((variance > 0).all()) and of.evidence.mode_gap(of.train, structure=structure) > 0
    saved = of.evidence.posterior(state=posterior.state_dict())
    assert torch.equal(saved(of.test).variance, variance)


def test_a_density_with_a_hessian_has_the_same_posterior_for_every_estimator():
    of = case("categorical")
    expected_covariance = of.evidence.posterior(of.train, structure="kfac")(of.test).covariance
    other = of.evidence.with_estimator("kfac-N-1-ef").posterior(of.train, structure="kfac")
    assert torch.equal(other(of.test).covariance, expected_covariance)
