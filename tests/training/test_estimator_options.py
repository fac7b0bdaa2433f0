import inspect
from typing import Any

import pytest
import torch

from evigrad import Evidence
from evigrad.blocks.anchors import Anchoring
from evigrad.errors import ConfigurationError
from evigrad.training import ANCHOR_OPTIONS, ESTIMATOR_OPTIONS, estimator_options, fit
from evigrad.training.estimator_options import as_bytes, as_dtype

DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(Evidence).parameters.items()
    if name in ESTIMATOR_OPTIONS
}
OF_ANCHORS: dict[str, Any] = {
    name: inspect.signature(fit).parameters[name].default for name in ANCHOR_OPTIONS
}
GIVEN = DEFAULTS | OF_ANCHORS | {"estimator": "ntk-100-1"}


def test_they_are_keywords_of_the_evidence():
    assert set(DEFAULTS) == set(ESTIMATOR_OPTIONS)
    assert estimator_options(GIVEN | {"epochs": 3}) == DEFAULTS


def test_words_become_values():
    given = {
        "micro_batch": "auto",
        "memory_budget": "8GiB",
        "gram_dtype": "float64",
        "rows_dtype": torch.bfloat16,
        "rows_device": "cpu",
        "autocast": "torch.bfloat16",
    }
    assert estimator_options(GIVEN | given) == DEFAULTS | {
        "micro_batch": "auto",
        "memory_budget": 8 * 2**30,
        "gram_dtype": torch.float64,
        "rows_dtype": torch.bfloat16,
        "rows_device": torch.device("cpu"),
        "autocast": torch.bfloat16,
    }


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("1000000", 10**6),
        (" 500 MB ", 500 * 10**6),
        ("1.5GiB", 3 * 2**29),
        ("2tib", 2**41),
        ("3 kB", 3000),
        (17, 17),
        (None, None),
    ],
)
def test_amounts_of_memory(words, count):
    assert as_bytes("memory_budget", words) == count


@pytest.mark.parametrize("words", ["", "GiB", "-1GiB", "8 GiB free", "1e9", "8Gb/s", "0", "0.1"])
def test_what_is_no_amount(words):
    with pytest.raises(
        ConfigurationError, match="memory_budget is a number of bytes, or an amount"
    ):
        as_bytes("memory_budget", words)


@pytest.mark.parametrize("words", ["bfloat", "int8", "nn", ""])
def test_what_is_no_type(words):
    with pytest.raises(ConfigurationError, match="autocast is one of bfloat16, float32"):
        as_dtype("autocast", words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rows_device": "nowhere"}, "rows_device 'nowhere' does not exist"),
    ],
)
def test_what_does_not_fit(given, words):
    with pytest.raises(ConfigurationError, match=words):
        estimator_options(GIVEN | given)


def test_anchors_are_for_anchored_estimators():
    anchored = GIVEN | {"estimator": "ntk-40-rows-anchored"}
    # What fit does by default is what an evidence does.
    assert estimator_options(anchored)["anchoring"] == Anchoring()
    given = {"anchor_share": 0.5, "anchor_choice": "random"}
    assert estimator_options(anchored | given)["anchoring"] == Anchoring(0.5, "random")
    for name in ("ntk-40-rows", "map", None):
        assert "anchoring" not in estimator_options(GIVEN | given | {"estimator": name})
    with pytest.raises(ConfigurationError, match="share"):
        estimator_options(anchored | {"anchor_share": 1.0})
