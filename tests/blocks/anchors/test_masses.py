"""What is expected of blocks, and how often they are drawn."""

import math

import pytest
import torch

from evigrad.blocks.anchors import AnchoredBlocks, Scores
from evigrad.blocks.anchors.masses import FLOOR, Masses, control_variate, probabilities

KEYS = [0, 0, 1]
GUESSES = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64)


def expected(masses: Masses) -> torch.Tensor:
    return masses.expected(KEYS, GUESSES)


def test_guesses_are_of_the_scores_over_the_least_anchors():
    head = torch.full((5, 3), 0.1)
    head[4, 0] = 0.5
    scores = Scores(head, torch.full((5,), 0.02), 4)
    made = AnchoredBlocks.draw(torch.tensor([12]), scores, 3, torch.Generator().manual_seed(0))
    wanted = [len(part) * math.log1p(0.1 / 0.5) for part in made.parts]
    # The tail as a whole: four columns of each of five data.
    wanted.append(5 * 4 * math.log1p(0.005 / 0.5))
    assert made.guesses.tolist() == pytest.approx(wanted, rel=1e-6)
    assert made.tail is not None
    assert made.keys[-1] == 3
    assert made.num_blocks == len(made.parts) + 10


def test_what_was_seen_of_a_column_is_expected_of_its_other_blocks():
    masses = Masses()
    first = expected(masses)
    masses.observe(0, float(first[0]), 4.0)  # guessed at .5
    assert expected(masses)[:2].tolist() == pytest.approx([4.0, 4.0])
    # Of a column that nobody has seen the same ratio is expected.
    assert float(expected(masses)[2]) == pytest.approx(4.0)
    masses.observe(1, 0.5, 1.0)
    assert expected(masses).tolist() == pytest.approx([4.0, 4.0, 1.0])
    # Later ones count by half, in logarithms.
    masses.observe(0, 0.5, 1.0)
    assert expected(masses).tolist() == pytest.approx([2.0, 2.0, 1.0])
    # The same one again and again brings them nearer, and not beyond.
    for _ in range(50):
        masses.observe(0, 0.5, 1.0)
    assert expected(masses).tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_nothing_is_learned_from_nothing():
    masses = Masses()
    masses.observe(0, 0.0, 1.0)
    masses.observe(0, 1.0, 0.0)
    assert masses.state_dict() == {"ratios": {}}
    masses.observe(0, 1e-320, 1e30)
    assert masses.state_dict() == {"ratios": {}}
    masses.observe(0, 1.0, 1e30)
    assert masses.state_dict() == {"ratios": {0: pytest.approx(math.log(1e3))}}  # limited
    other = Masses()
    other.load_state_dict(masses.state_dict())
    assert torch.equal(expected(other), expected(masses))


def test_probabilities_have_a_floor():
    found = probabilities(torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    assert float(found.sum()) == pytest.approx(1.0)
    assert float(found.min()) == pytest.approx(FLOOR / 4)
    assert float(found[0]) == pytest.approx((1 - FLOOR) * 0.75 + FLOOR / 4)
    for useless in (torch.zeros(4), torch.full((4,), torch.inf)):
        assert probabilities(useless.double()).tolist() == [0.25] * 4


def test_the_control_variate_has_expectation_zero_and_cancels_what_is_known():
    known = torch.tensor([3.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    chances = probabilities(known)
    offsets = [
        control_variate(known, e, p) for e, p in zip(known.tolist(), chances.tolist(), strict=True)
    ]
    assert sum(p * o for p, o in zip(chances.tolist(), offsets, strict=True)) == pytest.approx(0.0)
    # Where blocks are what was expected, every draw is the sum over all of them.
    for e, p, offset in zip(known.tolist(), chances.tolist(), offsets, strict=True):
        assert e / p + offset == pytest.approx(4.5)
    for useless in (torch.zeros(4), torch.full((4,), torch.inf)):
        assert control_variate(useless.double(), float(useless[0]), 0.25) == 0.0
