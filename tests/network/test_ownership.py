"""Rows whose datum depends on the data: packed, sorted and dispatched ones are never mistaken."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn

from evigrad import Evidence, Memory
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Categorical
from evigrad.network import Linearization, check_separate, plan
from evigrad.network.ownership import traced
from evigrad.network.recorder import Recorder
from evigrad.priors import GaussianPrior


class Packed(nn.Module):
    """Tokens without their padding go through the layers in one long batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.embedding, self.inner = nn.Embedding(9, 5), nn.Linear(5, 6)
        self.outer = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        kept = x != 0
        h = torch.tanh(self.gate * self.inner(self.embedding(x)[kept]))
        return self.outer(h.new_zeros(len(x), 6).index_add(0, kept.nonzero()[:, 0], h))


class Net(nn.Module):
    """A layer on rows in an order of ``forward``'s choosing, with a gate in front."""

    def __init__(self, forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.first, self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self._forward = forward
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self._forward(self, torch.tanh(self.gate * self.first(x)), x))

    def act(self, h: Tensor) -> Tensor:
        return torch.tanh(self.layer(h))


def order_of(x: Tensor) -> Tensor:
    return x[:, 0].argsort(stable=True)


def matrix_of(x: Tensor) -> Tensor:
    return torch.eye(len(x), dtype=x.dtype)[order_of(x)]


def hats(x: Tensor) -> Tensor:
    """A permutation matrix of nothing but continuous arithmetic."""
    ranks = (x[:, None, 0] > x[None, :, 0]).sum(1)
    return (1 - (ranks[:, None] - torch.arange(len(x))).abs()).clamp(min=0).to(x)


def by_index(net: Any, h: Tensor, x: Tensor) -> Tensor:
    order = order_of(x)
    return net.act(h[order])[order.argsort()]


def by_scatter(net: Any, h: Tensor, x: Tensor) -> Tensor:
    order = order_of(x)
    return torch.zeros_like(h).index_copy(0, order, net.act(h.index_select(0, order)))


def by_assignment(net: Any, h: Tensor, x: Tensor) -> Tensor:
    order, result = order_of(x), torch.zeros_like(h)
    result[order] = net.act(h[order])
    return result


def by_product(net: Any, h: Tensor, x: Tensor) -> Tensor:
    matrix = matrix_of(x)
    return matrix.mT @ net.act(matrix @ h)


def by_einsum(net: Any, h: Tensor, x: Tensor) -> Tensor:
    """Experts with one place for each datum, as one-hot dispatch has them."""
    matrix = matrix_of(x)[None]
    return torch.einsum(
        "ern,erd->nd", matrix, net.act(torch.einsum("ern,nd->erd", matrix, h)[0])[None]
    )


def by_sum(net: Any, h: Tensor, x: Tensor) -> Tensor:
    matrix = hats(x)
    return (matrix[:, :, None] * net.act((matrix.mT[:, :, None] * h).sum(1))).sum(1)


def by_pieces(net: Any, h: Tensor, x: Tensor) -> Tensor:
    """Cut where Python says, and put together again."""
    order = order_of(x).tolist()
    result = net.act(torch.cat([h[i : i + 1] for i in order]))
    return torch.cat([result[order.index(i)][None] for i in range(len(x))])


def by_flip(net: Any, h: Tensor, x: Tensor) -> Tensor:
    return net.act(h.flip(0)).flip(0) if x[0, 0] > 0 else net.act(h)


def by_views(net: Any, h: Tensor, x: Tensor) -> Tensor:
    """Two halves of each datum, the halves first or the data."""
    halves = torch.stack((h, h.cos()), dim=0 if x[0, 0] > 0 else 1)
    result = net.act(halves.flatten(0, 1)).unflatten(0, halves.shape[:2])
    return result.sum(0 if x[0, 0] > 0 else 1)


def by_experts(net: Any, h: Tensor, x: Tensor) -> Tensor:
    """Two experts, one after the other; each datum is seen by one."""
    first = x[:, 1] > 0
    packed = torch.cat((net.act(h[first]), net.act(-h[~first])))
    return packed[torch.cat((first.nonzero(), (~first).nonzero()))[:, 0].argsort()]


WAYS = [
    by_index, by_scatter, by_assignment, by_product, by_einsum, by_sum, by_pieces, by_flip,
    by_views, by_experts,
]  # fmt: skip


def sorted_input(m: int, seed: int) -> Tensor:
    """The order that no way changes: on it every plan is made."""
    x = random(m, 3, seed=seed)
    x[:, 0] = x[:, 0].abs().sort().values.neg().flip(0)
    return x


@pytest.mark.each(1)
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_data_in_any_order(way: Any, differentiable: bool) -> None:
    torch.manual_seed(0)
    model = Net(way).eval()
    weights = weights_of(model, ["gate"])
    jacobian_plan = plan(model, weights, sorted_input(3, seed=2))
    x = random(7, 3, seed=1)
    jac = jacobian(model, weights, x)
    for order in (torch.arange(7), x[:, 0].argsort(), x[:, 0].argsort(descending=True)):
        for m in (1, 2, 4, 7):
            vectors, part = random(m, 2, 3), order[:m]
            pass_ = Linearization(model, weights, x[part], jacobian_plan, differentiable)
            expected = rows({name: of[part] for name, of in jac.items()}, vectors)
            assert_rows({n: r.detach() for n, r in pass_.rows(vectors).items()}, expected)


def evidence_of(model: nn.Module, estimator: str, n: int, micro_batch: int | None) -> Evidence:
    names = [name for name, _ in model.named_parameters() if name == "gate"]
    return Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=estimator,
        num_data=n,
        memory=Memory(micro_batch=micro_batch),
        hyperparameters=names,
    )


def value_and_gradient(evidence: Evidence, x: Tensor, y: Tensor) -> Tensor:
    for p in evidence.hyperparameters().values():
        p.grad = None
    value = evidence.backward(x, y).log_det
    grads = [p.grad for p in evidence.hyperparameters().values()]
    gradients = [g.flatten() for g in grads if g is not None]
    return torch.cat((torch.tensor([value], dtype=torch.float64), *gradients))


def issue_tokens() -> Tensor:
    x = torch.randint(1, 9, (12, 7), generator=torch.Generator().manual_seed(0))
    x[:4, 4:], x[4::2, 1:] = 0, 0  # tokens per datum 4, 4, 4, 4, 1, 7, 1, 7, …
    return x


@pytest.mark.parametrize("is_own", [True, False])
def test_one_position_of_each_datum_is_known_by_the_graph(is_own: bool) -> None:
    def forward(net: Net, h: Tensor, x: Tensor) -> Tensor:
        data_numbers, places = torch.arange(len(x)), x[:, 0, 0].abs().mul(9).long() % x.shape[1]
        if is_own:
            return net.act(h)[data_numbers, places]
        return net.act(h)[data_numbers.roll(1), places.roll(1)].roll(-1, 0)

    net, x = Net(forward), random(4, 3, 3)
    weights = weights_of(net, ["gate"])
    recorder = Recorder(weights, len(x))
    with recorder:
        f = net(x)
    layers = {call.names["weight"]: id(call) for call in recorder.calls if "weight" in call.names}
    owned_ids = traced(f, recorder.calls)[0]
    assert layers["last.weight"] in owned_ids
    assert (layers["layer.weight"] in owned_ids) == (layers["first.weight"] in owned_ids) == is_own
    vectors = random(4, 2, 3)
    linearization = Linearization(net, weights, x, plan(net, weights, x), differentiable=False)
    assert_rows(linearization.rows(vectors), rows(jacobian(net, weights, x), vectors))


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", ["ntk-N-C", "full-N-C", "blockdiag-N-C", "diag-N-C"])
@pytest.mark.parametrize("network", ["packed", "experts"])
def test_micro_batches_do_not_matter(network: str, estimator: str) -> None:
    torch.manual_seed(0)
    model, x = (
        (Packed(), issue_tokens()) if network == "packed" else (Net(by_experts), random(12, 3))
    )
    y = torch.arange(12) % 3
    # One datum at a time nothing is packed: the reference.
    expected = value_and_gradient(evidence_of(model, estimator, 12, 1), x, y)
    for size in (3, 8, 12):
        actual = value_and_gradient(evidence_of(model, estimator, 12, size), x, y)
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=5, max_size=5), st.integers(2, 5))
def test_any_packing(lengths: list[int], size: int) -> None:
    torch.manual_seed(0)
    model, x = Packed(), torch.randint(1, 9, (5, 4))
    x[torch.arange(4) >= torch.tensor(lengths)[:, None]] = 0
    y = torch.arange(5) % 3
    values = [
        float(evidence_of(model, "ntk-N-C", 5, micro_batch).estimate(x, y).log_det)
        for micro_batch in (1, size)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


class Branching(nn.Module):
    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return 2 * h if bool(x.max() > 3) else h


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(Branching())


MIXING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "branch": Branching(),
    "where": lambda h, x: torch.where(x.max() > 3, 2 * h, h),
    "scale": lambda h, x: h / x.abs().max().clamp(min=3),
    "item": lambda h, x: h * max(3.0, x.max().item()),
    "numpy": lambda h, x: h * max(3.0, float(x.numpy().max())),
    "gate": lambda h, x: h + torch.relu(x - 3).sum(),
    "neighbour": lambda h, x: h + torch.relu(x.roll(1, 0) - 3).sum(1, keepdim=True),
    "script": scripted(),
}


@pytest.mark.each(1)
@pytest.mark.parametrize("case", MIXING)
@pytest.mark.parametrize("size", [3, None])
def test_data_that_mix_in_some_batches(case: str, size: int | None) -> None:
    torch.manual_seed(0)
    model: Any = Net(lambda net, h, x: MIXING[case](h, x))
    model.mixing = MIXING[case]
    x, y = random(9, 3).clamp(-2, 2), torch.arange(9) % 3
    x[7, 1] = 4.0  # only one batch in three shows it
    if case == "neighbour" and size == 3:
        pytest.skip("two neighbours may come in one part of so few")
    with pytest.raises(ConfigurationError, match="with the other examples of"):
        evidence_of(model, "ntk-N-C", 9, size).estimate(x, y)
    later = evidence_of(model, "ntk-N-C", 9, size)
    for _ in range(3 if case != "neighbour" else 0):
        later.estimate(x.clamp(max=2), y)
        # Not only in passes that are checked whatever they do.
        with pytest.raises(ConfigurationError, match="with the other examples of"):
            later.estimate(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_close_decisions_are_no_mixing(dtype: torch.dtype) -> None:
    """What rounding decides otherwise in a part of a batch is not taken for mixing."""

    def tied(net: Any, h: Tensor, x: Tensor) -> Tensor:
        # As if numbers were rounded in another way in batches of another size.
        noise = 1e-7 * len(x) if x.dtype == dtype else 0.0
        return torch.where((x[:, :1] + noise > 3e-7), h, -h)

    model, x, generator = (
        Net(tied).to(dtype),
        random(8, 3).to(dtype),
        torch.Generator().manual_seed(0),
    )
    x[:, 0] = 0.0
    if dtype == torch.float32:
        check_separate(model, x, model(x), generator)
        return
    with pytest.raises(ConfigurationError, match="with the other examples of"):
        check_separate(model, x, model(x), generator)
