"""The exact Hessian against torch.func.hessian."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from curvature.fakes import Plan, dense_log_det, flat_precision, random
from torch import Tensor, nn
from torch.func import functional_call

from evigrad.curvature import exact_hessian, make_structure
from evigrad.errors import NotPositiveDefiniteError
from evigrad.estimators import STRUCTURES

ONE = torch.ones((), dtype=torch.float64)


def hessian_statistic(structure, statistic, *arguments):
    with exact_hessian(*arguments) as hessian:
        return structure.accumulate_hessian(statistic, hessian)


TAKES_HESSIAN = [name for name, facts in STRUCTURES.items() if facts.takes_hessian]
LABELS = torch.tensor([0, 2, 1, 1])


class Net(nn.Module):
    """A hyperparameter (gate), a tied layer, and a parameter that the output does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.gate = nn.Parameter(torch.tensor([0.5, -0.3, 1.2]))
        self.middle = nn.Linear(3, 3, bias=False)
        self.again = nn.Linear(3, 3, bias=False)
        self.again.weight = self.middle.weight
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.gate
        return self.again(torch.tanh(self.middle(hidden)))


def case():
    torch.manual_seed(0)
    model = Net().double()
    weights = {n: p for n, p in model.named_parameters() if n != "gate"}
    return model, weights, random(4, 2, seed=3)


def negative_log_likelihood(labels: Tensor, temperature: Tensor = ONE):
    return lambda f: F.cross_entropy(f, labels, reduction="sum") / temperature


def dense_hessian(model, weights, x, temperature: Tensor):
    """The whole matrix by torch.func, with a graph into the gate."""
    sizes = [w.numel() for w in weights.values()]

    def value(flat: Tensor) -> Tensor:
        parts = [p.view_as(w) for p, w in zip(flat.split(sizes), weights.values(), strict=True)]
        f = functional_call(model, dict(zip(weights, parts, strict=True)), (x,))
        return negative_log_likelihood(LABELS, temperature)(f)

    flat = torch.cat([w.detach().flatten() for w in weights.values()])
    return torch.autograd.functional.hessian(value, flat, create_graph=True)


def parts_of(name: str, weights) -> list[Tensor]:
    sizes = [w.numel() for w in weights.values()]
    everything = torch.arange(sum(sizes))
    return {
        "full": [everything],
        "blockdiag": list(everything.split(sizes)),
        "diag": list(everything.split(1)),
    }[name]


@pytest.mark.parametrize("size", [4, 3], ids=["one batch", "micro-batches"])
@pytest.mark.parametrize("name", TAKES_HESSIAN)
def test_value_and_gradients(name, size):
    model, weights, x = case()
    temperature = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    structure = make_structure(name, weights, Plan())
    statistic = None
    for part, labels in zip(x.split(size), LABELS.split(size), strict=True):
        loss = negative_log_likelihood(labels, temperature)
        statistic = hessian_statistic(structure, statistic, model, weights, part, loss, True)
    assert statistic is not None
    precisions = {n: random(seed=i).exp().mul(20).requires_grad_() for i, n in enumerate(weights)}
    value = structure.log_det(statistic, precisions)
    hessian = dense_hessian(model, weights, x, temperature)
    p0 = flat_precision(precisions, weights)
    expected = torch.stack(
        [dense_log_det(hessian[i][:, i], p0[i]) for i in parts_of(name, weights)]
    ).sum()
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=0)
    leaves = [model.gate, temperature, *precisions.values()]
    got, want = torch.autograd.grad(value, leaves), torch.autograd.grad(expected, leaves)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-12)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", TAKES_HESSIAN)
def test_what_is_not_positive_definite_is_refused_with_what_to_do(name):
    model, weights, x = case()
    structure = make_structure(name, weights, Plan())
    statistic = hessian_statistic(
        structure, None, model, weights, x, negative_log_likelihood(LABELS)
    )
    p0 = {n: torch.tensor(1e-4, dtype=torch.float64) for n in weights}
    with pytest.raises(NotPositiveDefiniteError, match="Raise the prior precision, train longer"):
        structure.log_det(statistic, p0)


def test_a_loss_linear_in_the_weights_has_a_hessian_of_zero():
    model = nn.Linear(2, 1).double()
    weights = dict(model.named_parameters())
    structure = make_structure("full", weights, Plan())
    statistic = hessian_statistic(structure, None, model, weights, random(3, 2), torch.sum)
    assert torch.equal(statistic.blocks["all"], torch.zeros(3, 3, dtype=torch.float64))


def test_no_graph_unasked_and_nothing_left_on_the_model():
    model, weights, x = case()
    # One module under two names: functional_call alone would lose its parameters.
    model.again = model.middle
    parameters, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    structure = make_structure("full", weights, Plan())
    with torch.no_grad():
        statistic = hessian_statistic(
            structure, None, model, weights, x, negative_log_likelihood(LABELS)
        )
    assert not any(tensor.requires_grad for tensor in statistic.tensors())
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items())
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[n] is p and p.grad is None for n, p in parameters.items())
    pickle.dumps(model)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(2, 1, 3, dropout=0.0, batch_first=True)
        self.lstm = nn.LSTM(2, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.attention(x))[0][:, -1]


def test_attention_and_recurrence_have_second_derivatives():
    torch.manual_seed(0)
    model = Recurrent().double().eval()
    weights = dict(model.named_parameters())
    x = random(2, 3, 2)
    structure = make_structure("diag", weights, Plan())

    def loss(f: Tensor) -> Tensor:
        return f.square().sum()

    found = hessian_statistic(structure, None, model, weights, x, loss)
    # One direction of the LSTM's weights by differences of gradients.
    name, step = "lstm.weight_ih_l0", 1e-5
    ends = []
    for sign in (1, -1):
        moved = {n: w.detach().clone() for n, w in weights.items()}
        moved[name].view(-1)[3] += sign * step
        leaf = moved[name].requires_grad_()
        (grad,) = torch.autograd.grad(loss(functional_call(model, moved, (x,))), leaf)
        ends.append(grad.view(-1)[3])
    torch.testing.assert_close(
        found.blocks[name][3], (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8
    )
