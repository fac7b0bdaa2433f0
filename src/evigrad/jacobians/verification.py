"""The reference for every fast path: plain automatic differentiation on a probe."""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors.users_code import is_out_of_memory
from evigrad.jacobians.generic import loop_rows
from evigrad.jacobians.state import model_run

# (names, x, vectors, differentiable) → rows; names may be missing in the result.
Rows = Callable[[list[str], Tensor, Tensor, bool], dict[str, Tensor]]

# With one column, mistakes in the dimension of a datum's rows would not show.
_COLUMNS = 2

# Largest relative difference, and the part of the largest norm below which all is rounding (a
# bias in front of a normalisation, say, has no rows but that).
_TOLERANCES = {torch.float64: (1e-6, 1e-12), torch.float32: (1e-3, 1e-6)}
_COARSE_TOLERANCES = (5e-2, 1e-3)
# Convolutions on a GPU round to TF32 unless told otherwise.
_TF32_FACTOR = 10.0
# Second derivatives are sums of more terms.
_SECOND_ORDER_FACTOR = 10.0


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


class Reference:
    """Rows of a probe by the plain loop, to compare other ways with.

    Attributes:
        rows: Name → rows for random cotangents, (m, 2, *parameter shape).
        vanishing: The names whose rows are only rounding; anything agrees with them.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, nn.Parameter],
        x: Tensor,
        outputs: Float[Tensor, "m C"],
    ) -> None:
        self.model, self.weights, self.x = model, weights, x
        self._generator = torch.Generator().manual_seed(0)
        self._vectors = self._random(outputs[:, None, :].expand(-1, _COLUMNS, -1))
        self.rows = self._loop_rows(list(weights), x, self._vectors, False)
        self._norm = max((r.norm() for r in self.rows.values()), default=torch.tensor(0.0))
        rounding = tolerances(outputs)[1]
        self.vanishing = {
            name for name, r in self.rows.items() if not r.norm() > rounding * self._norm
        }

    def agreeing(self, names: Sequence[str], compute: Rows) -> set[str]:
        """Compare a way to compute rows with the reference.

        Args:
            names: The parameters in question.
            compute: The way; may raise any exception, which counts as disagreement.

        Returns:
            The names for which it gives the same numbers and, where the reference has them, the
            same derivatives.
        """
        found = list(names)
        try:
            # In reverse too: a model that sorts its data may have found the probe sorted.
            for order in (torch.arange(len(self.x)), torch.arange(len(self.x)).flip(0)):
                order = order.to(self.x.device)
                rows = compute(found, self.x[order], self._vectors[order], False)
                found = [
                    name
                    for name in found
                    if name in rows and close(rows[name], self.rows[name][order], self._norm)
                ]
            return self._with_right_derivatives(found, compute) if found else set()
        except Exception as error:  # this path cannot take this model
            if is_out_of_memory(error):
                raise
            return set()

    def _with_right_derivatives(self, names: list[str], compute: Rows) -> set[str]:
        """The names whose rows' derivatives agree; all where the reference has none."""
        # Gradients of random functions of the rows are compared, in all that they depend on: right
        # first derivatives do not imply right second ones. Layer normalisation under ``vmap``, for
        # example, treats its own statistics as constants.
        x, vectors = self.x[:2].clone(), self._vectors[:2, :1].clone().requires_grad_()
        own = {id(p) for p in self.weights.values()}
        arguments = [p for p in self.model.parameters() if p.requires_grad and id(p) not in own]
        arguments = [vectors, *arguments]
        if x.is_floating_point():
            arguments.append(x.requires_grad_())
        factors = {name: self._random(self.rows[name][:2, :1]) for name in names}

        def products(compute: Rows) -> dict[str, Tensor]:
            rows = compute(names, x, vectors, True)
            return {name: (factors[name] * rows[name]).sum() for name in names}

        def gradient(values: Sequence[Tensor]) -> Tensor:
            parts: Sequence[Tensor | None] = [None] * len(arguments)
            value = torch.stack([value.to(vectors.dtype) for value in values]).sum()
            if value.requires_grad:
                parts = torch.autograd.grad(value, arguments, retain_graph=True, allow_unused=True)
            filled = [
                torch.zeros_like(a) if g is None else g
                for a, g in zip(arguments, parts, strict=True)
            ]
            return torch.cat([g.flatten().to(vectors.dtype) for g in filled])

        try:
            expected = products(self._loop_rows)
            gradient(list(expected.values()))
        except (RuntimeError, NotImplementedError):  # an operation without a second derivative
            return set(names)
        actual = products(compute)

        def agree(some: Sequence[str]) -> bool:
            values = torch.stack([expected[name].detach().to(vectors.dtype) for name in some])
            return close(
                gradient([actual[name] for name in some]),
                gradient([expected[name] for name in some]),
                values.norm(),
                _SECOND_ORDER_FACTOR,
            )

        # Each takes a backward pass, so one by one only where they fail together.
        return set(names) if agree(names) else {name for name in names if agree([name])}

    def _loop_rows(
        self, names: list[str], x: Tensor, vectors: Tensor, differentiable: bool
    ) -> dict[str, Tensor]:
        with model_run(self.model):
            return loop_rows(self.model, self.weights, names, x, vectors, differentiable)

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator, dtype=torch.float64).to(like)
