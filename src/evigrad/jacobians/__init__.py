"""Rows of the Jacobian: by closed forms where they exist, else one datum at a time."""

from evigrad.jacobians.arguments import NO_DERIVATIVE, check_hooks, check_output, model_outputs
from evigrad.jacobians.differences import (
    CHECKED_EXAMPLES,
    check_rows,
    derivatives_named,
    refuse_once_differentiable,
)
from evigrad.jacobians.kronecker import KroneckerUse
from evigrad.jacobians.layers import matrix_uses
from evigrad.jacobians.linearization import Linearization
from evigrad.jacobians.modes import model_run
from evigrad.jacobians.paths import JacobianPlan, MatrixUse, demote
from evigrad.jacobians.plan import adapted, plan
from evigrad.jacobians.recorder import Recorder
from evigrad.jacobians.verification import check_separate, spot_check

__all__ = [
    "CHECKED_EXAMPLES",
    "NO_DERIVATIVE",
    "JacobianPlan",
    "KroneckerUse",
    "Linearization",
    "MatrixUse",
    "Recorder",
    "check_hooks",
    "check_output",
    "check_rows",
    "adapted",
    "check_separate",
    "demote",
    "derivatives_named",
    "matrix_uses",
    "model_outputs",
    "model_run",
    "plan",
    "refuse_once_differentiable",
    "spot_check",
]
