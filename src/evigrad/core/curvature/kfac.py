"""Kronecker-factored blocks: H of a weight matrix ≈ B ⊗ A / (number of Kronecker examples).

A is the sum of the outer products of the matrix's inputs. B is the sum of the outer products of the
rows' gradients with respect to the matrix's outputs. A matrix may be applied at several positions
of an example (convolutions, sequences, augmentation samples, a layer called twice). In this case,
``sharing`` defines what a Kronecker example is (Eschenhagen et al., 2023, *Kronecker-Factored
Approximate Curvature for Modern Neural Network Architectures*):

- ``"expand"``: each position. This is exact for a deep linear network with a loss per position.
- ``"reduce"``: each example, with its mean input and the sum of its gradients over positions. This
  is exact for a deep linear network whose outputs are averaged over positions.

The statistic contains sums and counts, so the statistics of micro-batches can be added. ``log_det``
divides by the counts. The result is not a bound, because Theorem 1 covers only exact blocks. Every
example counts, even if its rows are zero.
"""

import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import add_outer_products
from evigrad.core.curvature.base import (
    DENSE_WORKING_COPIES,
    ROWS_AT_ONCE,
    Cost,
    Curvature,
    Statistic,
    by_entry,
    bytes_of_row,
    scaled_rows,
    working_dtype,
)
from evigrad.core.curvature.kronecker import KroneckerUse
from evigrad.core.curvature.linalg import (
    Spectra,
    check_rounding,
    is_tolerated,
    kronecker_rounding,
    kronecker_rounding_rate,
    log_det_dense,
    log_det_diagonal,
    log_det_kronecker,
    psd_eigenvalues,
)
from evigrad.core.protocols import LOG_DETS, Linearization, Purpose
from evigrad.core.roots import RootRows
from evigrad.errors import ConfigurationError

# Parameters without Kronecker factors (biases, scales of normalization layers) get an exact dense
# block up to this size. The widest layers of the paper's ResNets have 512 channels. Such a block
# takes 2 MiB and 45 MFLOP in float64, less than the factors of the adjacent layer.
DENSE_LIMIT = 512


@dataclass(frozen=True)
class Factors:
    """Sums over the Kronecker examples of a weight.

    Attributes:
        inputs: A, the sum of outer products of inputs, (G, i, i) for G channel groups.
        gradients: B, the sum of outer products of gradients, (G, o, o).
        count: The number of Kronecker examples.
        num_rows: The number of outer products in B.
        transposed: Whether the weight is (in, out) instead of (out, in).
    """

    inputs: Tensor
    gradients: Tensor
    count: int
    num_rows: int
    transposed: bool = False

    def __add__(self, other: "Factors") -> "Factors":
        return Factors(
            self.inputs + other.inputs,
            self.gradients + other.gradients,
            self.count + other.count,
            self.num_rows + other.num_rows,
            self.transposed,
        )

    def scaled(self, precision: Tensor, shape: torch.Size) -> "Factors":
        """Return the factors of P0^{-1/2} H P0^{-1/2} for precisions along one axis of the weight.

        (D ⊗ I)^{-1/2} (B ⊗ A) (D ⊗ I)^{-1/2} = D^{-1/2} B D^{-1/2} ⊗ A, and likewise for A.
        """
        output = int(self.transposed)
        if precision.shape[output] > 1:
            root = precision.reshape(len(self.gradients), -1).to(self.gradients).rsqrt()
            return replace(self, gradients=root[:, :, None] * self.gradients * root[:, None])
        input_shape = [1 if axis == output else n for axis, n in enumerate(shape)]
        root = precision.expand(input_shape).reshape(1, -1).to(self.inputs).rsqrt()
        return replace(self, inputs=root[:, :, None] * self.inputs * root[:, None])

    def with_rows(self, use: KroneckerUse) -> "Factors":
        """Return the sums with additional rows of examples whose inputs are already included."""
        gradients = self.gradients + use.gradient_gram()
        return replace(self, gradients=gradients, num_rows=self.num_rows + use.num_rows)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of A (``left``) and B (``right``), and the number of Kronecker examples.

    ``rounding`` is the ``kronecker_rounding_rate`` of the eigenvalues.
    """

    left: Tensor
    right: Tensor
    count: int
    rounding: float


@dataclass(frozen=True)
class KfacStatistic(Statistic):
    """Sums of outer products, by parameter name.

    Attributes:
        factors: The sums for each weight with Kronecker factors. If one micro-batch has all rows,
            a smaller Gram matrix with the same nonzero eigenvalues may replace A or B.
        blocks: The dense block (n, n) or diagonal (n,) of H for each other parameter.
        spectra: A cache of the factors' eigenvalues.
        unscaled: A cache of the eigenvalues of factors that precisions along an axis do not scale.
        block_spectra: A cache of the dense blocks' eigenvalues.
        num_data: Number of examples of the block, if nothing but log-determinants is needed. None
            if the sums themselves are needed.
    """

    factors: dict[str, Factors] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    spectra: dict[str, Spectrum] = field(default_factory=dict, repr=False, compare=False)
    unscaled: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)
    block_spectra: Spectra = field(default_factory=Spectra, repr=False, compare=False)
    num_data: int | None = None

    def tensors(self) -> list[Tensor]:
        pairs = [
            (weight_factors.inputs, weight_factors.gradients)
            for weight_factors in self.factors.values()
        ]
        return [tensor for pair in pairs for tensor in pair] + list(self.blocks.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> "KfacStatistic":
        remaining_tensors = iter(tensors)
        factors = {
            name: replace(
                weight_factors, inputs=next(remaining_tensors), gradients=next(remaining_tensors)
            )
            for name, weight_factors in self.factors.items()
        }
        blocks = dict(zip(self.blocks, remaining_tensors, strict=True))
        return KfacStatistic(factors, blocks)

    def reduced(self, total: Callable[[Sequence[Tensor]], list[Tensor]]) -> "KfacStatistic":
        counts = torch.tensor([(f.count, f.num_rows) for f in self.factors.values()], device="cpu")
        totals = zip(self.factors.items(), total([counts])[0].tolist(), strict=True)
        sums = super().reduced(total)
        for (name, _), (count, num_rows) in totals:
            sums.factors[name] = replace(sums.factors[name], count=count, num_rows=num_rows)
        return sums


class Kfac(Curvature[KfacStatistic]):
    """Kronecker factors for weight matrices, and exact blocks or diagonals for other parameters.

    A weight and its bias are separate blocks, so their precisions may differ.

    Args:
        weights: The parameters.
        kronecker: The names of parameters with Kronecker factors.
        precision_axes: The axes along which the prior precision of a parameter varies. The
            precisions of other parameters are one number.
        sharing: ``"expand"`` or ``"reduce"`` (see the docstring of the module).
        gram_dtype: Dtype of the sums and their factorizations. None: the dtype of the rows.
        dense_limit: Largest size of a parameter without Kronecker factors that gets a dense block.
            Larger parameters get only a diagonal.

    Raises:
        ConfigurationError: If a precision of a Kronecker block varies along inputs and outputs.
    """

    name = "kfac"
    counts_data = True
    settings = ("sharing",)
    cheaper = "'diag', or 'ntk' on a small subset"
    rows_at_once = ROWS_AT_ONCE

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        kronecker: Collection[str],
        precision_axes: Mapping[str, Sequence[int]],
        sharing: str = "expand",
        gram_dtype: torch.dtype | None = None,
        dense_limit: int = DENSE_LIMIT,
    ) -> None:
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._itemsize = max((weight.dtype.itemsize for weight in weights.values()), default=4)
        self._sharing = sharing
        self._gram_dtype = gram_dtype
        self._kronecker = [name for name in weights if name in kronecker]
        self._others = [name for name in weights if name not in kronecker]
        self._row_bytes = bytes_of_row(weights[name] for name in self._others)
        self._dense = {name for name in self._others if weights[name].numel() <= dense_limit}
        self._axes = {name: tuple(precision_axes.get(name, ())) for name in self._kronecker}
        _refuse(name for name, axes in self._axes.items() if len(axes) > 1)

    def empty(self, purpose: Purpose, num_data: int) -> KfacStatistic:
        return KfacStatistic(num_data=num_data if purpose in LOG_DETS else None)

    def collect(
        self, statistic: KfacStatistic | None, linearization: Linearization, root: RootRows
    ) -> KfacStatistic:
        statistic = statistic or KfacStatistic()
        factors, blocks = dict(statistic.factors), statistic.blocks
        # One micro-batch with all rows, which have no graph.
        is_whole = (
            statistic.num_data == len(root.vectors)
            and not root.vectors.requires_grad
            and (root.scale is None or not root.scale.requires_grad)
        )
        first, *others = root.parts(self.rows_at_once)
        for name, examples in self._examples(linearization, first).items():
            is_small = is_whole and len(examples) == 1 and not others and not self._axes[name]
            shape = self._shapes[name] if is_small else None
            sums = reduce(operator.add, (_factors(use, shape) for use in examples))
            factors[name] = factors[name] + sums if name in factors else sums
        blocks = self._add_others(blocks, linearization, first)
        for part in others:
            for name, examples in self._examples(linearization, part).items():
                for use in examples:
                    factors[name] = factors[name].with_rows(use)
            blocks = self._add_others(blocks, linearization, part)
        return KfacStatistic(factors, blocks)

    def _added(
        self, name: str, block: Tensor | None, rows: Float[Tensor, "R n"]
    ) -> Float[Tensor, "n ..."]:
        """Return a block of a parameter without Kronecker factors, with additional rows."""
        if name in self._dense:
            return add_outer_products(block, rows)
        diagonal = rows.square().sum(0)
        return diagonal if block is None else block + diagonal

    def _add_others(
        self, blocks: Mapping[str, Tensor], linearization: Linearization, root: RootRows
    ) -> dict[str, Tensor]:
        """Add the exact blocks and diagonals of a micro-batch, and return all blocks."""
        rows = linearization.rows(root.vectors, self._others) if self._others else {}
        added = dict(blocks)
        for name in self._others:
            flat = scaled_rows(
                rows[name], root.scale, working_dtype(rows[name].dtype, self._gram_dtype)
            )
            added[name] = self._added(name, blocks.get(name), flat)
        return added

    def log_det(
        self, statistic: KfacStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        terms: list[Tensor] = []
        if statistic.factors:
            terms.append(self._kronecker_log_det(statistic, precisions))
        for name, block in statistic.blocks.items():
            precision, block_spectrum = by_entry(precisions[name], self._shapes[name]), None
            if name in self._dense and precision.ndim == 0 and not block.requires_grad:
                spectra = statistic.block_spectra
                block_spectrum = spectra.at_second_use(name, lambda block=block: block)
            if block_spectrum is not None:
                terms.append(block_spectrum.log_det(precision))
            elif name in self._dense:
                terms.append(log_det_dense(block, precision))
            else:
                terms.append(log_det_diagonal(block, precision))
        return torch.stack(terms).sum()

    def cost(self, num_rows: int, purpose: Purpose, *, is_whole: bool = False) -> Cost:
        """See ``Curvature.cost``. Channel groups need less memory than predicted."""
        total = 0
        for name, shape in self._shapes.items():
            numel = shape.numel()
            if name in self._kronecker:
                # The sums, their eigenvectors and cotangents. There are as many products of
                # eigenvalues as weights, and the same number of logarithms.
                total += 3 * (shape[0] ** 2 + (numel // shape[0]) ** 2) + 3 * numel
            else:
                total += (1 + DENSE_WORKING_COPIES) * (numel**2 if name in self._dense else numel)
        item = self._itemsize if self._gram_dtype is None else self._gram_dtype.itemsize
        return Cost(item * total, self._row_bytes, self.rows_at_once)

    def describe(self) -> dict[str, str]:
        words = {}
        for name, shape in self._shapes.items():
            numel = shape.numel()
            if name in self._kronecker:
                words[name] = f"kronecker {shape[0]} (x) {numel // shape[0]}, {self._sharing}"
            else:
                words[name] = f"dense {numel}x{numel}" if name in self._dense else "diagonal"
        return words

    def inner(
        self, cotangent: KfacStatistic, data: slice, linearization: Linearization, root: RootRows
    ) -> Float[Tensor, ""]:
        terms = []
        for name, examples in self._examples(linearization, root).items():
            factor_cotangents = cotangent.factors[name]
            for part in examples:
                terms.append(part.source.inner_gram(factor_cotangents.inputs))
                terms.append(part.inner_gradient_gram(factor_cotangents.gradients))
        blocks = self._add_others({}, linearization, root)
        terms += [(cotangent.blocks[name] * block).sum() for name, block in blocks.items()]
        return torch.stack([term.to(terms[0]) for term in terms]).sum()

    def _examples(
        self, linearization: Linearization, root: RootRows
    ) -> dict[str, list[KroneckerUse]]:
        """Return the uses of each Kronecker weight, joined into a single use with ``"reduce"``."""
        if not self._kronecker:
            return {}
        examples = {}
        for name, uses in linearization.factors(root.vectors, self._kronecker).items():
            if not uses:
                continue
            dtype = working_dtype(uses[0].pieces[0].dtype, self._gram_dtype)
            scaled = [use.scaled(root.scale, dtype) for use in uses]
            if self._sharing == "reduce":
                positions = sum(use.positions for use in uses)
                sums = [use.source.sum(use.pieces[0].dtype) for use in uses]
                mean = torch.stack(sums).sum(0).to(dtype) / positions
                total = torch.stack([use.gradients.sum(3) for use in scaled]).sum(0)
                turned = uses[0].transposed
                scaled = [KroneckerUse(mean[:, :, None], total[:, :, :, None], transposed=turned)]
            examples[name] = scaled
        return examples

    def _kronecker_log_det(
        self,
        statistic: KfacStatistic,
        precisions: Mapping[str, Tensor],
        dtype: torch.dtype | None = None,
    ) -> Float[Tensor, ""]:
        """Return Σ log|I + B ⊗ A / (count · precision)| over the Kronecker weights.

        Eigenvalues have the type of the sums by default. If rounding errors are too large, they are
        computed again in float64 from the same sums.
        """
        terms, used = list[Tensor](), list[tuple[Spectrum, Tensor]]()
        for name, sums in statistic.factors.items():
            precision = precisions[name]
            varies = [axis for axis, size in enumerate(precision.shape) if size > 1]
            if not set(varies).issubset(self._axes[name]):
                _refuse([name])
            scaled = None
            if precision.ndim:
                scaled = sums.scaled(precision, self._shapes[name])
                precision = precision.new_ones(())
            spectrum = _spectrum(statistic, name, dtype, scaled)
            factor = (precision.to(spectrum.left.dtype) * spectrum.count).reciprocal()
            terms.append(log_det_kronecker(spectrum.left, spectrum.right, factor))
            used.append((spectrum, factor.detach()))
        value = torch.stack(terms).sum()
        size, *factors = torch.stack([value.detach(), *(factor for _, factor in used)]).tolist()
        # In most steps a cheap bound makes the estimate of the error unnecessary.
        bound = sum(s.rounding * factor for (s, _), factor in zip(used, factors, strict=True))
        if is_tolerated(bound, size):
            return value
        error = torch.stack([kronecker_rounding(s.left, s.right, f) for s, f in used]).sum()
        if value.dtype == torch.float64 or value.device.type == "mps":
            check_rounding(error, value.detach(), value.dtype)
        elif not is_tolerated(float(error), size):
            return self._kronecker_log_det(statistic, precisions, torch.float64).to(value.dtype)
        return value


def _refuse(varying: Iterable[str]) -> None:
    """Raise an error if any weight has precisions that ``Factors.scaled`` does not support."""
    if names := list(varying):
        raise ConfigurationError(
            f"The prior precision varies within the Kronecker blocks of {names}, but KFAC needs one"
            " precision per tensor, or precisions along one axis. Use a prior such as 'layerwise',"
            " or the structure 'diag' or 'ntk'."
        )


def _spectrum(
    statistic: KfacStatistic, name: str, dtype: torch.dtype | None, scaled: Factors | None = None
) -> Spectrum:
    """Return the eigenvalues of a weight's sums, from the cache if they have no graph.

    ``scaled`` replaces the sums, and is not cached.
    """
    cached = statistic.spectra.get(name)
    if scaled is None and cached is not None and dtype in (None, cached.left.dtype):
        return cached
    sums = statistic.factors[name]
    if scaled is None:
        left = psd_eigenvalues(sums.inputs.to(dtype), sums.count)
        right = psd_eigenvalues(sums.gradients.to(dtype), sums.num_rows)
    else:
        left, right = _scaled_eigenvalues(statistic, name, dtype, scaled)
    spectrum = Spectrum(left, right, sums.count, kronecker_rounding_rate(left, right))
    if scaled is None and not (left.requires_grad or right.requires_grad):
        statistic.spectra[name] = spectrum
    return spectrum


def _scaled_eigenvalues(
    statistic: KfacStatistic, name: str, dtype: torch.dtype | None, scaled: Factors
) -> list[Tensor]:
    """Return the eigenvalues of A and B. Those of the factor that is not scaled are cached."""
    sums, values = statistic.factors[name], list[Tensor]()
    for matrix, original, rank in (
        (scaled.inputs, sums.inputs, sums.count),
        (scaled.gradients, sums.gradients, sums.num_rows),
    ):
        key = (name, len(values), dtype)
        if key in statistic.unscaled:
            values.append(statistic.unscaled[key])
            continue
        values.append(psd_eigenvalues(matrix.to(dtype), rank))
        if matrix is original and not matrix.requires_grad:
            statistic.unscaled[key] = values[-1]
    return values


def _factors(use: KroneckerUse, shape: torch.Size | None = None) -> Factors:
    """Return the sums over the examples of a use.

    Given the ``shape`` of the weight, A or B is replaced by a Gram matrix of the examples if this
    matrix is smaller. Both have the same nonzero eigenvalues.
    """
    count, dtype = use.num_data * use.positions, use.pieces[0].dtype
    num_inputs = 0 if shape is None else shape[0] if use.transposed else prod(shape[1:])
    if count < num_inputs:
        inputs = use.inputs.transpose(0, 1).flatten(1, 2)
        left = inputs @ inputs.mT
    else:
        left = use.source.gram(dtype)
    if shape is not None and use.num_rows < use.pieces[0].shape[4]:
        rows = use.gradients.permute(2, 0, 1, 3, 4).flatten(1, 3)
        right = rows @ rows.mT
    else:
        right = use.gradient_gram()
    return Factors(left, right, count, use.num_rows, use.transposed)
