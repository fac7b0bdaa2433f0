"""Rows of any module, one example at a time.

``loop_rows`` is the reference: one forward pass of the model for each example and one backward pass
for each row. Other ways have to agree with it up to rounding (``close``). ``vmap_rows`` computes
the same for all data at once, where the module's operations can be vectorised.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from evigrad.inputs import scores_of
from evigrad.network.arguments import check_output, model_outputs

# Largest relative difference, and the part of the largest norm below which all is rounding (a
# bias in front of a normalisation, say, has no rows but that).
_TOLERANCES = {torch.float64: (1e-6, 1e-12), torch.float32: (1e-3, 1e-6)}
_COARSE_TOLERANCES = (5e-2, 1e-3)
# Convolutions on a GPU round to TF32 unless told otherwise.
_TF32_FACTOR = 10.0


def loop_rows(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    names: Sequence[str],
    x: Tensor,
    vectors: Float[Tensor, "m k C"],
    differentiable: bool,
) -> dict[str, Tensor]:
    """Return rows by plain automatic differentiation, example by example and row by row.

    They are ``vectors[n, j]ᵀ ∂f(x_n)/∂parameter`` (m, k, *parameter shape) by the names of the
    parameters; ``differentiable`` gives them a graph into everything else.
    """
    m, k, _ = vectors.shape
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for n in range(m):
        _, of_datum = datum_rows(
            model, weights, names, x[n : n + 1], vectors[n : n + 1], differentiable
        )
        for name in names:
            rows[name] += of_datum[name]
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
    """One example's output (1, C), detached, and name → its k rows of the parameter's shape."""
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
    """A gradient that may be sparse, as a dense tensor."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def vmap_rows(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    names: Sequence[str],
    x: Tensor,
    vectors: Float[Tensor, "m k C"],
    differentiable: bool,
) -> dict[str, Tensor]:
    """``loop_rows``, vectorised over the data. Compare with ``loop_rows`` before relying on it."""
    # Not every module can be vectorised: some raise an error, and one that keeps references to its
    # parameters (as recurrent ones do) gives other numbers.
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
        # A loop, as a second level of vmap takes some backward functions past what they support.
        rows = [pull(cotangent)[0] for cotangent in cotangents]
        return {name: torch.stack([row[name] for row in rows]) for name in names}

    with torch.set_grad_enabled(differentiable), warnings.catch_warnings():
        # vmap loops over operations without a batching rule, which still beats ``loop_rows``.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        return vmap(rows_of_datum)(x.clone(), vectors)


# ------------------------------------------------------------ how nearly numbers have to agree


def close(value: Tensor, expected: Tensor, norm: Tensor | float = 0.0, factor: float = 1.0) -> bool:
    """Whether two tensors agree in norm up to rounding; False where one is not finite."""
    # ``norm`` belongs to the tensors that rounding errors came from, where it is larger.
    relative, rounding = tolerances(expected)
    allowed = relative * expected.norm() + rounding * norm
    return value.shape == expected.shape and bool((value - expected).norm() <= factor * allowed)


def close_outputs(value: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Whether outputs (n, C) agree up to rounding of the largest norm ``scale`` of the batch."""
    if value.shape != expected.shape:
        return False
    allowed = tolerances(expected)[0] * torch.maximum(expected.norm(dim=1), scale)
    return bool(((value - expected).norm(dim=1) <= allowed).all())


def tolerances(like: Tensor) -> tuple[float, float]:
    """Relative tolerance in this type, and the part of the largest norm that is rounding."""
    relative, rounding = _TOLERANCES.get(like.dtype, _COARSE_TOLERANCES)
    if like.is_cuda and like.dtype == torch.float32:
        relative *= _TF32_FACTOR
    return relative, rounding
