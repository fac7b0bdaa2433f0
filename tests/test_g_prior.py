"""Priors that the curvature shapes, against dense matrices and exact invariances."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evigrad import Evidence, Learner, Schedule, fit
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior

N, CLASSES = 14, 3


def network(seed: int = 0, normalized: bool = False) -> Any:
    torch.manual_seed(seed)
    middle: list[nn.Module] = [nn.LayerNorm(5)] if normalized else []
    return nn.Sequential(nn.Linear(4, 5), *middle, nn.Tanh(), nn.Linear(5, CLASSES)).double()


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (N,), generator=generator)


def evidence_of(
    model: nn.Module, estimator: str = "full-N-C", structure: str = "layerwise", **options: object
) -> Evidence:
    prior = GaussianPrior(structure, shape="g-prior", **options)  # pyright: ignore[reportArgumentType]
    return Evidence(model, Categorical(), prior, estimator=estimator, num_data=N, generator=0)


def curvature_of(model: nn.Module, x: Tensor) -> Tensor:
    """The Gauss-Newton matrix of all examples, from automatic differentiation."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def outputs(w: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, w, (x,))

    jacobians = torch.func.jacrev(outputs)(weights)
    rows = torch.cat([j.flatten(2) for j in jacobians.values()], 2)
    p = outputs(weights).softmax(1)
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("ncp,ncd,ndq->pq", rows, hessian, rows)


def dense_factors(evidence: Evidence, x: Tensor) -> Tensor:
    """The curvature per example of each weight, with the least curvature of a weight."""
    sizes = [w.numel() for w in evidence.weights().values()]
    parts = (curvature_of(evidence.model, x).diagonal() / N).split(sizes)
    means = torch.stack([part.mean() for part in parts])
    least = 1e-3 * means + 1e-6 * means.mean()
    return torch.cat([part + floor for part, floor in zip(parts, least, strict=True)])


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
def test_the_shape_is_the_diagonal_of_the_curvature(structure: str) -> None:
    evidence, (x, y) = evidence_of(network(), structure=structure), data()
    assert flat(evidence.prior.factors()).eq(1.0).all()
    evidence.shape_prior((x, y))
    torch.testing.assert_close(
        flat(evidence.prior.factors()), dense_factors(evidence, x), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("estimator", ["full-N-C", "ntk-N-C", "diag-N-C"])
def test_value_and_gradient_are_those_of_dense_matrices(estimator: str) -> None:
    evidence, (x, y) = evidence_of(network(), estimator), data()
    evidence.shape_prior((x, y))
    estimate = evidence.backward(x, y)
    log_precision = evidence.prior.log_precision
    assert log_precision is not None
    assert log_precision.grad is not None
    sizes = torch.tensor([w.numel() for w in evidence.weights().values()])
    deltas = log_precision.detach().clone().requires_grad_()
    precision = deltas.exp().repeat_interleave(sizes) * dense_factors(evidence, x)
    hessian = curvature_of(evidence.model, x)
    if estimator.startswith("diag"):
        hessian = hessian.diagonal().diag()
    w = flat({name: weight.detach() for name, weight in evidence.weights().items()})
    log_prob = -nn.functional.cross_entropy(evidence.model(x).detach(), y, reduction="sum")
    value = log_prob - 0.5 * (w @ (precision * w))
    value = value - 0.5 * torch.logdet(hessian + precision.diag()) + 0.5 * precision.log().sum()
    assert estimate.log_evidence == pytest.approx(value.item(), rel=1e-9)
    (gradient,) = torch.autograd.grad(-value / N, deltas)
    torch.testing.assert_close(log_precision.grad, gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("structure", ["full", "ntk", "diag", "last-layer"])
def test_the_posterior_covariance_is_that_of_dense_matrices(structure: str) -> None:
    evidence, (x, y) = evidence_of(network()), data()
    evidence.shape_prior((x, y))
    posterior = evidence.posterior((x, y), structure=structure)
    precision = flat({n: p.detach() for n, p in evidence.prior.precisions().items()})
    hessian = curvature_of(evidence.model, x)
    chosen = torch.arange(len(precision))
    if structure == "diag":
        hessian = hessian.diagonal().diag()
    if structure == "last-layer":
        chosen = chosen[-6 * CLASSES :]
    covariance = torch.linalg.inv((hessian + precision.diag())[chosen][:, chosen])
    jacobian = torch.cat(
        [
            j.flatten(2)
            for j in torch.func.jacrev(
                lambda w: torch.func.functional_call(evidence.model, w, (x[:2],))
            )({n: w.detach() for n, w in evidence.weights().items()}).values()
        ],
        2,
    )[:, :, chosen]
    expected = jacobian @ covariance @ jacobian.mT
    torch.testing.assert_close(posterior(x[:2]).covariance, expected, rtol=1e-6, atol=1e-10)


def test_learned_precisions_follow_the_shape_and_fixed_ones_do_not() -> None:
    for learnable in (True, False):
        model, (x, y) = network(), data()
        evidence = evidence_of(model, learnable=learnable, precision=2.0)
        evidence.shape_prior((x, y))
        before = evidence.prior.quadratic(evidence.weights()).item()
        with torch.no_grad():
            model[0].weight.mul_(3.0)
        changed = evidence.prior.quadratic(evidence.weights()).item()
        evidence.shape_prior((x, y))
        after = evidence.prior.quadratic(evidence.weights()).item()
        assert changed != pytest.approx(before, rel=0.1)
        assert (after == pytest.approx(changed, rel=1e-9)) == learnable
        values = evidence.prior.log_precision
        assert values is not None
        assert values.eq(torch.tensor(2.0).double().log()).all() == (not learnable)


@given(factor=st.floats(0.2, 5.0), seed=st.integers(0, 3))
def test_the_scale_before_a_normalization_layer_does_not_change_the_prior(
    factor: float, seed: int
) -> None:
    """For a fixed precision, the prior's part of the loss does not change, unlike usual decay."""
    model, (x, y) = network(seed, normalized=True), data(seed)
    with torch.no_grad():
        model[1].eps = 0.0
    evidence = evidence_of(model, learnable=False)
    evidence.shape_prior((x, y))
    before = evidence.prior.quadratic(evidence.weights()).item()
    with torch.no_grad():
        for weight in model[0].parameters():
            weight.mul_(factor)
    evidence.shape_prior((x, y))
    after = evidence.prior.quadratic(evidence.weights()).item()
    assert after == pytest.approx(before, rel=1e-3)


def test_weight_decay_is_the_gradient_of_the_loss() -> None:
    model, (x, y) = network(), data()
    evidence = evidence_of(model)
    evidence.shape_prior((x, y))
    evidence.map_loss(x, y).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    evidence.add_weight_decay()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_weights_without_curvature_have_a_prior() -> None:
    model, (x, y) = network(), data()
    with torch.no_grad():
        model[2].weight[:, 0] = 0.0  # no output depends on the first unit
    evidence = evidence_of(model)
    evidence.shape_prior((x, y))
    factors = evidence.prior.factors()["0.weight"]
    assert factors[0].min() > 0
    assert factors[0].max() < 0.01 * factors.mean()


def test_training_shapes_the_prior_before_each_round_and_a_state_keeps_it() -> None:
    model, (x, y) = network(), data()
    evidence = evidence_of(model, "diag-N-C")
    learner = Learner(evidence, (x, y), Schedule(epochs=2, every=1, burn_in=1))
    learner.step()
    first = flat(evidence.prior.factors()).clone()
    torch.testing.assert_close(first, dense_factors(evidence, x), rtol=1e-10, atol=0)
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    learner.step()
    assert not torch.equal(flat(evidence.prior.factors()), first)
    state = evidence.prior.state_dict()
    for bound in (False, True):
        prior = GaussianPrior(shape="g-prior")
        if bound:
            prior.bind(evidence.weights())
        prior.load_state_dict(state)
        prior.bind(evidence.weights())
        for name, precision in evidence.prior.precisions().items():
            assert torch.equal(prior.precisions()[name], precision)


def test_a_run_with_few_examples_of_many_is_reproducible() -> None:
    x = torch.randn(1200, 2, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True) + 0.1
    learned = []
    for _ in range(2):
        torch.manual_seed(0)
        result = fit(
            nn.Linear(2, 1),
            (x, y),
            likelihood=Gaussian(),
            prior=GaussianPrior(shape="g-prior"),
            schedule=Schedule(epochs=2, every=1, burn_in=1),
            progress=False,
        )
        learned.append(flat(dict(result.evidence.prior.factors())))
    assert torch.equal(*learned)


def test_what_a_g_prior_cannot_do_is_said() -> None:
    x, y = data()
    with pytest.raises(ConfigurationError, match="KFAC needs one precision per tensor"):
        evidence_of(network(), "kfac-N-C").estimate(x, y)
    for structure, shape in (("diagonal", "g-prior"), ("layerwise", "gprior")):
        with pytest.raises(ConfigurationError, match="shape must be 'equal' or 'g-prior'"):
            GaussianPrior(structure, shape=shape)
    plain = Evidence(network(), Categorical(), GaussianPrior(), estimator="full-N-C", num_data=N)
    with pytest.raises(ConfigurationError, match="Only a bound prior with shape='g-prior'"):
        plain.shape_prior((x, y))
    shaped = evidence_of(network()).prior.state_dict()
    with pytest.raises(
        ConfigurationError, match=re.escape("Create this prior with shape='g-prior'")
    ):
        GaussianPrior().load_state_dict(shaped)


def test_a_shape_needs_no_new_plan_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence, (x, y) = evidence_of(network()), data()
    evidence.estimate(x, y)
    monkeypatch.setattr("evigrad.network.network.plan", None)
    evidence.shape_prior((x, y))
    torch.testing.assert_close(
        flat(evidence.prior.factors()), dense_factors(evidence, x), rtol=1e-10, atol=0
    )
