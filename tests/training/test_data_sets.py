"""Data sets, whose items are read anew: what is read when, what is kept, and that draws repeat."""

import gc
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from training.small_runs import SMALL, net

from evigrad.errors import ConfigurationError, EvigradError
from evigrad.training import fit
from evigrad.training.data import RunData
from evigrad.training.settings import grouped

N = 300


class Augmented(Dataset):
    """Items that draw from every global generator, or from one of their own."""

    def __init__(self, seed: int = 0, own_generator: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(N, 4, generator=generator).half()  # not the type of the items
        self.own = torch.Generator() if own_generator else None
        self.read: list[int] = []
        self.calls = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        noise = torch.randn(4, generator=self.own)
        if self.own is None:
            noise = noise + float(np.random.rand()) + random.random()
        return self.x[index].float() + 0.1 * noise, index % 3


class Batched(Augmented):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        self.calls += 1
        return [self[index] for index in indices]


def state() -> tuple[Any, ...]:
    # Not Python's, which the checks of types draw from in tests.
    return torch.get_rng_state().tolist(), str(np.random.get_state())


def tensors() -> list[Tensor]:
    return [o for o in gc.get_objects() if type(o) is Tensor and o.dtype == torch.float32]


def test_an_epoch_reads_each_item_once_and_blocks_their_own():
    data, largest, reads = Augmented(), [], []

    def look(row: Any) -> None:
        reads.append(len(data.read))
        data.read.clear()
        largest.append(max(o.numel() for o in tensors() if id(o) not in other_ids))

    # Those of other tests, held so that none of the run's takes the place of one.
    others_own = tensors()
    other_ids = {id(tensor) for tensor in others_own}
    before = state()
    changed = {"epochs": 6, "estimator": "ntk-8-1", "eval_every": 0}
    fit(net(), data, callbacks=[look], **grouped(SMALL | changed))
    assert state() == before
    first, *others, last = reads
    assert first < N + 30  # some are looked at before training
    for epoch, count in enumerate(others, start=2):
        # Each item once, and behind every second epoch three blocks of 8.
        assert N + (24 if epoch % 2 == 0 else 0) <= count < N + (40 if epoch % 2 == 0 else 1)
    # With the evaluation, and the rows and the gradient of the mode gap.
    assert last < 6 * N + 40
    assert max(largest) < 4 * N  # no tensor holds all inputs


def test_draws_are_new_in_every_epoch_and_the_same_within_one():
    data = RunData(Augmented(), torch.device("cpu"))
    indices = torch.arange(5)
    data.epoch = 1
    first, _ = data.fetch(indices)
    assert torch.equal(data.fetch(indices)[0], first)
    assert not torch.equal(data.fetch(torch.arange(6))[0][:5], first)
    data.epoch = 2
    assert not torch.equal(data.fetch(indices)[0], first)


def test_data_that_are_held_are_read_once():
    data = Augmented()
    fit(net(), tuple(default_collate([data[i] for i in range(N)])), **grouped(SMALL))
    assert data.read == [*range(N)]


def test_a_data_set_that_reads_batches_is_asked_for_batches():
    one, many = Augmented(), Batched()
    results = [fit(net(), data, **grouped(SMALL)) for data in (one, many)]
    assert results[0].history[-1]["loss"] == results[1].history[-1]["loss"]
    assert one.read == many.read
    assert many.calls < len(many.read) / 5


@pytest.mark.parametrize("estimator", ["ntk-20-1", "ntk-20-rows-anchored"])
def test_random_items_are_the_same_after_an_interruption(tmp_path, estimator):
    settings = SMALL | {"estimator": estimator, "test": Augmented(1)}

    def stop(row: Any) -> None:
        if row["epoch"] == 3:
            raise KeyboardInterrupt

    whole = fit(net(), Augmented(), **grouped(settings))
    with pytest.raises(KeyboardInterrupt):
        fit(net(), Augmented(), run_dir=tmp_path / "run", callbacks=[stop], **grouped(settings))
    resumed = {"run_dir": tmp_path / "run", "resume": True}
    with pytest.raises(
        ConfigurationError, match="training data differ from the data of the run in .* in values"
    ):
        fit(net(), Augmented(2), **grouped(dict(**resumed, **settings)))
    continued = fit(net(), Augmented(), **grouped(dict(**resumed, **settings)))
    for row, expected in zip(continued.history, whole.history, strict=True):
        assert row | {"seconds": 0} == expected | {"seconds": 0}
    for name, weight in continued.evidence.weights().items():
        assert torch.equal(weight, whole.evidence.weights()[name])


def test_items_that_cannot_be_repeated_do_not_hinder_resuming(tmp_path):
    settings = SMALL | {"run_dir": tmp_path / "run", "resume": True, "estimator": None}
    data = Augmented(own_generator=True)

    def stop(row: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(net(), data, callbacks=[stop], **grouped(settings))
    assert len(fit(net(), data, **grouped(settings)).history) == 5


def test_items_are_checked_as_they_are_read():
    class Wrong(Augmented):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            x, y = super().__getitem__(index)
            return x, 7 if index == N - 1 else y

    with pytest.raises(EvigradError, match="7"):
        fit(net(), Wrong(), **grouped(SMALL))
    seen: list[Any] = []
    with pytest.raises(EvigradError, match="7"):  # before training
        fit(net(), Augmented(), test=Wrong(), callbacks=[seen.append], **grouped(SMALL))
    assert not seen
