"""Checks of data before training, and warnings about likely mistakes."""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from evigrad.blocks.positions import by_target
from evigrad.errors import EvigradWarning, InputError
from evigrad.evidence import Evidence
from evigrad.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Joint,
    KnownNoise,
    Likelihood,
    Weighted,
    make_likelihood,
)
from evigrad.likelihoods.calls import check_targets, log_probabilities, moments, summed_metrics
from evigrad.likelihoods.noisy import Noisy
from evigrad.likelihoods.poisson import Counts
from evigrad.likelihoods.positions import counted, flattened
from evigrad.measure.metrics import probe_outputs
from evigrad.passes.checks import check_inputs
from evigrad.training.data import RunData

# Likelihoods of real numbers with normal noise.
_REAL = (Gaussian, KnownNoise, HeteroscedasticGaussian)
# All likelihoods of numbers that are checked.
_NUMBERS = (*_REAL, Noisy, Counts)
# Number of items of a data set that are checked at once.
_AT_ONCE = 1000
# Number of examples that measure the targets' scale, and the factor beyond which we warn.
_COMPARED = 100
_FAR = 10.0
# A column with at most this many different values is not a measurement, and at most this many
# columns are looked at.
_HANDFUL = 5
_COLUMNS = 20
# A value in more than this share of a column needs a model of its own, if there are enough rows.
_FREQUENT, _FEWEST = 0.2, 20
# It must be this many times as frequent as any other value. Ratings, for instance, have a few
# values that are all frequent.
_STANDS_OUT = 3
# The warning about this value, for callers that know the units of the targets.
FREQUENT_VALUE = r"Column \d+ of .* in \d+ % of the rows"
# Weights whose mean is this near to 1 change a learned noise by less than estimates do.
_MEAN_WEIGHT_TOLERANCE = 0.05


def learns_likelihood(likelihood: str | Likelihood) -> bool:
    """Return whether a likelihood has parameters to learn, such as a Gaussian's noise."""
    return any(p.requires_grad for p in make_likelihood(likelihood).parameters())


def check_data(evidence: Evidence, data: RunData, device: torch.device, count: int) -> Tensor:
    """Check the data before the first step, and return the model's outputs for a few examples."""
    probe, y = data.first(2)
    check_inputs(probe, device)
    f, likelihood = probe_outputs(evidence.model, probe), evidence.likelihood
    source = by_target(data, likelihood, f.shape[1:])  # checks targets at positions
    if source is not data:
        probe, y = source.first(2)
        f = probe_outputs(evidence.model, probe)
    # All targets at once if possible, so that errors contain their shape.
    targets = source.targets() if data.is_held else y
    check_targets(likelihood, (len(targets), *f.shape[1:]), targets, f.device)
    if data.is_held:
        _check_observed(likelihood, targets, f.shape[-1])
    log_probabilities(likelihood, f, y)
    if data.is_held and not likelihood.is_classification:
        for targets in source.targets().split(_AT_ONCE):  # with the outputs of the first example
            log_probabilities(likelihood, f[:1].expand(len(targets), -1), targets, compare=False)
    summed_metrics(likelihood, f, y)  # before training, as the first evaluation comes later
    for indices in torch.arange(min(count, len(data)), device="cpu").split(
        count if data.is_held else _AT_ONCE
    ):
        x, y = data.fetch(indices)
        check_inputs(x, device)
        if source is data:
            check_targets(likelihood, (len(x), f.shape[1]), y, f.device)
    return f


def _check_observed(likelihood: Likelihood, y: Tensor, num_outputs: int) -> None:
    """Raise an error if no target counts, of all outputs or of one head."""
    y = y[counted(likelihood, (), y).flatten()]
    weights = likelihood.weights(y) if len(y) else y.new_zeros(1, 1)
    if weights is None:
        return
    per_output = weights.view(len(weights), -1).sum(0).expand(num_outputs)
    sizes = likelihood.sizes if isinstance(likelihood, Joint) else {"": num_outputs}
    for name, total in zip(sizes, per_output.split(list(sizes.values())), strict=True):
        if not bool(total.any()):
            words = f" of {name!r}" if name else ""
            raise InputError(
                f"All targets{words} are missing or have weight 0, so there is nothing to learn"
                " from. Check how the targets were computed."
            )


def warn_of_data(evidence: Evidence, data: RunData, outputs: Tensor) -> None:
    """Warn about outputs and targets that probably do not fit the likelihood."""
    has_classes = isinstance(evidence.likelihood, Categorical) and outputs.shape[1] > 1
    sums = outputs.sum(1)
    if has_classes and bool((outputs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums)):
        warnings.warn(
            "The model's outputs are probabilities: each row is non-negative and sums to 1. The"
            " categorical likelihood needs logits and applies its own softmax. Remove the model's"
            " last softmax.",
            EvigradWarning,
            stacklevel=6,  # the caller of fit
        )
    if any(isinstance(part, _NUMBERS) for part in evidence.likelihood.modules()):
        _warn_of_real_targets(evidence, data)


class Part(NamedTuple):
    """The targets (n, D) of one likelihood, with its outputs and the weights of examples if any."""

    likelihood: Likelihood
    f: Tensor
    y: Tensor
    weights: Tensor | None = None
    words: str = "the targets"


def _warn_of_real_targets(evidence: Evidence, data: RunData) -> None:
    """Warn about targets that are not numbers of about unit scale."""
    x, y = data.spread(_COMPARED)
    f = probe_outputs(evidence.model, x)
    positions, num_outputs = f.shape[1:-1], f.shape[-1]
    f, y = flattened(evidence.likelihood, f, y)
    sample = list(_parts(evidence.likelihood, f, y)) if len(f) else []
    for part in sample:
        if isinstance(part.likelihood, Counts):
            _warn_of_rates(part.likelihood, part)
        elif isinstance(part.likelihood, _REAL):
            _warn_of_scale(part)
    sample = [part for part in sample if not isinstance(part.likelihood, Counts)]
    are_suspicious = [are_discrete(p.y) or bool(_frequent(p, is_sample=True)) for p in sample]
    parts = sample
    if data.is_held and (any(are_suspicious) or any(part.weights is not None for part in sample)):
        # A sample may lack rare values.
        y = data.targets()
        y = y.flatten(0, len(positions))[counted(evidence.likelihood, positions, y).flatten()]
        f = torch.zeros((), device="cpu").expand(len(y), num_outputs)  # not read
        parts = list(_parts(evidence.likelihood, f, y)) if len(y) else []  # all weights are zero
    by_words = {part.words: part for part in parts}
    for sampled_part, is_suspicious in zip(sample, are_suspicious, strict=True):
        if (part := by_words.get(sampled_part.words)) is None:
            continue
        if is_suspicious:
            _warn_of_discrete(sampled_part, part)
        has_noise = isinstance(part.likelihood, Gaussian) and learns_likelihood(part.likelihood)
        if part.weights is not None and has_noise:
            _warn_of_weights(part.weights.double())


def _parts(likelihood: Likelihood, f: Tensor, y: Tensor) -> Iterator[Part]:
    """Yield the targets of each likelihood of numbers, without missing heads and conditions."""
    if isinstance(likelihood, Joint):
        for head, head_outputs, targets, counts in likelihood.by_head(f, y):
            which = slice(None) if counts is None else counts
            for part in _parts(head.likelihood, head_outputs[which], targets[which]):
                yield part._replace(words=f"{part.words} of {head.name!r}")
    elif isinstance(likelihood, Weighted):
        targets, weights = likelihood.split(y)
        for part in _parts(likelihood.likelihood, f, targets):
            yield part._replace(weights=weights if len(weights) == len(part.y) else None)
    elif isinstance(likelihood, _NUMBERS) and len(y):
        yield Part(likelihood.at(y), f, likelihood.plain_targets(y))


def _warn_of_discrete(sample: Part, part: Part) -> None:
    """Warn about targets of a few values or one frequent value, in a sample and in all data."""
    words = _frequent(part)
    if not words and isinstance(part.likelihood, _REAL):
        if _columns_of_two_values(sample.y) and (columns := _columns_of_two_values(part.y)):
            words = (
                f"Column {columns[0]} of {part.words} has only two values. A Gaussian treats them"
                " as real numbers, so its noise falls toward zero, and the network memorizes them."
                ' For yes-or-no targets, use likelihood="bernoulli" with targets 0.0 and 1.0'
                ' (evigrad.likelihoods.Bernoulli). For classes, use likelihood="categorical" or'
                " evigrad.sklearn.EvidenceClassifier."
            )
        else:
            words = _discrete_column(part.y, part.words)
    if words:
        warnings.warn(words, EvigradWarning, stacklevel=8)  # the caller of fit


def _frequent(part: Part, is_sample: bool = False) -> str:
    """Return a warning about a frequent value if the noise is the same for all rows, or no text."""
    has_one_noise = isinstance(part.likelihood, Noisy)
    return frequent_value(part.y, part.words, is_sample) if has_one_noise else ""


def _warn_of_weights(weights: Tensor) -> None:
    """Warn about positive weights that may encode known noise levels, whose scale is arbitrary."""
    mean = float(weights.mean())
    if bool((weights != weights.round()).any()) and abs(mean - 1.0) > _MEAN_WEIGHT_TOLERANCE:
        warnings.warn(
            f"The positive weights average {mean:.3g} and are not whole numbers, but the Gaussian's"
            " noise is learned. Weighted interprets a weight as the number of times that an example"
            " was seen. If weights are 1/σ² for known noise σ instead, the learned noise is too"
            f" small by the factor √{mean:.3g} = {mean**0.5:.3g}. Divide the weights by"
            f" {mean:.3g}, so that they average 1. The noise of an example is then noise /"
            " √weight.",
            EvigradWarning,
            stacklevel=8,  # the caller of fit
        )


def are_discrete(y: Tensor) -> bool:
    """Return whether a column of targets (n, D) has a few values, or counts."""
    return bool(_columns_of_two_values(y)) or bool(_discrete_column(y, "the targets"))


def _columns_of_two_values(y: Tensor) -> list[int]:
    """Return the columns of targets (n, D) with two values, each of them at least twice."""
    missing = y.isnan()
    is_least = y == torch.where(missing, torch.inf, y).amin(0)
    is_largest = y == torch.where(missing, -torch.inf, y).amax(0)
    often = (is_least.sum(0) > 1) & (is_largest.sum(0) > 1) & ~(is_least & is_largest).any(0)
    return (often & (is_least | is_largest | missing).all(0)).nonzero().flatten().tolist()


def _discrete_column(y: Tensor, what: str) -> str:
    """Return a warning about the first column (n, D) of a few values or of counts, or no text."""
    for column in range(min(y.shape[1], _COLUMNS)):
        observed = y[:, column][~y[:, column].isnan()]
        values, times = observed.unique(return_counts=True)
        if 2 < len(values) <= _HANDFUL and int(times.min()) > 1:
            return (
                f"Column {column} of {what} has only {len(values)} different values. A"
                " Gaussian treats them as real numbers. If they are classes, use"
                ' likelihood="categorical". If they are ratings, check that the learned noise does'
                " not fall far below the distance between two values."
            )
        if len(values) <= _HANDFUL:
            continue
        is_count = float(values[0]) in (0.0, 1.0) and bool((values == values.round()).all())
        if is_count and int(times.max()) > 1:
            return (
                f"Column {column} of {what} contains whole numbers from"
                f" {float(values[0]):g} to {float(values[-1]):g}. If they are counts, use"
                ' likelihood="poisson" (evigrad.likelihoods.Poisson), whose outputs are log rates.'
            )
    return ""


def frequent_value(y: Tensor, what: str = "the targets", is_sample: bool = False) -> str:
    """Return a warning about the first column (n, D) with a frequent value, or no text.

    The value can be rarer in a sample than in all data, and most other values can be absent.
    """
    share, few = (0.5 * _FREQUENT, 1) if is_sample else (_FREQUENT, _HANDFUL)
    for column in range(min(y.shape[1], _COLUMNS)):
        observed = y[:, column][~y[:, column].isnan()]
        values, times = observed.unique(return_counts=True)
        if len(values) <= few or len(observed) < _FEWEST:  # _discrete_column has few values
            continue
        second, count = times.sort().values[-2:].tolist()
        position = int(times.argmax())
        if count > share * len(observed) and (is_sample or count > _STANDS_OUT * second):
            return (
                f"Column {column} of {what} has the value {float(values[position]):g} in"
                f" {100 * count / len(observed):.0f} % of the rows. Noise of the same size for"
                " all rows does not fit such targets, so error bars can be far too narrow or too"
                " wide. Model separately whether a target has this value (classification) and how"
                ' large the other targets are, or use likelihood="heteroscedastic". For counts, use'
                ' likelihood="poisson" or "negative-binomial".'
            )
    return ""


def _warn_of_scale(part: Part) -> None:
    """Warn about real targets far from unit scale, for which the defaults are not suitable."""
    likelihood, f, y = part.likelihood, part.f, part.y
    # One zero, as C² for each example may be gigabytes.
    certain = f.new_zeros(()).expand(*f.shape, f.shape[1])
    output_moments = moments(likelihood, f, certain)
    if output_moments is None:  # a subclass with another density
        return
    y = torch.where(y.isnan(), y.nanmean(0), y)
    error, noise = (y - output_moments[0]).square().mean(0).sqrt(), output_moments[2].mean(0).sqrt()
    spread = y.std(0, correction=0)
    far = (error > _FAR * noise.clamp(min=1)) | ((spread > 0) & (_FAR * spread < noise))
    if not bool(far.any()):
        return
    first = int(far.nonzero()[0])
    fix = f"set the noise: likelihood={type(likelihood).__name__}(noise=...)"
    if isinstance(likelihood, HeteroscedasticGaussian):
        fix = "start with outputs that fit the targets"
    warnings.warn(
        f"T{part.words[1:]} have a standard deviation of {float(spread[first]):.3g} and differ by"
        f" {float(error[first]):.3g} (root mean square) from the outputs before training. The noise"
        f" starts at {float(noise[first]):.3g}. Networks, learning rates and priors expect"
        " targets of about unit scale. Standardize the targets: set scaling ="
        " evigrad.data.Scaling.of(y) and train on (x, scaling(y)). Call scaling.undo(means) to"
        f" convert predictions back. (If this scale is intended, {fix}.)",
        EvigradWarning,
        stacklevel=8,  # the caller of fit
    )


def _warn_of_rates(likelihood: Counts, part: Part) -> None:
    """Warn about counts whose log rates are far from zero, which networks reach slowly."""
    observed = ~part.y.isnan()
    means = likelihood.log_means(part.f).exp().expand(part.y.shape)[observed].double()
    counts = part.y[observed].double()
    if not bool(counts.sum() > 0):
        return
    ratio = float(counts.sum() / means.sum())
    if 1 / _FAR <= ratio <= _FAR:
        return
    if likelihood.has_conditions:
        fix = f"Multiply the exposures by {ratio:.3g}"
    else:
        name = type(likelihood).__name__
        fix = (
            f"Use likelihood = {name}(exposure=True) and the targets likelihood.targets(y,"
            f" exposure={ratio:.3g})"
        )
    warnings.warn(
        f"Counts in {part.words} average {float(counts.mean()):.3g}, but the outputs before"
        f" training predict {float(means.mean()):.3g}. Networks, learning rates and priors expect"
        f" log rates near zero. {fix}. Rates are then in another unit.",
        EvigradWarning,
        stacklevel=8,  # the caller of fit
    )
