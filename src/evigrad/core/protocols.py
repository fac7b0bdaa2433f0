"""Protocols of the subpackages that the core calls.

A ``Sweep`` takes a block through the network and returns a ``Linearization`` for each
``MicroBatch``. A ``Density`` and a ``Prior`` are the statistical model.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from evigrad.core.block import Block, MicroBatch
from evigrad.core.roots import RootRows

if TYPE_CHECKING:  # the package of these modules imports this module
    from evigrad.core.curvature.kronecker import KroneckerUse
    from evigrad.core.curvature.rows import Rows

State = TypeVar("State")


# ------------------------------------------------------------ the network


@runtime_checkable
class Linearization(Protocol):
    """One forward pass of a model over m examples, and rows vᵀ J of its Jacobian J.

    If the pass has a graph, the rows are differentiable in the vectors v, the inputs and the
    hyperparameters of the pass, but not in the weights.
    """

    @property
    def outputs(self) -> Float[Tensor, "m C"]:
        """The outputs f(x)."""
        ...

    @property
    def mixed(self) -> bool:
        """Whether the pass ran under autocast."""
        ...

    def is_closed(self, name: str) -> bool:
        """Return whether rows of the parameter are computed by a closed form."""
        ...

    def without_graph(self, root: RootRows) -> tuple["Linearization", RootRows]:
        """Return this pass and the cotangents ``root``, both without a graph."""
        ...

    def rows(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the rows ``vectors[n, j]ᵀ ∂f(x_n)/∂parameter`` by parameter name.

        Their shape is (m, k, *parameter shape).
        """
        ...

    def deferred_rows(
        self, root: RootRows, names: Sequence[str], contracted: Collection[str] = ()
    ) -> dict[str, "Rows"]:
        """Return the rows of each parameter without padding, computed only when they are read.

        For the parameters in ``contracted``, rows are stored as layer inputs and output gradients
        if the pass has these factors.
        """
        ...

    def factors(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str]
    ) -> "dict[str, list[KroneckerUse]]":
        """Return the Kronecker factors of the rows by parameter name, one item per use."""
        ...

    def inner(
        self, vectors: Float[Tensor, "m k C"], cotangents: Mapping[str, Tensor]
    ) -> Float[Tensor, ""]:
        """Return the inner product of the rows with ``cotangents``, which get no gradient.

        Cotangents have the shape (m, k, *parameter shape).
        """
        ...

    def products(
        self, vectors: Float[Tensor, "m k C"], names: Sequence[str]
    ) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return the factors of the rows by parameter name.

        They are layer inputs (m, T, i) and output gradients (m, k, T, o) at T positions.
        """
        ...


class Purpose(Enum):
    """The use of a pass's statistic, which determines what the pass stores.

    - ``VALUE``: the log evidence and its gradient with respect to the prior, once or repeatedly.
    - ``STEPS``: like ``VALUE``, but parameters of the likelihood that scale the rows change too.
    - ``DIFFERENTIATE``: the gradient with respect to all hyperparameters, by a second pass.
    - ``ROWS``: products with other rows, for instance with rows of test inputs.
    """

    VALUE = "value"
    STEPS = "steps"
    DIFFERENTIATE = "differentiate"
    ROWS = "rows"


# With these purposes, nothing but log-determinants is computed from a statistic.
LOG_DETS = (Purpose.VALUE, Purpose.STEPS)


class Sweep(Protocol):
    """Passes of a block through the network, always in the same micro-batches."""

    @property
    def purpose(self) -> Purpose:
        """The purpose of the first pass."""
        ...

    @property
    def block(self) -> Block:
        """The block that goes through the network."""
        ...

    def fold(
        self, step: Callable[[State, MicroBatch], State], start: State, *, graph: bool = False
    ) -> State:
        """Return the final state after applying ``step`` to each micro-batch in turn.

        ``step`` must return the next state without changing the old state, so that a step can be
        repeated with fewer examples. ``graph`` determines whether the micro-batches have autograd
        graphs.
        """
        ...

    def linearize(self, batch: MicroBatch, *, graph: bool) -> Linearization:
        """Return the linearized pass of a micro-batch, with a graph if ``graph`` is True."""
        ...

    def holds_graph(self, batch: MicroBatch) -> bool:
        """Return whether the graph of a micro-batch with all rows is kept for the second pass."""
        ...

    def outputs(self, batch: MicroBatch) -> Float[Tensor, "m C"]:
        """Return only the outputs of a micro-batch, with a graph if gradients are enabled."""
        ...

    def log_probabilities(self, f: Float[Tensor, "m C"], batch: MicroBatch) -> Float[Tensor, " m"]:
        """Return log p(y_n|f_n) of each example of a micro-batch in nats, after any checks."""
        ...

    def total(self, statistic: Any) -> Any:
        """Return the sum of the statistics of the ranks that share the block, after any checks."""
        ...


# ------------------------------------------------------------ the statistical model


class Density(Protocol):
    """The density p(y|f), with roots of the negative Hessian of log p(y|f) with respect to f."""

    couples_outputs: ClassVar[bool]

    def at(self, y: Tensor) -> "Density":
        """Return the density under the known facts about examples with targets y."""
        ...

    def parameters(self) -> Iterable[Tensor]:
        """Return the parameters of the density."""
        ...

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        """Return log p(y_n|f_n) of each example, in nats."""
        ...

    def root(
        self, f: Float[Tensor, "m C"], columns: Int[Tensor, "m k"] | None, kind: str
    ) -> RootRows:
        """Return columns of a root of −∇²_f log p(y|f). ``kind`` is one of ``ROOTS``."""
        ...

    def score(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, "m C"]:
        """Return ∇_f log p(y|f)."""
        ...

    def weights(self, y: Tensor) -> Float[Tensor, " m"] | None:
        """Return the weight of each example, or None if all weights are 1."""
        ...


class Prior(Protocol):
    """The prior N(w₀, P0⁻¹) of the weights, with a diagonal precision matrix P0."""

    def precisions(self) -> Mapping[str, Tensor]:
        """Return the precisions by weight name: one number, or a tensor that broadcasts to it."""
        ...

    def quadratic(self, weights: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return (w − w₀)ᵀ P0 (w − w₀)."""
        ...

    def log_hyperprior(self) -> Float[Tensor, ""]:
        """Return the log density of the hyperparameters."""
        ...
