"""The files of the paper's experiments hold the paper's settings."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from experiments.definition import PAPER, PRESETS, read_experiment
from experiments.kinds import Bounds, Comparison, Subsets

# Of Sections 5 and B: networks, data, schedules of weights and hyperparameters.
_MNIST = {"model": "mininet", "subset": 1000, "batch_size": 250, "lr": 1e-3, "burn_in": 10}
_MNIST |= {"optimizer": "adam", "prior_lr": 0.1, "prior_lr_min": 0.01}
_PRIOR = {"data": "mnist", "every": 5, "steps": 10, "invariance": None}
_ROTATION = {"data": "mnist:rotated180", "invariance": "rotation", "samples": 30, "every": 1}
_ROTATION |= {"steps": 2, "hyper_every": 1, "hyper_steps": 2, "hyper_lr": 0.05}
_ROTATION |= {"hyper_lr_min": 0.005}
_BOUNDS = {**_MNIST, "epochs": 100, "lr_min": 1e-4, "estimator": "ntk-N-C"}
_RUNS = {**_MNIST, "epochs": 500, "lr_min": 1e-9}
_WIDE = {"model": "wrn16-4", "batch_size": 128, "optimizer": "sgd", "lr": 0.1}
_WIDE |= {"burn_in": 10, "precision": 25.0, "prior_lr": 0.1}
_RESIDUAL = {"model": "resnet18", "epochs": 200, "batch_size": 128, "optimizer": "adam", "lr": 0.1}
_RESIDUAL |= {"burn_in": 10}
_DEEP = {"model": "resnet50", "epochs": 100, "batch_size": 128, "optimizer": "sgd", "lr": 0.1}
_DEEP |= {"lr_min": 1e-6, "precision": 25.0, "burn_in": 10, "prior_lr": 0.1, "prior_lr_min": 0.1}
SHARED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("fig3", "fig4", "fig5", "fig6", "fig_grouped"), _BOUNDS),
    **dict.fromkeys(
        ("fig1", "fig_train_invariance", "fig_train_invariance_doubly"), _RUNS | _ROTATION
    ),
    **dict.fromkeys(
        ("fig_pareto_prior", "fig_train_prior", "fig_train_prior_doubly"), _RUNS | _PRIOR
    ),
    "fig_train_prior_grouped": _RUNS | _PRIOR,
    "fig_train_invariance_grouped": _RUNS | _ROTATION,
    "table1": _WIDE,
    "fig7": _RESIDUAL,
    "table2": _DEEP,
}


def trainings(name: str, preset: str = PAPER) -> list[Mapping[str, Any]]:
    return [job.training for job in read_experiment(name, preset).jobs() if job.kind == "train"]


@pytest.mark.each(1)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("pareto", "kind"), [("fig1", "invariance"), ("fig_pareto_prior", "prior")]
)
def test_figures_share_the_trainings_of_an_estimator(preset, pareto, kind):
    names = [pareto, *(f"fig_train_{kind}{part}" for part in ("", "_doubly", "_grouped"))]
    configs = [config for name in names for config in trainings(name, preset)]
    alone = {(config["estimator"], config["seed"]): config for config in configs}
    assert len(alone) < len(configs)
    assert all(config == alone[config["estimator"], config["seed"]] for config in configs)


@pytest.mark.parametrize("name", sorted(SHARED))
def test_what_all_trainings_of_a_file_have_in_common(name):
    for config in trainings(name):
        assert {key: config[key] for key in SHARED[name]} == SHARED[name]


@pytest.mark.parametrize("name", ["fig3", "fig4", "fig5", "fig6", "fig_grouped"])
def test_panels_of_the_bounds(name):
    experiment = read_experiment(name)
    assert isinstance(experiment, Bounds)
    prior, rotation = experiment.panels.values()
    along = prior.grid.values()
    assert len(along) == 100 and (along[0], along[-1]) == (1e-4, 1e4)
    assert along[1] / along[0] == pytest.approx(along[-1] / along[-2], rel=1e-4)
    along = rotation.grid.values()
    assert len(along) == 100 and along[0] == 0 and along[-1] == pytest.approx(math.pi, abs=1e-5)
    for config in trainings(name):
        paper = _PRIOR if config["data"] == "mnist" else _ROTATION
        assert {key: config[key] for key in paper} == paper
    assert experiment.seeds == [0, 1, 2]
    if name != "fig3":
        sizes = {10, 20, 50, 100, 250, 500}
        names = set(experiment.curves)
        assert all(any(f"-{size}-" in curve for curve in names) for size in sizes)


def test_blocks_of_the_tables():
    for config in trainings("table1"):
        alone = config["invariance"] is None
        paper: dict[str, Any] = {"epochs": 300, "lr_min": 1e-8, "every": 5, "steps": 50}
        if not alone:
            paper = {"epochs": 200, "lr_min": 1e-6, "every": 1, "steps": 4, "samples": 20}
            paper |= {"flip": True, "hyper_every": 1, "hyper_steps": 20}
            paper["hyper_lr"] = 0.05 if "-N-" in config["estimator"] else 0.01
        assert {key: config[key] for key in paper} == paper
    for config in trainings("table2"):
        paper = {"every": 5, "steps": 50}
        if config["invariance"] is not None:
            paper = {"every": 1, "steps": 4, "samples": 10, "hyper_steps": 50, "hyper_lr": 0.01}
        assert {key: config[key] for key in paper} == paper
    experiment = read_experiment("table1")
    assert isinstance(experiment, Comparison)
    assert len(experiment.seeds) == 5 and experiment.blocks["invariance"].seeds == [0, 1, 2]


def test_rows_of_figure_7():
    experiment = read_experiment("fig7")
    assert isinstance(experiment, Subsets)
    assert experiment.sizes == [1000, 5000, 10_000, 20_000, 50_000]
    for config in trainings("fig7"):
        if config["estimator"] == "map":
            continue
        full = config["estimator"] == "kfac-N-C"
        assert config["hyper_steps"] == (10 if full else 100) and config["samples"] == 20
        assert config["hyper_lr"] == (0.05 if full else 0.01) and config["prior_lr"] == 0.1


def test_the_full_kfac_takes_fewer_steps_of_the_ranges_than_subsets():  # as in the paper
    configs = [c for c in trainings("fig7", "cpu") if c["estimator"] == "kfac-N-C"]
    assert len(configs) == 5
    assert {(c["steps"], c["hyper_steps"]) for c in configs} == {(4, 1)}
