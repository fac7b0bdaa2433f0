"""Choose how to compute the rows of each parameter, and check the choice before its first use."""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.errors import (
    ConfigurationError,
    EvigradWarning,
    InputError,
    NotFiniteOutputError,
    is_out_of_memory,
)
from evigrad.inputs import mixes_data
from evigrad.network.arguments import (
    NO_DERIVATIVE,
    check_call,
    check_storage,
    model_outputs,
)
from evigrad.network.generic import close, vmap_rows
from evigrad.network.layers import RULES, is_custom
from evigrad.network.linearization import Linearization, uses_of
from evigrad.network.modes import model_run, without_autocast
from evigrad.network.ownership import placed
from evigrad.network.paths import LOOP, JacobianPlan, Use
from evigrad.network.recorder import Recorder, graph_nodes, reachable
from evigrad.network.verification import (
    Reference,
    distinct_probe,
    moved_copy,
    refuse_reentrant,
    refuse_scaled_gradients,
)

# Two batch sizes distinguish the batch dimension from all others. The larger is also the number of
# examples on which rows are compared.
_PROBE_SIZES = (2, 3)


@dataclass(frozen=True)
class _Recording:
    """What the recorder found in every forward pass over the probe.

    Attributes:
        uses: The uses of parameters whose uses all have closed forms, by name.
        kronecker: Names in ``uses`` whose uses all have Kronecker factors.
        idle: Names of parameters that are not used.
        without_effect: Names of parameters that are used but do not affect the outputs.
        operations: Names of the nodes in the outputs' graph.
        refused: Why custom rules were not used, by the name of the parameter.
    """

    uses: dict[str, tuple[Use, ...]] = field(default_factory=dict)
    kronecker: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)
    without_effect: set[str] = field(default_factory=set)
    operations: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)


def plan(model: nn.Module, weights: Mapping[str, nn.Parameter], x_probe: Tensor) -> JacobianPlan:
    """Find the parameters whose rows have a closed form, and choose how to compute other rows.

    Closed forms are used for a parameter if three conditions hold:

    - Every use of the parameter has a closed form.
    - In every use, dimension 0 counts the examples, or consecutive parts of each example.
    - The rows and their derivatives agree with plain automatic differentiation on ``x_probe``.

    Rows of other parameters are computed by automatic differentiation, vectorized over examples if
    the results agree. Rows are compared on a copy of the model with perturbed parameters, because
    an output layer initialized to zero would make other rows zero. If ``x_probe`` has fewer than 3
    different examples, these examples are varied.

    The model must be in evaluation mode. Its attributes, buffers, hooks and gradients are not
    changed. Autocast is switched off during planning, but the plan is also valid under autocast.

    Args:
        model: Module that maps m inputs to outputs (m, C).
        weights: Trainable parameters of the model by name.
        x_probe: Typical inputs, if possible of 3 different examples. Dimension 0 counts them.

    Returns:
        The plan, for inputs of this shape.

    Raises:
        InputError: If there are no data, or if the outputs are not finite, do not have the shape
            (m, C), or do not depend on any weight.
        ConfigurationError: If the rows would not be defined. This is the case if the output for an
            example is random or depends on other examples, or if gradients are disabled. A weight
            must be a real parameter of the model that requires a gradient. It must not share
            memory with another weight, or have a hook. The model must not use a reentrant
            checkpoint.
    """
    check_call(model, weights, x_probe)
    check_storage(weights)
    with without_autocast(x_probe.device):  # autocast's rounding would hide errors
        return _checked_plan(model, weights, x_probe)


def _checked_plan(
    model: nn.Module, weights: Mapping[str, nn.Parameter], x_probe: Tensor
) -> JacobianPlan:
    x, distinct = distinct_probe(model, x_probe, _PROBE_SIZES[-1])
    outputs = _independent_outputs(model, x)
    refuse_reentrant(model, x)
    with model_run(model), torch.enable_grad():
        recorded = model_outputs(model, x)
    nodes = graph_nodes(recorded)
    if not reachable(recorded, weights, nodes):
        raise InputError(NO_DERIVATIVE)
    refuse_scaled_gradients(nodes)

    # The structure is recorded for the model. Rows are compared on a copy with perturbed weights.
    moved = moved_copy(model, weights, x)
    del recorded, nodes
    reference = Reference(*(moved or (model, weights)), x, outputs)
    # Equal examples reveal neither a changed order nor mixing. Then only the loop is safe.
    recording = _record(model, weights, x, outputs) if distinct else _Recording()
    closed = _verified_closed(reference, recording)
    _warn_of_refused(recording.refused)
    idle = {name for name in recording.idle if not reference.rows[name].any()}
    generic = [name for name in weights if name not in closed and name not in idle]
    # Vectorized rows are checked only by their values. Agreement of zeros proves nothing.
    telling = [name for name in generic if name not in reference.vanishing]
    vectorised = _verified_vectorised(reference, telling) if moved and distinct else set()

    words = {}
    for name in weights:
        if name in idle or (name in closed and name in recording.without_effect):
            words[name] = "unused"
        elif name in closed:
            words[name] = _counted(recording.uses[name])
        else:
            words[name] = "generic: vmap" if name in vectorised else LOOP
    return JacobianPlan(
        words=words,
        uses={name: recording.uses[name] for name in weights if name in closed},
        vectorised=frozenset(vectorised),
        kronecker=frozenset(closed & recording.kronecker),
        datum_shape=tuple(x.shape[1:]),
        operations=recording.operations,
    )


def adapted(
    plans: Iterable[JacobianPlan],
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    x_probe: Tensor,
) -> JacobianPlan | None:
    """Return the first of the plans that is valid for these inputs, or None.

    The returned plan is adapted to the length of the inputs.

    This takes two forward passes. The check of a plan shows that the derivatives of certain
    operations with certain settings are correct, whatever the length. The check remains valid if
    the same functions with the same settings use each weight, and the graph has the same
    operations. Every pass checks everything that may depend on the length: the example of each row,
    other uses of a weight, and in-place changes.
    """
    plans = [plan for plan in plans if plan.operations]
    if not plans:
        return None
    with without_autocast(x_probe.device):
        x, distinct = distinct_probe(model, x_probe, _PROBE_SIZES[-1])
        if not distinct:
            return None
        try:
            with model_run(model), torch.no_grad():
                single = model_outputs(model, x[:1])
            recording = _record_once(model, weights, x, single)
        except Exception as error:  # ``plan`` will report the error
            if is_out_of_memory(error):
                raise
            return None
    fitting_plan = next((plan for plan in plans if _alike(plan, recording)), None)
    if fitting_plan is None:
        return None
    words = {
        name: _counted(recording.uses[name])
        if name in fitting_plan.uses and fitting_plan.words[name] != "unused"
        else word
        for name, word in fitting_plan.words.items()
    }
    return replace(
        fitting_plan,
        words=words,
        uses={name: recording.uses[name] for name in fitting_plan.uses},
        datum_shape=tuple(x.shape[1:]),
    )


def _alike(plan: JacobianPlan, recording: _Recording) -> bool:
    """Return whether a plan fits a recording, apart from lengths and counts."""

    def kinds(uses: Iterable[Use]) -> set[tuple[Any, ...]]:
        return {
            (use.rule, use.slot, use.samples, len(use.input), len(use.output), use.settings)
            for use in uses
        }

    unused = {name for name, word in plan.words.items() if word == "unused"}
    return (
        plan.operations == recording.operations
        and plan.uses.keys() <= recording.uses.keys()
        and all(kinds(uses) == kinds(recording.uses[name]) for name, uses in plan.uses.items())
        and plan.kronecker <= recording.kronecker
        and unused == (recording.idle | recording.without_effect) - plan.demoted
    )


def _counted(uses: Iterable[Use]) -> str:
    """Return the names of the rules of a parameter's uses, with their counts."""
    rules = Counter(use.rule for use in uses)
    return " + ".join(f"{n} x {rule}" if n > 1 else rule for rule, n in rules.items())


def _independent_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return the outputs for the probe, or raise an error if they depend on other examples."""
    with model_run(model), torch.no_grad():
        joint = model_outputs(model, x)
        separate = torch.cat([model_outputs(model, x[n : n + 1]) for n in range(len(x))])
    if not joint.isfinite().all():
        raise NotFiniteOutputError(
            "The model's outputs contain NaN or infinite values for these inputs, so derivatives"
            " cannot be computed. Check whether a mask hides an entire example, or whether training"
            " has diverged."
        )
    if not close(joint, separate):
        raise ConfigurationError(mixes_data(model))
    return joint


def _record(
    model: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor, outputs: Tensor
) -> _Recording:
    """Run the recorder with two batch sizes, and return what both recordings have in common."""
    small, large = (_record_once(model, weights, x[:size], outputs[:size]) for size in _PROBE_SIZES)
    refused = small.refused | large.refused
    same = {name for name in large.uses if small.uses.get(name) == large.uses[name]}
    for name in large.uses.keys() - same:
        custom = _custom_rule(large.uses[name])
        if custom is not None and name not in refused:
            refused[name] = f"{custom}: shapes or settings of match(...) depend on the batch size"
    return _Recording(
        {name: large.uses[name] for name in large.uses if name in same},
        large.kronecker & same,
        large.idle & small.idle,
        large.without_effect & small.without_effect,
        large.operations,
        refused,
    )


def _record_once(
    model: nn.Module, weights: Mapping[str, nn.Parameter], x: Tensor, outputs: Tensor
) -> _Recording:
    repeated = dict[str, Sequence[Use]].fromkeys(weights, ())
    recorders = [Recorder(weights, len(x), positions) for positions in (repeated, {})]
    for recorder in recorders:  # repeated positions may not fit this model
        try:
            if recording := _recorded(model, weights, x, outputs, recorder):
                return recording
        except Exception as error:  # it cannot be recorded, but the generic path may work
            if is_out_of_memory(error):
                raise
    return _Recording(refused=recorders[-1].refused)


def _recorded(
    model: nn.Module,
    weights: Mapping[str, nn.Parameter],
    x: Tensor,
    outputs: Tensor,
    recorder: Recorder,
) -> _Recording | None:
    """Return a recording, or None if recording changes the outputs."""
    with model_run(model), torch.enable_grad(), recorder:
        recorded = model_outputs(model, x)
    if not close(recorded[: len(outputs)], outputs):
        return None
    elsewhere = reachable(recorded, weights)
    calls, _, nodes = placed(recorded, recorder.calls)
    all_uses = uses_of(calls)
    recording = _Recording(
        idle={n for n in weights if n not in elsewhere and n not in all_uses},
        operations=frozenset(node.name() for node in nodes),
        refused=recorder.refused,
    )
    for name, uses in all_uses.items():
        by_datum = all(call.parts > 0 for call, _ in uses)
        if not by_datum:
            custom = _custom_rule([call.use(slot) for call, slot in uses])
            if custom is not None and name not in recording.refused:
                recording.refused[name] = (
                    f"{custom}: dimension 0 of the input and the output does not count the examples"
                )
        if name in elsewhere or not by_datum:  # the former is not an error of the rule
            continue
        recording.uses[name] = tuple(call.use(slot) for call, slot in uses)
        one_way = len({call.rule.transposed for call, _ in uses}) == 1
        if one_way and all(slot in call.rule.kronecker for call, slot in uses):
            recording.kronecker.add(name)
        if not any(call.edge.node in nodes for call, _ in uses):
            recording.without_effect.add(name)
    return recording


def _verified_closed(reference: Reference, recording: _Recording) -> set[str]:
    if not recording.uses:
        return set()
    model, weights = reference.model, reference.weights
    kronecker, datum_shape = frozenset(recording.kronecker), tuple(reference.x.shape[1:])
    candidate = JacobianPlan({}, recording.uses, frozenset(), kronecker, datum_shape)
    words = {name: _custom_rule(uses) for name, uses in recording.uses.items()}
    custom = {name: word for name, word in words.items() if word is not None}

    def rows(
        names: list[str], x: Tensor, vectors: Tensor, differentiable: bool
    ) -> dict[str, Tensor]:
        linearization = Linearization(model, weights, x, candidate, differentiable)
        return linearization.rows(vectors, [n for n in names if linearization.is_closed(n)])

    # The tests compare all methods of the package's rules with rows. Nobody has checked a custom
    # rule, so all of its methods are compared here, and an error in it affects no other parameter.
    closed = reference.agreeing([name for name in recording.uses if name not in custom], rows)
    for name, word in custom.items():
        reason = reference.reason_against(name, candidate)
        if reason is None:
            closed.add(name)
        else:
            recording.refused[name] = f"{word}: {reason}"
    return closed


def _custom_rule(uses: Iterable[Use]) -> str | None:
    """Return the name of the first custom rule among the rules of some uses, if any."""
    names = {rule.name for rule in RULES.values() if is_custom(rule)}
    return next((use.rule for use in uses if use.rule in names), None)


def _warn_of_refused(refused: Mapping[str, str]) -> None:
    if refused:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in refused.items())
        warnings.warn(
            f"The custom rule in RULES is not used for {reasons}. The rows of these parameters are"
            " computed by automatic differentiation, which is correct but slower. Fix the rule, and"
            " create a new Evidence.",
            EvigradWarning,
            stacklevel=2,
        )


def _verified_vectorised(reference: Reference, names: list[str]) -> set[str]:
    if not names:
        return set()

    def rows(
        names: list[str], x: Tensor, vectors: Tensor, differentiable: bool
    ) -> dict[str, Tensor]:
        with model_run(reference.model):
            return vmap_rows(reference.model, reference.weights, names, x, vectors, differentiable)

    return reference.agreeing(names, rows)
