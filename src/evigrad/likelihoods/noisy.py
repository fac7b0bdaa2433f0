"""Base class for real-valued targets with noise of a learnable scale."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.core.roots import RootRows, check_root, scaled_units
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods.base import Likelihood, Metric, by_entry
from evigrad.likelihoods.missing import Independent


class Noisy(Independent):
    """Independent noise on each output, y = f + σ·ε, with one σ for all or one per output.

    ``log_noise`` = log σ has the shape () or (C,). Subclasses define the distribution of ε.
    """

    def __init__(
        self,
        noise: float | int | Sequence[float | int] | Tensor = 1.0,
        num_outputs: int | None = None,
        learnable: bool = True,
        missing: str | None = None,
    ) -> None:
        super().__init__(missing)
        try:
            device = noise.device if isinstance(noise, Tensor) else "cpu"
            value = torch.as_tensor(noise, dtype=torch.float64, device=device).detach()
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"noise must be one number or a sequence of numbers, got {noise!r}."
            ) from error
        if not value.numel() or not bool(((value > 0) & torch.isfinite(value)).all()):
            raise ConfigurationError(
                f"noise must be positive and finite, in units of the targets, got {noise!r}."
            )
        if num_outputs is not None and value.ndim == 0 and num_outputs > 0:
            value = value.expand(num_outputs)
        if value.ndim > 1 or (num_outputs is not None and value.shape != (num_outputs,)):
            raise ConfigurationError(
                "noise must be one number or one number per output, got the shape"
                f" {tuple(value.shape)} with num_outputs={num_outputs}."
            )
        log_noise = value.log().to(torch.get_default_dtype(), copy=True)
        if not isinstance(learnable, bool):
            raise ConfigurationError(f"learnable must be True or False, got {learnable!r}.")
        self.log_noise = nn.Parameter(log_noise, requires_grad=learnable)

    @property
    def noise(self) -> Tensor:
        """The current σ in units of y, of the shape () or (C,), without a graph."""
        return self.log_noise.detach().exp()

    def validate_observed(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that the targets are floating-point numbers."""
        if not y.is_floating_point():
            raise InputError(f"Targets must be floating point, got {y.dtype}. Use y.float().")
        if self.log_noise.ndim and len(self.log_noise) != f_shape[1]:
            raise InputError(
                f"The likelihood must have one noise per output, got {len(self.log_noise)} for"
                f" {f_shape[1]} outputs. Use a single noise for all outputs, or"
                f" {type(self).__name__}(num_outputs={f_shape[1]})."
            )

    def _units(self, f: Tensor, columns: Tensor | None, kind: str) -> RootRows:
        """Return a root of unit vectors, with the noise in its scale so that passes can be kept."""
        check_root(kind)
        root = self._diagonal_root(f)
        assert root is not None
        return scaled_units(f, root, columns)

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> Mapping[str, Metric]:
        """Return the sums ``log_likelihood`` (nats) and ``squared_error`` (units of y²)."""
        return {
            **super().metrics(f, y),
            "squared_error": self._squared(self.plain_targets(y).to(f) - f, self.plain_targets(y)),
        }

    def reported(self) -> dict[str, float]:
        """Return σ in units of y as ``noise``, or as ``noise/OUTPUT`` for each output."""
        return by_entry("noise", self.noise)


def noisy_parts(likelihood: Likelihood) -> list[Noisy]:
    """Return the parts of a likelihood with noise: itself, its heads, or what it weights."""
    return [part for part in likelihood.modules() if isinstance(part, Noisy)]
