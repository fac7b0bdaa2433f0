"""Facts about each target on which the density and its curvature depend."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from likelihoods import test_joint
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import evigrad
from evigrad import Evidence
from evigrad.errors import ConfigurationError, EvigradWarning, InputError
from evigrad.likelihoods import (
    Categorical,
    Conditional,
    Gaussian,
    Joint,
    KnownNoise,
    Likelihood,
    NegativeBinomial,
    Poisson,
    Weighted,
)
from evigrad.posterior.predictive import Predictive
from evigrad.priors import GaussianPrior

N, NAN = 8, float("nan")
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Z = torch.randn(N, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FACTS = torch.rand(N, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 2 + 0.1
COUNTS = torch.arange(2 * N, dtype=torch.float64).view(N, 2) % 5
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


class Coupled(Conditional):
    """Normal targets whose errors have a correlation that is known for each example."""

    name = "coupled"
    conditions = {"correlation": 0.0}

    def _precision(self, correlation: Tensor) -> Tensor:
        other = torch.tensor([[0.0, 1.0], [1.0, 0.0]]).to(correlation)
        r = correlation[:, :1, None]
        return (torch.eye(2).to(r) - r * other) / (1 - r**2)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y, conditions = self.split(y)
        precision, error = self._precision(conditions["correlation"]), y - f
        squares = torch.einsum("mc,mcd,md->m", error, precision, error)
        return 0.5 * (torch.logdet(precision) - squares) - torch.tensor(2 * torch.pi).log()

    def hessian(self, f: Tensor) -> Tensor:
        return self._precision(self.condition("correlation", f).expand(f.shape))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        covariance = torch.linalg.inv(self.hessian(f.detach()))
        noise = torch.randn(f.shape, generator=generator, dtype=f.dtype)
        moved = torch.einsum("mcd,md->mc", torch.linalg.cholesky(covariance), noise)
        return self.combined(f.detach() + moved, f)


def joint() -> Joint:
    heads: dict[str, tuple[int, Likelihood]] = {
        "seen": (2, Poisson(exposure=True)),
        "kind": (3, Categorical()),
        "size": (2, KnownNoise(0.4, missing="nan")),
    }
    return Joint(heads)


# A likelihood, its targets, and its number of outputs.
def cases() -> dict[str, tuple[Likelihood, Tensor, int]]:
    known_noise, counts = (
        KnownNoise([0.4, 1.1], missing="nan"),
        NegativeBinomial(0.6, exposure=True),
    )
    missing = Z.clone()
    missing[0, 1] = missing[3] = NAN
    weighted, heads, coupled = Weighted(KnownNoise(0.4)), joint(), Coupled()
    of_heads = {
        "seen": Poisson(exposure=True).targets(COUNTS, exposure=FACTS),
        "kind": LABELS,
        "size": known_noise.targets(missing, noise=FACTS.flip(0)),
    }
    inner = weighted.likelihood
    assert isinstance(inner, KnownNoise)
    noisy = inner.targets(Z, noise=FACTS)
    by_name: dict[str, tuple[Likelihood, Tensor, int]] = {
        "known": (known_noise, known_noise.targets(missing, noise=FACTS), 2),
        "exposure": (counts, counts.targets(COUNTS, exposure=FACTS), 2),
        "weighted": (weighted, weighted.targets(noisy, torch.arange(N) + 0.5), 2),
        "joint": (heads, heads.targets(of_heads), 7),
        "coupled": (coupled, coupled.targets(Z, correlation=FACTS[:, 0] / 3), 2),
        "heads": (test_joint.heads(), test_joint.targets(test_joint.heads(), missing=True), 6),
    }
    return {name: (like.double(), y, size) for name, (like, y, size) in by_name.items()}


def net(num_outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_outputs)).double()


def curvatures(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Λ of each example by itself, with its weights: (m, C, C)."""
    of_examples = []
    for n in range(len(f)):
        one = likelihood.at(y[n : n + 1]).hessian(f[n : n + 1])[0]
        weights = likelihood.weights(y[n : n + 1])
        root = f.new_ones(1) if weights is None else weights.to(f)[0].sqrt()
        root = root.expand(f.shape[1])
        of_examples.append(one * root[:, None] * root)
    return torch.stack(of_examples)


def matrices(evidence: Evidence, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The Jacobian (N, C, P), the curvature of the weights (P, P), and their precisions (P,)."""
    weights = {name: p.detach() for name, p in evidence.model.named_parameters()}
    jacobians = jacrev(lambda w: functional_call(evidence.model, w, (X,)))(weights)
    rows = torch.cat([jacobian.flatten(2) for jacobian in jacobians.values()], 2)
    of_outputs = curvatures(evidence.likelihood, evidence.model(X), y)
    curvature = torch.einsum("ncp,ncd,ndq->pq", rows, of_outputs, rows)
    precisions = evidence.prior.precisions()
    p0 = torch.cat([precisions[n].double().expand(w.shape).flatten() for n, w in weights.items()])
    return rows, curvature, p0


def dense(evidence: Evidence, likelihood: Likelihood, y: Tensor) -> Tensor:
    f, (_, curvature, p0) = evidence.model(X), matrices(evidence, y)
    w = torch.cat([p.detach().flatten() for p in evidence.model.parameters()])
    log_det = torch.logdet(curvature + p0.diag()) - p0.log().sum()
    return likelihood.log_prob(f, y).sum() - 0.5 * (p0 * w.square()).sum() - 0.5 * log_det


def evidence_of(likelihood: Likelihood, name: str, num_outputs: int) -> Evidence:
    return Evidence(
        net(num_outputs),
        likelihood,
        GaussianPrior("layerwise", precision=0.7),
        estimator=name,
        num_data=N,
        root="eigen" if name.endswith("anchored") else "subblock",
        generator=torch.Generator().manual_seed(3),
    )


@pytest.mark.each(1)
@pytest.mark.parametrize("name", ["full-N-C", "ntk-N-C", "ntk-N-C-anchored"])
@pytest.mark.parametrize("case", list(cases()))
def test_value_and_gradients_agree_with_dense_matrices(case: str, name: str) -> None:
    likelihood, y, size = cases()[case]
    if name.endswith("anchored"):
        name = f"ntk-{N * size}-rows-anchored"  # all rows, so it is exact
    evidence = evidence_of(likelihood, name, size)
    expected = dense(evidence, likelihood, y)
    block = next(iter(evidence.blocks((X, y))))
    estimate = evidence.backward(block)
    assert estimate.log_evidence == pytest.approx(float(expected.detach()), rel=1e-6)
    named = evidence.hyperparameters()
    slopes = torch.autograd.grad(-expected / N, list(named.values()))
    for parameter, slope in zip(named.values(), slopes, strict=True):
        torch.testing.assert_close(parameter.grad, slope, rtol=1e-5, atol=1e-7)


def test_sampled_labels_come_from_the_conditions() -> None:
    likelihood = KnownNoise(0.4).double()
    values = []
    for noise in (1e-3, 10.0):
        y = likelihood.targets(Z, noise=noise)
        evidence = evidence_of(likelihood, "full-N-1-mc", 2)
        values.append(evidence.estimate(next(iter(evidence.blocks((X, y))))).log_det)
    assert values[0] > 4 * values[1]


@pytest.mark.parametrize("case", ["known", "exposure", "coupled"])
def test_scores_of_rows_under_conditions(case: str) -> None:
    likelihood, y, size = cases()[case]
    here, f = likelihood.at(y), Z[:, :size]
    for kind in ("fisher", "eigen"):
        norms = here.row_norms(f, kind)
        torch.testing.assert_close(likelihood.row_scores(here.condensed(f, kind), kind)[0], norms)


@given(st.floats(-2, 2), st.floats(0.05, 8.0), st.floats(0.05, 3.0))
def test_counts_with_exposures_sum_to_one(f: float, exposure: float, dispersion: float) -> None:
    outputs = torch.full((3000, 1), f, dtype=torch.float64)
    counts = torch.arange(3000, dtype=torch.float64)[:, None]
    for likelihood in (Poisson(exposure=True), NegativeBinomial(dispersion, exposure=True)):
        likelihood = likelihood.double()
        y = likelihood.targets(counts, exposure=exposure)
        p = likelihood.log_prob(outputs, y).exp().detach()
        mean = exposure * torch.tensor(f).double().exp()
        assert float(p.sum()) == pytest.approx(1.0, abs=1e-6)
        assert float((p * counts[:, 0]).sum()) == pytest.approx(float(mean), rel=1e-4)
        information = float((p * likelihood.score(outputs, y)[:, 0].square()).sum().detach())
        here = likelihood.at(y[:1])
        assert float(here.hessian(outputs[:1]).detach()) == pytest.approx(information, rel=1e-3)
        shifted = outputs[:5] + torch.tensor(exposure).double().log()
        plain = Poisson() if isinstance(likelihood, Poisson) else NegativeBinomial(dispersion)
        expected = plain.double().log_prob(shifted, counts[:5])
        torch.testing.assert_close(likelihood.log_prob(outputs[:5], y[:5]), expected)


def test_anchors_are_rows_with_little_noise() -> None:
    """Examples with a large known noise have rows of small norm, which are not chosen."""
    likelihood = KnownNoise(0.1).double()
    noise = torch.where(torch.arange(N) % 2 == 0, 0.0, 100.0)
    for wrapped in (likelihood, Weighted(likelihood)):
        y = likelihood.targets(Z, noise=noise)
        y = wrapped.targets(y, torch.ones(N)) if isinstance(wrapped, Weighted) else y
        for starts in ("blocks", "map_loss"):
            evidence = evidence_of(wrapped, "ntk-4-rows-anchored", 2)
            if starts == "map_loss":  # which keeps the outputs
                next(iter(evidence.blocks((X, y))))
                evidence.map_loss(X, y, indices=torch.arange(N))
            block = next(iter(evidence.blocks((X, y))))
            assert block.anchored is not None and block.columns is not None
            is_anchor = (block.anchored.labels == 0) & (block.columns >= 0)
            chosen = block.indices[is_anchor.any(1)]
            assert len(chosen) and bool((chosen % 2 == 0).all())


def test_predictions_under_conditions() -> None:
    f, covariance = Z, 0.3 * torch.eye(2).double().expand(N, 2, 2)
    likelihood = KnownNoise(0.5).double()
    prediction = Predictive(f, covariance, likelihood)
    torch.testing.assert_close(prediction.variance, torch.full((N, 2), 0.55).double())
    conditioned = prediction.with_conditions(noise=FACTS)
    torch.testing.assert_close(conditioned.variance, 0.55 + FACTS.square())
    torch.testing.assert_close(
        prediction.with_conditions(noise=FACTS[:, 0]).variance, 0.55 + FACTS[:, :1].square() + 0 * f
    )
    y = likelihood.targets(Z + 1, noise=FACTS)
    expected = torch.distributions.Normal(f, (0.55 + FACTS.square()).sqrt()).log_prob(Z + 1).sum(1)
    torch.testing.assert_close(prediction.log_prob(y), expected)
    counts = Predictive(f, 0 * covariance, Poisson(exposure=True))
    torch.testing.assert_close(counts.with_conditions(exposure=3.0).mean, 3 * f.exp())
    y = Poisson(exposure=True).targets(COUNTS, exposure=FACTS)
    exact = torch.distributions.Poisson(FACTS * f.exp()).log_prob(COUNTS).sum(1)
    torch.testing.assert_close(counts.log_prob(y), exact)
    outputs = torch.cat([Z, Z, Z, Z[:, :1]], 1)
    of_heads = Predictive(outputs, torch.eye(7).double().expand(N, 7, 7), joint())
    with pytest.raises(ConfigurationError, match="Joint has no conditions. For a head"):
        of_heads.with_conditions(noise=1.0)
    torch.testing.assert_close(
        of_heads["seen"].with_conditions(exposure=2.0).mean, 2 * of_heads["seen"].mean
    )
    with pytest.raises(InputError, match="no condition 'nois'.*are: noise.*'noise'"):
        prediction.with_conditions(nois=1.0)
    with pytest.raises(InputError, match=r"noise must be one number, or have the shape \(8,\)"):
        prediction.with_conditions(noise=FACTS[:3])
    with pytest.raises(InputError, match="values for 4 examples.*outputs for 8"):
        likelihood.with_conditions(noise=FACTS[:4]).hessian(f)
    with pytest.raises(InputError, match="must be finite and at least 0, because it is a stand"):
        prediction.with_conditions(noise=-1.0)


def test_conditions_at_positions() -> None:
    """Sequences of targets, some of them missing, as single examples."""
    likelihood = KnownNoise(0.5, missing="nan").double()
    x = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.sin()[..., :2].clone()
    noise = x.cos().abs()[..., 0]
    y[1, 2] = NAN
    model = net(2)
    values = []
    for inputs, targets in (
        (x, likelihood.targets(y, noise=noise)),
        (x.flatten(0, 1), likelihood.targets(y.flatten(0, 1), noise=noise.flatten())),
    ):
        evidence = Evidence(
            model, likelihood, GaussianPrior("scalar"), estimator="full-N-C", num_data=12
        )
        values.append(evidence.estimate(inputs, targets).log_evidence)
    assert values[0] == pytest.approx(values[1], rel=1e-9)


@pytest.mark.long
def test_the_rest_of_the_noise_is_learned() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1, generator=generator)
    noise = torch.where(torch.rand(200, generator=generator) < 0.5, 0.05, 1.0)
    spread = (noise**2 + 0.2**2).sqrt()[:, None]
    y = x.sin() + spread * torch.randn(200, 1, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    likelihood = KnownNoise()
    result = evigrad.fit(
        model,
        (x, likelihood.targets(y, noise=noise)),
        likelihood=likelihood,
        estimator="full-N-C",
        schedule=evigrad.Schedule(epochs=150),
        progress=False,
    )
    assert result.history[-1]["noise"] == pytest.approx(0.2, abs=0.05)


def test_a_known_noise_of_zero_is_a_gaussian() -> None:
    values = []
    for likelihood in (KnownNoise(0.5).double(), Gaussian(0.5).double()):
        y = likelihood.targets(Z) if isinstance(likelihood, KnownNoise) else Z
        evidence = evidence_of(likelihood, "full-N-C", 2)
        estimate = evidence.backward(X, y)
        gradients = [p.grad for p in evidence.hyperparameters().values()]
        values.append((estimate.log_evidence, gradients))
    assert values[0][0] == pytest.approx(values[1][0], rel=1e-9)
    for one, other in zip(values[0][1], values[1][1], strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_refused() -> None:
    likelihood = KnownNoise()
    with pytest.raises(InputError, match=r"combined with noise.*targets\(y, noise=\.\.\.\)"):
        likelihood.validate((N, 1), Z[:, :1])
    with pytest.raises(InputError, match="KnownNoise has no condition 'error'"):
        likelihood.targets(Z, error=1.0)
    with pytest.raises(InputError, match=r"noise must have the shape.*\(8, 2\), or \(8,\)"):
        likelihood.targets(Z, noise=FACTS[:3])
    counts = Poisson(exposure=True)
    for likelihood_of_y, y, condition, words in (
        (likelihood, Z, {"noise": -1.0}, r"Noise -1.0 at index \[0, 0\] must be .* standard dev"),
        (likelihood, Z, {"noise": NAN}, "Noise nan at index .* is not a number"),
        (counts, COUNTS, {"exposure": 0.0}, "Exposure 0.0 at index .* must be finite and positive"),
        (counts, COUNTS, {"exposure": NAN}, "Exposure nan at index .* is not a number"),
        *((counts, COUNTS, {"exposure": e}, "must be finite and pos") for e in (-2.0, 1e-35, 1e35)),
    ):
        with pytest.raises(InputError, match=words):
            likelihood_of_y.targets(y, **condition)
        # Targets that were combined by hand.
        (value,) = condition.values()
        with pytest.raises(InputError, match=words):
            likelihood_of_y.validate((N, 2), torch.cat([y, torch.full((N, 2), value)], 1))
    # The exposure of a missing count does not count.
    holes = Poisson(missing="nan", exposure=True)
    y = holes.targets(torch.tensor([NAN, 1.0]), exposure=torch.tensor([0.0, 2.0]))
    holes.validate((2, 1), y)
    with pytest.raises(InputError, match="is the ignore_index of missing labels"):
        Categorical().validate((2, 3), torch.tensor([0, -100]))
    with pytest.raises(InputError, match="Poisson has no condition 'exposure'.*are: none"):
        Poisson().targets(COUNTS, exposure=1.0)
    wrong: Any = FACTS
    with pytest.raises(ConfigurationError, match="exposure must be True or False"):
        Poisson(exposure=wrong)
    with pytest.raises(InputError, match="is NaN"):
        likelihood.validate((1, 1), likelihood.targets(torch.tensor([[NAN]])))


def test_missing_targets_of_a_weighted_likelihood() -> None:
    likelihood = Weighted(Gaussian(0.5, missing="nan"))
    y = likelihood.targets(torch.tensor([[0.3], [NAN]]), torch.tensor([2.0, 1.0]))
    likelihood.validate((2, 1), y)
    log_prob = likelihood.log_prob(torch.zeros(2, 1), y).detach()
    assert log_prob[1] == 0 and log_prob[0] != 0
    with pytest.raises(InputError, match="is NaN"):
        Weighted(Gaussian(0.5)).validate((2, 1), y)
    with pytest.raises(InputError, match="Weight nan at index 1 must be finite"):
        likelihood.validate((2, 1), likelihood.targets(y[:, :1], torch.tensor([1.0, NAN])))


def test_predictions_at_positions_and_of_several_conditions() -> None:
    zeros = torch.zeros(2, 3, 1, dtype=torch.float64)
    prediction = Predictive(zeros, zeros[..., None], Poisson(exposure=True))
    of_examples = prediction.with_conditions(exposure=torch.tensor([1.0, 10.0])).mean[..., 0]
    torch.testing.assert_close(of_examples, torch.tensor([[1.0] * 3, [10.0] * 3]).double())
    values = torch.arange(6).view(2, 3) + 1.0
    for exposure in (values, values[..., None], values.numpy()):
        mean = prediction.with_conditions(exposure=exposure).mean
        torch.testing.assert_close(mean, values[..., None].double())
    weighted = Predictive(zeros[:, 0], zeros[:, 0, :, None], Weighted(KnownNoise(1.0)))
    torch.testing.assert_close(
        weighted.with_conditions(noise=2.0).variance, torch.full((2, 1), 5.0).double()
    )

    class Both(KnownNoise):
        conditions = {"noise": 0.0, "other": 1.0}

    both = Both().with_conditions(noise=2.0).with_conditions(other=3.0)
    outputs = torch.zeros(4, 1)
    assert both.condition("noise", outputs).item() == 2.0
    assert both.condition("other", outputs).item() == 3.0


class Labels(Conditional):
    """Two classes, whose logit is known up to the output."""

    name, couples_outputs, is_classification = "labels", False, True
    conditions = {"offset": 0.0}

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y, facts = self.split(y)
        return nn.functional.logsigmoid((2 * y - 1) * (f + facts["offset"])).sum(1)

    def hessian(self, f: Tensor) -> Tensor:
        p = (f + self.condition("offset", f)).sigmoid()
        return (p * (1 - p)).diag_embed()

    def probabilities(self, f: Tensor) -> Tensor:
        return (f + self.condition("offset", f)).sigmoid()


def test_sampled_probabilities_use_the_conditions_of_their_example() -> None:
    f, offset = torch.zeros(3, 1).double(), torch.tensor([-2.0, 0.0, 2.0]).double()
    prediction = Predictive(f, torch.full((3, 1, 1), 1e-8).double(), Labels())
    probabilities = prediction.with_conditions(offset=offset).probabilities[:, 0]
    torch.testing.assert_close(probabilities, offset.sigmoid(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("case", list(cases()))
def test_the_posterior_agrees_with_dense_matrices(case: str) -> None:
    likelihood, y, size = cases()[case]
    evidence = evidence_of(likelihood, "full-N-C", size)
    rows, curvature, p0 = matrices(evidence, y)
    expected = rows @ torch.linalg.inv(curvature + p0.diag()) @ rows.mT
    for structure in ("full", "ntk"):
        prediction = evidence.posterior((X, y), structure=structure)(X)
        torch.testing.assert_close(
            prediction.covariance, expected.detach(), rtol=1e-6, atol=1e-9, check_dtype=False
        )


def test_every_draw_of_labels_under_conditions() -> None:
    """The mean of the sampled Fisher over all draws of two binary labels, weighted by p."""
    likelihood = Labels()
    offset = torch.tensor([[-1.0], [0.5]], dtype=torch.float64)
    f = torch.tensor([[0.3], [-0.2]], dtype=torch.float64)
    total = torch.zeros(2, dtype=torch.float64)
    for first in (0.0, 1.0):
        for second in (0.0, 1.0):
            y = likelihood.targets(torch.tensor([[first], [second]]), offset=offset)
            p = likelihood.log_prob(f, y).sum().exp()
            total += p * likelihood.score(f, y)[:, 0].square()
    here = likelihood.at(likelihood.targets(f, offset=offset))
    torch.testing.assert_close(total, here.hessian(f)[:, 0, 0])


def test_a_joint_likelihood_with_anchors_is_exact_with_all_rows() -> None:
    likelihood, y, size = cases()["joint"]
    exact = evidence_of(likelihood, "ntk-N-C", size).estimate(X, y).log_det
    evidence = evidence_of(likelihood, "ntk-20-rows-anchored", size)
    bounds = [evidence.estimate(block).log_det for block in evidence.blocks((X, y)).take(10)]
    assert sum(bounds) / len(bounds) >= exact * (1 - 1e-9)


def test_counts_in_float32_with_a_small_dispersion() -> None:
    f, y = torch.full((1, 1), 1.5), torch.tensor([[4.0]])
    for dispersion in (1e-3, 1e-5, 1e-7):
        values = []
        for dtype in (torch.float32, torch.float64):
            likelihood = NegativeBinomial(dispersion).to(dtype)
            value = likelihood.log_prob(f.to(dtype), y.to(dtype)).sum()
            (slope,) = torch.autograd.grad(value, list(likelihood.parameters()))
            assert value.dtype == dtype
            values.append((value.item(), slope.item()))
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-6)


def test_data_without_a_target_that_counts() -> None:
    known_noise, weighted = KnownNoise(missing="nan"), Weighted(Gaussian(missing="nan"))
    missing = torch.full((N, 1), NAN)
    heads = Joint({"a": (1, Gaussian(missing="nan")), "k": (2, Categorical())})
    labels = torch.arange(N) % 2
    for likelihood, y, words in (
        (known_noise, known_noise.targets(missing, noise=1.0), "All targets are missing"),
        (weighted, weighted.targets(missing, torch.ones(N)), "All targets are missing"),
        (weighted, weighted.targets(Z[:, :1], torch.zeros(N)), "must count|weight 0"),
        (heads, heads.targets({"a": missing, "k": labels}), "All targets of 'a' are missing"),
        (heads, heads.targets({"a": Z[:, :1], "k": labels * 0 - 100}), "All targets of 'k'"),
    ):
        model = nn.Linear(3, 3 if isinstance(likelihood, Joint) else 1).double()
        with pytest.raises(InputError, match=words):
            evigrad.fit(model, (X, y), likelihood=likelihood, progress=False)


def test_counts_far_from_the_rates_are_warned_of() -> None:
    counts = torch.full((N, 1), 500.0)
    exposed = Poisson(exposure=True)
    schedule = evigrad.Schedule(epochs=1)
    for likelihood, y, words in (
        (Poisson(), counts, r"average 500.*exposure=\d+\)"),
        (exposed, exposed.targets(counts, exposure=1.0), r"Multiply the exposures by \d+"),
    ):
        with pytest.warns(EvigradWarning, match=words) as caught:
            evigrad.fit(
                nn.Linear(3, 1),
                (X.float(), y),
                likelihood=likelihood,
                estimator=None,
                schedule=schedule,
                progress=False,
            )
        assert caught[0].filename == __file__
