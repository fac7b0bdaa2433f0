"""Warn about training loops in which the weight decay of the prior is missing or applied twice."""

import warnings
from collections.abc import Iterable, Mapping

from torch import nn
from torch.optim import Optimizer

from evigrad.errors import EvigradWarning, listed
from evigrad.invariances import Averaged

# Initializing a weight and loading a checkpoint may take this number of writes. A loop that sets
# gradients to None after each step exceeds it.
LOADING_WRITES = 4


class DecayWatch:
    """Watch the training of weights, and warn once about each mistake with the prior's decay."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        self._weights = list(weights)
        self._versions: list[int] | None = None  # at the last gradient of the evidence
        self._is_decayed = False
        self._told: set[str] = set()

    def note_decay(self, optimizer: Optimizer | None = None) -> None:
        """Record that the caller applies the prior's decay.

        Warn if ``optimizer`` also decays the weights.
        """
        self._is_decayed = True
        if optimizer is None or "optimizer" in self._told:
            return
        ids = {id(weight) for weight in self._weights}
        for group in optimizer.param_groups:
            decay = group.get("weight_decay", 0)
            if decay and any(id(p) in ids for p in group["params"]):
                self._told.add("optimizer")
                warnings.warn(
                    f"The optimizer has weight_decay={float(decay):g} for weights that the prior"
                    " also decays. Set weight_decay=0, because the prior replaces this decay.",
                    EvigradWarning,
                    stacklevel=3,
                )
                return

    def check(self) -> None:
        """Warn if the weights were trained since the last call, but without the prior's decay.

        A weight that changed and has a gradient was trained. A weight without a gradient may have
        been loaded or initialized, which takes fewer writes than training.
        """
        if self._is_decayed or "missing" in self._told:
            return
        # Tensors in inference mode have no version, and are not trained.
        versions = [0 if w.is_inference() else w._version for w in self._weights]
        before, self._versions = self._versions, versions
        if before is None or all(
            old == new or (weight.grad is None and new - old <= LOADING_WRITES)
            for old, new, weight in zip(before, versions, self._weights, strict=True)
        ):
            return
        self._told.add("missing")
        warnings.warn(
            "The weights are trained without the prior's weight decay, which the evidence assumes."
            " Call evidence.add_weight_decay() after loss.backward(), or minimize"
            " evidence.map_loss(x, y).",
            EvigradWarning,
            stacklevel=3,
        )


def warn_of_averaged(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Warn if the training loss would learn the ranges of random transforms as weights."""
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
            f"The training loss would learn {listed(trained)} of the random transform, but this"
            f" loss usually prefers no transform. Set hyperparameters=['{prefix}'] to learn from"
            " the evidence, or fix the transform with requires_grad_(False).",
            EvigradWarning,
            stacklevel=3,  # the caller of Evidence
        )
