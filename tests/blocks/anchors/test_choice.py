"""Which rows become anchors, and what is known of them."""

from typing import Any

import pytest
import torch
from torch import nn

from evigrad import Evidence
from evigrad.blocks.anchors import Anchoring, OutputMemory, choose
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior


def scores(n: int = 20, d: int = 3) -> torch.Tensor:
    return torch.rand(n, d, generator=torch.Generator().manual_seed(0))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_the_largest_scores():
    chosen = choose(Anchoring(), scores(), 7, generator())
    flat = scores().flatten()
    assert len(chosen) == 7
    assert bool((chosen.diff() > 0).all())
    others = torch.ones(60, dtype=torch.bool)
    others[chosen] = False
    assert flat[chosen].min() >= flat[others].max()


def test_equal_scores_are_spread_over_the_inputs():
    equal = torch.ones(10, 2)
    order = torch.tensor([7, 3, 9, 0, 1])
    asked: list[int] = []

    def centres(count: int) -> torch.Tensor:
        asked.append(count)
        return order[:count]

    chosen = choose(Anchoring(), equal, 5, generator(), centres)
    assert asked == [3]  # both rows of two data, and one of a third
    assert chosen.tolist() == [6, 7, 14, 15, 18]
    # By column the scores may differ: it is the data that nothing tells apart.
    by_column = torch.tensor([1.0, 3.0]).expand(10, 2)
    assert choose(Anchoring(), by_column, 4, generator(), centres).tolist() == [6, 7, 14, 15]
    # Scores that tell data apart win, and what is asked for by name does in any case.
    assert choose(Anchoring(), scores(), 4, generator(), centres).equal(
        choose(Anchoring(choice="score"), scores(), 4, generator())
    )
    named = choose(Anchoring(choice="k-centre"), scores(10, 2), 4, generator(), centres)
    assert named.tolist() == [6, 7, 14, 15]
    # Inputs without distances leave random rows.
    without = choose(Anchoring(), equal, 4, generator(), lambda _: None)
    assert without.equal(choose(Anchoring(choice="random"), equal, 4, generator()))


def test_random_anchors_are_uniform():
    counts = torch.zeros(60)
    draws = torch.Generator().manual_seed(2)
    for _ in range(400):
        counts[choose(Anchoring(choice="random"), scores(), 6, draws)] += 1
    # 40 expected of each row, with a standard deviation of 6.
    assert counts.sum() == 2400
    assert 15 < float(counts.min()) < float(counts.max()) < 65


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"share": 1.0}, r"share must lie in \[0, 1\)"),
        ({"share": -0.1}, "share"),
        ({"choice": "scores"}, "Did you mean 'score'"),
        ({"refresh": 0}, "refresh"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        Anchoring(**given)


def test_at_least_one_row_is_no_anchor():
    assert Anchoring(0.75).num_anchors(400) == 300
    assert Anchoring(0.99).num_anchors(2) == 1
    assert Anchoring(0.75).num_anchors(1) == 0


def test_the_memory_keeps_the_latest():
    memory = OutputMemory(4)
    assert memory.missing().tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match="not known"):
        memory.outputs  # noqa: B018
    memory.update(torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True))
    assert memory.missing().tolist() == [1, 3]
    memory.update(torch.tensor([1, 3, 2]), torch.full((3, 2), 5.0, dtype=torch.bfloat16))
    assert memory.outputs.tolist() == [[3, 4], [5, 5], [5, 5], [5, 5]]
    assert not memory.outputs.requires_grad
    other = OutputMemory(4)
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other.outputs, memory.outputs)
    other.update(torch.tensor([0]), torch.zeros(1, 2))
    assert memory.outputs[0].tolist() == [3, 4]


@pytest.mark.parametrize("indices", [[0, 4], [-1, 0]])
def test_positions_that_do_not_exist(indices: list[int]):
    with pytest.raises(InputError, match="Positions"):
        OutputMemory(4).update(torch.tensor(indices), torch.zeros(2, 3))


def test_as_many_positions_as_outputs():
    model = nn.Linear(2, 3)
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior(),
        estimator="ntk-4-rows-anchored",
        num_data=6,
        anchoring=Anchoring(choice="score"),
        generator=0,
    )
    x, y = torch.randn(4, 2), torch.zeros(4, dtype=torch.long)
    with pytest.raises(InputError, match="positions"):
        evidence.map_loss(x, y, indices=torch.arange(3))
    # Those of data that were seen are taken as they are.
    evidence.map_loss(x, y, indices=torch.arange(4))
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    data = (torch.cat([x, x[:2]]), torch.cat([y, y[:2]]))
    stream = evidence.blocks(data)
    seen.clear()
    next(iter(stream))
    assert seen == [2]
