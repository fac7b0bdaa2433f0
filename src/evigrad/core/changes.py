"""Determine whether the parameters of a likelihood change the rows or only their scale."""

from typing import Any, Literal

import torch

from evigrad.core.algebra import is_one_number
from evigrad.core.curvature.base import Curvature
from evigrad.core.model import LinearizedModel
from evigrad.core.protocols import Density, Prior
from evigrad.core.roots import checked_rows
from evigrad.errors import NotPositiveDefiniteError, raised_in


def likelihood_changes(
    model: LinearizedModel[Density, Prior], curvature: Curvature[Any], num_outputs: int
) -> Literal["rows", "sums", "scales"]:
    """Return what the likelihood's learnable parameters change.

    The likelihood must have at least one such parameter. The possible results are:

    - ``rows``: The parameters change more than the scale of the rows.
    - ``sums``: The parameters scale rows by different factors, but the statistic is a sum over
      these rows.
    - ``scales``: The parameters only scale the rows, so a kept statistic can be rescaled.

    For ``rows`` and ``sums``, another pass over the data is needed.
    """
    estimator, likelihood = model.estimator, model.likelihood
    if estimator.curvature != "ggn":
        return "rows"
    # Two examples with different outputs reveal scales that depend on f.
    weight = next(iter(model.weights.values()))
    f = torch.arange(2 * num_outputs, device="cpu").sin().view(2, num_outputs)
    name = type(likelihood).__name__
    with torch.enable_grad(), raised_in(f"root of {name}"):
        try:
            f = f.to(weight.device, weight.dtype)
            root = checked_rows(likelihood.root(f, None, model.root), f, None, name)
        except NotPositiveDefiniteError:  # other outputs may work, and two passes always do
            return "rows"
        if root.vectors.requires_grad:
            return "rows"
        if root.scale is None or curvature.keeps_rows:
            return "scales"
        one_output = estimator.outputs == 1 and not estimator.iid and not estimator.rows
        added_up = root.scale.unbind(1) if one_output else [root.scale.flatten()]
        parameters = list(likelihood.parameters())
        return "scales" if all(is_one_number(r, parameters) for r in added_up) else "sums"
