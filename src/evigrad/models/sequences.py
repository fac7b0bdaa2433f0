"""Networks for sequences of tokens or of real vectors: a transformer encoder and a GRU.

evigrad has a closed form for the Jacobian rows of all weights of both networks, and Kronecker
factors for all matrices. Each network has an optional hyperparameter in its forward pass, which can
be learned from the evidence.
"""

import math
from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError

# Initial standard deviation of the position embeddings. For tokens it is about 1, so a new network
# depends more on the token than on its position.
_POSITION_SCALE = 0.1


class Positive(nn.Module):
    """Positive numbers that start at ``start``. Their logarithms are the parameter ``log``."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.log = nn.Parameter(start.log())

    def forward(self) -> Tensor:
        return self.log.exp()


class Attention(nn.Module):
    """Multi-head self-attention with one matrix each for queries, keys, values and output."""

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
        """Return the output at each position. ``bias`` is added to the attention scores."""
        query, key, value = (
            layer(h).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + MLP(norm(x))."""

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
    """A small transformer encoder with pre-norm blocks, mean pooling and a linear head.

    With a ``vocabulary``, an input of shape (T,) consists of T integer tokens. Without one, inputs
    are real. (T,) is a series of numbers, and (T, d) is a series of vectors. An image (c, h, w) is
    the sequence of its h rows, each with c·w numbers. The sequences of a batch may be shorter than
    T.

    With ``attention_length``, attention decreases with distance. Positions i and j have the score
    qᵢ·kⱼ/√(width/heads) − |i − j|/length (Press et al., 2022, *Train Short, Test Long*, with slope
    1/length, here in both directions). Each head of each block has its own length. The parameter
    ``attention_length.log`` contains the logarithms of the lengths. To learn the lengths, pass
    ``hyperparameters=["attention_length"]``.

    The last block is not followed by normalization. Otherwise the outputs would not depend on the
    scale of the weights, and prior precisions would be meaningless.

    Args:
        input_shape: Shape of one input.
        num_outputs: Number of outputs C.
        width: Size of a token's representation, a multiple of ``heads``.
        heads: Number of attention heads in each block.
        layers: Number of blocks.
        hidden: Number of units in a block's feed-forward part. Default: twice the width.
        vocabulary: Number of different tokens. None for real inputs.
        padding: Token that is ignored at every position. Default: None.
        attention_length: Initial value of all lengths, in positions. None means that the score
            does not depend on the distance.

    Raises:
        ConfigurationError: If sizes or settings are invalid or do not match each other.
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
            raise ConfigurationError(f"width must be a multiple of heads = {heads}, got {width}.")
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
        # One index per example, so that the embedding's rows have their closed form.
        position = torch.arange(steps, device=h.device)
        h = h + self.positions(position.expand(m, steps))
        lengths = None if self.attention_length is None else self.attention_length()
        distances = (position[:, None] - position).abs().to(h.dtype)
        for index, block in enumerate(self.blocks):
            bias = None
            if lengths is not None:
                bias = -(distances / lengths[index][:, None, None])[None]
            if valid is not None:
                # The lowest finite number, so that sequences with only padding do not get NaN.
                lowest = torch.finfo(h.dtype).min
                bias = h.new_zeros(1, 1, 1, 1) if bias is None else bias
                bias = bias.masked_fill(~valid[:, None, None, :], lowest)
            h = block(h, bias)
        if valid is None:
            return self.head(h.mean(1))
        count = valid.sum(1, keepdim=True).clamp(min=1)
        return self.head((h * valid[:, :, None]).sum(1) / count)


class Recurrent(nn.Module):
    """One or more layers of gated recurrent units (GRU), followed by a linear head.

    The network takes the same inputs as ``Transformer``, but padding must be at the end. Vectors
    are not embedded, because the first layer multiplies them by a matrix.

    By default, the head uses the last state. With ``pooling_time``, it uses the weighted mean of
    all states. The weight of the state s steps before the end is proportional to exp(−s/time). A
    very short time selects the last state, and a very long time gives the plain mean. The parameter
    ``pooling_time.log`` is the logarithm of the time. To learn the time, pass
    ``hyperparameters=["pooling_time"]``.

    Args:
        input_shape: Shape of one input.
        num_outputs: Number of outputs C.
        width: Number of units in each layer, and size of a token's embedding.
        layers: Number of recurrent layers.
        vocabulary: Number of different tokens. None for real inputs.
        padding: Token that pads the end of a sequence.
        pooling_time: Initial time constant of the average, in steps. None uses only the last state.

    Raises:
        ConfigurationError: If sizes or settings are invalid or do not match each other.
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
            # The last weight is 1, so the sum is below 1 only without any token.
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        return self.head((weights[:, :, None] * h).sum(1))


def _as_sequence(x: Tensor) -> Float[Tensor, "m T d"]:
    """Return numbers, vectors, or rows of images as sequences of vectors."""
    if x.dim() == 2:
        return x[:, :, None]
    return x if x.dim() == 3 else x.transpose(1, 2).flatten(2)


def _positive(name: str, start: float | None, *shape: int) -> Positive | None:
    if start is None:
        return None
    if not (math.isfinite(start) and start > 0):
        raise ConfigurationError(f"{name} must be a positive number or None, got {start}.")
    return Positive(torch.full(shape, float(start)))


def _check_sizes(model: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigurationError(f"{name} of '{model}' must be at least 1, got {size}.")


def _check_input(
    model: str, input_shape: Sequence[int], vocabulary: int | None, padding: int | None
) -> tuple[int, int]:
    """Return the numbers of steps and of features. Raise ConfigurationError for other inputs."""
    if len(input_shape) > 3:
        raise ConfigurationError(
            f"'{model}' needs sequences (T,) or (T, features), or images (channels, height, width),"
            f" got inputs of shape {tuple(input_shape)}. Use 'mlp' for other shapes."
        )
    if vocabulary is None and padding is not None:
        raise ConfigurationError(
            "padding needs a vocabulary, got none. Set vocabulary=..., the number of tokens."
        )
    if vocabulary is not None and (vocabulary < 1 or len(input_shape) != 1):
        raise ConfigurationError(
            f"vocabulary must be at least 1 and needs inputs of shape (T,), got {vocabulary} and"
            f" inputs of shape {tuple(input_shape)}."
        )
    if padding is not None and vocabulary is not None and not 0 <= padding < vocabulary:
        raise ConfigurationError(
            f"padding must be a token from 0 to {vocabulary - 1}, got {padding}."
        )
    steps = input_shape[1] if len(input_shape) == 3 else input_shape[0]
    return steps, prod(input_shape) // steps
