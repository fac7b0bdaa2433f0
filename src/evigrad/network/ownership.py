"""Find the example to which each row of a recorded call belongs.

Here, the rows of a call are the R = m F entries in dimension 0 of its output. The closed forms
assume that row r belongs to example r // F. This holds if the model's outputs for all other
examples have no derivative with respect to row r. If the rows are packed tokens or sorted for
experts, R can be correct while the order is wrong. The closed forms are not used if the examples
are unknown.

``traced`` follows the batch dimension through the autograd graph of the pass, from the outputs to
the calls. It uses a list of operations that never mix rows, whatever their values, and takes no
backward pass. ``probed`` checks calls behind other operations, such as indexing, sorting,
scattering, products along the batch dimension and custom functions. It takes a few backward passes,
and is correct with probability 1.
"""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from evigrad.network.convolutions import FixedConvolution
from evigrad.network.generic import tolerances
from evigrad.network.recorder import Call

# Distance between the coefficients c, in tolerances.
_APART = 16.0
# Factor on the share of the largest gradient below which all is rounding.
_ROUNDING_FACTOR = 10.0


def placed(outputs: Tensor, calls: Sequence[Call]) -> tuple[Sequence[Call], set[int], set[Node]]:
    """Return the calls, the ids of calls with known examples, and all nodes of the graph.

    Calls with examples in dimension 1 are transposed. Such calls occur in networks whose dimension
    0 is time.
    """
    owned_ids, nodes, turned = traced(outputs, calls)
    data_first_calls = [call.data_first() if id(call) in turned else call for call in calls]
    pairs = zip(calls, data_first_calls, strict=True)
    return data_first_calls, {id(new) for old, new in pairs if id(old) in owned_ids | turned}, nodes


def traced(outputs: Tensor, calls: Collection[Call]) -> tuple[set[int], set[Node], set[int]]:
    """Find the calls in which row r belongs to example r // F.

    The batch dimension is followed through the graph once. The outputs need not use the calls.

    Returns:
        The ids of these calls, all nodes of the graph, and the ids of the calls that have the
        examples in dimension 1 instead.
    """
    m, owned_ids = len(outputs), {id(call) for call in calls}
    if outputs.grad_fn is None:
        return owned_ids, set(), set()
    turned = {id(call) for call in calls if call.may_turn and m > 1}
    # With one example, all rows belong to it.
    claimed = {
        (call.edge.node, call.edge.output_nr): (
            id(call),
            call.parts * prod(call.output_shape[1:]),
            prod(call.output_shape[2:]),
        )
        for call in (calls if m > 1 else ())
    }
    # The stride of the batch dimension is followed. Entry i of a tensor, in row-major order,
    # belongs to example (i // stride) % m. The stride is None if it is unknown.
    first = prod(outputs.shape[1:]) if claimed else None
    stack: list[tuple[Node, int, int | None, Sequence[int]]] = [
        (outputs.grad_fn, outputs.output_nr, first, outputs.shape)
    ]
    seen: dict[tuple[Node, int], int | None] = {}
    while stack:
        node, output, stride, shape = stack.pop()
        place = (node, output)
        if place in seen:
            if seen[place] == stride or seen[place] is None:
                continue
            stride = None  # two paths to this place disagree
        seen[place] = stride
        if place in claimed:
            call, in_first, in_second = claimed[place]
            if stride != in_first:
                owned_ids.discard(call)
            if stride != in_second:
                turned.discard(call)
        for i, (source, source_output) in enumerate(node.next_functions):
            if source is not None:
                before, input_shape = None, ()
                if stride is not None:
                    input_shape = source._input_metadata[source_output].shape
                    before = _stride_before(node, i, shape, input_shape, stride, m)
                stack.append((source, source_output, before, input_shape))
    # The graph gives no information about calls that the outputs do not use.
    return owned_ids, {node for node, _ in seen}, turned - owned_ids


def _stride_before(
    node: Node, which: int, shape: Sequence[int], input_shape: Sequence[int], stride: int, m: int
) -> int | None:
    """Return the batch stride in an input of an operation, from the stride in its output."""
    operation = _operation(node.name())
    if operation in _VIEWS:
        return stride if _dimension(input_shape, stride, m) is not None else None
    is_convolution = getattr(node, "_forward_cls", None) is FixedConvolution
    step = _first if is_convolution else _STEPS.get(operation)
    dim = _dimension(shape, stride, m)
    if step is None or dim is None:
        return None
    try:
        before = step(_Edge(node, which, shape, dim, input_shape))
    except AttributeError:  # nodes have other attributes in other versions of PyTorch
        return None
    if before is None or not 0 <= before < len(input_shape) or input_shape[before] != shape[dim]:
        return None
    return prod(input_shape[before + 1 :]) * (stride // prod(shape[dim + 1 :]))


def _dimension(shape: Sequence[int], stride: int, m: int) -> int | None:
    """Return the dimension (groups, m, parts) that counts the examples, or None."""
    inner = 1
    for dim in reversed(range(len(shape))):
        size = shape[dim]
        if size and inner * size >= stride * m:
            whole = stride % inner == 0 and (inner * size) % (stride * m) == 0
            return dim if whole else None
        inner *= size
    return None


def probed(outputs: Tensor, calls: Sequence[Call], differentiable: bool) -> set[int]:
    """Return the ids of calls in which row r belongs to example r // F, judging by gradients.

    With cotangents u of the outputs, the gradient in row r is g_r = Σ_n J_nrᵀ u_n. With cotangents
    c_n u_n instead, this gradient is c_n g_r if and only if row r belongs to example n only. The
    coefficients c differ by enough to detect every wrong example. Many examples in low precision
    need several vectors c, with one backward pass for each. If ``differentiable``, a zero gradient
    proves nothing, because its derivative may be nonzero.
    """
    m, generator = len(outputs), torch.Generator().manual_seed(0)
    u = torch.randn(outputs.shape, generator=generator, dtype=torch.float64, device="cpu")
    u = u.to(outputs)

    def gradients(vectors: Tensor) -> list[Tensor | None]:
        edges = [call.edge for call in calls]
        edge_gradients = torch.autograd.grad(
            outputs, edges, vectors, retain_graph=True, allow_unused=True
        )
        return list(edge_gradients)

    plain = gradients(u)
    relative = max(tolerances(g)[0] for g in (*plain, outputs) if g is not None)
    passing = {
        id(call)
        for call, g in zip(calls, plain, strict=True)
        if g is None or not differentiable or g.any()
    }
    for c in _codes(m, max(2, int(2 / (_APART * relative)))):
        scaled = gradients(u * c.to(u)[:, None])
        for call, g, scaled_g in zip(calls, plain, scaled, strict=True):
            if g is not None and scaled_g is not None and not _agree(call, g, scaled_g, c):
                passing.discard(id(call))
    return passing


def _agree(call: Call, plain: Tensor, scaled: Tensor, c: Tensor) -> bool:
    relative, rounding = tolerances(plain)
    type_ = torch.promote_types(plain.dtype, torch.float32)
    row_codes = c.to(plain.device, type_).repeat_interleave(call.parts)[:, None]
    plain, scaled = plain.to(type_).flatten(1), scaled.to(type_).flatten(1)
    size = plain.norm(dim=1)
    allowed = relative * size + _ROUNDING_FACTOR * rounding * size.max()
    return bool(((scaled - row_codes * plain).norm(dim=1) <= allowed).all())


def _codes(m: int, levels: int) -> list[Tensor]:
    """Return coefficients in [-1, 1] for m examples, of which at least one differs for any two."""
    levels = min(levels, m)
    digits, quotients = [], torch.arange(m, device="cpu")
    while not digits or quotients.any():
        digits.append(quotients % levels)
        quotients = quotients // levels
    return [2.0 * digit / (levels - 1) - 1.0 for digit in digits]


# ------------------------------------------------------------ operations that mix no rows


# Operations that keep all entries in the same order.
_VIEWS = frozenset(("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze"))


@lru_cache
def _operation(name: str) -> str:
    """Return the name of a node's built-in operation, or an empty string for any other node."""
    # The name of a custom function's node ends in "Backward", without a digit.
    return name.rstrip("0123456789").removesuffix("Backward") if name[-1:].isdigit() else ""


class _Edge(NamedTuple):
    """An edge of the graph from an operation to one of its inputs.

    Attributes:
        node: The operation.
        which: Number of the input.
        shape: Shape of the output.
        dim: Batch dimension of the output.
        input_shape: Shape of the input.
    """

    node: Any
    which: int
    shape: Sequence[int]
    dim: int
    input_shape: Sequence[int]

    def signed(self, dim: int, further: int = 0) -> int:
        """Return dimension ``dim``, counted from the front.

        A negative ``dim`` counts from the end of a tensor with ``further`` more dimensions than the
        input.
        """
        dim = dim - 2**64 if dim >= 2**63 else dim  # autograd stores -1 as 2^64 - 1
        return dim + len(self.input_shape) + further if dim < 0 else dim


# Returns the batch dimension of an input, from the batch dimension of the output (``edge.dim``). It
# returns None if entries along it may mix.
_Step = Callable[[_Edge], int | None]


def _broadcast(edge: _Edge) -> int | None:
    return edge.dim - len(edge.shape) + len(edge.input_shape)


def _first(edge: _Edge) -> int | None:
    """Step through an operation on each entry of dimension 0 of its first input only."""
    return 0 if edge.which == edge.dim == 0 else None


def _both(edge: _Edge) -> int | None:
    return 0 if edge.dim == 0 else None


def _product(edge: _Edge) -> int | None:
    """Step to the left matrix by rows, the right one by columns, or the summand, if any."""
    side = edge.which - len(edge.node.next_functions) + 2
    if side < 0:
        return _broadcast(edge)
    return edge.dim if edge.dim != len(edge.shape) - 1 - side else None


def _reduction(edge: _Edge) -> int | None:
    dims = edge.node._saved_dim
    if edge.node._saved_keepdim:
        return edge.dim
    reduced = {edge.signed(d) for d in (dims if isinstance(dims, tuple) else (dims,))}
    kept = sorted(set(range(len(edge.input_shape))) - reduced)
    return kept[edge.dim] if len(kept) == len(edge.shape) else None


def _along(edge: _Edge) -> int | None:
    """Step through an operation along one dimension, which must not be the batch dimension."""
    return edge.dim if edge.signed(edge.node._saved_dim) != edge.dim else None


def _flip(edge: _Edge) -> int | None:
    return edge.dim if edge.dim not in map(edge.signed, edge.node._saved_dims) else None


def _without(edge: _Edge) -> int | None:
    """Step through an operation that removes a dimension."""
    return edge.dim + (edge.dim >= edge.signed(edge.node._saved_dim))


def _stack(edge: _Edge) -> int | None:
    new = edge.signed(edge.node._saved_dim, 1)
    return edge.dim - (edge.dim > new) if edge.dim != new else None


def _permute(edge: _Edge) -> int | None:
    return edge.signed(edge.node._saved_dims[edge.dim])


def _transpose(edge: _Edge) -> int | None:
    one, other = edge.signed(edge.node._saved_dim0), edge.signed(edge.node._saved_dim1)
    return {one: other, other: one}.get(edge.dim, edge.dim)


def _repeat(edge: _Edge) -> int | None:
    return _broadcast(edge) if edge.node._saved_repeats[edge.dim] == 1 else None


def _index(edge: _Edge) -> int | None:
    """Step through an index with one entry per example in order, such as each last token."""
    chosen = edge.node._saved_indices[0]
    if edge.which != 0 or edge.dim != 0 or chosen is None or chosen.dtype == torch.bool:
        return None
    data_order = torch.arange(len(chosen), device=chosen.device)
    return 0 if chosen.dim() == 1 and torch.equal(chosen, data_order.to(chosen)) else None


def _pad(edge: _Edge) -> int | None:
    behind = 2 * (len(edge.shape) - 1 - edge.dim)  # pads start from the last dimension
    return None if any(edge.node._saved_pad[behind : behind + 2]) else edge.dim


def _layer_norm(edge: _Edge) -> int | None:
    kept = len(edge.shape) - len(edge.node._saved_normalized_shape)
    return edge.dim if edge.which == 0 and edge.dim < kept else None


def _batch_norm(edge: _Edge) -> int | None:
    """Step to the input. In training mode, the statistics are sums over all dimensions but 1."""
    # Instance norm calls batch norm in training mode, with the examples as part of dimension 1.
    if edge.which != 0 or (edge.node._saved_training and edge.dim != 1):
        return None
    return edge.dim


def _named(names: str, step: _Step) -> dict[str, _Step]:
    return dict.fromkeys(names.split(), step)


# Steps by the names of autograd nodes, without ``Backward0``.
_STEPS: dict[str, _Step] = {
    **_named(
        """
        Abs Add Addcdiv Addcmul Alias Asinh Atan Atan2 Celu Clamp ClampMax ClampMin Clone Cos Cosh
        Div Elu Erf Erfc Exp Exp2 Expand Expm1 Gelu Hardsigmoid Hardswish Hardtanh LeakyRelu Lerp
        Log Log10 Log1P Log2 Logaddexp LogSigmoid MaskedFill Maximum Minimum Mish Mul Neg Pow
        PreluKernel Reciprocal Relu Rsqrt Rsub Sigmoid Sign Silu Sin Sinh Softplus Softshrink
        Sqrt Sub Tan Tanh Threshold ToCopy Where
        """,
        _broadcast,
    ),
    **_named("Addmm Mm Bmm Baddbmm", _product),
    **_named("Sum Mean Amax Amin Max Min Logsumexp LinalgVectorNorm Var Std", _reduction),
    **_named(
        "Softmax SafeSoftmax LogSoftmax Cumsum Gather Glu Slice Split SplitWithSizes Cat", _along
    ),
    **_named("Flip", _flip),
    **_named("Select Unbind", _without),
    **_named("Stack", _stack),
    **_named("Permute", _permute),
    **_named("Index", _index),
    **_named("Transpose", _transpose),
    **_named("Repeat", _repeat),
    **_named("ConstantPadNd", _pad),
    **_named("NativeLayerNorm", _layer_norm),
    **_named("NativeBatchNorm CudnnBatchNorm", _batch_norm),
    **_named(
        """
        Convolution NativeGroupNorm MaxPool2DWithIndices MaxPool3DWithIndices AvgPool2D AvgPool3D
        AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D UpsampleNearest1D
        UpsampleNearest2D UpsampleNearest3D UpsampleLinear1D UpsampleBilinear2D
        UpsampleBicubic2D ReflectionPad1D ReflectionPad2D ReplicationPad1D ReplicationPad2D
        Im2Col Col2Im
        """,
        _first,
    ),
    **_named("GridSampler2D GridSampler3D", _both),
}
