"""Networks for sequences of tokens or of real vectors: a transformer encoder and a GRU.

In both, every weight has a closed form, and every matrix Kronecker factors.
Each can have one hyperparameter of its forward pass, to be learned by the evidence.
"""

import math
from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError

# Initial standard deviation of the position embeddings. The tokens' one is about 1: at first a
# network sees what a token is, and learns to see where it stands.
_POSITION_SCALE = 0.1


class Positive(nn.Module):
    """Positive numbers, learned as their logarithms ``log``; ``start`` are the first values."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.log = nn.Parameter(start.log())

    def forward(self) -> Tensor:
        return self.log.exp()


class Attention(nn.Module):
    """Multi-head self-attention with a matrix each for queries, keys, values and output."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        # A bias would add the same to all scores of a query, which the softmax removes.
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(
        self, h: Float[Tensor, "m T d"], bias: Float[Tensor, "#m #heads #T T"] | None
    ) -> Float[Tensor, "m T d"]:
        """Return what each position gathers from the others; ``bias`` is added to the scores."""
        query, key, value = (
            layer(h).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.linear2 = nn.Linear(hidden, width)

    def forward(
        self, h: Float[Tensor, "m T d"], bias: Float[Tensor, "#m #heads #T T"] | None
    ) -> Float[Tensor, "m T d"]:
        h = h + self.attention(self.norm1(h), bias)
        return h + self.linear2(self.gelu(self.linear1(self.norm2(h))))


class Transformer(nn.Module):
    """A small transformer encoder: pre-norm blocks, mean pooling, a linear head.

    Inputs of shape (T,) with a ``vocabulary`` are T integer tokens. Without one they are real: (T,)
    is a series of numbers, (T, d) one of vectors, and an image (c, h, w) the sequence of its h
    rows, each of c·w numbers. Tokens may be fewer than T in a batch.

    With ``attention_length`` the attention has a range: a head looks from position i at j with the
    scores qᵢ·kⱼ/√(width/heads) − |i − j|/length (Press et al., 2022, *Train Short, Test Long*, with
    slope 1/length, here in both directions). The lengths, one of each head in each block, are the
    parameter ``attention_length.log``: learn it by ``hyperparameters=["attention_length"]``.

    No normalisation follows the last block: it would remove the scale of all that is added up in
    front of it, and make the prior precision of those weights meaningless.

    Args:
        input_shape: Shape of one input.
        num_outputs: Number of outputs C.
        width: Size of a token's representation, a multiple of ``heads``.
        heads: Attention heads in each block.
        layers: Blocks.
        hidden: Units of a block's feed-forward part. Default: twice the width.
        vocabulary: Number of different tokens; None for real inputs.
        padding: A token that is not part of the sequence, wherever it stands.
        attention_length: Range of the attention at the start, in positions; None does without.

    Raises:
        ConfigurationError: If sizes or settings do not fit each other.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_outputs: int,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        hidden: int | None = None,
        vocabulary: int | None = None,
        padding: int | None = None,
        attention_length: float | None = None,
    ) -> None:
        super().__init__()
        hidden = 2 * width if hidden is None else hidden
        _check_sizes("transformer", width=width, heads=heads, layers=layers, hidden=hidden)
        steps, features = _check_input("transformer", input_shape, vocabulary, padding)
        if width % heads:
            raise ConfigurationError(f"width={width} is no multiple of heads={heads}")
        self.padding = padding
        self.attention_length = _positive("attention_length", attention_length, layers, heads)
        if vocabulary is None:
            self.tokens = nn.Linear(features, width)
        else:
            self.tokens = nn.Embedding(vocabulary, width, padding_idx=padding)
        blocks = [Block(width, heads, hidden) for _ in range(layers)]
        head = nn.Linear(width, num_outputs)
        self.positions = nn.Embedding(steps, width)
        nn.init.normal_(self.positions.weight, std=_POSITION_SCALE)
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor) -> Float[Tensor, "m C"]:
        valid = None if self.padding is None else x != self.padding
        h = self.tokens(_as_sequence(x) if isinstance(self.tokens, nn.Linear) else x)
        m, steps, _ = h.shape
        # As many indices as data, so that the embedding's rows have their closed form.
        position = torch.arange(steps, device=h.device)
        h = h + self.positions(position.expand(m, steps))
        lengths = None if self.attention_length is None else self.attention_length()
        distances = (position[:, None] - position).abs().to(h.dtype)
        for index, block in enumerate(self.blocks):
            bias = None
            if lengths is not None:
                bias = -(distances / lengths[index][:, None, None])[None]
            if valid is not None:
                # The lowest finite number: sequences of padding alone get no NaN.
                lowest = torch.finfo(h.dtype).min
                bias = h.new_zeros(1, 1, 1, 1) if bias is None else bias
                bias = bias.masked_fill(~valid[:, None, None, :], lowest)
            h = block(h, bias)
        if valid is None:
            return self.head(h.mean(1))
        count = valid.sum(1, keepdim=True).clamp(min=1)
        return self.head((h * valid[:, :, None]).sum(1) / count)


class Recurrent(nn.Module):
    """Gated recurrent units, one or several layers of them, and a linear head.

    Inputs are as for ``Transformer``, but real ones are not embedded, as the first layer multiplies
    them with a matrix anyway, and padding stands at the end.

    The head sees the last state or, with ``pooling_time``, the mean of all states under the weights
    exp(−s/time) of a leaky average, s steps before the end: the last state for a short time, the
    plain mean for a long one. The time is the parameter ``pooling_time.log``: learn it by
    ``hyperparameters=["pooling_time"]``.

    Args:
        input_shape: Shape of one input.
        num_outputs: Number of outputs C.
        width: Units of each layer, and size of a token's embedding.
        layers: Recurrent layers, one on top of the other.
        vocabulary: Number of different tokens; None for real inputs.
        padding: A token that fills up the end of a sequence.
        pooling_time: Time constant of the average at the start, in steps; None takes the last
            state.

    Raises:
        ConfigurationError: If sizes or settings do not fit each other.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_outputs: int,
        width: int = 32,
        layers: int = 1,
        vocabulary: int | None = None,
        padding: int | None = None,
        pooling_time: float | None = None,
    ) -> None:
        super().__init__()
        _check_sizes("gru", width=width, layers=layers)
        _, features = _check_input("gru", input_shape, vocabulary, padding)
        self.padding = padding
        self.pooling_time = _positive("pooling_time", pooling_time)
        self.tokens = None
        if vocabulary is not None:
            self.tokens, features = nn.Embedding(vocabulary, width, padding_idx=padding), width
        self.recurrence = nn.GRU(features, width, layers, batch_first=True)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Float[Tensor, "m C"]:
        valid = None if self.padding is None else x != self.padding
        h, _ = self.recurrence(_as_sequence(x) if self.tokens is None else self.tokens(x))
        if valid is None:
            if self.pooling_time is None:
                return self.head(h[:, -1])
            valid = torch.ones(h.shape[:2], dtype=torch.bool, device=h.device)
        # Steps from each position to the last one that is not padding.
        left = valid.flip(1).cumsum(1).flip(1) - valid.long()
        if self.pooling_time is None:
            weights = (valid & (left == 0)).to(h.dtype)
        else:
            weights = torch.exp(-left / self.pooling_time()) * valid
            # The last weight is 1, so that the sum is below 1 for sequences of padding alone.
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        return self.head((weights[:, :, None] * h).sum(1))


def _as_sequence(x: Tensor) -> Float[Tensor, "m T d"]:
    """Numbers, vectors, or rows of images, as sequences of vectors."""
    if x.dim() == 2:
        return x[:, :, None]
    return x if x.dim() == 3 else x.transpose(1, 2).flatten(2)


def _positive(name: str, start: float | None, *shape: int) -> Positive | None:
    if start is None:
        return None
    if not (math.isfinite(start) and start > 0):
        raise ConfigurationError(f"{name} must be a positive number or None, not {start}")
    return Positive(torch.full(shape, float(start)))


def _check_sizes(model: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigurationError(f"{name}={size} of '{model}' must be 1 or more")


def _check_input(
    model: str, input_shape: Sequence[int], vocabulary: int | None, padding: int | None
) -> tuple[int, int]:
    """The steps of a sequence and the numbers of each; ConfigurationError if it is none."""
    if len(input_shape) > 3:
        raise ConfigurationError(
            f"'{model}' takes sequences (T,) or (T, features), or images (channels, height, width)"
            f" as sequences of rows, not inputs of shape {tuple(input_shape)}"
        )
    if vocabulary is None and padding is not None:
        raise ConfigurationError("padding is a token: it needs vocabulary=..., their number")
    if vocabulary is not None and (vocabulary < 1 or len(input_shape) != 1):
        raise ConfigurationError(
            f"vocabulary={vocabulary} is a number of tokens, 1 or more, for inputs of shape (T,);"
            f" these have shape {tuple(input_shape)}"
        )
    if padding is not None and vocabulary is not None and not 0 <= padding < vocabulary:
        raise ConfigurationError(f"padding={padding} is none of the tokens 0 to {vocabulary - 1}")
    steps = input_shape[1] if len(input_shape) == 3 else input_shape[0]
    return steps, prod(input_shape) // steps
