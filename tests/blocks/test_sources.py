import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from evigrad.blocks.sources import as_source
from evigrad.errors import InputError

N = 7


class Squares(Dataset):
    """Item n is (n, n^2), as a tensor and a number."""

    def __init__(self, length=N, target=lambda n: n * n):
        self.length, self.target, self.read = length, target, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read += 1
        return torch.full((2,), float(index)), self.target(index)


def tensors(num_data=N):
    return torch.arange(num_data)[:, None].float().expand(-1, 2), torch.arange(num_data) ** 2


@pytest.mark.parametrize(
    "data",
    [
        tensors(),
        list(tensors()),
        TensorDataset(*tensors()),
        Squares(),
        Subset(Squares(12), range(N)),
        [(torch.full((2,), float(n)), n * n) for n in range(N)],
        [(np.full(2, n, dtype=np.float32), np.int64(n * n)) for n in range(N)],
        as_source(tensors()),
        tuple(part.numpy() for part in tensors()),
        [part.double().numpy() if n == 0 else part.numpy() for n, part in enumerate(tensors())],
    ],
    ids=[
        *("tuple", "list", "TensorDataset", "Dataset", "Subset", "pairs", "arrays", "Source"),
        *("pair of arrays", "doubles"),
    ],
)
def test_sources_agree(data):
    source = as_source(data)
    inputs, targets = source.fetch(torch.tensor([5, 0, 3]))
    assert len(source) == N
    assert torch.equal(inputs, torch.tensor([[5.0, 5.0], [0.0, 0.0], [3.0, 3.0]]))
    assert torch.equal(targets, torch.tensor([25, 0, 9]))
    assert torch.equal(source.labels(), torch.arange(N) ** 2)


def test_sources_keep_dtypes():
    tokens, images = torch.randint(9, (N, 4)), torch.rand(N, 1, 2, 2, dtype=torch.float64)
    inputs, targets = as_source((tokens, images)).fetch(torch.tensor([1]))
    assert torch.equal(inputs, tokens[1:2]) and torch.equal(targets, images[1:2])
    floats = as_source(Squares(target=lambda n: n / 2))
    assert torch.equal(floats.fetch(torch.tensor([1, 2]))[1], torch.tensor([0.5, 1.0]))
    with pytest.raises(InputError, match="integers"):
        floats.labels()
    small = as_source((tokens, torch.ones(N, dtype=torch.uint8))).labels()
    assert small.dtype == torch.int64
    with pytest.raises(InputError, match="shape"):
        as_source((tokens, images)).labels()


def test_a_data_set_is_read_once_for_its_labels():
    data = Squares(target=lambda n: n % 2)
    source = as_source(data)
    assert data.read == 1  # to see at once whether the items are pairs
    assert torch.equal(source.labels(), source.labels())
    assert data.read == 1 + N


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(1), 0)])


def test_data_that_cannot_be_used():
    for data, words in [
        ((torch.zeros(3, 1), torch.zeros(2)), "the same number of examples, got 3 and 2"),
        ((torch.zeros(0, 1), torch.zeros(0)), "empty"),
        ((torch.zeros(3, 1), torch.tensor(1.0)), "got a scalar"),
        ((torch.zeros(3),), "not (Tensor)"),
        ((torch.zeros(3), torch.zeros(3), torch.zeros(3)), "not (Tensor, Tensor, Tensor)"),
        ((np.zeros((3, 1)), np.array(["a", "b", "c"])), "'a' at index 0 is not a number"),
        ((torch.zeros(3), [0, None, 1]), "None at index 1 is not a number. If a label is missing"),
        ((torch.zeros(2), np.array([0.5, None])), "None at index 1 is not a number"),
        ((torch.zeros(3), [0, 2, 1]), "not (Tensor, list)"),
        ([(torch.zeros(2), 0), (torch.zeros(2), None)][1:], "mark missing labels with the"),
        ((torch.zeros(3, 1), (torch.zeros(3), torch.zeros(3))), "a tuple of 2 tensors"),
        ([(torch.zeros(2), {"a": torch.zeros(1), "b": torch.zeros(1)})], "a dict of 2 tensors"),
        (TensorDataset(torch.zeros(3, 1)), "not (Tensor)"),
        (torch.zeros(3, 2), "not a Tensor"),
        ({"x": torch.zeros(3), "y": torch.zeros(3)}, "not a dict"),
        (5, "not a int"),
        (None, "not a NoneType"),
        (iter([]), "not a list_iterator"),
        (Endless(), "which an IterableDataset does not support"),
        (DataLoader(Endless()), "which an IterableDataset does not support"),
        ([], "empty"),
        (Squares(0), "empty"),
        ([1, 2, 3], "Item 0 of the data set must be a pair (x, y), got a int"),
        ([("cat", 1)], "The x of item 0 is a str"),
        ([(torch.zeros(2), "cat")], "The y of item 0 is a str"),
    ]:
        with pytest.raises(InputError) as caught:
            as_source(data)
        assert words in str(caught.value)


def test_items_of_different_shapes():
    source = as_source([(torch.zeros(2), 0), (torch.zeros(3), 1)])
    with pytest.raises(InputError, match="All x must have the same shape to be stacked"):
        source.fetch(torch.tensor([0, 1]))
