"""The base class of likelihoods. A subclass needs only ``log_prob``."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from evigrad.core.algebra import is_finite
from evigrad.core.roots import (
    RootRows,
    check_finite_root,
    check_not_negative,
    check_root,
    checked_rows,
    diagonal_rows,
    hessian_rows,
    scaled_units,
)
from evigrad.errors import (
    ConfigurationError,
    InputError,
    NotFiniteError,
    raised_in,
    shape_or_type,
)
from evigrad.inputs import MISSING_LABELS, refuse_where
from evigrad.likelihoods.targets import total

# A sum over examples, or a sum and the number of values that its mean is over.
Metric = float | tuple[float, float]
# Two Hessians by automatic differentiation count as equal up to this multiple of √eps.
SAME_HESSIAN = 10.0
# Methods that belong to one density.
_DERIVED = (
    "hessian",
    "root",
    "_diagonal_root",
    "score",
    "probabilities",
    "noise_variance",
    "moments",
    "cdf",
    "sample",
)
_DEPENDS_ON_TARGETS = (
    "Densities whose Hessian depends on the targets need hessian(f), such as the Fisher"
    " information. Estimators with 'ef', such as 'ntk-400-1-ef', need only log_prob. Estimators"
    " with 'mc' need log_prob and sample(f, generator)."
)
# An inherited root is compared with the density on this many outputs of Λ.
_COMPARED_OUTPUTS = 8
# All columns of a root have C² numbers per example. At most this many bytes are formed at once.
ROOT_BYTES = 2**26

# Above this number of outputs, a diagonal root has unit vectors, which share memory, and a scale.
# Fewer outputs have no scale, because scaled rows are slower. The choice must not depend on the
# columns, because kept rows are scaled again after a step on the likelihood's parameters.
_MANY_OUTPUTS = 64


class Likelihood(nn.Module, ABC):
    """The distribution of a target y given the outputs f of the network.

    To write your own likelihood, subclass it and define ``log_prob``.

    Attributes:
        name: Name of the likelihood in reports. Default: the name of the class in lower case.
        couples_outputs: Whether Λ, the Hessian of −log p(y|f) with respect to f, has off-diagonal
            entries.
        has_conditions: Whether Λ depends on known facts about the examples (see ``Conditional``).
        is_classification: Whether targets are classes. If they are, and the likelihood has
            ``probabilities``, ``metrics`` counts correct predictions.
        has_whole_targets: Whether targets are whole numbers, such as counts or ordered classes.
            Quantiles are then whole numbers too.

    Examples:
        >>> import torch
        >>> from evigrad.likelihoods import Likelihood
        >>> class Exponential(Likelihood):
        ...     '''Waiting times with log rates f.'''
        ...     name = "exponential"
        ...     couples_outputs = False
        ...     def log_prob(self, f, y):
        ...         return (f - y * f.exp()).sum(1)
        ...     def hessian(self, f):  # the Fisher information
        ...         return torch.ones_like(f).diag_embed()
        >>> Exponential().log_prob(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]]))
        tensor([-1., -2.])

    See also: docs/likelihoods.md.
    """

    name: ClassVar[str]
    couples_outputs: ClassVar[bool] = True
    has_conditions = False
    is_classification: ClassVar[bool] = False
    has_whole_targets: ClassVar[bool] = False
    # Methods that were written for another density than the class has; see ``check_derivatives``.
    # Inherited methods of predictions are not used.
    _inherited: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__.lower()
        # How far above a class each method is defined.
        above = {
            name: next(i for i, base in enumerate(cls.__mro__) if name in vars(base))
            for name in ("log_prob", *_DERIVED)
        }
        derived_names = {name for name in _DERIVED if above[name] > above["log_prob"]}
        if above["root"] > above["hessian"]:
            derived_names.add("root")
        if above["_diagonal_root"] > min(above["root"], above["hessian"]):
            derived_names.add("_diagonal_root")
        defaults = {name for name in _DERIVED if cls.__mro__[above[name]] is Likelihood}
        # Defaults are derived from the class's own density, and a root from its Hessian.
        inherited = derived_names - (defaults - {"hessian"})
        if "root" in derived_names and "hessian" in derived_names - defaults:
            inherited.add("root")
        cls._inherited = frozenset(inherited)

    @property
    def has_labels(self) -> bool:
        """Return whether the targets are single labels (m,). A subclass may override this."""
        return self.is_classification and self.couples_outputs

    @property
    def defines_hessian(self) -> bool:
        """Return whether the class defines Λ, which then does not depend on the targets.

        Otherwise, Λ is derived from ``log_prob``, and may depend on the targets.
        """
        return "hessian" not in self._inherited

    @abstractmethod
    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        """Return the normalized log p(y|f) of each example in nats, differentiable in f.

        Args:
            f: Outputs.
            y: Targets that ``validate`` accepts.
        """

    def forward(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        """Return ``log_prob(f, y)``."""
        return self.log_prob(f, y)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Check the targets before anything is computed.

        Subclasses call this method first and then check dtype, shape and range.

        Args:
            f_shape: Shape of the outputs, (m, C).
            y: Targets.

        Raises:
            InputError: If the outputs do not have the shape (m, C), or there are no examples. It is
                also raised if y is not a tensor, has a different number of examples, or has NaN or
                infinite values.
        """
        shape = tuple(f_shape)
        if len(shape) != 2:
            hint = "return f.unsqueeze(1)" if len(shape) == 1 else "flatten or average further axes"
            raise InputError(
                f"Outputs must have the shape (m, C) with one row per example, got {shape}. In the"
                f" model, {hint}."
            )
        if not isinstance(y, Tensor):
            raise InputError(
                f"Targets must be a tensor, got {type(y).__name__}. Convert them with"
                " torch.as_tensor."
            )
        if 0 in shape:
            raise InputError(
                f"Outputs must not be empty, got the shape {shape}. Pass at least one example, and"
                " use a model with at least one output."
            )
        if y.ndim == 0 or len(y) != shape[0]:
            raise InputError(
                f"Outputs of shape {shape} need {shape[0]} targets, got targets of shape"
                f" {tuple(y.shape)}. Pass one target per example."
            )
        if y.is_floating_point() and not is_finite(y):
            fix = MISSING_LABELS if self.has_labels else "Remove or impute such targets"
            refuse_where(~torch.isfinite(y), y, f"is not finite. {fix}")

    def counted(self, y: Tensor) -> Bool[Tensor, " m"] | None:
        """Return which of the targets count, if outputs (m, …, C) have a target per position.

        False marks positions without a target, such as padding. The default, None, counts all
        targets. This method is called before ``validate`` checks the targets.
        """
        return None

    def at(self, y: Tensor) -> "Likelihood":
        """Return this likelihood under the conditions of the examples with targets y.

        Λ, draws and moments of the result hold for these examples. The default is the likelihood
        itself, because most likelihoods have no conditions. See ``Conditional``.
        """
        return self

    def plain_targets(self, y: Tensor) -> Tensor:
        """Return the targets without the conditions that are combined with them."""
        return y

    def weights(self, y: Tensor) -> Float[Tensor, "m ..."] | None:
        """Return a non-negative factor for the Λ of each example (m,) or each output (m, C).

        With factors w of the outputs, the curvature is diag(√w) Λ diag(√w). The default, None,
        means that all factors are 1. See ``Weighted``.
        """
        return None

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """Return the curvature Λ(f) of the outputs, positive semidefinite and differentiable.

        Λ is −∇²_f log p(y|f) if this Hessian is the same for all y. Otherwise, override this method
        to return the mean of the Hessian over y, which is the Fisher information. The default
        differentiates ``log_prob`` at the first of ``reference_targets``.

        Args:
            f: Outputs.

        Returns:
            One symmetric matrix per example.

        Raises:
            ConfigurationError: If the Hessian depends on the targets.
        """
        first, second = self.reference_targets(f)
        with self._named_in_errors():  # one example costs next to nothing
            self._check_same_hessian(f[:1].detach(), first[:1], second[:1])

        def total_score(f: Tensor) -> Tensor:
            # Examples are independent, so the derivative of the sum holds each example's Hessian.
            return torch.func.grad(lambda f: self.log_prob(f, first).sum())(f).sum(dim=0)

        # Reverse over reverse: many kernels have no forward mode.
        return -torch.func.jacrev(total_score)(f).transpose(0, 1)

    def check_derivatives(self, f: Float[Tensor, "m C"], y: Tensor, curvature: str = "ggn") -> None:
        """Check that the rows for these data agree with ``log_prob``.

        If the Hessian of the density depends on the target, the class must override ``hessian``.
        For instance, a mask makes the Hessian depend on the target, because the Hessian of a
        masked example is zero. A ``hessian``, ``root`` or ``score`` that is defined in the same
        class as ``log_prob``, or in a subclass, is not checked. A method of a base class was
        written for a different density, so it is compared with derivatives of ``log_prob``.

        Args:
            f: Outputs.
            y: Targets.
            curvature: ``ggn`` if rows come from Λ, or the name of a curvature that uses scores.

        Raises:
            ConfigurationError: If the Hessian depends on the targets, or an inherited ``root`` or
                ``score`` does not match ``log_prob``.
        """
        f = f.detach()
        with self._named_in_errors():
            if curvature == "ggn":
                if "root" in self._inherited:
                    self.at(y[:1])._check_root(f[:1])
                if "hessian" in self._inherited:
                    self._check_same_hessian(f, self.at(y).reference_targets(f)[0], y)
            elif curvature != "hessian" and "score" in self._inherited:
                words = f"The score of {type(self).__name__}"
                if _differ(self.score(f, y), Likelihood.score(self, f, y), words):
                    self._refuse_inherited("score", "the gradient of its log_prob")

    def _named_in_errors(self) -> AbstractContextManager[None]:
        """Return a context for derivatives of ``log_prob``, in which errors name the class."""
        whose = f"log_prob of {type(self).__name__}, or its derivatives at its reference_targets,"
        hint = f". Define reference_targets(f) to return valid targets. {_DEPENDS_ON_TARGETS}"
        return raised_in(whose, hint)

    def _refuse_inherited(self, name: str, what: str) -> None:
        raise ConfigurationError(
            f"{type(self).__name__} inherits {name}, which does not match {what}. Override {name}"
            f" too, or derive the class directly from Likelihood, which computes {name} from"
            " log_prob."
        )

    def _check_root(self, f: Tensor) -> None:
        """Compare a sub-block of R Rᵀ with the same sub-block of Λ, for one example."""
        outputs = torch.arange(min(f.shape[1], _COMPARED_OUTPUTS), device=f.device)
        with torch.no_grad():
            if "hessian" in self._inherited:
                first = self.reference_targets(f)[0]
                unit = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
                rows = [self._times_hessian(f, first, unit[None, d])[0] for d in outputs]
                expected = torch.stack(rows)[:, outputs]
            else:
                expected = self.hessian(f)[0][outputs][:, outputs]
            root, name = self.root(f, outputs[None], "subblock"), type(self).__name__
            vectors = checked_rows(root, f, outputs[None], name).scaled
        products = (vectors.mT @ vectors)[0][outputs][:, outputs]
        if _differ(products, expected, f"The Hessian of {name}"):
            name = "hessian" if type(self).root is Likelihood.root else "root"
            self._refuse_inherited(name, "the Hessian of its log_prob")

    def _check_same_hessian(self, f: Tensor, first: Tensor, y: Tensor) -> None:
        """Compare Hessians at the first reference targets and at y, along a random direction."""
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(f.shape, generator=generator, dtype=torch.float64, device="cpu")
        direction = direction.to(f)
        with torch.no_grad():
            expected = self._times_hessian(f, first, direction)
            product = self._times_hessian(f, y, direction)
        words = f"The Hessian of {type(self).__name__}.log_prob"
        if _differ(product, expected, words):
            worst = int((product - expected).abs().amax(1).argmax())
            target = y[worst].item() if y.ndim == 1 else y[worst].flatten()[:3].tolist()
            raise ConfigurationError(
                f"{words} depends on the targets. At target"
                f" {target}, it differs from the Hessian at reference_targets, which evigrad uses"
                " for all targets. If log_prob masks some examples, remove them from the data set"
                f" and do not count them in num_data. {_DEPENDS_ON_TARGETS}"
            )

    def _times_hessian(self, f: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        """Return −∇²_f log p(y|f) times a vector for each example."""

        def slope(f: Tensor) -> Tensor:
            score = torch.func.grad(lambda f: self.log_prob(f, y).sum())(f)
            return -(score * direction).sum()

        return torch.func.grad(slope)(f)

    def reference_targets(self, f: Float[Tensor, "m C"]) -> tuple[Tensor, Tensor]:
        """Return two sets of valid targets for the default ``hessian``.

        ``hessian`` differentiates at the first set. It raises an error if the Hessian differs at
        the second set. If each target is a single label, the sets are labels 0 and C − 1.
        Otherwise, they are zeros and ones (m, C). Override this method if such targets are not
        valid.
        """
        if self.has_labels:
            label = torch.zeros(len(f), dtype=torch.long, device=f.device)
            return label, label + f.shape[1] - 1
        return torch.zeros_like(f), torch.ones_like(f)

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return the score ∇_f log p(y|f) of each example.

        The score is differentiable in f and in the likelihood's parameters.
        """
        return torch.func.grad(lambda f: self.log_prob(f, y).sum())(f)

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Tensor:
        """Draw targets from p(y|f), without a graph.

        Args:
            f: Outputs.
            generator: Source of all random numbers.

        Raises:
            ConfigurationError: If the likelihood does not define this method.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no sample(f, generator), which the sampled Fisher ('mc')"
            " needs. Define this method, or use another curvature."
        )

    def cdf(self, f: Float[Tensor, "m C"], y: Tensor) -> Tensor | None:
        """Return P(target ≤ y | f) of each target by itself, for quantiles of predictions.

        Args:
            f: Outputs.
            y: Any real numbers in the form of targets, with their conditions.

        Returns:
            Probabilities in the shape of the targets without conditions. The default, None, means
            that there are quantiles only if ``noise_variance`` is defined.
        """
        return None

    def probabilities(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m K"] | None:
        """Return the probability of each class, or of each label, for accuracies and posteriors.

        Args:
            f: Outputs.

        Returns:
            Probabilities between 0 and 1. The default, None, means that targets are not classes.
        """
        return None

    def probit_outputs(
        self, f: Float[Tensor, "m ... C"], variance: Float[Tensor, "m ... C"]
    ) -> Float[Tensor, "m ... C"]:
        """Return outputs whose probabilities approximate the mean over uncertain outputs.

        Args:
            f: Means of the outputs.
            variance: Variances of the outputs.

        Returns:
            f / √(1 + π/8 · variance), the formula of MacKay (1992).

        Raises:
            ConfigurationError: If targets are not classes.
        """
        if not self.is_classification:
            raise ConfigurationError(
                "link='probit' needs a classification likelihood, got"
                f" {type(self).__name__}. Use link='monte-carlo' or 'plug-in'."
            )
        return f * (1.0 + math.pi / 8.0 * variance).rsqrt()

    def noise_variance(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"] | None:
        """Return the variance of the noise if y is f plus independent Gaussian noise.

        The posterior's predictions of y are then Gaussian and do not need ``moments``.

        Args:
            f: Outputs.

        Returns:
            Variances in units of y squared. The default, None, stands for any other density.
        """
        return None

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m D"], Float[Tensor, "m D"], Float[Tensor, "m D"]] | None:
        """Return the mean and variance of numeric targets for uncertain outputs.

        Args:
            f: Mean of Gaussian outputs.
            covariance: Covariance of the outputs of each example.

        Returns:
            The mean of y, the variance of E[y|f] (epistemic), and the mean variance of y given f
            (noise). Variances are in units of y². The default, None, limits the posterior to the
            mean and variance of the outputs.
        """
        return None

    def variance_of_logs(self, covariance: Float[Tensor, "m C C"]) -> Float[Tensor, "m K"] | None:
        """Return the variances of log means or log deviations that ``moments`` averages.

        Predictions warn if the variance of a logarithm is too large for an average. The default,
        None, means that ``moments`` averages no exponentials.

        Args:
            covariance: Covariance of the outputs of each example.
        """
        return None

    def root(
        self,
        f: Float[Tensor, "m C"],
        columns: Int[Tensor, "m k"] | None = None,
        kind: str = "subblock",
    ) -> RootRows:
        """Return columns of a root of Λ, which are the cotangents of the rows, at temperature 1.

        The default computes them from ``hessian``. If the Hessian depends on the likelihood's
        parameters, so do the columns or their scale.

        Args:
            f: Outputs.
            columns: Distinct root columns of each example, from 0 to C − 1. The padding −1 gives a
                row of zeros. None returns a root of the whole Λ, of any kind, with ``num_rows``
                columns.
            kind: Kind of root, one of ``ROOTS`` (see ``evigrad.core.roots``). If outputs are not
                coupled, all kinds give the column √λ_d e_d for output d.

        Returns:
            The columns, differentiable in f.

        Raises:
            ConfigurationError: If the kind is unknown, if ``hessian`` does not return one matrix
                per example, or if Λ has off-diagonal entries although ``couples_outputs`` is False.
            NotFiniteError: If Λ is NaN or infinite.
            NotPositiveDefiniteError: If Λ has a negative eigenvalue.
        """
        check_root(kind)
        if (closed := self._closed_root(f)) is not None:
            return self._from_diagonal(f, closed, columns)
        curvature = self.hessian(f)
        if getattr(curvature, "shape", None) != (*f.shape, f.shape[1]):
            raise ConfigurationError(
                f"hessian of {type(self).__name__} must return one matrix per example, of shape"
                f" (m, {f.shape[1]}, {f.shape[1]}), got {shape_or_type(curvature, len(f))}."
            )
        if self.couples_outputs:
            return RootRows(hessian_rows(curvature, columns, kind))
        check_finite_root(curvature.detach())
        diagonal = curvature.diagonal(dim1=1, dim2=2)
        has_one_output = f.shape[1] == 1
        words = f"The Hessian of {type(self).__name__}"
        if not has_one_output and _differ(
            curvature.detach(), diagonal.detach().diag_embed(), words
        ):
            raise ConfigurationError(
                f"{words} has off-diagonal entries, but"
                " couples_outputs is False. Set couples_outputs = True."
            )
        check_not_negative(diagonal.detach())
        # √ has an infinite derivative at 0.
        positive = diagonal > 0
        root = torch.where(positive, diagonal, 1.0).sqrt() * positive
        return self._from_diagonal(f, root, columns)

    def _from_diagonal(
        self, f: Float[Tensor, "m C"], root: Float[Tensor, "m C"], columns: Tensor | None
    ) -> RootRows:
        """Return columns of a diagonal root whose entries are ``root``.

        The columns of many outputs are unit vectors with a scale, which contains the entries.
        """
        if f.shape[1] <= _MANY_OUTPUTS:
            return RootRows(diagonal_rows(f, root, columns))
        return scaled_units(f, root, columns)

    def num_rows(self, num_outputs: int) -> int:
        """Return the number of columns that ``root`` returns if ``columns`` is None.

        This implementation returns C. A subclass may return a smaller number if Λ has a lower
        rank. The number affects the planned memory, but not the log-determinant.
        """
        return num_outputs

    def row_norms(self, f: Float[Tensor, "m C"], kind: str) -> Float[Tensor, "m C"]:
        """Return the squared norm |R[:, d]|² of each column of a root R of Λ, without a graph.

        The norms measure how much curvature each row can contain. ``kind`` is one of ``ROOTS``.
        """
        check_root(kind)
        if (closed := self._closed_root(f.detach())) is not None:
            return closed.detach().square()
        num_outputs = f.shape[1]
        at_once = max(1, ROOT_BYTES // (f.element_size() * num_outputs**2))
        columns = torch.arange(num_outputs, device=f.device)
        norms = list[Tensor]()
        with torch.no_grad():
            for likelihood, part in self._in_parts(f, at_once):
                all_columns = columns.expand(len(part), -1)
                rows = likelihood.root(part, all_columns, kind)
                rows = checked_rows(rows, part, all_columns, type(self).__name__)
                norms.append(rows.scaled.square().sum(-1))
        return torch.cat(norms)

    def _in_parts(self, f: Tensor, size: int) -> Iterator[tuple["Likelihood", Tensor]]:
        """Yield outputs of at most ``size`` examples at a time, and the likelihood for them."""
        for part in f.split(size):
            yield self, part

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"] | None:
        """Return √λ_d of each output d of a diagonal Λ in closed form, or None if there is none.

        These are C numbers for each example. All columns of a root have C².
        """
        return None

    def _closed_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"] | None:
        """Return the ``_diagonal_root`` if it belongs to the density, or None."""
        if self.couples_outputs or "_diagonal_root" in self._inherited:
            return None
        return self._diagonal_root(f)

    def condensed(self, f: Float[Tensor, "m C"], kind: str) -> Float[Tensor, "m D"]:
        """Return what ``row_scores`` needs from the outputs.

        The result must be small enough to keep for every example. The default returns the outputs
        themselves. If there are conditions, it returns the norms, which depend on the conditions.
        """
        check_root(kind)
        return self.row_norms(f, kind) if self.has_conditions else f

    def row_scores(
        self, condensed: Float[Tensor, "m D"], kind: str
    ) -> tuple[Float[Tensor, "m K"], Float[Tensor, " m"] | None]:
        """Return the norms of ``row_norms``, exact or approximate, from ``condensed`` outputs.

        The results are the norms of the first columns, and the sum of the norms of all later
        columns. The sum is None if it is zero or there are no later columns.
        """
        return (condensed if self.has_conditions else self.row_norms(condensed, kind)), None

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> Mapping[str, Metric]:
        """Return sums of metrics over the batch, for reports.

        Args:
            f: Outputs.
            y: Targets.

        Returns:
            ``log_likelihood`` in nats. For classes with ``probabilities``, also ``correct``, the
            number of examples whose most probable class is correct. If each label has its own
            probability, ``correct`` is the number of correct labels divided by the number of labels
            per example. A pair (sum, count) is divided by its count instead of the number of
            examples, for example if targets are missing.
        """
        sums: dict[str, Metric] = {"log_likelihood": total(self.log_prob(f.detach(), y))}
        if self.is_classification and (correct := self._num_correct(f.detach(), y)) is not None:
            sums["correct"] = correct
        return sums

    def _num_correct(self, f: Tensor, y: Tensor) -> Metric | None:
        """Return how many targets ``probabilities`` predict, or None if it has another density."""
        p = None if "probabilities" in self._inherited else self.probabilities(f)
        if p is None:
            return None
        if p.numel() == y.numel():  # a yes-or-no label per output
            return total((p > 0.5) == (y.view_as(p) > 0.5)) * len(p) / p.numel()
        return total(p.argmax(dim=1) == y.flatten())

    def part(self, prediction: Any, name: str) -> Any:
        """Return a named part of a posterior's prediction, if the likelihood has several parts.

        Raises:
            ConfigurationError: If there is no such part.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no part {name!r}. Only a Joint likelihood has parts."
        )

    def reported(self) -> dict[str, float]:
        """Return the parameters as readable numbers, for histories and reports.

        The default reports each parameter under its name, or each entry under NAME/INDEX. An entry
        ``noise`` is a scale in units of y, such as the standard deviation of a Gaussian.
        """
        named = [by_entry(name, parameter) for name, parameter in self.named_parameters()]
        return {name: value for entries in named for name, value in entries.items()}


def by_entry(name: str, values: Tensor) -> dict[str, float]:
    """Return a dictionary with a number under its name, or a tensor's entries under NAME/INDEX."""
    if values.ndim == 0:
        return {name: values.item()}
    return {f"{name}/{i}": value for i, value in enumerate(values.flatten().tolist())}


def _differ(one: Tensor, other: Tensor, words: str) -> bool:
    """Return whether two Hessians or scores, called ``words``, differ by more than rounding.

    Raises:
        NotFiniteError: If an entry is NaN or infinite.
    """
    if not (is_finite(one) and is_finite(other)):
        raise NotFiniteError(
            f"{words} contains NaN or infinite values. Either the outputs are too large, because"
            " weights, inputs or hyperparameters have diverged, or log_prob has no derivatives at"
            " these outputs and targets. A torch.where has none if an unused branch is NaN or"
            " infinite."
        )
    eps = torch.finfo(one.dtype).eps
    size = torch.maximum(one.abs().amax(), other.abs().amax()) + eps**0.5
    return bool(((one - other).abs() > SAME_HESSIAN * eps**0.5 * size).any())
