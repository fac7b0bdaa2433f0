"""Which rows become anchors, and what is known of them."""

from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.blocks.anchors.choice import Anchoring, Centres, choose, pivots
from evigrad.blocks.anchors.selection import OutputMemory
from evigrad.blocks.pool import Pool
from evigrad.blocks.sources import as_source
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import Categorical, Gaussian
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
    ("values", "words"),
    [
        ({"share": 1.0}, r"share must lie in \[0, 1\)"),
        ({"share": -0.1}, "share"),
        ({"choice": "scores"}, "Did you mean 'score'"),
        ({"refresh": 0}, "refresh"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], words: str):
    with pytest.raises(ConfigurationError, match=words):
        Anchoring(**values)


def test_at_least_one_row_is_no_anchor():
    assert Anchoring(0.75).num_anchors(400) == 300
    assert Anchoring(0.99).num_anchors(2) == 1
    assert Anchoring(0.75).num_anchors(1) == 0


def test_the_memory_keeps_the_latest():
    memory = OutputMemory(4)
    assert memory.missing().tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match="not been computed"):
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
        Pool(4).find(torch.tensor(indices))


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


def entropy(kernel: Tensor, rows: list[int]) -> float:
    block = kernel[rows][:, rows]
    return float(torch.linalg.slogdet(block + torch.eye(len(rows), dtype=block.dtype))[1])


@given(
    num_rows=st.integers(1, 8),
    rank=st.integers(1, 5),
    count=st.integers(1, 8),
    seed=st.integers(0, 10**6),
)
@examples(25)
def test_each_pivot_adds_the_most(num_rows: int, rank: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = 3 * torch.randn(num_rows, rank, generator=generator, dtype=torch.float64)
    kernel, count = a @ a.mT, min(count, num_rows)
    chosen_rows = pivots(kernel, count).tolist()
    assert len(set(chosen_rows)) == count
    for step, row in enumerate(chosen_rows):
        before = chosen_rows[:step]
        others = [r for r in range(num_rows) if r not in before]
        best = max(entropy(kernel, [*before, r]) for r in others)
        assert entropy(kernel, [*before, row]) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_the_candidates() -> None:
    asked: list[Tensor] = []

    def known(rows: Tensor) -> Tensor:
        asked.append(rows)
        return torch.diag(torch.arange(len(rows)).double())

    generator = torch.Generator().manual_seed(0)
    anchors = choose(Anchoring(), scores(40), 5, generator, kernel=known)
    (rows,) = asked
    assert len(rows) == len(rows.unique()) == 20
    # Half of them have the largest scores, and the others come from anywhere.
    best = scores(40).flatten().argsort(descending=True)
    assert torch.equal(rows[:10], best[:10])
    assert not torch.equal(rows[10:], best[10:20])
    assert torch.equal(anchors, rows[-5:].sort().values)  # the largest ones of a diagonal
    # Where all rows are anchors there is no choice, and where nothing is known scores make it.
    assert len(choose(Anchoring(), scores(40), 120, generator, kernel=known)) == 120
    assert len(choose(Anchoring(), scores(40), 0, generator, kernel=known)) == 0
    assert len(asked) == 1
    by_score = choose(Anchoring(choice="score"), scores(40), 5, generator)
    assert torch.equal(
        choose(Anchoring(), scores(40), 5, generator, kernel=lambda _: None), by_score
    )


def first(x: torch.Tensor, count: int) -> torch.Tensor | None:
    return Centres().first(as_source((x, torch.zeros(len(x), 1))), count)


def radius(x: torch.Tensor, centres: torch.Tensor) -> float:
    return float(torch.cdist(x, x[centres]).min(1).values.max())


@given(st.integers(0, 1000), st.integers(3, 9), st.integers(1, 3))
def test_no_datum_is_further_than_twice_the_smallest_radius(seed: int, n: int, k: int):
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    chosen = first(x, k)
    assert chosen is not None and len(set(chosen.tolist())) == k
    best = min(radius(x, torch.tensor(subset)) for subset in combinations(range(n), k))
    assert radius(x, chosen) <= 2 * best + 1e-6


def test_all_data_are_centres_in_the_end_equal_ones_too():
    x = torch.tensor([[0.0], [0.0], [1.0], [1.0], [5.0]])
    chosen = first(x, 9)
    assert chosen is not None and sorted(chosen.tolist()) == [0, 1, 2, 3, 4]
    assert set(x[chosen[:3]].flatten().tolist()) == {0.0, 1.0, 5.0}


def test_more_centres_go_on_where_fewer_ended():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    source, centres = as_source((x, torch.zeros(30, 1))), Centres()
    few, many = centres.first(source, 4), centres.first(source, 9)
    assert few is not None and many is not None and many[:4].equal(few)
    again = Centres().first(source, 9)
    assert again is not None and again.equal(many)


def test_images_are_compared_by_a_projection():
    # Three far groups of images: each has one of the first three centres.
    generator = torch.Generator().manual_seed(0)
    x = (
        0.1 * torch.randn(60, 1, 28, 28, generator=generator)
        + torch.arange(3).repeat(20)[:, None, None, None]
    )
    chosen = first(x, 3)
    assert chosen is not None and sorted((chosen % 3).tolist()) == [0, 1, 2]


def test_tokens_have_no_distances():
    assert first(torch.randint(9, (10, 4)), 3) is None


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_anchors_of_a_regression(num_outputs: int):
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(30, num_outputs)
    evidence = Evidence(
        nn.Linear(3, num_outputs),
        Gaussian(),
        GaussianPrior(),
        estimator="ntk-16-rows-anchored",
        num_data=30,
        anchoring=Anchoring(share=0.75),
        generator=0,
    )
    (block,) = evidence.blocks((x, y)).take(1)
    assert block.anchored is not None
    anchored = block.indices[(block.anchored.labels == 0).any(1)]
    chosen = first(x, 12 // num_outputs)
    assert chosen is not None and sorted(anchored.tolist()) == sorted(chosen.tolist())


def test_anchors_are_chosen_by_score_where_the_last_layer_has_no_numbers() -> None:
    row_scores = scores(9, 2)
    choices = [
        choose(Anchoring(), row_scores, 4, torch.Generator().manual_seed(0), kernel=kernel)
        for kernel in (lambda rows: torch.inf * torch.eye(len(rows)), lambda _: None)
    ]
    assert torch.equal(*choices)
    assert len(choices[0].unique()) == 4
