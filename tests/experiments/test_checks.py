"""What is found out before anything runs."""

import pytest
import yaml
from small_experiments import GRID, TRAINING, bounds, place_in

from evigrad.data import load
from evigrad.errors import ConfigurationError
from evigrad.experiments import Experiment, jobs_of, make_experiment, read_experiment
from evigrad.experiments.checks import SHAPES, problems
from evigrad.experiments.definition import merged
from evigrad.experiments.plan import curve, evaluation, training

PANEL = {"axis": "p", "hyperparameter": "precision", "grid": GRID}


def changed(**changes: object) -> Experiment:
    return make_experiment("mine", merged({"kind": "bounds", "title": "x", "seeds": [0]}, changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"panel": {}}, "no key 'panel'. Did you mean 'panels'"),
        ({"panels": {"a": PANEL | {"titel": "x"}}}, "no key 'titel' in panels.a"),
        ({"panels": {"a": {**PANEL, "grid": GRID | {"logg": True}}}}, "Did you mean 'log'"),
        ({"panels": {"a": {"hyperparameter": "p", "grid": GRID}}}, "lacks the key 'axis'"),
        ({"panels": {"a": {"axis": "p", "hyperparameter": "p"}}}, "lacks the key 'grid'"),
        ({"panels": {"a": {**PANEL, "grid": [1, 2]}}}, "for panels.a.grid; give keys"),
        ({"curves": ["ntk-10-C"]}, "for curves; give keys"),
        ({"panels": {"a": {**PANEL, "grid": GRID | {"count": 2.5}}}}, "not 2.5"),
        ({"panels": {"a": {**PANEL, "grid": GRID | {"start": 20}}}}, "not from 20 to 10"),
        ({"panels": {"a": {**PANEL, "grid": GRID | {"start": 0}}}}, "begins above 0"),
        ({"panels": {"a": {**PANEL, "grid": GRID | {"log": "no"}}}}, "yes or no, not 'no'"),
        ({"panels": {"a": {**PANEL, "grid": GRID | {"start": "x"}}}}, "has numbers"),
    ],
)
def test_keys_that_make_no_sense(changes, words):
    sound = {"training": TRAINING, "panels": {"a": PANEL}, "curves": {"ntk-10-C": "m"}}
    assert jobs_of(changed(**sound))
    with pytest.raises(ConfigurationError) as error:
        jobs_of(changed(**(sound | changes)))
    assert words in str(error.value)


@pytest.mark.parametrize("estimators", [[], "ntk-20-1", {"structures": ["ntk"]}])
def test_estimators_are_a_list(estimators):
    content = {"kind": "pareto", "title": "x", "seeds": [0], "training": TRAINING}
    with pytest.raises(ConfigurationError):
        jobs_of(make_experiment("mine", content | {"estimators": estimators}))


@pytest.mark.parametrize("seeds", [0, [], ["a"], [-1], [True], [0.5]])
def test_seeds_are_whole_numbers(seeds):
    with pytest.raises(ConfigurationError, match="for seeds; give a list"):
        changed(seeds=seeds)
    if isinstance(seeds, list) and seeds == [-1]:
        with pytest.raises(ConfigurationError, match="for seeds"):
            bounds().with_seeds(seeds)


def test_a_file_does_not_extend_itself(tmp_path):
    for name, base in (("a", "b"), ("b", "a"), ("c", "c")):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"extends": base}))
    for name in "abc":
        with pytest.raises(ConfigurationError, match="extends itself"):
            read_experiment(str(tmp_path / f"{name}.yaml"))


def test_other_seeds_are_those_of_all_blocks():
    experiment = read_experiment("table1").with_seeds([7])
    assert {job.config["seed"] for job in jobs_of(experiment)} == {7}


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
    ((reason, found),) = problems(jobs, place_in(tmp_path)).items()
    assert words in reason and found == jobs


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
    ((reason, found),) = problems([job, wrong], place_in(tmp_path)).items()
    assert words in reason and found == [wrong]


def test_nothing_is_wrong_with_the_small_experiments(tmp_path):
    for name in ("fig4", "fig_pareto_prior", "fig_train_invariance", "model_selection"):
        jobs = jobs_of(read_experiment(name, "tiny"))
        assert problems(jobs, place_in(tmp_path)) == {}


@pytest.mark.parametrize("name", ["digits", "mnist5k"])
def test_shapes_are_those_of_the_data(name):
    data, shape = load(name), SHAPES[name]
    assert tuple(data.input_shape) == shape.input and data.num_outputs == shape.outputs
    assert (len(data.train[0]), len(data.test[0])) == (shape.train, shape.test)
