"""Predicted times of jobs."""

import pytest
from small_experiments import TRAINING, bounds, place_in

from evigrad.core.names import Estimator
from experiments.__main__ import main
from experiments.definition import paper_experiments, read_experiment
from experiments.forecast import Line, _Costs, _Times, forecast
from experiments.jobs import Job, distinct, evaluation, training


def costs(monkeypatch) -> _Costs:
    """Costs of ten classes and 100 examples, where every call takes a second per example."""
    counted = _Costs(_Times("digits", training(TRAINING, seed=0).training), 100)
    monkeypatch.setattr(counted.times, "line", lambda name, of_model: Line(0.0, 1.0))
    return counted


def test_a_training_takes_its_steps_and_its_rounds(monkeypatch):
    counted = costs(monkeypatch)
    settings = training(TRAINING, {"batch_size": 20, "epochs": 6}, seed=0).training
    plain = {**settings, "estimator": "map"}
    assert counted.training(plain) == 6 * 5 * 20
    learned = {**settings, "estimator": "diag-50-1", "burn_in": 2, "every": 2, "steps": 3}
    # Rounds follow epochs 2, 4 and 6, and each has three steps on 50 examples.
    assert counted.training(learned) == 6 * 5 * 20 + 3 * 3 * 50
    whole = {**learned, "estimator": "diag-N-C"}  # its steps share a pass over all examples
    assert counted.training(whole) == pytest.approx(6 * 5 * 20 + 3 * 100, abs=0.1)


@pytest.mark.parametrize(
    ("estimator", "measured"),
    [("kfac-50-1", "kfac-{}-1"), ("kfac-50-4", "kfac-{}-4"), ("kfac-50-10", "kfac-{}-C")],
)
def test_an_estimate_is_measured_with_its_outputs(estimator, measured, monkeypatch):
    counted, names = costs(monkeypatch), []
    monkeypatch.setattr(counted.times, "line", lambda name, _: names.append(name) or Line(0.0, 1.0))
    counted.estimate(Estimator.parse(estimator), False)
    assert names == [measured]


@pytest.mark.parametrize(("invariance", "transforms"), [(None, 1), ("rotation", 4)])
def test_a_slow_network_is_measured_with_few_calls(invariance, transforms, monkeypatch):
    options = {"invariance": invariance, "samples": 8}
    times = _Times("digits", training(TRAINING, options, seed=0).training)
    clock, sizes = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def act_for(seconds):
        def act(size):
            sizes.append(size)
            clock[0] += 0.125 + seconds * size

        return lambda name, of_model: act

    # The first of two calls is for the checks, and the second number of examples is omitted.
    monkeypatch.setattr(times, "_act", act_for(2.0))
    assert times.line("map", False) == Line(0.0, 2.0625 * transforms) and sizes == [2, 2, 2]
    # A fast network is measured with a second number of examples.
    sizes.clear()
    monkeypatch.setattr(times, "_act", act_for(1 / 64))
    line = times.line("ntk-{}-1", False)
    assert sizes == [2] * 4 + [12] * 2 and line.call == pytest.approx(0.125)
    assert line.example == pytest.approx(transforms / 64)


def test_every_kind_of_job_has_a_time(tmp_path):
    experiment = bounds(orderings=[])
    jobs = distinct(experiment.jobs())
    of = next(job for job in jobs if job.kind == "train")
    jobs.append(evaluation(of, "ntk-10-1"))
    seconds = [forecast(job, place_in(tmp_path)) for job in jobs]
    assert all(value is not None and 0 < value < 60 for value in seconds)


def test_data_of_unknown_size_have_no_time(tmp_path):
    job = training(TRAINING, {"data": "digits"}, seed=0)
    unknown = Job("train", {**job.training, "data": "elsewhere"})
    assert forecast(unknown, place_in(tmp_path)) is None


def test_a_dry_run_tells_the_times(tmp_path, capsys):
    arguments = ["fig5", "--preset", "tiny", "--dry-run", "--results", str(tmp_path)]
    assert main([*arguments, "--device", "cpu"]) == 0
    output = capsys.readouterr()
    assert "  about " in output.out
    assert "Predicted time, one job after another" in output.err


@pytest.mark.parametrize("name", paper_experiments())
def test_the_jobs_of_each_paper_preset_can_be_counted(name):
    jobs = read_experiment(name, "paper").jobs()
    assert name == "fig2" or all(job.training["epochs"] > 0 for job in jobs)
