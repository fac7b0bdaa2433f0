"""Average a model's outputs over random transforms of the input (Immer et al. 2023, Eq. 14)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from evigrad.errors import ConfigurationError, InputError, nearest
from evigrad.inputs import scores_of
from evigrad.invariances.noise import Stochastic, sampled
from evigrad.invariances.transform import Transform

AVERAGES = ("logits", "probabilities")


class Averaged(nn.Module):
    """Average a model's outputs over S random transforms of each input, (1/S) Σ_s model(g(x, ε_s)).

    All S·n transformed inputs pass through the model in one batch, sorted by example. Noise comes
    from PyTorch's default generator, as in dropout, but is also drawn in evaluation mode.
    ``Evidence`` uses its own generator. An example's noise does not depend on the micro-batch size.

    Args:
        model: Model that maps inputs (m, ...) to outputs (m, C). It must not contain a module that
            draws noise (`evigrad.invariances.noise.Stochastic`).
        invariance: A `Transform`, or any module with the methods ``sample`` and ``apply``.
        num_samples: Number S of transforms per input. You can change it at any time.
        average: ``"logits"`` averages the outputs. ``"probabilities"`` returns the logarithms of
            the mean class probabilities, log (1/S) Σ_s softmax(f_s), for a categorical likelihood.
        chunk: Number of samples per example in one pass of the model, to save memory in training.
            Chunks cost one more forward pass, because activations are recomputed for the gradient.
            Evidence passes ignore it. Default: None, which means all samples.

    Raises:
        ConfigurationError: If an option does not exist, a number is below 1, the model draws noise,
            or ``bounds`` of the transform are invalid or do not match its parameters.

    Examples:
        >>> import torch
        >>> from evigrad.invariances import AffineInvariance, Averaged
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> model = Averaged(network, AffineInvariance({"rotation": 0.5}), num_samples=4)
        >>> model(torch.rand(3, 1, 8, 8)).shape
        torch.Size([3, 10])

    See also: docs/inputs.md.
    """

    invariance: Any  # whatever has the methods

    def __init__(
        self,
        model: nn.Module,
        invariance: nn.Module,
        num_samples: int,
        average: str = "logits",
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        if average not in AVERAGES:
            raise ConfigurationError(
                f"average must be one of {', '.join(AVERAGES)}, got '{average}'."
                f"{nearest(average, AVERAGES)}"
            )
        if num_samples < 1 or (chunk is not None and chunk < 1):
            raise ConfigurationError(
                f"num_samples and chunk must be at least 1, got {num_samples} and {chunk}."
            )
        if isinstance(invariance, Transform):
            invariance.check_bounds()
        elif not callable(getattr(invariance, "sample", None)):
            raise ConfigurationError(
                f"invariance must have a method sample(n, generator), got"
                f" {type(invariance).__name__}. Use a Transform."
            )
        inner = [module for module in model.modules() if isinstance(module, Stochastic)]
        if inner:
            raise ConfigurationError(
                "The averaged model must not draw noise, but its module"
                f" {type(inner[0]).__name__} does. Put all random operations into one transform."
            )
        self.model, self.invariance = model, invariance
        self.num_samples, self.average, self.chunk = num_samples, average, chunk
        self._held: Tensor | None = None

    def draw(self, num_data: int, generator: torch.Generator) -> Tensor:
        """Draw the noise (n, S, ...) for S transforms of each example, on the CPU."""
        drawn = self.invariance.sample(num_data * self.num_samples, generator)
        return drawn.unflatten(0, (num_data, self.num_samples))

    @contextmanager
    def held(self, noise: Tensor) -> Iterator[None]:
        """Use noise (n, S, ...) from ``draw`` in every forward pass inside the context."""
        before, self._held = self._held, noise
        try:
            yield
        finally:
            self._held = before

    def forward(self, x: Tensor) -> Tensor:
        """Return the averaged outputs (n, C) of inputs (n, ...)."""
        if self._held is None:
            return self._average(x, self.draw(len(x), torch.default_generator), self.chunk)
        if len(self._held) != len(x):
            raise InputError(
                f"The noise must be for {len(x)} inputs, got noise for {len(self._held)}. Use"
                f" draw({len(x)}, generator)."
            )
        return self._average(x, self._held, None)

    def _average(self, x: Tensor, noise: Tensor, chunk: int | None) -> Tensor:
        num_samples = noise.shape[1]
        # The copy to a GPU overlaps with work that still runs there.
        noise = noise.to(x.device, non_blocking=True)
        if chunk is None or chunk >= num_samples:
            total = self._total(x, noise)
        else:
            total_of = self._total
            if torch.is_grad_enabled():
                total_of = partial(checkpoint, self._total, use_reentrant=False)
            parts = [total_of(x, part) for part in noise.split(chunk, dim=1)]
            total = self._sum(torch.stack(parts, dim=1))
        if self.average == "probabilities":
            return total - math.log(num_samples)
        return total / num_samples

    def _total(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return the sum of the outputs over some samples, or with probabilities, its logarithm."""
        num_data, num_samples = noise.shape[:2]
        repeated = x.repeat_interleave(num_samples, dim=0)
        # Applied here and not before all passes, because another thread may repeat a pass.
        transformed = self.invariance.apply(repeated, noise.flatten(0, 1))
        with sampled(num_samples):
            outputs = scores_of(self.model(transformed))
        outputs = outputs.unflatten(0, (num_data, num_samples))
        if self.average == "probabilities":
            outputs = outputs.log_softmax(-1)
        return self._sum(outputs)

    def _sum(self, values: Tensor) -> Tensor:
        """Return the sum over dimension 1, or with probabilities, the logsumexp."""
        return values.logsumexp(1) if self.average == "probabilities" else values.sum(1)

    def extra_repr(self) -> str:
        chunk = "" if self.chunk is None else f", chunk={self.chunk}"
        return f"num_samples={self.num_samples}, average={self.average!r}{chunk}"
