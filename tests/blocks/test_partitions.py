from collections import Counter
from itertools import product
from math import comb

import numpy as np
import pytest
import torch
from every_draw import every_subset
from hypothesis import given, settings
from hypothesis import strategies as st

from evigrad.blocks.sources import as_source
from evigrad.blocks.streams import BlockStream
from evigrad.core.names import Estimator
from evigrad.core.partition import Partition
from evigrad.errors import ConfigurationError, InputError

N, M, C = 7, 3, 3
SPLIT = ["3-1", "3-2", "3-3", "3-C", "3-1-iid", "3-2-iid", "N-1", "N-2", "N-C", "N-1-iid"]
SINGLE = ["3-rows", "5-rows", "1-rows"]
OTHER = ["3-1-ef", "N-1-ef", "3-2-mc", "3-5-mc", "N-1-mc"]
GROUPED = ["3-1-grouped", "3-C-grouped", "3-2-iid-grouped", "3-1-ef-grouped"]
NAMES = [f"ntk-{tail}" for tail in SPLIT + SINGLE + OTHER]
ALL_NAMES = NAMES + [f"ntk-{tail}" for tail in GROUPED]
LABELS = torch.tensor([2, 0, 5, 0, 2, 5, 0])


def make(name, num_data=N, num_outputs=C):
    return Partition(Estimator.parse(name), num_data, num_outputs)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def pairs_of(block, num_outputs=C):
    """The pairs (datum, output) of a block, in a list that shows repetitions."""
    data = block.indices.tolist()
    if block.columns is None:
        return [(n, c) for n in data for c in range(num_outputs)]
    columns = block.columns.tolist()
    return [(n, c) for n, row in zip(data, columns, strict=True) for c in row if c >= 0]


def columns_of(block):
    """The columns, of a block that has some."""
    assert block.columns is not None
    return block.columns


def data_of(block):
    """Inputs and targets, of a block that was fetched."""
    assert block.inputs is not None and block.targets is not None
    return block.inputs, block.targets


def index_set(num_data=N, num_outputs=C):
    return Counter(product(range(num_data), range(num_outputs)))


def own_rows(partition):
    """All rows that there are: pairs (datum, output), or with ef and mc (datum, own row)."""
    curved = partition.spec.curvature in ("ef", "mc")
    return index_set(partition.num_data, partition.spec.outputs if curved else C)


def check_partition(partition, blocks, everything, num_outputs):
    """The laws of a partition, for a list of blocks."""
    total = Counter()
    weight = torch.zeros(partition.num_data, dtype=torch.float64)
    assert len(blocks) == partition.num_blocks
    for block in blocks:
        assert block.scale == len(blocks)
        assert block.indices.unique().numel() == block.indices.numel() > 0
        assert block.likelihood_weights.dtype == torch.float64
        total.update(pairs_of(block, num_outputs))
        weight[block.indices] += block.likelihood_weights / len(blocks)
    assert total == everything
    torch.testing.assert_close(weight, torch.ones_like(weight))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_blocks_are_a_true_partition(name):
    for seed in range(3):
        partition = make(name)
        blocks = list(partition.blocks(generator(seed), LABELS))
        check_partition(partition, blocks, own_rows(partition), C)


@given(st.data(), st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**32))
@settings(deadline=None)
def test_the_partition_laws(data, num_data, num_outputs, seed):
    rows, k = data.draw(st.booleans()), num_outputs
    total = num_data * num_outputs if rows else num_data
    size = data.draw(st.integers(1, total))
    if rows:
        tail, num_blocks = f"{size}-rows", -(-total // size)
    else:
        k = data.draw(st.integers(1, num_outputs))
        modifiers = data.draw(st.sampled_from(["", "-iid", "-grouped", "-iid-grouped"]))
        tail, num_blocks = f"{size}-{k}{modifiers}", -(-total // size) * -(-num_outputs // k)
    partition = make(f"diag-{tail}", num_data, num_outputs)
    labels = torch.arange(num_data) % 4
    blocks = list(partition.blocks(generator(seed), labels))
    assert partition.num_blocks == num_blocks
    check_partition(partition, blocks, index_set(num_data, num_outputs), num_outputs)
    for block in blocks:
        size_of_block = len(pairs_of(block, num_outputs))
        if rows:
            assert size_of_block <= size
            assert block.columns is not None and (block.columns >= 0).any(1).all()
        else:
            assert len(block.indices) <= size
            assert block.columns is None or block.columns.shape[1] <= k
            assert block.columns is None or (block.columns >= 0).all()


def test_the_scale_is_the_number_of_blocks_with_ragged_ones_too():
    for name, num_blocks in [
        *(("ntk-3-2", 6), ("ntk-3-C", 3), ("ntk-N-1", 3), ("ntk-N-C", 1), ("ntk-3-1-iid", 9)),
        *(("ntk-5-rows", 5), ("ntk-3-1-ef", 3), ("ntk-3-2-mc", 3)),
    ]:
        partition = make(name)
        blocks = partition.blocks(generator())
        assert partition.num_blocks == len(blocks) == num_blocks
        assert {block.scale for block in blocks} == {num_blocks}


def test_as_many_blocks_as_data_without_a_rounding_error():
    for count in [1, 3, 49, 93, 10_007]:
        # 49 * (1/49) < 1: N recomputed from a ratio would lose a datum.
        assert make("ntk-1-C", count).num_blocks == count
        assert make(f"ntk-{count}-C", count).num_blocks == 1


@pytest.mark.parametrize("name", NAMES)
def test_draws_cover_every_pair_with_probability_one_over_the_scale(name):
    partition = make(name)
    m = N if partition.spec.subset is None else M
    draws = list(every_subset(partition, m))
    covered, weight = Counter(), torch.zeros(N, dtype=torch.float64)
    for block in draws:
        assert len(block.indices) == m == block.indices.unique().numel()
        covered.update(pairs_of(block))
        weight[block.indices] += block.likelihood_weights / len(draws)
    (scale,) = {block.scale for block in draws}
    assert set(covered) == set(own_rows(partition))
    for count in covered.values():
        assert count / len(draws) == pytest.approx(1 / scale, rel=1e-12)
    torch.testing.assert_close(weight, torch.ones_like(weight))


def test_draws_are_all_different_and_as_many_as_there_should_be():
    # Columns 0..2 in ascending order: two equal sets of outputs would look the same.
    counts = {"3-1": 35 * 3, "3-2-iid": 35 * 27, "3-C": 35, "4-rows": 35 * comb(9, 4), "3-1-ef": 35}
    for tail, expected in counts.items():
        seen = {frozenset(pairs_of(block)) for block in every_subset(make(f"ntk-{tail}"), M)}
        raw = sum(1 for _ in every_subset(make(f"ntk-{tail}"), M))
        assert raw == expected
        # The same rows may come from several subsets of the data; otherwise none is repeated.
        assert len(seen) == (comb(21, 4) - 7 * 6 * 5 * 4 // 24 * 81 if "rows" in tail else expected)


@pytest.mark.parametrize("tail", ["2-1", "2-2", "2-1-iid", "2-C", "2-rows", "N-1-iid", "2-1-ef"])
def test_subset_returns_each_draw_equally_often(tail):
    partition = make(f"ntk-{tail}", 4, C)
    m = 4 if "N" in tail else 2

    def key(block):
        return frozenset(block.indices.tolist()), frozenset(pairs_of(block))

    expected = Counter(map(key, every_subset(partition, m)))
    random_numbers = generator(1)
    count = 40 * len(expected)
    seen = Counter(key(partition.subset(m, random_numbers)) for _ in range(count))
    assert set(seen) <= set(expected)
    chi_square = sum((seen[k] - 40) ** 2 / 40 for k in expected)
    assert len(set(expected.values())) == 1
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * (2 * max(freedom, 1)) ** 0.5  # five standard deviations


def test_a_subset_looks_like_the_draws():
    for name in NAMES:
        partition = make(name)
        m = N if partition.spec.subset is None else M
        block, draw = partition.subset(m, generator()), next(every_subset(partition, m))
        assert block.scale == draw.scale
        assert torch.equal(block.likelihood_weights, draw.likelihood_weights)
        assert (block.columns is None) == (draw.columns is None)
        assert len(pairs_of(block)) == len(pairs_of(draw))
        assert block.indices.dtype == torch.int64


@pytest.mark.parametrize("num_data", [9, 100, 1000])
def test_subsets_of_any_size_are_distinct_and_uniform(num_data):
    partition, random_numbers = make("ntk-3-C", num_data), generator(3)
    counts = torch.zeros(num_data)
    for m in (1, 3, num_data // 5, num_data - 1) * 50:
        indices = partition.subset(m, random_numbers).indices
        assert indices.unique().numel() == m
        counts[indices] += 1
    expected = 50 * (1 + 3 + num_data // 5 + num_data - 1) / num_data
    assert (counts - expected).abs().max() < 6 * expected**0.5
    assert torch.equal(partition.subset(num_data, random_numbers).indices, torch.arange(num_data))


def test_small_subsets_of_many_data_prefer_no_positions():
    partition, random_numbers = make("ntk-3-C", 1000), generator(4)
    low = sum(int((partition.subset(200, random_numbers).indices < 500).sum()) for _ in range(100))
    assert abs(low - 10_000) < 6 * 64


def test_scales_of_subsets_whatever_the_names_size():
    assert make("ntk-3-2").subset(5, generator()).scale == pytest.approx(7 / 5 * 3 / 2)
    assert make("ntk-3-C").subset(5, generator()).scale == pytest.approx(7 / 5)
    assert make("ntk-N-1").subset(7, generator()).scale == 3
    assert make("ntk-4-rows").subset(5, generator()).scale == pytest.approx(21 / 4)
    assert make("ntk-3-2-mc").subset(5, generator()).scale == pytest.approx(7 / 5)


def test_one_output_for_the_whole_block_unless_iid():
    for seed in range(5):
        for name, distinct in (("ntk-60-1", 1), ("ntk-60-2", 1), ("ntk-60-1-iid", 3)):
            partition = make(name, 60)
            for block in (
                *partition.blocks(generator(seed)),
                partition.subset(60, generator(seed)),
            ):
                assert len({tuple(sorted(row)) for row in columns_of(block).tolist()}) == distinct


def test_rows_of_a_subset_keep_data_without_a_row():
    block = make("ntk-1-rows").subset(5, generator())
    assert columns_of(block).shape == (5, 1)
    assert (columns_of(block) >= 0).sum() == 1
    assert block.likelihood_weights.tolist() == [7 / 5] * 5


@pytest.mark.parametrize("name", ["ntk-3-1-ef", "ntk-3-2-mc"])
def test_curvatures_with_rows_of_their_own(name):
    width = 1 if "ef" in name else 2
    for block in (*make(name).blocks(generator()), *every_subset(make(name), 2)):
        assert torch.equal(columns_of(block), torch.arange(width).repeat(len(block.indices), 1))


def test_all_outputs_are_no_columns():
    for name in ("ntk-3-C", "ntk-3-3", "ntk-3-3-iid"):
        assert not make(name).splits_outputs
        assert all(block.columns is None for block in make(name).blocks(generator()))
    for name in ("ntk-3-2", "ntk-3-1-iid", "ntk-3-rows"):
        assert make(name).splits_outputs


@pytest.mark.parametrize("name", ["ntk-3-1", "ntk-3-2", "ntk-3-1-iid", "full-3-C", "ntk-4-rows"])
def test_the_bounds_hold_for_the_blocks(name):
    """Theorem 2 and Shearer's inequality, with a dense Gram matrix of rows."""
    rows = torch.randn(N * C, 5, dtype=torch.float64, generator=generator())

    def log_det(pairs):
        chosen = rows[[n * C + c for n, c in pairs]]
        return torch.logdet(torch.eye(len(chosen), dtype=torch.float64) + chosen @ chosen.T)

    exact = log_det(index_set())
    partition = make(name)
    draws = list(every_subset(partition, M))
    shearer = sum(block.scale * log_det(pairs_of(block)) for block in draws) / len(draws)
    blocks = partition.blocks(generator(1))
    theorem_2 = sum(block.scale * log_det(pairs_of(block)) for block in blocks) / len(blocks)
    assert shearer > exact
    assert theorem_2 > exact


def test_grouped_fills_blocks_class_by_class():
    labels = torch.tensor([3, 1, 7]).repeat(20)
    partition = make("ntk-20-C-grouped", 60)
    orders = set()
    for seed in range(30):
        blocks = partition.blocks(generator(seed), labels)
        classes = [labels[block.indices].unique() for block in blocks]
        assert all(len(members) == 1 for members in classes)
        orders.add(tuple(int(members) for members in classes))
    assert len(orders) == 6
    first, second = (partition.blocks(generator(s), labels)[0].indices for s in (0, 1))
    assert first.tolist() != second.tolist()
    ragged = make("ntk-25-C-grouped", 60).blocks(generator(), labels)
    assert sorted(len(labels[block.indices].unique()) for block in ragged) == [1, 2, 2]


def test_grouped_takes_the_classes_in_random_order():
    labels = torch.tensor([3, 1, 7]).repeat(20)
    shared = set()  # of three classes of 20, the middle one is in both blocks of 30
    for seed in range(30):
        first, second = make("ntk-30-C-grouped", 60).blocks(generator(seed), labels)
        shared |= set(labels[first.indices].tolist()) & set(labels[second.indices].tolist())
    assert shared == {1, 3, 7}


def test_grouped_needs_labels():
    partition = make("ntk-3-1-grouped")
    with pytest.raises(ConfigurationError, match="class labels"):
        partition.blocks(generator())
    with pytest.raises(InputError, match="integers, got torch.float32"):
        partition.blocks(generator(), LABELS.float())
    with pytest.raises(InputError, match="integers, got torch.bool"):
        partition.blocks(generator(), LABELS > 2)
    with pytest.raises(InputError, match=r"shape \(7,\)"):
        partition.blocks(generator(), LABELS[:, None])
    with pytest.raises(ConfigurationError, match="blocks()"):
        partition.subset(3, generator())


def test_names_that_do_not_fit_the_data():
    for name, error, words in [
        ("ntk-8-1", InputError, "blocks of 8 examples, but there are only 7"),
        ("ntk-3-4", ConfigurationError, "blocks of 4 outputs, but the model has only 3"),
    ]:
        with pytest.raises(error, match=words):
            make(name)


def test_empty_index_sets_are_refused():
    for num_data, num_outputs in ((0, 3), (3, 0)):
        with pytest.raises(InputError, match="at least one example and one output"):
            make("ntk-N-C", num_data, num_outputs)


def test_subsets_that_cannot_be():
    for name, m, words in [
        ("ntk-3-1", 0, "between 1 and 7 examples, got 0"),
        ("ntk-3-1", 8, "between 1 and 7 examples, got 8"),
        ("ntk-N-1", 6, "needs all 7 examples, got 6. For subsets of 6, use 'ntk-6-1'"),
        ("ntk-10-rows", 3, "have only 9. Pass at least 4 examples"),
    ]:
        with pytest.raises(InputError, match=words):
            make(name).subset(m, generator())


def test_more_labels_than_outputs_may_be_sampled():
    assert columns_of(make("diag-3-9-mc", N, 2).subset(3, generator())).shape == (3, 9)


def test_the_generator_alone_decides():
    for name in ALL_NAMES:
        partition = make(name)

        def draw(random_numbers, partition=partition):
            blocks = list(partition.blocks(random_numbers, LABELS))
            if not partition.spec.grouped:
                m = N if partition.spec.subset is None else M
                blocks.append(partition.subset(m, random_numbers))
            return [
                (b.indices.tolist(), None if b.columns is None else b.columns.tolist())
                for b in blocks
            ]

        # Python's own generator is left out: the shape checker of the tests draws from it.
        before = torch.get_rng_state(), np.random.get_state(legacy=False)
        random_numbers = generator(5)
        first = draw(random_numbers)
        assert draw(generator(5)) == first
        assert torch.equal(before[0], torch.get_rng_state())
        assert str(before[1]) == str(np.random.get_state(legacy=False))
        # One block of everything is a set without an order; as a list the indices still differ.
        assert any(draw(random_numbers) != first for _ in range(5))


def test_blocks_come_in_random_order():
    sizes = [len(make("ntk-3-C").blocks(generator(seed))[0].indices) for seed in range(300)]
    assert 60 < sizes.count(1) < 140  # the ragged block comes first one time in three
    sizes = [len(pairs_of(make("ntk-10-rows").blocks(generator(s))[0])) for s in range(300)]
    assert 60 < sizes.count(1) < 140


def test_the_outputs_of_a_first_block_are_uniform():
    for name in ("ntk-3-1", "ntk-3-1-iid"):
        counts = Counter()
        for seed in range(300):
            counts.update(columns_of(make(name).blocks(generator(seed))[0])[0].tolist())
        assert sorted(counts) == [0, 1, 2]
        assert all(60 < count < 140 for count in counts.values())


@pytest.mark.parametrize("name", ["ntk-N-1-iid", "ntk-N-2"])
def test_each_partition_splits_the_outputs_anew(name):
    partition, random_numbers = make(name), generator()
    splits = {
        frozenset(frozenset(pairs_of(block)) for block in partition.blocks(random_numbers))
        for _ in range(20)
    }
    assert len(splits) == (20 if "iid" in name else 3)


def test_lazy_blocks_do_not_depend_on_when_they_are_read():
    for name in ("ntk-3-1-iid", "ntk-4-rows"):
        random_numbers = generator()
        blocks = make(name).blocks(random_numbers)
        state = random_numbers.get_state()
        read = list(blocks)
        again = [*reversed([blocks[i] for i in reversed(range(len(blocks)))])]
        for one, two, three in zip(read, again, blocks[:], strict=True):
            assert pairs_of(one) == pairs_of(two) == pairs_of(three)
        assert torch.equal(random_numbers.get_state(), state)
        assert pairs_of(blocks[-1]) == pairs_of(read[-1])
        with pytest.raises(IndexError):
            blocks[len(read)]


def test_a_million_data_are_not_built_at_once():
    blocks = make("ntk-400-1-iid", 10**6, 10).blocks(generator())
    assert len(blocks) == 25_000
    assert columns_of(blocks[0]).shape == (400, 1)
    assert blocks[24_999].indices.max() < 10**6


def tensors(num_data=N):
    return torch.arange(num_data)[:, None].float().expand(-1, 2), torch.arange(num_data) ** 2


@pytest.mark.parametrize("name", ["ntk-3-1", "ntk-N-C", "ntk-4-rows"])
def test_the_stream_goes_through_partition_after_partition(name):
    partition = make(name)
    stream = BlockStream(partition, as_source(tensors()), generator())
    blocks = list(stream.take(3 * partition.num_blocks))
    for start in range(0, len(blocks), partition.num_blocks):
        part = blocks[start : start + partition.num_blocks]
        check_partition(partition, part, index_set(), C)
    for block in blocks:
        inputs, targets = data_of(block)
        assert torch.equal(inputs[:, 0], block.indices.float())
        assert torch.equal(targets, block.indices**2)


def test_the_stream_starts_anew_and_its_state_is_the_generators():
    random_numbers = generator()
    stream = BlockStream(make("ntk-3-1"), as_source(tensors()), random_numbers)

    def read(blocks):
        return [pairs_of(block) for block in blocks]

    first = read(stream.take(4))
    state = random_numbers.get_state()
    second = read(stream.epoch())
    assert len(second) == make("ntk-3-1").num_blocks
    assert second[:4] != first
    random_numbers.set_state(state)
    assert read(stream.epoch()) == second
    random_numbers.set_state(state)
    iterator = iter(stream)
    assert read(next(iterator) for _ in range(4)) == second[:4]
    assert read(stream.take(0)) == []
    with pytest.raises(ConfigurationError, match="negative"):
        stream.take(-1)


def test_a_grouped_stream_reads_the_labels():
    inputs, _ = tensors()
    source = as_source((inputs, torch.arange(N) % 2))
    stream = BlockStream(make("ntk-3-C-grouped"), source, generator())
    for epoch in (stream.epoch(), stream.epoch()):
        assert sorted(len(data_of(block)[1].unique()) for block in epoch) in ([1, 1, 1], [1, 1, 2])
    with pytest.raises(InputError, match="integers"):
        BlockStream(make("ntk-3-C-grouped"), as_source((inputs, torch.zeros(N))), generator())


def test_a_stream_of_other_data_than_the_partitions():
    with pytest.raises(InputError, match="created for 7 examples, but the data have 6"):
        BlockStream(make("ntk-3-1"), as_source(tensors(6)), generator())
