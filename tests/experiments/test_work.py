"""What jobs compute, and that neither interruptions nor moves change it."""

import json
import shutil
from dataclasses import replace

import pytest
from small_experiments import TRAINING, bounds, place_in

from evigrad.cli import main
from evigrad.errors import ConfigurationError
from evigrad.experiments import curves, jobs_of, missing, present, run, runner, state_of
from evigrad.experiments.jobs import Job
from evigrad.experiments.plan import curve, evaluation, timing, training
from evigrad.experiments.work import KINDS, Kind, perform, trained
from evigrad.priors import GaussianPrior

ROTATED = TRAINING | {"data": "digits:rotated180", "invariance": "rotation", "samples": 2}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A place with two trainings that are done."""
    place = place_in(tmp_path_factory.mktemp("done"))
    jobs = [training(TRAINING, seed=0), training(ROTATED, seed=0)]
    for job in jobs:
        perform(job, place)
    return place, *jobs


def test_a_training_is_that_of_evigrad_train(done, tmp_path):
    place, job, _ = done
    result = place.store.result(job)
    config = place.store.folder(job) / "run" / "config.yaml"
    run_dir = tmp_path / "run"
    arguments = ["--config", str(config), "--run-dir", str(run_dir), "--device", "cpu"]
    assert main(["train", *arguments, "--threads", "1", "--no-progress", "--no-figures"]) == 0
    own = json.loads((run_dir / "results.json").read_text())
    (only,) = own.values()
    assert only["test"] == result["test"]
    assert result["epochs"] == 3
    assert result["history"]["loss"]["epoch"] == [1, 2, 3]


def test_an_evaluation_is_that_of_the_trained_network(done):
    place, job, _ = done
    found = perform(evaluation(job, "ntk-N-C"), place)
    _, result = trained(job, place.store.folder(job), place)
    data = trained(job, place.store.folder(job), place)[0].data
    exact = result.evidence.with_estimator("full-N-C").estimate(*data.train).per_datum
    assert found["per_datum"] == pytest.approx(exact, rel=1e-4)
    assert (found["blocks"], found["sem"]) == (1, 0.0)
    few = perform(evaluation(job, "ntk-10-C", blocks=2), place)
    assert few["blocks"] == 2 and few["sem"] > 0


def test_a_curve_is_the_mean_over_a_partition_at_each_point(done):
    place, job, _ = done
    found = perform(curve(job, "ntk-20-C", "precision", [0.5, 2.0], None), place)
    setup, result = trained(job, place.store.folder(job), place)
    for value, mean in zip([0.5, 2.0], found["mean"], strict=True):
        prior = GaussianPrior("scalar", precision=value)
        one = result.evidence.with_estimator("ntk-20-C", prior=prior, generator=0)
        values = [one.estimate(b).per_datum for b in one.blocks(setup.data.train).epoch()]
        assert mean == pytest.approx(sum(values) / len(values), rel=1e-5)
    assert found["blocks"] == 2


def test_a_curve_along_a_range_leaves_the_model_as_it_was(done):
    place, _, job = done
    folder = place.store.folder(job)
    setup, result = trained(job, folder, place)
    before = {n: v.clone() for n, v in result.evidence.model.state_dict().items()}
    config = {"estimator": "ntk-20-C", "hyperparameter": "rotation", "grid": [0.0, 3.0]}
    config |= {"blocks": None, "seed": 0}
    found = curves.curve(result.evidence, setup.data.train, config, folder)
    after = result.evidence.model.state_dict()
    assert all((after[n] == v).all() for n, v in before.items())
    assert found["mean"][0] != found["mean"][1]
    with pytest.raises(ConfigurationError, match=r"precision, or a range .*rotation.*not 'shere'"):
        curves.curve(
            result.evidence, setup.data.train, config | {"hyperparameter": "shere"}, folder
        )


def test_an_interrupted_curve_goes_on_to_the_same_numbers(done, monkeypatch, tmp_path):
    place, _, job = done
    setup, result = trained(job, place.store.folder(job), place)
    config = {"estimator": "ntk-10-1", "hyperparameter": "rotation", "grid": [0.0, 1.0]}
    config |= {"blocks": 5, "seed": 0}
    whole = curves.curve(result.evidence, setup.data.train, config, tmp_path)
    monkeypatch.setattr(curves, "_SAVE_EVERY", 0.0)
    count, real = 0, curves.set_hyperparameter

    def stop(*arguments):
        nonlocal count
        count += 1
        if count > 6:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(curves, "set_hyperparameter", stop)
    with pytest.raises(KeyboardInterrupt):
        curves.curve(result.evidence, setup.data.train, config, tmp_path)
    assert len(json.loads((tmp_path / "partial.json").read_text())) == 3
    monkeypatch.setattr(curves, "set_hyperparameter", real)
    assert curves.curve(result.evidence, setup.data.train, config, tmp_path) == whole
    assert not (tmp_path / "partial.json").exists()


def test_times_are_positive(done):
    place, job, _ = done
    found = perform(timing(job, repeats=2), place)
    # An estimate has its part of the draw that its round begins with.
    assert found["estimate_seconds"] > found["draw_seconds"] / job.config["steps"] > 0
    assert found["step_seconds"] > 0


def test_nothing_is_done_twice_and_the_folder_can_be_moved(tmp_path):
    place, experiment = place_in(tmp_path / "here"), bounds()
    jobs = jobs_of(experiment)
    assert [job.kind for job in jobs] == ["train", "curve", "curve"]
    assert state_of(experiment, place.store).done == 0
    assert run(jobs, place) == []
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = place_in(tmp_path / "there")
    assert missing(jobs, moved) == []
    assert str(tmp_path) not in "".join(
        path.read_text() for path in (tmp_path / "there").rglob("*.json")
    )
    shown = present(experiment, moved.store)
    assert shown.remarks == ["prior: ntk-N-C ≥ ntk-10-C: holds at every point of the grid."]
    assert {p.name for p in shown.folder.iterdir()} == {
        *("figure.png", "figure.pdf", "table.md", "table.csv", "table.tex", "summary.json")
    }
    # A changed experiment takes up what is the same in it, and no more.
    changed = bounds(curves={"ntk-N-C": "exact", "ntk-20-C": "m = 20"})
    assert [job.config["estimator"] for job in missing(jobs_of(changed), moved)] == ["ntk-20-C"]


def test_an_interrupted_training_goes_on(tmp_path, monkeypatch):
    place, job = place_in(tmp_path), training(TRAINING, seed=0)
    whole = perform(job, place_in(tmp_path / "whole"))
    from evigrad.training.loop import Loop

    real = Loop.train_epoch

    def stop(self, epoch):
        if epoch == 3:
            raise KeyboardInterrupt
        return real(self, epoch)

    monkeypatch.setattr(Loop, "train_epoch", stop)
    with pytest.raises(KeyboardInterrupt):
        perform(job, place)
    assert place.store.result(job) is None and place.store.is_begun(job)
    monkeypatch.setattr(Loop, "train_epoch", real)
    again = perform(job, place)
    assert again["test"] == whole["test"]
    assert again["hyperparameters"] == whole["hyperparameters"]


def test_a_failure_takes_with_it_what_needs_it_and_nothing_else(tmp_path):
    place = place_in(tmp_path)
    bad, good = training(TRAINING, {"data": "nothing"}, seed=0), training(TRAINING, seed=0)
    jobs = [evaluation(bad), evaluation(good)]
    told = []
    failures = run(jobs, place, tell=lambda words, over, count: told.append((words, over, count)))
    assert [f.job.kind for f in failures] == ["train", "evaluate"]
    assert "what it needs failed" in failures[1].reason
    assert place.store.result(jobs[1]) is not None
    assert [(over, count) for _, over, count in told] == [(n, 4) for n in range(1, 5)]
    assert "failed" in told[0][0]


def test_an_error_of_pytorch_leaves_the_other_jobs_alone(tmp_path, monkeypatch):
    place, told = place_in(tmp_path), []
    jobs = [training(TRAINING, seed=seed) for seed in (0, 1)]
    real = runner.perform

    def out_of_memory(job, place):
        if job.id == jobs[0].id:
            raise RuntimeError("out of memory")
        return real(job, place)

    monkeypatch.setattr(runner, "perform", out_of_memory)
    (failure,) = run(jobs, place, tell=lambda words, over, count: told.append(words))
    assert failure.reason == "RuntimeError: out of memory"
    assert place.store.result(jobs[1]) is not None


def test_side_by_side_is_the_same_as_one_after_the_other(tmp_path):
    jobs = [evaluation(training(TRAINING, seed=seed)) for seed in (0, 1)]
    jobs.append(timing(training(TRAINING, seed=1), repeats=1))
    alone, together = place_in(tmp_path / "a"), replace(place_in(tmp_path / "b"), jobs=2)
    assert run(jobs[:2], alone) == run(jobs, together) == []
    for job in jobs[:2]:
        first, second = (place.store.result(job) for place in (alone, together))
        assert first is not None and second is not None
        assert first["per_datum"] == second["per_datum"]


def test_what_measures_time_comes_last(tmp_path, monkeypatch):
    order = []
    kinds = {
        name: Kind(lambda job, *_: order.append(job.kind) or {}, kind.alone)
        for name, kind in KINDS.items()
    }
    for module in ("work", "runner"):
        monkeypatch.setattr(f"evigrad.experiments.{module}.KINDS", kinds)
    first, second = (training(TRAINING, seed=seed) for seed in (0, 1))
    runner.run([timing(first), evaluation(first), timing(second)], place_in(tmp_path))
    assert order == ["train", "evaluate", "train", "time", "time"]


def test_a_broken_result_is_named(tmp_path):
    place, job = place_in(tmp_path), training(TRAINING, seed=0)
    place.store.begin(job)
    (place.store.folder(job) / "result.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"result\.json cannot be read .* Remove it"):
        place.store.result(job)
    with pytest.raises(ConfigurationError, match="no jobs of the kind 'bake'"):
        perform(Job("bake", {}), replace(place))
