"""Predictions are those of laplace-torch, and so is each row of the page on switching from it."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from late import needs
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import DataLoader, TensorDataset

import evigrad
from evigrad import Evidence, Posterior
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.priors import GaussianPrior

pytestmark = needs("laplace")

NUM_DATA, OUTPUTS, PRECISION, NOISE, TEMPERATURE = 60, 3, 0.7, 0.4, 0.5
# Weights and matrix by the names of laplace-torch.
STRUCTURES = {
    "full": ("all", "full"),
    "diag": ("all", "diag"),
    "last-layer": ("last_layer", "full"),
}
NETWORKS = {
    "mlp": ((6,), lambda: [nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, OUTPUTS)]),
    "convolutions": (
        (1, 6, 6),
        lambda: [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, OUTPUTS)],
    ),
}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """laplace-torch casts the noise to the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore::UserWarning:laplace", "ignore::DeprecationWarning")
@pytest.mark.each(2)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("network", NETWORKS)
def test_moments_are_those_of_laplace_torch(network: str, task: str, structure: str) -> None:
    from laplace import Laplace  # pyright: ignore[reportMissingImports]
    from laplace.curvature import BackPackGGN  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    shape, layers = NETWORKS[network]
    model = nn.Sequential(*layers())
    x, test = torch.randn(NUM_DATA, *shape), torch.randn(20, *shape)
    y = torch.randn(NUM_DATA, OUTPUTS)
    likelihood: Likelihood = Gaussian(NOISE)
    options: dict[str, Any] = {"sigma_noise": NOISE}
    if task == "classification":
        likelihood, options, y = Categorical(), {}, y.argmax(1)
    evidence = Evidence(
        model,
        likelihood,
        GaussianPrior("scalar", precision=PRECISION),
        estimator="diag-N-C",
        num_data=NUM_DATA,
        temperature=TEMPERATURE,
    )
    predictive = evidence.posterior((x, y), structure=structure)(test)
    subset, hessian = STRUCTURES[structure]
    theirs: Any = Laplace(
        model,
        task,
        subset_of_weights=subset,
        hessian_structure=hessian,
        prior_precision=PRECISION,
        temperature=TEMPERATURE,
        backend=BackPackGGN,
        **options,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=20))
    mean, covariance = theirs._glm_predictive_distribution(test)
    torch.testing.assert_close(predictive.mean, mean.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(predictive.covariance, covariance.detach(), rtol=1e-10, atol=1e-12)


class Both:
    """A network and its data, for both libraries."""

    def __init__(self, task: str = "classification") -> None:
        torch.manual_seed(0)
        self.task, self.model = task, nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))
        self.x, self.y = torch.randn(30, 2), torch.randn(30, 3)
        self.likelihood: Likelihood = Gaussian(NOISE)
        if task == "classification":
            self.likelihood, self.y = Categorical(), self.y.argmax(1)
        self.test = torch.randn(4, 2)

    def theirs(self, hessian: str = "full", count: int = 30, **options: Any) -> Any:
        from laplace import Laplace  # pyright: ignore[reportMissingImports]
        from laplace.curvature import CurvlinopsGGN  # pyright: ignore[reportMissingImports]

        if self.task == "regression":
            options = {"sigma_noise": NOISE} | options
        defaults = {"subset_of_weights": "all", "prior_precision": PRECISION}
        options = defaults | {"backend": CurvlinopsGGN} | options
        la: Any = Laplace(self.model, self.task, hessian_structure=hessian, **options)
        la.fit(self.loader(0, count))
        return la

    def loader(self, start: int = 0, stop: int = 30) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.x[start:stop], self.y[start:stop]), batch_size=30)

    def evidence(self, prior: Any = None, estimator: str = "full-N-C", **options: Any) -> Evidence:
        prior = GaussianPrior("scalar", precision=PRECISION) if prior is None else prior
        options = {"num_data": 30} | options
        return Evidence(self.model, self.likelihood, prior, estimator=estimator, **options)

    def ours(self, structure: str = "full", count: int = 30, prior: Any = None) -> Posterior:
        pair = self.x[:count], self.y[:count]
        return self.evidence(prior, num_data=count).posterior(pair, structure=structure)

    def same_evidence(self, la: Any, evidence: Evidence) -> None:
        same(evidence.estimate(self.x, self.y).log_evidence, la.log_marginal_likelihood())

    def same_covariance(self, la: Any, posterior: Posterior) -> None:
        same(posterior(self.test).covariance, la._glm_predictive_distribution(self.test)[1])


def same(ours: Any, theirs: Any, tolerance: float = 1e-8) -> None:
    ours, theirs = (torch.as_tensor(value).detach().squeeze() for value in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def moments(samples: Tensor) -> Tensor:
    """Mean and covariance of samples (n, ...)."""
    flat = samples.detach().flatten(1)
    return torch.cat([flat.mean(0)[None], flat.T.cov()])


def training() -> None:
    from laplace.curvature import BackPackGGN  # pyright: ignore[reportMissingImports]
    from laplace.marglik_training import (  # pyright: ignore[reportMissingImports]
        marglik_training,
    )

    both = Both()
    model = copy.deepcopy(both.model)  # which gets hooks
    la, *_ = marglik_training(model, both.loader(), backend=BackPackGGN, n_epochs=1)
    schedule = evigrad.Schedule(epochs=1, burn_in=0, every=1, steps=10)
    optimization = evigrad.Optimization(prior_update="adam")
    result = evigrad.fit(
        both.model, both.loader(), estimator="kfac-N-C", optimization=optimization,
        schedule=schedule, progress=False,
    )  # fmt: skip
    assert result.evidence.prior.log_precision is not None
    assert isinstance(la.prior_precision, torch.Tensor)
    assert la.prior_precision.shape == result.evidence.prior.log_precision.shape


def learned(
    task: str, name: str, structure: str, learnable: bool = True
) -> list[tuple[Tensor, Tensor]]:
    """Precisions and noise after ten steps with fixed weights: of laplace-torch and of evigrad."""
    from laplace.curvature import CurvlinopsGGN  # pyright: ignore[reportMissingImports]
    from laplace.marglik_training import (  # pyright: ignore[reportMissingImports]
        marglik_training,
    )

    both, lr = Both(task), 1e-300
    options: dict[str, Any] = {}
    if task == "regression":
        both.likelihood = Gaussian(noise=0.7, learnable=learnable)
        options = {"sigma_noise_init": 0.7, "fix_sigma_noise": not learnable}
    # laplace-torch returns the precisions before its last step.
    outcome: Any = marglik_training(
        copy.deepcopy(both.model), both.loader(), task, structure, CurvlinopsGGN, n_epochs=1,
        lr_hyp=0.2, prior_prec_init=2.0, n_hypersteps=11, optimizer_kwargs={"lr": lr}, **options,
    )  # fmt: skip
    result = evigrad.fit(
        both.model, both.loader(), likelihood=both.likelihood, estimator=f"{name}-N-C",
        precision=2.0, progress=False,
        schedule=evigrad.Schedule(epochs=1, max_epochs=1, burn_in=0, every=1, steps=10),
        optimization=evigrad.Optimization(
            prior_update="adam", lr=lr, lr_min=0, prior_lr=0.2, prior_lr_min=0.2
        ),
    )  # fmt: skip
    prior = result.evidence.prior.log_precision
    assert prior is not None
    noise = torch.tensor(result.evidence.likelihood.reported().get("noise", 1.0))
    la = outcome[0]
    return [(la.prior_precision, prior.exp()), (la.sigma_noise, noise)]


def settings_of_training() -> None:
    same(*learned("classification", "kfac", "kron")[0], 1e-5)
    for name, structure, learnable in (("full", "full", True), ("kfac", "kron", False)):
        for theirs, ours in learned("regression", name, structure, learnable):
            same(ours, theirs, 1e-5)
    theirs, ours = learned("regression", "kfac", "kron")[1]
    assert theirs < 0.9 * ours


def temperatures() -> None:
    both = Both()
    both.same_evidence(both.theirs(temperature=0.5), both.evidence(temperature=0.5))
    both = Both("regression")
    ours = both.evidence(temperature=0.5).estimate(both.x, both.y).log_evidence
    # laplace-torch does not divide the constant of the Gaussian by the temperature.
    constant = -both.y.numel() * math.log(NOISE * math.sqrt(2 * math.pi))
    same(ours - (1 / 0.5 - 1) * constant, both.theirs(temperature=0.5).log_marginal_likelihood())


def regression() -> None:
    both = Both("regression")
    both.same_evidence(both.theirs(), both.evidence())


def precisions() -> None:
    both = Both()
    sizes = [p.numel() for p in both.model.parameters()]
    values = {"scalar": torch.tensor([0.7]), "layerwise": torch.tensor([0.5, 1.0, 2.0, 4.0])}
    values["diagonal"] = torch.linspace(0.5, 2.0, sum(sizes))
    for structure, value in values.items():
        evidence = both.evidence(GaussianPrior(structure))
        assert evidence.prior.log_precision is not None
        evidence.prior.log_precision.data = value.log().view_as(evidence.prior.log_precision)
        both.same_evidence(both.theirs(prior_precision=value), evidence)


def prior_means() -> None:
    both = Both()
    mean = {name: torch.full_like(w, 0.3) for name, w in both.model.named_parameters()}
    prior = GaussianPrior("scalar", precision=PRECISION, mean=mean)
    both.same_evidence(both.theirs(prior_mean=0.3), both.evidence(prior))


def structures() -> None:
    both = Both()
    for theirs, name in (("full", "full"), ("kron", "kfac"), ("diag", "diag")):
        both.same_evidence(both.theirs(theirs), both.evidence(estimator=f"{name}-N-C"))
        both.same_covariance(both.theirs(theirs), both.ours(name))
    both.x, both.test = torch.randn(30, 1, 4, 4), torch.randn(4, 1, 4, 4)
    both.model = nn.Sequential(
        nn.Conv2d(1, 2, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    )
    both.same_evidence(both.theirs("kron"), both.evidence(estimator="kfac-N-C"))
    both.same_covariance(both.theirs("kron"), both.ours("kfac"))


def kernel() -> None:
    both = Both("regression")
    la = both.theirs("gp", n_subset=30)
    both.same_covariance(la, both.ours("ntk"))
    ours = both.evidence(estimator="ntk-N-C").estimate(both.x, both.y).log_evidence
    assert abs(ours - la.log_marginal_likelihood()) > 1


def last_layers() -> None:
    both = Both()
    both.same_covariance(both.theirs(subset_of_weights="last_layer"), both.ours("last-layer"))


def subnetworks() -> None:
    both = Both()
    options = {"subset_of_weights": "subnetwork", "subnetwork_indices": torch.arange(12)}
    la = both.theirs(**options)
    expected = la._glm_predictive_distribution(both.test)[1]
    both.model[2].requires_grad_(False)
    same(both.ours()(both.test).covariance, expected)


def parts_of_evidence() -> None:
    both = Both("regression")
    la, estimate = both.theirs(), both.evidence().estimate(both.x, both.y)
    same(estimate.log_likelihood, la.log_likelihood)
    same(-2.0 * estimate.log_prior, la.scatter)
    same(estimate.log_det, la.log_det_ratio)
    precisions, weights = both.evidence().prior.precisions(), dict(both.model.named_parameters())
    of_prior = sum(precisions[name].log() * w.numel() for name, w in weights.items())
    same(estimate.log_det + of_prior, la.log_det_posterior_precision)


def optimized_precision() -> None:
    both = Both()
    la = both.theirs()
    la.optimize_prior_precision(method="marglik", n_steps=150, lr=0.1)
    result = evigrad.tune(
        both.model, (both.x, both.y), prior="scalar", estimator="full-N-C", rounds=10
    )
    assert result.evidence.prior.log_precision is not None
    same(result.evidence.prior.log_precision.exp(), la.prior_precision, 0.05)


def later_data() -> None:
    both = Both("regression")
    la = both.theirs(count=20)
    la.fit(both.loader(20), override=False)
    updated = both.ours(count=20).update(both.x[20:], both.y[20:])
    both.same_covariance(la, updated)
    assert (updated(both.test).mean - la(both.test)[0]).abs().min() > 1e-4


def moments_of_targets() -> None:
    both = Both("regression")
    (mean, covariance), prediction = both.theirs()(both.test), both.ours()(both.test)
    same(prediction.mean, mean)
    same(prediction.covariance, covariance)
    la = both.theirs()
    jacobians, _ = la.backend.jacobians(both.test)
    same(prediction.covariance, la.functional_variance(jacobians))
    diagonal = both.theirs()(both.test, diagonal_output=True)[1]
    same(both.ours()(both.test, correlated=False).covariance, diagonal)


def links() -> None:
    both = Both()
    la, posterior = both.theirs(), both.ours()
    for theirs, link in (
        ("probit", "probit"),
        ("bridge", "bridge"),
        ("bridge_norm", "bridge-norm"),
        ("mc", "monte-carlo"),
    ):
        expected = la(both.test, link_approx=theirs, n_samples=20_000)
        probabilities = posterior(both.test, link=link, num_samples=20_000).probabilities
        same(probabilities, expected, 0.02 if theirs == "mc" else 1e-8)


def joint() -> None:
    both = Both("regression")
    mean, covariance = both.theirs()(both.test, joint=True)
    prediction = both.ours().joint(both.test)
    same(prediction.mean.flatten(), mean)
    same(prediction.covariance.reshape(12, 12), covariance)


def samples() -> None:
    both = Both()
    la, posterior = both.theirs(), both.ours()
    ours, theirs = (
        posterior.joint(both.test).sample(20_000),
        la.functional_samples(both.test, n_samples=20_000),
    )
    alone, scale = posterior.sample(both.test, 20_000), theirs.std(0)
    probabilities = la.predictive_samples(both.test, n_samples=20_000)
    # laplace-torch uses the same random numbers for all inputs, so each is compared by itself.
    for i in range(len(both.test)):
        for drawn in (ours[:, i], alone[:, i]):
            same(moments(drawn / scale[i]), moments(theirs[:, i] / scale[i]), 0.05)
            same(moments(drawn.softmax(-1)), moments(probabilities[:, i]), 0.03)


def gradients() -> None:
    both = Both("regression")
    gradients = []
    for predict in (
        lambda x: both.theirs(enable_backprop=True)(x),
        lambda x: (both.ours()(x).mean, both.ours()(x).covariance),
    ):
        x = both.test.clone().requires_grad_()
        mean, covariance = predict(x)
        gradients.append(torch.autograd.grad(mean.sum() + covariance.square().sum(), x)[0])
    same(gradients[1], gradients[0])


def weights() -> None:
    both = Both()
    drawn = both.ours().sample_weights(20_000)
    flat = torch.cat([part.flatten(1) for part in drawn.values()], 1)
    same(moments(flat), moments(both.theirs().sample(20_000)), 0.1)


def networks_of_weights() -> None:
    both = Both()
    expected = both.theirs()(both.test, pred_type="nn", link_approx="mc", n_samples=2_000)
    drawn = both.ours().sample_weights(2_000)
    outputs = vmap(lambda w: functional_call(both.model, w, (both.test,)))(drawn)
    same(outputs.softmax(-1).mean(0), expected, 0.05)


def variances_of_weights() -> None:
    both = Both()
    vector = {name: torch.randn_like(w) for name, w in both.model.named_parameters()}
    flat = torch.cat([part.flatten() for part in vector.values()])
    la, variance = both.theirs(), both.ours().variance_of(vector)
    same(variance, flat @ la.posterior_covariance @ flat)
    same(variance, flat @ torch.linalg.solve(la.posterior_precision, flat))
    same(variance, (flat @ la.posterior_scale).square().sum())


def states() -> None:
    both = Both()
    la, again, posterior = both.theirs(), both.theirs(count=3), both.ours()
    again.load_state_dict(la.state_dict())
    both.same_covariance(again, both.evidence().posterior(state=posterior.state_dict()))


def no_backend() -> None:
    from laplace.curvature import CurvlinopsEF  # pyright: ignore[reportMissingImports]

    both = Both()
    both.same_evidence(both.theirs(backend=CurvlinopsEF), both.evidence(estimator="full-N-1-ef"))


# By the beginnings of the rows. Rows without a test say that something is not available.
ROWS: dict[str, Callable[[], None]] = {
    "`marglik_training(": training,
    "`n_epochs_burnin`": training,
    "`lr_hyp`": settings_of_training,
    "`prior_prec_init`": settings_of_training,
    "`sigma_noise_init`": settings_of_training,
    '`Laplace(model, "classification"': temperatures,
    '`"regression"`': regression,
    "`prior_precision`": precisions,
    "`prior_mean": prior_means,
    '`hessian_structure="full"`': structures,
    '`hessian_structure="gp"`': kernel,
    '`subset_of_weights="last_layer"`': last_layers,
    '`subset_of_weights="subnetwork"`': subnetworks,
    "`la.fit(loader)`": temperatures,
    "`la.log_likelihood`": parts_of_evidence,
    '`la.optimize_prior_precision(method="marglik")`': optimized_precision,
    "`la.fit(later, override=False)`": later_data,
    "`la(x)` in regression": moments_of_targets,
    '`la(x, link_approx="probit")`': links,
    "`la(x, joint=True)`": joint,
    "`la.functional_samples(": samples,
    "`la.predictive_samples(": samples,
    "`enable_backprop=True`": gradients,
    "`la.sample(n)`": weights,
    '`la(x, pred_type="nn"': networks_of_weights,
    "`la.posterior_covariance`": variances_of_weights,
    "`la.state_dict()`": states,
    "`backend=BackPackGGN`": no_backend,
}
MISSING = ('`la.optimize_prior_precision(method="gridsearch")`', "`la.log_prob(")


def test_the_page_has_these_rows() -> None:
    page = Path(__file__).parents[2] / "docs/from_laplace_torch.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(ROWS) + len(MISSING)
    for row in rows:
        assert row[2:].startswith((*ROWS, *MISSING)), row
        assert ("not available" in row) == row[2:].startswith(MISSING)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("check", dict.fromkeys(ROWS.values()), ids=lambda check: check.__name__)
def test_each_row_is_that_of_laplace_torch(check: Callable[[], None]) -> None:
    check()
