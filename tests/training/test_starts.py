"""Several starts: the one with the highest log evidence continues as if it were alone."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.interrupted import assert_same_runs, dying_at_call, killed
from training.small_runs import SMALL, without_estimator

from evigrad import FitResult, Optimization
from evigrad.errors import ConfigurationError, EvigradError, EvigradWarning, MemoryBudgetError
from evigrad.evidence import Evidence
from evigrad.training import fit
from evigrad.training.settings import grouped
from evigrad.training.starts import Starts

SETTINGS: dict[str, Any] = SMALL | {
    "epochs": 12,
    "burn_in": 2,
    "every": 1,
    "likelihood": "gaussian",
}
COMPARED = 4  # a third of the epochs, with three rounds


def sinusoid() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.rand(60, 1, generator=generator) - 2
    return x, torch.sin(3 * x) + 0.1 * torch.randn(60, 1, generator=generator)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


def train(*decays: float, folder: Path | None = None, **changes: Any) -> FitResult:
    settings = grouped(SETTINGS | {"start_decay": decays or None} | changes)
    return fit(net(), sinusoid(), run_dir=folder, **settings)


def weights_of(result: FitResult) -> Tensor:
    return nn.utils.parameters_to_vector(result.model.parameters())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("decays", [(0.01, 1.0), (1.0, 0.01), (1.0, 0.01, 3.0)])
def test_the_best_start_continues_as_if_it_were_alone(decays):
    several, alone = train(*decays), train(0.01)
    assert list(several.starts) == list(decays)
    assert max(several.starts, key=several.starts.__getitem__) == 0.01
    assert alone.starts == {}
    assert torch.equal(weights_of(several), weights_of(alone))
    columns = several.history[0].keys() - {"seconds"}
    for one, other in zip(several.history, alone.history, strict=True):
        assert {name: one[name] for name in columns} == {name: other[name] for name in columns}
    assert several.mode_gap == alone.mode_gap


def test_scores_are_means_over_the_last_rounds():
    result = train(0.01, 1.0)
    values = [row["log_evidence"] for row in result.history[:COMPARED]]
    last_three = [value for value in values if value is not None][-3:]
    assert result.starts[0.01] == pytest.approx(sum(last_three) / 3)


def test_the_time_of_all_trials_counts():
    result = train(0.01, 1.0)
    seconds = [float(row["seconds"] or 0) for row in result.history]
    assert seconds == sorted(seconds)
    assert result.seconds == seconds[-1]


def test_callbacks_and_files_have_the_rows_of_the_best_start(tmp_path):
    rows: list[int] = []
    result = fit(
        net(),
        sinusoid(),
        run_dir=tmp_path / "run",
        callbacks=[lambda row: rows.append(int(row["epoch"] or 0))],
        **grouped(SETTINGS | {"start_decay": (1.0, 0.01)}),
    )
    assert rows == list(range(1, 13))
    lines = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", *map(str, range(1, 13))]
    assert result.history[-1]["epoch"] == 12


# Two starts in some order, and moments in the first trial, in the second one, and after the choice.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("decays", "moments"), [((0.01, 1.0), (5, 13, 26)), ((1.0, 0.01), (9, 20, 40))]
)
def test_a_killed_run_ends_the_same(decays, moments, tmp_path):
    train(*decays, folder=tmp_path / "whole")
    for moment in moments:
        folder = tmp_path / str(moment)
        with dying_at_call(Evidence, "map_loss", moment):
            assert killed(lambda folder=folder: train(*decays, folder=folder))
        resumed = train(*decays, folder=folder, resume=True)
        assert list(resumed.starts) == list(decays)
        assert_same_runs(folder, tmp_path / "whole")


def test_a_start_that_diverges_loses(monkeypatch):
    step = Starts.advance
    calls = 0

    def diverge(*arguments: Any, **keywords: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = map_loss(*arguments, **keywords)
        return loss * float("nan") if calls > 3 * COMPARED else loss

    def stop_diverging(self: Starts, history: Any, state: Any) -> Any:
        nonlocal calls
        chosen = step(self, history, state)
        if not self.are_tried:
            calls = -1000
        return chosen

    map_loss = Evidence.map_loss
    monkeypatch.setattr(Evidence, "map_loss", diverge)
    monkeypatch.setattr(Starts, "advance", stop_diverging)
    result = train(0.01, 1.0)
    assert result.starts[1.0] == -float("inf")
    monkeypatch.undo()
    assert torch.equal(weights_of(result), weights_of(train(0.01)))


def test_if_all_starts_diverge_training_has_diverged(monkeypatch):
    map_loss = Evidence.map_loss
    monkeypatch.setattr(Evidence, "map_loss", lambda *a, **k: map_loss(*a, **k) * float("nan"))
    with pytest.raises(EvigradError, match="diverged in epoch 1"):
        train(0.01, 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 4},  # too few rounds
        {"prior_update": "adam"},
        {"prior_mean": "initial"},  # starts from another decay
        {"estimator": None},
    ],
)
def test_runs_with_a_single_start(changes):
    settings = SETTINGS | changes
    if "estimator" in changes:
        settings = without_estimator(settings)
    if settings.pop("prior_mean", None):
        from evigrad.priors import GaussianPrior

        settings["prior"] = GaussianPrior("layerwise", mean="initial")
    assert fit(net(), sinusoid(), **grouped(settings)).starts == {}


def test_defaults_try_two_starts_for_regression_only(blobs, make_net):
    assert list(train().starts) == [0.01, 0.001]
    settings = SETTINGS | {"likelihood": "categorical"}
    assert fit(make_net(), blobs[0], **grouped(settings)).starts == {}


def test_what_is_no_decay():
    for decay in [0.0, -1.0, float("nan"), True, "a", (0.1, 0.0), ()]:
        with pytest.raises(
            ConfigurationError, match="start_decay must be one or more positive numbers"
        ):
            Optimization(start_decay=decay)


@pytest.mark.long
def test_a_run_that_has_not_converged_warns_and_a_longer_one_does_not():
    x, _ = sinusoid()
    y = 2 * x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    with pytest.warns(EvigradWarning, match="has not converged.* Train for more epochs"):
        early = fit(net(), (x, y), **grouped(SETTINGS))
    assert early.mode_gap is not None and early.mode_gap > 0.1
    settings = grouped(SETTINGS | {"epochs": 300, "burn_in": 30, "every": 15})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        late = fit(net(), (x, y), **settings)
    assert late.mode_gap is not None and late.mode_gap < 0.1
    assert late.mode_gap == late.history[-1]["mode_gap"]
    assert all(row["mode_gap"] is None for row in late.history[:-1])


def test_memory_that_does_not_suffice_ends_all_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryBudgetError("No memory.", "Buy some.")

    monkeypatch.setattr(Evidence, "map_loss", refuse)
    with pytest.raises(MemoryBudgetError, match="No memory"):
        train(0.01, 1.0)
