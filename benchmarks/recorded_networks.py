"""The small networks, likelihoods and priors of `record_numbers.py`.

They use only public names of evigrad, so that every revision can be recorded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from evigrad import Outputs
from evigrad.invariances import AdditiveNoise, AffineInvariance, Averaged, InputScale
from evigrad.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NaturalGaussian,
    Poisson,
    Weighted,
)
from evigrad.priors import GaussianPrior, NormalHyperprior

NUM_DATA, FEATURES, LENGTH, WORDS = 8, 4, 3, 6
VOCABULARY = 60  # so large that an embedding's rows are not formed
MANY_CLASSES = 20  # more than have their rows turned by the eigen root

# ------------------------------------------------------------ networks with a hyperparameter


class Gated(nn.Module):
    """A perceptron whose gate is a hyperparameter of the forward pass."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, outputs)
        self.gate = nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * torch.sigmoid(self.gate))


class Attentive(nn.Module):
    """Attention and a parameter outside of layers: the general way to rows."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.shift = nn.Parameter(torch.randn(4) / 2)
        self.last = nn.Linear(4, outputs)
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = x.unflatten(1, (2, 2)).repeat(1, 1, 2) * self.gate.exp()
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.last(torch.sin(h + self.shift).mean(1))


class GatedConvolution(nn.Module):
    """A convolutional network with a gate on its channels."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, padding=1)
        self.last = nn.Linear(32, outputs)
        self.gate = nn.Parameter(torch.tensor([0.2, -0.4]))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * torch.sigmoid(self.gate)[:, None, None]
        return self.last(h.flatten(1))


def convolutional(outputs: int) -> nn.Module:
    """A convolutional network under a learned affine augmentation."""
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, outputs)
    )
    return Averaged(network, AffineInvariance(), num_samples=2)


def averaged_and_gated(outputs: int) -> nn.Module:
    return Averaged(GatedConvolution(outputs), AffineInvariance(), num_samples=2)


def averaged_and_scaled(outputs: int) -> nn.Module:
    network = nn.Sequential(InputScale(FEATURES), Gated(outputs))
    noise = AdditiveNoise(FEATURES, 0.3)
    return Averaged(network, noise, num_samples=3, average="probabilities")


# ------------------------------------------------------------ positions and trees


class Tagger(nn.Module):
    """Scores at each place of a sequence."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, 3), nn.Linear(3, 3)
        self.out = nn.Linear(3, outputs)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) * self.scale.exp()
        places = torch.arange(1, x.shape[1] + 1, dtype=h.dtype)
        return self.out((self.inner(h).cumsum(1) / places[:, None]).tanh() + h)


class Pixels(nn.Module):
    """Scores of each pixel, channels second."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, outputs, 1)
        self.scale = nn.Parameter(torch.tensor(0.2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x * self.scale.exp())))


class Reader(nn.Module):
    """Token ids with a mask, and numbers."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, 4), nn.Linear(4, 3)
        self.out = nn.Linear(5, outputs)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, ids: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
        h = self.inner(self.words(ids)).tanh() * mask[..., None]
        mean = h.sum(1) / mask.sum(1, keepdim=True)
        return self.out(torch.cat([mean * self.scale.exp(), numbers], 1))


class Parts(NamedTuple):
    ids: Tensor
    mask: Tensor
    numbers: Tensor


class NestedReader(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.reader = Reader(outputs)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        return self.reader(*batch["text"], batch["more"][0])


class TupleReader(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.reader = Reader(outputs)

    def forward(self, parts: Parts) -> Tensor:
        return self.reader(parts.ids, parts.mask, parts.numbers)


# ------------------------------------------------------------ layers


class LastState(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.RNNBase, outputs: int) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(layer.hidden_size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x)[0][:, -1])


class WordMean(nn.Module):
    """Means of embedded words, scored by the embedding itself and by a layer."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(VOCABULARY, 4, padding_idx=0), nn.Linear(4, 4)
        self.last = nn.Linear(VOCABULARY, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(self.words(x))).mean(1)
        return self.last(F.linear(h, self.words.weight))


class Twice(nn.Module):
    """A layer that is used twice, and one weight instead of two."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.second.weight = self.first.weight
        self.last = nn.Linear(FEATURES, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(torch.tanh(self.first(torch.tanh(self.first(x))))))


class Functional(nn.Module):
    """Parameters outside of layers: products, sums, a scale, a quotient, an expansion."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(FEATURES, 5) / 2)
        self.shift, self.scale = nn.Parameter(torch.randn(5)), nn.Parameter(torch.ones(5))
        self.token = nn.Parameter(torch.randn(1, 5))
        self.divisor = nn.Parameter(torch.tensor(1.5))
        self.right = nn.Parameter(torch.randn(5, outputs) / 2)
        self.curve = nn.PReLU(5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.shift, x, self.left) + (x @ self.left) * self.scale
        h = self.curve(h) / self.divisor
        return (h - self.token.expand(len(x), -1)) @ self.right


def normalized(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 6), nn.GroupNorm(2, 6),
        nn.Tanh(), nn.BatchNorm1d(6), nn.RMSNorm(6), nn.Linear(6, outputs),
    )  # fmt: skip


def convolutions(outputs: int) -> nn.Module:
    """Strides, groups, dilation, padding by reflection, a transposed one, one dimension."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2), nn.Tanh(),
        nn.ConvTranspose2d(4, 2, 2), nn.Tanh(),
        nn.Conv2d(2, 3, 3, dilation=2, padding=2, padding_mode="reflect"),
        nn.InstanceNorm2d(3, affine=True), nn.Flatten(2), nn.Conv1d(3, 2, 3), nn.Flatten(),
        nn.Linear(14, outputs),
    )  # fmt: skip


def wide_convolutions(outputs: int) -> nn.Module:
    """Many channels at few positions, and images wide enough for correlations of patches."""
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(3), nn.Conv2d(8, 16, 3, padding=1),
        nn.Tanh(), nn.Flatten(), nn.Linear(64, outputs),
    )  # fmt: skip


def scaled_convolutions(outputs: int) -> nn.Module:
    return nn.Sequential(InputScale((2, 6, 6)), wide_convolutions(outputs))


class Cells(nn.Module):
    """Recurrent cells, called step by step."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.GRUCell(FEATURES, 3), nn.LSTMCell(3, 3)
        self.last = nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h, state = None, None
        for step in x.unbind(1):
            h = self.first(step, h)
            state = self.second(h, state)
        assert state is not None
        return self.last(state[0])


def transformer(outputs: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(4 * LENGTH, outputs))


def perceptron(outputs: int) -> nn.Module:
    """The plainest network, wide enough that its rows are never formed."""
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, outputs)
    )


# ------------------------------------------------------------ the tables


def numbers(*shape: int) -> Callable[[Generator], Tensor]:
    return lambda generator: torch.randn(NUM_DATA, *shape, generator=generator).double()


def words(generator: Generator) -> Tensor:
    return torch.randint(WORDS, (NUM_DATA, LENGTH), generator=generator)


def parts(generator: Generator) -> Parts:
    mask = torch.rand(NUM_DATA, LENGTH, generator=generator) > 0.3
    mask[:, 0] = True
    values = torch.randn(NUM_DATA, 2, generator=generator).double()
    return Parts(words(generator), mask, values)


def nested(generator: Generator) -> dict[str, Any]:
    ids, mask, values = parts(generator)
    return {"text": (ids, mask), "more": [values]}


@dataclass(frozen=True)
class Network:
    """How to build a network for so many outputs, its inputs, and what the evidence learns of it.

    ``positions`` is the shape of an example's positions, if each has a target.
    """

    build: Callable[[int], nn.Module]
    inputs: Callable[[Generator], Any]
    hyperparameters: tuple[str, ...] = ()
    positions: tuple[int, ...] = ()


def _pixels(outputs: int) -> nn.Module:
    return Outputs(Pixels(outputs), channel_dim=1)


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[int], nn.Module]:
    return lambda outputs: LastState(kind(FEATURES, 3, batch_first=True, **options), outputs)


NETWORKS = {
    "gated": Network(Gated, numbers(FEATURES), ("gate",)),
    "attentive": Network(Attentive, numbers(FEATURES), ("gate",)),
    "convolutional": Network(convolutional, numbers(1, 4, 4), ("invariance",)),
    "averaged-gated": Network(averaged_and_gated, numbers(1, 4, 4), ("invariance", "model.gate")),
    "averaged-scaled": Network(
        averaged_and_scaled, numbers(FEATURES), ("invariance", "model.0", "model.1.gate")
    ),
    "tagger": Network(Tagger, words, ("scale",), (LENGTH,)),
    "pixels": Network(_pixels, numbers(1, 2, 3), ("scale",), (2, 3)),
    "mapping": Network(Reader, lambda generator: parts(generator)._asdict(), ("scale",)),
    "tuple": Network(Reader, lambda generator: tuple(parts(generator)), ("scale",)),
    "named-tuple": Network(TupleReader, parts, ("reader.scale",)),
    "nested": Network(NestedReader, nested, ("reader.scale",)),
    "perceptron": Network(perceptron, numbers(FEATURES)),
    "lstm": Network(_recurrent(nn.LSTM), numbers(LENGTH, FEATURES)),
    "gru": Network(_recurrent(nn.GRU), numbers(LENGTH, FEATURES)),
    "rnn": Network(_recurrent(nn.RNN), numbers(LENGTH, FEATURES)),
    "cells": Network(Cells, numbers(LENGTH, FEATURES)),
    "scaled-convolutions": Network(scaled_convolutions, numbers(2, 6, 6), ("0",)),
    "words": Network(WordMean, words),
    "twice": Network(Twice, numbers(FEATURES)),
    "functional": Network(Functional, numbers(FEATURES)),
    "normalized": Network(normalized, numbers(FEATURES)),
    "convolutions": Network(convolutions, numbers(2, 6, 6)),
    "wide-convolutions": Network(wide_convolutions, numbers(2, 6, 6)),
    "transformer": Network(transformer, numbers(LENGTH, FEATURES)),
}


class Custom(Likelihood):
    """Classes by their log density only. Derivatives and roots are the library's defaults."""

    name = "custom"
    couples_outputs = True
    is_classification = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return f.log_softmax(1).gather(1, y[:, None])[:, 0]


Targets = Callable[[Likelihood, Generator, int, int], Tensor]


def labels(_: Likelihood, generator: Generator, count: int, outputs: int) -> Tensor:
    return torch.randint(outputs, (count,), generator=generator)


def reals(_: Likelihood, generator: Generator, count: int, outputs: int) -> Tensor:
    return torch.randn(count, outputs, generator=generator).double()


def halves(_: Likelihood, generator: Generator, count: int, outputs: int) -> Tensor:
    return reals(_, generator, count, outputs // 2)


def bits(_: Likelihood, generator: Generator, count: int, outputs: int) -> Tensor:
    return (reals(_, generator, count, outputs) > 0).double()


def counts(_: Likelihood, generator: Generator, count: int, outputs: int) -> Tensor:
    return torch.randint(4, (count, outputs), generator=generator).double()


def weighted(targets: Targets) -> Targets:
    def with_weights(
        likelihood: Likelihood, generator: Generator, count: int, outputs: int
    ) -> Tensor:
        assert isinstance(likelihood, Weighted)
        y = targets(likelihood, generator, count, outputs)
        weights = torch.rand(count, generator=generator).double() * 2
        return likelihood.targets(y, weights)

    return with_weights


class ManyItems(Dataset[tuple[Tensor, Tensor]]):
    """A data set that computes its items: more than are permuted as a tensor."""

    def __init__(self, count: int, outputs: int) -> None:
        self.count, self.outputs = count, outputs

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(1, FEATURES + 1, dtype=torch.float64) * (index % 9973)
        return angles.sin(), torch.tensor(index % self.outputs)


# Name -> how to make the likelihood, the number of outputs, the targets.
LIKELIHOODS: dict[str, tuple[Callable[[], Likelihood], int, Targets]] = {
    "categorical": (Categorical, 3, labels),
    "gaussian": (lambda: Gaussian(0.5), 3, reals),
    "gaussians": (lambda: Gaussian([0.5, 0.7, 0.9]), 3, reals),
    "bernoulli": (Bernoulli, 3, bits),
    "poisson": (Poisson, 3, counts),
    "heteroscedastic": (HeteroscedasticGaussian, 4, halves),
    "natural-gaussian": (NaturalGaussian, 4, halves),
    "weighted": (lambda: Weighted(Categorical()), 3, weighted(labels)),
    "custom": (Custom, 3, labels),
    "many-classes": (Categorical, MANY_CLASSES, labels),
    "weighted-gaussian": (lambda: Weighted(Gaussian(0.5)), 3, weighted(reals)),
}

GROUPS = {"last": ["last"], "first": ["first"]}
PRIORS: dict[str, Callable[[], GaussianPrior]] = {
    "layerwise": lambda: GaussianPrior("layerwise", 0.7),
    "scalar": lambda: GaussianPrior("scalar", 0.7),
    "diagonal": lambda: GaussianPrior("diagonal", 0.7),
    "groups": lambda: GaussianPrior(GROUPS, {"last": 2, "first": 1}),
    "fixed-group": lambda: GaussianPrior(
        GROUPS, {"last": 2, "first": 1}, learnable={"first": False}
    ),
    # An exact Hessian needs it to be positive definite.
    "strong": lambda: GaussianPrior("layerwise", 50.0),
    # In float32 their determinants round too much, and are taken in float64.
    "weak": lambda: GaussianPrior("layerwise", 1e-7),
    "fixed": lambda: GaussianPrior("layerwise", 0.7, learnable=False),
    "initial": lambda: GaussianPrior("layerwise", 0.7, mean="initial"),
    "tensor-mean": lambda: GaussianPrior(
        "layerwise", 0.7, mean={"last.bias": torch.tensor([0.5, -1.0, 2.0]), "first": "initial"}
    ),
    "hyperprior": lambda: GaussianPrior(
        "layerwise", 0.7, hyperprior=NormalHyperprior(mean=0.5, std=2.0)
    ),
}
