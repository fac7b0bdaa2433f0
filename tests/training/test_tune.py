"""Hyperparameters of a trained network, learned with its weights as they are."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Optimization, Schedule, reference, tune
from evigrad.errors import ConfigurationError, InputError
from evigrad.invariances import InputScale
from evigrad.likelihoods import Gaussian
from evigrad.priors import GaussianPrior
from evigrad.training import fit
from evigrad.training.settings import grouped


@pytest.fixture(scope="module")
def trained(blobs) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    x, y = blobs[0][0].double(), blobs[0][1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return fit(
        net,
        (x, y),
        estimator=None,
        schedule=Schedule(epochs=60),
        optimization=Optimization(lr=0.05),
        progress=False,
    ).model, (x, y)


def best_precisions(model: nn.Module, x: Tensor) -> Tensor:
    """Log precisions at the maximum of the exact log evidence, by L-BFGS on dense matrices."""
    weights = dict(model.named_parameters())
    rows = reference.jacobian(model, weights, x).detach()
    hessian = reference.softmax_hessian(reference.outputs(model, x)).detach()
    curvature = torch.einsum("nci,ncd,ndj->ij", rows, hessian, rows)
    sizes = torch.tensor([w.numel() for w in weights.values()])
    squares = torch.stack([w.detach().square().sum() for w in weights.values()])
    log_precisions = torch.zeros(len(weights), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [log_precisions],
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        prior = log_precisions.exp().repeat_interleave(sizes)
        log_det = torch.logdet(curvature + prior.diag()) - prior.log().sum()
        value = 0.5 * (log_precisions.exp() * squares).sum() + 0.5 * log_det
        value.backward()
        return value

    optimizer.step(loss)
    return log_precisions.detach()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("update", "error"), [("fixed_point", 1e-4), ("adam", 0.02)])
def test_precisions_reach_the_optimum_and_the_weights_stay(trained, update, error):
    model, data = trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    result = tune(
        model,
        data,
        estimator="ntk-N-C",
        precision=3.0,
        optimization=Optimization(prior_update="adam") if update == "adam" else None,
    )
    best = best_precisions(model, data[0])
    log_precision = result.evidence.prior.log_precision
    assert log_precision is not None
    assert (log_precision.detach() - best).abs().max() < error
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    evidence = [float(row["log_evidence"] or 0) for row in result.history]
    assert len(evidence) == 20 and evidence[-1] > evidence[0]
    assert result.history[-1]["precision/0.weight"] == pytest.approx(
        log_precision.detach()[0].exp().item()
    )
    assert len(repr(result)) < 200 and "20 rounds, log evidence" in repr(result)


def test_noise_and_hyperparameters_of_the_model_are_learned_too(blobs):
    x = blobs[0][0]
    y = x[:, :1] + 0.3 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(InputScale(4), nn.Linear(4, 1))
    fit(
        net,
        (x, y),
        likelihood=Gaussian(0.3),
        estimator=None,
        schedule=Schedule(epochs=100),
        optimization=Optimization(lr=0.05),
        progress=False,
    )
    weights = [w.detach().clone() for w in net[1].parameters()]
    result = tune(
        net, (x, y), likelihood="gaussian", estimator="full-N-C", hyperparameters=["0"], rounds=5
    )
    assert all(torch.equal(a, b) for a, b in zip(weights, net[1].parameters(), strict=True))
    first, last = result.history[0], result.history[-1]
    assert 0.2 < float(last["noise"] or 0) < 0.45
    assert first["model/0.log_scale"] != last["model/0.log_scale"]
    assert last["hyper_steps"] == 50


def test_a_prior_without_a_fixed_point_learns_with_adam(trained):
    model, data = trained
    prior = GaussianPrior("scalar", hyperprior=lambda log: -0.5 * log.square().sum())
    result = tune(model, data, prior=prior, estimator="kfac-30-1", rounds=2, steps=2)
    assert result.history[-1]["precision/all"] != pytest.approx(1.0)


def test_weights_that_are_the_mean_are_refused_and_others_learned_from(trained):
    model, data = trained
    with pytest.raises(ConfigurationError, match=r"the prior's mean.*result\.evidence\.prior"):
        tune(model, data, prior=GaussianPrior(mean={"0": "initial"}), estimator="kfac-30-1")
    start = {name: 0.5 * w.detach() for name, w in model.named_parameters()}
    result = tune(model, data, prior=GaussianPrior(mean=start), estimator="full-N-C", rounds=9)
    # The deviations are half the weights, and the log-determinant favours the same precisions.
    zero = tune(model, data, estimator="full-N-C", rounds=9)
    names = [f"precision/{name}" for name in start]
    assert all(float(result.history[-1][n] or 0) > float(zero.history[-1][n] or 0) for n in names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 0}, "rounds must be"),
        ({"steps": 0}, "steps must be"),
        ({"estimator": None}, "must be the name of an estimator, got None"),
        ({"estimator": "ntk-61-1"}, "61"),
        ({"prior": "layer"}, "layerwise"),
    ],
)
def test_what_does_not_fit_is_refused_beforehand(trained, changes: dict[str, Any], words):
    with pytest.raises(ConfigurationError, match=words):
        tune(*trained, **grouped({"estimator": "ntk-20-1", **changes}))


def test_unfit_data_are_refused_and_fit_names_tune(trained):
    model, (x, y) = trained
    with pytest.raises(InputError):
        tune(model, (x, torch.full_like(y, 7)), estimator="ntk-20-1")
    with pytest.raises(InputError):
        tune(model, (x * math.nan, y), estimator="ntk-20-1")
    with pytest.raises(ConfigurationError, match=r"evigrad\.tune"):
        fit(model, (x, y), optimization=Optimization(lr=0.0))
