"""Very many data: a part that is looked at again and again, and orders that nobody writes out."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, Schedule
from evigrad.blocks import Block, pool
from evigrad.blocks.anchors import AnchoredStream, Anchoring
from evigrad.blocks.pool import Pool
from evigrad.core.names import Estimator
from evigrad.core.partition import Partition
from evigrad.errors import InputError
from evigrad.likelihoods import Categorical
from evigrad.passes.intake import CheckedSource
from evigrad.priors import GaussianPrior
from evigrad.training.data import batches, stream

N, C = 30, 3


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 20 data are very many, and have a pool of 8."""
    monkeypatch.setattr(pool, "MANY", 20)
    monkeypatch.setattr(pool, "POOL", 8)


def make_evidence(estimator: str, **options: object) -> tuple[Evidence, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, C)).double()
        x = torch.randn(N, 2, dtype=torch.float64)
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior(precision=0.1),
        estimator=estimator,
        num_data=N,
        generator=0,
        **options,  # type: ignore[arg-type]
    )
    return evidence, (x, torch.arange(N) % C)


def rows_of(block: Block) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Rows (datum, output) of the anchors, and all others."""
    assert block.columns is not None and block.anchored is not None
    places = (block.columns >= 0).nonzero()
    rows: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for datum, k in places.tolist():
        row = (int(block.indices[datum]), int(block.columns[datum, k]))
        rows[int(block.anchored.labels[datum, k]) > 0].append(row)
    return rows


@pytest.mark.usefixtures("few")
def test_each_datum_has_one_place() -> None:
    pool = Pool(N)
    inside, outside = pool.data(torch.arange(8)), pool.others(torch.arange(N - 8))
    assert sorted([*inside.tolist(), *outside.tolist()]) == list(range(N))
    asked = torch.arange(N).flip(0)
    positions, places = pool.find(asked)
    assert torch.equal(asked[positions], pool.data(places)) and len(places) == len(pool) == 8
    assert torch.equal(Pool(N).data(torch.arange(8)), inside)  # also in the next run
    with pytest.raises(InputError, match="Positions"):
        pool.find(torch.tensor([N]))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("grouped", [True, False])
def test_every_row_is_an_anchor_of_the_pool_or_in_one_part(grouped: bool) -> None:
    evidence, data = make_evidence(
        "ntk-10-rows-anchored", anchoring=Anchoring(0.5, grouped=grouped)
    )
    blocks = evidence.blocks(data)
    estimates, others, anchors = [], Counter[tuple[int, int]](), set[tuple[int, int]]()
    for block in blocks.epoch():
        anchor_rows, part_rows = rows_of(block)
        anchors = anchors or set(anchor_rows)
        assert set(anchor_rows) == anchors and len(anchor_rows) == 5
        others.update(part_rows)
        estimates.append(evidence.estimate(block))
    assert {n for n, _ in anchors} <= set(Pool(N).data(torch.arange(8)).tolist())
    # The last column of a categorical root is zero.
    every = {(n, c) for n in range(N) for c in range(C - 1)}
    assert others == Counter(every - anchors)
    # So their mean is a bound on the log-determinant of all rows.
    exact, _ = make_evidence("ntk-N-C")
    value = exact.estimate(*data)
    mean = sum(e.log_det for e in estimates) / len(estimates)
    assert mean >= value.log_det - 1e-9
    drawn = [evidence.estimate(block).log_det for block in blocks.take(120)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.1)


@pytest.mark.usefixtures("few")
def test_the_log_likelihood_of_all_data_is_that_of_all() -> None:
    evidence, data = make_evidence("ntk-10-rows-anchored")
    exact, _ = make_evidence("ntk-N-C")
    assert evidence.anchors is not None
    log_likelihood = evidence.anchors.refresh(CheckedSource(evidence.problem, data))
    assert log_likelihood == pytest.approx(exact.estimate(*data).log_likelihood, rel=1e-9)


@pytest.mark.usefixtures("few")
def test_parts_are_drawn_as_their_weights_say() -> None:
    evidence, data = make_evidence("ntk-10-rows-anchored", anchoring=Anchoring(0.5))
    blocks = evidence.blocks(data)
    assert isinstance(blocks, AnchoredStream)
    weights: dict[int, float] = {}
    count = 0
    for _ in range(300):
        drawn = blocks.drawn(1)
        count = drawn.partition.num_parts
        (draw,) = drawn.draws
        assert weights.setdefault(draw.part, draw.weight) == pytest.approx(draw.weight)
    assert len(weights) == count
    assert sum(1 / weight for weight in weights.values()) == pytest.approx(1.0)


def test_an_epoch_of_all_data_is_a_permutation() -> None:
    order = torch.randperm(N, generator=stream(7, "shuffle", 3))
    epoch_batches = list(batches(7, 3, N, N, 8))
    assert all(map(torch.equal, epoch_batches, order.tensor_split(4)))
    assert [len(batch) for batch in epoch_batches] == [8, 8, 7, 7]


@pytest.mark.parametrize("written", [2**24, 8])
def test_epochs_of_a_part_go_on_where_the_last_one_ended(
    written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evigrad.core.permutation.WRITTEN", written)
    epochs = [torch.cat(list(batches(0, epoch, N, 12, 5))) for epoch in range(1, 6)]
    assert [len(epoch) for epoch in epochs] == [12] * 5
    whole = torch.cat(epochs)
    for one in (whole[:N], whole[N:]):
        assert sorted(one.tolist()) == list(range(N))
    assert not torch.equal(whole[:N], whole[N:])


def test_more_groups_than_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evigrad.core.partition.WRITTEN", 3)
    monkeypatch.setattr("evigrad.core.permutation.WRITTEN", 3)
    partition = Partition(Estimator.parse("ntk-4-8"), N, 16)
    seen = Counter[tuple[int, int]]()
    orders = set[tuple[int, ...]]()
    for block in partition.blocks(torch.Generator().manual_seed(0)):
        assert block.columns is not None
        seen.update(
            (n, c)
            for n, columns in zip(block.indices.tolist(), block.columns.tolist(), strict=True)
            for c in columns
        )
        orders.update(map(tuple, block.columns.tolist()))
    assert seen == Counter((n, c) for n in range(N) for c in range(16))
    assert len(orders) == partition.num_blocks == 16  # no two groups of data split outputs alike


class Endless:
    """Data that are made when they are asked for, and counted."""

    def __init__(self, num_data: int) -> None:
        self.num_data, self.read = num_data, 0

    def __len__(self) -> int:
        return self.num_data

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read += 1
        place = torch.tensor([index % 97, index % 89]) / 50 - 1
        return place, int(place.sum() > 0) + int(place[0] > 0.5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "estimator", ["ntk-20-rows-anchored", "ntk-20-rows", "ntk-10-C", "kfac-20-1", "ntk-10-1"]
)
def test_nothing_grows_with_the_number_of_data(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training on 10^10 data reads as many as one on 10^5, and ends at all."""
    monkeypatch.setattr(pool, "MANY", 1000)
    monkeypatch.setattr(pool, "POOL", 200)
    read = []
    for num_data in (10**5, 10**10):
        data = Endless(num_data)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = nn.Linear(2, 3)
        schedule = Schedule(epochs=4, epoch_size=200, burn_in=2, every=1, steps=2)
        result = evigrad.fit(
            net, data, estimator=estimator, schedule=schedule, seed=0, progress=False
        )
        assert all(weight.isfinite().all() for weight in net.parameters())
        assert 0 <= result.train_metrics["accuracy"] <= 1
        read.append(data.read)
    assert read[0] == pytest.approx(read[1], rel=0.1) and read[1] < 10_000
