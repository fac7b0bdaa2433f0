"""Precisions along axes: dense references, and limits with known priors."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from likelihood_zoo import LIKELIHOODS, targets
from passes.test_two_pass import evidence_of
from torch import Tensor, nn
from zoo import CASES, HYPERPARAMETERS, OUTPUTS

from evigrad import Evidence, Memory, reference
from evigrad.core.curvature import ntk
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.passes import problem
from evigrad.posterior.posterior import STRUCTURES
from evigrad.training.fixed_point import FixedPoint

M = 4
LAYERS = [
    *(
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "embedding",
        "layer-norm",
        "batch-norm",
        "transposed",
    ),
    *("attention", "lstm", "loose", "tied", "tied-embedding", "twice", "residual", "positions"),
]
ESTIMATORS = ["full-N-C", "ntk-N-C", "blockdiag-N-C", "diag-N-C", "ntk-2-1", "ntk-5-rows-anchored"]


class Ranked(nn.Module):
    """An adapter U V of rank 2, and a product with a weight of shape (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(3, 2, bias=False)
        self.up = nn.Linear(2, 4)
        self.last = nn.Parameter(torch.randn(4, OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.down(x))) @ self.last


# Rank r has a row of one matrix and a column of the other. ``last`` has one precision per output.
TIES = {"ranks": {"down": 0, "up.weight": 1}, "outputs": {"last": 1}, "rest": "*"}


def ranked(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, x = Ranked().double(), torch.randn(M, 3, dtype=torch.float64)
    return model, x, targets(Categorical(), M)


def axes_of(model: nn.Module) -> dict[str, Any]:
    """A group for each weight, along its axes in turn."""
    names = [name for name, _ in model.named_parameters() if name not in HYPERPARAMETERS]
    shapes = {name: w.shape for name, w in model.named_parameters()}
    return {
        name: {name: place % len(shapes[name])} if len(shapes[name]) else name
        for place, name in enumerate(names)
    }


def scatter(evidence: Evidence, seed: int = 0) -> Tensor:
    """Draw the log precisions of a prior, and return them."""
    values = evidence.prior.log_precision
    assert values is not None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        values.copy_(torch.randn(values.shape, generator=generator, dtype=values.dtype))
    return values


def gradient_of(evidence: Evidence) -> Tensor:
    """The gradient of the log precisions, which is cleared."""
    values = evidence.prior.log_precision
    assert values is not None and values.grad is not None
    gradient, values.grad = values.grad, None
    return gradient


def check(evidence: Evidence, pair: tuple[Tensor, Tensor]) -> None:
    scatter(evidence)
    for block in evidence.blocks(pair).take(1):
        estimate = evidence.backward(block)
        expected = reference.log_evidence(evidence, block).item()
        assert estimate.log_evidence == pytest.approx(expected, rel=1e-11)
        gradients = reference.gradients(evidence, block)
        for name, parameter in evidence.hyperparameters().items():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-11)
            parameter.grad = None
        kept = evidence.collect(block, wrt="prior.log_precision")
        for _ in range(2):  # the second time from caches
            kept_estimate = evidence.backward_kept(kept, wrt="prior.log_precision")
            assert kept_estimate.log_evidence == pytest.approx(expected, rel=1e-11)
            expected_gradient = gradients["prior.log_precision"]
            torch.testing.assert_close(
                gradient_of(evidence), expected_gradient, rtol=1e-8, atol=1e-11
            )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", LAYERS)
def test_layers_agree_with_dense_matrices(case: str) -> None:
    model, x = CASES[case].build(M)
    estimator = ESTIMATORS[LAYERS.index(case) % len(ESTIMATORS)]
    memory = Memory(micro_batch=2) if LAYERS.index(case) % 2 else None
    y = targets(Categorical(), M)
    prior = axes_of(model)
    check(
        evidence_of(model, Categorical(), estimator, prior=prior, num_data=M, memory=memory), (x, y)
    )


@pytest.mark.each(1)
@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("case", ["linear", "conv2d", "tied-embedding", "attention", "positions"])
def test_scaled_products_and_grams_agree_with_dense_matrices(case, micro_batch, monkeypatch):
    model, x = CASES[case].build(M)
    names = [name for name, _ in model.named_parameters() if name not in HYPERPARAMETERS]
    ndims = {name: w.ndim for name, w in model.named_parameters()}
    few = [0] if micro_batch else [0, ntk._FEW_ENTRIES]  # Grams, or products of scaled rows
    for axis, few_entries in product((0, 1), few):
        monkeypatch.setattr(problem, "contracted", lambda uses, *_: uses)
        monkeypatch.setattr(ntk, "_FEW_ENTRIES", few_entries)
        prior = {n: {n: min(axis, ndims[n] - 1)} if ndims[n] else n for n in names}
        evidence = evidence_of(
            model,
            Categorical(),
            "ntk-5-rows-anchored" if axis else "ntk-N-C",
            prior=prior,
            num_data=M,
            memory=None if micro_batch is None else Memory(micro_batch=micro_batch),
        )
        if case != "conv2d":
            assert any("contracted" in report.curvature for report in evidence.describe(x))
        check(evidence, (x, targets(Categorical(), M)))


@pytest.mark.each(1)
@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_ties_between_axes_of_weights(estimator: str, likelihood: str) -> None:
    model, x, _ = ranked()
    density = LIKELIHOODS[likelihood](OUTPUTS)
    evidence = evidence_of(model, density, estimator, prior=TIES, num_data=M)
    assert evidence.prior.group_names == ["ranks", "outputs", "rest"]
    check(evidence, (x, targets(density, M)))


@pytest.mark.each(1)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("case", ["conv1d", "conv2d"])  # the second has channel groups
def test_kronecker_factors_along_an_axis(case: str, axis: int) -> None:
    model, x = CASES[case].build(M)
    prior = {"axis": {"body.weight": axis}, "outputs": {"head.weight": 0}, "rest": "*"}
    y = targets(Categorical(), M)
    evidence = evidence_of(model, Categorical(), "kfac-N-C", prior=prior, num_data=M)
    scatter(evidence)
    estimate = evidence.backward(x, y)
    gradient = evidence.prior.log_precision.grad
    kept, weights = evidence.collect(x, y, wrt="prior"), evidence.weights()
    statistic, precisions = kept.statistic, evidence.prior.precisions()
    log_det = torch.zeros((), dtype=torch.float64)
    for name, factors in statistic.factors.items():
        pairs = zip(factors.inputs, factors.gradients, strict=True)
        blocks = torch.stack([torch.kron(b, a) for a, b in pairs]) / factors.count
        root = precisions[name].expand_as(weights[name]).reshape(blocks.shape[:2]).rsqrt()
        log_det = (
            log_det
            + torch.logdet(
                torch.eye(root.shape[1]) + root[:, :, None] * blocks * root[:, None]
            ).sum()
        )
    for name, block in statistic.blocks.items():
        precision = precisions[name].expand_as(weights[name]).flatten()
        log_det = log_det + torch.logdet(torch.eye(len(block)) + block / precision)
    assert estimate.log_det == pytest.approx(log_det.item(), rel=1e-11)
    quadratic = evidence.prior.quadratic(weights)
    loss = 0.5 * (log_det + quadratic) / M
    (expected,) = torch.autograd.grad(loss, [evidence.prior.log_precision])
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    gradient_of(evidence)
    for _ in range(2):  # the second time from caches
        evidence.backward_kept(kept, wrt="prior.log_precision")
        torch.testing.assert_close(gradient_of(evidence), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_posteriors_agree_with_a_precision_per_weight(structure: str) -> None:
    model, x, y = ranked()
    x, y = torch.cat([x, x + 1]), torch.cat([y, y])
    along = evidence_of(model, Categorical(), "ntk-N-C", prior=TIES, num_data=2 * M)
    scatter(along)
    precisions = {
        n: p.detach().expand_as(w)
        for (n, w), p in zip(
            along.weights().items(), along.prior.precisions().values(), strict=True
        )
    }
    if structure == "kfac":
        prediction = along.posterior((x, y), structure=structure)(x)
        jacobian = reference.jacobian(model, along.weights(), x).detach()
        expected = jacobian @ torch.linalg.inv(kfac_precision(along, x, precisions)) @ jacobian.mT
        torch.testing.assert_close(prediction.covariance, expected, rtol=1e-9, atol=1e-12)
        return
    diagonal = evidence_of(
        copy.deepcopy(model), Categorical(), "ntk-N-C", prior="diagonal", num_data=2 * M
    )
    with torch.no_grad():
        diagonal.prior.log_precision.copy_(reference.vector(precisions, along.weights()).log())
    one, other = (e.posterior((x, y), structure=structure)(x).covariance for e in (along, diagonal))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def kfac_precision(evidence: Evidence, x: Tensor, precisions: dict[str, Tensor]) -> Tensor:
    """The precision matrix of the KFAC posterior of ``Ranked``, from its inputs and Jacobians."""
    model = evidence.model
    assert isinstance(model, Ranked)
    hidden = model.down(x).detach()
    features = torch.tanh(model.up(hidden))
    inputs = {"down.weight": x, "up.weight": hidden, "last": features}
    slopes = (1 - features.square())[:, :, None] * model.last  # (m, 4, C)
    gradients = {
        "down.weight": torch.einsum("moc,oi->mci", slopes, model.up.weight),
        "up.weight": slopes.mT,
        "last": torch.eye(OUTPUTS, dtype=x.dtype).expand(len(x), -1, -1),
    }
    hessian = reference.softmax_hessian(model(x))
    blocks = []
    for name, weight in evidence.weights().items():
        if name in inputs:
            a = inputs[name].mT @ inputs[name] / len(x)
            b = torch.einsum("mco,mcd,mdp->op", gradients[name], hessian, gradients[name])
            block = torch.kron(
                *(part.contiguous() for part in ((a, b) if name == "last" else (b, a)))
            )
        else:
            jacobian = reference.jacobian(model, {name: weight}, x)
            block = torch.einsum("mco,mcd,mdp->op", jacobian, hessian, jacobian)
        blocks.append(block + precisions[name].flatten().diag())
    return torch.block_diag(*blocks).detach()


@pytest.mark.parametrize("estimator", ["ntk-N-C", "diag-N-C", "full-N-C", "kfac-N-C"])
def test_an_axis_of_size_one_is_one_precision_per_tensor(estimator: str) -> None:
    x = torch.randn(M, 1, generator=torch.Generator().manual_seed(0)).double()
    y = x.sin()
    results = []
    for prior in ("layerwise", {"inputs": {"weight": 1}, "outputs": {"bias": 0}}):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Linear(1, 1).double()
        evidence = evidence_of(model, Gaussian(), estimator, prior=prior, num_data=M)
        scatter(evidence)
        estimate = evidence.backward(x, y)
        results.append((estimate.log_evidence, *evidence.prior.log_precision.grad.tolist()))
    assert results[0] == pytest.approx(results[1], rel=1e-12)


@pytest.mark.parametrize("estimator", ["ntk-N-C", "kfac-N-C"])
def test_fixed_points_of_an_axis_have_zero_gradient(estimator: str) -> None:
    model, x, y = ranked()
    x, y = torch.cat([x, -x, x + 1, x - 2]), torch.cat([y, y, y.flip(0), y])
    evidence = evidence_of(model, Categorical(), estimator, prior=TIES, num_data=len(x))
    kept, update = evidence.collect(x, y), FixedPoint(evidence)
    for _ in range(60):
        evidence.backward_kept(kept, wrt="prior.log_precision")
        update.step()
    evidence.backward_kept(kept, wrt="prior.log_precision")
    gradient = evidence.prior.log_precision.grad
    assert gradient is not None and float(gradient.abs().max()) < 1e-6
    assert bool((evidence.prior.counts() == torch.tensor([7, 7, 4, 4, 4, 4])).all())
