"""The digits that Python packages ship: splits, scaling, subsets."""

import numpy as np
import pytest
import torch

from evigrad.data import DataSet, load
from evigrad.errors import ConfigurationError

SHIPPED = {"digits": (1438, 359, (1, 8, 8)), "mnist5k": (4000, 1000, (1, 28, 28))}


@pytest.fixture(scope="module", params=SHIPPED)
def shipped(request: pytest.FixtureRequest) -> DataSet:
    return load(request.param)


def raw(data: DataSet, x: torch.Tensor) -> torch.Tensor:
    """Pixels in [0, 1]."""
    return x * data.std + data.mean


def test_sizes_and_facts(shipped: DataSet) -> None:
    num_train, num_test, shape = SHIPPED[shipped.name]
    for (x, y), count in ((shipped.train, num_train), (shipped.test, num_test)):
        assert x.shape == (count, *shape)
        assert x.dtype == torch.float32
        assert y.shape == (count,)
        assert y.dtype == torch.int64
    assert shipped.input_shape == shape
    assert shipped.num_outputs == 10
    assert shipped.class_names == tuple("0123456789")
    assert shipped.likelihood == "categorical"
    assert shipped.is_classification


def test_split_is_stratified(shipped: DataSet) -> None:
    everything = torch.cat([shipped.train[1], shipped.test[1]]).bincount()
    share = shipped.test[1].bincount() / everything
    assert ((share - 0.2).abs() * everything < 1).all()


def test_train_is_standardised_and_test_by_the_same_numbers(shipped: DataSet) -> None:
    x = shipped.train[0].double()
    torch.testing.assert_close(x.mean(), torch.tensor(0.0).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(x.std(correction=0), torch.tensor(1.0).double(), atol=1e-6, rtol=0)
    steps = 16 if shipped.name == "digits" else 255
    for x, _ in (shipped.train, shipped.test):
        pixels = raw(shipped, x) * steps
        torch.testing.assert_close(pixels, pixels.round(), atol=1e-3, rtol=0)
        assert pixels.min() > -0.5
        assert pixels.max() < steps + 0.5


def test_train_and_test_are_disjoint_and_complete() -> None:
    data = load("digits")
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    mine = torch.cat([raw(data, data.train[0]), raw(data, data.test[0])]).mul(16).round().long()
    mine = torch.cat([mine.flatten(1), torch.cat([data.train[1], data.test[1]])[:, None]], dim=1)
    theirs = np.concatenate([digits.data, digits.target[:, None]], axis=1).astype(np.int64)
    assert sorted(map(tuple, mine.tolist())) == sorted(map(tuple, theirs.tolist()))


def test_mnist5k_shows_digits() -> None:
    data = load("mnist5k")
    # A nearest class mean classifies four fifths of real digits; transposed, shuffled or
    # mislabelled ones are at chance, or fail the orientation check below.
    means = torch.stack([data.train[0][data.train[1] == digit].mean(0) for digit in range(10)])
    guesses = torch.cdist(data.test[0].flatten(1), means.flatten(1)).argmin(1)
    assert (guesses == data.test[1]).float().mean() > 0.75
    # The mean "1" stands upright: it is taller than wide.
    inked = raw(data, means)[1, 0] > 0.2
    assert inked.any(1).sum() > 1.5 * inked.any(0).sum()


def test_autompg_is_a_table_of_cars() -> None:
    data, other = load("autompg"), load("autompg", seed=1)
    assert data.likelihood == "gaussian" and data.input_shape == (9,)  # three of them origins
    assert [len(part[0]) for part in (data.train, data.test)] == [314, 78]
    assert not torch.equal(data.test[0], other.test[0])
    assert data.target_mean is not None and data.target_std is not None
    miles = torch.cat([data.train[1], data.test[1]]) * data.target_std + data.target_mean
    assert 8.9 < miles.min() < 9.1 and 46 < miles.max() < 47
    weight = data.train[0][:, 3]  # heavy cars drink more
    assert torch.corrcoef(torch.stack([weight, data.train[1][:, 0]]))[0, 1] < -0.7
    assert len(load("autompg", subset=50).train[0]) == 50
    with pytest.raises(ConfigurationError, match="'autompg' is a table"):
        load("autompg:scaled")


def test_subset_is_drawn_from_the_train_set_alone() -> None:
    whole = load("digits")
    small, large = load("digits", subset=50, seed=3), load("digits", subset=200, seed=3)
    other = load("digits", subset=50, seed=4)
    assert len(small.train[0]) == 50
    assert torch.equal(small.test[1], whole.test[1])

    def rows(data: DataSet, split: torch.Tensor) -> list[tuple[int, ...]]:
        return [tuple(row) for row in raw(data, split).flatten(1).mul(16).round().long().tolist()]

    assert set(rows(small, small.train[0])) <= set(rows(whole, whole.train[0]))
    assert rows(small, small.test[0]) == rows(whole, whole.test[0])
    # A smaller subset of a seed is part of a larger one, and another seed gives another subset.
    assert rows(large, large.train[0])[:50] == rows(small, small.train[0])
    assert rows(other, other.train[0]) != rows(small, small.train[0])
    # The statistics are those of the drawn data.
    torch.testing.assert_close(small.train[0].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)


def test_global_random_states_are_left_alone() -> None:
    ours, numpys = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    load("digits", subset=10).split_validation()
    assert torch.equal(torch.get_rng_state(), ours)
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == numpys


@pytest.mark.parametrize("subset", [0, -1, 1439])
def test_subset_that_does_not_fit(subset: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"between 1 and 1,438.* got {subset}"):
        load("digits", subset=subset)


def test_seed_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="must be between 0 and .* got -1"):
        load("digits", subset=5, seed=-1)
