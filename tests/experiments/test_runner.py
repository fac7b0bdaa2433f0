"""What jobs compute, and that neither interruptions nor moves change it."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from small_experiments import TRAINING, bounds, place_in

from evigrad.cli import main
from evigrad.files import sole_writer
from experiments import runner
from experiments.jobs import Store, evaluation, timing, training
from experiments.present import present, state_of
from experiments.runner import RUN, attempt, missing, perform, run
from experiments.trainings import trained


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A place with a training that is done."""
    place = place_in(tmp_path_factory.mktemp("done"))
    job = training(TRAINING, seed=0)
    perform(job, place)
    return place, job


def result_of(place, job) -> dict[str, Any]:
    stored = Store(place.results).result(job)
    assert stored is not None
    return stored


def test_a_training_is_that_of_evigrad_train(done, tmp_path):
    place, job = done
    result = result_of(place, job)
    config = Store(place.results).folder(job) / RUN / "config.yaml"
    arguments = ["--config", str(config), "--run-dir", str(tmp_path / "run"), "--device", "cpu"]
    assert main(["train", *arguments, "--threads", "1", "--no-progress", "--no-figures"]) == 0
    by_command = json.loads((tmp_path / "run" / "results.json").read_text())
    (only,) = by_command.values()
    assert only["test"] == result["test"]
    assert result["epochs"] == 3 and result["num_data"] == 40
    assert result["history"]["test_log_likelihood"]["epoch"] == [1, 2, 3]


def test_an_evaluation_is_that_of_the_trained_network(done):
    place, job = done
    numbers = perform(evaluation(job, "ntk-N-C"), place)
    setup, result = trained(job.training, Store(place.results).folder(job) / RUN, place)
    exact = result.evidence.with_estimator("full-N-C").estimate(*setup.data.train).per_datum
    assert numbers["per_datum"] == pytest.approx(exact, rel=1e-4)
    assert (numbers["blocks"], numbers["sem"]) == (1, 0.0)
    few = perform(evaluation(job, "ntk-10-C", blocks=2), place)
    assert few["blocks"] == 2 and few["sem"] > 0


def test_times_are_positive(done):
    place, job = done
    seconds = perform(timing(job), place)
    # An estimate has its part of the draw that its round begins with.
    assert seconds["estimate_seconds"] > seconds["draw_seconds"] / job.training["steps"] > 0
    assert seconds["step_seconds"] > 0


def test_nothing_is_done_twice_and_the_folder_can_be_moved(done, tmp_path):
    shutil.copytree(done[0].results, tmp_path / "here")
    place, experiment = place_in(tmp_path / "here"), bounds()
    assert [job.kind for job in experiment.jobs()] == ["train", "curve", "curve"]
    assert state_of(experiment, Store(place.results))[:2] == (1, 3)  # that of another experiment
    assert run(experiment.jobs(), place) == []
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = Store(tmp_path / "there")
    assert missing(experiment.jobs(), moved) == []
    assert str(tmp_path) not in "".join(path.read_text() for path in moved.path.rglob("*.json"))
    shown = present(experiment, moved)
    assert shown.summary["remarks"] == [
        "All orderings of the theory hold at every point, for every seed."
    ]
    assert {p.name for p in shown.folder.iterdir()} == {
        *("figure.png", "figure.pdf", "table.md", "table.csv", "table.tex", "summary.json")
    }
    # A changed experiment takes up what is the same in it, and no more.
    changed = bounds(curves={"ntk-N-C": "exact", "ntk-20-C": "m = 20"})
    assert [job.options["estimator"] for job in missing(changed.jobs(), moved)] == ["ntk-20-C"]


def test_an_interrupted_training_goes_on(done, tmp_path, monkeypatch):
    from evigrad.training import Trainer

    place, job = place_in(tmp_path), done[1]
    real = Trainer.train_weights

    def stop(self, epoch):
        if epoch == 3:
            raise KeyboardInterrupt
        return real(self, epoch)

    monkeypatch.setattr(Trainer, "train_weights", stop)
    with pytest.raises(KeyboardInterrupt):
        run([job], place)
    store = Store(place.results)
    assert store.result(job) is None and store.folder(job).exists()
    monkeypatch.setattr(Trainer, "train_weights", real)
    assert run([job], place) == []
    whole = result_of(done[0], job)
    assert result_of(place, job)["test"] == whole["test"]
    assert result_of(place, job)["history"] == whole["history"]


def test_a_failure_takes_with_it_what_needs_it_and_nothing_else(tmp_path):
    place, told = place_in(tmp_path), []
    bad, good = training(TRAINING, {"data": "nothing"}, seed=0), training(TRAINING, seed=0)
    jobs = [evaluation(bad), evaluation(good)]
    failures = run(jobs, place, tell=lambda words, over, count: told.append((words, over, count)))
    assert [f.job.kind for f in failures] == ["train", "evaluate"]
    assert "a required job failed" in failures[1].reason
    assert result_of(place, jobs[1])
    assert [(over, count) for _, over, count in told] == [(n, 4) for n in range(1, 5)]
    assert "failed" in told[0][0]


@pytest.fixture
def performed(monkeypatch):
    """The kinds of jobs in the order in which they are done, without any work."""
    order = []

    def record(job, place):
        if job.training["seed"] == 9:
            raise RuntimeError("out of memory")
        order.append(job.kind)
        Store(place.results).finish(job, {"job_seconds": 1.0})
        return {"job_seconds": 1.0}

    monkeypatch.setattr(runner, "perform", record)
    return order


def test_an_error_of_pytorch_leaves_the_other_jobs_alone(tmp_path, performed):
    jobs = [training(TRAINING, seed=seed) for seed in (9, 1)]
    (failure,) = run(jobs, place_in(tmp_path))
    assert failure.reason == "RuntimeError: out of memory"
    assert Store(tmp_path).failure(jobs[0]) == failure.reason
    assert Store(tmp_path).result(jobs[1]) is not None


def test_what_measures_time_comes_last(tmp_path, performed):
    first, second = (training(TRAINING, seed=seed) for seed in (0, 1))
    run([timing(first), evaluation(first), timing(second)], place_in(tmp_path))
    assert performed == ["train", "train", "evaluate", "time", "time"]


def test_jobs_of_one_training_take_turns_with_it(done):
    place, job = done
    with ThreadPoolExecutor(1) as pool:
        with sole_writer(Store(place.results).folder(job) / RUN):
            waiting = pool.submit(perform, evaluation(job, "ntk-5-C"), place)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=1.0)
        assert waiting.result(timeout=60)["blocks"] == 8


def test_an_imported_training_runs_again_where_its_network_is_needed(done, tmp_path):
    place, job = done
    Store(place.results).export(tmp_path / "results.jsonl.gz")
    here = place_in(tmp_path / "here")
    store = Store(here.results)
    store.take(tmp_path / "results.jsonl.gz")
    assert missing([job], store) == []
    needed = evaluation(job, "ntk-4-C")
    assert [needed_job.kind for needed_job in missing([needed], store)] == ["train", "evaluate"]
    assert run([needed], here) == []
    assert result_of(here, needed)["blocks"] == 10
    assert [needed_job.kind for needed_job in missing([evaluation(job, "ntk-2-C")], store)] == [
        "evaluate"
    ]


def test_what_cannot_be_written_is_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    reason, _ = attempt(training(TRAINING, seed=0), place_in(tmp_path / "file"))
    assert reason is not None and "cannot be written" in reason
