"""Metrics of a model on a data set, and the values of the model's hyperparameters."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.blocks.sources import as_source
from evigrad.distributed import Ranks
from evigrad.errors import InputError
from evigrad.evidence import Evidence
from evigrad.inputs import Inputs
from evigrad.invariances.transform import bounded_values, range_values, ranged_modules
from evigrad.likelihoods import Likelihood
from evigrad.likelihoods.calls import log_probabilities, summed_metrics
from evigrad.likelihoods.positions import NO_TARGET, counted, flattened
from evigrad.network.arguments import model_outputs
from evigrad.network.modes import evaluation_mode, model_run
from evigrad.passes.memory import in_parts

# Names of hyperparameters' columns start with one of these, before a slash.
HYPERPARAMETERS = ("precision", "noise", "likelihood", "range", "model")
# Number of examples per forward pass.
_BATCH = 1000


def evaluate(
    model: nn.Module,
    likelihood: Likelihood,
    data: Any,
    *,
    batch_size: int = _BATCH,
    generator: torch.Generator | None = None,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """Return metrics of a model on a data set, in evaluation mode and at temperature 1.

    Args:
        model: Model from inputs (m, ...) to outputs (m, C) or (m, …, C). Afterwards, it is in the
            same mode (training or evaluation) as before.
        likelihood: Likelihood of the targets given the outputs.
        data: A pair (x, y) of tensors or a map-style data set, on the model's device.
        batch_size: Number of examples per forward pass. It is halved when memory runs out.
            Default: 1,000.
        generator: Generator for random draws in the model. Default: a generator with seed 0.
        ranks: Processes, each of which evaluates a part of the data. Default: one process.

    Returns:
        Means over the examples, or over their positions with a target. They are
        ``log_likelihood`` (nats) and, depending on the likelihood, ``accuracy`` (a fraction) or
        ``squared_error`` (summed over the outputs). A mean over missing targets only is NaN.

    Raises:
        InputError: If there are no data, or the data are invalid for the likelihood.
        MemoryBudgetError: If there is not enough memory for one example.
    """
    source, ranks = as_source(data), ranks or Ranks()
    totals: dict[str, tuple[float, float]] = {}  # sums and counts
    count = 0
    generator = generator or torch.Generator().manual_seed(0)

    def add(indices: Tensor) -> None:
        nonlocal count
        inputs, targets = source.fetch(indices)
        f = model_outputs(model, inputs, positions=True)
        f, targets = flattened(likelihood, f, targets)
        if not len(f):
            return
        sums = summed_metrics(likelihood, f, targets)
        count += len(f)
        for name, (value, number) in sums.items():
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + value, before[1] + number)

    with ranks.together(), evaluation_mode(model, generator), torch.no_grad():
        in_parts(ranks.part(len(source)), batch_size, add)
    names = _names_of_any_rank(list(totals), ranks)
    pairs = [(float(count), 0.0), *(totals.get(name, (0.0, 0.0)) for name in names)]
    sums = torch.tensor(pairs, dtype=torch.float64, device="cpu")
    (count, _), *pairs = ranks.sum([sums])[0].tolist()
    if not count:
        raise InputError(NO_TARGET)
    means = {
        name: value / number if number else math.nan
        for name, (value, number) in zip(names, pairs, strict=True)
    }
    if "correct" in means:
        means["accuracy"] = means.pop("correct")
    return means


def log_probabilities_of(
    model: nn.Module,
    likelihood: Likelihood,
    data: Any,
    densities: Callable[[Inputs, Tensor], Tensor] | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return each example's log p(y|f), summed over its targets, in nats, and the numbers of these.

    The model runs in evaluation mode, and ``data`` are on its device. An example without positions
    has one target. If ``densities`` is set, it returns the log density of each target instead,
    which is NaN at positions without a target.
    """
    source = as_source(data)
    sums, counts = list[Tensor](), list[Tensor]()

    def add(indices: Tensor) -> None:
        x, y = source.fetch(indices)
        if densities is not None:
            values = densities(x, y).double().reshape(len(indices), -1)
            sums.append(values.nansum(1).cpu())
            counts.append((~values.isnan()).sum(1).double().cpu())
            return
        f = model_outputs(model, x, positions=True)
        repeats = torch.ones(len(indices), dtype=torch.int64, device=f.device)
        if f.dim() > 2:
            repeats = counted(likelihood, f.shape[1:-1], y).sum(1)
        log_prob = log_probabilities(likelihood, *flattened(likelihood, f, y)).double()
        example = torch.arange(len(indices), device=f.device).repeat_interleave(repeats)
        zeros = log_prob.new_zeros(len(indices))
        sums.append(zeros.index_add(0, example, log_prob).cpu())
        counts.append(repeats.double().cpu())

    generator = torch.Generator().manual_seed(0)
    with evaluation_mode(model, generator), torch.no_grad():
        in_parts(slice(0, len(source)), _BATCH, add)
    return torch.cat(sums), torch.cat(counts)


def _names_of_any_rank(names: list[str], ranks: Ranks) -> list[str]:
    """Return the names of the first rank that has some. Other ranks' data may have no target."""
    encoded = torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8, device="cpu")
    texts = [bytes(text.tolist()).decode() for text in ranks.gather(encoded)]
    return next((text.split("\n") for text in texts if text), [])


def probe_outputs(model: nn.Module, x: Inputs) -> Tensor:
    """Return outputs (m, …, C) in evaluation mode, without a graph, with a fixed random seed."""
    generator = torch.Generator().manual_seed(0)
    with evaluation_mode(model, generator), model_run(model), torch.no_grad():
        return model_outputs(model, x, positions=True)


def hyperparameter_values(evidence: Evidence) -> dict[str, float]:
    """Return the current hyperparameters of the model, prior and likelihood by name.

    Returns:
        A number for each of these names. ``precision/GROUP`` is the precision of a group of the
        prior, or the geometric mean over a parameter tensor for a diagonal prior. ``noise`` or
        ``noise/OUTPUT`` is the standard deviation of a Gaussian. ``likelihood/NAME`` is another
        parameter of the likelihood. ``range/NAME`` is the range of a transform, learned or fixed.
        ``model/NAME`` is another hyperparameter of the model: its value, or its Euclidean norm if
        it has several entries.
    """
    row = dict[str, float]()
    for name, precision in evidence.prior.precisions().items():
        # All tensors of a group have one value; in a diagonal prior each is its own group.
        group = evidence.prior.group_name(name)
        row.setdefault(f"precision/{group}", float(precision.detach().double().log().mean().exp()))
    for name, value in evidence.likelihood.reported().items():
        row[name if name.partition("/")[0] == "noise" else f"likelihood/{name}"] = float(value)
    row |= {f"range/{name}": value for name, value in range_values(evidence.model).items()}
    transforms = ranged_modules(evidence.model).values()
    in_ranges = {id(p) for module in transforms for p in module.parameters()}
    bounded = bounded_values(evidence.model)
    for name, value in evidence.hyperparameters().items():
        kind, _, name_in_model = name.partition(".")
        if kind == "model" and id(value) not in in_ranges:
            value = bounded.get(id(value), value).detach()
            norm = value if value.numel() == 1 else torch.linalg.vector_norm(value)
            row[f"model/{name_in_model}"] = float(norm)
    return row
