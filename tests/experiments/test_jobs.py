"""A job's identity: all that its result depends on, and nothing else."""

import gzip
import json
from pathlib import Path

import pytest
import yaml
from small_experiments import TRAINING, place_in

from evigrad.cli.parser import by_key, by_name
from evigrad.cli.train import make_parser
from evigrad.data import load
from evigrad.errors import ConfigurationError
from experiments.checks import SHAPES, problems
from experiments.definition import read_experiment
from experiments.jobs import Job, Store, curve, distinct, evaluation, training
from experiments.trainings import digest, resolved, train_options

ROOT = Path(__file__).parents[2]


def test_the_same_settings_are_the_same_job_however_they_are_written():
    first = training(TRAINING, {"lr": 0.001}, seed=0)
    again = training({"epochs": 99}, dict(reversed(TRAINING.items())), {"lr": "1e-3"}, seed=0)
    assert first.id == again.id


def test_exported_results_are_those_of_todays_options():
    lines = gzip.decompress((ROOT / "experiments/paper/results.jsonl.gz").read_bytes()).splitlines()
    kept = {digest(json.loads(line)["job"]) for line in lines}
    jobs = {job.id for job in read_experiment("fig7", "cpu").jobs()}
    assert jobs <= kept


@pytest.mark.parametrize(
    "change",
    [{"epochs": 4}, {"lr": 2e-3}, {"data": "mnist5k"}, {"seed": 1}, {"pixels": "raw"}],
)
def test_another_setting_is_another_job(change):
    seed = change.pop("seed", 0)
    other = training(TRAINING, change, seed=seed)
    assert other.id != training(TRAINING, seed=0).id
    assert evaluation(other).id != evaluation(training(TRAINING, seed=0)).id


def test_a_scale_of_pixels_that_is_the_default_keeps_older_results():
    first = training(TRAINING, seed=0)
    assert training(TRAINING, {"pixels": "normalized"}, seed=0).id == first.id
    assert "pixels" not in first.training


def test_no_place_is_part_of_a_job():
    # What is left out must be of no influence on a result.
    plain = training(TRAINING, seed=0)
    left_out = set(by_name(make_parser().get_defaults())) - set(plain.training)
    assert left_out == {
        *("data_dir", "device", "threads", "progress", "checkpoint_every", "config", "resume"),
        *("compare_map", "evaluate_with", "run_dir", "figures"),
        # At their defaults, which jobs from before there was a choice had.
        *("prior_mean", "noise_on_loss", "start_decay", "max_epochs", "log_det_weight"),
        *("categorical", "drop", "features", "pixels", "validation_fraction"),
        *("anchor_share", "anchor_choice", "anchor_refresh", "anchor_grouped"),
    }
    other = training(TRAINING, {"prior_mean": "initial"}, seed=0)
    assert other.training["prior_mean"] == "initial" and other.id != plain.id
    placed = training(TRAINING, {"data_dir": "/somewhere", "threads": 3}, seed=0)
    assert placed.id == plain.id
    assert "/somewhere" not in json.dumps(placed.training)


def test_each_job_is_done_once_and_after_what_it_needs():
    of = training(TRAINING, seed=0)
    again = training(TRAINING, seed=0)
    jobs = [evaluation(of), curve(again, "ntk-N-C", "precision", [1.0], None), evaluation(again)]
    assert [job.kind for job in distinct(jobs)] == ["train", "evaluate", "curve"]
    assert evaluation(of).options["estimator"] == "ntk-20-1"


def test_a_configuration_is_one_of_evigrad_train():
    config = train_options(training(TRAINING, seed=3).training)
    text = make_parser().dump(make_parser().parse_object(by_key(config)))
    options = by_name(make_parser().parse_object(yaml.safe_load(text)))
    assert {name: options[name] for name in config} == config


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"datta": "digits"}, "Did you mean .data."),
        ({"epochs": "many"}, "must be a whole number"),
        ({"epochs": 1.5}, "must be a whole number"),
        ({"flip": "maybe"}, "must be true or false"),
        ({"prior": "layer"}, "must be scalar, layerwise or diagonal"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        training(options, seed=0)


def test_a_broken_result_is_named(tmp_path):
    store, job = Store(tmp_path), training(TRAINING, seed=0)
    store.finish(job, {"a": 1})
    assert store.result(job) == {"a": 1}
    (store.folder(job) / "job.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"cannot be read .* Remove it"):
        store.result(job)


def test_what_is_done_has_no_failure(tmp_path):
    store, job = Store(tmp_path / "new"), Job("train", {"n": 1})
    assert store.result(job) is None and store.failure(job) is None
    assert not (tmp_path / "new").exists()
    store.fail(job, "out of memory")
    assert store.result(job) is None and store.failure(job) == "out of memory"
    store.finish(job, {"v": 1.5})
    assert store.result(job) == {"v": 1.5} and store.failure(job) is None


def test_results_go_from_one_folder_to_another(tmp_path):
    first, second, file = Store(tmp_path / "a"), Store(tmp_path / "b"), tmp_path / "r.jsonl.gz"
    with pytest.raises(ConfigurationError, match="There is no result"):
        first.export(file)
    trained = training(TRAINING, seed=0)
    training_result = {"a": 1.5, "history": {"x": [1, 2]}}
    first.finish(trained, training_result)
    first.finish(evaluation(trained), {"b": [None]})
    first.fail(evaluation(trained, "ntk-N-C"), "out of memory")
    assert first.export(file) == 2
    content = file.read_bytes()
    assert first.export(file) == 2 and file.read_bytes() == content
    second.finish(trained, {"a": 9.0})
    assert second.take(file) == 1
    assert second.result(evaluation(trained)) == {"b": [None]}
    assert second.result(trained) == {"a": 9.0}  # its own stays
    assert (third := Store(tmp_path / "c")).take(file) == 2 and third.take(file) == 0
    assert third.result(trained) == training_result
    assert third.export(tmp_path / "again") == 2
    assert (tmp_path / "again").read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b"no json"),
        gzip.compress(b"{}"),
        gzip.compress(b"[1]"),
        gzip.compress(bytes(range(200)))[:-9] + bytes(9),
        gzip.compress(b"{}")[:-2],
        gzip.compress(b'{"job": {"kind": "train", "training": {}}, "result": 3}'),
    ],
    ids=["no gzip", "no JSON", "no job", "a list", "damaged", "cut off", "no result"],
)
def test_a_file_that_holds_no_results_is_named(content, tmp_path):
    (file := tmp_path / "r.jsonl.gz").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"r\.jsonl\.gz holds no readable results"):
        Store(tmp_path / "new").take(file)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": "digts"}, "Did you mean 'digits'"),
        ({"model": "mpl"}, "Did you mean 'mlp'"),
        ({"model": "mininet"}, "28"),  # larger than the images
        ({"estimator": "ntk-90-1"}, "there are only 40"),
    ],
)
def test_problems_of_a_training_are_those_of_all_that_needs_it(options, words, tmp_path):
    job = training(TRAINING | options, seed=0)
    jobs = [job, evaluation(job, "ntk-10-1")]
    ((reason, affected),) = problems(jobs, place_in(tmp_path)).items()
    assert words in reason and affected == jobs


@pytest.mark.parametrize(
    ("estimator", "name", "grid", "words"),
    [
        ("ntk-10-C", "precison", [1.0, 2.0], "no hyperparameter 'precison'"),
        ("ntk-10-C", "rotation", [1.0, 2.0], "it has none"),
        ("ntk-10-C", "precision", [-1.0, 2.0], "positive"),
        ("ntk-90-C", "precision", [1.0, 2.0], "there are only 40"),
    ],
)
def test_problems_of_a_curve(estimator, name, grid, words, tmp_path):
    job = training(TRAINING, seed=0)
    wrong = curve(job, estimator, name, grid, None)
    ((reason, affected),) = problems([job, wrong], place_in(tmp_path)).items()
    assert words in reason and affected == [wrong]


@pytest.mark.parametrize("name", ["fig4", "fig_pareto_prior", "model_selection"])
def test_nothing_is_wrong_with_the_small_experiments(name, tmp_path):
    assert problems(read_experiment(name, "tiny").jobs(), place_in(tmp_path)) == {}


@pytest.mark.parametrize("name", ["digits", "mnist5k"])
def test_shapes_are_those_of_the_data(name):
    data = load(name)
    assert (tuple(data.input_shape), data.num_outputs, len(data.train[0])) == SHAPES[name]


def test_an_option_that_is_younger_than_results_names_no_other_folder_at_its_default() -> None:
    assert resolved({"prior-mean": "zero", "seed": 3}) == resolved({"seed": 3})
    assert "prior_mean" not in resolved({})
    assert resolved({"prior_mean": "initial"})["prior_mean"] == "initial"
