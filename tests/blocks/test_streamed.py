"""Data in an order alone: what is read when, from where, and what is refused."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evigrad import Evidence
from evigrad.data import Streamed
from evigrad.errors import ConfigurationError, EvigradError, InputError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

N = 10


class Numbers(IterableDataset[tuple[Tensor, int]]):
    """Item n is (n, n mod 3) in float64, maybe with noise of every global generator."""

    def __init__(self, count: int = N, noisy: bool = False, shard: bool = True) -> None:
        self.count, self.noisy, self.shard = count, noisy, shard
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info() if self.shard else None
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for n in range(first, self.count, step):
            x = torch.full((2,), float(n), dtype=torch.float64)
            if self.noisy:
                x = x + torch.rand(2) + float(np.random.rand()) + random.random()
            yield x, n % 3


def numbers(stream: Streamed, count: int) -> list[float]:
    return stream.fetch(torch.zeros(count, dtype=torch.int64))[0][:, 0].tolist()


def test_the_next_data_come_whatever_is_asked_for_and_after_the_end_the_first() -> None:
    data = Numbers()
    stream = Streamed(data, N)
    assert len(stream) == N and stream.first(3)[0][:, 0].tolist() == [0, 1, 2]
    found = [numbers(stream, count) for count in (3, 4, 2, 5)]
    assert found == [[0, 1, 2], [3, 4, 5, 6], [7, 8], [9, 0, 1, 2, 3]]
    assert stream.place == {"passes": 1, "taken": 4}
    assert stream.first(20)[1].tolist() == [n % 3 for n in range(N)]
    assert numbers(stream.anew(), 2) == [0, 1] and numbers(stream, 2) == [4, 5]
    assert data.epochs[:3] == [0, 0, 1]  # for the first data, and for two passes


def test_a_place_is_found_again_with_the_same_draws() -> None:
    stream = Streamed(Numbers(noisy=True), N)
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    whole = numbers(stream, 25)
    assert (torch.get_rng_state() == before[0]).all()
    assert (str(np.random.get_state()), random.getstate()) == before[1:]
    in_parts = stream.anew()
    found = numbers(in_parts, 3) + numbers(in_parts, 10)
    torch.rand(3)
    random.random()
    again = stream.anew()
    again.place = in_parts.place
    found += numbers(again, 12)
    assert found == whole
    assert len(set(whole)) == 25  # each pass has draws of its own
    assert numbers(stream.anew(seed=1), 1) != whole[:1]


def test_loaders_give_their_workers_and_what_they_put_together() -> None:
    def doubled(items: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = torch.utils.data.default_collate(items)
        return 2 * x, y

    stream = Streamed(DataLoader(Numbers(), batch_size=3, collate_fn=doubled), N)
    assert numbers(stream, 4) == [0, 2, 4, 6]
    stream = Streamed(DataLoader(Numbers(noisy=True), batch_size=3, num_workers=2), N)
    found = numbers(stream, N)
    assert sorted(map(int, found)) != found  # by batches of three of one worker, then the other
    assert numbers(stream.anew(), N) == found
    everything = DataLoader(Numbers(shard=False), batch_size=3, num_workers=2)
    with pytest.raises(InputError, match="gave 20 data.*each of the workers gives all"):
        numbers(Streamed(everything, N), 21)


def test_the_number_of_data_has_to_be_right() -> None:
    with pytest.raises(InputError, match="num_data is 12, but a pass over the stream gave 10"):
        numbers(Streamed(Numbers(), 12), 12)
    with pytest.raises(InputError, match="num_data is 9, but a pass over the stream gave 10"):
        numbers(Streamed(Numbers(), 9), 11)
    with pytest.raises(InputError, match="Pass 1 over the stream gave no data"):
        numbers(Streamed(Numbers(0), 9), 1)
    shorter = Streamed(Numbers(5), N)
    shorter.place = {"passes": 3, "taken": 7}
    with pytest.raises(InputError, match="ended after 5 data, and 7 of this pass had been read"):
        numbers(shorter, 1)


@pytest.mark.parametrize(
    ("data", "number", "words"),
    [
        (iter([]), N, "only once"),
        (5, N, "not a int"),
        ((torch.zeros(2), torch.zeros(2)), N, "not a tuple"),
        (torch.zeros(2), N, "not a Tensor"),
        (DataLoader(Numbers(), batch_size=None), N, "batch_size=None"),
        (Numbers(), 0, "positive integer"),
        (Numbers(), 2.5, "positive integer"),
    ],
)
def test_what_is_no_stream(data: Any, number: Any, words: str) -> None:
    with pytest.raises(EvigradError, match=words):
        Streamed(data, number)


def test_items_that_are_no_pairs_are_named_by_their_place() -> None:
    stream = Streamed([(torch.zeros(2), 0)] * 4 + [5] * 6, N)
    numbers(stream, 3)
    with pytest.raises(InputError, match="Item 4 of the data set is not a pair"):
        numbers(stream, 3)


def test_no_place_before_the_beginning() -> None:
    with pytest.raises(ConfigurationError, match="No stream is at the place"):
        Streamed(Numbers(), N).place = {"passes": 0, "taken": -1}


# ------------------------------------------------------------ blocks

# Names whose blocks are the next data, with their number of data and the factor of the rows.
BLOCKS = {
    "ntk-4-1": (4, 9),
    "ntk-3-C": (3, 4),
    "ntk-6-rows": (None, 5),
    "kfac-5-1": (5, 6),
    "diag-4-2-mc": (4, 3),
    "full-2-1-iid": (2, 15),
    "blockdiag-4-1-ef": (4, 3),
}


def made(estimator: str, **options: Any) -> Evidence:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise", precision=0.5),
        estimator=estimator,
        num_data=N,
        generator=3,
        **options,
    )


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_the_next_data_with_the_outputs_and_factors_of_any_block(name: str) -> None:
    """The same draws on the same data held in memory, in their order, give the same numbers."""
    size, scale = BLOCKS[name]
    stream, evidence, held = Streamed(Numbers(), N), made(name), made(name)
    read = Streamed(Numbers(), N)
    streamed = evidence.blocks(stream)
    x, y = stream.first(N)
    for block, other in zip(streamed.take(5), held.blocks((x, y)).take(5), strict=True):
        count = len(other.indices)
        assert size is None or count in (size, N % size)
        assert block.scale == other.scale == scale
        own_x, own_y = read.fetch(torch.zeros(count).long())
        assert block.targets is not None
        assert torch.equal(block.inputs, own_x) and torch.equal(block.targets, own_y)
        # What is drawn is that of data in memory; these are others.
        assert torch.equal(block.likelihood_weights, other.likelihood_weights)
        columns = (block.columns, other.columns)
        assert columns == (None, None) or torch.equal(*columns)  # type: ignore[arg-type]
        found = evidence.estimate(block)
        expected = held.estimate(
            type(other)(**{**vars_of(other), "inputs": own_x, "targets": own_y})
        )
        assert found.log_det == pytest.approx(expected.log_det, rel=1e-12)
        assert found.log_likelihood == pytest.approx(expected.log_likelihood, rel=1e-12)
        assert found.is_bound == expected.is_bound


def vars_of(block: Any) -> dict[str, Any]:
    return {name: getattr(block, name) for name in block.__dataclass_fields__}


def test_blocks_go_on_where_the_last_ones_ended() -> None:
    evidence, stream = made("ntk-3-1"), Streamed(Numbers(), N)
    seen = [b.inputs[:, 0].tolist() for _ in range(2) for b in evidence.blocks(stream).take(1)]
    assert seen == [[0, 1, 2], [3, 4, 5]]


def test_the_mean_over_all_orders_is_that_of_all_blocks() -> None:
    """A shuffled stream gives the expectation of blocks of data that are read by position."""

    def shuffled(seed: int) -> list[tuple[Tensor, int]]:
        items = list(Numbers())
        random.Random(seed).shuffle(items)
        return items

    evidence = made("ntk-5-C")
    held = made("ntk-5-C")
    x, y = Streamed(Numbers(), N).first(N)
    drawn = [held.estimate(b).log_det for _ in range(40) for b in held.blocks((x, y)).take(2)]
    found = [
        evidence.estimate(block).log_det
        for seed in range(40)
        for block in evidence.blocks(Streamed(shuffled(seed), N)).take(2)
    ]
    one, other = (torch.tensor(values) for values in (drawn, found))
    error = (one.var() / 40 + other.var() / 40).sqrt()
    assert abs(one.mean() - other.mean()) < 4 * error
    whole = made("ntk-N-C").estimate(x, y).log_det
    assert other.mean() > whole


def test_a_posterior_is_that_of_all_data_in_memory() -> None:
    stream = Streamed(Numbers(), N)
    numbers(stream, 4)  # which makes no difference
    x, y = stream.first(N)
    for structure in ("kfac", "full", "ntk"):
        found = made("ntk-3-1").posterior(stream, structure=structure)(x).variance
        expected = made("ntk-3-1").posterior((x, y), structure=structure)(x).variance
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert numbers(stream, 1) == [4]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ntk-6-rows-anchored", r"anchors of ntk-6-rows-anchored.*take ntk-6-rows,"),
        ("ntk-3-1-grouped", "class by class"),
        ("kfac-N-C", r"holds all 10 data.*estimate\(batches\)"),
        ("ntk-N-1", r"holds all 10 data"),
    ],
)
def test_estimators_that_need_more_than_the_next_data_are_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        made(name).blocks(Streamed(Numbers(), N))


def test_other_numbers_and_outputs_at_positions_are_refused() -> None:
    with pytest.raises(InputError, match="num_data is 10, but the data set has 12"):
        made("ntk-3-1").blocks(Streamed(Numbers(12), 12))
    model = nn.Linear(1, 3).double()
    evidence = Evidence(model, Categorical(), GaussianPrior(), estimator="ntk-3-1", num_data=N)
    items = [(torch.zeros(4, 1).double(), torch.zeros(4).long()) for _ in range(N)]
    with pytest.raises(InputError, match="target at each position"):
        evidence.blocks(Streamed(items, N))
