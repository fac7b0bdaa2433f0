"""Replace fused functions with functions that have closed forms.

``nn.MultiheadAttention`` and recurrent layers call one fused function with all their parameters.
While a forward pass is recorded, a function of this module replaces the fused function and returns
the same values up to rounding. The first argument of the replacement is an ``F.linear`` whose calls
are recorded, with the examples in dimension 0. The remaining arguments are the arguments of the
fused function. If the replacement does not support them, it returns ``NotImplemented``. The fused
function is then called, and the rows of its parameters are computed by automatic differentiation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

# F.linear of an input, a weight, and a bias or None.
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _attention(
    linear: Linear,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Compute ``F.multi_head_attention_forward``, whose inputs are (T, m, d)."""
    rare = [t for t in (bias_k, bias_v, static_k, static_v) if t is not None]
    random = training and dropout_p > 0
    if query.dim() != 3 or in_proj_weight is None or rare or add_zero_attn or random:
        return NotImplemented
    # Multiply each input by the whole matrix, because parts of a parameter have no closed form.
    inputs = {id(x): x.transpose(0, 1) for x in (query, key, value)}
    parts = {i: linear(x, in_proj_weight, in_proj_bias).chunk(3, 2) for i, x in inputs.items()}
    q, k, v = (
        parts[id(x)][i].unflatten(2, (num_heads, -1)).transpose(1, 2)
        for i, x in enumerate((query, key, value))
    )
    # ``is_causal`` is a hint that the mask is causal.
    is_causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if attn_mask is None or is_causal else _added(attn_mask, q)
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, q)[:, None, None]
        mask = padding if mask is None else mask + padding
    weights = None
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        weights = (scores if mask is None else scores + mask).softmax(-1)
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    outputs = linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    return outputs.transpose(0, 1), weights


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers to add to the scores. True excludes a position."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(
        mask, -torch.inf
    )


# The state of a recurrent layer: the output h, and for an LSTM also the cell state c.
_State = tuple[Tensor, ...]
# Returns the next state from the gates of the input, the gates of the last output, and the last
# state.
_Step = Callable[[Tensor, Tensor, _State], _State]


def _lstm_step(from_input: Tensor, from_state: Tensor, state: _State) -> _State:
    enter, forget, new, leave = (from_input + from_state).chunk(4, 1)
    c = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * c.tanh(), c


def _gru_step(from_input: Tensor, from_state: Tensor, state: _State) -> _State:
    reset_i, update_i, new_i = from_input.chunk(3, 1)
    reset_h, update_h, new_h = from_state.chunk(3, 1)
    new = torch.tanh(new_i + torch.sigmoid(reset_i + reset_h) * new_h)
    return (new + torch.sigmoid(update_i + update_h) * (state[0] - new),)


def _tanh_step(from_input: Tensor, from_state: Tensor, state: _State) -> _State:
    return ((from_input + from_state).tanh(),)


def _relu_step(from_input: Tensor, from_state: Tensor, state: _State) -> _State:
    return ((from_input + from_state).relu(),)


def _cell(step: _Step) -> Callable[..., Any]:
    """Return a replacement for functions such as ``torch.lstm_cell``."""

    def call(
        linear: Linear,
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        state = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        new_state = step(linear(input, w_ih, b_ih), linear(state[0], w_hh, b_hh), state)
        return new_state[0] if isinstance(hx, Tensor) else new_state

    return call


def _layers(step: _Step) -> Callable[..., Any]:
    """Return a replacement for functions such as ``torch.lstm``, with any number of layers."""

    def call(
        linear: Linear,
        input: Tensor,
        hx: Any,
        params: Any,
        has_biases: Any,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: Any = None,
    ) -> Any:
        # For packed sequences, the arguments are (input, lengths, hx, params, …).
        if isinstance(params, Tensor) or not isinstance(has_biases, bool) or (dropout and train):
            return NotImplemented
        x = input if batch_first else input.transpose(0, 1)
        starts = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        directions = 2 if bidirectional else 1
        count = len(params) // (num_layers * directions)
        lasts: list[_State] = []
        for _ in range(num_layers):
            outputs = []
            for is_backward in (False, True)[:directions]:
                at = len(lasts)
                layer_params = params[at * count : (at + 1) * count]
                start = tuple(s[at] for s in starts)
                hidden, last = _run(linear, step, x, start, layer_params, is_backward)
                outputs.append(hidden)
                lasts.append(last)
            x = torch.cat(outputs, 2)
        last = tuple(torch.stack(layer_states) for layer_states in zip(*lasts, strict=True))
        return (x if batch_first else x.transpose(0, 1)), *last

    return call


def _run(
    linear: Linear,
    step: _Step,
    x: Float[Tensor, "m T i"],
    state: _State,
    params: Sequence[Tensor],
    is_backward: bool,
) -> tuple[Float[Tensor, "m T h"], _State]:
    """Return the outputs of one layer in one direction, and the layer's last state."""
    w_ih, w_hh, *optional_params = params
    b_ih, b_hh = optional_params[:2] if len(optional_params) > 1 else (None, None)
    projection = optional_params[-1] if len(optional_params) % 2 else None
    outputs = []
    from_inputs = linear(x, w_ih, b_ih).unbind(1)
    for from_input in reversed(from_inputs) if is_backward else from_inputs:
        h, *others = step(from_input, linear(state[0], w_hh, b_hh), state)
        h = h if projection is None else linear(h, projection, None)
        state = (h, *others)
        outputs.append(h)
    return torch.stack(outputs[::-1] if is_backward else outputs, 1), state


# The replacement of each function.
WRITTEN_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: _attention,
    torch.lstm: _layers(_lstm_step),
    torch.gru: _layers(_gru_step),
    torch.rnn_tanh: _layers(_tanh_step),
    torch.rnn_relu: _layers(_relu_step),
    torch.lstm_cell: _cell(_lstm_step),
    torch.gru_cell: _cell(_gru_step),
    torch.rnn_tanh_cell: _cell(_tanh_step),
    torch.rnn_relu_cell: _cell(_relu_step),
}
