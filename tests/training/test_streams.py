"""Runs on data in an order alone: what they read, that they go on, and what they refuse."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from training.interrupted import Killed, assert_same, assert_same_runs, killed, state_of
from training.small_runs import SMALL, net

from evigrad import Evidence, FitResult, Learner, Schedule, fit
from evigrad.blocks.streamed import check_single
from evigrad.data import Streamed
from evigrad.errors import ConfigurationError, EvigradError, InputError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior
from evigrad.training import metrics
from evigrad.training.settings import grouped

N = 60


class Shuffled(IterableDataset[tuple[Tensor, int]]):
    """Three clusters, in an order of its own in each pass, with noise of the global generators."""

    def __init__(self) -> None:
        own = torch.Generator().manual_seed(0)
        self.y = torch.arange(N) % 3
        centres = 1.5 * torch.randn(3, 4, generator=own)
        self.x = centres[self.y] + torch.randn(N, 4, generator=own)
        self.passes: list[list[int]] = []

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        order, read = torch.randperm(N).tolist(), list[int]()
        self.passes.append(read)
        for n in order:
            read.append(n)
            noise = 0.01 * (torch.randn(4) + float(np.random.rand()) + random.random())
            yield self.x[n] + noise, int(self.y[n])


def trained(data: Any, folder: Path | None = None, **changes: Any) -> FitResult:
    given = {**SMALL, "run_dir": folder, "test": Streamed(Shuffled(), N), **changes}
    return fit(net(), data, **grouped(given))


def test_epochs_are_passes_and_blocks_and_metrics_are_read_apart(tmp_path: Path) -> None:
    data = Shuffled()
    result = trained(Streamed(data, N), tmp_path / "run", eval_every=5)
    assert result.train_metrics["accuracy"] > 0.5 and result.test_metrics["accuracy"] > 0.5
    state = state_of(tmp_path / "run")
    # Five epochs, of which the end of the last was not seen yet; two rounds of three blocks of 20.
    assert state["batches"] == {"stream": {"passes": 4, "taken": N}}
    assert state["stream"] == {"passes": 1, "taken": N}
    complete = [read for read in data.passes if len(read) == N]
    assert all(sorted(read) == list(range(N)) for read in complete)
    assert len({tuple(read) for read in complete}) == 5  # an order of its own for each pass


@pytest.mark.parametrize("loader", [False, True])
def test_a_run_that_was_killed_goes_on_to_the_same_numbers(tmp_path: Path, loader: bool) -> None:
    def data() -> Streamed:
        return Streamed(DataLoader(Shuffled(), 7) if loader else Shuffled(), N)

    # An epoch of less than a pass, so that the run is killed within one.
    given: dict[str, Any] = {"epoch_size": 40, "epochs": 6}
    trained(data(), tmp_path / "whole", **given)

    def stop(row: Any) -> None:
        if row["epoch"] == 4:
            raise Killed

    cut = tmp_path / "cut"
    assert killed(lambda: trained(data(), cut, callbacks=[stop], **given))
    assert state_of(cut)["batches"]["stream"] == {"passes": 1, "taken": N}
    trained(data(), cut, resume=True, **given)
    assert_same_runs(cut, tmp_path / "whole")


def test_the_same_run_whatever_was_read_before_and_however_often_it_is_evaluated() -> None:
    stream = Streamed(Shuffled(), N)
    one = trained(stream, eval_every=0)
    stream.fetch(torch.arange(17))
    torch.rand(5)
    other = trained(stream, eval_every=1)
    assert_same(one.model.state_dict(), other.model.state_dict())
    assert one.train_metrics == other.train_metrics
    assert_same(
        dict(one.evidence.prior.named_parameters()), dict(other.evidence.prior.named_parameters())
    )


def test_a_learner_goes_on_where_its_stream_was() -> None:
    def made() -> Learner:
        evidence = Evidence(
            net(),
            Categorical(),
            GaussianPrior("layerwise"),
            estimator="ntk-7-1",
            num_data=N,
            generator=0,
        )
        schedule = Schedule(epochs=4, burn_in=1, every=1, steps=2)
        return Learner(evidence, Streamed(Shuffled(), N), schedule)

    whole, first, second = made(), made(), made()
    for _ in range(4):
        whole.step()
    for _ in range(2):
        first.step()
    state = first.state_dict()
    assert state["stream"] == {"passes": 0, "taken": 28}
    second.load_state_dict(state)
    for _ in range(2):
        second.step()
    assert_same(second.state_dict(), whole.state_dict())
    del state["stream"]
    with pytest.raises(ConfigurationError, match="does not fit this run"):
        made().load_state_dict(state)


def test_an_evaluation_that_does_not_fit_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = metrics.model_outputs

    def narrow(model: Any, x: Any, **given: Any) -> Tensor:
        if len(x) > 16:
            raise MemoryError
        return outputs(model, x, **given)

    data = [(x, int(y)) for x, y in zip(Shuffled().x, Shuffled().y, strict=True)]
    expected = metrics.evaluate(net(), Categorical(), data)
    monkeypatch.setattr(metrics, "model_outputs", narrow)
    found = metrics.evaluate(net(), Categorical(), Streamed(data, N))
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"estimator": "ntk-400-rows-anchored"}, "anchors of ntk-400-rows-anchored.*ntk-400-rows,"),
        ({"estimator": "kfac-N-C"}, "holds all 60 data"),
        ({"bracket_every": 2}, "bracket_every: the bounds have anchors"),
    ],
)
def test_settings_that_read_data_again_are_refused_first(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        trained(Streamed(Shuffled(), N), **changes)


def test_a_wrong_number_of_data_ends_the_run_and_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="num_data is 70, but a pass over the stream gave 60"):
        trained(Streamed(Shuffled(), 70))
    with pytest.raises(EvigradError, match=r"evigrad.data.Streamed\(data, num_data=N\)"):
        trained(Shuffled())
    with pytest.raises(ConfigurationError, match="2 ranks divide data by their positions"):
        check_single(Streamed(Shuffled(), N), 2)
    check_single(Streamed(Shuffled(), N), 1)
