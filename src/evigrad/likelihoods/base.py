"""The base class of likelihoods: a class with ``log_prob``; everything else has a default."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from evigrad.core.roots import (
    RootRows,
    check_not_negative,
    check_root,
    diagonal_rows,
    hessian_rows,
)
from evigrad.errors import ConfigurationError, InputError, raised_in

# Two Hessians by autodiff count as equal up to this many √eps of their size.
SAME_HESSIAN = 10.0
# What belongs to one density.
_DERIVED = (
    "hessian",
    "root",
    "_diagonal_root",
    "score",
    "probabilities",
    "noise_variance",
    "moments",
)
# An inherited root is compared with the density on this many outputs of Λ.
_COMPARED_OUTPUTS = 8
# All columns of a root have C² numbers for each datum: those of so many bytes are formed at once.
ROOT_BYTES = 2**26


class Likelihood(nn.Module, ABC):
    """The distribution of a target y given the outputs f of the network.

    Attributes:
        name: As in ``LIKELIHOODS``.
        couples_outputs: Whether Λ has entries off its diagonal.
        is_classification: Whether targets are classes. ``metrics`` counts right ones, if there are
            ``probabilities``.
    """

    name: ClassVar[str]
    couples_outputs: ClassVar[bool] = True
    is_classification: ClassVar[bool] = False
    # Methods that were written for another density than the class has; see ``check_derivatives``.
    # Those of predictions are not used then.
    _inherited: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
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

    @abstractmethod
    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        """The normalised log p(y|f) of each datum in nats, differentiable in f and parameters.

        Args:
            f: Outputs.
            y: Targets that ``validate`` accepts.
        """

    def forward(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        """The same as ``log_prob``."""
        return self.log_prob(f, y)

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        """Refuse targets that do not fit, before anything happens.

        Subclasses call this one first and then check dtype, shape and range.

        Args:
            f_shape: Shape of the outputs, (m, C).
            y: Targets.

        Raises:
            InputError: If the outputs are not (m, C), there are no data, y has another number of
                data or holds NaN or infinite values.
        """
        shape = tuple(f_shape)
        if len(shape) != 2:
            hint = "return f.unsqueeze(1)" if len(shape) == 1 else "flatten or average the rest"
            raise InputError(
                f"The outputs must have the shape (m, C), one row for each datum, not {shape};"
                f" {hint} in the model."
            )
        if not isinstance(y, Tensor):
            raise InputError(f"Targets must be a tensor, not {type(y).__name__}.")
        if 0 in shape:
            raise InputError(f"Nothing to evaluate: the outputs are empty, of shape {shape}.")
        if y.ndim == 0 or len(y) != shape[0]:
            raise InputError(
                f"Outputs {shape} and targets {tuple(y.shape)} do not fit: {shape[0]} data need"
                f" {shape[0]} targets."
            )
        if y.is_floating_point():
            refuse_where(~torch.isfinite(y), y, "is not finite; remove or impute such data")

    def counted(self, y: Tensor) -> Bool[Tensor, " m"] | None:
        """Return which targets (m, ...) count, where outputs (m, …, C) have one at each position.

        It is False for what is no target, as padding, and None, the default, where all count. The
        targets are those before ``validate``.
        """
        return None

    def weights(self, y: Tensor) -> Float[Tensor, " m"] | None:
        """Return non-negative factors of Λ of each datum; None, the default, where all are 1.

        See ``Weighted``.
        """
        return None

    def hessian(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C C"]:
        """The curvature Λ(f) that rows are made of, positive semidefinite and differentiable.

        It is −∇²_f log p(y|f) where that is the same for all y; otherwise override this with its
        mean over y, the Fisher information. The default differentiates ``log_prob`` at the first of
        ``reference_targets``.

        Args:
            f: Outputs.

        Returns:
            One symmetric matrix for each datum.

        Raises:
            ConfigurationError: If the Hessian depends on the targets.
        """
        first, second = self.reference_targets(f)
        self._check_same_hessian(f[:1].detach(), second[:1])  # one datum costs next to nothing

        def total_score(f: Tensor) -> Tensor:
            # Data are independent: the derivative of the sum holds each datum's own Hessian.
            return torch.func.grad(lambda f: self.log_prob(f, first).sum())(f).sum(dim=0)

        # Reverse over reverse: many kernels have no forward mode.
        return -torch.func.jacrev(total_score)(f).transpose(0, 1)

    def check_derivatives(self, f: Float[Tensor, "m C"], y: Tensor, curvature: str = "ggn") -> None:
        """Refuse data whose rows would not be those of ``log_prob``.

        A density is refused whose Hessian depends on the target and that does not override
        ``hessian``; masked data, for example, have a Hessian of zero. A ``hessian``, ``root`` or
        ``score`` that is defined in the class of ``log_prob``, or below it, is trusted; one from
        above it was written for another density, and is compared with derivatives of ``log_prob``.

        Args:
            f: Outputs.
            y: Targets.
            curvature: ``ggn``, whose rows are those of Λ, or one whose rows are scores.

        Raises:
            ConfigurationError: If the Hessian depends on the targets, or an inherited ``root`` or
                ``score`` is not that of ``log_prob``.
        """
        f = f.detach()
        with raised_in(
            f"log_prob of {type(self).__name__}, or what is derived at its reference_targets,"
        ):
            if curvature == "ggn":
                if "root" in self._inherited:
                    self._check_root(f[:1])
                if "hessian" in self._inherited:
                    self._check_same_hessian(f, y)
            elif curvature != "hessian" and "score" in self._inherited:
                if _differ(self.score(f, y), Likelihood.score(self, f, y)):
                    self._refuse_inherited("score", "the gradient of its log_prob")

    def _refuse_inherited(self, name: str, what: str) -> None:
        raise ConfigurationError(
            f"{type(self).__name__} inherits {name}, which is not {what}: override it too, or make"
            " it a Likelihood without other base classes, for which it is derived."
        )

    def _check_root(self, f: Tensor) -> None:
        """Compare a sub-block of R Rᵀ with that of Λ, for one datum."""
        outputs = torch.arange(min(f.shape[1], _COMPARED_OUTPUTS), device=f.device)
        with torch.no_grad():
            if "hessian" in self._inherited:
                first = self.reference_targets(f)[0]
                unit = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
                rows = [self._times_hessian(f, first, unit[None, d])[0] for d in outputs]
                expected = torch.stack(rows)[:, outputs]
            else:
                expected = self.hessian(f)[0][outputs][:, outputs]
            vectors = self.root(f, outputs[None], "subblock").scaled
        if _differ((vectors.mT @ vectors)[0][outputs][:, outputs], expected):
            name = "hessian" if type(self).root is Likelihood.root else "root"
            self._refuse_inherited(name, "that of the Hessian of its log_prob")

    def _check_same_hessian(self, f: Tensor, y: Tensor) -> None:
        """Compare Hessians at targets and at reference targets along a random direction."""
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(f.shape, generator=generator, dtype=torch.float64, device="cpu")
        direction = direction.to(f)
        with torch.no_grad():
            expected = self._times_hessian(f, self.reference_targets(f)[0], direction)
            product = self._times_hessian(f, y, direction)
        if _differ(product, expected):
            worst = int((product - expected).abs().amax(1).argmax())
            target = y[worst].item() if y.ndim == 1 else y[worst].flatten()[:3].tolist()
            raise ConfigurationError(
                f"The Hessian of {type(self).__name__}.log_prob depends on the targets: at"
                f" target {target} it is another than at reference_targets, of which rows are made."
                " Leave masked data out of the data set (num_data counts the others); where no"
                " target is special, override hessian(f) with a matrix that depends on none, such"
                " as the Fisher information."
            )

    def _times_hessian(self, f: Tensor, y: Tensor, direction: Tensor) -> Tensor:
        """−∇²_f log p(y|f) times a vector for each datum."""

        def slope(f: Tensor) -> Tensor:
            score = torch.func.grad(lambda f: self.log_prob(f, y).sum())(f)
            return -(score * direction).sum()

        return torch.func.grad(slope)(f)

    def reference_targets(self, f: Float[Tensor, "m C"]) -> tuple[Tensor, Tensor]:
        """Return two sets of targets that ``validate`` accepts, for the default ``hessian``.

        That differentiates at the first, and is refused where the second has another Hessian. These
        are class labels 0 and C − 1 where the outputs are the scores of one label, and else zeros
        and ones (m, C). Override this where those are no targets.
        """
        if self.is_classification and self.couples_outputs:
            label = torch.zeros(len(f), dtype=torch.long, device=f.device)
            return label, label + f.shape[1] - 1
        return torch.zeros_like(f), torch.ones_like(f)

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """The score ∇_f log p(y|f) of each datum, differentiable in f and parameters."""
        return torch.func.grad(lambda f: self.log_prob(f, y).sum())(f)

    def sample(self, f: Float[Tensor, "m C"], generator: torch.Generator) -> Tensor:
        """Draw targets from p(y|f), without a graph.

        Args:
            f: Outputs.
            generator: The only source of randomness.

        Raises:
            ConfigurationError: If the likelihood does not define it.
        """
        raise ConfigurationError(
            f"{type(self).__name__} has no sample(f, generator), which the sampled Fisher ('mc')"
            " needs; add one or take another curvature."
        )

    def probabilities(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m K"] | None:
        """The probability of each class, or of each label, for accuracies and posteriors.

        Args:
            f: Outputs.

        Returns:
            Numbers in 0 … 1, or None where targets are no classes, which is the default.
        """
        return None

    def noise_variance(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"] | None:
        """The variance of y where that is f plus independent normal noise.

        The posterior's predictions of y are normal then, and need no ``moments``.

        Args:
            f: Outputs.

        Returns:
            Variances in the units of y squared, or None for other densities, which is the default.
        """
        return None

    def moments(
        self, f: Float[Tensor, "m C"], covariance: Float[Tensor, "m C C"]
    ) -> tuple[Float[Tensor, "m D"], Float[Tensor, "m D"], Float[Tensor, "m D"]] | None:
        """Mean and variance of targets that are numbers, where the outputs are uncertain.

        Args:
            f: The mean of normally distributed outputs.
            covariance: Their covariance, for each datum.

        Returns:
            The mean of y, the variance of its mean E[y|f] (epistemic), and the mean of its variance
            given f (noise), in the units of y and of y². None, the default, where the posterior
            says mean and variance of the outputs only.
        """
        return None

    def root(
        self,
        f: Float[Tensor, "m C"],
        columns: Int[Tensor, "m k"] | None = None,
        kind: str = "subblock",
    ) -> RootRows:
        """Columns of a root of Λ: the cotangents of the rows, at temperature 1.

        The default computes them from ``hessian``; if that depends on the likelihood's parameters,
        so do the vectors.

        Args:
            f: Outputs.
            columns: The root columns of each datum, distinct in each row, in 0 … C − 1; −1 is
                padding and gives a row of zeros. None takes a root of the whole Λ of any kind,
                with ``num_rows`` columns.
            kind: One of ``ROOTS`` (see ``evigrad.core.roots``). Where outputs are not
                coupled, all kinds give the column e_d √λ_d for output d.

        Returns:
            The rows, differentiable in f.

        Raises:
            ConfigurationError: If the kind is unknown, or Λ has entries off its diagonal although
                ``couples_outputs`` is False.
            NotPositiveDefiniteError: If Λ has a negative eigenvalue.
        """
        check_root(kind)
        if (closed := self._closed_root(f)) is not None:
            return RootRows(diagonal_rows(f, closed, columns))
        curvature = self.hessian(f)
        if self.couples_outputs:
            return RootRows(hessian_rows(curvature, columns, kind))
        diagonal = curvature.diagonal(dim1=1, dim2=2)
        if _differ(curvature.detach(), diagonal.detach().diag_embed()):
            raise ConfigurationError(
                f"The Hessian of {type(self).__name__} has entries off its diagonal: set"
                " couples_outputs = True."
            )
        check_not_negative(diagonal.detach())
        # No derivative of √ at 0, where it is infinite.
        positive = diagonal > 0
        root = torch.where(positive, diagonal, 1.0).sqrt() * positive
        return RootRows(diagonal_rows(f, root, columns))

    def num_rows(self, num_outputs: int) -> int:
        """Return the number of columns of ``root`` without a list of columns.

        By default it is C; it is less where Λ has a smaller rank. Memory is planned by it, and the
        log-determinant does not depend on it.
        """
        return num_outputs

    def row_norms(self, f: Float[Tensor, "m C"], kind: str) -> Float[Tensor, "m C"]:
        """Return |R[:, d]|² of each column of a root of Λ, without a graph.

        That is how much curvature each row can hold. ``kind`` is one of ``ROOTS``.
        """
        check_root(kind)
        if (closed := self._closed_root(f.detach())) is not None:
            return closed.detach().square()
        num_outputs = f.shape[1]
        at_once = max(1, ROOT_BYTES // (f.element_size() * num_outputs**2))
        columns = torch.arange(num_outputs, device=f.device)
        with torch.no_grad():
            roots = (
                self.root(part, columns.expand(len(part), -1), kind) for part in f.split(at_once)
            )
            return torch.cat([root.scaled.square().sum(-1) for root in roots])

    def _diagonal_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"] | None:
        """Return √λ_d of each output d of a diagonal Λ in closed form, or None if there is none.

        These are C numbers for each example. All columns of a root have C².
        """
        return None

    def _closed_root(self, f: Float[Tensor, "m C"]) -> Float[Tensor, "m C"] | None:
        """The ``_diagonal_root`` if it is that of the density, or None."""
        if self.couples_outputs or "_diagonal_root" in self._inherited:
            return None
        return self._diagonal_root(f)

    def condensed(self, f: Float[Tensor, "m C"], kind: str) -> Float[Tensor, "m D"]:
        """Return what ``row_scores`` needs of the outputs, small enough to keep for every datum.

        By default these are the outputs themselves.
        """
        check_root(kind)
        return f

    def row_scores(
        self, condensed: Float[Tensor, "m D"], kind: str
    ) -> tuple[Float[Tensor, "m K"], Float[Tensor, " m"] | None]:
        """Return the norms of ``row_norms``, maybe approximate, from ``condensed`` outputs.

        They are those of the first columns, and the sum of all further ones; None for the sum where
        the others are always zero, or there are none.
        """
        return self.row_norms(condensed, kind), None

    def metrics(self, f: Float[Tensor, "m C"], y: Tensor) -> dict[str, float]:
        """Sums over the batch, for reports.

        Args:
            f: Outputs.
            y: Targets.

        Returns:
            ``log_likelihood`` in nats. For classes that have ``probabilities`` also ``correct``,
            the number of examples whose most probable class is the right one. With a probability
            for each label it is the number of right labels, divided by the labels of an example.
        """
        sums = {"log_likelihood": total(self.log_prob(f.detach(), y))}
        if self.is_classification and (correct := self._num_correct(f.detach(), y)) is not None:
            sums["correct"] = correct
        return sums

    def _num_correct(self, f: Tensor, y: Tensor) -> float | None:
        """How many targets ``probabilities`` predict; None if they are not of this density."""
        p = None if "probabilities" in self._inherited else self.probabilities(f)
        if p is None:
            return None
        if p.numel() == y.numel():  # yes or no, for each label
            return total((p > 0.5) == (y.view_as(p) > 0.5)) * len(p) / p.numel()
        return total(p.argmax(dim=1) == y.flatten())

    def reported(self) -> dict[str, float]:
        """Return the parameters as numbers that a reader knows, for histories and reports.

        By default it is each parameter under its name, or each entry under NAME/INDEX. ``noise`` is
        a standard deviation in the units of y.
        """
        named = [by_entry(name, parameter) for name, parameter in self.named_parameters()]
        return {name: value for entries in named for name, value in entries.items()}


def by_entry(name: str, values: Tensor) -> dict[str, float]:
    """A number under its name, or the entries of a tensor, each under NAME/INDEX."""
    if values.ndim == 0:
        return {name: values.item()}
    return {f"{name}/{i}": value for i, value in enumerate(values.flatten().tolist())}


def check_one_per_output(f_shape: Sequence[int], y: Tensor) -> None:
    """Refuse targets that are not (m, C): a missing axis would silently broadcast to m × m."""
    if tuple(y.shape) != tuple(f_shape):
        hint = "; use y.unsqueeze(-1)" if y.ndim == 1 and f_shape[1] == 1 else ""
        raise InputError(
            f"Targets must have the shape of the outputs, {tuple(f_shape)}, not"
            f" {tuple(y.shape)}{hint}."
        )


def refuse_where(wrong: Tensor, y: Tensor, words: str) -> None:
    """Refuse targets that are wrong somewhere, and name the first."""
    if bool(wrong.any()):
        where = [int(i) for i in wrong.nonzero()[0]]
        raise InputError(
            f"Target {y[tuple(where)].item()} at index {where[0] if len(where) == 1 else where}"
            f" {words}."
        )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two Hessians differ by more than rounding; NaN differs from anything."""
    eps = torch.finfo(one.dtype).eps
    size = torch.maximum(one.abs().amax(), other.abs().amax()) + eps**0.5
    # Not ``any(… > …)``, which NaN would pass.
    return not bool(((one - other).abs() <= SAME_HESSIAN * eps**0.5 * size).all())


def total(values: Tensor) -> float:
    """The sum, in float64: float32 would lose digits over a batch."""
    return float(values.detach().double().sum())
