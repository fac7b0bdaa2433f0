"""How parts are drawn: each with the probability that it is weighted by."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.blocks.anchors import AnchoredStream
from evigrad.blocks.anchors.partition import AnchoredPartition, Groups, Scores
from evigrad.blocks.anchors.stream import FLOOR, EntropyPredictor, probabilities
from evigrad.blocks.sources import as_source
from evigrad.errors import InputError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

KEYS = [0, 0, 1]
GUESSES = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64)


def expected(predictor: EntropyPredictor) -> torch.Tensor:
    return predictor.expected(KEYS, GUESSES)


def test_guesses_are_of_the_scores_over_the_least_anchors():
    head = torch.full((5, 3), 0.1)
    head[4, 0] = 0.5
    scores = Scores(head, torch.full((5,), 0.02), 4)
    partition = AnchoredPartition.draw(
        torch.tensor([12]), scores, 3, torch.Generator().manual_seed(0)
    )
    guesses = [len(part) * math.log1p(0.1 / 0.5) for part in partition.parts]
    # The tail as a whole: four columns of each of five data.
    guesses.append(5 * 4 * math.log1p(0.005 / 0.5))
    assert partition.guesses.tolist() == pytest.approx(guesses, rel=1e-6)
    assert [tail.count for tail in partition.tails] == [10]
    assert partition.keys[-1] == 3
    assert partition.num_parts == len(partition.parts) + 10


def test_what_was_seen_of_a_column_is_expected_of_its_other_blocks():
    predictor = EntropyPredictor()
    first = expected(predictor)
    predictor.observe(0, float(first[0]), 4.0)  # guessed at .5
    assert expected(predictor)[:2].tolist() == pytest.approx([4.0, 4.0])
    # Of a column that nobody has seen the same ratio is expected.
    assert float(expected(predictor)[2]) == pytest.approx(4.0)
    predictor.observe(1, 0.5, 1.0)
    assert expected(predictor).tolist() == pytest.approx([4.0, 4.0, 1.0])
    # Later ones count by half, in logarithms.
    predictor.observe(0, 0.5, 1.0)
    assert expected(predictor).tolist() == pytest.approx([2.0, 2.0, 1.0])
    # The same one again and again brings them nearer, and not beyond.
    for _ in range(50):
        predictor.observe(0, 0.5, 1.0)
    assert expected(predictor).tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_nothing_is_learned_from_nothing():
    predictor = EntropyPredictor()
    predictor.observe(0, 0.0, 1.0)
    predictor.observe(0, 1.0, 0.0)
    assert predictor.state_dict() == {"ratios": {}}
    predictor.observe(0, 1e-320, 1e30)
    assert predictor.state_dict() == {"ratios": {}}
    predictor.observe(0, 1.0, 1e30)
    assert predictor.state_dict() == {"ratios": {0: pytest.approx(math.log(1e3))}}  # limited
    other = EntropyPredictor()
    other.load_state_dict(predictor.state_dict())
    assert torch.equal(expected(other), expected(predictor))


def test_probabilities_have_a_floor():
    chances = probabilities(torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    assert float(chances.sum()) == pytest.approx(1.0)
    assert float(chances.min()) == pytest.approx(FLOOR / 4)
    assert float(chances[0]) == pytest.approx((1 - FLOOR) * 0.75 + FLOOR / 4)
    for useless in (torch.zeros(4), torch.full((4,), torch.inf)):
        assert probabilities(useless.double()).tolist() == [0.25] * 4


def problem(behind: int) -> tuple[AnchoredStream, AnchoredPartition]:
    """Six data of three columns and some behind them, two anchors, a group."""
    generator = torch.Generator().manual_seed(0)
    scores = Scores(
        torch.rand(6, 3, generator=generator), 0.01 * torch.rand(6, generator=generator), behind
    )
    groups = Groups([torch.tensor([0, 5])], torch.ones(1).double())
    draw = partial(AnchoredPartition.draw, torch.tensor([2, 9]), scores, 4, generator, groups)
    predictor = EntropyPredictor()
    predictor.observe(0, 1.0, 3.0)
    predictor.observe(1, 1.0, 0.2)
    source = as_source((torch.rand(6, 2), torch.zeros(6).long()))
    stream = AnchoredStream(source, 3, 4, lambda: draw, predictor, generator)
    return stream, draw()


@pytest.mark.parametrize("behind", [0, 50])
def test_each_block_is_drawn_as_often_as_its_weight_says(
    behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, partition = problem(behind)
    total, expected = 0.0, 0.0
    estimates: list[float] = []
    for number in range(partition.num_parts):
        group = partition.entry(number)
        chances: list[Tensor] = []

        def of_group(
            group_chances: Tensor, *_: object, g: int = group, c: list = chances, **__: object
        ):
            c.append(group_chances)
            return torch.tensor([g])

        with monkeypatch.context() as patch:
            patch.setattr(torch, "multinomial", of_group)
            within = torch.tensor(number - group)
            patch.setattr(
                torch, "randint", lambda _, size, w=within, **__: torch.arange(*size) if size else w
            )
            block = stream._builder(partition, [stream._draw(partition)])()
        assert block.anchored is not None
        (draw,) = block.anchored.draws
        (weight,) = block.anchored.weights
        prediction = draw.guess * float(
            stream._predictor.expected([draw.key], torch.ones(1).double())
        )
        # With the chance of its group, and within it as likely as the others.
        chance = float(chances[0][group]) / float(partition.counts[group])
        assert 1 / weight == pytest.approx(chance)
        assert weight <= partition.num_parts / FLOOR * (1 + 1e-9)
        total += chance
        expected += prediction
        estimates.append(prediction / chance)
        assert block.columns is not None
        mine = block.anchored.labels == 1
        rows = list(
            zip(
                block.indices[:, None].expand_as(mine)[mine].tolist(),
                block.columns[mine].tolist(),
                strict=True,
            )
        )
        data, columns = partition.rows(number)
        assert sorted(rows) == sorted(zip(data.tolist(), columns.tolist(), strict=True))
    assert total == pytest.approx(1.0)
    # If the predictions are right, every draw estimates nearly the sum over all parts.
    assert max(estimates) <= expected / (1 - FLOOR) * (1 + 1e-9)


def test_outputs_that_are_not_finite_are_refused() -> None:
    model = nn.Linear(2, 3)
    evidence = Evidence(
        model, Categorical(), GaussianPrior(), estimator="ntk-4-rows-anchored", num_data=6
    )
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="outputs contain NaN"):
        next(iter(evidence.blocks((torch.ones(6, 2), torch.zeros(6).long()))))
