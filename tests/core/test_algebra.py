"""Sums of Gram matrices against plain products."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evigrad.core import algebra
from evigrad.core.algebra import sum_of_grams


@pytest.mark.parametrize("size", [3, 2 * algebra._STRIP])
def test_autocast_does_not_narrow_sums_of_grams(size: int) -> None:
    part = torch.randn(size, 50, generator=torch.Generator().manual_seed(0))
    expected = part.double() @ part.double().mT
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = sum_of_grams([part])
    torch.testing.assert_close(result, expected.float(), rtol=1e-5, atol=1e-4)


@given(
    size=st.integers(0, 3 * algebra._STRIP),
    widths=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    batch=st.sampled_from([(), (1,), (2,)]),
    seed=st.integers(0, 2**31 - 1),
)
def test_sum_of_grams(size: int, widths: list[int], batch: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randn(*batch, size, width, dtype=torch.float64, generator=generator)
        for width in widths
    ]
    joined = torch.cat(parts, -1)
    result = sum_of_grams(iter(parts))
    torch.testing.assert_close(result, joined @ joined.mT)
    torch.testing.assert_close(result, result.mT)
