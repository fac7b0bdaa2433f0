"""Compute Jacobian rows in closed form if possible, and otherwise by automatic differentiation."""

from evigrad.core.curvature.kronecker import KroneckerUse
from evigrad.fast.contraction import MatrixUse
from evigrad.network.arguments import (
    NO_DERIVATIVE,
    check_hooks,
    check_output,
    derivatives_named,
    model_outputs,
)
from evigrad.network.layers import matrix_uses
from evigrad.network.linearization import Linearization
from evigrad.network.modes import model_run
from evigrad.network.paths import JacobianPlan, demote
from evigrad.network.plan import adapted, plan
from evigrad.network.recorder import Recorder
from evigrad.network.verification import check_separate, refuse_once_differentiable, spot_check

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
    "derivatives_named",
    "matrix_uses",
    "model_outputs",
    "model_run",
    "plan",
    "refuse_once_differentiable",
    "spot_check",
]
