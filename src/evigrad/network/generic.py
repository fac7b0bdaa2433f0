"""Compute Jacobian rows of any module by automatic differentiation.

``loop_rows`` is the reference: one forward pass of the model per example, and one backward pass per
row. The results of all other algorithms must agree with the reference up to rounding (``close``).
``vmap_rows`` computes the rows of all examples in one call, if the module's operations can be
vectorized.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from evigrad.inputs import scores_of
from evigrad.network.arguments import check_output, model_outputs

# Largest relative difference, and the share of the largest norm below which all is rounding. For
# example, a bias before a normalization has no other rows.
_TOLERANCES = {torch.float64: (1e-6, 1e-12), torch.float32: (1e-3, 1e-6)}
_COARSE_TOLERANCES = (5e-2, 1e-3)
# Fast convolutions on a GPU (by Winograd or Fourier transforms) round more, also without TF32.
_CONVOLUTION_FACTOR = 10.0


def loop_rows(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    names: Sequence[str],
    x: Tensor,
    vectors: Float[Tensor, "m k C"],
    differentiable: bool,
) -> dict[str, Tensor]:
    """Return Jacobian rows by name, computed one by one with plain automatic differentiation.

    The rows of a parameter are ``vectors[n, j]ᵀ ∂f(x_n)/∂parameter`` (m, k, *parameter shape). If
    ``differentiable``, they have an autograd graph.
    """
    m, k, _ = vectors.shape
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for n in range(m):
        _, datum_columns = datum_rows(
            model, weights, names, x[n : n + 1], vectors[n : n + 1], differentiable
        )
        for name in names:
            rows[name] += datum_columns[name]
    stacked = {}
    for name in names:
        with torch.set_grad_enabled(differentiable):
            stacked[name] = torch.stack(rows.pop(name)).reshape(m, k, *weights[name].shape)
    return stacked


def datum_rows(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    names: Sequence[str],
    x: Tensor,
    vectors: Float[Tensor, "1 k C"],
    differentiable: bool,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return one example's detached output (1, C), and its k rows by parameter name."""
    k = vectors.shape[1]
    parameters = [weights[name] for name in names]
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    with torch.enable_grad():
        output = model_outputs(model, x)
        for j in range(k):
            gradients: Sequence[Tensor | None] = [None] * len(names)
            if output.requires_grad:
                gradients = torch.autograd.grad(
                    output,
                    parameters,
                    grad_outputs=vectors[:, j],
                    retain_graph=differentiable or j < k - 1,
                    create_graph=differentiable,
                    allow_unused=True,
                )
            for name, p, g in zip(names, parameters, gradients, strict=True):
                rows[name].append(torch.zeros_like(p) if g is None else dense(g))
    return output.detach(), rows


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient as a dense tensor, even if it is sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def vmap_rows(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    names: Sequence[str],
    x: Tensor,
    vectors: Float[Tensor, "m k C"],
    differentiable: bool,
) -> dict[str, Tensor]:
    """Return the same rows as ``loop_rows``, vectorized over examples.

    The rows of some modules are wrong, so compare them with the rows of ``loop_rows`` first.
    """
    # Not every module can be vectorized. Some raise an error, and modules that keep references to
    # their parameters (such as recurrent ones) return other numbers.
    constant = {name: p.detach() for name, p in weights.items()}
    variables = {name: constant.pop(name) for name in names}
    with_wrappers = {id(p): name for name, p in model.named_parameters()}
    in_model = {name: with_wrappers[id(p)] for name, p in weights.items()}

    def output(parameters: dict[str, Tensor], datum: Tensor) -> Tensor:
        inputs = (datum.unsqueeze(0),)
        values = {in_model[name]: value for name, value in {**constant, **parameters}.items()}
        output = functional_call(model, values, inputs)
        return check_output(scores_of(output), 1)[0]

    def rows_of_datum(datum: Tensor, cotangents: Tensor) -> dict[str, Tensor]:
        pull = vjp(lambda parameters: output(parameters, datum), variables)[1]
        # A loop, because a second level of vmap exceeds the limits of some backward functions.
        rows = [pull(cotangent)[0] for cotangent in cotangents]
        return {name: torch.stack([row[name] for row in rows]) for name in names}

    with torch.set_grad_enabled(differentiable), warnings.catch_warnings():
        # vmap loops over operations without a batching rule, which is still faster than the loop.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        return vmap(rows_of_datum)(x.clone(), vectors)


# ------------------------------------------------------------ tolerances


def close(value: Tensor, expected: Tensor, norm: Tensor | float = 0.0, factor: float = 1.0) -> bool:
    """Return whether two tensors are finite and equal up to rounding, measured in norm."""
    # ``norm`` belongs to the tensors from which rounding errors came, if it is larger.
    relative, rounding = tolerances(expected)
    allowed = relative * expected.norm() + rounding * norm
    return value.shape == expected.shape and bool((value - expected).norm() <= factor * allowed)


def close_outputs(value: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Return whether outputs (n, C) agree up to rounding.

    The allowed error is relative to the norm of each example's output, or to ``scale`` if ``scale``
    is larger.
    """
    if value.shape != expected.shape:
        return False
    allowed = tolerances(expected)[0] * torch.maximum(expected.norm(dim=1), scale)
    return bool(((value - expected).norm(dim=1) <= allowed).all())


def tolerances(like: Tensor) -> tuple[float, float]:
    """Return the tolerances for tensors of this type and device.

    The first is the largest allowed relative error. The second is the share of the largest norm
    below which differences count as rounding errors.
    """
    relative, rounding = _TOLERANCES.get(like.dtype, _COARSE_TOLERANCES)
    if like.is_cuda and like.dtype == torch.float32:
        relative *= _CONVOLUTION_FACTOR
    return relative, rounding
