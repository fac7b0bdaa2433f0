"""What ``--compare-map`` says of two trainings, and where commands went."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


from evigrad import Evidence
from evigrad.cli import main
from evigrad.cli.setup import set_up
from evigrad.cli.train import _gain, _judge
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("reproduce", "python -m experiments fig4"),
        ("pareto", "python -m experiments pareto, with the same options"),
        ("bounds", "python -m experiments bounds, with the same options"),
    ],
)
def test_a_command_says_where_it_went(command, words, capsys):
    assert main([command, "--seeds", "0"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("base", "learned", "words"),
    [
        (
            {"log_likelihood": -0.3, "accuracy": 0.94},
            {"log_likelihood": -0.2, "accuracy": 0.95},
            "raised the test log likelihood by 0.100 nats per example compared with MAP. A test"
            " target is 11 % more probable (geometric mean). Training took 2.0 times as long.",
        ),
        (
            {"log_likelihood": -9.0, "accuracy": 0.4},
            {"log_likelihood": -2.0, "accuracy": 0.4},
            "raised the test log likelihood by 7.000 nats per example compared with MAP. Training"
            " took 2.0",
        ),
        (
            {"log_likelihood": -500.0, "squared_error": 1.0},
            {"log_likelihood": -1.0, "squared_error": 0.81},
            "by 499.000 nats per example and lowered the test RMSE by 10 % compared with MAP."
            " Training took 2.0",
        ),
        ({"log_likelihood": -math.inf}, {"log_likelihood": -1.0}, ""),
    ],
)
def test_what_learning_won_in_a_sentence(base, learned, words):
    results = {
        "MAP": SimpleNamespace(test_metrics=base, seconds=5.0),
        "ntk-10-1": SimpleNamespace(test_metrics=learned, seconds=10.0),
    }
    sentence = _gain(results)  # pyright: ignore[reportArgumentType]
    assert words in sentence and bool(words) == bool(sentence)


@pytest.mark.parametrize(
    ("subset", "chosen_estimator", "name"),
    [
        (60, "ntk-400-rows-anchored", "ntk-N-C"),  # exact, where that is quick
        (1000, "ntk-400-rows-anchored", "ntk-1000-C"),  # of 1000
        (1400, "ntk-400-rows-anchored", "ntk-400-rows-anchored"),
        (1400, "kfac-N-C", "kfac-N-C"),
        (1400, "ntk-100-1", "ntk-700-C"),
        (1400, None, "ntk-700-C"),
    ],
)
def test_the_final_table_is_judged_by_sizes_and_not_by_times(subset, chosen_estimator, name):
    """It is no looser than the curve, as subsets of data beside anchors would be."""
    setup = set_up("digits", subset=subset, model="digitsnet", device="cpu")
    evidence = Evidence(
        setup.make_model(),
        Categorical(),
        GaussianPrior(),
        estimator="ntk-50-1",
        num_data=subset,
        generator=0,
    )
    for seconds in (0.1, 1000.0):
        result = SimpleNamespace(evidence=evidence, seconds=seconds)
        assert _judge({"run": cast("Any", result)}, setup, chosen_estimator) == name
