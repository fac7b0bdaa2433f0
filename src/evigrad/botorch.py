"""Use a network with its learned prior and noise as a model of BoTorch (extra ``botorch``).

Importing this module requires BoTorch: ``pip install 'evigrad[botorch]'``.
"""

import copy
import warnings
from collections.abc import Sequence
from math import prod
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, require
from evigrad.likelihoods import Gaussian, KnownNoise, Likelihood
from evigrad.posterior import Posterior
from evigrad.training import fit
from evigrad.training.settings import Optimization, Schedule

with warnings.catch_warnings():
    # linear_operator calls torch.jit.script, which PyTorch deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    _model, _transforms, _posteriors, _distributions, _operators = (
        cast(Any, require(name, "evigrad.botorch", "botorch"))
        for name in (
            "botorch.models.model",
            "botorch.models.transforms",
            "botorch.posteriors",
            "gpytorch.distributions",
            "linear_operator",
        )
    )

__all__ = ["EvidenceModel", "make_network"]

# A network for few data: hidden units of each of two layers, and full batches of this many epochs.
_WIDTH, _EPOCHS = 50, 300
# Relative addition to the variances of outputs.
_JITTER = 1e-9


class _Sphere(nn.Module):
    """Map inputs around zero to a sphere around zero with one more dimension.

    The prior variance of a network's outputs grows with the norm of its inputs. Without this map,
    the corners of the domain have by far the largest variance, and the search stays there.
    """

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b 1+d"]:
        d = x.shape[-1]
        # The mean of a coordinate's square on [-1/2, 1/2] is 1/12, so the typical norm is this one.
        last = torch.full_like(x[..., :1], (d / 12) ** 0.5)
        points = torch.cat([x, last], -1)
        return points * (0.5 * (d + 1) ** 0.5 / points.norm(dim=-1, keepdim=True))


def make_network(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Return the default network of ``EvidenceModel.fit``, for inputs in [-1/2, 1/2].

    Args:
        num_inputs: Number of inputs d.
        num_outputs: Number of outputs m.
    """
    sizes = [(num_inputs + 1, _WIDTH), (_WIDTH, _WIDTH)]
    hidden = [f for size in sizes for f in (nn.Linear(*size), nn.GELU())]
    return nn.Sequential(_Sphere(), *hidden, nn.Linear(_WIDTH, num_outputs))


class EvidenceModel(_model.Model, _model.FantasizeMixin):
    """A posterior as a model of BoTorch, for acquisition functions and ``optimize_acqf``.

    The outputs of the linearized network are a Gaussian process. Observations are added in closed
    form (``condition_on_observations``, ``fantasize``), and the network's weights do not change.
    Call ``EvidenceModel.fit`` to train the network again.

    Args:
        posterior: Posterior of a network with Gaussian noise.
        input_transform: Transform of inputs before they reach the network. Default: none.
        outcome_transform: Transform of targets, such as ``Standardize``, that the posterior's data
            passed through. Default: none.
        known_variance: Known variance of each output's noise (m,) for observations without noise of
            their own, after the outcome transform. Default: none.

    Examples:
        >>> import torch, evigrad
        >>> from evigrad.botorch import EvidenceModel
        >>> train_X = torch.rand(8, 2).double()
        >>> train_Y = train_X.sum(1, keepdim=True).sin()
        >>> schedule = evigrad.Schedule(epochs=20, batch_size=8)
        >>> model = EvidenceModel.fit(train_X, train_Y, schedule=schedule)
        >>> model.posterior(torch.rand(5, 3, 2).double()).mean.shape
        torch.Size([5, 3, 1])

    See also: docs/posterior.md.
    """

    def __init__(
        self,
        posterior: Posterior,
        *,
        input_transform: nn.Module | None = None,
        outcome_transform: nn.Module | None = None,
        known_variance: Tensor | None = None,
    ) -> None:
        super().__init__()
        if input_transform is not None:
            self.input_transform = input_transform.eval()
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform.eval()
        self.laplace, self.known_variance = posterior, known_variance
        self._outputs = list(range(posterior.num_outputs))

    @classmethod
    def fit(
        cls,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        *,
        network: nn.Module | None = None,
        structure: str = "ntk",
        input_transform: nn.Module | None = None,
        outcome_transform: nn.Module | None = None,
        seed: int = 0,
        **options: Any,
    ) -> "EvidenceModel":
        """Train a network, learn its prior and noise, and return the model.

        Args:
            train_X: Inputs (n, d).
            train_Y: Targets (n, m).
            train_Yvar: Known variances of the targets' noise (n, m). The model also learns the
                noise that they leave out. Default: none.
            network: Network that maps inputs (n, d) to outputs (n, m). It is trained in place from
                its present weights. Default: a new network with two hidden layers, whose inputs are
                projected onto a sphere.
            structure: Structure of the posterior. Default: ``ntk``, the exact one.
            input_transform: Transform of the inputs. Default: ``Normalize`` to [−½, ½].
            outcome_transform: Transform of the targets. Default: ``Standardize``.
            seed: Seed of the network and of its training.
            **options: Other arguments of ``evigrad.fit``, such as ``schedule``.

        Returns:
            The model.

        Raises:
            EvigradError: If the data or options are wrong, or training diverges.
        """
        d, m = train_X.shape[-1], train_Y.shape[-1]
        to_inputs = (
            _transforms.Normalize(d, center=0.0) if input_transform is None else input_transform
        )
        to_outcomes = _transforms.Standardize(m) if outcome_transform is None else outcome_transform
        x = to_inputs.train()(train_X)
        y, variance = to_outcomes.train()(train_Y, train_Yvar)
        likelihood: Likelihood = Gaussian(0.1, num_outputs=m)
        if variance is not None:
            likelihood = KnownNoise(0.1, num_outputs=m)
            y = likelihood.targets(y, noise=variance.sqrt())
        if network is None:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                network = make_network(d, m).to(train_X)
        settings: dict[str, Any] = {
            "schedule": Schedule(epochs=_EPOCHS, batch_size=max(2, len(train_X))),
            "optimization": Optimization(start_decay=0.01),
            "progress": False,
        }
        settings |= {"likelihood": likelihood.to(train_X), "seed": seed} | options
        evidence = fit(network, (x, y), **settings).evidence
        return cls(
            evidence.posterior((x, y), structure=structure),
            input_transform=to_inputs,
            outcome_transform=to_outcomes,
            known_variance=None if variance is None else variance.mean(0),
        )

    @property
    def likelihood(self) -> Likelihood:
        """Return the posterior's likelihood."""
        return self.laplace._likelihood

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs m."""
        return len(self._outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """Return the shape of the sets of observations that the model was conditioned on."""
        return self.laplace.batch_shape

    def _set_transformed_inputs(self) -> None:
        """Do nothing, because the model keeps no training inputs."""

    def _revert_to_original_inputs(self) -> None:
        """Do nothing, because the model keeps no training inputs."""

    def posterior(
        self,
        X: Tensor,
        output_indices: Sequence[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """Return the joint distribution of the outputs at X (b..., q, d).

        Args:
            X: Inputs. Each batch has its own distribution.
            output_indices: Outputs to predict. Default: all.
            observation_noise: Whether to add the noise of the targets, or variances of the noise
                after the outcome transform. With known noise, True adds its mean.
            posterior_transform: Transform of the result.

        Returns:
            A posterior of BoTorch.
        """
        self.eval()
        x = self.transform_inputs(X)
        joint = self.laplace.joint(x, batch_dims=x.ndim - 2)
        indices = range(self.num_outputs) if output_indices is None else output_indices
        chosen = [self._outputs[index] for index in indices]
        mean, covariance = joint.mean[..., chosen], joint.covariance[..., chosen, :, :][..., chosen]
        noise: Any = observation_noise
        if observation_noise is True:
            noise = cast(Tensor, joint.noise)
            noise = noise if self.known_variance is None else noise + self.known_variance
            noise = noise[..., chosen]
        size = prod(mean.shape[-2:])
        covariance = covariance.reshape(*covariance.shape[:-4], size, size)
        covariance = covariance.expand(*mean.shape[:-2], size, size)
        if isinstance(noise, Tensor):
            covariance = covariance + noise.expand_as(mean).flatten(-2).diag_embed()
        # Equal points, or more points than weights, have a singular covariance.
        jitter = _JITTER * covariance.detach().diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
        covariance = covariance + jitter.expand(*jitter.shape[:-1], size).diag_embed()
        operator = _operators.to_linear_operator(covariance)
        if len(chosen) == 1:
            distribution = _distributions.MultivariateNormal(mean.squeeze(-1), operator)
        else:
            distribution = _distributions.MultitaskMultivariateNormal(mean, operator)
        posterior = _posteriors.GPyTorchPosterior(distribution)
        if hasattr(self, "outcome_transform"):
            transform: Any = self.outcome_transform
            if chosen != list(range(self.laplace.num_outputs)):
                transform = transform.subset_output(chosen)
            posterior = transform.untransform_posterior(posterior, X=X)
        if posterior_transform is not None:
            posterior = posterior_transform(posterior=posterior, X=X)
        return posterior

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Tensor | None = None, **kwargs: Any
    ) -> "EvidenceModel":
        """Return the model after more observations, in closed form, without training.

        Args:
            X: Inputs (b..., q, d).
            Y: Targets (s..., b..., q, m), before the outcome transform.
            noise: Known variances of their noise, after the outcome transform, for a model with
                ``train_Yvar``. Default: the mean of the known variances.
            **kwargs: Options of GPyTorch models, which are ignored.

        Raises:
            ConfigurationError: If ``noise`` is passed to a model without known noise, or the model
                has only some of the outputs.
        """
        if self.num_outputs < self.laplace.num_outputs:
            raise ConfigurationError(
                f"Observations must have all {self.laplace.num_outputs} outputs, but this model has"
                f" only {self.num_outputs}. Call subset_output afterwards."
            )
        self.eval()
        x, y = self.transform_inputs(X), Y
        if hasattr(self, "outcome_transform"):
            y, _ = cast(Any, self.outcome_transform)(Y, X=X)
        if isinstance(self.likelihood, KnownNoise):
            variance = self.known_variance if noise is None else noise
            variance = y.new_zeros(()) if variance is None else variance
            y = self.likelihood.targets(y, noise=variance.sqrt().expand_as(y))
        elif noise is not None:
            raise ConfigurationError(
                "noise needs a model with known noise. Use EvidenceModel.fit(..., train_Yvar=...)."
            )
        result = copy.copy(self)
        result.laplace = self.laplace.update(x, y, batch_dims=x.ndim - 2)
        return result

    def subset_output(self, idcs: Sequence[int]) -> "EvidenceModel":
        """Return the model of some outputs."""
        result = copy.copy(self)
        result._outputs = [self._outputs[i] for i in idcs]
        return result
