"""What goes into a model and what comes out: trees of tensors, positions of outputs, and calls."""

from evigrad.inputs.calls import (
    Outputs,
    Transparent,
    arguments,
    called,
    called_at,
    inside,
    noted_calls,
    output_layer,
    scores_of,
)
from evigrad.inputs.trees import (
    AtPositions,
    Inputs,
    Tree,
    as_inputs,
    check_integers,
    each_once,
    layout,
    mapped,
    stacked,
    tensors_of,
    with_tensors,
)

__all__ = [
    "AtPositions",
    "Inputs",
    "Outputs",
    "Transparent",
    "Tree",
    "arguments",
    "as_inputs",
    "called",
    "called_at",
    "check_integers",
    "each_once",
    "inside",
    "layout",
    "mapped",
    "noted_calls",
    "output_layer",
    "scores_of",
    "stacked",
    "tensors_of",
    "with_tensors",
]
