"""The weight of the log-determinant that held-out data choose."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import evigrad
from evigrad import Laplace, Schedule
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Categorical
from evigrad.measure.metrics import log_probabilities_of
from evigrad.training import trials
from evigrad.training.data import RunData
from evigrad.training.fit import prepare_evidence
from evigrad.training.trainer import Trainer
from evigrad.training.weight_choice import FACTOR, STEPS, Predictions, search

SCHEDULE = Schedule(epochs=5, burn_in=1, every=1, steps=1, eval_every=0)


def log_steps(weight: float) -> float:
    return math.log(weight) / math.log(FACTOR)


class Recorded:
    """Trials whose log likelihoods are functions of the number of steps.

    Args:
        end: Log likelihoods of the examples at the end.
        halfway: Log likelihoods halfway, or None if they are not known.
        bad: Steps for which training diverges.
    """

    def __init__(
        self,
        end: Callable[[float], Tensor],
        halfway: Callable[[float], Tensor] | None = None,
        bad: tuple[int, ...] = (),
    ) -> None:
        self._end, self._halfway = end, halfway
        self._bad = [FACTOR**step for step in bad]
        self.ended: list[float] = []

    def halfway(self, weight: float) -> Predictions | None:
        if self._halfway is None or weight in self._bad:
            return None
        return predictions(self._halfway(log_steps(weight)))

    def end(self, weight: float) -> Predictions | None:
        self.ended.append(log_steps(weight))
        return None if weight in self._bad else predictions(self._end(log_steps(weight)))


def predictions(values: Tensor) -> Predictions:
    return Predictions(values, torch.ones_like(values))


def parabola(best: float, noise: float = 0.0, count: int = 50) -> Callable[[float], Tensor]:
    """Log likelihoods whose mean falls with the squared distance from the best step."""
    draws = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = (draws - draws.mean()) / draws.std()
    return lambda step: -0.1 * (step - best) ** 2 + noise * step * draws


# ------------------------------------------------------------------ the search


@given(best=st.floats(-STEPS[-1], STEPS[-1]))
def test_the_vertex_of_a_parabola_is_found(best: float) -> None:
    trials = Recorded(parabola(best))
    choice = search(trials)
    assert log_steps(choice.weight) == pytest.approx(best, abs=1e-6)
    assert choice.gain == pytest.approx(0.1 * best**2, abs=1e-9)
    assert len(trials.ended) == len(set(trials.ended)) == len(choice.trials) <= 5


@given(best=st.floats(-STEPS[-1], STEPS[-1]), slope=st.floats(0.1, 10.0))
def test_a_steep_side_does_not_move_the_choice_far(best: float, slope: float) -> None:
    """The choice lies within the trials around a maximum with two different slopes."""

    def end(step: float) -> Tensor:
        distance = step - best
        value = -distance if distance > 0 else slope * distance
        return torch.full((5,), value, dtype=torch.float64)

    assert log_steps(search(Recorded(end)).weight) == pytest.approx(best, abs=3.0)


@pytest.mark.parametrize("best", [-30.0, 30.0])
def test_the_search_ends_at_the_farthest_weight(best: float) -> None:
    choice = search(Recorded(parabola(best)))
    assert log_steps(choice.weight) == math.copysign(STEPS[-1], best)


def test_no_trial_follows_a_maximum_that_is_behind() -> None:
    """The parabola through the last three trials shows it."""
    choice = search(Recorded(parabola(2.5)))
    assert [log_steps(weight) for weight in choice.trials] == [0, 1, 3]


def test_data_that_cannot_tell_keep_the_weight() -> None:
    choice = search(Recorded(parabola(0.4, noise=2.0)))
    assert choice.weight == 1 and 0 < choice.gain < choice.error
    assert str(choice).startswith("The held-out data do not call for another weight")


def test_a_maximum_that_is_known_well_needs_no_gain() -> None:
    """Its standard error is a quarter of a step, and its gain is below the gain's error."""
    choice = search(Recorded(parabola(0.2, noise=0.05 * 50**0.5)))
    assert 0 < choice.gain < choice.error
    assert log_steps(choice.weight) == pytest.approx(0.2)


@pytest.mark.parametrize(("error", "is_decided"), [(0.95, True), (1.05, False)])
def test_the_error_of_a_vertex(error: float, is_decided: bool) -> None:
    """It is the error of the slope over the change of the slope: noise / √count / 0.2 here."""
    choice = search(Recorded(parabola(0.1, noise=0.2 * error * 50**0.5)))
    assert choice.gain < choice.error
    assert (choice.weight != 1) == is_decided


def test_the_gain_has_a_paired_error() -> None:
    end = parabola(1.2, noise=0.3)
    choice = search(Recorded(end))
    expected = end(log_steps(choice.weight)) - end(0)
    assert choice.gain == pytest.approx(float(expected.mean()), abs=1e-9)
    assert choice.error == pytest.approx(float(expected.std()) / 50**0.5, rel=1e-6)
    assert log_steps(choice.weight) == pytest.approx(1.2, abs=1e-6)


@pytest.mark.parametrize(
    ("best", "bad", "expected"), [(1.8, 3, 1.0), (-1.2, 1, -1.2), (-3.9, -6, -3.0), (0.0, 1, 0.0)]
)
def test_trials_that_diverged_are_the_worst(best: float, bad: int, expected: float) -> None:
    choice = search(Recorded(parabola(best), bad=(bad,)))
    assert choice.trials[FACTOR**bad] == -math.inf
    assert log_steps(choice.weight) == pytest.approx(expected, abs=1e-6)


@given(best=st.floats(-STEPS[-1], STEPS[-1]))
def test_trials_far_from_the_best_stop_halfway(best: float) -> None:
    """Only the best trial and its neighbors are trained to the end."""
    assume(best % 0.5 > 1e-3)  # two trials are equal
    end = parabola(best)
    trials = Recorded(end, lambda step: end(step) - 1)
    choice = search(trials)
    assert log_steps(choice.weight) == pytest.approx(best, abs=1e-6)
    assert choice.trials == pytest.approx(search(Recorded(end)).trials)
    steps = [log_steps(weight) for weight in choice.trials]
    nearest = max(range(len(steps)), key=lambda place: float(end(steps[place]).mean()))
    assert {steps.index(step) for step in trials.ended} <= {nearest + i for i in (-1, 0, 1)}


@given(best=st.floats(-STEPS[-1], STEPS[-1]), halfway=st.floats(-STEPS[-1], STEPS[-1]))
def test_the_end_decides_whatever_is_ahead_halfway(best: float, halfway: float) -> None:
    choice = search(Recorded(parabola(best), parabola(halfway)))
    assert log_steps(choice.weight) == pytest.approx(best, abs=1e-6)


def test_targets_of_one_example_count_as_one() -> None:
    """The standard error of a ratio of sums, by the jackknife."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 9, (400,), generator=generator).double()
    sums = counts * torch.randn(400, generator=generator, dtype=torch.float64)
    predictions = Predictions(sums, counts)
    without = torch.stack(
        [(sums.sum() - s) / (counts.sum() - c) for s, c in zip(sums, counts, strict=True)]
    )
    jackknife = float(((without - without.mean()).square().sum() * 399 / 400).sqrt())
    assert predictions.standard_error() == pytest.approx(jackknife, rel=0.02)


# ------------------------------------------------------------------ the trials


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=generator)
    return x, (x[:, 0] + torch.randn(count, generator=generator) > 0).long()


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def fit(model: nn.Module, train: Any = None, **settings: Any) -> evigrad.FitResult:
    train = data() if train is None else train
    return evigrad.fit(model, train, schedule=SCHEDULE, progress=False, **settings)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["tensors", "items", "given", "prequential"])
def test_training_with_a_chosen_weight_is_training_with_that_weight(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Predictions, "standard_error", lambda _: 0.0)
    train: Any = data()
    if kind == "items":
        train = [(x, int(y)) for x, y in zip(*train, strict=True)]
    held_out: Any = {"validation_fraction": 0.25}
    if kind in ("given", "prequential"):
        held_out = {"validation": data(90) if kind == "given" else kind}
    model, twin = network(), network()
    result = fit(model, train, **held_out)
    choice = result.weight_choice
    assert choice is not None and choice.weight != 1
    assert choice.num_held_out == {"given": 90, "prequential": 45}.get(kind, 15)
    assert result.evidence.log_det_weight == choice.weight
    fit(twin, train, laplace=Laplace(log_det_weight=choice.weight))
    assert_same(model, twin)


def test_prequential_trials_predict_what_they_have_not_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second quarter after the first one, and the second half after the first one."""
    learned, predicted = list[Tensor](), list[Tensor]()

    def train(self: Trainer, *args: Any, **options: Any) -> Any:
        learned.append(self.data.fetch(torch.arange(len(self.data)))[0])
        return run(self, *args, **options)

    def log_probabilities(
        model: nn.Module, likelihood: Any, held_out: RunData, densities: None
    ) -> Any:
        predicted.append(held_out.fetch(torch.arange(len(held_out)))[0])
        return log_probabilities_of(model, likelihood, held_out, densities)

    run = Trainer.train
    monkeypatch.setattr(Trainer, "train", train)
    monkeypatch.setitem(vars(trials), "log_probabilities_of", log_probabilities)
    choice = fit(network(), validation="prequential").weight_choice
    assert choice is not None and choice.num_held_out == 45
    assert len(learned) == len(predicted) + 1  # two parts halfway, and two to the end

    def rows(*parts: Tensor) -> set[tuple[float, ...]]:
        return {tuple(row) for part in parts for row in part.tolist()}

    assert [len(part) for part in learned[:2]] == [15, 30]
    assert rows(learned[0], predicted[0]) == rows(learned[1])
    assert rows(learned[1], predicted[1]) == rows(data()[0])


def test_trials_predict_the_examples_at_positions() -> None:
    x, y = data()
    x[40:, 0] *= -1  # other data than the rest
    mask = torch.arange(60) >= 40
    by_mask, by_position = (
        fit(network(), (x, y), validation=fold).weight_choice for fold in (mask, np.arange(40, 60))
    )
    part = fit(network(), (x[:40], y[:40]), validation=(x[40:], y[40:])).weight_choice
    assert by_mask is not None and by_position is not None and part is not None
    assert by_mask.trials == by_position.trials == part.trials
    assert by_mask.num_held_out == by_position.num_held_out == 20


@pytest.mark.long
def test_the_data_of_the_training_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def counting(model: nn.Module, data: RunData, *options: Any) -> Any:
        counts.append(len(data))
        return prepare_evidence(model, data, *options)

    monkeypatch.setitem(vars(sys.modules[evigrad.fit.__module__]), "prepare_evidence", counting)
    choice = fit(network(), validation_fraction=0.25).weight_choice
    assert choice is not None
    assert counts == [60] + [45] * (len(counts) - 1)
    # Each trial trains to the middle, and from there to the end.
    assert len(counts) <= 2 * len(choice.trials) + 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("pauses", [False, True])
def test_trials_are_trainings_on_the_other_data(
    pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the burn-in, and may pause halfway."""
    if not pauses:
        monkeypatch.setattr("evigrad.training.trials._PartTrials.has_halfway", False)
    x, y = data()
    choice = fit(network(), (x, y), validation=torch.arange(20)).weight_choice
    assert choice is not None
    schedule, train, equal = replace(SCHEDULE, prior_blocks=1), (x[20:], y[20:]), 0
    for weight, value in choice.trials.items():
        laplace = Laplace(log_det_weight=weight)
        model = evigrad.fit(
            network(), train, laplace=laplace, schedule=schedule, progress=False
        ).model
        log_probabilities, _ = log_probabilities_of(model, Categorical(), (x[:20], y[:20]))
        # Sums of equal numbers differ in their last digit on some processors.
        equal += value == pytest.approx(float(log_probabilities.sum() / 20), rel=1e-14)
    # The best trial and at least one neighbor did not stop halfway.
    assert equal >= 2 if pauses else equal == len(choice.trials)


def test_the_posterior_predicts_if_noise_is_learned() -> None:
    """A trial has at most twice the epochs of the first cycle."""
    x, _ = data()
    y = x[:, :1] + 0.3 * torch.randn(60, 1, generator=torch.Generator().manual_seed(1))

    def line() -> nn.Linear:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Linear(3, 1)

    epochs = SCHEDULE.epochs or 0
    choice = evigrad.fit(
        line(),
        (x, y),
        likelihood="gaussian",
        schedule=replace(SCHEDULE, max_epochs=5 * epochs),
        validation=torch.arange(20),
        progress=False,
    ).weight_choice
    assert choice is not None
    result = evigrad.fit(
        line(),
        (x[20:], y[20:]),
        likelihood="gaussian",
        schedule=replace(SCHEDULE, prior_blocks=1, max_epochs=2 * epochs),
        optimization=evigrad.Optimization(start_decay=1e-2),
        progress=False,
    )
    posterior = result.evidence.posterior((x[20:], y[20:]), structure="full")
    expected = posterior(x[:20]).log_prob(y[:20]).double().mean()
    assert choice.trials[1.0] == pytest.approx(float(expected), abs=1e-9)


def test_an_interrupted_choice_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, model = network(), network()
    expected = fit(whole, validation_fraction=0.25, run_dir=tmp_path / "whole").weight_choice
    run_epoch, left = Trainer.epoch, 5

    def epoch(self: Trainer, number: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return run_epoch(self, number)

    interruptions = 0
    while True:
        monkeypatch.setattr(Trainer, "epoch", epoch)
        try:
            result = fit(model, validation_fraction=0.25, run_dir=tmp_path / "cut", resume=True)
            break
        except KeyboardInterrupt:
            assert_same(model, network()) if not (tmp_path / "cut/checkpoint.pt").exists() else None
            interruptions, left, model = interruptions + 1, 5, network()
    choice = result.weight_choice
    assert interruptions > 2 and choice is not None and expected is not None
    assert (choice.weight, choice.trials) == (expected.weight, expected.trials)
    assert_same(model, whole)


@pytest.mark.long
def test_blocks_of_more_examples_than_a_trial_has() -> None:
    by_size, of_all = (
        fit(network(), validation_fraction=0.5, estimator=name).weight_choice
        for name in ("kfac-50-1", "kfac-N-1")
    )
    assert by_size is not None and of_all is not None and by_size.trials == of_all.trials


def test_classes_keep_their_proportions() -> None:
    x, y = data(100)
    y = (torch.arange(100) % 10 == 0).long()
    seen: list[Tensor] = []

    class Watching(Categorical):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            if not torch.is_grad_enabled() and len(y) == 20:
                seen.append(y)
            return super().log_prob(f, y)

    fit(network(), (x, y), likelihood=Watching(), validation_fraction=0.2)
    assert seen and all(int(y.sum()) == 2 for y in seen)


def test_choices_that_cannot_be_made() -> None:
    for settings, words in [
        ({"validation_fraction": 0.1, "validation": data()}, "cannot be combined"),
        ({"validation": "prequentially"}, "or 'prequential', got 'prequentially'"),
        ({"validation": torch.tensor([60])}, "from 0 to 59"),
        ({"validation": torch.tensor([0.5])}, "torch.float32 of shape"),
        ({"validation": torch.ones(60, dtype=torch.bool)}, "for 60 examples"),
        ({"validation": torch.ones(59, dtype=torch.bool)}, "a part of the 60"),
        ({"validation_fraction": 1.0}, "between 0 and 1"),
        ({"validation_fraction": 10}, "between 0 and 1"),
        ({"validation_fraction": 0.001}, "must leave data to train on"),
        ({"validation_fraction": 0.1, "estimator": None}, "requires an estimator"),
        ({"validation": data(), "estimator": None}, "validation requires an estimator"),
        (
            {"validation_fraction": 0.1, "laplace": Laplace(log_det_weight=2.0)},
            "log_det_weight is 2.0",
        ),
    ]:
        model = network()
        with pytest.raises(ConfigurationError, match=words):
            fit(model, **settings)
        assert_same(model, network())


def test_log_probabilities_by_example() -> None:
    """With positions, some of which have no target, and by the posterior."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 5, 3, generator=generator)
    y = torch.randint(4, (11, 5), generator=generator)
    y[2], y[7, 3:] = -100, -100
    sums, counts = log_probabilities_of(model, Categorical(), (x, y))
    log_prob = model(x).log_softmax(-1).gather(2, y.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(sums, (log_prob * (y >= 0)).sum(1).double().detach())
    assert counts.tolist() == [5, 5, 0, 5, 5, 5, 5, 3, 5, 5, 5]
    densities = torch.where(y >= 0, log_prob, math.nan)
    starts = iter([0])
    by_density = log_probabilities_of(
        model, Categorical(), (x, y), lambda x, _: densities[next(starts) :][: len(x)]
    )
    torch.testing.assert_close(by_density, (sums, counts))
