"""Importance of weights and units for pruning, from the posterior of the weights.

Setting a weight w_i to zero lowers the log joint density of weights and data by about ½ Λ_i w_i².
Here Λ_i = H_i + δ_i is the posterior precision: the diagonal of the curvature plus the prior's
precision. Pruning removes weights with low Λ_i w_i², the optimal posterior damage. (Source: R.
Dhahri et al., 2024, *Shaving Weights with Occam's Razor: Bayesian Sparsification for Neural
Networks Using the Marginal Likelihood*, NeurIPS.) Another criterion is the effective number of
parameters H_i / Λ_i, which measures how much the data determine a weight.

``importances`` returns tensors for ``torch.nn.utils.prune``. ``UnitImportance`` adds them up over
units, for the pruners of Torch-Pruning (extra ``pruning``).
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.passes.checks import check_choice

__all__ = ["UnitImportance", "importances"]

CRITERIA = ("posterior-damage", "effective-parameters")


def importances(
    evidence: Evidence, data: Any, *, criterion: str = "posterior-damage"
) -> dict[str, Tensor]:
    """Return the importance of each weight, from one pass over all data.

    Args:
        evidence: Evidence after training, such as ``fit(...).evidence``. If each unit has its own
            learned precision, training already shrinks the units that the data do not need.
        data: All N training examples, in a form that ``Evidence.posterior`` takes.
        criterion: ``posterior-damage`` (default): the posterior precision times the square of the
            weight. ``effective-parameters``: how much the data determine the weight, from 0 to 1.

    Returns:
        Tensors of the weights' shapes by name.

    Raises:
        ConfigurationError: If the criterion is unknown.
        InputError: If the data are invalid for the model or the likelihood.

    Examples:
        >>> import torch
        >>> from torch.nn.utils import prune
        >>> from evigrad import Schedule, fit
        >>> from evigrad.pruning import importances
        >>> data = torch.randn(100, 3), torch.arange(100) % 2
        >>> model = torch.nn.Linear(3, 2)
        >>> result = fit(model, data, schedule=Schedule(epochs=2), progress=False)
        >>> scores = importances(result.evidence, data)
        >>> pruned = prune.l1_unstructured(model, "weight", 2, importance_scores=scores["weight"])
        >>> int((pruned.weight == 0).sum())
        2

    See also: docs/posterior.md.
    """
    check_choice("criterion", criterion, CRITERIA)
    precisions = evidence.posterior(data, structure="diag").diagonal_precisions()
    assert precisions is not None
    if criterion == "posterior-damage":
        return {name: precision * w.square() for name, (w, precision) in precisions.items()}
    prior = {name: precision.detach() for name, precision in evidence.prior.precisions().items()}
    # Rounding may give a precision that is slightly below the prior's.
    return {name: (1 - prior[name] / p).clamp(min=0.0) for name, (_, p) in precisions.items()}


class UnitImportance:
    """Sums of the importances of each unit's weights, for a pruner of Torch-Pruning.

    A unit is a neuron or a channel with its incoming weights and its bias. If layers must keep the
    same units, as around residual connections, the sums contain all of these layers. The outgoing
    weights do not count, because they have no effect without the unit.

    Args:
        model: Model to prune.
        scores: Result of ``importances`` for this model.

    Examples:
        >>> import torch
        >>> from evigrad.pruning import UnitImportance
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        >>> scores = {name: torch.rand(w.shape) for name, w in model.named_parameters()}
        >>> importance = UnitImportance(model, scores)  # BasePruner(model, x, importance, ...)

    See also: docs/posterior.md.
    """

    def __init__(self, model: nn.Module, scores: Mapping[str, Tensor]) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._scores = dict(scores)

    def __call__(self, group: Any) -> Float[Tensor, " units"] | None:
        """Return the importance of each unit of a group, or None if the group has no scores.

        Args:
            group: Group of layers that Torch-Pruning prunes together.

        Raises:
            ConfigurationError: If a layer does not have the shape of its scores.
        """
        total: Tensor | None = None
        for item in group:
            dependency, units = item
            layer, roots = dependency.target.module, item.root_idxs
            removes_outputs = dependency.handler.__name__ == "prune_out_channels"
            if not removes_outputs or layer not in self._names or None in roots:
                continue
            for leaf, weight in layer.named_parameters(recurse=False):
                name = f"{self._names[layer]}.{leaf}".removeprefix(".")
                if (score := self._scores.get(name)) is None:
                    continue
                if score.shape != weight.shape:
                    raise ConfigurationError(
                        f"The scores of '{name}' must have the weight's shape"
                        f" {tuple(weight.shape)}, got {tuple(score.shape)}. After pruning, train"
                        " again and call importances again."
                    )
                if getattr(layer, "transposed", False) and score.ndim > 1:
                    score = score.transpose(0, 1)
                by_unit = score.reshape(len(score), -1).sum(1)[units]
                total = score.new_zeros(len(group[0].idxs)) if total is None else total
                total.index_add_(0, torch.tensor(roots, device=score.device), by_unit)
        return total
