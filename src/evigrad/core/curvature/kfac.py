"""Kronecker-factored blocks: H of a weight matrix ≈ B ⊗ A / (number of examples).

A sums the outer products of the matrix's inputs, B those of the rows' gradients in its outputs.
Where a matrix is applied at several positions of a datum (convolutions, sequences, augmentation
samples, a layer called twice), ``sharing`` says what an example is (Eschenhagen et al., 2023,
*Kronecker-Factored Approximate Curvature for Modern Neural Network Architectures*):

- ``"expand"``: every position is one; exact for a deep linear network with a loss per position.
- ``"reduce"``: every datum is one, of the mean input and the summed gradient over positions; exact
  for a deep linear network whose outputs are averaged over positions.

Both keep sums and counts; ``log_det`` divides by the counts, so that micro-batches add up to the
batch. Not a bound (Theorem 1 covers the exact blocks only). Every datum counts as an example, even
where its rows are zero.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.core.algebra import add_outer_products, inner_gram
from evigrad.core.curvature.base import (
    DENSE_WORKING_COPIES,
    Curvature,
    Statistic,
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
from evigrad.core.roots import RootRows
from evigrad.core.types import Linearization
from evigrad.errors import ConfigurationError

# Parameters without Kronecker factors (biases, scales of normalisation layers) get an exact dense
# block up to this size: the widest layers of the paper's ResNets have 512 channels, and a block of
# 512 costs 2 MiB and 45 MFLOP in float64, less than the factors of the layer beside it.
DENSE_LIMIT = 512


@dataclass(frozen=True)
class Factors:
    """Sums over the examples of a Kronecker weight.

    Attributes:
        inputs: A, (G, i, i) for G channel groups.
        gradients: B, (G, o, o).
        count: The number of examples.
        num_rows: The number of outer products in B.
        transposed: Whether the weight is (in, out) and not (out, in).
    """

    inputs: Tensor
    gradients: Tensor
    count: int
    num_rows: int
    transposed: bool = False

    def __add__(self, other: "Factors") -> "Factors":
        """The sums over the examples of both."""
        return Factors(
            self.inputs + other.inputs,
            self.gradients + other.gradients,
            self.count + other.count,
            self.num_rows + other.num_rows,
            self.transposed,
        )


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues that a log-determinant needs, of A ⊗ B / count.

    Attributes:
        left: Those of A.
        right: Those of B.
        count: The number of examples.
        rounding: Their ``kronecker_rounding_rate``.
    """

    left: Tensor
    right: Tensor
    count: int
    rounding: float


@dataclass(frozen=True)
class KfacStatistic(Statistic):
    """Sums of outer products, by the names of the parameters.

    Attributes:
        factors: Of each Kronecker weight; without those whose spectrum was summarised.
        blocks: The dense block (n, n) or diagonal (n,) of H of each other parameter.
        spectra: A cache; of a summarised statistic in the place of the factors.
        of_blocks: A cache of the eigenvalues of dense blocks.
    """

    factors: dict[str, Factors] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    spectra: dict[str, Spectrum] = field(default_factory=dict, repr=False, compare=False)
    of_blocks: Spectra = field(default_factory=Spectra, repr=False, compare=False)

    def tensors(self) -> list[Tensor]:
        """A and B of every weight, then the other blocks."""
        pairs = [
            (weight_factors.inputs, weight_factors.gradients)
            for weight_factors in self.factors.values()
        ]
        return [tensor for pair in pairs for tensor in pair] + list(self.blocks.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> "KfacStatistic":
        """The same counts with other sums and an empty cache."""
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
        """See ``Statistic.reduced``; the counts are summed too."""
        counts = torch.tensor([(f.count, f.num_rows) for f in self.factors.values()], device="cpu")
        totals = zip(self.factors.items(), total([counts])[0].tolist(), strict=True)
        sums = super().reduced(total)
        for (name, _), (count, num_rows) in totals:
            sums.factors[name] = replace(sums.factors[name], count=count, num_rows=num_rows)
        return sums


class Kfac(Curvature[KfacStatistic]):
    """Kronecker factors where the model has them, exact blocks elsewhere.

    Weight and bias are separate blocks, so that their precisions may differ.

    Args:
        weights: The parameters.
        kronecker: The names of those that have Kronecker factors.
        precision_constant: Whether each parameter's prior precision is one number.
        sharing: ``"expand"`` or ``"reduce"``, see the module.
        gram_dtype: Dtype of the sums and their factorisations; None takes that of the rows.
        dense_limit: Other parameters get a dense block up to this size, and a diagonal beyond.

    Raises:
        ConfigurationError: A precision varies inside a Kronecker block.
    """

    name = "kfac"
    counts_data = True
    settings = ("sharing",)
    cheaper = "'diag', or 'ntk' on a small subset"

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        kronecker: Collection[str],
        precision_constant: Mapping[str, bool],
        sharing: str = "expand",
        gram_dtype: torch.dtype | None = None,
        dense_limit: int = DENSE_LIMIT,
    ) -> None:
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._itemsize = max((weight.dtype.itemsize for weight in weights.values()), default=4)
        self._sharing = sharing
        self._gram_dtype = gram_dtype
        self._kronecker = [name for name in weights if name in kronecker]
        self.formed = [name for name in weights if name not in kronecker]
        self._dense = {name for name in self.formed if weights[name].numel() <= dense_limit}
        self._check_constant(name for name in self._kronecker if not precision_constant[name])

    def collect(
        self,
        statistic: KfacStatistic | None,
        linearization: Linearization,
        root: RootRows,
        *,
        alone: bool = False,
    ) -> KfacStatistic:
        """See ``Curvature.collect``; of a batch ``alone`` only eigenvalues, of a smaller Gram."""
        statistic = statistic or KfacStatistic()
        factors, spectra = dict(statistic.factors), dict(statistic.spectra)
        is_fixed = root.scale is None or not root.scale.requires_grad
        for name, examples in self._examples(linearization, root).items():
            if alone and is_fixed and len(examples) == 1:
                spectra[name] = self._spectrum_of(name, examples[0])
                continue
            sums = reduce(operator.add, map(_factors, examples))
            factors[name] = factors[name] + sums if name in factors else sums
        blocks = self._add_others(statistic.blocks, linearization, root)
        return KfacStatistic(factors, blocks, spectra if alone else {})

    def _spectrum_of(self, name: str, use: KroneckerUse) -> Spectrum:
        """The eigenvalues of a weight that is used once, by its examples if these are fewer."""
        count, size = use.num_data * use.positions, prod(self._shapes[name][1:])
        if count < size:
            left = _eigenvalues_of_gram(use.inputs.transpose(0, 1).flatten(1, 2))
        else:
            left = psd_eigenvalues(use.input_gram(use.gradients.dtype))
        right = _eigenvalues_of_gram(_gradient_rows(use))
        return Spectrum(left, right, count, kronecker_rounding_rate(left, right))

    def _add_others(
        self, blocks: Mapping[str, Tensor], linearization: Linearization, root: RootRows
    ) -> dict[str, Tensor]:
        """The blocks, with the exact blocks and diagonals of parameters without factors added."""
        rows = linearization.rows(root.vectors, self.formed) if self.formed else {}
        added = dict(blocks)
        for name in self.formed:
            flat = scaled_rows(
                rows[name], root.scale, working_dtype(rows[name].dtype, self._gram_dtype)
            )
            old = blocks.get(name)
            if name in self._dense:
                added[name] = add_outer_products(old, flat)
            else:
                diagonal = flat.square().sum(0)
                added[name] = diagonal if old is None else old + diagonal
        return added

    def log_det(
        self, statistic: KfacStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """See ``Curvature.log_det``; refuses precisions that vary inside a Kronecker block."""
        matrices = statistic.factors.keys() | statistic.spectra.keys()
        used_as_matrix = [name for name in self._kronecker if name in matrices]
        self._check_constant(name for name in used_as_matrix if precisions[name].ndim > 0)
        terms: list[Tensor] = []
        used: list[tuple[Spectrum, Tensor]] = []
        for name in used_as_matrix:
            spectrum = self._spectrum(statistic, name)
            factor = (precisions[name].to(spectrum.left.dtype) * spectrum.count).reciprocal()
            terms.append(log_det_kronecker(spectrum.left, spectrum.right, factor))
            used.append((spectrum, factor))
        for name, block in statistic.blocks.items():
            precision, block_spectrum = precisions[name], None
            if name in self._dense and precision.ndim == 0 and not block.requires_grad:
                block_spectrum = statistic.of_blocks.at_second_use(name, lambda block=block: block)
            if block_spectrum is not None:
                terms.append(block_spectrum.log_det(precision))
            elif name in self._dense:
                terms.append(log_det_dense(block, precision))
            else:
                terms.append(log_det_diagonal(block, precision))
        value = torch.stack(terms).sum()
        if used:
            _check_rounding(used, value.detach())
        return value

    @staticmethod
    def _spectrum(statistic: KfacStatistic, name: str) -> Spectrum:
        """The eigenvalues of a Kronecker weight, computed once where they have no graph."""
        if name in statistic.spectra:
            return statistic.spectra[name]
        factors = statistic.factors[name]
        left = psd_eigenvalues(factors.inputs, factors.count)
        right = psd_eigenvalues(factors.gradients, factors.num_rows)
        rate = kronecker_rounding_rate(left, right)
        spectrum = Spectrum(left, right, factors.count, rate)
        if not (factors.inputs.requires_grad or factors.gradients.requires_grad):
            statistic.spectra[name] = spectrum
        return spectrum

    def predicted_bytes(self, num_rows: int) -> int:
        """See ``Curvature.predicted_bytes``; channel groups, which need less, are not counted."""
        total = 0
        for name, shape in self._shapes.items():
            numel = shape.numel()
            if name in self._kronecker:
                # The sums, their eigenvectors and cotangents; products of eigenvalues and their
                # logarithms are as many as the weights.
                total += 3 * (shape[0] ** 2 + (numel // shape[0]) ** 2) + 3 * numel
            else:
                total += (1 + DENSE_WORKING_COPIES) * (numel**2 if name in self._dense else numel)
        item = self._itemsize if self._gram_dtype is None else self._gram_dtype.itemsize
        return item * total

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
        self,
        cotangent: KfacStatistic,
        data: slice,
        linearization: Linearization,
        root: RootRows,
    ) -> Float[Tensor, ""]:
        """See ``Curvature.inner``; one product for each factor."""
        terms = []
        for name, examples in self._examples(linearization, root).items():
            of_sums = cotangent.factors[name]
            for part in examples:
                terms.append(part.inner_input_gram(of_sums.inputs))
                terms.append(inner_gram(_gradient_rows(part), of_sums.gradients))
        blocks = self._add_others({}, linearization, root)
        terms += [(cotangent.blocks[name] * block).sum() for name, block in blocks.items()]
        return torch.stack([term.to(terms[0]) for term in terms]).sum()

    def _examples(
        self, linearization: Linearization, root: RootRows
    ) -> dict[str, list[KroneckerUse]]:
        """The uses of each Kronecker weight, one item each; with ``"reduce"`` one for all."""
        if not self._kronecker:
            return {}
        examples = {}
        for name, uses in linearization.factors(root.vectors, self._kronecker).items():
            if not uses:
                continue
            dtype = working_dtype(uses[0].gradients.dtype, self._gram_dtype)
            scaled = [use.scaled(root.scale, dtype) for use in uses]
            if self._sharing == "reduce":
                positions = sum(use.positions for use in uses)
                mean = torch.stack([use.input_sum() for use in uses]).sum(0).to(dtype) / positions
                total = torch.stack([use.gradients.sum(3) for use in scaled]).sum(0)
                turned = uses[0].transposed
                scaled = [KroneckerUse(mean[:, :, None], total[:, :, :, None], turned)]
            examples[name] = scaled
        return examples

    @staticmethod
    def _check_constant(varying: Iterable[str]) -> None:
        names = list(varying)
        if names:
            raise ConfigurationError(
                f"the prior precision varies inside the Kronecker blocks of {names}, which have no"
                " log-determinant then. Take a prior with one precision per tensor ('layerwise'),"
                " or the structure 'diag', 'blockdiag' or 'ntk'."
            )


def _check_rounding(used: Sequence[tuple[Spectrum, Tensor]], value: Tensor) -> None:
    """See ``check_rounding``; a cheap bound spares most steps the estimate."""
    factors = torch.stack([factor.detach() for _, factor in used]).tolist()
    bound = sum(
        spectrum.rounding * factor for (spectrum, _), factor in zip(used, factors, strict=True)
    )
    if not is_tolerated(bound, float(value)):
        errors = [
            kronecker_rounding(spectrum.left, spectrum.right, factor) for spectrum, factor in used
        ]
        check_rounding(torch.stack(errors).sum(), value, errors[0].dtype)


def _gradient_rows(use: KroneckerUse) -> Float[Tensor, "G R o"]:
    return use.gradients.permute(2, 0, 1, 3, 4).flatten(1, 3)


def _factors(use: KroneckerUse) -> Factors:
    rows = _gradient_rows(use)
    count = use.num_data * use.positions
    sums = (use.input_gram(rows.dtype), rows.mT @ rows)
    return Factors(*sums, count, rows.shape[1], use.transposed)


def _eigenvalues_of_gram(rows: Float[Tensor, "G R n"]) -> Float[Tensor, "G r"]:
    """The eigenvalues of Σ rowᵀ row, without the zeros of too few rows."""
    few = rows.shape[1] < rows.shape[2]
    return psd_eigenvalues(rows @ rows.mT if few else rows.mT @ rows)
