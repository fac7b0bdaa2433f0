"""Gaussian priors over the weights, with learnable precisions and groups of weights.

The prior is p(w|h) = N(w; w₀, P0⁻¹). The diagonal P0 has one precision for all weights, for each
parameter tensor, for each group of tensors, or for each single weight. A group can also have a
precision for each position along an axis (units, inputs or ranks). Precisions are learned as
logarithms, so they stay positive and a step changes them by a factor. The mean w₀ is fixed: zero,
the initial weights (for fine-tuning), or tensors that you pass.
"""

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, listed, nearest

__all__ = ["MEANS", "STRUCTURES", "GaussianPrior", "NormalHyperprior"]

STRUCTURES = ("scalar", "layerwise", "diagonal")
SHAPES = ("equal", "g-prior")
MEANS = ("zero", "initial")
SCALAR_GROUP = "all"
# Least curvature in a g-prior, relative to the mean of the tensor and to the mean of all tensors. A
# weight without curvature, as in a dead unit, would have no prior.
_LEAST_OF_TENSOR, _LEAST_OF_ALL = 1e-3, 1e-6
# The pattern of all weights that no other pattern matches.
REMAINING = "*"
# What to do instead of a covariance matrix in the prior.
_WHITEN = (
    "A prior has one mean and one precision per weight or group. To use a posterior or a matrix as"
    ' the prior, reparametrize the model: see "Use a posterior as the prior" in'
    " docs/fine_tuning.md."
)
# What to do instead of the precision zero.
_NO_DECAY = (
    "For weights without weight decay, use a small precision that is not learned:"
    " GaussianPrior({'free': '*bias', 'decayed': '*'}, precision={'free': 1e-3, 'decayed': 1.0},"
    " learnable={'free': False})."
)

# What to do instead of values by weight in the place of groups.
_VALUES = " Pass numbers in precision={...} and tensors in mean={...}."
# What to do instead of an infinite precision.
_FIXED = "To keep weights at their values, call requires_grad_(False) on them."


@dataclass(frozen=True)
class NormalHyperprior:
    """Independent normal densities for the log precisions.

    Attributes:
        mean: Mean of each log precision. Default: 0.
        std: Standard deviation of each log precision. Default: 1.

    Raises:
        ConfigurationError: If ``mean`` or ``std`` is not finite, or ``std`` is not positive.

    Examples:
        >>> import torch
        >>> from evigrad.priors import NormalHyperprior
        >>> NormalHyperprior(mean=0.0, std=2.0)(torch.zeros(1))
        tensor(-1.6121)

    See also: docs/fit.md.
    """

    mean: float | int = 0.0
    std: float | int = 1.0

    def __post_init__(self) -> None:
        _positive(self.std, "std of the hyperprior")
        if not math.isfinite(self.mean):
            raise ConfigurationError(f"The hyperprior's mean must be finite, got {self.mean}.")

    def __call__(self, log_precision: Float[Tensor, " G"]) -> Float[Tensor, ""]:
        """Return the normalized log density of all log precisions together, in nats."""
        standardized = (log_precision - self.mean) / self.std
        constant = math.log(self.std) + 0.5 * math.log(2.0 * math.pi)
        return -(0.5 * standardized.square() + constant).sum()


class GaussianPrior(nn.Module):
    """A Gaussian prior N(w₀, P0⁻¹) over the weights with mean w₀ and diagonal precision P0.

    A prior has no parameters until ``Evidence`` calls ``bind`` with the weights. Before that,
    methods that need the parameters raise a ConfigurationError.

    For fine-tuning, use ``mean="initial"``, which pulls the weights toward their initial values. A
    larger learned precision keeps weights closer to the pretrained weights. With
    ``mean={"backbone": "initial"}``, the prior pulls the backbone toward its initial weights, and
    all other weights toward zero.

    Args:
        structure: ``"scalar"`` (one precision), ``"layerwise"`` (one per parameter tensor, the
            default), ``"diagonal"`` (one per weight), or groups: a dict from a group's name to
            patterns of parameter names. A pattern is the name of a parameter or module
            (``"encoder"`` matches ``encoder.weight`` but not ``encoder2.weight``), or it has
            wildcards ``*``, ``?`` and ``[…]``. Each weight must be in exactly one group. The
            pattern ``"*"`` stands for all weights that no other pattern matches. A group that is a
            dict from patterns to axes has one precision for each position along these axes, which
            must have equal sizes. For example, ``{"0.weight": 1}`` has one precision per input of a
            linear layer, and ``{"0.weight": 0, "0.bias": 0}`` has one per unit.
        precision: Initial precision: one number, or a dict with a number for each group. (The only
            group of ``"scalar"`` is ``"all"``, and the groups of ``"layerwise"`` have the
            parameters' names.) Default: 1.
        learnable: Whether the precisions are learned: one bool, or a dict from names of some groups
            to bools. Groups that are not in the dict are learned. Default: True.
        hyperprior: Function from the log precisions (G,) to their joint log density (a scalar, in
            nats), such as ``NormalHyperprior()``. Default: None, which is a flat density.
        mean: Mean w₀: ``"zero"``, ``"initial"`` (the weights at the first ``bind``), or a dict from
            groups, names or patterns to ``"zero"``, ``"initial"`` or a tensor of the weight's
            shape. The key ``"*"`` stands for all weights that no other key names. Without it, these
            weights have mean zero. The ``state_dict`` contains the mean, and loading a state
            replaces it.
        shape: ``"equal"`` (default): all weights of a group have its precision. ``"g-prior"``: a
            weight has the precision of its group times its curvature per example (the diagonal of
            the Gauss-Newton matrix, divided by N). The precision of a group is then the number of
            examples that its prior counts for. ``fit`` and ``Learner`` update the curvature before
            each round, and in other loops, ``Evidence.shape_prior`` does. Before the first update,
            all weights of a group have its precision. (Sources: A. Zellner, 1986, *On Assessing
            Prior Distributions and Bayesian Regression Analysis with g-Prior Distributions*; J.
            Antorán et al., 2023, *Sampling-based Inference for Large Linear Models*, ICLR.)

    Attributes:
        log_precision: Log precisions of the learned groups, (G,), or of all groups if none is
            learned. A group along an axis has several entries, one after the other. None before
            ``bind``.
        group_names: Names of the groups. In a diagonal prior, each weight tensor is a group along
            all of its axes.
        group_of: Index into ``group_names`` for each weight tensor.
        shape: The argument ``shape``.

    Raises:
        ConfigurationError: If the structure, the mean or the shape is unknown, a precision is not
            positive, or ``learnable`` is neither a bool nor a mapping from names of groups to
            bools. Also if the shape of a diagonal prior is not ``"equal"``.

    Examples:
        >>> import torch
        >>> from evigrad.priors import GaussianPrior
        >>> prior = GaussianPrior("layerwise", precision=2.0)
        >>> prior.bind(dict(torch.nn.Linear(3, 2).named_parameters()))
        >>> prior.group_names
        ['weight', 'bias']
        >>> GaussianPrior({"body": ["0"], "head": ["1"]}, precision={"body": 1.0, "head": 10.0})
        GaussianPrior(structure='groups', groups=[], learnable=True)
        >>> prior = GaussianPrior({"inputs": {"weight": 1}, "bias": "bias"})
        >>> prior.bind(dict(torch.nn.Linear(3, 2).named_parameters()))
        >>> prior.precisions()["weight"].shape
        torch.Size([1, 3])

    See also: docs/fit.md.
    """

    log_precision: nn.Parameter | None
    _all_entries: Tensor
    _learned_index: Tensor
    _entries: Tensor
    _counts: Tensor
    _means: Tensor | None
    _factors: Tensor | None

    def __init__(
        self,
        structure: str | Mapping[str, str | Sequence[str] | Mapping[str, int]] = "layerwise",
        precision: float | int | Mapping[str, float | int] = 1.0,
        learnable: bool | Mapping[str, bool] = True,
        hyperprior: Callable[[Tensor], Tensor] | None = None,
        mean: str | Mapping[str, str | Tensor] = "zero",
        shape: str = "equal",
    ) -> None:
        super().__init__()
        if isinstance(structure, Mapping):
            self._axes = _checked_axes(structure)
            self.structure, self._patterns = "groups", checked_groups(structure, "a prior", _VALUES)
        elif isinstance(structure, str) and structure in STRUCTURES:
            self.structure, self._patterns, self._axes = structure, {}, {}
        else:
            what = f"structure must be one of {', '.join(STRUCTURES)}, or a dict of groups"
            raise ConfigurationError(not_a_prior(what, structure))
        if isinstance(precision, Mapping):
            self._precision = {
                group: _checked_precision(value, f"precision of '{group}'")
                for group, value in precision.items()
            }
        else:
            self._precision = _checked_precision(precision, "precision")
        self.learnable = _checked_learnable(learnable)
        if self.structure in ("scalar", "groups"):  # others learn their tensors from ``bind``
            self._check_groups(list(self._patterns) or [SCALAR_GROUP])
        if hyperprior is not None and not callable(hyperprior):
            raise ConfigurationError(
                f"hyperprior must be callable, got {hyperprior!r}. Use NormalHyperprior()."
            )
        if hyperprior is not None and self.learnable is False:
            raise ConfigurationError(
                f"hyperprior has no effect on fixed precisions, got {hyperprior!r}. Use"
                " learnable=True, or remove hyperprior."
            )
        self.hyperprior = hyperprior
        self._mean = _checked_mean(mean)
        if shape not in SHAPES or (shape == "g-prior" and self.structure == "diagonal"):
            raise ConfigurationError(
                "shape must be 'equal' or 'g-prior', and 'equal' for a diagonal prior, got"
                f" {shape!r} for the structure '{self.structure}'.{nearest(str(shape), SHAPES)}"
            )
        self.shape = shape
        self.register_parameter("log_precision", None)
        # If some groups are fixed: log precisions of all (outdated for the learned ones, which
        # ``log_precision`` has), and the positions of the learned ones. A state has the log
        # precisions of all groups, whatever is learned.
        self.register_buffer("_all_entries", torch.empty(0, device="cpu"), persistent=False)
        no_index = torch.empty(0, dtype=torch.long, device="cpu")
        self.register_buffer("_learned_index", no_index, persistent=False)
        # The entries of all log precisions that each weight tensor uses, concatenated, and the
        # number of weights of each entry.
        self.register_buffer("_entries", no_index, persistent=False)
        self.register_buffer("_counts", no_index, persistent=False)
        # Fixed factors of the precisions of all weights, concatenated, from ``from_posterior`` or
        # of a g-prior.
        self.register_buffer("_factors", None)
        # The nonzero means, concatenated, of the weights in ``_mean_of``.
        self.register_buffer("_means", None)
        self._mean_of: list[str] = []
        self._shapes: dict[str, torch.Size] = {}
        self.group_names: list[str] = []
        self.group_of: dict[str, int] = {}
        self._varies: dict[str, tuple[int, ...]] = {}  # axes of each weight with several precisions

    @classmethod
    def from_posterior(cls, posterior: Any, learnable: bool = True) -> "GaussianPrior":
        """Return a posterior as the prior of the next training, for data that arrive later.

        The prior mean is the posterior mean. A single factor multiplies the posterior precisions.
        The factor is 1 at the start. If it is learned, a value below 1 means that old data count
        less.

        Args:
            posterior: Posterior with ``structure="diag"``, before any ``update``. Its precision
                matrix is the diagonal of H + P0. The new model must have the same weights.
            learnable: Whether the factor is learned. Default: True.

        Raises:
            ConfigurationError: If the precision matrix of the posterior is not diagonal.

        Examples:
            >>> import torch
            >>> from evigrad import Evidence
            >>> from evigrad.likelihoods import Gaussian
            >>> from evigrad.priors import GaussianPrior
            >>> model = torch.nn.Linear(1, 1)
            >>> evidence = Evidence(
            ...     model, Gaussian(), GaussianPrior(), estimator="diag-N-C", num_data=9
            ... )
            >>> data = torch.ones(9, 1), torch.ones(9, 1)
            >>> prior = GaussianPrior.from_posterior(evidence.posterior(data, structure="diag"))
            >>> prior.bind(dict(model.named_parameters()))
            >>> prior.precisions()["weight"]  # 9 from the data, and 1 from the first prior
            tensor([[10.]], grad_fn=<MulBackward0>)
        """
        if (precisions := posterior.diagonal_precisions()) is None:
            raise ConfigurationError(
                "A prior has independent weights, so it needs a posterior with structure='diag' and"
                f" without updates, got {posterior!r}. Call evidence.posterior(data,"
                f" structure='diag'). {_WHITEN}"
            )
        means = {name: mean for name, (mean, _) in precisions.items()}
        prior = cls("scalar", learnable=learnable, mean=means)
        prior._factors = torch.cat([factor.flatten() for _, factor in precisions.values()])
        return prior

    # ------------------------------------------------------------------ the weights

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        """Create a log precision for each group of the weights, on the weights' device.

        Log precisions have the data type of the weights, or float32 if the weights are in half
        precision. A second call with weights of the same names and shapes keeps the log precisions
        and means, but moves them to the device of these weights.

        Args:
            weights: Weights by name. A shared weight must occur once.

        Raises:
            ConfigurationError: If there are no weights, the prior is bound to different weights, or
                a weight is not in exactly one group. Also if ``precision``, ``learnable`` or
                ``mean`` does not match the groups or weights, or the hyperprior does not return a
                scalar.
        """
        if not weights:
            raise ConfigurationError(
                "A prior needs trainable weights, but the model has none. Call"
                " requires_grad_(True) on some parameters."
            )
        wrong = [name for name, w in weights.items() if not w.is_floating_point()]
        if wrong:
            raise ConfigurationError(
                f"Weights must be floating-point tensors, got other types for {listed(wrong)}."
                " Convert or freeze them. (Store a complex weight as torch.view_as_real(weight),"
                " and use torch.view_as_complex in the forward pass.)"
            )
        shapes = {name: w.shape for name, w in weights.items()}
        # A small step would not change a log precision in half precision, so use float32 or more.
        dtype = reduce(torch.promote_types, (w.dtype for w in weights.values()), torch.float32)
        device = next(iter(weights.values())).device
        if self.log_precision is not None:
            if shapes != self._shapes:
                raise ConfigurationError(
                    "This prior is bound to different weights"
                    f" ({_difference(self._shapes, shapes)}). Make a new prior for these weights."
                )
            # In place, because an optimizer may hold the parameter already.
            self.to(device=device, dtype=dtype)
            return
        names, group_of, varies = self._assign(shapes)
        self._check_groups(names)
        means = {
            name: weights[name].detach() if isinstance(value, str) else value
            for name, value in self._assigned_means(shapes, names, group_of).items()
        }
        if self.shape == "g-prior":
            numel = sum(map(math.prod, shapes.values()))
            self._factors = torch.ones(numel, device=device, dtype=dtype)
        elif self._factors is not None and list(self._mean) != list(shapes):
            raise ConfigurationError(
                "A prior from a posterior must be bound to the posterior's weights"
                f" {listed(list(self._mean))}, got {listed(list(shapes))}. Use the same model."
            )
        self._shapes, self.group_names, self.group_of = shapes, names, group_of
        self._varies = varies
        precision = self._precision
        values = precision if isinstance(precision, dict) else dict.fromkeys(names, precision)
        logs = [math.log(values[name]) for name in names]
        initial = torch.tensor(logs, dtype=torch.float64, device="cpu")
        initial = initial.repeat_interleave(torch.tensor(self._sizes, device="cpu"))
        self._set(initial.to(device, dtype))
        if self._factors is not None:
            self._factors = self._factors.to(device, dtype)
        self._mean_of = list(means)
        if means:
            self._means = torch.cat([m.to(device, dtype).flatten() for m in means.values()])
        self.log_hyperprior()  # raises its errors now, not at the first step

    def _assign(
        self, shapes: Mapping[str, torch.Size]
    ) -> tuple[list[str], dict[str, int], dict[str, tuple[int, ...]]]:
        """Return the names of the groups, and the group and the axes of each weight."""
        constant: dict[str, tuple[int, ...]] = dict.fromkeys(shapes, ())
        layers = {name: index for index, name in enumerate(shapes)}
        if self.structure == "scalar":
            return [SCALAR_GROUP], dict.fromkeys(shapes, 0), constant
        if self.structure == "layerwise":
            return list(shapes), layers, constant
        if self.structure == "diagonal":
            return list(shapes), layers, {n: tuple(range(len(s))) for n, s in shapes.items()}
        owners = assign(list(shapes), self._patterns, "the prior")
        order, varies = list(self._patterns), constant
        for group in order:
            lengths = {}
            for name in [name for name, owner in owners.items() if owner == group]:
                axis = _axis_of(name, len(shapes[name]), self._axes.get(group, {}))
                if axis is not None:
                    varies[name], lengths[name] = (axis,), shapes[name][axis]
            if len(set(lengths.values())) > 1:
                raise ConfigurationError(
                    f"The axes of prior group '{group}' must have equal sizes, because their"
                    f" weights share precisions, got {lengths}. Use a group for each size."
                )
        return order, {name: order.index(group) for name, group in owners.items()}, varies

    def _check_groups(self, names: Sequence[str]) -> None:
        """Check that settings by group use the names of this prior's groups."""
        for what, setting in (("precision", self._precision), ("learnable", self.learnable)):
            for name in setting if isinstance(setting, dict) else ():
                if name not in names:
                    raise ConfigurationError(
                        f"{what} must name groups of the prior ({listed(names)}), got '{name}'."
                        f"{nearest(name, names)}"
                    )
        if isinstance(precision := self._precision, dict):
            if missing := [name for name in names if name not in precision]:
                raise ConfigurationError(
                    f"precision must have a value for each group, got none for {listed(missing)}."
                )

    def _set(self, values: Tensor) -> None:
        """Store the log precisions of all groups, with learned and fixed groups apart."""
        parts = torch.arange(len(values), device=values.device).split(self._sizes)
        entries_and_sizes = [
            (parts[self.group_of[name]], n.numel()) for name, n in self._shapes.items()
        ]
        self._entries = torch.cat([entries for entries, _ in entries_and_sizes])
        self._counts = self._entries.new_zeros(len(values))
        for entries, numel in entries_and_sizes:
            self._counts[entries] += numel // len(entries)
        learnable = self.learnable
        if isinstance(learnable, dict):
            chosen = [i for i, name in enumerate(self.group_names) if learnable.get(name, True)]
            if 0 < len(chosen) < len(self.group_names):
                self._all_entries = values.detach().clone()
                self._learned_index = torch.cat([parts[index] for index in chosen])
                values = values[self._learned_index]
            learnable = bool(chosen)
        self.log_precision = nn.Parameter(values, requires_grad=learnable)

    def _assigned_means(
        self,
        shapes: Mapping[str, torch.Size],
        names: Sequence[str],
        group_of: Mapping[str, int],
    ) -> dict[str, str | Tensor]:
        """Return ``"initial"`` or a tensor for each weight with a nonzero mean, in order."""
        means: dict[str, str | Tensor | None] = {}
        key_of: dict[str, str] = {}
        for key, value in sorted(self._mean.items(), key=lambda item: item[0] == REMAINING):
            index = names.index(key) if key in names else None
            matching_names = [
                n for n in shapes if (matches(key, n) if index is None else group_of[n] == index)
            ]
            if key == REMAINING:
                matching_names = [name for name in matching_names if name not in key_of]
            elif not matching_names:
                raise ConfigurationError(
                    f"Each key of mean must match a weight, module or group, got '{key}'."
                    f"{nearest(key, [*names, *_known(shapes)])}"
                )
            for name in matching_names:
                if name in key_of:
                    raise ConfigurationError(
                        f"mean has two values for '{name}', from '{key_of[name]}' and '{key}'. Name"
                        " each weight at most once. Weights that you do not name have mean zero."
                    )
                if isinstance(value, Tensor) and value.shape != shapes[name]:
                    raise ConfigurationError(
                        f"The mean of '{name}' must have the weight's shape, {tuple(shapes[name])},"
                        f" got {tuple(value.shape)}."
                    )
                means[name], key_of[name] = value, key
        return {name: mean for name in shapes if (mean := means.get(name)) is not None}

    def learned_groups(self) -> list[str]:
        """Return the names of the groups in ``log_precision``."""
        chosen = self.learnable if isinstance(self.learnable, dict) else {}
        return [name for name in self.group_names if chosen.get(name, True)] or self.group_names

    @property
    def learned_precision(self) -> float | dict[str, float] | None:
        """The argument ``precision`` if it sets only learned precisions, or None.

        If the precisions differ between groups, the values of the learned groups by name.
        """
        learned = self.learned_groups()
        if isinstance(self._precision, dict):
            values = {name: self._precision[name] for name in learned}
            distinct = set(values.values())
            return distinct.pop() if len(distinct) == 1 else values
        return None if len(learned) < len(self.group_names) else self._precision

    def _log_precisions(self) -> Tensor:
        """Return the log precisions of all groups, learned or not."""
        if self.log_precision is None:
            raise ConfigurationError("The prior is not bound to weights yet. Call bind(weights).")
        if not len(self._learned_index):
            return self.log_precision
        return self._all_entries.index_copy(0, self._learned_index, self.log_precision)

    # ------------------------------------------------------------------ values

    def precisions(self) -> dict[str, Tensor]:
        """Return the precision of each weight tensor by name, differentiable in ``log_precision``.

        Each precision is 0-dimensional, or it has as many axes as the weight, and its size along
        each is 1 or the weight's. If the prior is from a posterior, it has the weight's shape.
        """
        precision = self._log_precisions().exp()
        groups = precision.split(self._sizes) if any(self._varies.values()) else precision.unbind()
        # Weights of a group share one tensor, which tells that their precisions are equal.
        numbers = [part.reshape(()) if part.numel() == 1 else part for part in groups]
        by_name = {
            name: groups[index].view(self._precision_shape(name))
            if self._varies[name]
            else numbers[index]
            for name, index in self.group_of.items()
        }
        if self._factors is None:
            return by_name
        return {name: by_name[name] * factor for name, factor in self.factors().items()}

    @cached_property
    def _sizes(self) -> list[int]:
        """The number of precisions of each group. It is read only after ``bind``."""
        sizes = {index: self._precision_shape(name) for name, index in self.group_of.items()}
        return [math.prod(sizes[index]) for index in range(len(self.group_names))]

    def _precision_shape(self, name: str) -> list[int]:
        """Return the shape of a weight's precision, which has the size 1 along constant axes."""
        varies = self._varies[name]
        return [n if axis in varies else 1 for axis, n in enumerate(self._shapes[name])]

    def square_norms(self, weights: Mapping[str, Tensor]) -> Float[Tensor, " G"]:
        """Return ‖w − w₀‖² of the weights of each entry of ``log_precision``, in float64.

        If weights have fixed factors of the precision, the norm includes these factors.
        """
        return self._sums(self._squares(weights, torch.float64))

    def counts(self) -> Int[Tensor, " G"]:
        """Return the number of weights of each entry of ``log_precision``."""
        return self._counts[self._learned_index] if len(self._learned_index) else self._counts

    def has_mean(self) -> Bool[Tensor, " G"]:
        """Return whether each entry of ``log_precision`` has weights with a nonzero mean."""
        sizes = [self._sizes[index] for index in self.group_of.values()]
        nonzero = torch.tensor([name in self._mean_of for name in self._shapes], device="cpu")
        return self._sums(nonzero.repeat_interleave(torch.tensor(sizes, device="cpu")).int()) > 0

    def _sums(self, values: Tensor) -> Tensor:
        """Return sums of the values of ``_entries`` for each entry of ``log_precision``."""
        values = values.to(self._entries.device)
        sums = values.new_zeros(len(self._counts)).index_add(0, self._entries, values)
        return sums[self._learned_index] if len(self._learned_index) else sums

    @property
    def varies(self) -> bool:
        """Whether each weight of a tensor has a separate precision."""
        is_shaped = self._factors is not None or self.shape != "equal"
        return is_shaped or self.structure == "diagonal"

    def factors(self) -> dict[str, Tensor]:
        """Return the fixed factors of precisions by name, or an empty dict if all are 1."""
        if self._factors is None:
            return {}
        parts = self._factors.split([shape.numel() for shape in self._shapes.values()])
        pairs = zip(self._shapes.items(), parts, strict=True)
        return {name: part.view(shape) for (name, shape), part in pairs}

    @torch.no_grad()
    def set_shape(self, curvature: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Set the fixed factors of a g-prior.

        The learned precisions change such that (w − w₀)ᵀ P0 (w − w₀) does not change in any group.

        Args:
            curvature: Curvature per example of each weight by name, in the weights' shapes.
            weights: The current weights by name.

        Raises:
            ConfigurationError: If the prior is not a g-prior.
        """
        if self.shape != "g-prior" or (log_precision := self.log_precision) is None:
            raise ConfigurationError(
                "Only a bound prior with shape='g-prior' takes a curvature, got"
                f" {'an unbound prior' if self.log_precision is None else repr(self.shape)}. Use"
                " GaussianPrior(shape='g-prior') in an Evidence."
            )
        before, factors = self.square_norms(weights), self._factors
        assert factors is not None
        means = {name: curvature[name].double().mean() for name in self._shapes}
        least = _LEAST_OF_ALL * torch.stack(list(means.values())).mean()
        if least == 0:  # no output depends on any weight
            return
        flat = [
            (curvature[name] + (_LEAST_OF_TENSOR * means[name] + least)).flatten()
            for name in self._shapes
        ]
        factors.copy_(torch.cat(flat))
        if log_precision.requires_grad:
            ratio = before / self.square_norms(weights)
            change = torch.where(before > 0, ratio.log(), 0.0)
            log_precision += change.to(log_precision)

    def _squares(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the sum of (w − w₀)² for each of ``_entries``, with the fixed factors."""
        means, sums = self.means(), list[Tensor]()
        factors = {} if self._factors is None else self.factors()
        for name in self._shapes:
            deviation = weights[name] - means[name] if name in means else weights[name]
            square = deviation.to(dtype).square()
            if factors:
                square = square * factors[name].to(dtype)
            if self._varies[name]:
                sums.append(square.sum_to_size(self._precision_shape(name)))
            else:
                sums.append(square.sum())
        return torch.cat([part.reshape(-1) for part in sums])

    def means(self) -> dict[str, Tensor]:
        """Return the nonzero means w₀ of the weights by name, each in the shape of its weight."""
        self._log_precisions()
        if self._means is None:
            return {}
        shapes = [self._shapes[name] for name in self._mean_of]
        parts = self._means.split([shape.numel() for shape in shapes])
        named = zip(self._mean_of, parts, shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in named}

    def deviations(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the deviations w − w₀ of the bound weights by name, with a graph."""
        means = self.means()
        return {name: w - means[name] if name in means else w for name, w in weights.items()}

    def quadratic(self, weights: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return (w − w₀)ᵀ P0 (w − w₀), differentiable in the weights and the precisions.

        Raises:
            ConfigurationError: If the weights are not the bound weights.
        """
        precision = self._log_precisions().exp()
        shapes = {name: w.shape for name, w in weights.items()}
        if shapes != self._shapes:
            raise ConfigurationError(
                f"The prior is bound to different weights ({_difference(self._shapes, shapes)})."
                " Pass the bound weights, or make a new prior."
            )
        # In half precision, squares overflow and sums round. Sums come first, because products of
        # all weights would be kept for the gradient.
        squares = self._squares(weights, precision.dtype)
        if len(squares) != len(precision) or self.structure == "groups":
            precision = precision[self._entries]
        return (precision * squares).sum()

    def log_det(self) -> Float[Tensor, ""]:
        """Return the log-determinant log|P0|, differentiable in ``log_precision``."""
        total = (self._log_precisions() * self._counts).sum()
        return total if self._factors is None else total + self._factors.log().sum()

    def log_hyperprior(self) -> Float[Tensor, ""]:
        """Return the log density of the log precisions in nats, or 0 without a hyperprior.

        Raises:
            ConfigurationError: If the hyperprior does not return a scalar.
        """
        log_precision = self._log_precisions()
        if self.hyperprior is None:
            return log_precision.new_zeros(())
        value = self.hyperprior(log_precision)
        if not isinstance(value, Tensor) or value.ndim:
            raise ConfigurationError(
                "The hyperprior must return a 0-dimensional tensor, got"
                f" {f'shape {tuple(value.shape)}' if isinstance(value, Tensor) else repr(value)}."
                " Sum the log densities of all precisions."
            )
        return value

    def precision_groups(self) -> dict[str, str]:
        """Return a label for each weight. The weights with one label have equal precisions."""
        self._log_precisions()
        if self._factors is not None:
            return {name: name for name in self._shapes}
        return {name: self.group_names[index] for name, index in self.group_of.items()}

    def varying_axes(self) -> dict[str, tuple[int, ...]]:
        """Return the axes along which the precisions of weights vary, if they have several."""
        self._log_precisions()
        if self._factors is not None:
            return {name: tuple(range(len(shape))) for name, shape in self._shapes.items()}
        return {name: axes for name, axes in self._varies.items() if axes}

    def factor_pairs(self) -> list[tuple[str, str]]:
        """Return the names of U (o, r) and V (r, i) for learned groups of two matrices around zero.

        Their precisions vary along the ranks, axis 1 of U and axis 0 of V.
        """
        is_learned = self.log_precision is not None and self.log_precision.requires_grad
        groups: dict[str, list[str]] = {group: [] for group in self.learned_groups() if is_learned}
        for name, index in self.group_of.items():
            groups.get(self.group_names[index], []).append(name)
        return [
            (left, right)
            for names in groups.values()
            if len(names) == 2 and not set(names) & set(self._mean_of)
            for left, right in (names, names[::-1])
            if (self._varies[left], self._varies[right]) == ((1,), (0,))
            if len(self._shapes[left]) == len(self._shapes[right]) == 2
        ]

    def group_name(self, name: str) -> str:
        """Return the name of a weight's group.

        Raises:
            ConfigurationError: If there is no weight of this name.
        """
        self._log_precisions()
        if name not in self._shapes:
            raise ConfigurationError(
                f"The prior has no weight '{name}'.{nearest(name, self._shapes)}"
            )
        return self.group_names[self.group_of[name]]

    # ------------------------------------------------------------------ state

    def get_extra_state(self) -> dict[str, Any] | None:
        """Return the names, shapes and groups of the bound weights, or None before ``bind``."""
        if self.log_precision is None:
            return None
        return {
            "structure": self.structure,
            "shape": self.shape,
            "group_names": list(self.group_names),
            "group_of": dict(self.group_of),
            "axes": {name: list(axes) for name, axes in self._varies.items() if axes},
            "shapes": {name: list(shape) for name, shape in self._shapes.items()},
            "mean_of": list(self._mean_of),
        }

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """Do nothing, because ``_load_from_state_dict`` has already used the state."""

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        saved = state_dict.get(f"{prefix}_extra_state")
        if saved is not None:
            if saved["structure"] != self.structure:
                raise ConfigurationError(
                    f"The saved prior must have this prior's structure, {self.structure}, got"
                    f" {saved['structure']}. Create this prior with the saved structure."
                )
            if (saved_shape := saved.get("shape", "equal")) != self.shape:
                raise ConfigurationError(
                    f"The saved prior must have this prior's shape, {self.shape}, got"
                    f" {saved_shape}. Create this prior with shape={saved_shape!r}."
                )
            shapes = {name: torch.Size(shape) for name, shape in saved["shapes"].items()}
            if self.log_precision is None:
                names, group_of, varies = self._assign(shapes)
            else:
                names, group_of, varies = self.group_names, self.group_of, self._varies
                # The order matters: log_precision of a diagonal prior has it.
                if list(shapes.items()) != list(self._shapes.items()):
                    raise ConfigurationError(
                        "The saved prior belongs to different weights"
                        f" ({_difference(self._shapes, shapes)}). Use the model of the saved prior."
                    )
            axes = {name: list(dims) for name, dims in varies.items() if dims}
            saved_groups = [saved["group_names"], saved["group_of"], saved.get("axes", {})]
            if [names, group_of, axes] != saved_groups:
                raise ConfigurationError(
                    "The saved prior and this prior have different groups. Use the same groups."
                )
            mean_of = list(self._assigned_means(shapes, names, group_of))
            if (there := saved.get("mean_of", [])) != mean_of:
                expected_text, saved_text = (
                    listed(mean_names) or "no weight" for mean_names in (mean_of, there)
                )
                raise ConfigurationError(
                    "The priors have nonzero means for different weights: the saved prior for"
                    f" {saved_text}, and this prior for {expected_text}. Use the same mean=... as"
                    " for the saved prior."
                )
            if self.log_precision is None:
                self._shapes, self.group_names, self.group_of = shapes, names, group_of
                self._varies = varies
                self._check_groups(names)
                self._set(torch.empty_like(state_dict[f"{prefix}log_precision"]))
                self._mean_of = mean_of
                if mean_of:
                    self._means = torch.empty_like(state_dict[f"{prefix}_means"]).flatten()
                if self.shape == "g-prior":
                    self._factors = torch.empty_like(state_dict[f"{prefix}_factors"])
        key = f"{prefix}log_precision"
        values = state_dict.get(key)
        has_learned = len(self._learned_index) > 0
        if values is not None and has_learned and values.shape == self._all_entries.shape:
            with torch.no_grad():
                self._all_entries.copy_(values)
            state_dict = {**state_dict, key: values[self._learned_index.to(values.device)]}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _save_to_state_dict(
        self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.log_precision is not None:
            values = self._log_precisions()
            destination[f"{prefix}log_precision"] = values if keep_vars else values.detach()

    def extra_repr(self) -> str:
        groups = f", groups={self.group_names}" if self.structure == "groups" else ""
        means = ", ".join(f"{key!r}: {_in_words(setting)}" for key, setting in self._mean.items())
        mean = f", mean={{{means}}}" if any(m is not None for m in self._mean.values()) else ""
        shape = "" if self.shape == "equal" else f", shape={self.shape!r}"
        return f"structure={self.structure!r}{groups}, learnable={self.learnable}{mean}{shape}"


def not_a_prior(requirement: str, value: object) -> str:
    """Return the error for a value that is neither a prior nor the structure of a prior."""
    fix = nearest(value, STRUCTURES) if isinstance(value, str) else f" {_WHITEN}"
    if isinstance(value, bool | None):
        fix = " Use GaussianPrior()."
    elif isinstance(value, int | float):
        fix = f" Use GaussianPrior(precision={value!r})."
    return f"{requirement}, got {_shown(value)}.{fix}"


def _positive(value: object, what: str) -> float:
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"The {what} must be a number, got {value!r}.") from error
    if not (math.isfinite(number) and number > 0):
        raise ConfigurationError(f"The {what} must be positive and finite, got {value!r}.")
    return number


def _checked_precision(value: object, what: str) -> float:
    """Return a positive number. The error for another value tells what to use instead."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        raise ConfigurationError(f"The {what} must be a number, got {_shown(value)}. {_WHITEN}")
    try:
        return _positive(value, what)
    except ConfigurationError as error:
        fixes = {0: _NO_DECAY, math.inf: _FIXED}
        fix = fixes.get(value) if isinstance(value, float | int) else None
        if fix is None:
            raise
        raise ConfigurationError(f"{error} {fix}") from None


def _checked_learnable(learnable: object) -> bool | dict[str, bool]:
    is_mapping = isinstance(learnable, Mapping)
    settings = {f"['{k}']": v for k, v in learnable.items()} if is_mapping else {"": learnable}
    for which, value in settings.items():
        if not isinstance(value, bool):
            raise ConfigurationError(
                f"learnable{which} must be True or False, got {value!r}. To fix only some groups,"
                " use a mapping such as {'head': False}."
            )
    return dict(learnable) if is_mapping else bool(learnable)


def _checked_axes(groups: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return the axis of each pattern, by group, for the groups along axes."""
    axes = {group: dict(value) for group, value in groups.items() if isinstance(value, Mapping)}
    for group, axis_of in axes.items():
        for pattern, axis in axis_of.items():
            if isinstance(axis, bool) or not isinstance(axis, int):
                what = f"The axis of '{pattern}' in prior group '{group}' must be an integer"
                raise ConfigurationError(f"{what}, got {_shown(axis)}.{_VALUES}")
    return axes


def _axis_of(name: str, ndim: int, axis_of: Mapping[str, int]) -> int | None:
    """Return the axis along which a weight's precisions vary, or None."""
    axes = {p: axis for p, axis in axis_of.items() if p != REMAINING and matches(p, name)}
    if not axes and REMAINING in axis_of:
        axes = {REMAINING: axis_of[REMAINING]}
    for pattern, axis in axes.items():
        if not -ndim <= axis < ndim:
            raise ConfigurationError(
                f"The axis of '{pattern}' must be below {ndim}, the number of axes of '{name}', got"
                f" {axis}."
            )
    chosen = {axis % ndim for axis in axes.values()}
    if len(chosen) > 1:
        raise ConfigurationError(f"'{name}' must have one axis in its group, got {axes}.")
    return chosen.pop() if chosen else None


def _checked_mean(mean: object) -> dict[str, str | Tensor | None]:
    """Return a tensor, ``"initial"``, or None for zero, by name or pattern."""
    means: dict[str, str | Tensor | None] = {}
    for key, value in (mean if isinstance(mean, Mapping) else {"*": mean}).items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.isfinite().all():
            means[key] = value.detach()
        elif isinstance(value, str) and value in MEANS:
            means[key] = None if value == "zero" else value
        else:
            raise ConfigurationError(
                f"The mean of '{key}' must be 'zero', 'initial', or a finite floating-point tensor"
                f" of the weight's shape, got {_shown(value)}.{nearest(str(value), MEANS)}"
            )
    return means


def _in_words(mean: object) -> str:
    """Return a mean in words. None means zero."""
    return _shown("zero" if mean is None else mean)


def _shown(value: object) -> str:
    """Return a value in words, without the entries of a tensor or an array."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        return f"{str(value.dtype).removeprefix('torch.')} {kind} {tuple(value.shape)}"
    return repr(value)


def _difference(bound: Mapping[str, torch.Size], other: Mapping[str, torch.Size]) -> str:
    """Return in words how two sets of weights differ."""
    parts = [f"without '{name}'" for name in bound if name not in other]
    parts += [f"with '{name}'" for name in other if name not in bound]
    parts += [
        f"'{name}' is {tuple(other[name])}, not {tuple(shape)}"
        for name, shape in bound.items()
        if name in other and other[name] != shape
    ]
    return "; ".join(parts[:3]) + ("; …" if len(parts) > 3 else "") or "in another order"


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a parameter's name, exactly or by wildcards.

    A pattern without wildcards also matches the parameters of the module that the pattern names.
    """
    above = pattern if pattern.endswith(".") else f"{pattern}."
    return name == pattern or name.startswith(above) or fnmatchcase(name, pattern)


def checked_groups(
    groups: Mapping[str, Iterable[str]], what: str, instead: str = ""
) -> dict[str, list[str]]:
    """Check that each group has patterns, and return lists of them. ``instead`` ends an error."""
    for name, patterns in groups.items():
        is_list = isinstance(patterns, Iterable) and not isinstance(patterns, Tensor | np.ndarray)
        if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigurationError(
                f"Each group of {what} must be a pattern or a list of patterns of parameter names,"
                f" got {_shown(patterns)} for '{name}'. Use a dict such as"
                " {'body': ['encoder.*'], 'head': '*'}." + instead
            )
    taken = {
        name: [patterns] if isinstance(patterns, str) else list(patterns)
        for name, patterns in groups.items()
    }
    empty = [name for name, patterns in taken.items() if not patterns]
    if empty or not taken:
        raise ConfigurationError(
            f"Each group of {what} must name at least one weight, got none for"
            f" {listed(empty) or 'any group'}."
        )
    return taken


def _known(names: Iterable[str]) -> list[str]:
    """Return the names of weights and of their modules."""
    return [*names, *sorted({name.rpartition(".")[0] for name in names})]


def assign(names: Sequence[str], groups: Mapping[str, Sequence[str]], what: str) -> dict[str, str]:
    """Check that each weight is in exactly one group, and return the group of each weight."""
    owners = {
        name: [
            group
            for group, patterns in groups.items()
            if any(matches(pattern, name) for pattern in patterns if pattern != REMAINING)
        ]
        for name in names
    }
    remaining = [group for group, patterns in groups.items() if REMAINING in patterns]
    without_group = [name for name, group_names in owners.items() if not group_names]
    owners |= dict.fromkeys(without_group, remaining)
    candidates = _known(names)
    problems = [
        f"'{pattern}' matches no {'other ' * (pattern == REMAINING)}weight."
        f"{nearest(pattern, candidates)}"
        for patterns in groups.values()
        for pattern in patterns
        if not any(
            matches(pattern, name) for name in (without_group if pattern == REMAINING else names)
        )
    ]
    if missing := [name for name, group_names in owners.items() if not group_names]:
        problems.append(
            f"Weights without a group: {listed(missing)}. The pattern '*' stands for all weights"
            " without a group."
        )
    problems += [
        f"'{name}' is in several groups: {', '.join(group_names)}."
        for name, group_names in owners.items()
        if len(group_names) > 1
    ]
    if problems:
        raise ConfigurationError(
            f"Each weight must be in exactly one group of {what}. " + " ".join(problems)
        )
    return {name: group_names[0] for name, group_names in owners.items()}
