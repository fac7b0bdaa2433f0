"""How blocks are drawn: each with the probability that it is weighted by."""

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.blocks.anchors import AnchoredBlocks, AnchoredStream, Anchoring, Scores, choose
from evigrad.blocks.anchors.groups import Groups
from evigrad.blocks.anchors.masses import FLOOR, Masses
from evigrad.blocks.anchors.stream import Prepared
from evigrad.blocks.anchors.tail import Tail
from evigrad.blocks.sources import as_source
from evigrad.errors import InputError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior


def problem(behind: int) -> tuple[AnchoredStream, AnchoredBlocks]:
    """Six data of three columns and some behind them, two anchors, a group."""
    generator = torch.Generator().manual_seed(0)
    scores = Scores(
        torch.rand(6, 3, generator=generator), 0.01 * torch.rand(6, generator=generator), behind
    )
    prepared = Prepared(
        torch.tensor([2, 9]), Groups([torch.tensor([0, 5])], torch.ones(1).double()), scores
    )
    masses = Masses()
    masses.observe(0, 1.0, 3.0)
    masses.observe(1, 1.0, 0.2)
    source = as_source((torch.rand(6, 2), torch.zeros(6).long()))
    stream = AnchoredStream(source, Anchoring(), 4, lambda: prepared, masses, generator)
    return stream, stream._partition(prepared)


@pytest.mark.parametrize("behind", [0, 50])
def test_each_block_is_drawn_as_often_as_its_weight_says(
    behind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, made = problem(behind)
    total, offsets, expected = 0.0, 0.0, 0.0
    seen: list[float] = []
    for number in range(made.num_blocks):
        group = made.group(number)
        chances: list[Tensor] = []

        def of_group(given: Tensor, *_: object, g: int = group, c: list = chances, **__: object):
            c.append(given)
            return torch.tensor([g])

        with monkeypatch.context() as patch:
            patch.setattr(torch, "multinomial", of_group)
            within = torch.tensor(number - group)
            patch.setattr(
                torch, "randint", lambda _, size, w=within, **__: torch.arange(*size) if size else w
            )
            block = stream._alone(made, [stream._draw(made)])
        (draw,) = block.draws
        (weight,) = block.part_weights
        own = draw.guess * float(stream._masses.expected([draw.key], torch.ones(1).double()))
        # With the chance of its group, and within it as likely as the others.
        chance = float(chances[0][group]) / float(made.counts[group])
        assert 1 / weight == pytest.approx(chance)
        assert weight <= made.num_blocks / FLOOR * (1 + 1e-9)
        total += chance
        offsets += chance * block.offset
        expected += own
        seen.append(own / chance + block.offset)
        assert block.columns is not None
        assert block.parts is not None
        mine = block.parts == 1
        rows = list(
            zip(
                block.indices[:, None].expand_as(mine)[mine].tolist(),
                block.columns[mine].tolist(),
                strict=True,
            )
        )
        data, columns = made._rows(number)
        assert sorted(rows) == sorted(zip(data.tolist(), columns.tolist(), strict=True))
    assert total == pytest.approx(1.0)
    assert offsets == pytest.approx(0.0, abs=1e-9 * expected)
    # What is expected of a block, weighted and put right, is what is expected of all of them.
    assert seen == pytest.approx([expected] * len(seen))


def test_a_tail_beyond_64_bits_is_a_partition() -> None:
    tail = Tail(
        first=16, behind=49_984, num_rows=10**5 * 49_984, size=4, factor=4_998_399_997, shift=7
    )
    data, columns = tail.rows(tail.count - 1)
    t = [*range(tail.num_rows - 4, tail.num_rows)]
    wanted = [(tail.factor * each + tail.shift) % tail.num_rows for each in t]
    assert data.tolist() == [each // tail.behind for each in wanted]
    assert columns.tolist() == [16 + each % tail.behind for each in wanted]


def test_outputs_that_are_not_finite_are_refused() -> None:
    model = nn.Linear(2, 3)
    evidence = Evidence(
        model, Categorical(), GaussianPrior(), estimator="ntk-4-rows-anchored", num_data=6
    )
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="outputs hold NaN"):
        next(iter(evidence.blocks((torch.ones(6, 2), torch.zeros(6).long()))))


def test_anchors_are_chosen_by_score_where_the_last_layer_has_no_numbers() -> None:
    scores = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    found = [
        choose(Anchoring(), scores, 4, torch.Generator().manual_seed(0), kernel=kernel)
        for kernel in (lambda rows: torch.inf * torch.eye(len(rows)), lambda _: None)
    ]
    assert torch.equal(*found)
    assert len(found[0].unique()) == 4
