"""``evigrad doctor``: how an estimator treats a network, and what it costs."""

import torch
from jsonargparse import Namespace
from torch import Tensor

from evigrad.cli.messages import is_first_process, print_table, show
from evigrad.cli.parser import NO_ESTIMATOR, Parser
from evigrad.cli.ranks import described_ranks, started_ranks
from evigrad.cli.setup import MACHINE, set_up, set_up_from
from evigrad.cli.train import add_problem, parts_of
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.likelihoods import make_likelihood
from evigrad.measure.judging import median_seconds, step_seconds
from evigrad.passes.problem import ParameterReport
from evigrad.priors import GaussianPrior
from evigrad.training.plan import LEARNED_PRECISION, plan_estimator, planned
from evigrad.training.settings import Schedule, Settings, refuse_former_name

_DESCRIPTION = "All options of evigrad doctor."


def make_parser() -> Parser:
    """Return the parser for the options of ``evigrad doctor``."""
    parser = Parser("evigrad doctor", _DESCRIPTION)
    add_problem(parser)
    parser.add_group("schedule", Schedule, ("batch_size",), part="schedule")
    parser.add_group("machine", set_up, MACHINE)
    return parser


def run(parser: Parser, options: Namespace) -> int:
    """Examine the network that the options specify, and return the exit code."""
    if options.estimator == NO_ESTIMATOR:
        raise ConfigurationError(
            "evigrad doctor needs an estimator, got none. Use a name such as ntk-100-1."
        )
    refuse_former_name(options.estimator)
    parts = parts_of(options)
    with started_ranks(options.device) as group:
        processes = described_ranks(group)
    if not is_first_process():
        return 0
    setup = set_up_from(options)
    data, model = setup.data.train, setup.make_model()
    likelihood = make_likelihood(options.likelihood or setup.data.likelihood)
    settings = Settings(
        estimator=options.estimator, prior=options.prior, anchoring=parts["anchoring"]
    )
    rows = likelihood.num_rows(setup.data.num_outputs)
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    evidence = Evidence(
        model,
        likelihood,
        GaussianPrior(
            options.prior, options.precision or LEARNED_PRECISION, mean=options.prior_mean
        ),
        estimator=planned(plan_estimator(settings, len(data[0]), rows, size)),
        num_data=len(data[0]),
        hyperparameters=setup.hyperparameters,
        generator=torch.Generator().manual_seed(setup.seed),
        memory=parts["memory"],
        anchoring=parts["anchoring"],
        **vars(options.laplace),
    )
    show("note", processes)
    show("note", f"{setup.data.describe()}; {setup.describe_model()} on {setup.device}")
    _print_parameters(evidence, evidence.describe(data[0]))
    _print_costs(evidence, data, min(parts["schedule"].batch_size, len(data[0])))
    return 0


def _print_parameters(evidence: Evidence, reports: list[ParameterReport]) -> None:
    total = sum(w.numel() for w in evidence.weights().values())
    are_grouped = any(report.group != report.name for report in reports)
    rows = [
        {
            "parameter": report.name,
            "shape": "x".join(map(str, report.shape)) or "scalar",
            "derivatives": report.rows,
            "curvature": report.curvature,
            **({"prior group": report.group} if are_grouped else {}),
            "precision": f"{report.precision:g}",
        }
        for report in reports
    ]
    print_table(
        f"{evidence.estimator.name}: {len(reports)} parameter tensors, {total:,} weights",
        "derivatives: how the Jacobian rows are computed. curvature: approximation of the tensor's"
        " curvature block. Tensors of a prior group share a precision.",
        rows,
        left=rows[0].keys() - {"precision"},
    )


def _print_costs(evidence: Evidence, data: tuple[Tensor, Tensor], batch_size: int) -> None:
    """Print median times of a training step, an estimate and its gradient; change nothing."""
    x, y = data
    (block,) = evidence.blocks(data).take(1)
    indices = block.indices.to(x.device)

    def backward() -> None:
        evidence.backward(block)
        for parameter in evidence.hyperparameters().values():
            parameter.grad = None

    step = step_seconds(evidence, x[indices], y[indices])
    seconds = {
        f"training step on a batch of {batch_size}": step_seconds(
            evidence, x[:batch_size], y[:batch_size]
        ),
        f"training step on the {len(indices)} examples of a block": step,
        "one estimate on that block": median_seconds(lambda: evidence.estimate(block), x.device),
        "one estimate and its gradient on that block": median_seconds(backward, x.device),
    }
    is_bound = evidence.estimate(block).is_bound
    micro_batches = ""
    if sizes := evidence.state_dict()["micro_batches"]:  # chosen by micro_batch="auto"
        parts = ", ".join(f"{size} in the {kind}" for kind, size in sizes.items())
        micro_batches = f" Micro-batches hold at most: {parts}."
    bound = "is a lower bound" if is_bound else "is not a guaranteed lower bound"
    rows = [
        {"what": what, "time": f"{1e3 * time:.3g} ms", "ratio": f"{time / step:.3g}"}
        for what, time in seconds.items()
    ]
    print_table(
        f"Cost of {evidence.estimator.name}",
        f"The expected log evidence {bound}.{micro_batches} Times are medians on this machine under"
        " its present load.",
        rows,
        left=("what",),
    )
