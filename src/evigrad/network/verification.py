"""Compare fast computations of rows with plain automatic differentiation.

``Reference`` checks a plan on a probe of a few different examples, with perturbed weights. This
cannot detect every error. Other inputs may take another branch of the model's code, and examples
may affect each other only in larger batches. ``spot_check`` and ``check_separate`` therefore check
real passes, with the passes' data and weights.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node

from evigrad.errors import ConfigurationError, is_out_of_memory, listed
from evigrad.inputs import called, mixes_data, named_parameters, scores_of
from evigrad.network.arguments import model_outputs
from evigrad.network.generic import close, close_outputs, datum_rows, loop_rows, tolerances
from evigrad.network.linearization import Linearization
from evigrad.network.modes import evaluation_run, held_tensors, model_run, without_autocast
from evigrad.network.paths import LOOP, JacobianPlan
from evigrad.network.recorder import graph_nodes, reachable

# Takes (names, x, vectors, differentiable) and returns rows. Names may be missing in the result.
Rows = Callable[[list[str], Tensor, Tensor, bool], dict[str, Tensor]]
# Takes cotangents of rows by name, x and vectors, and returns the inner products with the rows.
Products = Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]

# With one column, errors in the dimension of an example's rows would not be detected.
_COLUMNS = 2

# Second derivatives are sums of more terms, so they have a larger tolerance.
_SECOND_ORDER_FACTOR = 10.0

# Equal examples are varied by shrinking each entry by at most this share. Indices then stay in
# range, and positive numbers stay positive.
_SHRINK = 0.2
# Size of the entries if all of them are zero.
_SMALL = 0.01
# Name of the graph's node for a reentrant checkpoint.
_REENTRANT = "CheckpointFunctionBackward"
# Size of the perturbation of weights, relative to their root mean square.
_MOVE = 0.1
# Factor on the share of the largest rows below which all is rounding. Terms cancel more in trained
# networks than in the networks for which plans are made.
_TRAINED_ROUNDING_FACTOR = 10.0


class Reference:
    """Rows of a few examples, computed by the plain loop as a reference for other algorithms.

    Attributes:
        rows: Rows (m, 2, *parameter shape) for random cotangents, by name.
        vanishing: Names of parameters whose rows are only rounding errors. Agreement with these
            rows proves nothing.
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
        self._norm = max((r.norm() for r in self.rows.values()), default=outputs.new_zeros(()))
        rounding = tolerances(outputs)[1]
        self.vanishing = {
            name for name, r in self.rows.items() if not r.norm() > rounding * self._norm
        }

    def agreeing(self, names: Sequence[str], compute: Rows) -> set[str]:
        """Return the names for which ``compute`` returns the same rows and derivatives.

        If ``compute`` raises an error, no name agrees. Derivatives are compared if the reference
        has them.
        """
        agreeing_names = list(names)
        if not agreeing_names:
            return set()
        try:
            # Also in reverse, because a model that sorts its examples may get a sorted probe.
            places = torch.arange(len(self.x), device=self.x.device)
            for order in (places, places.flip(0)):
                rows = compute(agreeing_names, self.x[order], self._vectors[order], False)
                agreeing_names = [
                    name
                    for name in agreeing_names
                    if name in rows and close(rows[name], self.rows[name][order], self._norm)
                ]
            if not agreeing_names:
                return set()
            return self._with_right_derivatives(agreeing_names, _products_of(compute))
        except Exception as error:  # this path does not support this model
            if is_out_of_memory(error):
                raise
            return set()

    def reason_against(self, name: str, plan: JacobianPlan) -> str | None:
        """Return why the closed forms of a plan are wrong for a parameter, or None if they agree.

        Compares the rows and their derivatives, and everything that a rule computes without rows.
        """

        def linearized(x: Tensor, differentiable: bool) -> Linearization:
            linearization = Linearization(self.model, self.weights, x, plan, differentiable)
            if not linearization.is_closed(name):
                raise ConfigurationError("another batch uses the parameter differently")
            return linearization

        def compute(
            names: list[str], x: Tensor, vectors: Tensor, differentiable: bool
        ) -> dict[str, Tensor]:
            return linearized(x, differentiable).rows(vectors, names)

        def inner(cotangents: dict[str, Tensor], x: Tensor, vectors: Tensor) -> dict[str, Tensor]:
            return {name: linearized(x, True).inner(vectors, cotangents)}

        try:
            places = torch.arange(len(self.x), device=self.x.device)
            for order in (places, places.flip(0)):  # as in ``agreeing``
                rows = compute([name], self.x[order], self._vectors[order], False)[name]
                if not close(rows, self.rows[name][order], self._norm):
                    return "rows(...) disagrees with automatic differentiation"
            if name not in self._with_right_derivatives([name], _products_of(compute)):
                return "derivatives of rows(...) disagree with automatic differentiation"
            linearization, rows = linearized(self.x, False), self.rows[name]
            if reason := _wrong_form(linearization, self._vectors, name, rows, self._norm):
                return reason
            if name not in self._with_right_derivatives([name], inner):
                return "derivatives of inner(...) disagree with rows(...)"
        except Exception as error:  # of the rule, which may be custom
            if is_out_of_memory(error):
                raise
            return f"a method raised {error!r}"
        return None

    def _with_right_derivatives(self, names: list[str], compute: Products) -> set[str]:
        """Return the names whose derivatives of rows agree, or all if the reference has none."""
        # Compare gradients of random sums of the rows, in everything that they depend on. Correct
        # first derivatives do not imply correct second ones. For example, layer normalization under
        # ``vmap`` treats its statistics as constants.
        x, vectors = self.x[:2].clone(), self._vectors[:2, :1].clone().requires_grad_()
        weight_ids = {id(p) for p in self.weights.values()}
        arguments = [
            p for p in self.model.parameters() if p.requires_grad and id(p) not in weight_ids
        ]
        arguments = [vectors, *arguments]
        if x.is_floating_point():
            arguments.append(x.requires_grad_())
        factors = {name: self._random(self.rows[name][:2, :1]) for name in names}

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
            expected = _products_of(self._loop_rows)(factors, x, vectors)
            gradient(list(expected.values()))
        except (RuntimeError, NotImplementedError):  # an operation without a second derivative
            return set(names)
        actual = compute(factors, x, vectors)

        def agree(subset: Sequence[str]) -> bool:
            values = torch.stack([expected[name].detach().to(vectors.dtype) for name in subset])
            return close(
                gradient([actual[name] for name in subset]),
                gradient([expected[name] for name in subset]),
                values.norm(),
                _SECOND_ORDER_FACTOR,
            )

        # Each name takes a backward pass, so compare them one by one only if they fail together.
        return set(names) if agree(names) else {name for name in names if agree([name])}

    def _loop_rows(
        self, names: list[str], x: Tensor, vectors: Tensor, differentiable: bool
    ) -> dict[str, Tensor]:
        with model_run(self.model):
            return loop_rows(self.model, self.weights, names, x, vectors, differentiable)

    def _random(self, like: Tensor) -> Tensor:
        return torch.randn(
            like.shape, generator=self._generator, dtype=torch.float64, device="cpu"
        ).to(like)


def _products_of(compute: Rows) -> Products:
    def products(cotangents: dict[str, Tensor], x: Tensor, vectors: Tensor) -> dict[str, Tensor]:
        rows = compute(list(cotangents), x, vectors, True)
        return {name: (cotangents[name] * rows[name]).sum() for name in cotangents}

    return products


def _wrong_form(
    linearization: Linearization,
    vectors: Float[Tensor, "m k C"],
    name: str,
    rows: Float[Tensor, "n k *parameter"],
    norm: Tensor,
    index: int | None = None,
) -> str | None:
    """Return why ``inner``, ``factors`` or ``products`` disagrees with rows, or None if they agree.

    ``rows`` are correct rows of all examples, or of one example with an ``index``. Differences
    below a share of ``norm`` are rounding errors.
    """
    # Near the rows, so that the terms of the inner product do not cancel, but not proportional.
    factors = 1 + 0.5 * torch.arange(rows.numel(), device=rows.device, dtype=torch.float32).cos()
    cotangent = rows * factors.to(rows).view_as(rows)
    form = "matrix"
    try:
        forms = linearization.other_forms(vectors, name, cotangent, index)
        for form, compute in forms.items():
            with torch.no_grad(), without_autocast(vectors.device):
                value = compute()
            if form == "inner":
                right = close(value, (cotangent * rows).sum(), norm * cotangent.norm())
            else:
                right = close(value, rows, norm)
            if not right:
                return f"{form}(...) disagrees with rows(...)"
    except Exception as error:  # of the rule, which may be custom
        if is_out_of_memory(error):
            raise
        return f"{form}(...) raised {error!r}"
    return None


# ------------------------------------------------------------ probes and copies for checking plans


def distinct_probe(model: nn.Module, x: Tensor, size: int) -> tuple[Tensor, bool]:
    """Return ``size`` inputs, and whether all of them are different.

    If there are too few different inputs, they are repeated and varied.
    """
    # Equal examples would not reveal a layer that sorts or mixes them.
    probe = x.detach()[torch.arange(size, device=x.device) % len(x)]
    if _all_differ(probe):
        return probe, True
    varied = _varied(probe)
    if _all_differ(varied) and _runs(model, varied):
        return varied, True
    return probe, False


def _all_differ(x: Tensor) -> bool:
    return all(not torch.equal(x[i], x[j]) for i in range(len(x)) for j in range(i))


def _varied(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    part = torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x.device)
    if x.dtype == torch.bool:
        return x & (part > 0.5)
    if x.is_complex() or x.is_floating_point():
        if not x.any():
            return (_SMALL * part).to(x.dtype)
        return (x * (1 - _SHRINK * part)).to(x.dtype)
    # Half of the entries move to random values between zero and their value.
    return torch.where(part > 0.5, x, (x * (2 * part)).to(x.dtype))


def _runs(model: nn.Module, x: Tensor) -> bool:
    try:
        with model_run(model), torch.no_grad():
            output = called(model, x)
    except Exception:  # the caller then uses the original data, for which errors are reported
        return False
    return isinstance(output, Tensor) and bool(output.isfinite().all())


def moved_copy(
    model: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor
) -> tuple[nn.Module, dict[str, nn.Parameter]] | None:
    """Return a copy of a model with perturbed parameters, and the weights of the copy.

    Return None if the model cannot be copied.
    """
    # A head initialized to zero makes all rows before it zero. Two algorithms for them would then
    # agree even if one is wrong.
    learnable = {name for name, p in named_parameters(model).items() if p.requires_grad}
    for names in (learnable, set(weights)):
        # The second attempt perturbs only the weights, because hyperparameters may have a domain.
        try:
            with model_run(model):
                memo = {id(t): t.detach().clone() for t in held_tensors(model) if not t.is_leaf}
                moved = copy.deepcopy(model, memo)
            moved_parameters = named_parameters(moved)
            _move([moved_parameters[name] for name in sorted(names)])
            with model_run(moved), torch.enable_grad():
                outputs = scores_of(moved(x.clone()))
        except Exception:  # any error means that there is no such copy
            continue
        foreign = reachable(outputs, dict(model.named_parameters()))
        if outputs.isfinite().all() and not foreign:
            return moved, {name: moved_parameters[name] for name in weights}
    return None


@torch.no_grad()
def _move(parameters: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in parameters:
        if p.is_floating_point() and p.numel() > 0:
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu").to(
                p
            )
            size = _MOVE * p.square().mean().sqrt()
            p.add_(noise * torch.where(size > 0, size, torch.full_like(size, _SMALL)))


def refuse_reentrant(model: nn.Module, x: Tensor) -> None:
    """Raise an error for reentrant checkpoints, which give no gradients of single parameters."""
    x = x.clone()
    if x.is_floating_point():  # the checkpoint has a node only if its input requires a gradient
        x = x.requires_grad_().clone()
    try:
        with model_run(model), torch.enable_grad():
            output = scores_of(model(x))
    except Exception:  # the model does not support such inputs, and other calls report errors
        return
    if any(node.name() == _REENTRANT for node in graph_nodes(output)):
        raise ConfigurationError(
            "The model uses torch.utils.checkpoint with use_reentrant=True, which cannot compute"
            " gradients of single parameters. Pass use_reentrant=False, which gives the same"
            " results."
        )


def refuse_scaled_gradients(nodes: Iterable[Node]) -> None:
    """Raise an error if an embedding divides its gradient by the counts of its indices."""
    if any(getattr(node, "_saved_scale_grad_by_freq", False) for node in nodes):
        raise ConfigurationError(
            "The model calls F.embedding or F.embedding_bag with scale_grad_by_freq=True. The"
            " gradient and the curvature would correspond to a different function. Omit the"
            " argument, or use an nn.Embedding, for which evigrad switches this flag off."
        )


def refuse_once_differentiable(
    model: nn.Module, weights: Mapping[str, nn.Parameter], learned: Sequence[str], x: Tensor
) -> None:
    """Raise an error if the graph of the rows has a function marked ``once_differentiable``.

    Args:
        model: The model.
        weights: Weights by name.
        learned: Names of the hyperparameters whose gradient needs derivatives of the rows, or
            ``inputs``. If there are none, the derivatives are for the exact Hessian.
        x: A few inputs.

    Raises:
        ConfigurationError: If there is such a function.
    """
    with evaluation_run(model), torch.enable_grad():
        nodes = _nodes_of_rows(model_outputs(model, x), weights.values())
    names = sorted({name for node in nodes if (name := _once_differentiable(node))})
    if names:
        needed = f"The gradient for {listed(learned)}" if learned else "The exact Hessian"
        raise ConfigurationError(
            f"{listed(names)} cannot be differentiated twice, because the backward method is marked"
            f" with @once_differentiable. {needed} needs a second derivative and would be silently"
            " wrong. Write the backward method with differentiable operations and without this"
            " mark, or set requires_grad=False where you do not need this gradient."
        )


# The code of every function that the decorator returns.
_ONCE = once_differentiable(lambda *_: None).__code__


def _once_differentiable(node: Node) -> str:
    """Return the name of a custom function that is not differentiable twice, or an empty string."""
    function = getattr(node, "_forward_cls", None)
    code = getattr(getattr(function, "backward", None), "__code__", None)
    return function.__name__ if function is not None and code is _ONCE else ""


def _nodes_of_rows(outputs: Tensor, weights: Iterable[Tensor]) -> set[Node]:
    """Return the nodes of the outputs' graph from which a weight can be reached."""
    nodes = graph_nodes(outputs)
    users: dict[Node, list[Node]] = {}
    for node in nodes:
        for before, _ in node.next_functions:
            if before is not None:
                users.setdefault(before, []).append(node)
    leaves = {id(w) for w in weights}
    stack = [node for node in nodes if id(getattr(node, "variable", None)) in leaves]
    leading = set(stack)
    while stack:
        for user in users.get(stack.pop(), ()):
            if user not in leading:
                leading.add(user)
                stack.append(user)
    return leading


# ------------------------------------------------------------ checks of real passes


def spot_check(
    linearization: Linearization, vectors: Float[Tensor, "m k C"], index: int
) -> set[str]:
    """Return the names of parameters whose fast derivatives for one example are wrong.

    The fast rows of the example are compared with rows from a separate pass over the example. Other
    results of rules, such as Kronecker factors, are compared with the rows. This takes a forward
    pass and k backward passes of the example, and k backward passes of the batch. If every
    parameter uses the plain loop, nothing is compared. The model must be in the same mode as in the
    checked pass. ``vectors`` are the cotangents of the rows. Below double precision, rows must also
    disagree for the next example, because a rounding error can move a unit across the kink of its
    activation.

    Raises:
        ConfigurationError: If the example's output differs between the separate pass and the batch.
    """
    x, f = linearization.x, linearization.outputs
    if all(word == LOOP for word in linearization.plan.words.values()):
        return set()
    if linearization.mixed:
        # Rounding would hide errors, or look like errors. Repeat the pass in full precision.
        with without_autocast(x.device):
            settings = (linearization.model, linearization.weights, x, linearization.plan)
            return spot_check(Linearization(*settings, differentiable=False), vectors, index)
    wrong_names = _disagreeing(linearization, vectors, index)
    if wrong_names and f.dtype != torch.float64 and len(x) > 1:
        wrong_names &= _disagreeing(linearization, vectors, (index + 1) % len(x))
    return wrong_names


def _disagreeing(
    linearization: Linearization, vectors: Float[Tensor, "m k C"], index: int
) -> set[str]:
    """Return the names whose rows of one example disagree with the loop."""
    one, x, f = slice(index, index + 1), linearization.x, linearization.outputs.detach()
    model, weights = linearization.model, linearization.weights
    names = [name for name, word in linearization.plan.words.items() if word != LOOP]
    with model_run(model):
        separate, expected = datum_rows(
            model, weights, names, x[one].detach(), vectors[one].detach(), False
        )
    if not f.isfinite().all():  # comparing would prove nothing about the paths
        return set()
    if not close_outputs(f[one], separate, f.norm(dim=1).max()):
        _refuse_mixing(model, x, [torch.arange(len(x), device="cpu")[one]])
    rows = linearization.fast_rows_of_datum(vectors, index)
    stacked = {name: torch.stack(expected[name])[None] for name in names}
    largest = torch.stack([r.norm().to(f.dtype) for r in stacked.values()]).max()
    if not largest.square().isfinite():  # inner products overflow
        return set()
    rounding = largest * _TRAINED_ROUNDING_FACTOR

    def is_wrong(name: str, row: Tensor | None) -> bool:
        if row is None or not close(row, stacked[name], rounding):
            return True
        closed = linearization.is_closed(name)
        return closed and bool(_wrong_form(linearization, vectors, name, row, rounding, index))

    # Names that are missing in the rows take the loop in this pass, unlike in the plan.
    return {name for name, row in rows.items() if name in stacked and is_wrong(name, row)}


def check_separate(
    model: nn.Module, x: Tensor, outputs: Float[Tensor, "m C"], generator: torch.Generator
) -> None:
    """Raise an error if an output depends on other examples of its batch.

    The examples pass through the model again in random groups of 1, 2, 4, … examples. Groups of
    different sizes detect different kinds of mixing. All groups together take as long as one
    forward pass without a graph. The model must be in the same mode as for the ``outputs`` f(x),
    which have the type of the weights.
    """
    order, parts = torch.randperm(len(x), generator=generator, device="cpu"), list[Tensor]()
    while len(order):
        size = 2 ** len(parts)
        parts.append(order[:size])
        order = order[size:]
    outputs = outputs.detach()
    if outputs.isfinite().all() and not _is_separate(model, x, outputs, parts):
        _refuse_mixing(model, x, parts)


def _is_separate(
    model: nn.Module, x: Tensor, outputs: Float[Tensor, "m C"], parts: Sequence[Tensor]
) -> bool:
    scale = outputs.norm(dim=1).max()
    with model_run(model), torch.no_grad():
        return all(
            close_outputs(model_outputs(model, x[part]).to(outputs), outputs[part], scale)
            for part in parts
        )


def _refuse_mixing(model: nn.Module, x: Tensor, parts: Sequence[Tensor]) -> None:
    """Raise an error because outputs differ, unless they agree in double precision."""
    # For example, if a model selects experts by score, rounding may change the selection between
    # the batch and a part of it. In double precision, scores are not that close.
    try:
        with model_run(model), torch.no_grad(), without_autocast(x.device):
            exact = copy.deepcopy(model).double()
            x = x.double() if x.is_floating_point() else x
            if _is_separate(exact, x, model_outputs(exact, x), parts):
                return
    except Exception as error:  # any error means that there is no such copy
        if is_out_of_memory(error):
            raise
    raise ConfigurationError(mixes_data(model))
