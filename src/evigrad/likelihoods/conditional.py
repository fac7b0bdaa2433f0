"""Likelihoods that depend on known facts about each target."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from evigrad.errors import InputError, nearest
from evigrad.inputs import refuse_where
from evigrad.likelihoods.base import Likelihood
from evigrad.likelihoods.targets import as_numbers


class Conditional(Likelihood):
    """A likelihood that depends on known facts about each target, its conditions.

    Examples of conditions are the standard deviation of a measurement, or the time during which
    events were counted. The curvature Λ may depend on conditions, but not on targets. ``targets``
    combines targets and conditions in one tensor, which you pass as targets.

    To write your own, set ``conditions`` to the names and the default values. Call ``split`` where
    a method has targets, such as ``log_prob``, and ``condition`` where it has only outputs, such as
    ``hessian``.

    Attributes:
        conditions: The default value of each condition, by name. Predictions use it, unless you
            call ``Predictive.with_conditions``.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Conditional
        >>> class Exposed(Conditional):
        ...     '''Waiting times until a number of events, with log rates f.'''
        ...     name, couples_outputs = "exposed", False
        ...     conditions = {"events": 1.0}
        ...     def log_prob(self, f, y):
        ...         y, facts = self.split(y)
        ...         events = facts["events"]
        ...         constant = (events - 1) * y.log() - torch.lgamma(events)
        ...         return (constant + events * f - y * f.exp()).sum(1)
        ...     def hessian(self, f):  # the Fisher information
        ...         return self.condition("events", f).expand(f.shape).diag_embed()
        >>> likelihood = Exposed()
        >>> y = likelihood.targets(torch.ones(2, 1), events=torch.tensor([1.0, 3.0]))
        >>> y
        tensor([[1., 1.],
                [1., 3.]], dtype=torch.float64)
        >>> likelihood.at(y).hessian(torch.zeros(2, 1)).flatten()
        tensor([1., 3.])

    See also: docs/likelihoods.md.
    """

    conditions: Mapping[str, float] = {}
    # The conditions of the examples in ``at``, (m, D).
    _conditions: Mapping[str, Tensor] = {}

    def targets(self, y: Any, **conditions: Any) -> Float[Tensor, "m ... E"]:
        """Return targets and conditions in one tensor.

        Args:
            y: Targets (m, D), or (m, …, D) for outputs with positions: a tensor or an array.
                Targets (m,) mean D = 1.
            **conditions: Conditions by name: tensors or arrays with the shape of y, or without its
                last dimension, or one number. Default: the default values.

        Returns:
            A float64 tensor with the targets in the first D columns, and then D columns for each
            condition.

        Raises:
            InputError: If there is no such condition, a value is out of range, or a shape does not
                match the targets.
        """
        self._check_names(conditions)
        y = as_numbers(y).double()
        y = y.unsqueeze(1) if y.ndim == 1 else y
        columns = [y]
        for name, default in self.conditions.items():
            values = as_numbers(conditions.get(name, default)).to(y)
            if values.shape == y.shape[:-1]:
                values = values.unsqueeze(-1)
            elif values.ndim > 0 and values.shape != y.shape:
                raise InputError(
                    f"{name} must have the shape of the targets, {tuple(y.shape)}, or"
                    f" {tuple(y.shape[:-1])}, got {tuple(values.shape)}."
                )
            columns.append(values.expand(y.shape))
            self._check_condition(name, torch.where(y.isnan(), default, columns[-1]))
        return torch.cat(columns, -1)

    def _check_names(self, conditions: Mapping[str, object]) -> None:
        for name in conditions:
            if name not in self.conditions:
                names = ", ".join(self.conditions) or "none"
                raise InputError(
                    f"{type(self).__name__} has no condition {name!r}. Its conditions are: {names}."
                    f"{nearest(name, self.conditions)}"
                )

    def split(self, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the targets, and the conditions by name.

        The conditions of missing targets (NaN) have their default values.
        """
        if not self.conditions:
            return y, {}
        plain, *columns = y.chunk(1 + len(self.conditions), -1)
        missing = plain.isnan()
        return plain, {
            name: torch.where(missing, default, values)
            for (name, default), values in zip(self.conditions.items(), columns, strict=True)
        }

    @property
    def has_conditions(self) -> bool:
        """Return whether there are conditions."""
        return bool(self.conditions)

    def plain_targets(self, y: Tensor) -> Tensor:
        """Return the targets without conditions."""
        return self.split(y)[0]

    def at(self, y: Tensor) -> Self:
        """Return this likelihood under the conditions of the examples with targets y.

        The result shares all parameters. Its methods expect outputs of the same examples.
        """
        return self._under(self.split(y)[1]) if self.conditions else self

    def with_conditions(self, **conditions: Any) -> Self:
        """Return this likelihood under conditions by name.

        Args:
            **conditions: One number, or tensors or arrays (m,) or (m, D) for m examples. Other
                conditions of this likelihood do not change.

        Raises:
            InputError: If there is no such condition, or a value is out of range.
        """
        self._check_names(conditions)
        rows = dict[str, Tensor]()
        for name, values in conditions.items():
            numbers = as_numbers(values)
            rows[name] = numbers.reshape(-1, 1) if numbers.ndim < 2 else numbers
            self._check_condition(name, rows[name])
        return self._under({**self._conditions, **rows})

    def _under(self, conditions: Mapping[str, Tensor]) -> Self:
        here = copy.copy(self)  # with the same parameters
        here._conditions = conditions
        return here

    def condition(self, name: str, f: Float[Tensor, "m C"]) -> Float[Tensor, "n D"]:
        """Return a condition of the examples with outputs f, or one row (1, D) for all examples.

        Without conditions (see ``at``), return the default value, (1, 1).

        Raises:
            InputError: If the conditions belong to another number of examples.
        """
        if name not in self._conditions:
            return f.new_full((1, 1), self.conditions[name])
        values = self._conditions[name].to(f)
        if len(values) not in (1, len(f)):
            raise InputError(
                f"{name} has values for {len(values)} examples, but there are outputs for"
                f" {len(f)}. Pass one value per example."
            )
        return values

    def combined(self, y: Tensor, f: Float[Tensor, "m C"]) -> Tensor:
        """Return targets (m, D) and the conditions of ``at`` in one tensor, for ``sample``."""
        if not self.conditions:
            return y
        return self.targets(
            y, **{name: self.condition(name, f).expand(y.shape) for name in self.conditions}
        )

    def reference_targets(self, f: Float[Tensor, "m C"]) -> tuple[Tensor, Tensor]:
        """Return zeros and ones with the conditions of ``at``."""
        first, second = super().reference_targets(f)
        return self.combined(first, f), self.combined(second, f)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check that targets are combined with conditions, and check both."""
        if not self.conditions or not isinstance(y, Tensor):
            self.validate_plain(f_shape, y)
            return
        if y.ndim != 2 or y.shape[1] % (1 + len(self.conditions)) or not y.is_floating_point():
            names = ", ".join(f"{name}=..." for name in self.conditions)
            raise InputError(
                f"Targets must be combined with {', '.join(self.conditions)}, got a tensor of"
                f" dtype {y.dtype} and shape {tuple(y.shape)}. Use likelihood.targets(y, {names})."
            )
        plain, conditions = self.split(y)
        self.validate_plain(f_shape, plain)
        for name, values in conditions.items():
            self._check_condition(name, values)

    def _check_condition(self, name: str, values: Tensor) -> None:
        refuse_where(values.isnan(), values, "is not a number", name.capitalize())
        self.validate_condition(name, values)

    def validate_plain(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check targets without conditions. Subclasses call this method first."""
        super().validate(f_shape, y)

    def validate_condition(self, name: str, values: Float[Tensor, "m ... D"]) -> None:
        """Check the range of the values of a condition, which are not NaN."""

    def _in_parts(self, f: Tensor, size: int) -> Iterator[tuple[Likelihood, Tensor]]:
        for start in range(0, len(f), size):
            part = slice(start, start + size)
            conditions = {name: self.condition(name, f)[part] for name in self._conditions}
            yield self._under(conditions), f[part]
