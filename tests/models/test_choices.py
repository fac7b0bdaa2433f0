"""One reward model for the items of a comparison, against the same network written out twice."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, Outputs, reference
from evigrad.data import Pairs
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import Categorical
from evigrad.models import Choices
from evigrad.priors import GaussianPrior

N = 6
X = torch.randn(N, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 1, 0, 1, 1])


class Reward(nn.Module):
    """A network with a hyperparameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.2))
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x * self.gate.exp())))


class Twice(nn.Module):
    """The scores of both items, by two calls."""

    def __init__(self, reward: nn.Module) -> None:
        super().__init__()
        self.reward = reward

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.reward(x[:, 0]), self.reward(x[:, 1])], 1)


def reward() -> Reward:
    torch.manual_seed(0)
    return Reward().double()


def evidence_of(model: nn.Module, estimator: str, gate: str = "gate") -> Evidence:
    return Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise", precision=0.7),
        estimator=estimator,
        num_data=N,
        hyperparameters=[gate],
        generator=0,
    )


ESTIMATORS = ["ntk-N-C", "kfac-N-C", "full-N-C", "diag-N-C", "kfac-3-1", "ntk-4-rows-anchored"]


@pytest.mark.each(1)
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_value_and_gradient_are_those_of_dense_matrices(estimator: str, by_name: bool) -> None:
    model = Choices(reward(), items=("a", "b")) if by_name else Choices(reward())
    x = {"a": X[:, 0], "b": X[:, 1]} if by_name else X
    written_out = evidence_of(Twice(reward()), estimator, "reward.gate")
    evidence = evidence_of(model, estimator)
    (block,) = evidence.blocks((x, Y)).take(1)
    (of_other,) = written_out.blocks((X, Y)).take(1)
    torch.testing.assert_close(block.indices, of_other.indices)
    expected = reference.log_evidence(written_out, of_other)
    gradients = reference.gradients(written_out, of_other)
    assert evidence.backward(block).log_evidence == pytest.approx(expected.item(), rel=1e-9)
    for name, parameter in evidence.hyperparameters().items():
        gradient = gradients[name.replace("model.", "model.reward.")]
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-7, atol=1e-9)
    paths = {report.name: report.rows for report in evidence.describe()}
    assert list(paths) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert not any("generic" in path for path in paths.values())


@pytest.mark.parametrize("structure", ["full", "ntk", "diag", "kfac"])
def test_the_posterior_is_that_of_dense_matrices(structure: str) -> None:
    """A linear reward, so that Kronecker factors have a short formula."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 1, bias=False).double()
    model = Choices(linear)
    prior = GaussianPrior(precision=0.7)
    evidence = Evidence(model, Categorical(), prior, estimator="ntk-N-C", num_data=N)
    assert list(evidence.weights()) == ["weight"]
    p = linear(X)[:, :, 0].softmax(1).detach()
    between = X[:, 0] - X[:, 1]
    spread = p[:, 0] * p[:, 1]
    hessian = torch.einsum("n,ni,nj->ij", spread, between, between)
    if structure == "diag":
        hessian = hessian.diagonal().diag()
    if structure == "kfac":  # each item is a position with the curvature of its own score
        inputs = torch.einsum("nti,ntj->ij", X, X)
        hessian = 2 * spread.sum() * inputs / (2 * N)
    covariance = X @ torch.linalg.inv(hessian + 0.7 * torch.eye(3).double()) @ X.mT
    prediction = evidence.posterior((X, Y), structure=structure)(X)
    torch.testing.assert_close(prediction.covariance, covariance, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(prediction.probabilities.sum(1), torch.ones(N).double())


def test_two_items_are_a_bradley_terry_model() -> None:
    r = Choices(reward())(X)
    expected = (r[:, 0] - r[:, 1]).sigmoid()
    torch.testing.assert_close(Categorical().probabilities(r)[:, 0], expected)


class Tokens(nn.Module):
    """A reward of token ids and a mask, returned as the logits of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 3), nn.Linear(3, 1)

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        vectors = self.words(ids) * mask[..., None]
        return SimpleNamespace(logits=self.out(vectors.sum(1))[:, 0])


def test_items_may_be_what_a_model_takes() -> None:
    torch.manual_seed(0)
    tokens, ids = Tokens().double(), torch.randint(5, (N, 3, 4))
    mask = (ids > 0).double()
    expected = torch.stack([tokens(ids[:, k], mask[:, k]).logits for k in range(3)], 1)
    stacked = {"ids": ids, "mask": mask}
    for model, x in (
        (Choices(tokens), stacked),
        (Choices(Outputs(tokens)), stacked),
        (Choices(tokens, items=(0, 1, 2)), tuple((ids[:, k], mask[:, k]) for k in range(3))),
        (
            Choices(tokens, items=("first", "second", "third")),
            # Items may have other lengths, and other entries are ignored.
            {
                "third": {"ids": ids[:, 2], "mask": mask[:, 2]},
                "first": {name: nn.functional.pad(v[:, 0], (0, 2)) for name, v in stacked.items()},
                "second": {"ids": ids[:, 1], "mask": mask[:, 1]},
                "length": torch.zeros(N),
            },
        ),
    ):
        assert [name for name, _ in model.named_parameters()] == [
            "words.weight",
            "out.weight",
            "out.bias",
        ]
        evidence = Evidence(model, Categorical(), GaussianPrior(), estimator="ntk-N-C", num_data=N)
        assert evidence.estimate(x, Y).log_det > 0
        prediction = evidence.posterior((x, Y), structure="full")(x)
        torch.testing.assert_close(prediction.outputs, expected.detach())


def test_rows_of_a_data_set_train_a_reward() -> None:
    """Named items, from a data set of mappings, in a whole run."""
    generator = torch.Generator().manual_seed(0)
    items = torch.randn(400, 2, 3, generator=generator)
    true = items[..., 0] - 0.5 * items[..., 1]
    chosen = (torch.rand(400, generator=generator) > (true[:, 0] - true[:, 1]).sigmoid()).long()
    rows = [
        {"left": pair[0], "right": pair[1], "chosen": int(label)}
        for pair, label in zip(items, chosen, strict=True)
    ]
    torch.manual_seed(0)
    linear = nn.Linear(3, 1)
    data = Pairs(rows, x=("left", "right"), y="chosen")
    result = evigrad.fit(
        Choices(linear, items=("left", "right")), data,
        schedule=evigrad.Schedule(epochs=12), optimization=evigrad.Optimization(lr=0.05),
        progress=False,
    )  # fmt: skip
    learned = linear(items)[..., 0].detach().flatten()
    correlation = torch.corrcoef(torch.stack([learned, true.flatten()]))[0, 1]
    assert float(correlation) > 0.97
    assert any(name == "precision/weight" for name in result.history[-1])


def test_what_is_refused() -> None:
    broken: Any
    for broken in ("ab", ("a",), ()):
        with pytest.raises(ConfigurationError, match="items must name at least two entries"):
            Choices(reward(), items=broken)
    for broken in (X[:, 0, 0], X[:, :1], {"x": X, "y": X[:, :1].repeat(1, 3, 1)}):
        with pytest.raises(InputError, match="Dimension 1 of each input tensor must count"):
            Choices(reward())(broken)
    with pytest.raises(InputError, match=r"one score per item, in the shape \(12, 1\), got"):
        Choices(nn.Linear(3, 2).double())(X)
    with pytest.raises(InputError, match="items='b' of the inputs"):
        Choices(reward(), items=("a", "b"))({"a": X[:, 0]})
    assert "items=('a', 'b')" in repr(Choices(reward(), items=("a", "b")))
