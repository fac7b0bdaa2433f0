"""Data sets, whose items are read anew: what is read when, what is kept, and that draws repeat."""

import gc
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from training.small_runs import RECORDED, SMALL, net, without_estimator

from evigrad import Evidence, Learner, Schedule, bracket, tune
from evigrad.errors import ConfigurationError, EvigradError
from evigrad.likelihoods import Gaussian
from evigrad.priors import GaussianPrior
from evigrad.training import fit
from evigrad.training.data import RunData
from evigrad.training.settings import grouped

N = 300
CHANGES = "ignore:The inputs of the data set change"


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


@pytest.mark.filterwarnings(CHANGES)
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


@pytest.mark.filterwarnings(CHANGES)
def test_a_data_set_that_reads_batches_is_asked_for_batches():
    one, many = Augmented(), Batched()
    results = [fit(net(), data, **grouped(SMALL)) for data in (one, many)]
    assert results[0].history[-1]["loss"] == results[1].history[-1]["loss"]
    assert one.read == many.read
    assert many.calls < len(many.read) / 5


@pytest.mark.filterwarnings(CHANGES)
@pytest.mark.one_in(2)
@pytest.mark.parametrize("estimator", ["ntk-20-1", "ntk-20-rows-anchored"])
def test_random_items_are_the_same_after_an_interruption(tmp_path, estimator):
    settings = SMALL | {"estimator": estimator, "test": Augmented(1)}

    def stop(row: Any) -> None:
        if row["epoch"] == 3:
            raise KeyboardInterrupt

    whole = fit(net(), Augmented(), **grouped(settings))
    with pytest.raises(KeyboardInterrupt):
        recorded = grouped(settings | {"checkpoint_every": 1})
        fit(net(), Augmented(), run_dir=tmp_path / "run", callbacks=[stop], **recorded)
    settings["checkpoint_every"] = 1
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
    settings = without_estimator(RECORDED) | {"run_dir": tmp_path / "run", "resume": True}
    data = Augmented(own_generator=True)

    def stop(row: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(net(), data, callbacks=[stop], **grouped(settings))
    assert len(fit(net(), data, **grouped(settings)).history) == 5


@pytest.mark.filterwarnings(CHANGES)
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


class Flipped(Dataset):
    """Items whose inputs or targets change between readings, or do not."""

    def __init__(self, draw: Callable[[Tensor], Tensor], of_targets: bool = False) -> None:
        self.x = torch.linspace(-1, 1, 60).reshape(20, 3)
        self.draw, self.of_targets, self.reads = draw, of_targets, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        x, y = self.x[index], self.x[index, :1]
        return (x, self.draw(y)) if self.of_targets else (self.draw(x), y)


OWN = torch.Generator()
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda x: x + torch.randn(len(x)),
    "numpy": lambda x: x + float(np.random.rand()),
    "python": lambda x: x + random.random(),
    "a generator of its own": lambda x: x + torch.randn(len(x), generator=OWN),
    "flips": lambda x: -x if torch.rand(()) < 0.5 else x,
}
READERS: dict[str, Callable[[Evidence, Any], Any]] = {
    "blocks": lambda evidence, data: evidence.blocks(data),
    "posterior": lambda evidence, data: evidence.posterior(data),
    "mode_gap": lambda evidence, data: evidence.mode_gap(data),
    "estimate": lambda evidence, data: evidence.estimate(DataLoader(data, 7, shuffle=True)),
    "loader": lambda evidence, data: evidence.blocks(DataLoader(data, 7)),
    "bracket": lambda evidence, data: bracket(evidence, data, rows=5),
    "Learner": lambda evidence, data: Learner(evidence, data, Schedule(epochs=5)),
    "tune": lambda evidence, data: tune(
        evidence.model, data, likelihood="gaussian", rounds=1, estimator="ntk-N-C"
    ),
    "fit": lambda evidence, data: fit(
        evidence.model, data, likelihood="gaussian", estimator="ntk-N-C", **grouped(BRIEF)
    ),
}
BRIEF = {"epochs": 4, "progress": False}


def small_evidence() -> Evidence:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
    return Evidence(model, Gaussian(), GaussianPrior(), estimator="kfac-N-C", num_data=20)


def warnings_of(read: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read()
    return [str(w.message) for w in caught if "of the data set change" in str(w.message)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("reader", READERS)
def test_each_use_of_changing_items_warns_once(reader):
    evidence, read = small_evidence(), READERS[reader]
    (words,) = warnings_of(lambda: read(evidence, Flipped(DRAWS["torch"])))
    assert words.startswith("The inputs of") and "evigrad.invariances.Averaged" in words
    (words,) = warnings_of(lambda: read(evidence, Flipped(DRAWS["torch"], of_targets=True)))
    assert words.startswith("The targets of") and "default_collate(list(dataset))" in words
    assert not warnings_of(lambda: read(evidence, Flipped(lambda x: x)))


@pytest.mark.parametrize("draw", DRAWS)
def test_all_sources_of_changes_are_noticed_and_the_users_draws_stay_the_same(draw):
    evidence, data, state = small_evidence(), Flipped(DRAWS[draw]), torch.get_rng_state()
    assert len(warnings_of(lambda: evidence.blocks(data))) == 1
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    other = Flipped(DRAWS[draw])
    for place in [0, 0, 1, 2, 0, 1, 2]:  # what is read apart from the comparison
        other[place]
    assert torch.equal(torch.get_rng_state(), drawn)


def test_items_that_stay_the_same_do_not_warn():
    cache: dict[int, Tensor] = {}
    constant = Flipped(lambda x: x)
    evidence = small_evidence()
    assert not warnings_of(lambda: evidence.blocks(constant))
    assert constant.reads == 7 + 4  # two items twice
    drawing = Flipped(lambda x: x + 0 * torch.randn(3))
    assert not warnings_of(lambda: evidence.blocks(drawing))
    assert drawing.reads <= 7 + 16  # a few times more, as they draw
    cached = Flipped(lambda x: cache.setdefault(int(x[0] * 1000), x + torch.randn(3)))
    assert not warnings_of(lambda: evidence.blocks(cached))
    with_missing = Flipped(lambda y: y if y > 0.4 else y * torch.nan, of_targets=True)
    likelihood = Gaussian(missing="nan")
    of_missing = evidence.with_estimator("kfac-N-C", likelihood=likelihood)
    assert not warnings_of(lambda: of_missing.blocks(with_missing))
    plain = {**BRIEF, "estimator": None}
    data = Flipped(DRAWS["torch"])
    assert not warnings_of(
        lambda: fit(nn.Linear(3, 1), data, likelihood="gaussian", **grouped(plain))
    )
