"""The two gradients again, over pairs of all choices.

Every pair of values of two factors (structure, rows of a block, root, likelihood, prior, kind of
network, micro-batch, temperature, weight of the log-determinant, form of the dense structures)
occurs in at least one case, by a greedy covering design. Some pairs are left to a few networks: a
likelihood and its root see the outputs alone, and not the layers that they come from. A structure
sees rows or Kronecker factors, and test_zoo compares both for every network.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from likelihood_zoo import LIKELIHOODS
from passes.test_two_pass import M, assert_twins, convolutional
from torch import Tensor, nn
from zoo import CASES, OUTPUTS

from evigrad.core.curvature import ntk
from evigrad.core.names import STRUCTURES
from evigrad.invariances import AdditiveNoise, AffineInvariance, Averaged, InputScale
from evigrad.likelihoods import Likelihood
from evigrad.models import make_model

pytestmark = pytest.mark.filterwarnings("ignore:The model has normalization layers")

Build = Callable[[], tuple[nn.Module, Tensor]]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def averaged(transform: nn.Module, average: str = "logits") -> tuple[nn.Module, Tensor]:
    model = Averaged(convolutional(), transform, num_samples=2, average=average)
    return model.double(), draw(M, 1, 7, 7)


def of_features(transform: nn.Module) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, OUTPUTS))
    return Averaged(network, transform, num_samples=2).double(), draw(M, 3)


class InTrainingMode(nn.Module):
    """The root of a model that draws, in training mode as new modules are."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged, _ = averaged(AffineInvariance())
        self.invariance = self.averaged.invariance

    def forward(self, x: Tensor) -> Tensor:
        return self.averaged(x) * (3.0 if self.training else 1.0)


class Hyper(nn.Module):
    """A network of the catalogue behind a learned gate of its inputs."""

    def __init__(self, name: str, shape: Sequence[int], **settings: Any) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(-0.3, 0.3, shape[-1]))
        self.network = make_model(name, tuple(shape), OUTPUTS, seed=0, **settings)
        with torch.no_grad():  # Fixup starts with zeros
            for i, p in enumerate(self.network.parameters()):
                if not p.any():
                    p.copy_(0.1 * torch.cos(torch.arange(p.numel()) + float(i)).reshape(p.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x * self.gate.exp())


def catalogued(name: str, *shape: int, **settings: Any) -> Build:
    return lambda: (Hyper(name, shape, **settings).double(), draw(M, *shape))


NETWORKS: dict[str, Build] = {
    **{name: (lambda case=case: case.build(M)) for name, case in CASES.items()},
    "affine": lambda: averaged(AffineInvariance(0.2)),
    "affine and flip": lambda: averaged(AffineInvariance(0.2, flip=True)),
    "mean probabilities": lambda: averaged(AffineInvariance(0.2), "probabilities"),
    "input scale": lambda: of_features(InputScale((3,))),
    "additive noise": lambda: of_features(AdditiveNoise((3,), 0.3)),
    "drawn in training mode": lambda: (InTrainingMode().double(), draw(M, 1, 7, 7)),
    "our transformer": catalogued("transformer", 4, 3, width=4, heads=2, layers=1),
    "our gru": catalogued("gru", 4, 3, width=4),
    "our wide resnet": catalogued("wide_resnet", 1, 8, 8, depth=10, widen_factor=1),
}
FACTORS: dict[str, Sequence[Any]] = {
    "structure": list(STRUCTURES),
    "rows": ["7-1", "7-C", "7-2-iid", "7-1-ef", "7-2-mc"],
    "root": ["subblock", "fisher", "eigen"],
    "likelihood": [make(OUTPUTS) for make in LIKELIHOODS.values()],
    "prior": ["scalar", "layerwise", "diagonal"],
    "network": list(NETWORKS),
    "micro_batch": [1, 3, None],
    "temperature": [1.0, 1.3],
    "log_det_weight": [1.0, 0.6],
    "by_rows": [False, True],  # full and blockdiag: H, or the Grams of their rows
}
# A precision that varies in a Kronecker block has no log-determinant; the dense structures hold
# matrices of all weights.
EXCLUDED = [
    ("structure", "kfac", "prior", "diagonal"),
    ("structure", "full", "network", "our wide resnet"),
    ("structure", "blockdiag", "network", "our wide resnet"),
]
# Those that meet everything: plain, averaged over draws in both ways, and with positions.
WITH_EVERYTHING = ["linear", "affine", "mean probabilities", "our transformer"]
# What the other networks meet, besides the factors of which they meet all values.
WITH_NETWORKS: dict[str, Sequence[Any]] = {
    "structure": ["ntk", "kfac"],
    "likelihood": [],
    "rows": [],
    "root": [],
    "prior": [],
}


def is_wanted(a: str, i: int, b: str, j: int) -> bool:
    """Whether the design must hold this pair of indices of two factors."""
    pair = {a: FACTORS[a][i], b: FACTORS[b][j]}
    if any(pair == {c: value, d: other} for c, value, d, other in EXCLUDED):
        return False
    other = b if a == "network" else a
    if "network" not in pair or pair["network"] in WITH_EVERYTHING or other not in WITH_NETWORKS:
        return True
    return pair[other] in WITH_NETWORKS[other]


def is_allowed(case: dict[str, Any]) -> bool:
    return not any(case[a] == i and case[b] == j for a, i, b, j in EXCLUDED)


def covering(factors: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases that hold every wanted pair of indices of two factors."""
    source = random.Random(3)
    names = list(factors)
    sizes = {name: range(len(values)) for name, values in factors.items()}
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in sizes[a]
        for j in sizes[b]
        if is_wanted(a, i, b, j)
    }
    cases = []
    while missing:
        first = dict(min(missing))
        best, gain = None, -1
        for _ in range(20):
            trial = {name: first.get(name, source.choice(sizes[name])) for name in names}
            if not is_allowed({name: factors[name][i] for name, i in trial.items()}):
                continue
            covered = sum(pair in missing for pair in itertools.combinations(trial.items(), 2))
            if covered > gain:
                best, gain = trial, covered
        assert best is not None
        missing -= set(itertools.combinations(best.items(), 2))
        cases.append({name: factors[name][i] for name, i in best.items()})
    return cases


DESIGN = covering(FACTORS)


@pytest.mark.each(1)  # `make check-long` runs all pairs
@pytest.mark.parametrize(
    tuple(FACTORS),
    [tuple(case.values()) for case in DESIGN],
    ids=lambda value: value.name if isinstance(value, Likelihood) else str(value),
)
def test_pairs(
    structure: str,
    rows: str,
    root: str,
    likelihood: Likelihood,
    prior: str,
    network: str,
    micro_batch: int | None,
    temperature: float,
    log_det_weight: float,
    by_rows: bool,
) -> None:
    model, x = NETWORKS[network]()
    estimator = f"{structure}-{rows}"
    with patch.object(ntk, "is_cheaper", lambda *_: by_rows):
        assert_twins(
            model,
            likelihood,
            x,
            estimator,
            (micro_batch,),
            root=root,
            prior=prior,
            temperature=temperature,
            log_det_weight=log_det_weight,
        )


def test_the_design_covers_what_it_says() -> None:
    seen = {pair for case in DESIGN for pair in itertools.combinations(_ids(case).items(), 2)}
    allowed_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(FACTORS, 2)
        for i in range(len(FACTORS[a]))
        for j in range(len(FACTORS[b]))
        if is_wanted(a, i, b, j)
    }
    assert allowed_pairs <= seen
    pairs = sum(len(x) * len(y) for x, y in itertools.combinations(FACTORS.values(), 2))
    # What the log-determinant depends on meets both forms of the structures that have two.
    dense = [_ids(case) for case in DESIGN if case["structure"] in ("full", "blockdiag")]
    for name in ("prior", "rows", "root", "micro_batch"):
        assert len({(case[name], case["by_rows"]) for case in dense}) == 2 * len(FACTORS[name])
    unmet = sum(len(FACTORS[name]) - len(values) for name, values in WITH_NETWORKS.items())
    alone = unmet * (len(NETWORKS) - len(WITH_EVERYTHING))
    assert len(allowed_pairs) == pairs - alone - 1  # kfac and a diagonal prior


def _ids(case: dict[str, Any]) -> dict[str, int]:
    return {name: FACTORS[name].index(value) for name, value in case.items()}
