"""Rows of the Jacobian: by closed forms where they exist, else one datum at a time."""

from evigrad.jacobians.arguments import NO_DERIVATIVE, check_hooks, check_output, model_outputs
from evigrad.jacobians.kronecker import KroneckerUse
from evigrad.jacobians.layers import matrix_uses
from evigrad.jacobians.linearization import Linearization
from evigrad.jacobians.modes import model_run
from evigrad.jacobians.paths import JacobianPlan, MatrixUse, demote
from evigrad.jacobians.plan import adapted, plan
from evigrad.jacobians.recorder import Recorder
from evigrad.jacobians.verification import check_separate, spot_check

__all__ = [
    "NO_DERIVATIVE",
    "JacobianPlan",
    "KroneckerUse",
    "Linearization",
    "MatrixUse",
    "Recorder",
    "check_hooks",
    "check_output",
    "adapted",
    "check_separate",
    "demote",
    "matrix_uses",
    "model_outputs",
    "model_run",
    "plan",
    "spot_check",
]
