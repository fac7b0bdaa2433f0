"""Warnings about loops in which the weights lack the prior's decay, or have a second one."""

import warnings
from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from evigrad.errors import EvigradWarning, listed
from evigrad.invariances import Averaged

# Writes into a weight that initializing it and loading a checkpoint may take. A loop that sets
# gradients to None after each step is told by more of them.
LOADING_WRITES = 4


class DecayWatch:
    """Watches a loop that trains the weights of an evidence, and warns once of each mistake.

    Args:
        weights: The weights.
    """

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._weights = list(weights)
        self._versions: list[int] | None = None  # at the last gradient of the evidence
        self._is_decayed = False
        self._told: set[str] = set()

    def note_decay(self, optimizer: Optimizer | None = None) -> None:
        """Note that the caller gets the prior's decay; warn if ``optimizer`` has one of its own."""
        self._is_decayed = True
        if optimizer is None or "optimizer" in self._told:
            return
        ids = {id(weight) for weight in self._weights}
        for group in optimizer.param_groups:
            decay = group.get("weight_decay", 0)
            if decay and any(id(p) in ids for p in group["params"]):
                self._told.add("optimizer")
                warnings.warn(
                    f"The optimizer has weight_decay={float(decay):g} on weights that the prior"
                    " decays too. Set weight_decay=0: the prior is the decay.",
                    EvigradWarning,
                    stacklevel=3,
                )
                return

    def check(self) -> None:
        """Warn if the weights were trained since the last call, always without the prior's decay.

        A weight that changed and has a gradient was trained. Without a gradient it may have been
        loaded or initialized, which takes fewer writes than training does.
        """
        if self._is_decayed or "missing" in self._told:
            return
        # Tensors of inference mode have no version, and nobody trains them.
        versions = [0 if w.is_inference() else w._version for w in self._weights]
        before, self._versions = self._versions, versions
        if before is None or all(
            old == new or (weight.grad is None and new - old <= LOADING_WRITES)
            for old, new, weight in zip(before, versions, self._weights, strict=True)
        ):
            return
        self._told.add("missing")
        warnings.warn(
            "The weights are trained without the prior's decay, which the evidence takes for"
            " granted. Call evidence.add_weight_decay() after loss.backward(), or train by"
            " evidence.map_loss(x, y).",
            EvigradWarning,
            stacklevel=3,
        )


def warn_of_averaged(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Warn of ranges of random transforms that are weights: the training loss would learn them."""
    names = {id(weight): name for name, weight in weights.items()}
    trained = [
        names[id(parameter)]
        for module in model.modules()
        if isinstance(module, Averaged)
        for parameter in module.invariance.parameters()
        if id(parameter) in names
    ]
    if trained:
        prefix = trained[0].rpartition(".")[0] or trained[0]
        warnings.warn(
            f"The training loss learns {listed(trained)}, of the random transform, and not the"
            " evidence. The loss usually prefers no transform. Set"
            f" hyperparameters=['{prefix}'], or fix the transform: requires_grad_(False).",
            EvigradWarning,
            stacklevel=3,  # the caller of Evidence
        )
