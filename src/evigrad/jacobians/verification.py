"""Checking fast paths on a probe of data that differ and moved weights, against plain autograd."""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, is_out_of_memory
from evigrad.inputs import called, scores_of
from evigrad.jacobians.generic import loop_rows
from evigrad.jacobians.modes import held_tensors, model_run
from evigrad.jacobians.recorder import graph_nodes, reachable

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

# Equal data are made different by shrinking each entry by up to this part: towards zero, where
# indices stay in range and positive numbers positive.
_SHRINK = 0.2
# The entries' size where all are zero.
_SMALL = 0.01
# Name of the graph's node for a reentrant checkpoint.
_REENTRANT = "CheckpointFunctionBackward"
# How far weights are moved, relative to their root mean square.
_MOVE = 0.1


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
        """Return the names for which ``compute`` gives the same numbers and derivatives.

        It may raise any exception, which counts as disagreement. Derivatives count where the
        reference has them.
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


# ------------------------------------------------------------ what plans are checked on


def distinct_probe(model: nn.Module, x: Tensor, size: int) -> tuple[Tensor, bool]:
    """``size`` inputs, different where possible, and whether no two of them are equal."""
    # Among equal data a layer that sorts or mixes them goes unnoticed.
    given = x.detach()[torch.arange(size, device=x.device) % len(x)]
    if _all_differ(given):
        return given, True
    varied = _varied(given)
    if _all_differ(varied) and _runs(model, varied):
        return varied, True
    return given, False


def _all_differ(x: Tensor) -> bool:
    return all(not torch.equal(x[i], x[j]) for i in range(len(x)) for j in range(i))


def _varied(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    part = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    if x.dtype == torch.bool:
        return x & (part > 0.5)
    if x.is_complex() or x.is_floating_point():
        if not x.any():
            return (_SMALL * part).to(x.dtype)
        return (x * (1 - _SHRINK * part)).to(x.dtype)
    # Half of the entries move, to anything between zero and their value.
    return torch.where(part > 0.5, x, (x * (2 * part)).to(x.dtype))


def _runs(model: nn.Module, x: Tensor) -> bool:
    try:
        with model_run(model), torch.no_grad():
            output = called(model, x)
    except Exception:  # the caller then uses the given data, which show whose error it is
        return False
    return isinstance(output, Tensor) and bool(output.isfinite().all())


def moved_copy(
    model: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor
) -> tuple[nn.Module, dict[str, nn.Parameter]] | None:
    """A copy with its weights moved off their initial values, and these; None where it fails."""
    # A head that starts at zero makes all rows before it zero; two ways to compute them then agree
    # whether they are right or not.
    learnable = {name for name, p in model.named_parameters() if p.requires_grad}
    for names in (learnable, set(weights)):
        # Second try with the weights alone: a hyperparameter may have a domain.
        try:
            with model_run(model):
                memo = {id(t): t.detach().clone() for t in held_tensors(model) if not t.is_leaf}
                moved = copy.deepcopy(model, memo)
            own = dict(moved.named_parameters())
            _move([own[name] for name in sorted(names)])
            with model_run(moved), torch.enable_grad():
                outputs = scores_of(moved(x.clone()))
        except Exception:  # any error means that there is no such copy
            continue
        foreign = reachable(outputs, dict(model.named_parameters()))
        if outputs.isfinite().all() and not foreign:
            return moved, {name: own[name] for name in weights}
    return None


@torch.no_grad()
def _move(parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in parameters:
        if p.is_floating_point() and p.numel() > 0:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            size = _MOVE * p.square().mean().sqrt()
            p.add_(noise * torch.where(size > 0, size, torch.full_like(size, _SMALL)))


def refuse_reentrant(model: nn.Module, x: Tensor) -> None:
    """Raise if a reentrant checkpoint, which has no gradient in chosen parameters, is used."""
    x = x.clone()
    if x.is_floating_point():  # without a gradient in its input the checkpoint leaves no node
        x = x.requires_grad_().clone()
    try:
        with model_run(model), torch.enable_grad():
            output = scores_of(model(x))
    except Exception:  # the model cannot take such an input; other calls will report real errors
        return
    if any(node.name() == _REENTRANT for node in graph_nodes(output)):
        raise ConfigurationError(
            "The model uses torch.utils.checkpoint with use_reentrant=True, which cannot give the"
            " gradient in chosen parameters. Pass use_reentrant=False, which computes the same."
        )
