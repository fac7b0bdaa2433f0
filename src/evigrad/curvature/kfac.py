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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.curvature.base import (
    DENSE_WORKING_COPIES,
    Statistic,
    Structure,
    scaled_rows,
    working_dtype,
)
from evigrad.curvature.block_diagonal import add_outer_products
from evigrad.curvature.linalg import (
    check_rounding,
    inner_gram,
    is_tolerated,
    kronecker_rounding,
    kronecker_rounding_rate,
    log_det_dense,
    log_det_diagonal,
    log_det_kronecker,
    psd_eigenvalues,
)
from evigrad.errors import ConfigurationError, nearest
from evigrad.jacobians import JacobianPlan, KroneckerUse, Linearization
from evigrad.likelihoods import RootRows

SHARINGS = ("expand", "reduce")

# Parameters without Kronecker factors (biases, scales of normalisation layers) get an exact dense
# block up to this size: the widest layers of the paper's ResNets have 512 channels, and a block of
# 512 costs 2 MiB and 45 MFLOP in float64, less than the factors of the layer beside it.
DENSE_LIMIT = 512

# Up to this size such a block is diagonalised once, in no more time than one step on the precisions
# takes; further steps then need no factorisation.
SPECTRUM_LIMIT = 64


@dataclass(frozen=True)
class KfacStatistic(Statistic):
    """Sums of outer products, and how many there were, by the names of the parameters.

    Attributes:
        inputs: A of each Kronecker weight, (G, i, i) for G channel groups.
        gradients: B of each Kronecker weight, (G, o, o).
        counts: The number of examples of each Kronecker weight.
        num_rows: The number of outer products in each B.
        blocks: The dense block (n, n) or diagonal (n,) of H of each other parameter.
        eigenvalues: Those of A and B: a cache, or in place of the sums (``Kfac.summarise``).
        spectra: Eigenvalues of dense blocks; a cache too.
        roundings: ``kronecker_rounding_rate`` of each pair of these; a cache too.
    """

    inputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    counts: dict[str, int]
    num_rows: dict[str, int]
    blocks: dict[str, Tensor]
    eigenvalues: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )
    spectra: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    roundings: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    def tensors(self) -> list[Tensor]:
        """A of every weight, B of every weight, then the other blocks."""
        tables = (self.inputs, self.gradients, self.blocks)
        return [tensor for table in tables for tensor in table.values()]

    def with_tensors(self, tensors: Sequence[Tensor]) -> "KfacStatistic":
        """The same counts with other sums and empty caches."""
        rest = iter(tensors)
        inputs, gradients, blocks = (
            {name: next(rest) for name in table}
            for table in (self.inputs, self.gradients, self.blocks)
        )
        tables = {"inputs": inputs, "gradients": gradients, "blocks": blocks}
        return replace(self, **tables, eigenvalues={}, spectra={}, roundings={})


class Kfac(Structure[KfacStatistic]):
    """Kronecker factors where the model has them, exact blocks elsewhere.

    Weight and bias are separate blocks, so that their precisions may differ.

    Args:
        weights: The parameters.
        plan: Says which of them have Kronecker factors.
        precision_constant: Whether each parameter's prior precision is one number.
        sharing: ``"expand"`` or ``"reduce"``, see the module.
        gram_dtype: Dtype of the sums and their factorisations; None takes that of the rows.
        dense_limit: Other parameters get a dense block up to this size, and a diagonal beyond.

    Raises:
        ConfigurationError: ``sharing`` is unknown, or a precision varies inside a Kronecker block.
    """

    name = "kfac"
    cheaper = "'diag', or 'ntk' on a small subset"

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        plan: JacobianPlan,
        precision_constant: Mapping[str, bool],
        sharing: str = "expand",
        gram_dtype: torch.dtype | None = None,
        dense_limit: int = DENSE_LIMIT,
    ) -> None:
        check_sharing(sharing)
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._itemsize = max((weight.dtype.itemsize for weight in weights.values()), default=4)
        self._sharing = sharing
        self._gram_dtype = gram_dtype
        self._kronecker = [name for name in weights if name in plan.kronecker]
        others = [name for name in weights if name not in plan.kronecker]
        self._others = others
        self._dense = {name for name in others if weights[name].numel() <= dense_limit}
        self._check_constant(name for name in self._kronecker if not precision_constant[name])

    def accumulate(
        self, statistic: KfacStatistic | None, linearization: Linearization, root: RootRows
    ) -> KfacStatistic:
        """See ``Structure.accumulate``."""
        if statistic is None:
            statistic = KfacStatistic({}, {}, {}, {}, {})
        inputs, gradients = dict(statistic.inputs), dict(statistic.gradients)
        counts, num_rows = dict(statistic.counts), dict(statistic.num_rows)
        for name, uses in self._uses(linearization, root).items():
            for part in self._examples(name, uses, root.scale):
                inputs[name] = _sum(inputs.get(name), part.input_gram())
                gradients[name] = _sum(gradients.get(name), part.gradients.mT @ part.gradients)
                counts[name] = counts.get(name, 0) + part.count
                num_rows[name] = num_rows.get(name, 0) + part.gradients.shape[1]
        blocks = self._add_others(statistic.blocks, linearization, root)
        return KfacStatistic(inputs, gradients, counts, num_rows, blocks)

    def summarise(self, linearization: Linearization, root: RootRows) -> KfacStatistic:
        """See ``Structure.summarise``; for few examples it diagonalises their (smaller) Gram."""
        if root.scale is not None and root.scale.requires_grad:
            return super().summarise(linearization, root)
        statistic = KfacStatistic({}, {}, {}, {}, {})
        for name, uses in self._uses(linearization, root).items():
            examples = list(self._examples(name, uses, root.scale))
            statistic.counts[name] = sum(part.count for part in examples)
            statistic.num_rows[name] = sum(part.gradients.shape[1] for part in examples)
            if len(examples) == 1:
                statistic.eigenvalues[name] = examples[0].eigenvalues()
                continue
            for part in examples:
                gram = part.gradients.mT @ part.gradients
                statistic.inputs[name] = _sum(statistic.inputs.get(name), part.input_gram())
                statistic.gradients[name] = _sum(statistic.gradients.get(name), gram)
        return replace(statistic, blocks=self._add_others({}, linearization, root))

    def _add_others(
        self, blocks: Mapping[str, Tensor], linearization: Linearization, root: RootRows
    ) -> dict[str, Tensor]:
        """The blocks, with the exact blocks and diagonals of parameters without factors added."""
        rows = linearization.rows(root.vectors, self._others) if self._others else {}
        added = dict(blocks)
        for name in self._others:
            flat = scaled_rows(
                rows[name], root.scale, working_dtype(rows[name].dtype, self._gram_dtype)
            )
            old = blocks.get(name)
            if name in self._dense:
                added[name] = add_outer_products(old, flat)
            else:
                added[name] = _sum(old, flat.square().sum(0))
        return added

    def log_det(
        self, statistic: KfacStatistic, precisions: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """See ``Structure.log_det``; refuses precisions that vary inside a Kronecker block."""
        self._check_constant(name for name in statistic.counts if precisions[name].ndim > 0)
        terms, spectra = [], {}
        for name in statistic.counts:
            left, right = self._eigenvalues(statistic, name)
            factor = (precisions[name].to(left.dtype) * statistic.counts[name]).reciprocal()
            terms.append(log_det_kronecker(left, right, factor))
            spectra[name] = (left, right, factor)
        for name, block in statistic.blocks.items():
            one = precisions[name].ndim == 0
            precision = precisions[name] if one else precisions[name].reshape(-1)
            if name not in self._dense:
                terms.append(log_det_diagonal(block, precision))
            elif one and len(block) <= SPECTRUM_LIMIT and not block.requires_grad:
                if name not in statistic.spectra:
                    statistic.spectra[name] = psd_eigenvalues(block)
                spectrum = statistic.spectra[name]
                terms.append(log_det_diagonal(spectrum, precision))
                inverse = precision.to(spectrum.dtype).reciprocal()
                spectra[name] = (spectrum, spectrum.new_ones(1), inverse)
            else:
                terms.append(log_det_dense(block, precision))
        value = torch.stack(terms).sum()
        if spectra:
            self._check_rounding(statistic, spectra, value.detach())
        return value

    @staticmethod
    def _check_rounding(
        statistic: KfacStatistic,
        spectra: Mapping[str, tuple[Tensor, Tensor, Tensor]],
        value: Tensor,
    ) -> None:
        """See ``check_rounding``; a cheap bound spares most steps the estimate."""
        for name in spectra.keys() - statistic.roundings.keys():
            left, right, _ = spectra[name]
            statistic.roundings[name] = kronecker_rounding_rate(left, right)
        factors = torch.stack([factor.detach() for *_, factor in spectra.values()]).tolist()
        rates = [statistic.roundings[name] for name in spectra]
        bound = sum(rate * factor for rate, factor in zip(rates, factors, strict=True))
        if is_tolerated(bound, float(value)):
            return
        errors = [kronecker_rounding(*each) for each in spectra.values()]
        check_rounding(torch.stack(errors).sum(), value, errors[0].dtype)

    def predicted_bytes(self, num_rows: int) -> int:
        """See ``Structure.predicted_bytes``; channel groups, which need less, are not counted."""
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
        """See ``Structure.describe``."""
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
        """See ``Structure.inner``; one product for each factor."""
        terms = []
        for name, uses in self._uses(linearization, root).items():
            for part in self._examples(name, uses, root.scale):
                terms.append(part.inner_input_gram(cotangent.inputs[name]))
                terms.append(inner_gram(part.gradients, cotangent.gradients[name]))
        rest = self._add_others({}, linearization, root)
        terms += [(cotangent.blocks[name] * block).sum() for name, block in rest.items()]
        return torch.stack([term.to(terms[0]) for term in terms]).sum()

    def _uses(
        self, linearization: Linearization, root: RootRows
    ) -> Mapping[str, Sequence[KroneckerUse]]:
        return linearization.factors(root.vectors, self._kronecker) if self._kronecker else {}

    def _examples(
        self, name: str, uses: Sequence[KroneckerUse], scale: Tensor | None
    ) -> Iterable["_Examples"]:
        """The examples of a weight, one item per use; with ``"reduce"`` one for all uses."""
        if not uses:
            return
        scaled = []
        for use in uses:
            g = use.gradients.to(working_dtype(use.gradients.dtype, self._gram_dtype))
            if scale is not None:
                g = g * scale.to(g.dtype)[:, :, None, None, None]
            scaled.append(g)
        dtype = scaled[0].dtype
        if self._sharing == "reduce":
            positions = sum(use.positions for use in uses)
            mean = torch.stack([use.input_sum() for use in uses]).sum(0).to(dtype) / positions
            total = torch.stack([g.sum(3) for g in scaled]).sum(0)  # (m, k, G, o)
            rows = mean.transpose(0, 1)
            yield _Examples(
                total.permute(2, 0, 1, 3).flatten(1, 2),
                len(mean),
                rows.shape[2],
                lambda: rows,
                lambda: rows.mT @ rows,
                lambda cotangent: inner_gram(rows, cotangent),
            )
            return
        for use, g in zip(uses, scaled, strict=True):
            yield _Examples(
                g.permute(2, 0, 1, 3, 4).flatten(1, 3),
                len(g) * use.positions,
                self._shapes[name].numel() // self._shapes[name][0],
                partial(_input_rows, use, dtype),
                partial(use.input_gram, dtype),
                use.inner_input_gram,
            )

    @staticmethod
    def _eigenvalues(statistic: KfacStatistic, name: str) -> tuple[Tensor, Tensor]:
        if name in statistic.eigenvalues:
            return statistic.eigenvalues[name]
        a, b = statistic.inputs[name], statistic.gradients[name]
        values = (
            psd_eigenvalues(a, statistic.counts[name]),
            psd_eigenvalues(b, statistic.num_rows[name]),
        )
        if not (a.requires_grad or b.requires_grad):
            statistic.eigenvalues[name] = values
        return values

    @staticmethod
    def _check_constant(varying: Iterable[str]) -> None:
        names = list(varying)
        if names:
            raise ConfigurationError(
                f"the prior precision varies inside the Kronecker blocks of {names}, which have no"
                " log-determinant then. Take a prior with one precision per tensor ('layerwise'),"
                " or the structure 'diag', 'blockdiag' or 'ntk'."
            )


def check_sharing(sharing: str) -> None:
    """Refuse a kind of weight sharing that is not one of ``SHARINGS``.

    Raises:
        ConfigurationError: It is unknown.
    """
    if sharing not in SHARINGS:
        raise ConfigurationError(
            f"sharing={sharing!r} is unknown: take 'expand' or 'reduce'."
            f"{nearest(sharing, SHARINGS)}"
        )


def _sum(old: Tensor | None, new: Tensor) -> Tensor:
    return new if old is None else old + new


def _input_rows(use: KroneckerUse, dtype: torch.dtype) -> Tensor:
    return use.inputs.to(dtype).transpose(0, 1).flatten(1, 2)


def _eigenvalues_of_gram(rows: Float[Tensor, "G R n"]) -> Float[Tensor, "G r"]:
    """The eigenvalues of Σ rowᵀ row, without the zeros of too few rows."""
    few = rows.shape[1] < rows.shape[2]
    return psd_eigenvalues(rows @ rows.mT if few else rows.mT @ rows)


@dataclass(frozen=True)
class _Examples:
    """The examples of one weight.

    Attributes:
        gradients: The rows' gradients in the outputs, (G, R, o).
        count: The number of examples.
        num_inputs: i, how many numbers an example's input has.
        input_rows: Computes the inputs a, (G, count, i).
        input_gram: Computes Σ a aᵀ, (G, i, i).
        inner_input_gram: Computes the inner product of that with a cotangent.
    """

    gradients: Tensor
    count: int
    num_inputs: int
    input_rows: Callable[[], Tensor]
    input_gram: Callable[[], Tensor]
    inner_input_gram: Callable[[Tensor], Tensor]

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues of A and of B, without the zeros of too few examples."""
        if self.count < self.num_inputs:
            inputs = _eigenvalues_of_gram(self.input_rows())
        else:
            inputs = psd_eigenvalues(self.input_gram())
        return inputs, _eigenvalues_of_gram(self.gradients)
