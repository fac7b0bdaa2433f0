"""Owners of sums: a greedy choice that is near the best one."""

from itertools import product

import pytest
import torch

from evigrad.curvature.between_ranks import balanced


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_no_place_has_more_than_four_thirds_of_the_best_choice(count):
    """Graham's bound for this order, against all choices (1969)."""
    generator = torch.Generator().manual_seed(count)
    for number in (0, 1, 4, 6):
        costs = torch.randint(1, 30, (number,), generator=generator).pow(3).tolist()

        def largest(places, costs=costs):
            sums = [0] * count
            for place, cost in zip(places, costs, strict=True):
                sums[place] += cost
            return max(sums)

        places = balanced(costs, count)
        used = range(min(count, max(1, number)))
        best = min(map(largest, product(used, repeat=number)))
        assert largest(places) <= (4 / 3 - 1 / (3 * count)) * best
        assert balanced(costs, count) == places
