"""Blocks of rows that have much in common given the anchors."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.blocks.anchors import Anchoring, partition
from evigrad.blocks.anchors.choice import Kernel
from evigrad.blocks.anchors.partition import Tail, conditional, form_groups, grouped
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.priors import GaussianPrior


def entropy(kernel: Tensor, rows: Sequence[int] | Tensor) -> float:
    block = kernel[rows][:, rows].double()
    return float(torch.linalg.slogdet(block + torch.eye(len(block), dtype=block.dtype))[1])


def kernel_of(num_rows: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    a = 2 * torch.randn(num_rows, rank, generator=generator, dtype=torch.float64)
    return a @ a.mT


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


problems = {
    "num_rows": st.integers(1, 9),
    "rank": st.integers(1, 6),
    "seed": st.integers(0, 10**6),
}


@given(given_rows=st.integers(0, 8), **problems)
def test_entropies_given_the_anchors_are_differences(
    given_rows: int, num_rows: int, rank: int, seed: int
) -> None:
    kernel, given_rows = kernel_of(num_rows, rank, seed), min(given_rows, num_rows)
    left = conditional(kernel, given_rows)
    assert left is not None
    everything, before = range(num_rows), range(given_rows)
    difference = entropy(kernel, [*everything]) - entropy(kernel, [*before])
    assert entropy(left, [*range(len(left))]) == pytest.approx(difference, rel=1e-9, abs=1e-9)


@given(size=st.integers(1, 5), **problems)
def test_groups_are_a_partition_with_their_entropies(
    size: int, num_rows: int, rank: int, seed: int
) -> None:
    kernel = kernel_of(num_rows, rank, seed)
    parts, entropies = grouped(kernel, size)
    assert sorted(torch.cat(parts).tolist()) == [*range(num_rows)]
    assert all(len(part) == size for part in parts[:-1])
    assert entropies.dtype == torch.float64
    expected = [entropy(kernel, part) for part in parts]
    assert entropies.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    # The first of each has most to tell of those that are left.
    for number, part in enumerate(parts):
        left = torch.cat(parts[number:])
        largest = float(kernel.diagonal()[left].max())
        assert float(kernel[part[0], part[0]]) == pytest.approx(largest)


def test_copies_of_a_row_are_together() -> None:
    distinct = kernel_of(4, 12, 3)
    which = torch.tensor([0, 1, 2, 3] * 3)
    parts, _ = grouped(distinct[which][:, which], 3)
    assert sorted(sorted(which[part].tolist()) for part in parts) == [[i] * 3 for i in range(4)]


def test_a_kernel_beyond_all_precision_groups_nothing() -> None:
    # An eigenvalue that rounding made negative.
    kernel = torch.tensor([[1e9, 0.0], [0.0, -1e3]], dtype=torch.float64)
    assert conditional(kernel, 2) is None
    scores = torch.rand(6, 2, generator=seeded())
    anchors = torch.tensor([0, 1])
    for broken in (-1e3, torch.inf, torch.nan):
        groups = form_groups(
            scores, anchors, 5, lambda rows, b=broken: b * torch.eye(len(rows)), seeded()
        )
        assert not groups.parts
        assert not len(groups.shares)


def test_rows_of_the_largest_scores_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.rand(40, 3, generator=seeded())
    by_score = scores.flatten().argsort(descending=True)
    anchors = by_score[[0, 3, 5]].sort().values
    asked: list[Tensor] = []

    def known(rows: Tensor) -> Tensor:
        asked.append(rows)
        return torch.eye(len(rows))

    monkeypatch.setattr(partition, "ROWS_PER_ROW", 5)
    groups = form_groups(scores, anchors, 7, known, seeded())
    (rows,) = asked
    assert torch.equal(rows[:3], anchors)
    others = [row for row in by_score.tolist() if row not in anchors.tolist()]
    assert rows[3:].tolist() == others[:35]
    assert sorted(torch.cat(groups.parts).tolist()) == sorted(others[:35])
    assert [len(part) for part in groups.parts] == [4] * 8 + [3]
    assert groups.shares.tolist() == pytest.approx([4 / 35] * 8 + [3 / 35])
    monkeypatch.setattr(partition, "MOST_ROWS", 22)
    assert len(torch.cat(form_groups(scores, anchors, 7, known, seeded()).parts)) == 22


def test_equal_scores_let_expect_as_much_of_each_row() -> None:
    kernel = kernel_of(40, 6, 0)
    groups = form_groups(
        torch.full((40, 1), 0.3), torch.arange(4), 9, lambda rows: kernel[rows][:, rows], seeded()
    )
    assert [len(part) for part in groups.parts] == [5] * 7 + [1]
    assert groups.shares.tolist() == pytest.approx([5 / 36] * 7 + [1 / 36])


def test_nothing_is_grouped_where_that_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.rand(40, 3, generator=seeded())

    def found(
        num_rows: int = 7, count: int = 3, kernel: Kernel = lambda rows: torch.eye(len(rows))
    ) -> list[Tensor]:
        return form_groups(scores, torch.arange(count), num_rows, kernel, seeded()).parts

    assert found()
    assert not found(kernel=lambda _: None)
    assert not found(num_rows=4)  # blocks of one row
    assert not found(count=119, num_rows=130)  # one row is left
    monkeypatch.setattr(partition, "MOST_ROWS", 8)
    assert not found()  # of 117 rows, 8 hold next to nothing


def evidence_of(likelihood: Likelihood, grouped: bool, refresh: int = 1) -> Evidence:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return Evidence(
        model,
        likelihood,
        GaussianPrior("layerwise", precision=0.1),
        estimator="ntk-8-rows-anchored",
        num_data=24,
        anchoring=Anchoring(0.5, refresh=refresh, grouped=grouped),
        generator=0,
    )


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
def test_the_bound_is_tighter_with_groups(likelihood: Likelihood) -> None:
    """Data that are there four times: blocks of copies hold little more than one of them."""
    x = torch.randn(6, 3, generator=seeded(), dtype=torch.float64).repeat_interleave(4, 0)
    y = torch.zeros(24, dtype=torch.int64)
    if isinstance(likelihood, Gaussian):
        y = torch.zeros(24, 3, dtype=torch.float64)
    exact = evidence_of(likelihood, True).with_estimator("ntk-N-C").estimate(x, y).log_det
    bounds = {}
    for grouped_rows in (True, False):
        evidence = evidence_of(likelihood, grouped_rows)
        drawn = [evidence.estimate(b).log_det for b in evidence.blocks((x, y)).epoch()]
        bounds[grouped_rows] = sum(drawn) / len(drawn)
    assert bounds[True] >= exact * (1 - 1e-9)
    assert bounds[True] - exact < 0.6 * (bounds[False] - exact)


def test_groups_come_back_with_a_checkpoint() -> None:
    """Until the next choice of anchors, blocks are those of the groups that were formed."""
    x, y = torch.randn(24, 3, generator=seeded(), dtype=torch.float64), torch.zeros(24).long()
    first, second = (evidence_of(Categorical(), True, refresh=5) for _ in range(2))
    next(iter(first.blocks((x, y))))
    # Without a checkpoint they would be formed by the weights that are there by then.
    second.load_state_dict(first.state_dict())
    for evidence in (first, second):
        with torch.no_grad():
            for weight in evidence.model.parameters():
                weight.mul_(-2.0).add_(0.1)
    mine, theirs = (list(evidence.blocks((x, y)).take(4)) for evidence in (first, second))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.indices, other.indices)
        assert one.anchored and other.anchored
        assert one.anchored.draws == other.anchored.draws


def test_a_tail_beyond_64_bits_is_a_partition() -> None:
    tail = Tail(
        first=16, behind=49_984, num_rows=10**5 * 49_984, size=4, factor=4_998_399_997, shift=7
    )
    data, columns = tail.rows(tail.count - 1)
    t = [*range(tail.num_rows - 4, tail.num_rows)]
    numbers = [(tail.factor * position + tail.shift) % tail.num_rows for position in t]
    assert data.tolist() == [number // tail.behind for number in numbers]
    assert columns.tolist() == [16 + number % tail.behind for number in numbers]
