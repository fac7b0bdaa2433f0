"""The theorems as properties of the library's own numbers, over random networks and partitions."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from likelihood_zoo import LIKELIHOODS, targets
from properties import examples
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.blocks import Block
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

# An example builds networks and plans their passes: fewer than elsewhere.
few = examples(6)
# Rounding of a float64 log-determinant of a few dozen rows.
SLACK = 1e-8


@dataclass(frozen=True)
class Problem:
    likelihood: str
    num_data: int
    num_outputs: int
    width: int
    precision: float
    gain: float
    seed: int

    def build(self, estimator: str, **kwargs: Any) -> tuple[Evidence, Tensor, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = nn.Sequential(
                nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, self.num_outputs)
            ).double()
            with torch.no_grad():
                for w in model.parameters():
                    w.mul_(self.gain)
            x = torch.randn(self.num_data, 2, dtype=torch.float64)
        likelihood = LIKELIHOODS[self.likelihood](self.num_outputs)
        y = targets(likelihood, self.num_data, self.num_outputs, self.seed)
        evidence = Evidence(
            model,
            likelihood,
            GaussianPrior(precision=self.precision),
            estimator=estimator,
            num_data=self.num_data,
            generator=0,
            **kwargs,
        )
        return evidence, x, y


problems = st.builds(
    Problem,
    likelihood=st.sampled_from(sorted(LIKELIHOODS)),
    num_data=st.integers(2, 5),
    num_outputs=st.integers(2, 4),
    width=st.integers(1, 4),
    precision=st.floats(1e-3, 1e3),
    gain=st.floats(0.1, 6.0),
    seed=st.integers(0, 10**6),
)
bounding_roots = st.sampled_from(["fisher", "eigen"])


def block_of(pairs: list[tuple[int, int]], x: Tensor, y: Tensor) -> Block:
    """A block of chosen index pairs (datum, column), with scale 1."""
    data = sorted({n for n, _ in pairs})
    columns = [[c for n, c in pairs if n == datum] for datum in data]
    width = max(map(len, columns))
    padded = torch.tensor([c + [-1] * (width - len(c)) for c in columns])
    i = torch.tensor(data)
    return Block(i, padded, 1.0, torch.ones(len(i), dtype=torch.float64), x[i], y[i])


def labelled(draw: Any, problem: Problem, blocks: int) -> dict[int, list[tuple[int, int]]]:
    """Every index pair in one of some blocks."""
    pairs = [(n, c) for n in range(problem.num_data) for c in range(problem.num_outputs)]
    labels = draw(st.lists(st.integers(0, blocks - 1), min_size=len(pairs), max_size=len(pairs)))
    partition: dict[int, list[tuple[int, int]]] = {}
    for pair, label in zip(pairs, labels, strict=True):
        partition.setdefault(label, []).append(pair)
    return partition


def total(
    evidence: Evidence, partition: dict[int, list[tuple[int, int]]], x: Tensor, y: Tensor
) -> float:
    return sum(evidence.estimate(block_of(pairs, x, y)).log_det for pairs in partition.values())


@few
@given(problem=problems, data=st.data())
def test_theorem_1_any_partition_of_the_parameters(problem: Problem, data: st.DataObject) -> None:
    """Block-diagonal curvature bounds the full one; a refinement has more slack."""
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    labels = data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    groups: dict[str, list[str]] = {}
    for name, label in zip(names, labels, strict=True):
        groups.setdefault(str(label), []).append(name)
    values = []
    for estimator, partition in (
        ("full-N-C", "tensor"),
        ("blockdiag-N-C", groups),
        ("blockdiag-N-C", "tensor"),
        ("diag-N-C", "tensor"),
    ):
        evidence, x, y = problem.build(estimator, parameter_partition=partition)
        values.append(evidence.estimate(x, y).log_det)
    for coarse, fine in zip(values, values[1:], strict=False):
        assert fine >= coarse - SLACK * max(1, abs(coarse))


@few
@given(problem=problems, root=bounding_roots, data=st.data())
def test_theorem_2_any_partition_of_the_rows_and_its_refinements(
    problem: Problem, root: str, data: st.DataObject
) -> None:
    evidence, x, y = problem.build("ntk-N-C", root=root)
    exact = evidence.estimate(x, y).log_det
    partition = labelled(data.draw, problem, blocks=3)
    coarse = total(evidence, partition, x, y)
    assert coarse >= exact - SLACK * max(1, exact)
    refined: dict[int, list[tuple[int, int]]] = {}
    for pairs in partition.values():
        cut = data.draw(st.integers(0, len(pairs)))
        for part in (pairs[:cut], pairs[cut:]):
            if part:
                refined[len(refined)] = part
    fine = total(evidence, refined, x, y)
    assert fine >= coarse - SLACK * max(1, coarse)


@pytest.mark.usefixtures("by_h")
@few
@given(problem=problems, root=st.sampled_from(["subblock", "fisher", "eigen"]), data=st.data())
def test_theorem_2_any_partition_of_the_data(
    problem: Problem, root: str, data: st.DataObject
) -> None:
    """With all outputs of a datum in one block every root gives the same bound."""
    labels = data.draw(
        st.lists(st.integers(0, 2), min_size=problem.num_data, max_size=problem.num_data)
    )
    partition: dict[int, list[tuple[int, int]]] = {}
    for n, label in enumerate(labels):
        partition.setdefault(label, []).extend((n, c) for c in range(problem.num_outputs))
    evidence, x, y = problem.build("ntk-N-C", root=root)
    reference, _, _ = problem.build("full-N-C", root="fisher")
    exact = evidence.estimate(x, y).log_det
    summed = total(evidence, partition, x, y)
    assert summed >= exact - SLACK * max(1, exact)
    assert summed == pytest.approx(total(reference, partition, x, y), rel=1e-6, abs=1e-8)


@few
@given(problem=problems, root=bounding_roots, data=st.data())
def test_doubly_bound(problem: Problem, root: str, data: st.DataObject) -> None:
    """Corollary: partitions of rows and of parameters together (and in between)."""
    full, x, y = problem.build("full-N-C", root=root)
    blockdiag, _, _ = problem.build("blockdiag-N-C", root=root)
    diag, _, _ = problem.build("diag-N-C", root=root)
    partition = labelled(data.draw, problem, blocks=2)
    exact = full.estimate(x, y).log_det
    rows_only = total(full, partition, x, y)
    both = total(blockdiag, partition, x, y)
    finest = total(diag, partition, x, y)
    tolerance = SLACK * max(1, finest)
    assert exact <= rows_only + tolerance
    assert rows_only <= both + tolerance
    assert both <= finest + tolerance
    assert blockdiag.estimate(x, y).log_det <= both + tolerance


@pytest.mark.usefixtures("by_h")
@few
@given(problem=problems)
def test_theorem_3_kernel_and_parametric_forms(problem: Problem) -> None:
    ntk, x, y = problem.build("ntk-N-C")
    full, _, _ = problem.build("full-N-C")
    assert ntk.estimate(x, y).log_det == pytest.approx(
        full.estimate(x, y).log_det, rel=1e-7, abs=1e-9
    )


@few
@given(
    problem=problems,
    root=bounding_roots,
    structure=st.sampled_from(["ntk", "full", "blockdiag", "diag"]),
    size=st.sampled_from(["1-C", "2-C", "2-1", "3-rows"]),
)
def test_scaling_the_curvature_turns_the_bound_around(
    problem: Problem, root: str, structure: str, size: str
) -> None:
    """Over the blocks of a partition, the mean of ℓ(M B) is at most ℓ(I), and that of M ℓ(B) not.

    log|I + S| is concave in S, so Jensen's inequality holds for each block of parameters, too.
    """
    evidence, x, y = problem.build(f"{structure}-N-C", root=root)
    exact = evidence.estimate(x, y).log_det
    means = []
    for modifier in ("-scaled", ""):
        evidence, x, y = problem.build(f"{structure}-{size}{modifier}", root=root)
        estimates = [evidence.estimate(block) for block in evidence.blocks((x, y)).epoch()]
        means.append(sum(e.log_det for e in estimates) / len(estimates))
        assert all(e.is_bound == (not modifier) for e in estimates)
    scaled, plain = means
    tolerance = SLACK * max(1, exact)
    assert scaled <= exact + tolerance
    assert exact <= plain + tolerance


class TwoLogits(nn.Module):
    """(z, −z) of one weight: the counterexample of the paper's sub-blocks."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z = x * self.weight
        return torch.cat([z, -z], dim=1)


@few
@given(weight=st.floats(-2, 2), precision=st.floats(0.05, 50.0))
def test_output_wise_subblocks_are_not_a_bound(weight: float, precision: float) -> None:
    """exact log(1 + 4sa); sub-blocks 2 log(1 + sa), smaller whenever sa < 2; Fisher rows bound."""
    x, y = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    p = 1 / (1 + math.exp(-2 * weight))
    s, a = p * (1 - p), 1 / precision
    values = {}
    for root in ("subblock", "fisher", "eigen"):
        evidence = Evidence(
            TwoLogits(weight),
            Categorical(),
            GaussianPrior(precision=precision),
            estimator="ntk-N-1",
            num_data=1,
            root=root,
            generator=0,
        )
        estimates = [evidence.estimate(b) for b in evidence.blocks((x, y)).epoch()]
        values[root] = sum(e.log_det for e in estimates) / len(estimates)
        assert all(e.is_bound == (root != "subblock") for e in estimates)
    exact = math.log1p(4 * s * a)
    assert values["subblock"] == pytest.approx(2 * math.log1p(s * a), rel=1e-9)
    if abs(s * a - 2) > 1e-6:
        assert (values["subblock"] < exact) == (s * a < 2)
    assert values["fisher"] >= exact - 1e-12
    assert values["eigen"] >= exact - 1e-12


@few
@given(weight=st.floats(0.1, 10.0), precision=st.floats(0.05, 50.0))
def test_weights_of_the_log_determinant_from_one_are_bounds(
    weight: float, precision: float
) -> None:
    """The log-determinant is never negative, so the weight decides on which side the value is."""
    x, y = torch.ones(3, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    prior, exact = GaussianPrior(precision=precision), {}
    for c in (1.0, weight):
        evidence = Evidence(
            TwoLogits(0.5),
            Categorical(),
            prior,
            estimator="ntk-N-C",
            num_data=3,
            log_det_weight=c,
        )
        exact[c] = evidence.estimate(x, y)
    (plain, weighted) = (exact[1.0], exact[weight])
    expected = plain.log_evidence - 0.5 * (weight - 1) * plain.log_det
    assert weighted.log_evidence == pytest.approx(expected, rel=1e-12)
    assert weighted.is_bound == (weight >= 1)
    assert (weighted.log_evidence <= plain.log_evidence) == (weight >= 1)
