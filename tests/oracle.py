"""The linearised Laplace evidence by dense float64 matrices and plain autograd.

Slow and obvious on purpose: it shares no code with the library's rows, roots or structures. All
results carry a graph into hyperparameters.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def jacobian(model: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """∂f/∂w: name → (N, C, numel), one backward pass for each entry, with a graph."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    rows: dict[str, list[Tensor]] = {name: [] for name in weights}
    outputs = model(x[:1]).shape[1]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for n in range(len(x)):
            f = model(x[n : n + 1])[0]
            for c in range(len(f)):
                gradients = torch.autograd.grad(
                    f[c], list(weights.values()), create_graph=True, allow_unused=True
                )
                for (name, w), g in zip(weights.items(), gradients, strict=True):
                    rows[name].append((torch.zeros_like(w) if g is None else g).flatten())
    for module, mode in modes.items():
        module.training = mode
    return {name: torch.stack(r).reshape(len(x), outputs, -1) for name, r in rows.items()}


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """f(x) in evaluation mode, (N, C), with a graph."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    f = model(x)
    for module, mode in modes.items():
        module.training = mode
    return f


def categorical_hessian(f: Tensor) -> Tensor:
    """Λ of the softmax, (N, C, C)."""
    p = f.softmax(-1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


def root_matrix(hessian: Tensor, kind: str, f: Tensor) -> Tensor:
    """R of the softmax with R Rᵀ = Λ, (N, C, C); the eigenbasis is held constant."""
    p = f.softmax(-1)
    fisher = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]
    if kind == "fisher":
        return fisher
    _, basis = torch.linalg.eigh((fisher.mT @ fisher).detach())
    return fisher @ basis.flip(-1)


def block_matrix(
    jac: Tensor, hessian: Tensor, columns: Tensor | None, kind: str, f: Tensor
) -> Tensor:
    """H_B = Σ_n J_nᵀ Λ_n[B] J_n, (P, P), for the columns of a block (−1 is padding)."""
    if columns is None:
        return torch.einsum("ncp,ncd,ndq->pq", jac, hessian, jac)
    total = jac.new_zeros(jac.shape[-1], jac.shape[-1])
    for n in range(len(jac)):
        chosen = [int(c) for c in columns[n] if c >= 0]
        if not chosen:
            continue
        if kind == "subblock":
            rows = jac[n, chosen]
            total = total + rows.T @ hessian[n][chosen][:, chosen] @ rows
        else:
            rows = root_matrix(hessian[n : n + 1], kind, f[n : n + 1])[0][:, chosen].T @ jac[n]
            total = total + rows.T @ rows
    return total


def log_det(h: Tensor, precision: Tensor, parts: Sequence[Tensor] | None = None) -> Tensor:
    """log|I + P0^{-1/2} H P0^{-1/2}|, H restricted to a partition of the parameter indices."""
    scaled = h / precision.sqrt()[:, None] / precision.sqrt()
    if parts is None:
        parts = [torch.arange(len(h))]
    eye = torch.eye(len(h), dtype=h.dtype)
    return sum(
        (torch.linalg.slogdet((eye + scaled)[part][:, part])[1] for part in parts),
        start=h.new_zeros(()),
    )


def parts_of(structure: str, sizes: Mapping[str, int], by: str = "tensor") -> list[Tensor]:
    """The partition of the P parameter indices that a structure stands for."""
    total = sum(sizes.values())
    if structure in ("ntk", "full"):
        return [torch.arange(total)]
    if structure == "diag":
        return [torch.tensor([i]) for i in range(total)]
    groups: dict[str, list[int]] = {}
    start = 0
    for name, size in sizes.items():
        key = name if by == "tensor" else name.rpartition(".")[0]
        groups.setdefault(key, []).extend(range(start, start + size))
        start += size
    return [torch.tensor(indices) for indices in groups.values()]


def flat(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
    """Precisions as one vector (P,)."""
    return torch.cat([tensors[name].expand_as(w).flatten() for name, w in weights.items()])
