"""The rows of the Jacobian: closed forms where they exist, any other module one datum at a time."""

from evigrad.jacobians.linearization import JacobianPlan, Linearization, demote, linearize
from evigrad.jacobians.plan import plan
from evigrad.jacobians.rules import KroneckerUse
from evigrad.jacobians.spot_checks import spot_check
from evigrad.jacobians.state import model_run

__all__ = [
    "JacobianPlan",
    "KroneckerUse",
    "Linearization",
    "demote",
    "linearize",
    "model_run",
    "plan",
    "spot_check",
]
