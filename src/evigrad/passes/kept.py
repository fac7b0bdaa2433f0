"""Keep a pass over a block for many steps on the prior and the likelihood."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from evigrad.core.changes import likelihood_changes
from evigrad.core.model import Pass
from evigrad.errors import ConfigurationError, InputError
from evigrad.network.network import InputPlan
from evigrad.passes.problem import Problem

# Row length of the table that a checksum sums over: a prime, unlike the row length of any layer.
_WIDTH = 1021


@dataclass(frozen=True, eq=False)
class KeptPass(Pass):
    """One pass over a block that is used for many steps on the prior and the likelihood.

    Attributes:
        follows: Names of the hyperparameters that may change without invalidating this pass.
        versions: Fingerprints of everything else on which the pass depends.
    """

    follows: frozenset[str] = frozenset()
    versions: tuple[tuple[int, int], ...] = ()

    def draws(self) -> Iterator["KeptPass"]:
        """Yield a pass for each draw of an anchored block, each with the same anchor rows."""
        if self.block.num_draws < 2:
            yield self
            return
        for number in range(self.block.num_draws):
            block = self.block.of_draw(number)
            weights = block.likelihood_weights
            yield replace(
                self,
                block=block,
                log_likelihood=self.model.log_likelihood(self.log_probabilities, weights),
                outputs=[
                    (replace(batch, likelihood_weights=weights[batch.data]), f)
                    for batch, f in self.outputs
                ],
            )


def kept(
    problem: Problem,
    block_pass: Pass,
    hyperparameters: Mapping[str, nn.Parameter],
    names: Iterable[str],
) -> KeptPass:
    """Return a pass with fingerprints of everything on which it depends.

    ``check_kept`` uses the fingerprints to detect changes. The prior may always change, and so may
    the learnable ``hyperparameters`` in ``names``.
    """
    free = frozenset([*names, *(n for n in hyperparameters if n.startswith("prior."))])
    versions = _versions(problem, hyperparameters, free)
    values = {field.name: getattr(block_pass, field.name) for field in fields(Pass)}
    return KeptPass(**values, follows=free, versions=versions)


def check_kept(
    problem: Problem,
    passes: Sequence[KeptPass],
    hyperparameters: Mapping[str, nn.Parameter],
    learnable: Iterable[str],
) -> None:
    """Check that kept passes are valid, and have gradients for the ``learnable`` hyperparameters.

    Raises:
        ConfigurationError: If a pass becomes invalid when one of these hyperparameters changes.
        InputError: If a pass was made by another evidence, or with different weights.
    """
    if not passes and problem.ranks.count == 1:
        raise InputError("There is no pass. Pass at least one result of collect(...).")
    for kept_pass in passes:
        if not isinstance(kept_pass, KeptPass):
            raise InputError(
                f"Each pass must be a result of collect(...), got {type(kept_pass).__name__}. Pass"
                " a list of results as *passes, and data to estimate or backward."
            )
    names = list(learnable)
    now: dict[frozenset[str], tuple[tuple[int, int], ...]] = {}
    for kept_pass in passes:
        if kept_pass.model is not problem.model:
            raise InputError(
                "The pass was collected by another evidence. Call collect(...) on this evidence."
            )
        if kept_pass.follows not in now:
            now[kept_pass.follows] = _versions(problem, hyperparameters, kept_pass.follows)
        if kept_pass.versions != now[kept_pass.follows]:
            raise InputError(
                "The pass is outdated, because weights, a buffer of the model, a fixed noise"
                " parameter, or hyperparameters outside the pass's wrt have changed since"
                " collect(). Call collect() again."
            )
        if lost := [name for name in names if name not in kept_pass.follows]:
            raise ConfigurationError(
                f"The kept pass has no gradient for {', '.join(lost)}, because it was collected for"
                f" wrt={sorted(kept_pass.follows)}. Use the same wrt, or call backward on the data."
            )


def not_keepable(problem: Problem, plan: InputPlan, learned: Sequence[str]) -> str | None:
    """Return why a kept pass cannot be used to learn these hyperparameters, or None if it can.

    A kept pass stays valid for changes of the prior, and of likelihood parameters that only scale
    rows.
    """
    others = [name for name in learned if not name.startswith("prior.")]
    changing = [name for name in others if name.startswith("model.")]
    changed = "scales"
    if others and not changing:
        changed = likelihood_changes(problem.model, problem.curvature(plan), plan.num_outputs)
    if changed == "rows":
        changing = others
    if changing:
        return (
            "A pass can only be kept for steps on the prior and the noise, but"
            f" {', '.join(changing)} changes the pass. Omit this hyperparameter (wrt=['prior'], or"
            " hyper_steps=... in training), or call estimate and backward on the data."
        )
    if changed == "sums":
        return (
            f"'{problem.model.estimator.name}' sums rows with different scales, so a pass that was"
            f" kept cannot be reused when {', '.join(others)} changes. Use an 'ntk' estimator, a"
            " single noise for all outputs, or estimate and backward on the data."
        )
    return None


def _versions(
    problem: Problem, hyperparameters: Mapping[str, nn.Parameter], follows: Iterable[str]
) -> tuple[tuple[int, int], ...]:
    """Return the address and version of every parameter and buffer that must not change."""
    # The version counts in-place writes, but not writes through ``.data``.
    free = {id(hyperparameters[name]) for name in follows if name in hyperparameters}
    held = [
        tensor
        for module in (problem.network.model, problem.model.likelihood)
        for tensor in (*module.parameters(), *module.buffers())
        if id(tensor) not in free and tensor.layout == torch.strided
    ]
    return tuple((tensor.data_ptr(), tensor._version) for tensor in held)


def checksums(tensors: Sequence[Tensor], device: torch.device) -> list[int]:
    """Return a checksum of each tensor, computed from all entries of the tensor."""
    if not tensors:
        return []
    return torch.stack([_checksum(tensor).to(device) for tensor in tensors]).tolist()


def contents(module: nn.Module, device: torch.device) -> list[object]:
    """Return classes, plain attributes and checksums of a module and its children."""
    plain: list[object] = [
        (type(submodule).__qualname__, name, value)
        for submodule in module.modules()
        for name, value in vars(submodule).items()
        if name != "training" and isinstance(value, bool | int | float | str | None)
    ]
    return [*plain, *checksums([*module.parameters(), *module.buffers()], device)]


def _checksum(tensor: Tensor) -> Tensor:
    """Return a position-weighted sum of the bits."""
    whole = tensor.detach().reshape(-1)
    # At most 32 bits at a time, whose sums cannot overflow. Integer sums are exact in any order.
    bits = whole.view({1: torch.int8, 2: torch.int16}.get(whole.element_size(), torch.int32))
    head = len(bits) // _WIDTH * _WIDTH
    table = bits[:head].view(-1, _WIDTH)
    sums = (bits[head:], table.sum(0), table.sum(1))[: 3 if head else 1]
    terms = [(s * torch.arange(1, len(s) + 1, device=s.device)).sum() for s in sums]
    return torch.stack(terms).sum()
