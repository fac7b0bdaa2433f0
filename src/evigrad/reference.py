"""The method in dense float64 matrices: short, slow, and the reference for every fast path.

The estimators do not use these functions. Each Jacobian, curvature and determinant is formed
explicitly, as in the paper, and differentiated by autograd. Use networks with about 100 weights.
Equation numbers refer to Immer et al. (2023), *Stochastic Marginal Likelihood Gradients using
Neural Tangent Kernels*. For a guided tour of this file, see docs/theory.md.

There are N examples, C outputs and P weights w, and T is the temperature. The Jacobian J_n (C × P)
is ∂f(x_n)/∂w, and the diagonal matrix P0 contains the prior precisions. Λ_n (C × C) is the
curvature of −(1/T) log p(y_n|f) with respect to the outputs, and R_n is a root: R_n R_nᵀ = Λ_n. A
block B lists columns of R_n for some examples. The block keeps the part M_n = R_n[:, B] R_n[:, B]ᵀ
of Λ_n. If it lists all columns, M_n = Λ_n. Then

    H_B = Σ_n J_nᵀ M_n J_n,    K_B = J P0⁻¹ Jᵀ M,    ℓ(B) = log|I + H_B P0⁻¹| = log|I + K_B|.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from evigrad.blocks import Block
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.inputs import Inputs
from evigrad.likelihoods import Categorical, Likelihood
from evigrad.passes.parameter_blocks import ParameterPartition, partition_names

__all__ = [
    "anchored_log_det",
    "ggn",
    "gradients",
    "hessian",
    "jacobian",
    "kept_curvature",
    "kernel_log_det",
    "kfac_log_det",
    "log_det",
    "log_evidence",
    "matrix_root",
    "outputs",
    "parameter_partition",
    "softmax_hessian",
    "softmax_root",
    "used_hessian",
    "vector",
]

# The library's KFAC has an exact block for a parameter without Kronecker factors up to this size,
# and a diagonal above it.
DENSE_LIMIT = 512

# Structures whose blocks of H are a partition of the weights.
_PARTITIONED = ("ntk", "full", "blockdiag", "diag")

# Two Hessians are equal up to this multiple of √eps, relative to the largest entry.
_SAME_HESSIAN = 10.0

# ------------------------------------------------------------ the network and the likelihood


def outputs(model: nn.Module, x: Any) -> Float[Tensor, "N C"]:
    """Return f(x) in evaluation mode, with a graph."""
    with _evaluation_mode(model):
        return model(**x) if isinstance(x, Mapping) else model(x)


def jacobian(model: nn.Module, weights: Mapping[str, Tensor], x: Inputs) -> Float[Tensor, "N C P"]:
    """Return J_n of every example (Eq. 3), with one backward pass for each entry of the outputs.

    The columns follow the order of ``weights``. The graph includes everything that f depends on.
    """
    rows = []
    with _evaluation_mode(model), sdpa_kernel(SDPBackend.MATH):
        for n in range(len(x)):
            f = model(x[n : n + 1])[0]
            gradients = [_gradients(f[c], weights.values()) for c in range(len(f))]
            rows.append(torch.stack([_flat(row) for row in gradients]))
    return torch.stack(rows)


def hessian(likelihood: Likelihood, f: Float[Tensor, "N C"], y: Tensor) -> Float[Tensor, "N C C"]:
    """Return Λ_n = −∇²_f log p(y_n|f) at temperature 1 (Eq. 4)."""
    if not f.requires_grad:
        f = f.detach().requires_grad_()
    log_prob = likelihood.log_prob(f, y).sum()
    (score,) = torch.autograd.grad(log_prob, f, create_graph=True)
    columns = [_gradients(score[:, c].sum(), [f])[0] for c in range(f.shape[1])]
    return -torch.stack(columns, dim=2)


def used_hessian(
    likelihood: Likelihood, f: Float[Tensor, "N C"], y: Tensor
) -> Float[Tensor, "N C C"]:
    """Return the method ``hessian`` times the weights of the targets, as the estimators use it."""
    used, weights = likelihood.at(y).hessian(f), likelihood.weights(y)
    if weights is None:
        return used
    root = weights.to(f).sqrt().reshape(len(f), -1).expand(f.shape)
    return root[:, :, None] * used * root[:, None, :]


def softmax_hessian(f: Float[Tensor, "N C"]) -> Float[Tensor, "N C C"]:
    """Return Λ of the softmax in closed form, diag(p) − p pᵀ."""
    p = f.softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


# ------------------------------------------------------------ roots and blocks of outputs


def softmax_root(f: Float[Tensor, "N C"], kind: str) -> Float[Tensor, "N C C"]:
    """Return a root R of the softmax's Λ, so that R Rᵀ = Λ.

    ``fisher`` is diag(√p) − p √pᵀ, whose column d corresponds to class d. ``eigen`` is this root
    times Q, the eigenvectors of RᵀR in order of descending eigenvalues. Q is held constant, because
    any orthogonal Q gives a root.
    """
    half = (0.5 * f.log_softmax(-1)).exp()  # √p, with finite derivatives if p underflows
    fisher = torch.diag_embed(half) - half.square()[:, :, None] * half[:, None, :]
    if kind == "fisher":
        return fisher
    rotation = torch.linalg.eigh((fisher.mT @ fisher).detach()).eigenvectors.flip(-1)
    return fisher @ rotation


def matrix_root(curvature: Float[Tensor, "N C C"], kind: str) -> Float[Tensor, "N C C"]:
    """Return a root R of any Λ: symmetric (``fisher``), or V√λ with descending λ (``eigen``).

    R = R₀ + (I − ½Π)(Λ − Λ₀)R₀⁺ᵀ, where Λ₀ is the value of Λ without a graph, R₀ is the root of Λ₀,
    and Π = R₀R₀⁺. The value of R is R₀, and R Rᵀ has the same derivative as Λ.
    """
    frozen = curvature.detach()
    values, vectors = torch.linalg.eigh(frozen)
    present = vectors.flip(-1) * values.flip(-1).clamp(min=0).sqrt()[:, None]
    if kind == "fisher":
        present = present @ vectors.flip(-1).mT
    inverse = torch.linalg.pinv(present, rtol=1e-7)
    change = (curvature - frozen) @ inverse.mT
    return present + change - 0.5 * present @ inverse @ change


def kept_curvature(
    curvature: Float[Tensor, "N C C"],
    columns: Int[Tensor, "N k"] | None,
    root: Float[Tensor, "N C C"] | None = None,
) -> Float[Tensor, "N C C"]:
    """Return M_n, the part of Λ_n that a block with these root columns keeps (−1 is padding).

    Without a root, M_n is the paper's sub-block: the rows and columns of Λ_n for the listed
    outputs.
    """
    if columns is None:
        return curvature
    listed = (
        (columns[..., None] == torch.arange(curvature.shape[1], device=curvature.device))
        .any(1)
        .to(curvature)
    )
    if root is None:
        return listed[:, :, None] * curvature * listed[:, None, :]
    kept = root * listed[:, None, :]
    return kept @ kept.mT


# ------------------------------------------------------------ log-determinants


def ggn(jac: Float[Tensor, "N C P"], kept: Float[Tensor, "N C C"]) -> Float[Tensor, "P P"]:
    """Return H_B = Σ_n J_nᵀ M_n J_n, the generalized Gauss-Newton matrix (Eq. 7)."""
    return torch.einsum("ncp,ncd,ndq->pq", jac, kept, jac)


def log_det(
    h: Float[Tensor, "P P"],
    precision: Float[Tensor, " P"],
    partition: Sequence[Int[Tensor, " _"]] | None = None,
) -> Float[Tensor, ""]:
    """Return log|I + H_𝒫 P0⁻¹|, with H restricted to the blocks of a partition 𝒫 (Eq. 8).

    By default, 𝒫 has one block. A finer partition gives a larger log-determinant (Theorem 1).
    """
    matrix = (
        torch.eye(len(h), dtype=h.dtype, device=h.device)
        + h / precision.sqrt() / precision.sqrt()[:, None]
    )
    blocks = [torch.arange(len(h), device=h.device)] if partition is None else partition
    return torch.stack([torch.linalg.slogdet(matrix[b][:, b])[1] for b in blocks]).sum()


def kernel_log_det(
    jac: Float[Tensor, "N C P"],
    kept: Float[Tensor, "N C C"],
    precision: Float[Tensor, " P"],
) -> Float[Tensor, ""]:
    """Return log|I + J P0⁻¹ Jᵀ M| from the neural tangent kernel (Eqs. 6 and 7).

    The result equals ``log_det(ggn(jac, kept), precision)`` (Theorem 3). The matrix is not
    symmetric, which is acceptable in float64. The estimators use a symmetric matrix instead.
    """
    num_rows = jac.shape[0] * jac.shape[1]
    rows = jac.reshape(num_rows, -1)
    kernel = (rows / precision) @ rows.T @ torch.block_diag(*kept)
    return torch.linalg.slogdet(torch.eye(num_rows, dtype=jac.dtype, device=jac.device) + kernel)[1]


def parameter_partition(
    structure: str, weights: Mapping[str, Tensor], groups: ParameterPartition = "tensor"
) -> list[Int[Tensor, " _"]]:
    """Return the partition 𝒫 of weight indices 0 … P − 1 for a structure other than ``kfac``.

    Raises:
        ConfigurationError: If the structure has no partition.
    """
    if structure not in _PARTITIONED:
        raise ConfigurationError(
            f"The structure must be one of {', '.join(_PARTITIONED)}, got {structure!r}. For a"
            " custom curvature, pass custom_log_det=... to log_evidence or gradients."
        )
    sizes = [w.numel() for w in weights.values()]
    every = torch.arange(sum(sizes), device="cpu")
    if structure in ("ntk", "full"):
        return [every]
    if structure == "diag":
        return list(every.split(1))
    indices = dict(zip(weights, every.split(sizes), strict=True))
    blocks = partition_names(list(weights), groups).values()
    return [torch.cat([indices[name] for name in names]) for names in blocks]


def kfac_log_det(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    x: Inputs,
    kept: Float[Tensor, "N C C"],
    precisions: Mapping[str, Tensor],
    sharing: str = "expand",
) -> Float[Tensor, ""]:
    """Return Σ log|I + (B ⊗ A)/(count · δ)| over weight matrices, plus terms for other weights.

    The input of a linear or convolutional layer at position t is a_nt. G_nt is the Jacobian of the
    network's outputs with respect to the layer's output at t, and δ is the prior precision. For
    ``sharing="expand"``,

        A = Σ_n Σ_t a_nt a_ntᵀ,    B = Σ_n Σ_t G_ntᵀ M_n G_nt,    count = number of pairs (n, t).

    With ``reduce``, each example has one position, with the mean of a_nt and the sum of G_nt over t
    (Eschenhagen et al., 2023). KFAC does not give a bound.
    """
    factors = _layer_factors(model, weights, x)
    terms = []
    for name, (a, g) in factors.items():
        if sharing == "reduce":
            a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
        left = torch.einsum("ncto,ncd,ndtp->op", g, kept, g)
        right = torch.einsum("nti,ntj->ij", a, a)
        product = torch.kron(left.contiguous(), right.contiguous()) / a.shape[:2].numel()
        terms.append(log_det(product, precisions[name].expand(weights[name].shape).flatten()))
    others = {name: w for name, w in weights.items() if name not in factors}
    if others:
        jac = jacobian(model, others, x).split([w.numel() for w in others.values()], dim=2)
        for (name, w), part in zip(others.items(), jac, strict=True):
            precision = precisions[name].expand(w.shape).flatten()
            structure = "full" if w.numel() <= DENSE_LIMIT else "diag"
            partition = parameter_partition(structure, {name: w})
            terms.append(log_det(ggn(part, kept), precision, partition))
    return torch.stack(terms).sum()


# ------------------------------------------------------------ the estimate


def log_evidence(
    evidence: Evidence,
    block: Block,
    *,
    groups: ParameterPartition = "tensor",
    sharing: str = "expand",
    curvature: Callable[[Tensor], Tensor] | None = None,
    custom_log_det: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Float[Tensor, ""]:
    """Return the estimate of log q(D|h) from a block, in nats, with a graph (Algorithm 1).

    Args:
        evidence: Evidence that contains the model, the likelihood, the prior and the estimator.
        block: Block from ``evidence.blocks(...)``, with its inputs and targets.
        groups: The ``parameter_partition`` of the evidence.
        sharing: The ``sharing`` of the evidence.
        curvature: Λ(f) at temperature 1, such as ``likelihood.hessian``. It is required if the
            Hessian depends on the targets. Default: the Hessian of the likelihood's ``log_prob``.
        custom_log_det: ℓ of a custom curvature as a function of H (P, P) and the precisions (P,),
            both in the order of ``evidence.weights()``. It is required for a custom curvature, and
            must not use code of that curvature.

    Raises:
        ConfigurationError: If the estimator samples labels (``mc``) or has a custom curvature
            without ``custom_log_det``. It is also raised if the likelihood's ``hessian`` is not the
            Hessian of its ``log_prob`` at these targets, and ``curvature`` is not given.
    """
    spec, likelihood, temperature = evidence.estimator, evidence.likelihood, evidence.temperature
    if (spec.custom is None) != (custom_log_det is None):
        raise ConfigurationError(
            f"{spec.name} has {'no' if spec.custom is None else 'a'} custom curvature, so"
            f" custom_log_det must be {'omitted' if spec.custom is None else 'given'}. Pass a"
            " function of H and the precisions for a custom curvature, and for no other."
        )
    weights, precisions = evidence.weights(), evidence.prior.precisions()
    x, y, columns = block.inputs, block.targets, block.columns
    assert y is not None
    f = outputs(evidence.model, x)
    log_prob = likelihood.log_prob(f, y)
    if spec.curvature == "mc":
        raise ConfigurationError(
            "A block does not contain the labels sampled by 'mc', so there is no reference for this"
            " curvature. Use another curvature."
        )
    if spec.curvature == "ef":  # M_n is the outer product of the score
        (score,) = torch.autograd.grad(log_prob.sum(), f, create_graph=True)
        whole, columns = score[:, :, None] * score[:, None, :], None
    else:
        whole = _checked_hessian(likelihood, f, y) if curvature is None else curvature(f)
    root = None
    if evidence.root != "subblock" and likelihood.couples_outputs:  # a diagonal Λ has one root
        softmax = isinstance(likelihood, Categorical)
        root = softmax_root(f, evidence.root) if softmax else matrix_root(whole, evidence.root)
    precision, scale = vector(precisions, weights), block.scale
    if spec.scaled:  # the curvature of the block is multiplied, not its log-determinant
        precisions = {name: value / scale for name, value in precisions.items()}
        scale = 1.0
    scaled_precision = vector(precisions, weights)
    kfac = spec.structure == "kfac" and custom_log_det is None
    jac = None if kfac else jacobian(evidence.model, weights, x)

    def entropy(listed: Int[Tensor, "m k"] | None) -> Float[Tensor, ""]:
        """Return ℓ of the rows listed in these columns."""
        kept = kept_curvature(whole, listed, root) / temperature
        if jac is None:
            return kfac_log_det(evidence.model, weights, x, kept, precisions, sharing)
        if custom_log_det is not None:
            return custom_log_det(ggn(jac, kept), scaled_precision)
        if spec.structure == "ntk":
            return kernel_log_det(jac, kept, scaled_precision)
        partition = parameter_partition(spec.structure, weights, groups)
        return log_det(ggn(jac, kept), scaled_precision, partition)

    if block.anchored is None or columns is None:
        determinant = scale * entropy(columns)
    else:
        determinant = anchored_log_det(
            entropy, columns, block.anchored.labels, block.anchored.weights
        )
    deviations = vector(evidence.prior.deviations(weights), weights).detach()
    log_prior = -0.5 * (precision * deviations.square()).sum()
    log_likelihood = (block.likelihood_weights * log_prob).sum() / temperature
    return log_likelihood + log_prior - 0.5 * evidence.log_det_weight * determinant


def anchored_log_det(
    entropy: Callable[[Tensor], Tensor],
    columns: Int[Tensor, "m k"],
    labels: Int[Tensor, "m k"],
    weights: Sequence[float],
) -> Float[Tensor, ""]:
    """Return ℓ(Z) + Σ_b w_b (ℓ(Z ∪ B_b) − ℓ(Z)), in expectation an upper bound on ℓ of all rows.

    ``entropy`` returns ℓ of the listed columns. ``labels`` are 0 for a column of the anchors Z, b
    for a column in B_b, and −1 for all other columns. ``weights`` contains w_b, which is one over
    the probability of drawing B_b.
    """

    def where(listed: Bool[Tensor, "m k"]) -> Float[Tensor, ""]:
        return entropy(torch.where(listed, columns, -1))

    anchors = where(labels == 0)
    total = anchors
    for b, weight in enumerate(weights, start=1):
        total = total + weight * (where((labels == 0) | (labels == b)) - anchors)
    return total


def gradients(evidence: Evidence, block: Block, **settings: Any) -> dict[str, Tensor]:
    """Return the gradient of −(log evidence + log hyperprior)/N by name of the hyperparameter.

    ``settings`` are keyword arguments of ``log_evidence``.
    """
    named = evidence.hyperparameters()
    objective = log_evidence(evidence, block, **settings) + evidence.prior.log_hyperprior()
    values = _gradients(-objective / evidence.num_data, named.values())
    return {name: value.detach() for name, value in zip(named, values, strict=True)}


# ------------------------------------------------------------ helpers


def vector(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Float[Tensor, " P"]:
    """Return the tensors as a single vector, after broadcasting each to the shape of its weight."""
    return _flat([tensors[name].expand_as(w) for name, w in weights.items()])


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _gradients(value: Tensor, arguments: Any) -> Sequence[Tensor]:
    return torch.autograd.grad(
        value, list(arguments), create_graph=True, allow_unused=True, materialize_grads=True
    )


def _checked_hessian(likelihood: Likelihood, f: Tensor, y: Tensor) -> Float[Tensor, "N C C"]:
    """Return the Hessian at the targets, or raise an error if the estimators use another matrix."""
    whole, used = hessian(likelihood, f, y), used_hessian(likelihood, f.detach(), y)
    eps = torch.finfo(f.dtype).eps
    if not (whole - used).abs().max() <= _SAME_HESSIAN * eps**0.5 * (used.abs().max() + eps**0.5):
        raise ConfigurationError(
            f"The Hessian of {type(likelihood).__name__}.log_prob at these targets differs from"
            " its hessian(f), which the estimators use. If the Hessian depends on the targets, pass"
            " curvature=likelihood.hessian. Otherwise, hessian or log_prob is wrong."
        )
    return whole


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _layer_factors(
    model: nn.Module, weights: Mapping[str, Tensor], x: Inputs
) -> dict[str, tuple[Float[Tensor, "N T i"], Float[Tensor, "N C T o"]]]:
    """Return a_nt and G_nt of each weight matrix. Further calls of a layer add positions."""
    names = {id(w): name for name, w in weights.items()}
    calls: dict[str, list[tuple[nn.Module, Tensor, Tensor]]] = {}

    def note(module: nn.Module, arguments: tuple[Tensor, ...], result: Tensor) -> None:
        if id(module.weight) in names:
            calls.setdefault(names[id(module.weight)], []).append((module, arguments[0], result))

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    f = outputs(model, x)
    for hook in hooks:
        hook.remove()
    factors = {}
    for name, uses in calls.items():
        inputs, gradients = [], []
        for module, a, result in uses:
            g = torch.stack([_gradients(f[:, c].sum(), [result])[0] for c in range(f.shape[1])], 1)
            if isinstance(module, nn.Conv2d):  # a position is an output pixel and its patch
                assert not isinstance(module.padding, str)
                patches = nn.Unfold(
                    module.kernel_size, module.dilation, module.padding, module.stride
                )
                inputs.append(patches(a).mT)
                gradients.append(g.flatten(3).mT)
            else:
                inputs.append(a.reshape(len(a), -1, a.shape[-1]))
                gradients.append(g.reshape(*g.shape[:2], -1, g.shape[-1]))
        factors[name] = torch.cat(inputs, dim=1), torch.cat(gradients, dim=2)
    return factors
