"""What ``--compare-map`` says of two trainings, and what judges them."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import torch

from evigrad import Evidence
from evigrad.cli.report import comparison, judge_of, notes_of
from evigrad.cli.setup import set_up
from evigrad.likelihoods import Categorical
from evigrad.measure import EvidenceValue
from evigrad.priors import GaussianPrior


def row(epoch: int, score: float | None, noise: float = 1.0) -> dict[str, Any]:
    return {"epoch": epoch, "test_log_likelihood": score, "noise": noise}


@pytest.mark.parametrize(
    ("base", "learned", "history", "words"),
    [
        (
            {"log_likelihood": -0.3, "accuracy": 0.94},
            {"log_likelihood": -0.2, "accuracy": 0.95},
            [row(1, None), row(2, -0.31), row(3, -0.3)],
            "With evigrad, the test log likelihood is -0.200 instead of -0.300, and the test"
            " accuracy is 95.0 % instead of 94.0 %. Training took 2.0 times as long.",
        ),
        (
            {"log_likelihood": -9.0, "accuracy": 0.4},
            {"log_likelihood": -2.0, "accuracy": 0.4},
            [row(1, -8.0), row(2, -1.5), row(3, -9.0)],
            "is -2.00 instead of -9.00, and the test accuracy is 40.0 % instead of 40.0 %. Training"
            " took 2.0 times as long. Fixed weight decay overfits. Its test log likelihood was"
            " -1.50 after epoch 2, so early stopping is a stronger baseline.",
        ),
        (
            {"log_likelihood": -23.56, "squared_error": 1.0},
            {"log_likelihood": -0.27, "squared_error": 0.81},
            [row(1, -0.55), row(2, -23.56, 0.2)],
            "is -0.27 instead of -23.56, and the test RMSE is 2.7 instead of 3. Training took 2.0"
            " times as long. Fixed weight decay overfits, and its noise is too small. Its test log"
            " likelihood was -0.55 after epoch 1, so",
        ),
        ({"log_likelihood": -math.inf}, {"log_likelihood": -1.0}, [], ""),
    ],
)
def test_the_comparison_gives_values_and_names_a_baseline_that_overfits(
    base, learned, history, words
):
    results = {
        "MAP": SimpleNamespace(test_metrics=base, seconds=5.0, history=history),
        "ntk-10-1": SimpleNamespace(test_metrics=learned, seconds=10.0, history=[]),
    }
    data = SimpleNamespace(target_std=torch.tensor(3.0))
    sentences = comparison(cast("Any", results), cast("Any", data))
    assert words in sentences and bool(words) == bool(sentences)


@pytest.mark.parametrize(("evidences", "disagrees"), [((-0.5, -0.6), True), ((-0.6, -0.5), False)])
def test_the_notes_explain_a_log_evidence_that_disagrees_with_the_test(evidences, disagrees):
    results = {
        name: SimpleNamespace(test_metrics={"log_likelihood": test}, history=[{"epoch": 1}])
        for name, test in (("MAP", -0.3), ("ntk-10-1", -0.2))
    }
    values = {
        name: EvidenceValue(value, 0.0, value, 0.0, 0.0, "ntk-10-1", 10, True, 1.0)
        for name, value in zip(results, evidences, strict=True)
    }
    data = SimpleNamespace(target_mean=None, target_std=None)
    notes = notes_of(cast("Any", results), values, cast("Any", data))
    assert ("if a network memorizes its training data" in notes) == disagrees
    assert "The log evidence is a lower bound by ntk-10-1." in notes


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
        assert judge_of({"run": cast("Any", result)}, setup, chosen_estimator) == name
