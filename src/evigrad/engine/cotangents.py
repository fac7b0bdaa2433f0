"""The cotangents of a block's rows, and how they depend on the likelihood's hyperparameters."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from evigrad.engine.passes import Chunk
from evigrad.engine.problem import Problem
from evigrad.errors import NotPositiveDefiniteError, raised_in
from evigrad.likelihoods import Likelihood, RootRows


def root_rows(problem: Problem, f: Tensor, chunk: Chunk) -> RootRows:
    """Return the cotangents of the rows for outputs ``f`` of a micro-batch, temperature included.

    They have a graph into f and the likelihood's parameters where these have one.
    """
    likelihood, settings = problem.likelihood, problem.settings
    name = type(likelihood).__name__
    with raised_in(f"log_prob of {name}, or what is derived at its reference_targets,"):
        if settings.spec.curvature == "ef":
            root = RootRows(likelihood.score(f, chunk.y)[:, None, :], None)
        elif settings.spec.curvature == "mc":
            root = _sampled(likelihood, f, chunk.labels)
        else:
            columns = None if chunk.columns is None else chunk.columns.to(f.device)
            root = likelihood.root(f, columns, settings.root)
            if columns is not None and (columns < 0).any():
                root = replace(root, present=columns >= 0)
        weights = likelihood.weights(chunk.y)
    # Parameters of a likelihood may be of a wider type than the outputs.
    root = replace(root, vectors=root.vectors.to(f))
    if weights is not None:
        root = replace(root, vectors=root.vectors * weights.to(f).sqrt()[:, None, None])
    if settings.temperature == 1.0:
        return root
    scale = torch.ones_like(root.vectors[:, :, 0]) if root.scale is None else root.scale
    return replace(root, scale=scale * settings.temperature**-0.5)


def _sampled(likelihood: Likelihood, f: Tensor, labels: Sequence[Tensor]) -> RootRows:
    """Scores of sampled labels, whose outer products average to Λ."""
    scores = torch.stack([likelihood.score(f, label) for label in labels], dim=1)
    log_prob = torch.stack([likelihood.log_prob(f, label) for label in labels], dim=1)
    # The ratio is 1; its derivative is that of the labels' distribution in f and the noise, so
    # that the gradient of H is unbiased although the sampled labels are held fixed.
    ratio = (0.5 * (log_prob - log_prob.detach())).exp()
    return RootRows(scores * len(labels) ** -0.5, ratio)


def rehearse(problem: Problem, f: Tensor, y: Tensor) -> None:
    """Ask the likelihood, at some outputs, for all that a pass needs; it may raise EvigradError."""
    generator = torch.Generator().manual_seed(0)
    sampled = problem.settings.spec.curvature == "mc"
    labels = [problem.likelihood.sample(f, generator)] if sampled else []
    columns = torch.zeros(len(f), 1, dtype=torch.int64, device="cpu")
    weights = torch.ones(len(f), device="cpu")
    with torch.no_grad(), suppress(NotPositiveDefiniteError):  # other outputs may do better
        root_rows(problem, f, Chunk(f, y, slice(0, len(f)), columns, weights, labels))


def needs_two_passes(problem: Problem, learnable: Iterable[str], num_outputs: int) -> bool:
    """Whether what is learned changes the rows by more than a scale that a statistic follows."""
    names = list(learnable)
    if any(name.startswith("model.") for name in names):
        return True
    if all(name.startswith("prior.") for name in names):
        return False
    return likelihood_changes(problem, num_outputs) != "scales"


def likelihood_changes(problem: Problem, num_outputs: int) -> Literal["rows", "sums", "scales"]:
    """Return what the likelihood's learnable parameters change, of which there must be some.

    ``rows``: the vectors depend on them, and the data must be passed again. ``sums``: scales of
    rows change by different factors, and the structure has added these rows up. ``scales``: a
    kept statistic can be rescaled.
    """
    spec, likelihood = problem.settings.spec, problem.likelihood
    if spec.curvature != "ggn":
        return "rows"
    # Two data of different outputs: scales that depend on f differ between them.
    f = torch.arange(2 * num_outputs, device="cpu").sin().view(2, num_outputs)
    with torch.enable_grad(), raised_in(f"root of {type(likelihood).__name__}"):
        try:
            root = likelihood.root(f.to(problem.device, problem.dtype), None, problem.settings.root)
        except NotPositiveDefiniteError:  # other outputs may do better, and two passes always do
            return "rows"
        if root.vectors.requires_grad:
            return "rows"
        if root.scale is None or spec.facts.keeps_rows:
            return "scales"
        one_output = spec.outputs == 1 and not spec.iid and not spec.rows
        added_up = root.scale.unbind(1) if one_output else [root.scale.flatten()]
        parameters = list(likelihood.parameters())
        return "scales" if all(is_one_number(r, parameters) for r in added_up) else "sums"


def is_one_number(scale: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether all entries are equal, and stay so whatever the parameters become."""
    if not bool((scale == scale[0]).all()):
        return False
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    if not scale.requires_grad or not learned:
        return True
    # Different parameters that happen to be equal have different derivatives.
    weights = torch.arange(1, len(scale) + 1, device=scale.device, dtype=scale.dtype)
    whole, alone = (
        torch.autograd.grad(value, learned, retain_graph=True, allow_unused=True)
        for value in ((weights * scale).sum(), weights.sum() * scale[0])
    )
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.allclose(a, b, rtol=1e-3))
        for a, b in zip(whole, alone, strict=True)
    )
