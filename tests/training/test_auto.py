"""Estimator ``auto`` from a call to its result, without a look at how long anything takes."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from loops import loop_of, settings_of
from torch import nn
from training.interrupted import assert_same_runs, dying_at_call, killed, state_of
from training.small_runs import averaged, net

from evigrad.errors import ConfigurationError, EvigradError
from evigrad.evidence import Evidence
from evigrad.training import CHOICE_FILE, Choice, Trial, fit, measuring
from evigrad.training.candidates import Candidate
from evigrad.training.measuring import NetworkMeter, choose_estimator, families_for

SMALL: dict[str, Any] = {
    "estimator": "auto",
    "epochs": 4,
    "batch_size": 20,
    "burn_in": 2,
    "every": 1,
    "steps": 3,
    "lr": 0.02,
    "progress": False,
}


def given(**changes: Any) -> dict[str, Any]:
    return {**SMALL, **changes}


MADE_UP = Choice(
    name="ntk-20-rows-anchored",
    share=0.5,
    root=None,
    seconds=0.004,
    step_seconds=0.001,
    step_budget=5.0,
    lower=1.0,
    search_seconds=0.1,
    trials=(Trial("ntk-20-rows-anchored", 0.5, None, True, True, 0.004, 2.0, 0.1, 8),),
    reason="It was made up.",
)


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    """Every look at the clock is a millisecond later: all times are known, and no search is cut."""
    looks = count()
    monkeypatch.setattr(measuring, "clock", lambda: 1e-3 * next(looks))


@pytest.fixture
def made_up(monkeypatch) -> list[int]:
    """A choice that is made without any measuring; the list has the hyperparameter step of each."""
    calls: list[int] = []

    def choose(known: Evidence, data: Any, *rest: Any) -> Choice:
        calls.append(len(data))
        return MADE_UP

    monkeypatch.setattr(measuring, "choose_estimator", choose)
    return calls


def of_regression(outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 4, generator=generator)
    return x, x[:, :outputs].sin() + 0.1 * torch.randn(60, outputs, generator=generator)


def of_two_classes() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = of_regression(1)
    return x, (y > 0).float()


def small(outputs: int = 3) -> nn.Module:
    model = net()
    model[-1] = nn.Linear(8, outputs)
    return model


# What is called where the estimator is to be exact, as it is with a clock by which all is fast.
EXACT: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "regression": (lambda: of_regression(3), {"likelihood": "gaussian"}),
    "one output": (lambda: of_regression(1), {"likelihood": "gaussian"}),
    "two classes": (of_two_classes, {"likelihood": "bernoulli"}),
}


@pytest.mark.parametrize("case", EXACT)
def test_where_all_is_fast_the_exact_number_is_taken(case):
    make, settings = EXACT[case]
    data = make()
    result = fit(small(data[1].shape[1]), data, **SMALL, **settings)
    assert result.estimator in ("full-N-C", "ntk-N-C")
    assert result.choice is not None
    assert f"{result.estimator} is exact" in result.choice.reason
    assert result.choice.name == result.evidence.spec.name == result.estimator
    assert result.history[-1]["hyper_steps"] == 9


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"root": "subblock"},
        {"root": "fisher", "anchor_share": 0.6},
        {"prior_blocks": 2},
        {"prior_update": "fixed_point"},
        {"prior": "diagonal"},
        {"rows_dtype": "bfloat16", "micro_batch": 7},
        {"temperature": 0.5, "step_budget": 1.0},
    ],
)
def test_settings_go_with_the_choice(blobs, changes):
    result = fit(net(), blobs[0], **given(**changes))
    choice = result.choice
    assert choice is not None and choice.seconds > 0
    assert next(t for t in choice.trials if t.name == choice.name).is_bound
    if "root" in changes:
        assert {trial.root for trial in choice.trials} <= {changes["root"], None}
        anchored = any("anchored" in trial.name for trial in choice.trials)
        assert not (anchored and changes["root"] == "subblock")
    assert result.evidence.temperature == changes.get("temperature", 1.0)


def test_rounds_of_different_kinds(blobs):
    """What is measured are the steps of the model's own; those of the prior share passes."""
    settings = given(hyperparameters=["invariance"], hyper_every=1, hyper_steps=2, prior_blocks=2)
    result = fit(averaged(), blobs[0], **settings)
    assert result.choice is not None and result.choice.trials[0].seconds is not None
    assert result.history[-1]["hyper_steps"] == 3 * (3 + 2)


def test_the_named_estimator_gives_the_same_run(blobs, monkeypatch):
    def rows(**changes: Any) -> list[Any]:
        settings = given(hyperparameters=["invariance"], micro_batch=30, epochs=3, **changes)
        history = fit(averaged(), blobs[0], **settings).history
        return [{k: v for k, v in row.items() if k != "seconds"} for row in history]

    for name, share, root in (
        ("ntk-20-rows-anchored", 0.5, None),
        ("kfac-N-1", None, "fisher"),
    ):
        found = replace(MADE_UP, name=name, share=share, root=root)
        monkeypatch.setattr(measuring, "choose_estimator", lambda *_, found=found: found)
        named = {"estimator": name, "root": root, "anchor_share": share or 0.9}
        assert rows() == rows(**named)


def test_measuring_leaves_the_run_as_it_was(blobs):
    loop = loop_of(averaged(), blobs[0], **SMALL, hyperparameters=["invariance"])
    loop.train_epoch(1)
    x, y = blobs[0]
    for parameter in loop.evidence.hyperparameters().values():
        parameter.grad = torch.full_like(parameter, 7.0)
    weights = [w.clone() for w in loop.evidence.model.state_dict().values()]
    values = [p.detach().clone() for p in loop.evidence.hyperparameters().values()]
    state = loop.evidence.generator.get_state()
    own = torch.get_rng_state()
    other: Any = np.random.get_state()
    choice = choose_estimator(loop.evidence, (x, y), loop.settings, loop.schedules[-1], 1.0)
    assert choice.trials
    assert torch.equal(own, torch.get_rng_state())
    now: Any = np.random.get_state()
    assert np.array_equal(other[1], now[1])
    assert torch.equal(state, loop.evidence.generator.get_state())
    for parameter, value in zip(loop.evidence.hyperparameters().values(), values, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is not None and bool((parameter.grad == 7.0).all())
    after = loop.evidence.model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(after, weights, strict=True))
    # The model's own hyperparameters cost two passes: nothing is shared, and none is exact.
    assert loop.schedules[-1].names[-1].startswith("model.")


def test_draws_are_of_the_same_number(blobs):
    """All bounds have means above the exact one, and what anchored rows prove is below it."""
    loop = loop_of(net(), blobs[0], **SMALL)
    loop.train_epoch(1)
    meter = NetworkMeter(loop.evidence, blobs[0], loop.settings, loop.schedules[-1])
    exact = meter.draws(Candidate("full-N-C", is_exact=True), 1).values[0]
    assert meter.draws(Candidate("ntk-N-C"), 1).values[0] == pytest.approx(exact, rel=1e-4)
    for candidate in (
        Candidate("ntk-60-rows-anchored", 0.75),
        Candidate("ntk-20-C"),
        Candidate("ntk-20-1", root="fisher"),
        Candidate("blockdiag-N-C"),
    ):
        first, second = meter.draws(candidate, 20), meter.draws(candidate, 20)
        both = torch.tensor(first.values + second.values)
        assert float(both.mean()) > exact - 2 * float(both.std()) / 40**0.5
        if candidate.share is not None:
            assert first.values != second.values  # they go on
            assert first.lower is not None and 0 < first.lower <= exact * (1 + 1e-4)


def test_what_is_tried(blobs):
    def tried(model: nn.Module, data: Any, **changes: Any) -> dict[str, Candidate]:
        loop = loop_of(model, data, **given(**changes))
        families, fallback = families_for(loop.evidence, data[0], loop.settings, loop.schedules[-1])
        assert all(not each.make(each.first).is_bound for each in fallback)
        found = {}
        for each in families:
            assert each.make(each.largest).name.count("N") == 1
            for size in (each.first, each.largest):
                candidate = each.make(size)
                assert candidate.is_bound
                found[candidate.name] = candidate
            for variant in each.variants:
                found[str(variant(each.first).share)] = variant(each.first)
        return found

    found = tried(net(), blobs[0])
    firsts = {"full-20-C", "ntk-25-rows-anchored", "ntk-8-C", "ntk-20-1", "blockdiag-20-C"}
    assert set(found) == firsts | {"ntk-N-C", "full-N-C", "blockdiag-N-C", "0.5", "0.75"}
    assert found["ntk-20-1"].root == "fisher"
    assert found["ntk-N-C"].is_exact and not found["blockdiag-N-C"].is_exact
    assert "0.75" in tried(net(), blobs[0], anchor_share=0.6)
    # Sub-blocks of a softmax are no bound, those of independent outputs are.
    assert "ntk-20-1" not in tried(net(), blobs[0], root="subblock")
    data = of_regression(3)
    independent = tried(net(), data, likelihood="gaussian", root="subblock")
    assert "ntk-20-1" in independent and not any("anchored" in name for name in independent)
    assert not any(
        name.endswith("-1") for name in tried(small(1), of_two_classes(), likelihood="bernoulli")
    )
    # Matrices of all weights are for few of them.
    wide = nn.Sequential(nn.Linear(4, 700), nn.Tanh(), nn.Linear(700, 3))
    assert not any(name.startswith(("full", "blockdiag")) for name in tried(wide, blobs[0]))


def test_memory_that_does_not_suffice(blobs):
    with pytest.raises(ConfigurationError, match="after epoch 2: estimator 'auto': no estimator"):
        fit(net(), blobs[0], **SMALL, memory_budget=10)
    result = fit(net(), blobs[0], **given(memory_budget="30kB", epochs=2, steps=1))
    assert result.choice is not None and "N" not in result.choice.name


@pytest.mark.parametrize("budget", [0.0, -1.0, float("nan"), float("inf")])
def test_budgets_that_are_none(budget):
    with pytest.raises(ConfigurationError, match="step_budget must be a positive number"):
        settings_of(estimator="auto", step_budget=budget)
    settings_of(estimator="ntk-100-1", step_budget=budget)  # not used


def test_anchors_are_checked_before_training(blobs):
    for wrong in ({"anchor_share": 1.5}, {"anchor_choice": "best"}):
        with pytest.raises(ConfigurationError, match="anchors: "):
            loop_of(net(), blobs[0], **SMALL, **wrong)


def test_a_resumed_run_keeps_the_choice(blobs, tmp_path, made_up):
    settings = given(checkpoint_every=1)
    fit(net(), blobs[0], run_dir=tmp_path / "whole", **settings)
    assert made_up == [60]
    record = MADE_UP.as_record()
    assert state_of(tmp_path / "whole")["choice"] == record
    assert json.loads((tmp_path / "whole" / CHOICE_FILE).read_text()) == record
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["estimator"] == "auto"

    def run(folder: str, **changes: Any) -> Any:
        return fit(net(), blobs[0], run_dir=tmp_path / folder, **settings, **changes)

    # Three batches an epoch: before the choice, in its first round, and after it.
    for moment in ((Evidence, "map_loss", 5), (Evidence, "backward", 2), (Evidence, "map_loss", 8)):
        folder = f"{moment[1]}-{moment[2]}"
        made_up.clear()
        with dying_at_call(*moment):
            assert killed(lambda folder=folder: run(folder))
        is_kept = state_of(tmp_path / folder)["choice"] is not None
        assert is_kept == (moment == (Evidence, "map_loss", 8))
        made_up.clear()
        (tmp_path / folder / CHOICE_FILE).write_text("{}")
        result = run(folder, resume=True)
        assert len(made_up) == (0 if is_kept else 1)
        assert result.choice == MADE_UP
        assert_same_runs(tmp_path / folder, tmp_path / "whole")
    made_up.clear()
    result = run("whole", resume=True)
    assert (made_up, result.estimator, result.choice) == ([], MADE_UP.name, MADE_UP)
    with pytest.raises(ConfigurationError, match=r"step_budget=5.0, not 3"):
        run("whole", resume=True, step_budget=3.0)


def test_what_was_chosen_after_the_last_checkpoint_is_void(blobs, tmp_path, made_up):
    folder = tmp_path / "run"
    settings = given(run_dir=folder, checkpoint_every=1)
    with dying_at_call(Evidence, "map_loss", 2):
        assert killed(lambda: fit(net(), blobs[0], **settings))
    (folder / CHOICE_FILE).write_text("{}")
    with dying_at_call(Evidence, "map_loss", 1):
        assert killed(lambda: fit(net(), blobs[0], resume=True, **settings))
    assert not (folder / CHOICE_FILE).exists()


def test_it_is_said_once(blobs, capsys, made_up):
    fit(net(), blobs[0], **given(progress=True))
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if "It was made up." in line]
    assert said == [
        "auto: It was made up. The search took 0.1 s; --estimator ntk-20-rows-anchored"
        " --anchor-share 0.5 is this run without it."
    ]
    assert lines[0].startswith("auto: epoch 1/4")
    assert lines[-1].startswith("ntk-20-rows-anchored: epoch 4/4")


def test_others_know_no_choice(blobs):
    result = fit(net(), blobs[0], **given(estimator="ntk-20-1"))
    assert result.choice is None


def test_evidences_of_other_models_share_nothing(blobs):
    one, other = (loop_of(net(), blobs[0], **SMALL).evidence for _ in range(2))
    with pytest.raises(ConfigurationError, match="same model"):
        one.take_over(other)
    with pytest.raises(EvigradError):
        one.with_estimator("auto")
