"""``evigrad doctor``: what an estimator does with a network, and what it costs."""

from dataclasses import dataclass

import torch
from jsonargparse import Namespace
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from evigrad.cli.messages import is_first_process, results_console, show
from evigrad.cli.parser import NO_ESTIMATOR, Options, Parser, chosen
from evigrad.cli.ranks import described_ranks, started_ranks
from evigrad.cli.setup import MACHINE, set_up
from evigrad.cli.train import SETTINGS, add_details, add_problem
from evigrad.errors import ConfigurationError
from evigrad.evidence import Evidence
from evigrad.likelihoods import make_likelihood
from evigrad.measure.judging import median_seconds, step_seconds
from evigrad.passes.problem import ParameterReport
from evigrad.priors import GaussianPrior
from evigrad.training.plan import LEARNED_PRECISION
from evigrad.training.settings import Schedule, grouped, refuse_former_name

_DESCRIPTION = """\
Show what each parameter of a network gets from an estimator, how much memory the estimator
needs, and how long an estimate and its gradient take beside a plain training step. Nothing is
trained and nothing is written.

example:
  evigrad doctor --data digits --model digitsnet --estimator kfac-100-1"""


@dataclass(frozen=True)
class Cost:
    """Median times in seconds, over as many repetitions as fit a short while.

    ``batch_step`` and ``block_step`` are a forward and backward pass of the training loss over a
    batch, and over a block of ``block_size`` data; ``estimate`` and ``backward`` an estimate
    without and with its gradient.
    """

    batch_step: float
    block_step: float
    estimate: float
    backward: float
    is_bound: bool
    block_size: int


def make_parser() -> Parser:
    """The options of ``evigrad doctor``."""
    parser = Parser(description=_DESCRIPTION, usage="evigrad doctor [options]")
    options = Options(parser)
    add_problem(options)
    add_details(options)
    options.add_group("training", Schedule, ("batch_size",))
    options.add_group("machine", set_up, MACHINE)
    return parser


def run(parser: Parser, options: Namespace) -> int:
    """Examine a network as the options say; return the exit code."""
    if options.estimator == NO_ESTIMATOR:
        raise ConfigurationError("The doctor examines an estimator: name one, as ntk-100-1.")
    refuse_former_name(options.estimator)
    if options.batch_size < 1:
        raise ConfigurationError(f"batch_size must be at least 1, not {options.batch_size}.")
    with started_ranks(options.device) as group:
        processes = described_ranks(group)
    if not is_first_process():
        return 0
    setup = set_up(**chosen(set_up, options))
    data = setup.data.train

    named = grouped({name: options[name] for name in SETTINGS if name in options})
    likelihood = make_likelihood(options.likelihood or setup.data.likelihood)
    evidence = Evidence(
        setup.make_model(),
        likelihood,
        GaussianPrior(
            options.prior, options.precision or LEARNED_PRECISION, mean=options.prior_mean
        ),
        estimator=options.estimator,
        num_data=len(data[0]),
        hyperparameters=setup.hyperparameters,
        generator=torch.Generator().manual_seed(setup.seed),
        memory=named["memory"],
        **vars(named["laplace"]),
    )
    batch_size = min(options.batch_size, len(data[0]))
    console = results_console()
    show("note", processes)
    show("note", f"{setup.data.describe()}; {setup.describe_model()} on {setup.device}")
    console.print(_parameter_table(evidence, evidence.describe(data[0])))
    memory = evidence.predicted_bytes(data[0])
    console.print(_cost_table(evidence, measure(evidence, data, batch_size), memory, batch_size))
    return 0


def measure(evidence: Evidence, data: tuple[Tensor, Tensor], batch_size: int) -> Cost:
    """Median times of a training step, an estimate and its gradient; the weights stay."""
    x, y = data
    (block,) = evidence.blocks(data).take(1)
    chosen = block.indices.to(x.device)

    def backward() -> None:
        evidence.backward(block)
        for parameter in evidence.hyperparameters().values():
            parameter.grad = None

    return Cost(
        batch_step=step_seconds(evidence, x[:batch_size], y[:batch_size]),
        block_step=step_seconds(evidence, x[chosen], y[chosen]),
        estimate=median_seconds(lambda: evidence.estimate(block), x.device),
        backward=median_seconds(backward, x.device),
        is_bound=evidence.estimate(block).is_bound,
        block_size=len(chosen),
    )


def _parameter_table(evidence: Evidence, reports: list[ParameterReport]) -> Table:
    total = sum(w.numel() for w in evidence.weights().values())
    grouped = any(report.group != report.name for report in reports)
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{evidence.spec.name}: {len(reports)} parameter tensors, {total:,} weights",
        caption=(
            "derivatives: how they are computed. curvature: the tensor's block of it."
            + (" prior group: tensors with one precision." if grouped else "")
        ),
        caption_justify="left",
    )
    for name in ("parameter", "shape", "derivatives", "curvature"):
        table.add_column(name, overflow="fold")
    if grouped:
        table.add_column("prior group", overflow="fold")
    table.add_column("precision", justify="right")
    for report in reports:
        shape = "x".join(map(str, report.shape)) or "scalar"
        group = [report.group] if grouped else []
        cells = (report.name, shape, report.rows, report.curvature, *group)
        table.add_row(*cells, f"{report.precision:g}")
    return table


def _cost_table(evidence: Evidence, cost: Cost, memory: int, batch_size: int) -> Table:
    name = evidence.spec.name
    bound = "is a lower bound" if cost.is_bound else "is not a guaranteed lower bound"
    table = Table(
        box=SIMPLE_HEAD,
        title=f"Cost of {name}",
        caption=(
            f"Predicted memory of an estimate: {_bytes(memory)}. The expected log evidence"
            f" {bound}.{_micro_batches(evidence)} Times are medians, of this machine as busy as it"
            " is."
        ),
        caption_justify="left",
    )
    table.add_column("what")
    table.add_column("time", justify="right")
    table.add_column("ratio", justify="right")
    rows = (
        (f"training step on a batch of {batch_size}", cost.batch_step),
        (f"training step on the {cost.block_size} data of a block", cost.block_step),
        ("one estimate on that block", cost.estimate),
        ("one estimate and its gradient on that block", cost.backward),
    )
    for label, seconds in rows:
        table.add_row(label, f"{1e3 * seconds:.3g} ms", f"{seconds / cost.block_step:.3g}")
    return table


def _micro_batches(evidence: Evidence) -> str:
    """The sizes that ``micro_batch="auto"`` chose; nothing without it."""
    chosen = evidence.state_dict()["micro_batches"]
    if not chosen:
        return ""
    parts = ", ".join(f"{size} in the {kind}" for kind, size in chosen.items())
    return f" Micro-batches hold at most: {parts}."


def _bytes(count: int) -> str:
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"
