"""Tiny networks with every kind of module, each with a gate and, for real inputs, an input scale.

``build()`` gives a float64 network whose parameters ``gate`` and ``input_scale`` are meant as
hyperparameters of the forward pass, and inputs for it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

OUTPUTS = 3
HYPERPARAMETERS = ("gate", "input_scale")


class Gated(nn.Module):
    """input · e^scale → body → flatten → gate → linear head."""

    def __init__(self, body: nn.Module, shape: tuple[int, ...], tokens: bool = False) -> None:
        super().__init__()
        self.body = body
        if not tokens:
            self.input_scale = nn.Parameter(torch.tensor(0.3))
        self.tokens = tokens
        example = torch.zeros(1, *shape, dtype=torch.long) if tokens else torch.zeros(1, *shape)
        features = body.eval()(example).flatten(1).shape[1]
        self.gate = nn.Parameter(torch.linspace(-1, 1, features))
        self.head = nn.Linear(features, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        if not self.tokens:
            x = x * self.input_scale.exp()
        return self.head(torch.tanh(self.body(x).flatten(1) * torch.sigmoid(self.gate)))


class LooseParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(3, 4) / 2)
        self.shift = nn.Parameter(torch.randn(4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.einsum("ni,io->no", x, self.matrix) + self.shift) * self.shift.mean()


class BiasAndScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))
        self.bias = nn.Parameter(torch.randn(3))
        self.offset = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.bias) * self.scale + (x - self.offset)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.shared = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.first(torch.tanh(self.shared(x)))))


class OutOfOrder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.first = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 4)
        self.middle = nn.Linear(4, 4)
        self.other = nn.Linear(3, 4)
        self.other.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.encode(x))
        return (
            torch.tanh(self.middle(h)) + torch.tanh(self.other(x)) + F.linear(x, self.encode.weight)
        )


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, padding_idx=0)
        self.mix = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.mix(self.embed(x))), self.embed.weight)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding="same", padding_mode="circular")
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.conv(x))
        h = h * self.scale
        h += x
        return torch.tanh(h)


class Branches(nn.Module):
    """An addition hands the same gradient to two normalisations: rows that could share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm_a = nn.Linear(3, 5), _affine(nn.LayerNorm(5))
        self.b, self.norm_b = nn.Linear(3, 5), _affine(nn.LayerNorm(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm_a(self.a(x)) + self.norm_b(self.b(x)))


class DependsOnMode(nn.Module):
    """Something else, and not at random, in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * (3.0 if self.training else 1.0)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return torch.tanh(self.used(x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
        self.net[2].requires_grad_(False)
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class SequenceFirst(nn.Module):
    """Works in the layout (T, m, d) inside, where T equals a likely batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x.transpose(0, 1))).transpose(0, 1)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(2, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class Positions(nn.Module):
    """A position embedding has no batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 2)
        self.positions = nn.Embedding(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.tokens(x) + self.positions(torch.arange(x.shape[1])))


def _batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, *tail: nn.Module) -> nn.Module:
    for statistic in (layer.running_mean, layer.running_var):
        assert statistic is not None
        statistic.uniform_(0.5, 2.0)
    layer.weight.data.normal_()
    layer.bias.data.normal_()
    return nn.Sequential(layer, *tail)


def _affine(layer: nn.Module) -> nn.Module:
    for p in layer.parameters():
        p.data.normal_()
    return layer


@dataclass(frozen=True)
class Case:
    body: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: bool = False
    normalised: bool = False

    def build(self, m: int = 3, seed: int = 0) -> tuple[Gated, Tensor]:
        """The network and m inputs, float64, from a seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = Gated(self.body(), self.shape, self.tokens).double().train()
            if self.tokens:
                x = torch.randint(0, 5, (m, *self.shape))
            else:
                x = torch.randn(m, *self.shape, dtype=torch.float64)
        return model, x


CASES = {
    "linear": Case(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()), (3,)),
    "linear-leading": Case(
        lambda: nn.Sequential(nn.Linear(2, 3, bias=False), nn.Tanh()), (2, 3, 2)
    ),
    "conv1d": Case(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), (2, 9)),
    "conv2d": Case(
        lambda: nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(1, 0), groups=2), (2, 4, 5)
    ),
    "conv2d-reflect": Case(
        lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (1, 4, 4)
    ),
    "conv3d": Case(lambda: nn.Conv3d(1, 2, 3, padding="same"), (1, 2, 3, 2)),
    "embedding": Case(lambda: nn.Embedding(5, 2), (3,), tokens=True),
    "layer-norm": Case(lambda: _affine(nn.LayerNorm([3, 2])), (2, 3, 2), normalised=True),
    "group-norm": Case(lambda: _affine(nn.GroupNorm(2, 4)), (4, 3), normalised=True),
    "batch-norm": Case(lambda: _batch_norm(nn.BatchNorm2d(2)), (2, 2, 3), normalised=True),
    "batch-norm-1d": Case(
        lambda: _batch_norm(nn.BatchNorm1d(3), nn.Linear(3, 3)), (3,), normalised=True
    ),
    "bias-and-scale": Case(BiasAndScale, (2, 3)),
    "dropout": Case(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), (3,)),
    "transposed": Case(lambda: nn.ConvTranspose2d(2, 2, 2, stride=2), (2, 2, 2)),
    "prelu": Case(lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4)), (3,)),
    "attention": Case(Attention, (3, 4)),
    "transformer": Case(
        lambda: nn.TransformerEncoderLayer(4, 2, 5, batch_first=True), (3, 4), normalised=True
    ),
    "lstm": Case(lambda: Recurrent(nn.LSTM), (3, 2)),
    "gru": Case(lambda: Recurrent(nn.GRU), (3, 2)),
    "loose": Case(LooseParameter, (3,)),
    "tied": Case(Tied, (3,)),
    "tied-embedding": Case(TiedEmbedding, (2,), tokens=True),
    "twice": Case(Twice, (3,)),
    "out-of-order": Case(OutOfOrder, (3,)),
    "in-place": Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), (3,)
    ),
    "residual": Case(Residual, (2, 3, 3)),
    "parametrized": Case(
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh()), (3,)
    ),
    "frozen": Case(Frozen, (3,)),
    "unused": Case(Unused, (3,)),
    "branches": Case(Branches, (3,), normalised=True),
    "rms-norm": Case(lambda: _affine(nn.RMSNorm(3, eps=1e-3)), (2, 3), normalised=True),
    "instance-norm": Case(
        lambda: _affine(nn.InstanceNorm1d(2, affine=True)), (2, 4), normalised=True
    ),
    "depends-on-mode": Case(DependsOnMode, (3,)),
    "sequence-first": Case(SequenceFirst, (3, 2)),
    "positions": Case(Positions, (3,), tokens=True),
}
