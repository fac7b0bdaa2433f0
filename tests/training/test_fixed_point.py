"""MacKay's update of the precisions, against the dense trace and against gradient steps."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence, Memory, reference
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior, NormalHyperprior
from evigrad.training.fixed_point import LOG_LIMIT, MAX_FACTOR, FixedPoint

N, OUTPUTS = 12, 3
PRIORS = ["scalar", "layerwise", "diagonal", {"first": ["0"], "last": ["2"]}]


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()


def data(n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 4, dtype=torch.float64, generator=generator), torch.arange(n) % OUTPUTS


def make(estimator: str = "full-N-C", prior: Any = "layerwise", **settings: Any) -> Evidence:
    if not isinstance(prior, GaussianPrior):
        prior = GaussianPrior(prior, precision=settings.pop("precision", 3.0))
    return Evidence(
        settings.pop("model", None) or network(),
        settings.pop("likelihood", None) or Categorical(),
        prior,
        estimator=estimator,
        num_data=settings.pop("num_data", N),
        generator=0,
        **settings,
    )


def log_precision(evidence: Evidence) -> nn.Parameter:
    parameter = evidence.prior.log_precision
    assert parameter is not None
    return parameter


def gradient_of(evidence: Evidence) -> Tensor:
    gradient = log_precision(evidence).grad
    assert gradient is not None
    return gradient


def sums_by_group(evidence: Evidence, values: Tensor) -> Tensor:
    """Sums of one number for each weight over the entries of ``log_precision``."""
    prior = evidence.prior
    if prior.structure == "diagonal":
        return values
    weights = evidence.weights()
    parts = values.split([w.numel() for w in weights.values()])
    total = torch.zeros(len(prior.group_names), dtype=values.dtype)
    for name, part in zip(weights, parts, strict=True):
        total[prior.group_of[name]] += part.sum()
    return total


# ------------------------------------------------------------------ the effective parameters


def traces(evidence: Evidence, x: Tensor, temperature: float = 1.0) -> Tensor:
    """tr(H (H + P0)⁻¹) over each group, by dense matrices."""
    weights = evidence.weights()
    jacobian = reference.jacobian(evidence.model, weights, x)
    f = reference.outputs(evidence.model, x)
    hessian = reference.softmax_hessian(f)
    h = reference.ggn(jacobian, hessian) / temperature
    p0 = reference.vector(evidence.prior.precisions(), weights).diag()
    return sums_by_group(evidence, (h @ torch.linalg.inv(h + p0)).diagonal().detach())


@pytest.mark.each(1)
@pytest.mark.parametrize("prior", PRIORS, ids=str)
@pytest.mark.parametrize("estimator", ["full-N-C", "ntk-N-C"])
def test_gamma_is_the_trace_of_each_group(estimator: str, prior: Any) -> None:
    evidence = make(estimator, prior, temperature=0.7, log_det_weight=2.5)
    with torch.no_grad():
        log_precision(evidence).add_(torch.randn(len(log_precision(evidence))).double())
    x, y = data()
    evidence.backward(x, y)
    gamma = FixedPoint(evidence).effective_parameters()
    torch.testing.assert_close(gamma, traces(evidence, x, 0.7), rtol=1e-9, atol=1e-12)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 4).double())
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.gate * x)


def test_gamma_of_a_gradient_in_two_passes() -> None:
    evidence = make(
        "ntk-N-C", model=Gated(), hyperparameters=["gate"], memory=Memory(micro_batch=5)
    )
    x, y = data()
    evidence.backward(x, y)
    gamma = FixedPoint(evidence).effective_parameters()
    torch.testing.assert_close(gamma, traces(evidence, x), rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------ the fixed point


def settle(evidence: Evidence, passes: Any, steps: int = 40) -> Tensor:
    update = FixedPoint(evidence)
    for _ in range(steps):
        evidence.backward_kept(passes)
        update.step()
    evidence.backward_kept(passes)
    gradient = gradient_of(evidence).clone()
    log_precision(evidence).grad = None
    return gradient


ESTIMATORS = ["ntk-N-C", "full-N-C", "blockdiag-N-C", "kfac-N-C", "diag-N-C"]
# A precision that varies in a Kronecker block has no log-determinant.
PAIRS = [(e, p) for e in ESTIMATORS for p in PRIORS if (e, p) != ("kfac-N-C", "diagonal")]


@pytest.mark.each(1)
@pytest.mark.parametrize(
    ("estimator", "prior", "precision"),  # from below and from above, by turns
    [(*pair, (1e-3, 1e3)[i % 2]) for i, pair in enumerate(PAIRS)],
    ids=str,
)
def test_the_gradient_vanishes_at_the_fixed_point(
    estimator: str, prior: Any, precision: float
) -> None:
    evidence = make(estimator, prior, precision=precision)
    assert float(settle(evidence, evidence.collect(*data())).abs().max()) < 1e-10


@pytest.mark.one_in(2)
@pytest.mark.parametrize("structure", PRIORS, ids=str)
def test_under_a_mean_it_is_where_the_deviations_have_their_number(structure: Any) -> None:
    """δ ‖w − w₀‖² = γ for each group, by dense traces."""
    prior = GaussianPrior(structure, precision=1e-2, mean={"0": "initial"})
    evidence = make("full-N-C", prior)
    start = {name: w.detach().clone() for name, w in evidence.weights().items()}
    with torch.no_grad():
        for w in evidence.weights().values():
            w += 0.5 * torch.cos(torch.arange(w.numel()).double()).reshape(w.shape)
    x, y = data()
    # Single weights of a diagonal prior that the data hardly determine take more steps.
    gradient = settle(evidence, evidence.collect(x, y), 200 if structure == "diagonal" else 40)
    assert float(gradient.abs().max()) < 1e-10
    squares = torch.cat(
        [
            (w.detach() - (start[name] if name.startswith("0") else 0)).square().flatten()
            for name, w in evidence.weights().items()
        ]
    )
    fitted = log_precision(evidence).detach().exp() * sums_by_group(evidence, squares)
    torch.testing.assert_close(fitted, traces(evidence, x), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("structure", PRIORS, ids=str)
def test_the_start_keeps_to_a_mean(structure: Any) -> None:
    prior = GaussianPrior(structure, mean={"0": "initial"})
    evidence = make("full-N-C", prior)
    FixedPoint(evidence).start(2.0, 30.0)
    grouped = structure == "scalar"  # one group, of which a part has a mean
    for name, precision in prior.precisions().items():
        expected = 30.0 if grouped or name.startswith("0") else 2.0
        assert torch.allclose(precision, torch.tensor(expected, dtype=precision.dtype)), name


def test_it_is_where_many_steps_of_adam_lead() -> None:
    x, y = data()
    evidence, other = make("ntk-N-C"), make("ntk-N-C")
    settle(evidence, evidence.collect(x, y))
    adam = torch.optim.Adam([log_precision(other)], lr=0.1)
    passes = other.collect(x, y)
    for step in range(400):
        adam.param_groups[0]["lr"] = 0.1 * (1 - step / 400)
        adam.zero_grad()
        other.backward_kept(passes)
        adam.step()
    torch.testing.assert_close(log_precision(evidence), log_precision(other), rtol=0, atol=1e-5)


def test_a_noise_that_is_learned_beside_it() -> None:
    """Both at once on one kept pass: the gradient of both vanishes."""
    x, _ = data()
    y = torch.randn(N, OUTPUTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    evidence = make("ntk-N-C", likelihood=Gaussian(0.4))
    passes, update = evidence.collect(x, y), FixedPoint(evidence)
    log_noise = evidence.hyperparameters()["likelihood.log_noise"]
    for _ in range(150):
        log_noise.grad = None
        evidence.backward_kept(passes)
        assert log_noise.grad is not None
        with torch.no_grad():
            log_noise -= 0.1 * log_noise.grad
        update.step()
    log_noise.grad = None
    evidence.backward_kept(passes)
    assert float(gradient_of(evidence).abs().max()) < 1e-8
    assert log_noise.grad is not None
    assert abs(float(log_noise.grad)) < 1e-8


def test_a_damped_step_is_the_mean_of_old_and_new_precision() -> None:
    evidence = make()
    update = FixedPoint(evidence, 0.3)
    evidence.backward(*data())
    gamma = update.effective_parameters()
    norms = torch.stack([w.detach().square().sum() for w in evidence.weights().values()])
    old = log_precision(evidence).detach().exp()
    update.step()
    torch.testing.assert_close(
        log_precision(evidence).detach().exp(), 0.7 * old + 0.3 * gamma / norms
    )


# ------------------------------------------------------------------ where there is no optimum


def test_no_group_has_more_effective_parameters_than_weights() -> None:
    """A small block that stands for many data claims more; the update does not believe it."""
    evidence = make("ntk-4-1", num_data=100_000, precision=1e-2)
    evidence.backward(*data(4))
    gamma = FixedPoint(evidence).effective_parameters()
    sizes = [w.numel() for w in evidence.weights().values()]
    assert gamma[2:].tolist() == sizes[2:]
    assert (gamma <= torch.tensor(sizes)).all()


def test_weights_of_zero_keep_their_precision() -> None:
    model = network()
    with torch.no_grad():
        model.get_parameter("0.bias").zero_()
    evidence = make(model=model)
    evidence.backward(*data())
    before = log_precision(evidence).detach().clone()
    FixedPoint(evidence, 1.0).step()
    after = log_precision(evidence).detach()
    assert after[1] == before[1]
    assert (after[[0, 2, 3]] != before[[0, 2, 3]]).all()


def test_weights_at_the_mean_keep_their_precision() -> None:
    evidence = make(prior=GaussianPrior(mean={"0.weight": "initial"}))
    evidence.backward(*data())
    before = log_precision(evidence).detach().clone()
    FixedPoint(evidence, 1.0).step()
    moved = log_precision(evidence).detach() != before
    assert moved.tolist() == [False, True, True, True]


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_a_layer_without_curvature_falls_slowly_and_not_for_ever(rate: float) -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dead, self.net = nn.Linear(4, 2).double(), network()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + 0.0 * self.dead(x).sum(1, keepdim=True)

    evidence = make(model=Dead(), prior={"dead": ["dead"], "net": ["net"]})
    update = FixedPoint(evidence, rate)
    evidence.backward(*data())
    assert float(update.effective_parameters()[0]) == pytest.approx(0.0, abs=1e-12)
    update.step()
    change = math.log(3.0) - float(log_precision(evidence)[0].detach())
    assert change == pytest.approx(math.log(min(1 / (1 - rate + 1e-9), MAX_FACTOR)), rel=1e-6)
    with torch.no_grad():
        log_precision(evidence)[0] = -LOG_LIMIT
    evidence.backward(*data())
    update.step()
    assert float(log_precision(evidence)[0].detach()) == -LOG_LIMIT


# ------------------------------------------------------------------ what is refused


def test_a_prior_that_it_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="learnable prior"):
        FixedPoint(make(prior=GaussianPrior(learnable=False)))
    with pytest.raises(ConfigurationError, match="without a hyperprior"):
        FixedPoint(make(prior=GaussianPrior(hyperprior=NormalHyperprior())))


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.01, float("nan"), True])
def test_a_rate_out_of_range(rate: float) -> None:
    with pytest.raises(ConfigurationError, match=r"in \(0, 1\]"):
        FixedPoint(make(), rate)


def test_each_step_needs_a_gradient_of_its_own() -> None:
    evidence = make()
    update = FixedPoint(evidence)
    with pytest.raises(ConfigurationError, match=r"Call evidence\.backward"):
        update.step()
    evidence.backward(*data())
    update.step()
    before = log_precision(evidence).detach().clone()
    with pytest.raises(ConfigurationError, match=r"Call evidence\.backward"):
        update.step()
    log_precision(evidence).grad = torch.full_like(before, float("nan"))
    with pytest.raises(EvigradError, match="NaN or infinite"):
        update.step()
    assert torch.equal(log_precision(evidence).detach(), before)


@pytest.mark.parametrize("estimator", ["full-N-C", "ntk-6-1"])
def test_groups_that_are_not_learned(estimator: str) -> None:
    """The others are as they would be with all of them learned, given the same precisions."""
    groups = {"first": ["0"], "last": ["2"]}
    last_only, every = (
        make(estimator, GaussianPrior(groups, precision=3.0, learnable=learnable))
        for learnable in ({"first": False}, True)
    )
    x, y = data(N if estimator == "full-N-C" else 6)
    for evidence in (last_only, every):
        evidence.backward(x, y)
    torch.testing.assert_close(gradient_of(last_only), gradient_of(every)[1:])
    updates = FixedPoint(last_only), FixedPoint(every)
    effective, whole = (update.effective_parameters() for update in updates)
    torch.testing.assert_close(effective, whole[1:])
    for update in updates:
        update.step()
    torch.testing.assert_close(log_precision(last_only), log_precision(every)[1:])
    assert last_only.prior.precisions()["0.weight"].item() == pytest.approx(3.0)
