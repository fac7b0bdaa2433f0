"""A job's identity: all that its result depends on, and nothing else."""

import json

import pytest
import yaml
from small_experiments import TRAINING

from evigrad.cli.setup import SETUP_TYPES
from evigrad.cli.train import FIT_TYPES, make_parser
from evigrad.errors import ConfigurationError
from evigrad.experiments.configuration import as_file, resolved
from evigrad.experiments.jobs import Job, distinct
from evigrad.experiments.plan import curve, evaluation, grid_of, training


def test_the_same_settings_are_the_same_job_however_they_are_written():
    first = training(TRAINING, {"lr": 0.001}, seed=0)
    again = training({"epochs": 99}, dict(reversed(TRAINING.items())), {"lr": "1e-3"}, seed=0)
    assert first.id == again.id


@pytest.mark.parametrize("change", [{"epochs": 4}, {"lr": 2e-3}, {"data": "mnist5k"}, {"seed": 1}])
def test_another_setting_is_another_job(change):
    seed = change.pop("seed", 0)
    assert training(TRAINING, change, seed=seed).id != training(TRAINING, seed=0).id


def test_no_place_is_part_of_a_job():
    # What is left out must be of no influence on a result.
    left_out = {*SETUP_TYPES, *FIT_TYPES} - set(resolved({}))
    assert left_out == {"data_dir", "device", "threads", "progress", "checkpoint_every"}
    plain = training(TRAINING, seed=0)
    placed = training(TRAINING, {"data_dir": "/somewhere", "threads": 3}, seed=0)
    assert placed.id == plain.id
    assert "/somewhere" not in json.dumps(placed.config)


def test_a_job_is_another_one_where_what_it_needs_is():
    first, second = (training(TRAINING, seed=seed) for seed in (0, 1))
    config = {"estimator": "ntk-N-C", "blocks": None, "seed": 0}
    assert Job("evaluate", config, first).id != Job("evaluate", config, second).id
    assert Job("evaluate", config, first, "words").id == Job("evaluate", config, first).id
    assert evaluation(first).config["estimator"] == "ntk-20-1"


def test_each_job_is_done_once_and_after_what_it_needs():
    of = training(TRAINING, seed=0)
    again = training(TRAINING, seed=0)
    jobs = [evaluation(of), curve(again, "ntk-N-C", "precision", [1.0], None), evaluation(again)]
    assert [job.kind for job in distinct(jobs)] == ["train", "evaluate", "curve"]


def test_a_configuration_is_one_of_evigrad_train():
    config = resolved(TRAINING)
    options = make_parser().parse_object(yaml.safe_load(as_file(config)))
    assert {name: options[name] for name in config} == config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"datta": "digits"}, "Did you mean .data."),
        ({"epochs": "many"}, "give a whole number"),
        ({"epochs": 1.5}, "give a whole number"),
        ({"flip": 1}, "give yes or no"),
        ({"prior": "layer"}, "give scalar or layerwise or diagonal"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        training(options, seed=0)


def test_grids():
    assert grid_of({"start": 0.01, "stop": 100, "count": 5, "log": True}) == [0.01, 0.1, 1, 10, 100]
    assert grid_of({"start": 0, "stop": 1, "count": 3}) == [0, 0.5, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 0, "stop": 1},
        {"start": 1, "stop": 0, "count": 3},
        {"start": 0, "stop": 1, "count": 1},
        {"start": 0, "stop": 1, "count": 3, "log": True},
        {"start": "a", "stop": 1, "count": 3},
    ],
)
def test_grids_that_are_none(wrong):
    with pytest.raises(ConfigurationError, match="grid"):
        grid_of(wrong)
