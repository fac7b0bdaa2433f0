"""Fused functions written out: the numbers of the fused ones, with closed forms throughout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from network.dense import random
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from evigrad.network import Linearization, Recorder, plan

M, T, D = 3, 4, 6


def compared(model: nn.Module, *args: Any, **kwargs: Any) -> set[str]:
    """Asserts outputs and gradients of the fused function; gives the names that were recorded."""
    model = model.double().eval()
    leaves = [
        argument for argument in args if isinstance(argument, Tensor) and argument.requires_grad
    ]

    def results() -> list[Tensor]:
        outputs = [t for t in tensors(model(*args, **kwargs)) if t.is_floating_point()]
        total = sum(t.sin().sum() for t in outputs if t.requires_grad)
        assert isinstance(total, Tensor)
        return [*outputs, *torch.autograd.grad(total, leaves)]

    expected = results()
    recorder = Recorder(dict(model.named_parameters()), M)
    with recorder:
        recorded = results()
    for value, right in zip(recorded, expected, strict=True):
        assert value.shape == right.shape
        torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12)
    assert all(call.parts == 1 for call in recorder.calls)
    return {name for call in recorder.calls for name in call.names.values()}


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [] if value is None else [t for part in value for t in tensors(part)]


ALLOWED = torch.ones(T, T, dtype=torch.bool).tril()
PADDED = torch.tensor([[False] * 4, [False] * 3 + [True], [False, True, True, True]])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attn_mask": ~ALLOWED},
        {"attn_mask": ~ALLOWED, "is_causal": True},
        {"attn_mask": random(T, T, seed=3), "key_padding_mask": PADDED.double() * -9},
        {"attn_mask": random(M * 2, T, T, seed=3)},
        {"attn_mask": ~ALLOWED, "key_padding_mask": PADDED, "average_attn_weights": False},
    ],
)
def test_attention(settings: dict[str, Any]) -> None:
    for need_weights in [True, False]:
        for batch_first in [True, False]:
            model = nn.MultiheadAttention(D, 2, dropout=0.5, batch_first=batch_first)
            shape = (M, T, D) if batch_first else (T, M, D)
            x = random(*shape).requires_grad_()
            settings = {"need_weights": need_weights, **settings}
            names = {name for name, _ in model.named_parameters()}
            assert compared(model, x, x, x, **settings) == names
            other = random(*shape, seed=1).requires_grad_()
            assert compared(model, x, other, other, **settings) == names
            assert compared(model, x, x, other, **settings) == names


@pytest.mark.parametrize(
    "settings", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 4, "vdim": 5}]
)
def test_attention_that_is_left_alone(settings: dict[str, Any]) -> None:
    model = nn.MultiheadAttention(D, 2, batch_first=True, **settings)
    sizes = (D, settings.get("kdim", D), settings.get("vdim", D))
    inputs = [random(M, T, size).requires_grad_() for size in sizes]
    assert not compared(model, *inputs)


@pytest.mark.parametrize(
    "make",
    [
        lambda **kw: nn.LSTM(D, 3, num_layers=2, bidirectional=True, dropout=0.5, **kw),
        lambda **kw: nn.LSTM(D, 4, proj_size=3, bias=False, **kw),
        lambda **kw: nn.LSTM(D, 4, proj_size=3, **kw),
        lambda **kw: nn.GRU(D, 3, num_layers=2, dropout=0.5, **kw),
        lambda **kw: nn.GRU(D, 3, bias=False, bidirectional=True, **kw),
        lambda **kw: nn.RNN(D, 3, **kw),
        lambda **kw: nn.RNN(D, 3, nonlinearity="relu", bidirectional=True, **kw),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_recurrent(make: Callable[..., nn.RNNBase]) -> None:
    for started in [True, False]:
        for batch_first in [True, False]:
            model = make(batch_first=batch_first)
            x = random(*((M, T, D) if batch_first else (T, M, D))).requires_grad_()
            start: Any = None
            if started:
                runs = model.num_layers * (2 if model.bidirectional else 1)
                h = random(runs, M, model.proj_size or model.hidden_size, seed=1)
                cell = random(runs, M, model.hidden_size, seed=2)
                start = (h, cell) if isinstance(model, nn.LSTM) else h
            assert compared(model, x, start) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(make: Callable[..., nn.Module]) -> None:
    names = {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}
    assert compared(make(D, 3), random(M, D).requires_grad_()) == names


def test_packed_sequences_take_the_loop() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), 2)
            return self.head(self.rnn(pack_padded_sequence(x, lengths, batch_first=True))[1][-1])

    model, x = Packed().double().eval(), random(M, T, 2)
    weights = dict(model.named_parameters())
    jacobian_plan = plan(model, weights, x)
    assert jacobian_plan.describe()["rnn.weight_hh_l0"] == "generic: loop"
    vectors = random(M, 1, 2)
    rows = Linearization(model, weights, x, jacobian_plan, differentiable=False).rows(vectors)
    (expected,) = torch.autograd.grad(model(x[:1]), [weights["rnn.weight_hh_l0"]], vectors[:1, 0])
    torch.testing.assert_close(rows["rnn.weight_hh_l0"][0, 0], expected)
