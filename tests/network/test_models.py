"""Whole networks, whatever their modules do with their parameters, against the dense Jacobian."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from network.dense import assert_rows, jacobian, random, rows, weights_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint
from zoo import HYPERPARAMETERS

from evigrad.errors import InputError
from evigrad.network import Linearization, plan

LINEAR = "linear"
VMAP, LOOP = "generic: vmap", "generic: loop"


def check(model: Any, x: Tensor, expected_words: dict[str, str] | None = None) -> None:
    """Right rows for all weights, by the expected paths."""
    model = model.double().eval()
    weights = weights_of(model, HYPERPARAMETERS)
    jacobian_plan = plan(model, weights, x[:3])
    words = jacobian_plan.describe()
    assert list(words) == list(weights)
    for name, word in (expected_words or {}).items():
        assert words[name] == word, name
    f = model(x.clone()).detach()
    jac = jacobian(model, weights, x)
    for m, k in ((len(x), 1), (2, 4), (1, 2)):
        vectors = random(m, k, f.shape[1], seed=k)
        linearization = Linearization(model, weights, x[:m], jacobian_plan, differentiable=False)
        torch.testing.assert_close(linearization.outputs, f[:m], rtol=1e-12, atol=1e-12)
        expected = rows({name: j[:m] for name, j in jac.items()}, vectors)
        assert_rows(linearization.rows(vectors), expected)
        every_second = list(weights)[::2]
        assert_rows(
            linearization.rows(vectors, every_second),
            {name: expected[name] for name in every_second},
        )


class Net(nn.Module):
    """A network whose forward pass is a function of itself and x."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **modules: object) -> None:
        super().__init__()
        for name, value in modules.items():
            setattr(self, name, value)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def parameter(*shape: int, seed: int = 5) -> nn.Parameter:
    return nn.Parameter(random(*shape, seed=seed))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(need_weights: bool, batch_first: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        h = self.attention(x, x, x, need_weights=need_weights)[0]
        return self.head((h if batch_first else h.transpose(0, 1)).flatten(1))

    attention = nn.MultiheadAttention(4, 2, batch_first=batch_first)
    net: Any = Net(forward, attention=attention, head=nn.Linear(12, 2))
    check(net, random(4, 3, 4), {f"attention.{name}": LINEAR for name in attention.state_dict()})


@pytest.mark.each(1)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("frozen", [(), ("layers.0",), ("layers.1",)])
def test_transformer_encoder(norm_first: bool, frozen: tuple[str, ...]) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for name, p in encoder.named_parameters():
        p.data = p + random(*p.shape, seed=len(name)) / 3
        p.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)
    net = nn.Sequential(encoder, nn.Flatten(), nn.Linear(12, 2))
    words = {name: "layer_norm" if "norm" in name else LINEAR for name, _ in net.named_parameters()}
    check(
        net, random(4, 3, 4), {n: w for n, w in words.items() if net.get_parameter(n).requires_grad}
    )


@pytest.mark.parametrize("length", [3, 4])
def test_networks_with_the_time_first(length: int) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.layer(self.embed(x.transpose(0, 1)))
        return self.head(self.rnn(h)[0].mean(0))

    layer = nn.TransformerEncoderLayer(4, 2, 6)
    net: Any = Net(forward, embed=nn.Embedding(5, 4), layer=layer, rnn=nn.GRU(4, 3))
    net.head = nn.Linear(3, 2)
    kinds = {"norm": "layer_norm", "embed": "embedding", "_hh": f"{length} x linear"}
    words = {
        name: next((word for part, word in kinds.items() if part in name), LINEAR)
        for name, _ in net.named_parameters()
    }
    check(net, torch.arange(4 * length).reshape(4, length) % 5, words)


def test_transformer_decoder() -> None:
    layer = nn.TransformerDecoderLayer(4, 2, 6, batch_first=True)
    net: Any = Net(lambda self, x: self.head(self.layer(x, x[:, :2]).flatten(1)), layer=layer)
    net.head = nn.Linear(12, 2)
    words = {"self_attn.in_proj_weight": LINEAR, "multihead_attn.in_proj_weight": "2 x linear"}
    words |= {"linear1.weight": LINEAR, "norm3.bias": "layer_norm"}
    check(net, random(4, 3, 4), {f"layer.{name}": word for name, word in words.items()})


@pytest.mark.each(1)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "rnn",
    [
        lambda **kw: nn.LSTM(2, 3, num_layers=2, bidirectional=True, **kw),
        lambda **kw: nn.LSTM(2, 4, proj_size=3, **kw),
        lambda **kw: nn.GRU(2, 3, **kw),
        lambda **kw: nn.RNN(2, 3, nonlinearity="relu", bias=False, **kw),
    ],
)
def test_recurrent(rnn: Callable[..., nn.RNNBase], batch_first: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.rnn(x if batch_first else x.transpose(0, 1))[0]
        return self.head(h[:, -1] if batch_first else h[-1])

    recurrent: Any = rnn(batch_first=batch_first)
    width = (recurrent.proj_size or recurrent.hidden_size) * (2 if recurrent.bidirectional else 1)
    net: Any = Net(forward, embed=nn.Linear(2, 2), rnn=recurrent, head=nn.Linear(width, 2))
    check(
        net,
        random(4, 5, 2),
        {"rnn.weight_ih_l0": LINEAR, "rnn.weight_hh_l0": "5 x linear", "embed.weight": LINEAR},
    )


def test_recurrent_cell_called_in_a_loop() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 3, dtype=x.dtype)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)

    check(Net(forward, cell=nn.GRUCell(2, 3), head=nn.Linear(3, 2)), random(4, 3, 2))


def test_parameters_outside_any_layer() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, 2), x], dim=1) + self.position
        h = torch.einsum("ntd,dh->nth", x, self.w).tanh().mean(1)
        return h @ self.v + self.offset[0]

    net: Any = Net(
        forward,
        token=parameter(1, 1, 2),
        position=parameter(1, 4, 2),
        w=parameter(2, 3),
        v=parameter(3, 2),
        offset=parameter(2, 2),
    )
    check(net, random(4, 3, 2), {"position": "add", "token": "expand", "w": VMAP, "offset": VMAP})


def test_embedding_tied_to_the_output() -> None:
    net: Any = Net(
        lambda self, x: F.linear(self.mix(self.embed(x)).tanh().mean(1), self.embed.weight, self.b),
        embed=nn.Embedding(5, 3),
        mix=nn.Linear(3, 3),
        b=parameter(5),
    )
    x = torch.tensor([[0, 1], [2, 2], [4, 0], [3, 1]])
    check(net, x, {"embed.weight": "embedding + linear", "b": LINEAR})


def test_weight_tied_through_its_transpose() -> None:
    """One use has a closed form, the other none: the parameter must go the generic way wholly."""
    net: Any = Net(
        lambda self, x: F.linear(self.enc(x).tanh(), self.enc.weight.t()), enc=nn.Linear(3, 4)
    )
    check(net, random(4, 3), {"enc.weight": VMAP, "enc.bias": LINEAR})


def test_modules_and_parameters_under_several_names() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), first, nn.Linear(3, 2))
    check(net, random(4, 3), {"0.weight": "3 x linear", "0.bias": "2 x linear", "2.bias": LINEAR})


@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.LeakyReLU(0.1, inplace=True)])
def test_in_place_activations_from_the_first_layer_on(activation: nn.Module) -> None:
    net = nn.Sequential(
        activation, nn.Linear(3, 4), activation, nn.Linear(4, 4), activation, nn.Linear(4, 2)
    )
    x = random(4, 3)
    before = x.clone()
    check(net, x, {"1.weight": LINEAR, "3.weight": LINEAR})
    assert torch.equal(x, before)


def test_input_changed_in_place() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.layer(x.sub_(0.5).mul_(2)).tanh()

    x = random(4, 3)
    before = x.clone()
    check(Net(forward, layer=nn.Linear(3, 2)), x, {"layer.weight": LINEAR})
    assert torch.equal(x, before)


def test_use_whose_input_changes_afterwards() -> None:
    """The recorded input is not what the layer saw, so the closed form must not be used."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = x.sin()
        z = h + self.shift
        h.zero_()
        return z.tanh() + h

    check(Net(forward, shift=parameter(3)), random(4, 3), {"shift": VMAP})


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


def test_parametrizations() -> None:
    custom = nn.Linear(3, 3)
    parametrize.register_parametrization(custom, "weight", Symmetric())
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 3)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(3, 3)),
        nn.Tanh(),
        custom,
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(3, 2)),
    )
    weight = "4.parametrizations.weight.original"
    check(net, random(4, 3), {"0.bias": LINEAR, "4.bias": LINEAR, weight: VMAP})


def test_scaled_weight() -> None:
    """A product of two parameters has no data in dim 0, whatever it has there."""
    net: Any = Net(lambda self, x: F.linear(x, self.scale * self.w).tanh(), scale=parameter(3, 1))
    net.w = parameter(3, 3)
    check(net, random(3, 3), {"scale": VMAP, "w": VMAP})


def test_frozen_and_unused_layers() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.dead_end(x)
        return self.c(self.b(self.a(x).tanh()).tanh())

    net: Any = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 2))
    net.dead_end, net.never = nn.Linear(3, 1), nn.Linear(3, 1)
    net.stray = parameter(2)
    net.b.requires_grad_(False)
    net.a.bias.requires_grad_(False)
    words = {"dead_end.weight": "unused", "never.bias": "unused", "stray": "unused"}
    check(net, random(4, 3), words | {"a.weight": LINEAR, "c.weight": LINEAR})


def test_output_without_any_weight() -> None:
    net: Any = Net(lambda self, x: x.sin(), w=parameter(2))
    with pytest.raises(InputError, match="No weight has a derivative"):
        check(net, random(4, 3), {"w": "unused"})


def test_output_behind_a_stop_gradient() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.a(x)
        return self.b(h + self.c(x).detach())

    net: Any = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2), c=nn.Linear(3, 3))
    check(net, random(4, 3), {"a.weight": "unused", "c.weight": "unused", "b.weight": LINEAR})


@pytest.mark.parametrize("positions", [1, 2, 3, 4, 5])
def test_sequence_first_inside(positions: int) -> None:
    """Some of these T equal the number of data: in planning, in the block, in a micro-batch."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x.transpose(0, 1)).tanh()) + self.shift
        return self.head(h.transpose(0, 1).flatten(1))

    net: Any = Net(forward, inner=nn.Linear(2, 2), norm=nn.LayerNorm(2), shift=parameter(2))
    net.head = nn.Linear(2 * positions, 2)
    words = {"inner.weight": LINEAR, "norm.weight": "layer_norm", "shift": "add"}
    check(net, random(5, positions, 2), words)
    # A single datum has them too.
    model, x = net.double().eval(), random(3, positions, 2)
    weights = weights_of(model)
    one = Linearization(model, weights, x[:1], plan(model, weights, x), differentiable=False)
    assert all(one.is_closed(name) for name in weights)


@pytest.mark.parametrize("windows", [1, 2, 3])
def test_windows_in_the_batch_dimension(windows: int) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.inner(x.reshape(len(x) * windows, 2)).tanh()
        return self.head(h.reshape(len(x), -1))

    net: Any = Net(forward, inner=nn.Linear(2, 3), head=nn.Linear(3 * windows, 2))
    check(net, random(5, windows, 2), {"inner.weight": LINEAR})


def test_data_in_another_order_inside() -> None:
    """Dim 0 has the right length, but its entries are not the data in their order."""

    def forward(self: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.head(self.inner(x[order]).tanh()[order.argsort()])

    net: Any = Net(forward, inner=nn.Linear(3, 3), head=nn.Linear(3, 2))
    x = random(5, 3)
    x = x[x[:, 0].argsort()]  # the probe comes in the very order
    check(net, x, {"inner.weight": VMAP, "head.weight": LINEAR})


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x * w) ** 3

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        inner = 3 * grad_outputs[0] * (x * w) ** 2
        return inner * w, (inner * x).sum(0)


def test_custom_function() -> None:
    net: Any = Net(
        lambda self, x: self.head(Cube.apply(x, self.w)), w=parameter(3), head=nn.Linear(3, 2)
    )
    check(net, random(4, 3), {"w": LOOP, "head.weight": LINEAR})


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_module() -> None:
    inner = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    net = nn.Sequential(nn.Linear(3, 3), inner.double(), nn.Tanh(), nn.Linear(3, 2))
    check(net, random(4, 3), {"0.weight": LINEAR, "3.weight": LINEAR})


@pytest.mark.parametrize("reentrant", [False])
def test_checkpointed_layers(reentrant: bool) -> None:
    net: Any = Net(
        lambda self, x: self.head(checkpoint(self.body, x, use_reentrant=reentrant)),
        body=nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
        head=nn.Linear(3, 2),
    )
    check(net, random(4, 3))


def test_function_transform_inside() -> None:
    """A network whose output is a gradient of another one."""

    def forward(self: Any, x: Tensor) -> Tensor:
        slope = torch.func.vmap(torch.func.grad(lambda v: self.energy(v).sin().sum()))
        return self.head(slope(x))

    net: Any = Net(forward, energy=nn.Linear(3, 3), head=nn.Linear(3, 2))
    check(net, random(4, 3), {"head.weight": LINEAR})


# PyTorch says so of Python 3.13.0 alone.
@pytest.mark.filterwarnings("ignore:Guards may run slower")
def test_compiled_model() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    check(torch.compile(net, backend="eager"), random(4, 3))


def test_embeddings_that_change_their_weight_or_gradient() -> None:
    net: Any = Net(lambda self, x: self.head(self.embed(x).flatten(1)), head=nn.Linear(4, 2))
    net.embed = nn.Embedding(5, 2, max_norm=100.0)
    x = torch.tensor([[0, 1], [2, 2], [4, 0], [3, 1]])
    check(net, x, {"head.weight": LINEAR})


def test_data_dependent_branches() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        rows = [self.a(r) if r[0, 0] > 0 else self.b(r) for r in x.split(1)]
        return self.head(torch.cat(rows).tanh())

    net: Any = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3), head=nn.Linear(3, 2))
    x = random(5, 3)
    assert (x[:, 0] > 0).any() and (x[:, 0] < 0).any()
    check(net, x, {"a.weight": LOOP, "head.weight": LINEAR})


def test_experts_chosen_by_the_data() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        choice = (x[:, 0] > 0).long()
        for i, expert in enumerate((self.a, self.b)):
            mine = (choice == i).nonzero()[:, 0]
            out = out.index_add(0, mine, expert(x[mine]))
        return self.head(out.tanh())

    net: Any = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3), head=nn.Linear(3, 2))
    check(net, random(5, 3), {"a.weight": LOOP, "head.weight": LINEAR})


def test_float32() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 4)).eval()
    x = random(5, 1, 6, 6).float()
    weights = weights_of(net)
    jacobian_plan = plan(net, weights, x)
    assert set(jacobian_plan.describe().values()) == {"conv2d", "linear"}
    vectors = random(5, 2, 4).float()
    actual = Linearization(net, weights, x, jacobian_plan, False).rows(vectors)
    expected = rows(jacobian(net, weights, x), vectors)
    for name, e in expected.items():
        assert actual[name].dtype == torch.float32
        torch.testing.assert_close(actual[name], e, rtol=1e-4, atol=1e-5)


def test_autocast_inside_is_not_recorded() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
        return self.b(h.float())

    net: Any = Net(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2)).eval()
    x = random(5, 3).float()
    jacobian_plan = plan(net, weights_of(net), x)
    words = jacobian_plan.describe()
    assert words["a.weight"].startswith("generic") and words["b.weight"] == LINEAR


def pruned(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", amount=0.4)
    return layer


# Modules without a closed form, or with one for a part of their parameters.
FURTHER = {
    "transposed1d": (lambda: nn.ConvTranspose1d(2, 2, 3, stride=2), (2, 4)),
    "transposed3d": (lambda: nn.ConvTranspose3d(1, 2, 2), (1, 2, 2, 2)),
    "pruned": (lambda: pruned(nn.Linear(3, 3)), (3,)),
    "weight norm by a hook": (lambda: nn.utils.weight_norm(nn.Linear(3, 3)), (3,)),
    "instance norm": (lambda: nn.InstanceNorm1d(2, affine=True), (2, 4)),
    "pooling": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)),
        (1, 6, 6),
    ),
    "unflattened": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 2)),
        (4,),
    ),
    "transformer": (
        lambda: Net(
            lambda self, x: self.layer(x, x[:, 1:]),
            layer=nn.Transformer(4, 2, 1, 1, 5, batch_first=True),
        ),
        (3, 4),
    ),
    "bilinear": (
        lambda: Net(lambda self, x: self.layer(x, x.sin()), layer=nn.Bilinear(3, 3, 2)),
        (3,),
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", FURTHER)
def test_further_modules(name: str) -> None:
    build, shape = FURTHER[name]
    body, x = build().double().eval(), random(4, *shape)
    features = body(x).flatten(1).shape[1]
    check(
        nn.Sequential(body, nn.Tanh(), nn.Flatten(), nn.Linear(features, 2)),
        x,
        {"3.weight": LINEAR},
    )


def test_embedding_bag() -> None:
    net = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Tanh(), nn.Linear(3, 2))
    check(net, torch.tensor([[0, 1], [2, 2], [4, 0], [3, 1]]), {"2.weight": LINEAR})


def test_padding_mask_made_of_the_input() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.encoder(self.embed(x), src_key_padding_mask=x == 0)
        return self.head(h.sum(1))

    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)
    net: Any = Net(forward, embed=nn.Embedding(5, 4), encoder=nn.TransformerEncoder(layer, 1))
    net.head = nn.Linear(4, 2)
    x = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 1, 2], [2, 2, 0]])
    check(net, x, {"embed.weight": "embedding", "head.weight": LINEAR})
