"""Reports of what an evidence does with each weight tensor."""

from dataclasses import dataclass

from torch import Tensor

from evigrad.engine.checks import check_inputs
from evigrad.engine.problem import Problem
from evigrad.errors import ConfigurationError


@dataclass(frozen=True)
class ParameterReport:
    """What one weight tensor gets from an estimator.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        rows: How its derivatives are computed: a closed form, or a generic path.
        curvature: Its block of the curvature.
        group: Its prior group.
        precision: Its prior precision (the mean, where it varies inside the tensor).
    """

    name: str
    shape: tuple[int, ...]
    rows: str
    curvature: str
    group: str
    precision: float


def parameter_reports(problem: Problem, x: Tensor | None) -> list[ParameterReport]:
    """Return a report for each weight tensor, in the model's order.

    ``x`` are some inputs, or None for the plan that was used last.

    Raises:
        ConfigurationError: If ``x`` is None and no input was seen yet.
    """
    if x is not None:
        check_inputs(x, problem.device)
        plan = problem.plans.of(x)
    else:
        plan = problem.plans.latest()
    if plan is None:
        raise ConfigurationError(
            "No inputs were seen yet: call describe(x) with a few inputs, as x[:3]."
        )
    rows, curvature = plan.jacobian.describe(), plan.structure.describe()
    precisions = problem.prior.precisions()
    return [
        ParameterReport(
            name=name,
            shape=tuple(w.shape),
            rows=rows[name],
            curvature=curvature[name],
            group=problem.prior.group_name(name),
            precision=float(precisions[name].detach().double().mean()),
        )
        for name, w in problem.weights.items()
    ]
