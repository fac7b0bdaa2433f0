"""What jobs are expected to take."""

import pytest
from small_experiments import TRAINING, place_in

from evigrad.data import load
from evigrad.experiments.cost import SHAPES, Work, expected_seconds, work_of
from evigrad.experiments.jobs import Job
from evigrad.experiments.plan import curve, evaluation, timing, training
from evigrad.experiments.work import perform


def seconds(job: Job) -> float:
    found = expected_seconds(job)
    assert found is not None
    return found


def work(job: Job) -> Work:
    found = work_of(job)
    assert found is not None
    return found


def test_more_work_takes_longer():
    few = training(TRAINING | {"eval_every": 0}, seed=0)
    for more in (
        {"epochs": 30},
        {"estimator": "ntk-40-1"},
        {"estimator": "ntk-20-C"},
        {"estimator": "full-20-C"},
        {"model": "digitsnet"},
        {"invariance": "rotation", "samples": 4},
        {"steps": 3},
        {"eval_every": 1},
    ):
        assert seconds(training(TRAINING | {"eval_every": 0} | more, seed=0)) > seconds(few), more
    assert seconds(training(TRAINING | {"estimator": "map"}, seed=0)) < seconds(few)
    assert seconds(timing(few)) > 0
    assert expected_seconds(few, 2.0) == pytest.approx(seconds(few) / 2)


def test_passes_serve_all_precisions_and_the_algebra_does_not():
    few = training(TRAINING, seed=0)
    one, two = (work(curve(few, "ntk-10-C", "precision", [1.0] * n, None)) for n in (1, 2))
    assert two.row_passes == one.row_passes and two.products == 2 * one.products
    one, two = (work(curve(few, "ntk-10-C", "rotation", [1.0] * n, None)) for n in (1, 2))
    assert two.row_passes == 2 * one.row_passes
    one, two = (work(curve(few, "ntk-10-C", "precision", [1.0], n)) for n in (1, None))
    assert two.products == 4 * one.products  # 40 data


def test_blocks_of_few_rows_beside_their_anchors_are_many():
    few = training(TRAINING, seed=0)
    plain, anchored = (work(evaluation(few, f"ntk-100-rows{x}")) for x in ("", "-anchored"))
    assert plain.estimates == 4 and anchored.estimates == 40  # 90 of 100 rows are anchors


def test_what_is_not_known_beforehand_is_not_expected():
    assert expected_seconds(training(TRAINING | {"data": "mine"}, seed=0)) is None
    assert expected_seconds(training(TRAINING | {"estimator": "auto"}, seed=0)) is None
    too_small = training(TRAINING | {"model": "mininet"}, seed=0)  # the images are
    assert expected_seconds(too_small) is None


@pytest.mark.parametrize("name", ["digits", "mnist5k"])
def test_shapes_are_those_of_the_data(name):
    data, shape = load(name), SHAPES[name]
    assert tuple(data.input_shape) == shape.input and data.num_outputs == shape.outputs
    assert (len(data.train[0]), len(data.test[0])) == (shape.train, shape.test)


def test_the_expectation_is_of_the_right_size(tmp_path):
    job = training(TRAINING | {"epochs": 20, "steps": 2, "model": "digitsnet"}, seed=0)
    took = perform(job, place_in(tmp_path))["job_seconds"]
    assert took / 20 < seconds(job) < took * 20  # other tests may run beside it
