"""`DataSet`: validation splits, moving, describing."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evigrad.data import DataSet, load
from evigrad.data.dataset import stratified_split
from evigrad.errors import ConfigurationError


def classification(n: int = 30) -> DataSet:
    x = torch.arange(n, dtype=torch.float32)[:, None]
    return DataSet(
        name="toy",
        train=(x, torch.arange(n) % 3),
        test=(x[:6] + 1000, torch.arange(6) % 3),
        num_outputs=3,
        input_shape=(1,),
        likelihood="categorical",
        class_names=("a", "b", "c"),
        mean=torch.zeros(1),
        std=torch.ones(1),
    )


def regression(n: int = 30) -> DataSet:
    data = classification(n)
    return replace(
        data,
        train=(data.train[0], 2 * data.train[0]),
        test=(data.test[0], 2 * data.test[0]),
        num_outputs=1,
        likelihood="gaussian",
        class_names=(),
        target_mean=torch.zeros(1),
        target_std=torch.ones(1),
    )


@pytest.mark.parametrize("data", [classification(), regression()], ids=["classes", "values"])
def test_validation_is_a_part_of_the_train_set(data: DataSet) -> None:
    train, validation = data.split_validation(0.3, seed=1)
    assert (len(train[0]), len(validation[0])) == (21, 9)
    both = torch.cat([train[0], validation[0]]).flatten().sort().values
    assert torch.equal(both, data.train[0].flatten())
    for x, y in (train, validation):
        expected = x.flatten().long() % 3 if data.is_classification else 2 * x
        assert torch.equal(y, expected)
    again, other = data.split_validation(0.3, seed=1)[1], data.split_validation(0.3, seed=2)[1]
    assert torch.equal(again[0], validation[0])
    assert not torch.equal(other[0], validation[0])


def test_validation_is_stratified() -> None:
    assert classification().split_validation(0.3)[1][1].bincount().tolist() == [3, 3, 3]


def test_validation_with_an_empty_part() -> None:
    for fraction in [0.0, 1.0, -0.1, 1.5, 0.001, 0.999, float("nan")]:
        with pytest.raises(ConfigurationError, match="leave at least one example in each part"):
            classification().split_validation(fraction)


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32 - 1),
)
def test_stratified_split_is_proportional(labels: list[int], fraction: float, seed: int) -> None:
    array = np.array(labels)
    first, second = stratified_split(array, fraction, seed)
    assert np.array_equal(np.sort(np.concatenate([first, second])), np.arange(len(labels)))
    assert len(second) == round(fraction * len(labels))
    for label, count in zip(*np.unique(array, return_counts=True), strict=True):
        assert abs((array[second] == label).sum() - fraction * count) < 1


def test_to_changes_floats_alone() -> None:
    data = regression().to(dtype=torch.float64)
    assert {t.dtype for t in (*data.train, *data.test, data.mean, data.std)} == {torch.float64}
    assert data.target_mean is not None
    assert data.target_mean.dtype == torch.float64
    labelled = classification().to(device="cpu", dtype=torch.float64)
    assert labelled.train[0].dtype == torch.float64
    assert labelled.train[1].dtype == torch.int64
    assert labelled.target_std is None


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        classification().name = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_describe() -> None:
    assert classification().describe() == "toy: 30 train and 6 test examples of shape 1, 3 classes"
    assert regression().describe().endswith("1 real target")


def test_a_data_set_is_shown_in_a_line():
    pytest.importorskip("sklearn")
    data = load("digits", subset=40)
    assert repr(data) == f"DataSet({data.describe()})"
    assert len(repr(data)) < 100
