import math

import pytest

from evigrad.training.schedules import cosine, count_rounds, is_evaluated, is_round


def test_cosine_starts_ends_and_halves_where_it_should():
    assert cosine(0.0, 0.1, 0.01) == pytest.approx(0.1)
    assert cosine(1.0, 0.1, 0.01) == pytest.approx(0.01)
    assert cosine(0.5, 0.1, 0.01) == pytest.approx(0.055)
    assert cosine(0.25, 1.0, 0.0) == pytest.approx(0.5 + 0.5 * math.sqrt(0.5))


@pytest.mark.parametrize(
    ("burn_in", "every", "expected"),
    [
        (10, 5, [10, 15, 20, 25, 30]),
        (0, 10, [10, 20, 30]),
        (3, 9, [3, 12, 21, 30]),
        (30, 1, [30]),
        (31, 1, []),
    ],
)
def test_rounds_follow_the_last_epoch_of_the_burn_in_and_every_kth_after(burn_in, every, expected):
    rounds = [epoch for epoch in range(1, 31) if is_round(epoch, burn_in, every)]
    assert rounds == expected
    assert count_rounds(30, burn_in, every) == len(expected)


@pytest.mark.parametrize(
    ("epochs", "every", "expected"),
    [
        (4, None, [1, 2, 3, 4]),
        (25, None, [3, 6, 9, 12, 15, 18, 21, 24, 25]),
        (100, None, [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]),
        (7, 3, [3, 6, 7]),
        (7, 0, [7]),
    ],
)
def test_evaluations_are_about_ten_or_as_often_as_was_said(epochs, every, expected):
    assert [n for n in range(1, epochs + 1) if is_evaluated(n, epochs, every)] == expected
