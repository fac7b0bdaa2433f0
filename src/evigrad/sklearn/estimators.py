"""The scikit-learn estimators ``EvidenceClassifier`` and ``EvidenceRegressor``."""

import copy
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import getdoc, signature
from statistics import fmean
from typing import Any, Literal, ParamSpec, Self, TypeVar, cast, overload

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier
from sklearn.utils import Tags, check_array, check_random_state, check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from evigrad.core.names import AUTO
from evigrad.data.dataset import stratified_split
from evigrad.errors import ConfigurationError, EvigradWarning, InputError, nearest
from evigrad.likelihoods import Likelihood, Ordinal, Weighted
from evigrad.likelihoods.calls import class_probabilities
from evigrad.likelihoods.noisy import Noisy
from evigrad.likelihoods.poisson import Counts
from evigrad.likelihoods.weighted import unweighted
from evigrad.measure.metrics import probe_outputs
from evigrad.models import make_model
from evigrad.network.arguments import check_mode
from evigrad.network.modes import seeded
from evigrad.passes.checks import check_choice
from evigrad.posterior import DEFAULT_STRUCTURE, STRUCTURES, Posterior, Predictive
from evigrad.posterior.quantiles import check_levels
from evigrad.priors import GaussianPrior
from evigrad.sklearn.table import (
    AT_ONCE,
    Columns,
    Encoding,
    check_constants,
    column_groups,
    importances,
    in_order,
    is_frame,
    refuse_numbers,
    refuse_targets,
    weights_of_classes,
)
from evigrad.sklearn.targets import (
    Units,
    beside,
    deviance_explained,
    for_classes,
    for_numbers,
    in_columns,
)
from evigrad.training import FitResult, fit
from evigrad.training.data_checks import FREQUENT_VALUE, frequent_value
from evigrad.training.plan import plan_schedule, planned
from evigrad.training.settings import GROUPS, Schedule, grouped

P = ParamSpec("P")
T = TypeVar("T")
Module = nn.Module | Callable[[int, int], nn.Module]

UNKNOWN = ("error", "ignore")
# ``log_evidence_`` is a mean over at most this many blocks.
_BLOCKS = 10
# Rows of whole-number weights are repeated if the table does not grow by more than this factor.
_MOST_REPEATED = 10
# Keywords of ``fit`` that the estimators set themselves, and the arguments that set them.
_OWN = {
    "model": "module=...",
    "train": "fit(X, y)",
    "likelihood": "likelihood=...",
    "seed": "random_state=...",
    "progress": "verbose=...",
}
# Number of rounds and steps per round if each column has a precision. With fewer rounds of more
# steps, irrelevant columns keep more of their weight.
_ROUNDS, _STEPS = 75, 2


class ParameterError(ConfigurationError, TypeError):
    """Error for an unknown keyword argument. It is also a TypeError, which Python would raise."""


def _refusing_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Raise ParameterError for unknown keywords of a constructor, and keep its signature."""

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        cast("EvidenceEstimator", args[0])._refuse_unknown(kwargs)
        init(*args, **kwargs)

    return checked


class EvidenceEstimator(BaseEstimator):
    """Base class of ``EvidenceClassifier`` and ``EvidenceRegressor``, which share these arguments.

    Numbers are standardized, and categories of a ``pandas.DataFrame`` (dtype ``category``,
    ``string`` or ``object``) are one-hot encoded. The prior precisions of each column and layer are
    learned by maximizing the marginal likelihood of the training table. You need no validation
    split and no hyperparameter search.

    Args:
        hidden_layer_sizes: Number of units of each hidden layer. An empty sequence makes the
            network linear. Default: (64, 64).
        activation: Nonlinearity after each hidden layer: relu, tanh, silu, gelu, elu, softplus or
            sigmoid.
        likelihood: Distribution of the targets: a name, or a ``Likelihood``, of which a copy is
            trained.
        module: Network to use instead of these layers: a torch module from inputs (n, inputs) to
            outputs. A classifier needs outputs (n, classes), or (n, 1) for ordinal. A regressor
            needs outputs (n, targets), or (n, 2 × targets) if the network predicts the noise. You
            can also pass a function that makes a module from the numbers of inputs and outputs. A
            copy of the module is trained, with the module's data type and on its device.
        relevance: Whether a layerwise prior has a precision for each input in the first layer, so
            that the evidence can switch off columns. Other priors stay as they are.
        estimator: Name of the evidence estimator. None learns only the weights.
        prior: Which weights share a precision: layerwise, scalar, diagonal or a ``GaussianPrior``.
        posterior: Structure of the posterior: kfac, last-layer, diag, full or ntk.
        epochs: Number of passes over the training table. Default: see ``evigrad.Schedule``.
        batch_size: Number of rows per optimizer step.
        learning_rate: Learning rate of the weights at the start. Default: see
            ``evigrad.Optimization``.
        validation_fraction: Share of the training rows, such as 0.5, that choose the weight of the
            log-determinant, which scales all learned precisions. Afterwards, the network trains on
            all rows. This takes about four times as long. See ``evigrad.fit``. Default: weight 1.
        settings: Other settings of ``evigrad.fit`` and its groups by name, such as
            ``{"burn_in": 20, "temperature": 0.5}``.
        handle_unknown: How to treat categories that did not occur in training: ``"error"`` raises
            an error, and ``"ignore"`` sets all inputs of the column to zero.
        random_state: Seed of the initial weights and of all random draws in training.
        verbose: Whether to show the progress of training.

    Attributes:
        feature_importances_: Importance of each column of the table, (d,). The sum is 1. It is the
            root mean square derivative of the network's outputs with respect to the column, times
            the column's standard deviation.
        log_evidence_: Estimate of the log evidence of the training table, in nats for all rows, for
            targets in their own units. NaN without an estimator. With randomly drawn rows, it is a
            lower bound on average. A weight that ``validation_fraction`` chose counts here too.
        posterior_: The ``evigrad.Posterior`` of the network's weights, or None.
        result_: The ``evigrad.FitResult``: network, evidence (with precisions) and history.
        n_features_in_: Number of columns of the training table, d.
        feature_names_in_: Names of the columns, if all are strings.

    See also: docs/sklearn.md.
    """

    @_refusing_unknown
    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (64, 64),
        activation: str = "relu",
        *,
        likelihood: str | Likelihood = "gaussian",
        module: Module | None = None,
        relevance: bool = True,
        estimator: str | None = AUTO,
        prior: str | GaussianPrior = "layerwise",
        posterior: str | None = None,
        epochs: int | None = None,
        batch_size: int = 100,
        learning_rate: float | None = None,
        validation_fraction: float | None = None,
        settings: Mapping[str, Any] | None = None,
        handle_unknown: str = "error",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.likelihood = likelihood
        self.module = module
        self.relevance = relevance
        self.estimator = estimator
        self.prior = prior
        self.posterior = posterior
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.validation_fraction = validation_fraction
        self.settings = settings
        self.handle_unknown = handle_unknown
        self.random_state = random_state
        self.verbose = verbose

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name.

        Args:
            **params: Parameters of the estimator.

        Returns:
            The estimator itself.

        Raises:
            ConfigurationError: If the estimator does not have one of the parameters.
        """
        self._refuse_unknown(params)
        return super().set_params(**params)

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str]) -> None:
        """Raise ParameterError for parameters that the estimator does not have."""
        parameters = cls._get_param_names()
        for name in names:
            if name == "class_weight" and name not in parameters:
                raise ParameterError(
                    f"{cls.__name__} has no class_weight, because its targets are numbers. Pass row"
                    " weights to fit() instead: fit(X, y, sample_weight=...)."
                )
            if name.partition("__")[0] not in parameters:
                raise ParameterError(
                    f"Invalid parameter '{name}' of {cls.__name__}.{nearest(name, parameters)}"
                    f" Use one of {', '.join(parameters)}."
                )

    # ------------------------------------------------------------ tables

    def _training_table(
        self, X: Any, y: Any, sample_weight: Any, **checks: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return the table as numbers, the targets, and the weights or None if all are equal."""
        check_choice("handle_unknown", self.handle_unknown, UNKNOWN)
        self._columns = Columns(X, self.handle_unknown == "ignore")
        refuse_targets(y, is_classifier(self))
        checks["ensure_all_finite"] = False  # for X, whose columns are named in our own check
        if is_frame(X):
            validate_data(self, X, y, skip_check_array=True)
            X, y = check_X_y(self._columns.numbers(X), y, estimator=self, **checks)
        else:
            X, y = validate_data(self, X, y, dtype=np.float64, **checks)
            refuse_numbers(X)
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
            if (weights < 0).any() or not (weights > 0).any():
                raise InputError(
                    "sample_weight must be non-negative, and positive for at least one row. Remove"
                    " rows with negative weights, or give some rows a positive weight."
                )
        weights = self._with_class_weights(weights, y)
        if weights is None:
            return X, y, None
        counted = weights > 0
        X, y, weights = X[counted], y[counted], weights[counted]
        is_whole = (weights == weights.round()).all()
        # Copies of a row could be on both sides of a split.
        is_split = self.validation_fraction is not None
        if is_whole and not is_split and weights.sum() <= _MOST_REPEATED * len(weights):
            times = weights.astype(np.int64)
            return X.repeat(times, axis=0), y.repeat(times, axis=0), None
        return X, y, weights

    def _with_class_weights(self, weights: np.ndarray | None, y: np.ndarray) -> np.ndarray | None:
        """Return the weights of rows. The classifier multiplies them by the weights of classes."""
        return weights

    def inputs(self, X: Any) -> Tensor:
        """Return the inputs of the network ``result_.model`` for a table.

        Args:
            X: Table with the columns of the training table.

        Returns:
            Inputs (n, inputs): first standardized numbers, then zeros and ones for categories. They
            have the network's data type and are on the network's device.

        Raises:
            ValueError: If the table does not match the training table.
        """
        check_is_fitted(self)
        if is_frame(X):
            validate_data(self, X, reset=False, skip_check_array=True)
            X = check_array(self._columns.numbers(X), estimator=self, input_name="X")
        else:
            numbers = self._columns.numbers(X)
            X = validate_data(self, numbers, dtype=np.float64, reset=False, ensure_all_finite=False)
            X = np.where(self._encoding.is_constant, 0.0, X)
            refuse_numbers(X)
        return self._tensor(self._encoding(X), self.result_.model)

    @staticmethod
    def _tensor(values: np.ndarray, model: nn.Module) -> Tensor:
        return torch.as_tensor(values, device="cpu").to(next(model.parameters()))

    # ------------------------------------------------------------ training

    def _network(self, num_outputs: int, seed: int) -> nn.Module:
        """Return the network, which sets the type and device of everything else."""
        num_inputs = len(self._encoding.feature_of)
        sizes = np.atleast_1d(self.hidden_layer_sizes).astype(int).tolist()
        self._check_layers(sizes)
        if self.module is None:
            network = make_model(
                "mlp",
                (num_inputs,),
                num_outputs,
                seed,
                hidden=sizes,
                activation=self.activation,
            ).double()
        elif isinstance(self.module, nn.Module):
            network = copy.deepcopy(self.module)
        else:
            network: Any = self.module
            if callable(network):
                with seeded(seed, torch.device("cpu")):
                    network = network(num_inputs, num_outputs)
            if not isinstance(network, nn.Module):
                raise ConfigurationError(
                    "module must be a torch module, or a function that maps the numbers of inputs"
                    f" and outputs to a module, got {network!r}."
                )
        if not any(True for _ in network.parameters()):
            raise ConfigurationError(
                "module must have parameters to train, got none. Use a module with weights."
            )
        return network

    def _check_layers(self, sizes: list[int]) -> None:
        """Raise ConfigurationError for a setting of layers that the network does not have."""
        defaults = {name: p.default for name, p in signature(type(self)).parameters.items()}
        is_custom = self.module is not None
        changed = {
            "hidden_layer_sizes": is_custom and sizes != [*defaults["hidden_layer_sizes"]],
            "activation": (is_custom or not sizes) and self.activation != defaults["activation"],
        }
        for name in (name for name, is_set in changed.items() if is_set):
            words = "a custom module" if is_custom else "hidden_layer_sizes=()"
            raise ConfigurationError(
                f"{name} has no effect with {words}, got {getattr(self, name)!r}. Remove {name}, or"
                " set it in the module or with hidden layers."
            )

    def _fit(
        self,
        numbers: np.ndarray,
        targets: np.ndarray,
        weights: np.ndarray | None,
        likelihood: Likelihood,
        num_outputs: int,
        posterior: str | None,
    ) -> None:
        """Train and learn. ``targets`` are in the likelihood's format."""
        check_mode()
        if posterior is not None:  # raises before training if it could not be made afterwards
            check_choice("posterior", posterior, list(STRUCTURES))
            prior = self.prior.structure if isinstance(self.prior, GaussianPrior) else self.prior
            if (posterior, prior) == ("kfac", "diagonal"):
                raise ConfigurationError(
                    "posterior='kfac' needs one precision per weight matrix, but a diagonal prior"
                    " has one per weight. Use posterior='diag' or prior='layerwise'."
                )
        self._encoding = Encoding(numbers, self._columns.categories, weights)
        self._columns.ignored = self._encoding.is_constant
        names = getattr(self, "feature_names_in_", range(numbers.shape[1]))
        check_constants(self._encoding.is_constant, names, len(numbers))
        state = self.random_state
        if not isinstance(state, int | np.integer):
            state = check_random_state(state).randint(2**31 - 1)
        model = self._network(num_outputs, int(state))
        x = self._tensor(self._encoding(numbers), model)
        if (output_shape := tuple(probe_outputs(model, x[:2]).shape[1:])) != (num_outputs,):
            raise ConfigurationError(
                f"module must have outputs of shape ({num_outputs},) per row, got {output_shape}."
                " Change its last layer."
            )
        y = torch.as_tensor(targets, device="cpu").to(x.device)
        y = y.to(x.dtype) if y.is_floating_point() else y
        if weights is not None:
            likelihood = Weighted(likelihood)
            y = likelihood.targets(y, torch.as_tensor(weights, device="cpu")).to(x)
        settings = self._checked_settings()
        prior, rounds = copy.deepcopy(self.prior), {}  # because fit binds it to the network
        if self.relevance and self.estimator is not None and prior == "layerwise":
            prior = column_groups(model, x.shape[1], settings.get("hyperparameters", []))
            if not {"every", "steps"} & settings.keys():
                schedule = Schedule(epochs=self.epochs, batch_size=self.batch_size)
                epochs = planned(plan_schedule(schedule, len(x)).epochs)
                rounds = {"every": max(1, epochs // _ROUNDS), "steps": _STEPS}
        options = {
            "estimator": self.estimator,
            "prior": prior,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr": self.learning_rate,
            "validation_fraction": self.validation_fraction,
            **rounds,
            **settings,
        }
        with warnings.catch_warnings():  # EvidenceRegressor.fit warns in the units of the targets
            warnings.filterwarnings("ignore", FREQUENT_VALUE, EvigradWarning)
            self.result_: FitResult = fit(
                model,
                (x, y),
                likelihood=likelihood,
                seed=int(state),
                progress=bool(self.verbose),
                **grouped(options),
            )
        evidence = self.result_.evidence
        self.log_evidence_ = float("nan")
        if self.result_.estimator is not None:
            blocks = evidence.blocks((x, y)).round(_BLOCKS)
            self.log_evidence_ = fmean(evidence.estimate(block).log_evidence for block in blocks)
        self.feature_importances_ = importances(
            self.result_.model, x, self._encoding.feature_of, weights
        )
        self.posterior_: Posterior | None = None
        if posterior is not None:
            self.posterior_ = evidence.posterior((x, y), structure=posterior)

    def _checked_settings(self) -> Mapping[str, Any]:
        settings = self.settings or {}
        single = {setting.name for kind in GROUPS.values() for setting in fields(kind)}
        allowed_names = single | {*signature(fit).parameters} - {*_OWN, *GROUPS}
        for name in settings:
            if name in _OWN:
                raise ConfigurationError(
                    f"settings must not contain '{name}', which is an argument of"
                    f" {type(self).__name__}. Use {_OWN[name]}."
                )
            if name not in allowed_names:
                raise ConfigurationError(
                    "Each key of settings must be an argument of evigrad.fit or a field of Laplace,"
                    " Schedule, Optimization or Memory, got"
                    f" '{name}'.{nearest(name, allowed_names)}"
                )
            argument = {"lr": "learning_rate"}.get(name, name)
            if argument in self._get_param_names():
                raise ConfigurationError(
                    f"settings must not contain '{name}', which is the argument {argument} of"
                    f" {type(self).__name__}. Use {argument}={settings[name]!r}."
                )
        return settings

    def _in_parts(self, X: Any, function: Callable[[Tensor], Tensor]) -> np.ndarray:
        """Return the values of a row-wise function of the network's inputs, part by part."""
        outputs = [function(part) for part in self.inputs(X).split(AT_ONCE)]
        return torch.cat(outputs).double().cpu().numpy()


def _with_shared_docstring(kind: type[T]) -> type[T]:
    """Return the class with the descriptions of ``EvidenceEstimator`` in its docstring.

    They are for ``help`` and notebooks. The API reference is made from the source, where it reads
    both classes.

    Returns:
        The class.
    """
    for title in ("Args", "Attributes"):
        block, special = _described(kind, title)
        _, shared = _described(EvidenceEstimator, title)
        entries = "".join(f"    {entry}" for entry in (shared | special).values())
        kind.__doc__ = (getdoc(kind) or "").replace(block, entries)
    return kind


def _described(kind: type, title: str) -> tuple[str, dict[str, str]]:
    """Return the block of a docstring below a title, and its entries by name."""
    section = re.search(rf"^{title}:\n((?:    .*\n)*)", getdoc(kind) or "", re.MULTILINE)
    block = section[1] if section else ""
    entries = re.split(r"^    (?=\w)", block, flags=re.MULTILINE)[1:]
    return block, {entry.partition(":")[0]: entry for entry in entries}


@_with_shared_docstring
class EvidenceClassifier(ClassifierMixin, EvidenceEstimator):
    """Classify rows of a table with a network that learns its own regularization.

    ``EvidenceEstimator`` describes how the network learns, and the arguments and attributes of both
    estimators.

    Args:
        likelihood: Distribution of the labels: categorical (default), ordinal for labels that are
            ordered numbers, such as ratings, or a ``Likelihood`` of single labels, of which a copy
            is trained.
        posterior: Structure of the posterior over which ``predict_proba`` averages: kfac,
            last-layer, diag, full or ntk. Default: None, which predicts with the network itself.
            This is better if the network fits the data well (docs/sklearn.md).
        calibrate: Share of the training rows, such as 0.1, that are held out to scale the mean and
            covariance of the posterior (``Posterior.calibrate``). The network is trained only on
            the other rows. The split is stratified. The posterior is kfac unless you set
            ``posterior``. Default: None.
        class_weight: Weight of each class, which multiplies ``sample_weight``. Use a mapping from
            labels to positive weights, or ``"balanced"``. In a mapping, omitted labels have the
            weight 1. ``"balanced"`` gives all classes the same total weight and keeps the sum over
            all rows. A weight of 2 means that each row of the class was seen twice. Probabilities
            and the log evidence therefore refer to the reweighted table (docs/sklearn.md).
            Default: None, all weights are 1.

    Attributes:
        classes_: Labels, sorted.

    Examples:
        >>> import numpy as np
        >>> from evigrad.sklearn import EvidenceClassifier
        >>> X = np.random.default_rng(0).normal(size=(60, 2))
        >>> y = np.where(X[:, 0] > 0, "right", "left")
        >>> classifier = EvidenceClassifier(epochs=50, random_state=0).fit(X, y)
        >>> classifier.predict([[2.0, 0.0], [-2.0, 0.0]]).tolist()
        ['right', 'left']

    See also: docs/sklearn.md.
    """

    @_refusing_unknown
    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (64, 64),
        activation: str = "relu",
        *,
        likelihood: str | Likelihood = "categorical",
        module: Module | None = None,
        relevance: bool = True,
        estimator: str | None = AUTO,
        prior: str | GaussianPrior = "layerwise",
        posterior: str | None = None,
        calibrate: float | None = None,
        class_weight: str | Mapping[Any, float] | None = None,
        epochs: int | None = None,
        batch_size: int = 100,
        learning_rate: float | None = None,
        validation_fraction: float | None = None,
        settings: Mapping[str, Any] | None = None,
        handle_unknown: str = "error",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        names = signature(EvidenceEstimator).parameters
        super().__init__(**{name: value for name, value in locals().items() if name in names})
        self.class_weight, self.calibrate = class_weight, calibrate

    def _with_class_weights(self, weights: np.ndarray | None, y: np.ndarray) -> np.ndarray | None:
        if self.class_weight is None:
            return weights
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        rows = np.ones(len(y)) if weights is None else weights
        return rows * weights_of_classes(self.class_weight, classes, labels, rows)[labels]

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the network and learn the prior precisions of columns and layers.

        Args:
            X: Table (n, d) of numbers, or a ``pandas.DataFrame`` of numbers and categories.
            y: Labels (n,), numbers or strings.
            sample_weight: Number of times that each row counts, (n,). Default: 1.

        Returns:
            The estimator itself.

        Raises:
            ConfigurationError: If the likelihood is not one of these labels.
            InputError: If all labels belong to one class, all weights are zero, or labels of an
                ordinal likelihood are not numbers.
            ValueError: If the table, labels or settings are invalid or do not match each other.
        """
        numbers, y, weights = self._training_table(X, y, sample_weight)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(
                f"y must have at least two classes, got one class, {self.classes_[0]!r}. Add rows"
                " of another class."
            )
        likelihood, num_outputs = for_classes(self.likelihood, len(self.classes_))
        if isinstance(likelihood, Ordinal) and self.classes_.dtype.kind in "OUS":
            raise InputError(
                "Ordered labels must be numbers, whose order is the order of the classes, got text,"
                f" such as {str(self.classes_[0])!r}. Number them, for example with"
                " y.map({'low': 0, ...})."
            )
        numbers, labels, weights = in_order(numbers, labels, weights)
        if self.calibrate is None:
            self._fit(numbers, labels, weights, likelihood, num_outputs, self.posterior)
            return self
        if not 0 < self.calibrate < 1 or round(self.calibrate * len(labels)) in (0, len(labels)):
            raise ConfigurationError(
                "calibrate must be a share between 0 and 1, such as 0.1, that leaves rows to train"
                f" on and to hold out, got {self.calibrate!r} of {len(labels)} rows."
            )
        seed = self.random_state if isinstance(self.random_state, int | np.integer) else 0
        train, held_out = stratified_split(labels, self.calibrate, int(seed))
        w, held_out_weights = (
            weights if weights is None else weights[p] for p in (train, held_out)
        )
        structure = self.posterior or DEFAULT_STRUCTURE
        self._fit(numbers[train], labels[train], w, likelihood, num_outputs, structure)
        posterior = cast("Posterior", self.posterior_)
        inputs = self._tensor(self._encoding(numbers[held_out]), self.result_.model)
        self.posterior_ = posterior.calibrate(inputs, labels[held_out], weights=held_out_weights)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class.

        Args:
            X: Table with the columns of the training table.

        Returns:
            Probabilities (n, classes), in the order of ``classes_``.

        Raises:
            ValueError: If the table does not match the training table.
        """
        check_is_fitted(self)
        if (posterior := self.posterior_) is not None:
            return self._in_parts(X, lambda x: posterior(x).probabilities)
        model, likelihood = self.result_.model, unweighted(self.result_.evidence.likelihood)
        return self._in_parts(
            X, lambda x: class_probabilities(likelihood, probe_outputs(model, x).double())
        )

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row, also for ordered classes.

        Args:
            X: Table with the columns of the training table.

        Returns:
            Labels (n,).

        Raises:
            ValueError: If the table does not match the training table.
        """
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]


@_with_shared_docstring
class EvidenceRegressor(RegressorMixin, EvidenceEstimator):
    """Predict numbers and error bars with a network that learns its own regularization.

    ``EvidenceEstimator`` describes how the network learns, and the arguments and attributes of both
    estimators. The noise of the targets is learned too. Predictions are in the units of the
    targets. Counts are not standardized.

    Args:
        likelihood: Distribution of the targets: gaussian (default), student-t, heteroscedastic,
            natural-gaussian, poisson or negative-binomial, or a ``Likelihood``. A copy of a
            ``Likelihood`` is trained. Its learned noise starts in units of the targets' standard
            deviation, and a fixed noise is in units of the targets. docs/sklearn.md lists what each
            likelihood predicts.
        posterior: Structure of the posterior for ``predict(X, return_std=True)``: kfac (the
            default), last-layer, diag, full or ntk.

    Attributes:
        noise_: Learned standard deviation of the noise in the units of the targets: a number, or
            one per target if there are several. For student-t, the scale of the noise. Exists only
            if the likelihood has one noise for all rows.

    Examples:
        >>> import numpy as np
        >>> from evigrad.sklearn import EvidenceRegressor
        >>> X = np.random.default_rng(0).normal(size=(60, 2))
        >>> y = 3 * X[:, 0] + np.random.default_rng(1).normal(size=60)
        >>> regressor = EvidenceRegressor((), epochs=50, random_state=0).fit(X, y)
        >>> mean, std = regressor.predict(X[:5], return_std=True)
        >>> mean.shape, std.shape
        ((5,), (5,))

    See also: docs/sklearn.md.
    """

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, noise: Any = None, exposure: Any = None
    ) -> Self:
        """Train the network and learn the prior precisions of columns and layers, and the noise.

        Args:
            X: Table (n, d) of numbers, or a ``pandas.DataFrame`` of numbers and categories.
            y: Targets (n,), or several per row (n, D).
            sample_weight: Number of times that each row counts, (n,). Default: 1.
            noise: Known standard deviation of each target's measurement error, in the units of the
                targets, (n,) or (n, D), for a Gaussian likelihood. ``noise_`` is then the noise
                beyond these errors. Default: none is known.
            exposure: Time or population over which each count was recorded, (n,) or (n, D), for
                poisson and negative-binomial. Default: 1.

        Returns:
            The estimator itself.

        Raises:
            ConfigurationError: If the likelihood is not one of these targets.
            InputError: If noise, exposures or counts are invalid.
            ValueError: If the table, targets or settings are invalid or do not match each other.
        """
        conditions = {"noise": noise, "exposure": exposure}
        conditions = {name: values for name, values in conditions.items() if values is not None}
        num_targets = int(np.prod(np.asarray(y).shape[1:]))
        likelihood, num_outputs = for_numbers(self.likelihood, num_targets, conditions)
        target_shape = None
        for name, values in conditions.items():
            y, target_shape = beside(likelihood, y, name, values)
        numbers, y, weights = self._training_table(
            X, y, sample_weight, multi_output=True, y_numeric=True
        )
        self._target_shape = y.shape[1:] if target_shape is None else target_shape
        self._has_exposure = exposure is not None
        columns = y.reshape(len(y), -1).astype(np.float64)
        if isinstance(likelihood, Counts):  # before rows are sorted
            counts = torch.as_tensor(columns[:, :num_targets], device="cpu")
            likelihood.validate_observed(counts.shape, counts)
        numbers, columns, weights = in_order(numbers, columns, weights)
        condition = columns[:, num_targets:] if conditions else None
        columns = columns[:, :num_targets]
        is_noisy = isinstance(likelihood, Noisy)
        if is_noisy and (words := frequent_value(torch.as_tensor(columns, device="cpu"))):
            warnings.warn(words, EvigradWarning, stacklevel=2)
        self._units = Units.of(likelihood, columns, condition, weights)
        self._units.fix_noise(likelihood)
        targets = self._units.targets(likelihood, columns, condition).numpy()
        posterior = self.posterior or DEFAULT_STRUCTURE
        self._fit(numbers, targets, weights, likelihood, num_outputs, posterior)
        count = len(columns) if weights is None else weights.sum()
        self.log_evidence_ -= float(count * np.log(self._units.scale).sum())
        vars(self).pop("noise_", None)  # of an earlier fit
        if is_noisy:
            learned = likelihood.log_noise.detach().exp().double().cpu().numpy()
            learned = learned * self._units.scale
            self.noise_ = float(learned[0]) if num_targets == 1 else learned
        return self

    @overload
    def predict(
        self, X: Any, return_std: Literal[False] = False, exposure: Any = None, quantiles: Any = ...
    ) -> np.ndarray: ...

    @overload
    def predict(
        self, X: Any, return_std: Literal[True], exposure: Any = None
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def predict(
        self, X: Any, return_std: bool = False, exposure: Any = None, quantiles: Any = None
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Return the predicted mean of each row's target, or quantiles.

        The mean is the prediction of the trained network, without the uncertainty of the weights.
        With a Gaussian likelihood, it equals the 0.5 quantile. With other likelihoods, the two can
        differ. For counts, the mean is the rate times the exposure, and sums over rows predict
        totals.

        Args:
            X: Table with the columns of the training table.
            return_std: Whether to also return the standard deviation of the target. This deviation
                includes the noise and the uncertainty of the weights, but no measurement errors
                that you passed to ``fit``.
            exposure: Exposures of the rows, for counts. Default: 1, which predicts rates.
            quantiles: One probability or k probabilities of quantiles to return instead of means.
                They include the noise and the uncertainty of the weights.

        Returns:
            Means in the shape of the targets. If ``return_std`` is True, means and standard
            deviations. Quantiles have the shape of the targets, and a last dimension for k
            probabilities: (n, k), or (n, D, k) for D targets.

        Raises:
            ConfigurationError: If the likelihood has no exposures or no quantiles, or
                ``return_std`` is True and there are quantiles.
            ValueError: If the table does not match the training table, or a probability is wrong.
        """
        check_is_fitted(self)
        if return_std and quantiles is not None:
            raise ConfigurationError(
                f"return_std must be False with quantiles, got {quantiles!r}. Call predict twice."
            )
        if quantiles is not None:
            check_levels("quantiles", quantiles)
        x = self.inputs(X)
        exposures = self._exposures(exposure, len(x))
        parts = list[Tensor]()
        for rows in torch.arange(len(x), device=x.device).split(AT_ONCE):
            prediction = self._prediction(x[rows], return_std or quantiles is not None)
            if exposures is not None:
                unit = torch.as_tensor(exposures[rows.cpu()] * self._units.rate, device="cpu")
                prediction = prediction.with_conditions(exposure=unit.to(x))
            if quantiles is not None:
                parts.append(prediction.quantile(np.atleast_1d(quantiles)))
                continue
            deviations = [_std(prediction)] if return_std else []
            parts.append(torch.stack([prediction.plug_in.mean, *deviations]))
        numbers = torch.cat(parts, 1).double().cpu().numpy()
        shape = (len(x), *self._target_shape)
        if quantiles is not None:
            values = np.moveaxis(numbers * self._units.scale + self._units.shift, 0, -1)
            return values.reshape(*shape, *np.shape(quantiles))
        means = (numbers[0] * self._units.scale + self._units.shift).reshape(shape)
        if not return_std:
            return means
        return means, (numbers[1] * self._units.scale).reshape(shape)

    def _prediction(self, x: Tensor, has_posterior: bool) -> Predictive:
        """Return a prediction in the network's units."""
        if has_posterior:
            return cast("Posterior", self.posterior_)(x)
        outputs = probe_outputs(self.result_.model, x)
        likelihood = unweighted(self.result_.evidence.likelihood)
        return Predictive(outputs, torch.zeros_like(outputs), likelihood)

    def _exposures(self, exposure: Any, num_rows: int) -> np.ndarray | None:
        """Return the exposure of each target (n, D), or None if the likelihood has none."""
        likelihood = unweighted(self.result_.evidence.likelihood)
        if isinstance(likelihood, Counts):
            shape = (num_rows, *self._target_shape)
            return in_columns("exposure", 1.0 if exposure is None else exposure, shape)
        if exposure is not None:
            raise ConfigurationError(
                f"exposure is only for counts, but the likelihood is {type(likelihood).__name__}."
                ' Omit exposure, or use likelihood="poisson" or "negative-binomial".'
            )
        return None

    def score(self, X: Any, y: Any, sample_weight: Any = None, exposure: Any = None) -> float:
        """Return R² of the predicted means, or D² for counts.

        R² is the share of the variance that the means explain. D² is the share of the Poisson
        deviance that the rates explain, as in scikit-learn's PoissonRegressor. Both are averages
        over the targets of a row, and neither depends on the predicted noise.

        Args:
            X: Table with the columns of the training table.
            y: Targets in the shape of the training targets.
            sample_weight: Weights of the rows. Default: 1.
            exposure: Exposures of the rows, for counts that were trained with exposures.

        Returns:
            A number of at most 1, which is 1 for perfect predictions.

        Raises:
            InputError: If exposures are missing, although the training table had exposures.
            ValueError: If the table or targets do not match the training table.
        """
        check_is_fitted(self)
        if not isinstance(unweighted(self.result_.evidence.likelihood), Counts):
            self._exposures(exposure, 0)  # raises if there are exposures
            return float(super().score(X, y, sample_weight))
        if self._has_exposure and exposure is None:
            raise InputError(
                "score needs the exposures of the counts, because fit() had exposures. Use"
                " score(X, y, exposure=...). For cross-validation, use"
                " sklearn.set_config(enable_metadata_routing=True) and"
                " set_fit_request(exposure=True).set_score_request(exposure=True)."
            )
        means = self.predict(X, exposure=exposure)
        y = np.asarray(y, dtype=np.float64)
        if y.shape != means.shape:
            raise InputError(
                f"y must have the shape of the predictions, {means.shape}, got {y.shape}."
            )
        columns, count = (len(y), -1), len(y)
        rows = np.ones(count) if sample_weight is None else np.asarray(sample_weight, np.float64)
        exposures = self._exposures(exposure, count)
        assert exposures is not None
        return deviance_explained(y.reshape(columns), means.reshape(columns), exposures, rows)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _std(prediction: Predictive) -> Tensor:
    """Return the standard deviation, with a warning about wide posteriors in a user's words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        std = prediction.std
    for warning in caught:
        words = str(warning.message)
        if "prediction.plug_in" in words:
            words = (
                "The standard deviations of some rows can be far too large, because the posterior"
                " of a log rate or log noise is wide there. The means are not affected, because"
                " they ignore the uncertainty of the weights. For only the means, omit return_std."
            )
        warnings.warn(words, warning.category, stacklevel=3)  # the caller of predict
    return std
