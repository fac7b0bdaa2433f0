"""Sizes and types of passes, by name and as those of PyTorch."""

import pytest
import torch

from evigrad import Memory
from evigrad.errors import ConfigurationError
from evigrad.passes.settings import as_bytes, as_dtype


def test_words_become_values():
    memory = Memory(
        micro_batch="auto",
        memory_budget="8GiB",
        gram_dtype="float64",
        rows_dtype=torch.bfloat16,
        rows_device="cpu",
        autocast="bfloat16",
    )
    assert memory.resolved() == {
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
        ConfigurationError, match="memory_budget must be a number of bytes, or an amount"
    ):
        as_bytes("memory_budget", words)


@pytest.mark.parametrize("words", ["bfloat", "int8", "nn", ""])
def test_what_is_no_type(words):
    with pytest.raises(ConfigurationError, match="autocast must be one of bfloat16, float32"):
        as_dtype("autocast", words)


def test_a_device_that_does_not_exist():
    with pytest.raises(ConfigurationError, match="rows_device 'nowhere' does not exist"):
        Memory(rows_device="nowhere").resolved()
