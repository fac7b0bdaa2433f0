"""Items that are mappings or tuples with more than two entries."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import evigrad
from evigrad.data import Pairs
from evigrad.errors import InputError
from evigrad.likelihoods import Categorical, Gaussian, Joint, Poisson, Weighted

N = 40
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
ROWS = [{"image": X[i], "label": int(Y[i]), "file": f"{i}.png"} for i in range(N)]


class Batches:
    """Rows that are read in batches, as of a Hugging Face data set."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        self.sizes.append(len(indices))
        return [ROWS[index] for index in indices]


class OfDictionary(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.names = nn.Linear(3, 2), names

    def forward(self, x: Any) -> Tensor:
        parts = [x[name] for name in self.names] if self.names else [x]
        outputs: Tensor = sum(self.layer(part) for part in parts)  # pyright: ignore[reportAssignmentType]
        return outputs


def weights(data: Any, *names: str) -> Tensor:
    """The weights after a short training."""
    schedule = evigrad.Schedule(epochs=3, batch_size=10, burn_in=1, every=1, steps=2)
    model = OfDictionary(*names)
    evigrad.fit(model, data, estimator="ntk-20-1", schedule=schedule, progress=False)
    return nn.utils.parameters_to_vector(model.parameters())


def test_mappings_tuples_and_batches_train_like_pairs() -> None:
    expected = weights([(x, int(y)) for x, y in zip(X, Y, strict=True)])
    batches = Batches()
    pairs = Pairs(ROWS, "image", y="label")
    triples = Pairs([(x, "text", int(y)) for x, y in zip(X, Y, strict=True)], 0, y=2)
    for data in (pairs, triples, Pairs(batches, x="image", y="label")):
        assert torch.equal(weights(data), expected)
    assert max(batches.sizes) > 1
    assert torch.equal(weights(DataLoader(pairs, batch_size=10)), expected)


def test_several_inputs_are_a_dictionary() -> None:
    rows = [{"a": x, "b": -x, "c": 2 * x, "y": int(y)} for x, y in zip(X, Y, strict=True)]
    inputs, target = Pairs(rows, ["a", "c"], y="y")[3]
    assert list(inputs) == ["a", "c"] and target == int(Y[3])
    assert list(Pairs(rows, y="y")[0][0]) == ["a", "b", "c"]
    expected = weights(({"a": X, "c": 2 * X}, Y), "a", "c")
    torch.testing.assert_close(weights(Pairs(rows, ["a", "c"], y="y"), "a", "c"), expected)


def test_errors_name_the_fields() -> None:
    with pytest.raises(
        InputError, match="Item 0 .* no field 'labels'. Its fields are 'image', 'label', 'file'"
    ):
        weights(Pairs(ROWS, "image", y="labels"))
    with pytest.raises(InputError, match="no field 'x'"):
        weights(Pairs(ROWS, ["image", "x"], y="label"))
    with pytest.raises(InputError, match="Item 0 of the data set must be a mapping or a tuple"):
        weights(Pairs([1.0, 2.0], 0, y=1))
    with pytest.raises(
        InputError, match=r"got a dict with the fields 'image', 'label', 'file'. .*Pairs\(dataset"
    ):
        weights(ROWS)
    with pytest.raises(InputError, match="got a tuple with the fields 0, 1, 2"):
        weights([(x, 1, 2) for x in X])


def test_several_targets_are_in_the_order_of_the_likelihood() -> None:
    counts, hours = torch.arange(N) % 4, torch.rand(N) + 0.5
    rows = [(X[i], int(counts[i]), float(hours[i])) for i in range(N)]
    joint = Joint({"kind": (2, Categorical()), "size": (2, Gaussian())})
    of_heads = [{"x": X[i], "kind": int(Y[i]), "size": X[i, :2].numpy()} for i in range(N)]
    for likelihood, data, expected in (
        (
            Poisson(exposure=True),
            Pairs(rows, x=0, y=[1, 2]),
            Poisson(exposure=True).targets(counts, exposure=hours),
        ),
        (
            joint,
            Pairs(of_heads, y=["kind", "size"], x="x"),
            joint.targets({"kind": Y, "size": X[:, :2]}),
        ),
        (
            Weighted(Categorical()),
            Pairs([(x, y, 0.5) for x, y in zip(X, Y, strict=True)], x=0, y=(1, 2)),
            Weighted(Categorical()).targets(Y, torch.full((N,), 0.5)),
        ),
    ):
        assert torch.equal(torch.stack([data[i][1] for i in range(N)]), expected)
        torch.manual_seed(0)
        model = nn.Linear(3, {"poisson": 1, "joint": 4, "weighted": 2}[likelihood.name])
        schedule = evigrad.Schedule(epochs=2, batch_size=10, burn_in=0, every=1, steps=1)
        result = evigrad.fit(model, data, likelihood=likelihood, schedule=schedule, progress=False)
        assert result.history[-1]["hyper_steps"] == 2
    with pytest.raises(InputError, match="The targets of item 0 must be numbers, got 'a.png', 1"):
        Pairs([{"file": "a.png", "n": 1, "x": 0.0}], x="x", y=["file", "n"])[0]
    with pytest.raises(InputError, match="has no field 'hours'"):
        Pairs(ROWS, x="image", y=["label", "hours"])[0]
