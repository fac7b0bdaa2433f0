"""Whole Jacobians by plain autograd, entry by entry; shares no code with the library."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def weights_of(model: nn.Module, but: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, except the named ones, by names before compiling."""
    named = {n.removeprefix("_orig_mod."): p for n, p in model.named_parameters()}
    return {n: p for n, p in named.items() if p.requires_grad and n not in set(but)}


def jacobian(
    model: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor, graph: bool = False
) -> dict[str, Tensor]:
    """Name → ∂f(x_n)_c/∂parameter, (m, C, *shape)."""
    columns: dict[str, list[Tensor]] = {name: [] for name in weights}
    with sdpa_kernel(SDPBackend.MATH):
        for n in range(len(x)):
            f = model(x[n : n + 1].clone())[0]
            for entry in f:
                if not entry.requires_grad:
                    entry = entry + 0 * sum(w.sum() for w in weights.values())
                gradients = torch.autograd.grad(
                    entry,
                    list(weights.values()),
                    retain_graph=True,
                    create_graph=graph,
                    allow_unused=True,
                )
                for (name, w), g in zip(weights.items(), gradients, strict=True):
                    columns[name].append(torch.zeros_like(w) if g is None else g)
    return {
        name: torch.stack(entries).reshape(len(x), -1, *weights[name].shape)
        for name, entries in columns.items()
    }


def rows(jac: Mapping[str, Tensor], vectors: Tensor) -> dict[str, Tensor]:
    """Name → vectors[n, j]ᵀ J_n, (m, k, *shape)."""
    return {name: torch.einsum("nkc,nc...->nk...", vectors, j) for name, j in jac.items()}


def random(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def functional(parts: Mapping[str, Tensor]) -> Tensor:
    """A random function of the rows, not linear in them."""
    return sum(
        (
            (random(*r.shape, seed=i) * r).sum() + (r**2).sum().log1p()
            for i, r in enumerate(parts.values())
        ),
        start=torch.zeros((), dtype=torch.float64),
    )


def gradients(value: Tensor, arguments: Sequence[Tensor]) -> list[Tensor]:
    """Of a value in its arguments, zeros where it does not depend on one."""
    if not value.requires_grad:
        return [torch.zeros_like(a) for a in arguments]
    slopes = torch.autograd.grad(value, arguments, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(arguments, slopes, strict=True)]


def scale(values: Sequence[Tensor]) -> float:
    """The largest norm, but at least 1."""
    return max(1.0, *(float(v.detach().norm()) for v in values))


def assert_rows(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal to 1e-10 of their norm, name by name."""
    assert list(actual) == list(expected)
    for name, e in expected.items():
        a = actual[name]
        assert a.shape == e.shape, name
        assert (a - e).norm() <= 1e-10 * max(1.0, float(e.norm())), name
