"""Compute covariances J Σ Jᵀ of outputs, where Σ = (H + P0)⁻¹ is the covariance of the weights.

J contains the Jacobian rows of some examples. The covariances of independent blocks of weights are
added. Each block computes the matrix J Σ^{1/2}. The product of this matrix and its transpose is the
covariance, which is therefore positive semidefinite.

The kernel form does not need a matrix of the size of the weights. It subtracts from the prior's
covariance P0⁻¹ the part that is explained by the data's rows A:

    Σ = P0⁻¹ − P0⁻¹ Aᵀ (I + S)⁻¹ A P0⁻¹,      S = A P0⁻¹ Aᵀ.

If A contains only some of the rows, they explain less, and the result is an upper bound on the
covariance.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import is_finite
from evigrad.core.curvature.base import ROWS_AT_ONCE
from evigrad.core.curvature.dense import BlockStatistic
from evigrad.core.curvature.kfac import Factors, KfacStatistic
from evigrad.core.curvature.linalg import check_finite_curvature, factor_identity_plus, psd_eigen
from evigrad.core.curvature.ntk import NtkStatistic
from evigrad.core.curvature.rows import slabs
from evigrad.core.roots import one_hot, unit_vectors
from evigrad.errors import NotFiniteError
from evigrad.network import Linearization
from evigrad.posterior.updates import Update


@dataclass(frozen=True, eq=False)
class Dense:
    """A block of parameters with a full covariance matrix."""

    names: Sequence[str]  # in the matrix's order
    root: Float[Tensor, " n"]  # the diagonal of P0^{-1/2}
    factor: Float[Tensor, "n n"]  # the Cholesky factor of I + P0^{-1/2} H P0^{-1/2}

    @classmethod
    def of(cls, names: Sequence[str], hessian: Tensor, precision: Tensor) -> "Dense":
        """Return the block of the named parameters, from their H (n, n) and precisions (n,)."""
        root = precision.rsqrt()
        return cls(names, root, factor_identity_plus(root[:, None] * hessian * root))

    def whitened(self, rows: Mapping[str, Tensor]) -> Float[Tensor, "m k n"]:
        """Return J Σ^{1/2} for the parameters' rows (m, k, *shape)."""
        flat = [rows[name].flatten(2).to(self.factor) for name in self.names]
        scaled = torch.cat(flat, 2).mul_(self.root)
        solved = torch.linalg.solve_triangular(self.factor, scaled.flatten(0, 1).mT, upper=False)
        return solved.mT.unflatten(0, scaled.shape[:2])


@dataclass(frozen=True, eq=False)
class Diagonal:
    """A block of one parameter, whose weights are independent."""

    name: str
    std: Float[Tensor, " n"]  # standard deviations of the weights

    @property
    def names(self) -> Sequence[str]:
        """Return the name of the parameter, in a list."""
        return [self.name]

    def whitened(self, rows: Mapping[str, Tensor]) -> Float[Tensor, "m k n"]:
        """Return J Σ^{1/2} for the parameter's rows (m, k, *shape)."""
        return rows[self.name].flatten(2).to(self.std) * self.std


@dataclass(frozen=True, eq=False)
class Kronecker:
    """A block of one parameter with H = B ⊗ A / count, in the eigenbases of A and B.

    In these bases, adding the prior precision δ to H adds δ to each eigenvalue. If A has low rank,
    only the eigenvectors U that span its range are stored. All other eigenvalues are zero. With the
    nonzero eigenvalues a, a function f of A + δ I is then

        f(A + δ I) = U f(a + δ) Uᵀ + f(δ) (I − UUᵀ),      (I − UUᵀ)² = I − UUᵀ.

    The columns of I − UUᵀ thus complete the basis. B is treated in the same way.
    """

    name: str
    inputs: Float[Tensor, "G i r"]  # eigenvectors of A
    gradients: Float[Tensor, "G o s"]  # eigenvectors of B
    # (b ⊗ a / count + δ)^{-1/2} of their eigenvalues, and of the zeros outside the ranges.
    std: Float[Tensor, "G q p"]
    # P0^{-1/2} of precisions along one axis, with which H is P0^{-1/2} H P0^{-1/2} above and δ = 1.
    prior_std: Float[Tensor, "G o i"] | None = None

    @classmethod
    def of(cls, name: str, factors: Factors, precision: Tensor, shape: torch.Size) -> "Kronecker":
        """Return the block of the named parameter, from its factors and precision."""
        if varies := precision.ndim > 0:
            factors = factors.scaled(precision, shape)
        sides = [(factors.inputs, factors.count), (factors.gradients, factors.num_rows)]
        # A weight (in, out) has A on its left.
        input_side, gradient_side = sides[::-1] if factors.transposed else sides
        a, inputs = psd_eigen(*input_side)
        b, gradients = psd_eigen(*gradient_side)
        a, b = _with_zeros(a, inputs), _with_zeros(b, gradients)
        curvature = b[:, :, None] * (a / factors.count)[:, None]
        std = (curvature + (1.0 if varies else precision)).rsqrt()
        if not varies:
            return cls(name, inputs, gradients, std)
        sizes = (gradients.shape[-2], inputs.shape[-2])
        return cls(
            name, inputs, gradients, std, precision.expand(shape).reshape(-1, *sizes).rsqrt()
        )

    @property
    def names(self) -> Sequence[str]:
        """Return the name of the parameter, in a list."""
        return [self.name]

    def whitened(self, rows: Mapping[str, Tensor]) -> Float[Tensor, "m k n"]:
        """Return J Σ^{1/2} for the parameter's rows (m, k, *shape)."""
        weight_rows = rows[self.name]
        shape = (self.gradients.shape[-2], self.inputs.shape[-2])
        matrices = weight_rows.reshape(*weight_rows.shape[:2], -1, *shape).to(self.std)
        if self.prior_std is not None:
            matrices = matrices * self.prior_std
        rotated = _in_basis(_in_basis(matrices.mT, self.gradients).mT, self.inputs)
        return (rotated * self.std).flatten(2)


def _with_zeros(values: Float[Tensor, "G r"], vectors: Float[Tensor, "G n r"]) -> Tensor:
    """Return the eigenvalues in the columns of ``_in_basis``."""
    size, rank = vectors.shape[-2:]
    return values if rank == size else torch.cat([values, values.new_zeros(len(values), size)], 1)


def _in_basis(matrices: Float[Tensor, "m k G d n"], vectors: Float[Tensor, "G n r"]) -> Tensor:
    """Return matrices times the eigenvectors U, and also times I − UUᵀ if U is not complete."""
    inside = matrices @ vectors
    if vectors.shape[-1] == vectors.shape[-2]:
        return inside
    return torch.cat([inside, matrices - inside @ vectors.mT], dim=-1)


Block = Dense | Diagonal | Kronecker
# Largest size of the products J Σ^{1/2} of several blocks for all outputs.
ROOT_BYTES = 2**27
# Random numbers at once, 128 MiB in float64.
NUMBERS_AT_ONCE = 2**24
_KINDS = {kind.__name__.lower(): kind for kind in (Dense, Diagonal, Kronecker)}


@dataclass(frozen=True, eq=False)
class Explained:
    """The part of the prior's covariance that is explained by the data's rows A.

    ``rows`` contains the columns of A for each parameter, in chunks, before ``scale`` is applied.
    """

    rows: Mapping[str, Sequence[Tensor]]
    scale: Float[Tensor, " R"]  # one number per row
    factor: Float[Tensor, "R R"]  # the Cholesky factor of I + S

    @classmethod
    def of(cls, statistic: NtkStatistic, precisions: Mapping[str, Tensor], like: Tensor) -> Self:
        """Return the explained part, from the rows of a statistic and the precisions (n,)."""
        scale = like.new_ones(statistic.num_rows)
        if statistic.scale is not None:
            scale = statistic.scale.to(like)
        kernel = like.new_zeros(len(scale), len(scale))
        for name, precision in precisions.items():
            kernel += statistic.rows[name].gram(like, precision)
        kernel.mul_(scale).mul_(scale[:, None])
        rows = {name: name_rows.dense().chunks for name, name_rows in statistic.rows.items()}
        return cls(rows, scale, factor_identity_plus(kernel))

    def products(self, block: Diagonal, white: Float[Tensor, "m k n"]) -> Float[Tensor, "R mk"]:
        """Return inner products of the data's rows and the rows ``white``, for one parameter."""
        other = white.flatten(0, 1)
        total = white.new_zeros(len(self.scale), len(other))
        for columns, slab in slabs(self.rows[block.name], white):
            total += (slab * block.std[columns]) @ other[:, columns].mT
        return total

    def root(
        self, products: Float[Tensor, "R mk"], k: int, factor: Tensor | None = None
    ) -> Float[Tensor, "m k R"]:
        """Return a root of the covariance of k outputs per example that the rows explain.

        ``factor`` replaces the factor of I + S.
        """
        scaled, factor = products * self.scale[:, None], self.factor if factor is None else factor
        solved = torch.linalg.solve_triangular(factor, scaled, upper=False)
        return solved.mT.unflatten(0, (-1, k))


@dataclass(frozen=True, eq=False)
class Draws:
    """n drawn functions f + J (w − w*) + Σ V c, in which updates that are not plain have V."""

    changes: Mapping[str, Float[Tensor, "n *parameter"]]  # w − w*
    coefficients: Sequence[Float[Tensor, "n *s _"]]  # c


class Covariance:
    """The covariance of the outputs under Σ: the sum over blocks, minus the explained part.

    A ``partial`` block is computed when it is first used, because its eigenvectors take n³
    operations.
    """

    def __init__(
        self, blocks: Sequence[Block | partial[Kronecker]], explained: Explained | None = None
    ) -> None:
        self._blocks, self.explained = list(blocks), explained

    @property
    def blocks(self) -> Sequence[Block]:
        """Return the blocks, after computing all that are still ``partial``."""
        self._blocks = [block() if isinstance(block, partial) else block for block in self._blocks]
        return self._blocks

    def of_outputs(
        self, linearization: Linearization, correlated: bool = True
    ) -> Float[Tensor, "m C C"] | Float[Tensor, "m C"]:
        """Return the covariances of each example's outputs, or only the variances.

        Many outputs take several backward passes of ``ROWS_AT_ONCE`` outputs each. Their memory
        does not grow with the number of outputs, except for the result, and for the products
        J Σ^{1/2} of correlated outputs.
        """
        f = linearization.outputs
        m, num_outputs = f.shape
        if num_outputs <= ROWS_AT_ONCE:
            total = self._of_rows(_rows(linearization, one_hot(f, None), self.blocks), num_outputs)
            total = f.new_zeros(m, num_outputs, num_outputs) if total is None else total
            return total if correlated else total.diagonal(dim1=1, dim2=2)
        shape = (m, num_outputs, num_outputs) if correlated else (m, num_outputs)
        total = f.new_zeros(shape, dtype=self._dtype)
        if not correlated:
            for columns, vectors in unit_vectors(f, ROWS_AT_ONCE):
                for sign, part in self._roots(_rows(linearization, vectors, self.blocks)):
                    total[:, columns] += sign * part.square().sum(2)
            return total
        for blocks in self._groups(m * num_outputs):
            for sign, root in self.roots(linearization, blocks).items():
                total.baddbmm_(root, root.mT, alpha=sign)
        return total

    def roots(
        self, linearization: Linearization, blocks: Sequence[Block] | None = None
    ) -> dict[int, Float[Tensor, "m C n"]]:
        """Return factors R of all outputs, by sign.

        The products R Rᵀ with the signs 1 or −1 add up to the covariance due to these blocks. This
        also holds between the outputs of different examples.
        """
        f, whole = linearization.outputs, dict[int, Tensor]()
        for columns, vectors in unit_vectors(f, ROWS_AT_ONCE):
            rows = _rows(linearization, vectors, self.blocks if blocks is None else blocks)
            for sign, part in self._roots(rows):
                if part.shape[1] == f.shape[1]:
                    whole[sign] = part
                    continue
                if sign not in whole:
                    whole[sign] = part.new_empty(*f.shape, part.shape[2])
                whole[sign][:, columns] = part
        return whole

    @property
    def width(self) -> int:
        """Return the number of columns of Σ^{1/2}."""
        return sum(map(_width, self.blocks))

    def draws(
        self,
        n: int,
        generator: torch.Generator,
        weights: Mapping[str, Tensor],
        updates: Sequence[Update] = (),
    ) -> Iterator[Draws]:
        """Yield n draws for the named ``weights``, in parts that fit into memory."""
        size = max(1, NUMBERS_AT_ONCE // self.width)
        for start in range(0, n, size):
            yield self._drawn(min(size, n - start), generator, weights, updates)

    def _drawn(
        self,
        n: int,
        generator: torch.Generator,
        weights: Mapping[str, Tensor],
        updates: Sequence[Update],
    ) -> Draws:
        """Return Σ^{1/2} z for n vectors z of standard normal numbers, after the updates.

        ``whitened`` multiplies rows by Σ^{1/2}. So the product is the gradient of the inner product
        of z and ``whitened`` rows with respect to the rows. The kernel form has the root

            Σ^{1/2} = P0^{-1/2} (I − Bᵀ L^{-ᵀ} (L + I)⁻¹ B),    B = A P0^{-1/2},    L Lᵀ = I + S,

        since (L + I)⁻¹ L + Lᵀ (L + I)^{-ᵀ} − (L + I)⁻¹ S (L + I)^{-ᵀ} = I. Roots thus have the
        coefficients z and (L + I)⁻¹ B z. A plain update changes them.
        """
        observed = updates[-1].noise.shape[-1] if updates else 0
        # PyTorch draws groups of 16 numbers. With whole groups, a draw does not depend on n.
        shape = (n, -(-(self.width + observed) // 16) * 16)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        dtype, device = self._dtype, next(iter(weights.values())).device
        noise, errors = noise.to(device, dtype)[:, : self.width + observed].split(
            [self.width, observed], 1
        )
        with torch.enable_grad():
            rows = {
                name: noise.new_zeros(1, n, *(weights[name].shape or (1,))).requires_grad_()
                for block in self.blocks
                for name in block.names
            }
            roots = dict(self._roots((block, rows) for block in self.blocks))
            drawn = {1: noise}
            if (explained := self.explained) is not None:
                parts = noise[None].split([_width(block) for block in self.blocks], 2)
                products: Tensor | None = None
                for block, part in zip(self.blocks, parts, strict=True):
                    if isinstance(block, Diagonal):
                        products = _sum(products, explained.products(block, part))
                assert products is not None
                eye = torch.eye(len(explained.factor), dtype=dtype, device=device)
                drawn[-1] = explained.root(products, n, explained.factor + eye)[0]
        update_coefficients = [update.coefficients(drawn, errors) for update in updates]
        drawn = {sign: sign * z for sign, z in drawn.items()}
        if updates and updates[0].is_plain:
            first, *update_coefficients = update_coefficients
            drawn = {sign: z + first @ updates[0].roots[sign] for sign, z in drawn.items()}
        with torch.enable_grad():
            total = torch.stack([(roots[s][0] * z).sum() for s, z in drawn.items()]).sum()
            changes = torch.autograd.grad(total, list(rows.values()))
        named = zip(rows, changes, strict=True)
        changes = {name: change.reshape(n, *weights[name].shape) for name, change in named}
        return Draws(changes, update_coefficients)

    @property
    def _dtype(self) -> torch.dtype:
        tensors = (t for block in self.blocks for t in vars(block).values())
        return next((t.dtype for t in tensors if isinstance(t, Tensor)), torch.float64)

    def _groups(self, num_rows: int) -> list[list[Block]]:
        """Return groups of blocks. Each group takes a pass over all outputs.

        The products J Σ^{1/2} of a group take at most ``ROOT_BYTES``, or belong to one block.
        """
        if self.explained is not None:  # which has the products of all blocks
            return [list(self.blocks)]
        groups: list[list[Block]] = []
        room = 0
        for block in self.blocks:
            size = self._dtype.itemsize * num_rows * _width(block)
            if not groups or size > room:
                groups.append([])
                room = ROOT_BYTES
            groups[-1].append(block)
            room -= size
        return groups

    def _roots(
        self, rows_of_blocks: Iterable[tuple[Block, Mapping[str, Tensor]]]
    ) -> Iterator[tuple[int, Float[Tensor, "m k n"]]]:
        """Yield factors R whose products R Rᵀ, with the signs 1 or −1, add up to the covariance."""
        parts, products = list[Tensor](), None
        for block, rows in rows_of_blocks:
            parts.append(white := block.whitened(rows))
            if self.explained is not None and isinstance(block, Diagonal):
                products = _sum(products, self.explained.products(block, white))
        if parts:
            yield 1, torch.cat(parts, 2)
        if self.explained is not None and products is not None:
            yield -1, self.explained.root(products, parts[0].shape[1])

    def of_vector(self, vector: Mapping[str, Tensor], updates: Sequence[Update] = ()) -> float:
        """Return vᵀ Σ v for a vector v, which has one tensor for each parameter."""
        row = _as_row(vector)
        total = self._of_rows(((block, row) for block in self.blocks), 1)
        roots = self.roots_of_vector(vector) if updates else {}
        batch = torch.zeros(1, dtype=torch.long, device="cpu")
        explained = sum(float(u.factor(roots, batch).square().sum()) for u in updates)
        return 0.0 if total is None else float(total) - explained

    def roots_of_vector(self, vector: Mapping[str, Tensor]) -> dict[int, Float[Tensor, "1 1 n"]]:
        """Return factors R of a vector, as ``roots`` does for the rows of outputs."""
        row = _as_row(vector)
        return dict(self._roots((block, row) for block in self.blocks))

    def times(self, vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return Σ v for a vector v, as the gradient of ½ vᵀ Σ v with respect to v."""
        names = [name for block in self.blocks for name in block.names]
        with torch.enable_grad():
            leaves = {name: vector[name].detach().clone().requires_grad_() for name in names}
            row = _as_row(leaves)
            total = self._of_rows(((block, row) for block in self.blocks), 1)
            assert total is not None
            parts = torch.autograd.grad(0.5 * total.sum(), list(leaves.values()))
        return dict(zip(names, parts, strict=True))

    def _of_rows(
        self, rows_of_blocks: Iterable[tuple[Block, Mapping[str, Tensor]]], k: int
    ) -> Float[Tensor, "m k k"] | None:
        total, products = None, None
        for block, rows in rows_of_blocks:
            white = block.whitened(rows)
            total = _sum(total, white @ white.mT)
            if self.explained is not None and isinstance(block, Diagonal):
                products = _sum(products, self.explained.products(block, white))
        if total is None or self.explained is None or products is None:
            return total
        root = self.explained.root(products, k)
        return total - root @ root.mT

    def scaled(self, factor: float) -> "Covariance":
        """Return the covariance times a factor."""
        root = factor**0.5
        blocks = [
            replace(block, root=root * block.root)
            if isinstance(block, Dense)
            else replace(block, std=root * block.std)
            for block in self.blocks
        ]
        explained = self.explained
        if explained is not None:  # the factored rows are multiplied by two scaled roots
            explained = replace(explained, scale=explained.scale / max(root, 1e-150))
        return Covariance(blocks, explained)

    def state(self) -> dict[str, Any]:
        """Return tensors and strings from which ``from_state`` restores the covariance."""
        blocks = [{"kind": type(b).__name__.lower(), **vars(b)} for b in self.blocks]
        return {
            "blocks": blocks,
            "explained": None if self.explained is None else dict(vars(self.explained)),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the covariance from the result of ``state``."""
        records = [dict(record) for record in state["blocks"]]
        blocks: list[Block] = [_KINDS[record.pop("kind")](**record) for record in records]
        explained = state["explained"]
        return cls(blocks, None if explained is None else Explained(**explained))


def covariance_of(
    statistic: BlockStatistic | KfacStatistic | NtkStatistic,
    precisions: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> Covariance:
    """Return the covariance under Σ, from a statistic of all data and the prior precisions.

    ``dtype`` is the type of the kernel's matrix and of the prior precisions.

    Raises:
        NotFiniteError: If a prior precision is not positive and finite.
        NotPositiveDefiniteError: If the curvature is NaN or infinite.
    """
    like = torch.zeros((), dtype=dtype, device=next(iter(weights.values())).device)
    flat = {
        name: precisions[name].detach().expand(weight.shape).reshape(-1).to(like)
        for name, weight in weights.items()
    }
    for name, precision in flat.items():
        if not is_finite(precision) or not bool((precision > 0).all()):
            wrong = float(precision[~(precision.isfinite() & (precision > 0))][0])
            change = "larger" if wrong <= 0 else "smaller"
            raise NotFiniteError(
                f"The prior precision of {name!r} must be positive and finite in {dtype}, got"
                f" {wrong:.3g}. Lower the learning rate of the hyperparameters, or create the prior"
                f" with a {change} precision=..."
            )
    if isinstance(statistic, NtkStatistic):
        prior = [Diagonal(name, precision.rsqrt()) for name, precision in flat.items()]
        return Covariance(prior, Explained.of(statistic, flat, like))
    blocks: list[Block | partial[Kronecker]] = []
    if isinstance(statistic, KfacStatistic):
        for name, factors in statistic.factors.items():
            check_finite_curvature(factors.inputs)
            check_finite_curvature(factors.gradients)
            check_finite_curvature(_trace(factors.inputs) * _trace(factors.gradients))
            precision = precisions[name].detach().to(like, copy=True)
            blocks.append(partial(Kronecker.of, name, factors, precision, weights[name].shape))
    for name, hessian in statistic.blocks.items():
        names = [name] if name in weights else list(weights)
        precision = torch.cat([flat[weight_name] for weight_name in names])
        if hessian.ndim == 2:
            blocks.append(Dense.of(names, hessian, precision))
        else:
            check_finite_curvature(hessian)
            blocks.append(Diagonal(name, (hessian + precision).rsqrt()))
    return Covariance(blocks)


def _rows(
    linearization: Linearization, vectors: Tensor, blocks: Iterable[Block]
) -> Iterator[tuple[Block, dict[str, Tensor]]]:
    blocks = list(blocks)
    # All without a closed form in one call, because each call repeats the backward passes.
    names = [name for block in blocks for name in block.names]
    others = [name for name in names if not linearization.is_closed(name)]
    generic_rows = linearization.rows(vectors, others) if others else {}
    for block in blocks:
        closed_names = [name for name in block.names if name not in generic_rows]
        rows = generic_rows | (linearization.rows(vectors, closed_names) if closed_names else {})
        # Not flattened, because rows (m, k) of a weight that is a single number gain a dimension.
        yield block, {name: rows[name].reshape(*vectors.shape[:2], -1) for name in block.names}


def _as_row(vector: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a vector, which has one tensor for each parameter, as the rows of one output."""
    return {name: torch.atleast_1d(part)[None, None] for name, part in vector.items()}


def _width(block: Block) -> int:
    """Return the number of columns of a block's J Σ^{1/2}."""
    return len(block.root) if isinstance(block, Dense) else block.std.numel()


def _trace(matrices: Float[Tensor, "G n n"]) -> Float[Tensor, " G"]:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _sum(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total + term
