"""Passes in mixed precision and in channels-last memory, against plain float32 and float64 ones."""

import re
import warnings
from copy import deepcopy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Estimate, Evidence, Memory
from evigrad.core.names import STRUCTURES
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.passes.problem import Problem
from evigrad.priors import GaussianPrior

pytestmark = pytest.mark.filterwarnings("ignore:The model has normalization layers")

M, OUTPUTS, NUM_DATA = 8, 4, 500


def convolutional() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.GELU(),
            nn.Conv2d(6, 8, 3, stride=2, padding=1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, OUTPUTS),
        )


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(M, 3, 8, 8, generator=generator), torch.arange(M) % OUTPUTS


def make(estimator: str, network: nn.Module, learned: bool, **settings: Any) -> Evidence:
    model, hyperparameters = network, []
    if learned:
        model = Averaged(network, AffineInvariance(), num_samples=2)
        hyperparameters = ["invariance"]
    dtype = next(network.parameters()).dtype
    return Evidence(
        model.to(dtype),
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=estimator,
        num_data=NUM_DATA,
        hyperparameters=hyperparameters,
        generator=0,
        **settings,
    )


def gradient(evidence: Evidence, x: Tensor, y: Tensor) -> tuple[Estimate, dict[str, Tensor]]:
    estimate = evidence.backward(x, y)
    gradients = {}
    for name, parameter in evidence.hyperparameters().items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad
    return estimate, gradients


def distance(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest error of a tensor, relative to its norm."""
    return max(
        float((ours[name].to(reference[name]) - reference[name]).norm() / reference[name].norm())
        for name in reference
    )


ESTIMATORS = [f"{structure}-{M}-1" for structure in STRUCTURES]
# Unit roundoff of bfloat16 is 2^-8; a few of them on passes of a dozen operations.
BFLOAT16 = 0.1


@pytest.mark.each(1)
@pytest.mark.parametrize("learned", [False, True], ids=["precisions", "invariances"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_bfloat16_passes_are_near_float32(estimator: str, learned: bool) -> None:
    x, y = data()
    exact, expected = gradient(make(estimator, convolutional(), learned), x, y)
    mixed = make(estimator, convolutional(), learned, memory=Memory(autocast=torch.bfloat16))
    estimate, gradients = gradient(mixed, x, y)
    assert estimate.log_evidence == pytest.approx(exact.log_evidence, rel=0.01)
    assert estimate.log_det == pytest.approx(exact.log_det, rel=0.05)
    # Not equal: the passes were in bfloat16 indeed.
    assert estimate.log_evidence != exact.log_evidence
    precisions = {"prior.log_precision"}
    assert distance(_only(gradients, precisions), _only(expected, precisions)) < BFLOAT16
    for name, value in gradients.items():
        assert value.dtype == torch.float32
        cosine = torch.cosine_similarity(value.flatten(), expected[name].flatten(), dim=0)
        assert float(cosine) > 0.97, name


def _only(tensors: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("learned", [False, True], ids=["precisions", "invariances"])
def test_rows_in_bfloat16_are_near_float32(learned: bool) -> None:
    x, y = data()
    exact, expected = gradient(make(ESTIMATORS[0], convolutional(), learned), x, y)
    stored = make(ESTIMATORS[0], convolutional(), learned, memory=Memory(rows_dtype=torch.bfloat16))
    estimate, gradients = gradient(stored, x, y)
    assert estimate.log_det == pytest.approx(exact.log_det, rel=0.01)
    assert distance(gradients, expected) < 0.05


def test_noise_beside_bfloat16_weights_is_learned_as_beside_float32_ones() -> None:
    """In bfloat16 log σ near −1.2 would have steps of 0.008, and not move by smaller ones."""
    x = torch.linspace(-1, 1, 40)[:, None].bfloat16()
    y = 2 * x.float() + 0.3 * (12 * torch.arange(40.0)[:, None]).sin()
    noises, old = [], {}
    for dtype in (torch.bfloat16, torch.float32):
        model = nn.Linear(1, 1).to(dtype)
        nn.init.constant_(model.weight, 2.0)
        nn.init.zeros_(model.bias)
        evidence = Evidence(
            model, Gaussian(1.0), GaussianPrior(), estimator="ntk-N-C", num_data=40, generator=0
        )
        kept = evidence.collect(x.to(dtype), y)
        (noise,) = evidence.likelihood.parameters()
        assert noise.dtype == evidence.prior.precisions()["bias"].dtype == torch.float32
        optimizer = torch.optim.Adam([noise], lr=0.03)
        for step in range(100):
            optimizer.param_groups[0]["lr"] = 0.03 * (1 - step / 100)
            optimizer.zero_grad()
            evidence.backward_kept(kept, wrt="likelihood")
            optimizer.step()
        noises.append(noise.detach().exp().item())
        old = evidence.state_dict()
        old["likelihood"] = {name: tensor.bfloat16() for name, tensor in old["likelihood"].items()}
        evidence.load_state_dict(old)  # of an older version
        assert evidence.hyperparameters()["likelihood.log_noise"].dtype == torch.float32
    assert noises[0] == pytest.approx(noises[1], rel=0.01)


@pytest.mark.each(1)
@pytest.mark.parametrize("learned", [False, True], ids=["precisions", "invariances"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_channels_last_changes_nothing(estimator: str, learned: bool) -> None:
    x, y = data()
    x = x.double()
    exact, expected = gradient(make(estimator, convolutional().double(), learned), x, y)
    network = convolutional().double()
    for parameter in network.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    weight = network.get_parameter("3.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    estimate, gradients = gradient(
        make(estimator, network, learned, memory=Memory(micro_batch=3)), x, y
    )
    assert estimate.log_evidence == pytest.approx(exact.log_evidence, rel=1e-12)
    assert distance(gradients, expected) < 1e-10


# ---------------------------------------------------------------- small precisions

SMALL = ("ntk-N-C", "full-10-C", "blockdiag-N-C", "kfac-N-C", "kfac-20-1", "diag-N-C")
SIZES, POINTS = (10, 24, 24, 3), 40


def small(estimator: str, dtype: torch.dtype, **settings: Any) -> tuple[Evidence, Tensor, Tensor]:
    layers: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for inputs, outputs in pairwise(SIZES):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(POINTS, SIZES[0], generator=generator).to(dtype)
    y = torch.randint(SIZES[-1], (POINTS,), generator=generator)
    network, prior = nn.Sequential(*layers[:-1]).to(dtype), GaussianPrior("layerwise", 1.0)
    evidence = Evidence(
        network, Categorical(), prior, estimator=estimator, num_data=POINTS, **settings
    )
    subset = evidence.estimator.subset or POINTS
    return evidence, x[:subset], y[:subset]


def put(evidence: Evidence, precision: float) -> None:
    """The precision everywhere, and the draws from their beginning."""
    for parameter in evidence.prior.parameters():
        parameter.data.fill_(precision).log_()
        parameter.grad = None
    evidence.generator.manual_seed(0)


@cache
def exact(estimator: str, precision: float) -> tuple[float, list[Tensor]]:
    evidence, x, y = small(estimator, torch.float64)
    put(evidence, precision)
    log_det = evidence.backward(x, y).log_det
    return log_det, [p.grad for p in evidence.prior.parameters() if p.grad is not None]


def tolerated(log_det: float) -> float:
    return 0.05 + 1e-3 * log_det


@pytest.mark.parametrize("estimator", SMALL)
def test_small_precisions_are_right_in_float32_without_a_word(estimator):
    evidence, x, y = small(estimator, torch.float32)
    for precision in (1e-4, 1e-8):
        exact_log_det, gradients = exact(estimator, precision)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for evaluate in (
                evidence.backward,
                evidence.estimate,
                lambda x, y: evidence.estimate_kept(evidence.collect(x, y)),
            ):
                put(evidence, precision)
                assert abs(evaluate(x, y).log_det - exact_log_det) < tolerated(exact_log_det)
        put(evidence, precision)
        evidence.backward(x, y)
        for parameter, gradient in zip(evidence.prior.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-2, atol=1e-6)


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", SMALL)
@pytest.mark.parametrize("kept", [False, True])
def test_where_float32_stays_a_warning_says_by_how_many_nats(estimator, kept):
    settings = {} if kept else {"memory": Memory(gram_dtype=torch.float32)}
    evidence, x, y = small(estimator, torch.float32, **settings)
    put(evidence, 1.0)
    kept_pass = evidence.collect(x, y)
    scale = POINTS / len(x) * (3 if estimator.endswith("-1") else 1)  # of the block to all data
    for precision in (1e-2, 1e-4, 1e-8):
        exact_log_det, _ = exact(estimator, precision)
        put(evidence, precision)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            estimate = evidence.estimate_kept(kept_pass) if kept else evidence.estimate(x, y)
        error = abs(estimate.log_det - exact_log_det)
        said = [float(re.findall(r"about (\S+) nats", str(w.message))[0]) for w in caught]
        # The estimate is right within a factor of ten.
        assert error < tolerated(exact_log_det) or 10 * sum(said) * scale > error
        assert precision < 1e-2 or not said


@pytest.mark.parametrize("wrt", [None, "prior"])
def test_eigenvalues_that_round_too_much_are_repeated_and_not_the_passes(
    monkeypatch: pytest.MonkeyPatch, wrt: str | None
) -> None:
    precision = 1e-4
    expected, gradients = exact("kfac-N-C", precision)
    evidence, x, y = small("kfac-N-C", torch.float32)
    passes = []
    evidence.model.register_forward_hook(lambda *_: passes.append(1))
    put(evidence, precision)
    for _ in range(4):  # those that check derivatives pass more often
        evidence.backward(x, y)
    passes.clear()
    monkeypatch.setattr("evigrad.core.curvature.kfac.is_tolerated", lambda *_: True)
    plain = evidence.backward(x, y, wrt=wrt).log_det
    count = len(passes)
    monkeypatch.setattr("evigrad.core.curvature.kfac.is_tolerated", lambda *_: False)
    put(evidence, precision)
    passes.clear()
    estimate = evidence.backward(x, y, wrt=wrt)
    assert len(passes) == count
    assert estimate.log_det != plain
    assert abs(estimate.log_det - expected) < 0.05
    (gradient,), (parameter,) = gradients, evidence.prior.parameters()
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad.double(), gradient, rtol=1e-2, atol=1e-6)


@cache
def trained() -> nn.Sequential:
    network, (x, y) = convolutional(), data()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network


@pytest.mark.each(1)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("estimator", [f"{structure}-{M}-C" for structure in STRUCTURES])
def test_usual_precisions_need_no_float64(
    estimator: str, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a false alarm of rounding, all passes would run again."""

    curvature = Problem.curvature

    def refuse(*arguments: Any) -> Any:
        if len(arguments) == 2:  # in the type of the weights
            return curvature(*arguments)
        raise AssertionError("the estimate was computed again")

    x, y = data()
    evidence = make(estimator, deepcopy(trained()), learned)
    monkeypatch.setattr(Problem, "curvature", refuse)
    monkeypatch.setattr("evigrad.core.curvature.kfac.kronecker_rounding", refuse)
    for precision in (100.0, 0.01):
        put(evidence, precision)
        evidence.backward(x, y)
