"""Experiments as files, and those of the paper."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_experiments import BOUNDS, GRID, TRAINING, bounds

from evigrad.cli.parser import KEYS, NO_ESTIMATOR
from evigrad.errors import ConfigurationError
from evigrad.training import Settings
from evigrad.training.settings import grouped
from experiments.checks import network_of
from experiments.definition import (
    PAPER,
    PRESETS,
    Experiment,
    _content,
    make_experiment,
    merged,
    paper_experiments,
    read_experiment,
)
from experiments.trainings import train_options

NEEDED = {
    *("fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "fig_grouped", "fig_pareto_prior"),
    *("fig_train_invariance", "fig_train_invariance_doubly", "fig_train_prior"),
    *("fig_train_invariance_grouped", "fig_train_prior_grouped", "fig_train_prior_doubly"),
    *("table1", "table2", "model_selection"),
}
CPU = NEEDED - {"fig2", "table2", "model_selection"}
PANEL = {"axis": "p", "hyperparameter": "precision", "grid": GRID}


def test_changes_go_into_nested_parts():
    base = {"a": {"b": 1, "c": 2}, "d": [1, 2], "e": 5}
    assert merged(base, {"a": {"b": 3}, "d": [4], "e": None}) == {"a": {"b": 3, "c": 2}, "d": [4]}
    assert base == {"a": {"b": 1, "c": 2}, "d": [1, 2], "e": 5}


def write(folder: Path, name: str, **content: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_file_extends_another_and_has_presets(tmp_path):
    parts = {key: BOUNDS[key] for key in ("kind", "panels", "curves")}
    write(tmp_path, "base", **parts, seeds=[0, 1], training={"epochs": 5, "lr": 0.1})
    path = write(
        tmp_path,
        "own",
        extends="base",
        title="Mine",
        training={"epochs": 9},
        presets={"small": {"seeds": [3], "training": {"lr": None}}},
    )
    whole, small = read_experiment(str(path)), read_experiment(str(path), "small")
    assert (whole.name, whole.preset, whole.seeds) == ("own", "paper", [0, 1])
    assert whole.training == {"epochs": 9, "lr": 0.1}
    assert (small.seeds, small.training) == ([3], {"epochs": 9})
    assert read_experiment(str(path), None) == small


def test_a_file_does_not_extend_itself(tmp_path):
    for name, base in (("a", "b"), ("b", "a"), ("c", "c")):
        write(tmp_path, name, extends=base)
    for name in "abc":
        with pytest.raises(ConfigurationError, match="extends itself"):
            read_experiment(str(tmp_path / f"{name}.yaml"))


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="Did you mean 'fig4'"):
        read_experiment("fgi4")
    with pytest.raises(
        ConfigurationError, match="presets paper, cpu, small, tiny, not 'smal'. Did you"
    ):
        read_experiment("fig4", "smal")
    path = tmp_path / "b.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_experiment(str(path))
    path.write_text("- 1")
    with pytest.raises(ConfigurationError, match="holds no experiment"):
        read_experiment(str(path))
    with pytest.raises(ConfigurationError, match="Did you mean 'bounds'"):
        make_experiment("c", BOUNDS | {"kind": "bound"})
    with pytest.raises(ConfigurationError, match="key 'panles'.* Did you mean 'panels'"):
        make_experiment("c", without("panels") | {"panles": {}})
    # A misspelt preset is not taken for a file without presets, which may take days.
    path = write(tmp_path, "d", **BOUNDS, presets={"smal": {"seeds": [1]}})
    with pytest.raises(ConfigurationError, match="none named 'small'.* --preset smal, or"):
        read_experiment(str(path), None)
    assert read_experiment(str(path), "smal").seeds == [1]


def test_a_metric_that_no_training_keeps_is_refused():
    content = {
        "kind": "learning",
        "title": "Mine",
        "seeds": [0],
        "groups": {"a": {"kfac-N-1": "b"}},
    }
    with pytest.raises(ConfigurationError, match="draws 'loss', which its trainings do not keep"):
        make_experiment("c", content | {"quantities": {"loss": "loss"}})
    assert make_experiment("c", content | {"quantities": {"test_accuracy": "accuracy"}}).jobs()


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in BOUNDS.items() if key not in names}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (without("title"), "title"),
        (without("panels"), "panels"),
        (BOUNDS | {"panel": {"a": PANEL}}, "panel"),
        (BOUNDS | {"panels": {"a": PANEL | {"titel": "x"}}}, "titel"),
        (BOUNDS | {"panels": {"a": PANEL | {"grid": GRID | {"logg": True}}}}, "logg"),
        (BOUNDS | {"panels": {"a": {"hyperparameter": "p", "grid": GRID}}}, "axis"),
        (BOUNDS | {"panels": {"a": {"axis": "p", "hyperparameter": "p"}}}, "grid"),
        (BOUNDS | {"panels": {"a": PANEL | {"grid": [1, 2]}}}, "grid"),
        (BOUNDS | {"curves": ["ntk-10-C"]}, "curves"),
        (BOUNDS | {"panels": {"a": PANEL | {"grid": GRID | {"count": 2.5}}}}, "2.5"),
        (BOUNDS | {"panels": {"a": PANEL | {"grid": GRID | {"count": 1}}}}, "at least 2 points"),
        (
            BOUNDS | {"panels": {"a": PANEL | {"grid": GRID | {"start": 20}}}},
            "start=20 and stop=10",
        ),
        (BOUNDS | {"panels": {"a": PANEL | {"grid": GRID | {"start": 0}}}}, "start above 0"),
        (BOUNDS | {"panels": {"a": PANEL | {"grid": GRID | {"log": "no way"}}}}, "log"),
        (BOUNDS | {"panels": {"a": PANEL | {"grid": GRID | {"start": "x"}}}}, "start"),
        *((BOUNDS | {"seeds": seeds}, "seeds") for seeds in (0, [], ["a"], [-1], [True], [0.5])),
        ({"kind": "pareto", "title": "x", "seeds": [0], "estimators": []}, "no estimators"),
        ({"kind": "pareto", "title": "x", "seeds": [0], "estimators": "ntk-20-1"}, "estimators"),
        (
            {"kind": "pareto", "title": "x", "seeds": [0], "estimators": {"structures": ["ntk"]}},
            "estimators",
        ),
    ],
)
def test_keys_that_make_no_sense(content, words):
    with pytest.raises(ConfigurationError, match="The experiment mine|A grid|A log") as error:
        make_experiment("mine", content).jobs()
    assert words in str(error.value)


def test_other_seeds_are_those_of_all_blocks():
    assert {job.training["seed"] for job in bounds().with_seeds([7]).jobs()} == {7}
    with_panel_seeds = bounds(
        seeds=[0, 1], panels={"prior": BOUNDS["panels"]["prior"] | {"seeds": [3]}}
    )
    assert {job.training["seed"] for job in with_panel_seeds.jobs()} == {3}
    assert {job.training["seed"] for job in with_panel_seeds.with_seeds([7]).jobs()} == {7}
    table = read_experiment("table1", "small").with_seeds([7])
    assert {job.training["seed"] for job in table.jobs()} == {7}


def test_every_figure_and_table_of_the_paper_is_there():
    names = list(paper_experiments())
    assert set(names) == NEEDED
    assert names[0] == "fig1" and names[-1] == "model_selection"
    kinds = {type(read_experiment(name)) for name in names}
    assert kinds == set(Experiment.kinds.values())


@cache
def has_network(data: str, model: str | None, depth: int | None, width: int | None) -> bool:
    network = network_of({"data": data, "model": model, "depth": depth, "width": width})
    return network is not None and bool(list(network.parameters()))


@cache
def presets(name: str) -> list[str]:
    """Names of presets, without parsing them: this runs while tests are collected."""
    return [PAPER, *_content(paper_experiments()[name]).get("presets", {})]


def test_every_experiment_has_the_presets_that_newcomers_are_told_of():
    for preset in ("paper", "small", "tiny"):
        assert all(preset in presets(name) for name in NEEDED)
    # What a processor does of the paper's settings in hours; the rest is for a GPU.
    assert {name for name in NEEDED if "cpu" in presets(name)} == CPU


@pytest.mark.each(1)
@pytest.mark.parametrize(
    ("name", "preset"), [(n, p) for n in sorted(NEEDED) for p in PRESETS if p in presets(n)]
)
def test_all_jobs_of_the_paper_have_settings_that_fit(name, preset):
    experiment = read_experiment(name, preset)
    jobs = experiment.jobs()
    assert (jobs or name == "fig2") and experiment.caption and experiment.shows
    for job in jobs:
        config = job.training
        if job.kind == "train" and config["seed"] == experiment.seeds[0]:
            options = train_options(config)
            names = {"estimator", "prior", "precision", "prior_mean", *KEYS}
            settings = {k: v for k, v in options.items() if k in names}
            settings["likelihood"] = "categorical"
            if settings["estimator"] == NO_ESTIMATOR:
                settings["estimator"] = None
            learned = ("invariance",) if config["invariance"] else ()
            Settings(**grouped(settings | {"hyperparameters": learned, "checkpoint_every": None}))
            assert has_network(*(config[n] for n in ("data", "model", "depth", "width")))


def test_options_of_a_training_are_those_of_the_file():
    (train, *_) = bounds().jobs()
    assert {name: train.training[name] for name in TRAINING} == TRAINING


@pytest.mark.parametrize(
    "parts",
    [
        {"kind": "pareto", "estimators": ["ntk-20-1", "ntk-N-C"]},
        {
            "kind": "learning",
            "quantities": {"test_accuracy": "accuracy"},
            "groups": {"one": {"ntk-20-1": None}, "two": {"ntk-N-C": "full"}},
        },
    ],
)
def test_an_exception_has_options_of_its_own(parts):
    exception = {"every": 2}
    content = {"title": "Mine", "seeds": [0], "training": TRAINING, **parts}
    experiment = make_experiment(
        "mine", content | {"exceptions": {"ntk-N-C": exception, "diag-N-C": exception}}
    )
    trainings = {
        job.training["estimator"]: job.training for job in experiment.jobs() if job.kind == "train"
    }
    assert (
        trainings["ntk-20-1"]["every"] == TRAINING["every"] and trainings["ntk-N-C"]["every"] == 2
    )
