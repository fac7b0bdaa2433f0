"""Experiments as files, and those of the paper."""

from functools import cache
from pathlib import Path

import pytest
import yaml
from small_experiments import TRAINING

from evigrad.cli.invariance import read_invariance
from evigrad.errors import ConfigurationError
from evigrad.estimators import EstimatorSpec
from evigrad.experiments import jobs_of, make_experiment, merged, paper_experiments, read_experiment
from evigrad.experiments.checks import network_of, shape_of
from evigrad.experiments.configuration import make_settings
from evigrad.experiments.page import PRESETS

NEEDED = {
    *("fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "fig_grouped", "fig_pareto_prior"),
    *("fig_train_invariance", "fig_train_invariance_doubly", "fig_train_prior"),
    *("fig_train_invariance_grouped", "fig_train_prior_grouped", "fig_train_prior_doubly"),
    *("table1", "table2", "model_selection"),
}


def test_changes_go_into_nested_parts():
    base = {"a": {"b": 1, "c": 2}, "d": [1, 2], "e": 5}
    assert merged(base, {"a": {"b": 3}, "d": [4], "e": None}) == {"a": {"b": 3, "c": 2}, "d": [4]}
    assert base == {"a": {"b": 1, "c": 2}, "d": [1, 2], "e": 5}


def write(folder: Path, name: str, **content: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_file_extends_another_and_has_presets(tmp_path):
    write(tmp_path, "base", kind="bounds", seeds=[0, 1], training={"epochs": 5, "lr": 0.1})
    path = write(
        tmp_path,
        "own",
        extends="base",
        title="Mine",
        training={"epochs": 9},
        presets={"small": {"seeds": [3], "training": {"lr": None}}},
    )
    whole, small = read_experiment(str(path)), read_experiment(str(path), "small")
    assert (whole.name, whole.preset, whole.seeds) == ("own", "paper", (0, 1))
    assert whole.take("training") == {"epochs": 9, "lr": 0.1}
    assert (small.seeds, small.take("training")) == ((3,), {"epochs": 9})


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match="Did you mean 'fig4'"):
        read_experiment("fgi4")
    with pytest.raises(ConfigurationError, match="presets paper, small, tiny, not 'smal'. Did you"):
        read_experiment("fig4", "smal")
    with pytest.raises(ConfigurationError, match="lacks the key 'title'"):
        read_experiment(str(write(tmp_path, "a", kind="bounds")))
    path = tmp_path / "b.yaml"
    path.write_text("a: [")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_experiment(str(path))
    path.write_text("- 1")
    with pytest.raises(ConfigurationError, match="holds no experiment"):
        read_experiment(str(path))
    content = {"kind": "bound", "title": "", "seeds": [0], "training": TRAINING}
    with pytest.raises(ConfigurationError, match="Did you mean 'bounds'"):
        jobs_of(make_experiment("c", content))
    with pytest.raises(ConfigurationError, match="lacks the key 'panels'"):
        jobs_of(make_experiment("d", content | {"kind": "bounds"}))


def test_every_figure_and_table_of_the_paper_is_there():
    names = list(paper_experiments())
    assert set(names) == NEEDED
    assert names[0] == "fig1" and names[-1] == "model_selection"


@cache
def has_network(data: str, model: str | None, depth: int | None, width: int | None) -> bool:
    options = {"data": data, "model": model, "depth": depth, "width": width}
    shape = shape_of(options)
    return shape is not None and bool(list(network_of(options, shape).parameters()))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", sorted(NEEDED))
def test_all_jobs_of_the_paper_have_settings_that_fit(name, preset):
    experiment = read_experiment(name, preset)
    jobs = jobs_of(experiment)
    assert (jobs or name == "fig2") and experiment.caption and experiment.shows
    for job in jobs:
        if job.kind == "train":
            names = (
                "invariance",
                "initial_range",
                "learn_invariance",
                "flip",
                "samples",
                "average",
            )
            found = read_invariance(*(job.config[name] for name in names))
            learned = () if found is None else found.hyperparameters
            make_settings(job.config, "categorical", learned)
            assert has_network(*(job.config[n] for n in ("data", "model", "depth", "width")))
        else:
            EstimatorSpec.parse(job.config.get("estimator", "ntk-N-C"))
