"""Every estimator of the library against the dense reference, value and gradient."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traces import Traces

from evigrad import Evidence, reference
from evigrad.core.names import Estimator
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, NaturalGaussian
from evigrad.priors import GaussianPrior, NormalHyperprior

N, C = 4, 3


class Gated(nn.Module):
    """Two layers with a gate, which the evidence learns."""

    def __init__(self, outputs: int = C) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, outputs)
        self.gate = nn.Parameter(torch.tensor([0.5, -0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.gate.exp())


class Convolutions(nn.Module):
    """Shared weights: two convolutions, and a layer that is used twice at several positions."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(1, 2, 2, stride=2, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=2, dilation=2)
        self.twice = nn.Linear(2, 2)
        self.last = nn.Linear(2, C)
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.image(x.unflatten(1, (1, 3, 3)) * self.gate.exp()))
        h = torch.tanh(self.second(h)).flatten(2).mT
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(h)))).mean(1))


LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "categorical": Categorical,
    "gaussian": lambda: Gaussian([0.7, 0.5, 0.9]),
    "bernoulli": Bernoulli,
}
STRUCTURES = ("ntk", "full", "blockdiag", "kfac", "diag")
SUBSETS, SPLITS = ("2", "N"), ("1", "2", "C", "rows")
MODIFIERS = ("", "iid", "grouped", "anchored", "scaled", "ef")


def joined(*words: str) -> str:
    return "-".join(filter(None, words))


def is_name(words: tuple[str, ...]) -> bool:
    try:
        Estimator.parse(joined(*words))
    except EvigradError:
        return False
    return True


WORDS = list(filter(is_name, itertools.product(STRUCTURES, SUBSETS, SPLITS, MODIFIERS)))


def build(estimator: str, likelihood: Likelihood, **settings: Any) -> Evidence | None:
    """The evidence, or None if there is no estimator of this name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = settings.pop("model", Gated)().double()
    prior = GaussianPrior("layerwise", 2.0, hyperprior=NormalHyperprior(0.5, 2.0))
    try:
        return Evidence(
            model,
            likelihood,
            prior,
            estimator=estimator,
            num_data=N,
            hyperparameters=["gate"],
            temperature=0.8,
            log_det_weight=1.6,
            generator=3,
            **settings,
        )
    except EvigradError:
        return None


def data(likelihood: str, inputs: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, inputs, generator=generator, dtype=torch.float64)
    y = torch.randn(N, C, generator=generator, dtype=torch.float64)
    if likelihood == "categorical":
        return x, y.argmax(1)
    return x, (y > 0).double() if likelihood == "bernoulli" else y


def assert_equal(evidence: Evidence, pair: tuple[Tensor, Tensor], **settings: Any) -> None:
    for block in evidence.blocks(pair).take(1):
        estimate = evidence.backward(block)
        value = reference.log_evidence(evidence, block, **settings).item()
        assert estimate.log_evidence == pytest.approx(value, rel=1e-11)
        gradients = reference.gradients(evidence, block, **settings)
        for name, parameter in evidence.hyperparameters().items():
            assert parameter.grad is not None
            scale = float(gradients[name].norm()) + 1e-3
            assert float((parameter.grad - gradients[name]).norm()) < 1e-9 * scale, name


@pytest.mark.each(2)
@pytest.mark.parametrize(("structure", "subset", "split", "modifier"), WORDS)
def test_every_name(structure: str, subset: str, split: str, modifier: str) -> None:
    """Each with one of the roots and likelihoods by turns; ``test_every_root`` has each root."""
    name = joined(structure, subset, split, modifier)
    number = [joined(*words) for words in WORDS].index(name)
    root = ("subblock", "fisher", "eigen")[number % 3]
    if "anchored" in name and root == "subblock":
        root = "eigen"
    kinds = ["categorical"] if "grouped" in name else list(LIKELIHOODS)
    kind = kinds[number // 3 % len(kinds)]
    evidence = build(name, LIKELIHOODS[kind](), root=root)
    if evidence is not None:
        assert_equal(evidence, data(kind))


@pytest.mark.each(1)
@pytest.mark.parametrize("root", ["subblock", "fisher", "eigen"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_root(structure: str, root: str) -> None:
    evidence = build(f"{structure}-2-2", Categorical(), root=root)
    assert evidence is not None
    assert_equal(evidence, data("categorical"))


@pytest.mark.parametrize("root", ["fisher", "eigen"])
def test_a_root_of_any_matrix(root: str) -> None:
    """A likelihood whose Hessian depends on the targets takes its Fisher information."""
    likelihood = NaturalGaussian()
    evidence = build("ntk-2-2", likelihood, root=root, model=lambda: Gated(4))
    assert evidence is not None
    x, _ = data("gaussian")
    assert_equal(evidence, (x, x.sin()), curvature=likelihood.hessian)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_factors_of_shared_weights(sharing: str) -> None:
    evidence = build("kfac-2-C", Categorical(), model=Convolutions, sharing=sharing)
    assert evidence is not None
    assert_equal(evidence, data("categorical", inputs=9), sharing=sharing)


@pytest.mark.parametrize("groups", ["module", {"all": ["first", "second"]}])
def test_groups_of_parameters(groups: Any) -> None:
    evidence = build("blockdiag-2-1", Categorical(), parameter_partition=groups)
    assert evidence is not None
    assert_equal(evidence, data("categorical"), groups=groups)


def test_theorems_in_the_reference() -> None:
    """Blocks of data and of parameters only add to ℓ, and both forms of ℓ are equal."""
    x, y = data("categorical")
    evidence = build("full-N-C", Categorical())
    assert evidence is not None
    weights, f = evidence.weights(), reference.outputs(evidence.model, x)
    jac, curvature = reference.jacobian(evidence.model, weights, x), reference.softmax_hessian(f)
    torch.testing.assert_close(curvature, reference.hessian(Categorical(), f, y))
    precision = reference.vector(evidence.prior.precisions(), weights)
    exact = reference.kernel_log_det(jac, curvature, precision)
    torch.testing.assert_close(
        exact, reference.log_det(reference.ggn(jac, curvature), precision)
    )  # Theorem 3
    blocks = torch.arange(N).split(2)
    parts = [reference.kernel_log_det(jac[b], curvature[b], precision) for b in blocks]
    assert sum(parts) > exact  # Theorem 2
    previous = exact
    for structure in ("blockdiag", "diag"):  # Theorem 1, each finer than the one before
        partition = reference.parameter_partition(structure, weights)
        value = reference.log_det(reference.ggn(jac, curvature), precision, partition)
        assert value > previous
        previous = value


def test_sampled_labels_are_not_part_of_a_block() -> None:
    evidence = build("ntk-2-1-mc", Categorical())
    assert evidence is not None
    (block,) = evidence.blocks(data("categorical")).take(1)
    with pytest.raises(ConfigurationError, match="labels sampled by 'mc'"):
        reference.log_evidence(evidence, block)


@pytest.mark.parametrize("name", ["traces-N-C", "traces-2-1", "traces-2-rows"])
def test_a_custom_curvature(name: str) -> None:
    """The reference takes the formula for ℓ, and nothing stands in for a missing one."""
    weights = {n: p for n, p in Gated().named_parameters() if n != "gate"}
    evidence = build(name, Categorical(), curvature=Traces(weights))
    assert evidence is not None
    sizes = [w.numel() for w in weights.values()]

    def formula(h: Tensor, precision: Tensor) -> Tensor:
        terms = zip(h.diagonal().split(sizes), precision.split(sizes), sizes, strict=True)
        return torch.stack([n * (b.sum() / (n * p[0])).log1p() for b, p, n in terms]).sum()

    assert_equal(evidence, data("categorical"), custom_log_det=formula)
    (block,) = evidence.blocks(data("categorical")).take(1)
    with pytest.raises(ConfigurationError, match="custom_log_det must be given"):
        reference.log_evidence(evidence, block)
    with pytest.raises(ConfigurationError, match="custom_log_det"):
        reference.parameter_partition("traces", weights)


def test_a_formula_without_a_custom_curvature() -> None:
    evidence = build("full-2-1", Categorical())
    assert evidence is not None
    (block,) = evidence.blocks(data("categorical")).take(1)
    with pytest.raises(ConfigurationError, match="custom_log_det must be omitted"):
        reference.log_evidence(evidence, block, custom_log_det=lambda h, p: h.sum())


def test_a_hessian_that_depends_on_the_targets() -> None:
    """Its mean differs from the Hessian at the targets, so the reference must be told."""
    likelihood = NaturalGaussian()
    evidence = build("full-2-C", likelihood, model=lambda: Gated(4))
    assert evidence is not None
    x, _ = data("gaussian")
    (block,) = evidence.blocks((x, x.sin())).take(1)
    with pytest.raises(ConfigurationError, match="NaturalGaussian.*curvature=likelihood.hessian"):
        reference.gradients(evidence, block)
    reference.gradients(evidence, block, curvature=likelihood.hessian)
