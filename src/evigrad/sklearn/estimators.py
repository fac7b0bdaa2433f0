"""``EvidenceClassifier`` and ``EvidenceRegressor``."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import signature
from statistics import fmean
from typing import Any, Literal, ParamSpec, Self, cast, overload

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier
from sklearn.preprocessing import StandardScaler
from sklearn.utils import Tags, check_array, check_random_state, check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from evigrad.core.names import DEFAULT_ESTIMATOR
from evigrad.errors import ConfigurationError, InputError, nearest
from evigrad.likelihoods import Categorical, Gaussian, Likelihood, Weighted
from evigrad.measure.metrics import probe_outputs
from evigrad.models import make_model
from evigrad.network.modes import seeded
from evigrad.passes.checks import check_choice
from evigrad.posterior import DEFAULT_STRUCTURE, STRUCTURES, Posterior
from evigrad.priors import GaussianPrior
from evigrad.sklearn.table import (
    Columns,
    Encoding,
    Relevance,
    check_constants,
    in_order,
    is_frame,
    refuse_numbers,
    refuse_targets,
)
from evigrad.training import FitResult, fit
from evigrad.training.settings import GROUPS, grouped

P = ParamSpec("P")
Module = nn.Module | Callable[[int, int], nn.Module]

UNKNOWN = ("error", "ignore")
# Blocks that ``log_evidence_`` is a mean over, at most.
_BLOCKS = 10
# Rows of whole-number weights are repeated if the table does not grow by more than this factor.
_MOST_REPEATED = 10
# What the estimators say to ``fit`` themselves.
_OWN = {"model", "train", "likelihood", "hyperparameters", "seed", "progress"}
# Rows that are predicted at once.
_AT_ONCE = 8192


class ParameterError(ConfigurationError, TypeError):
    """A keyword that an estimator does not have, for which Python raises a TypeError."""


def _refusing_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Refuse unknown keywords of a constructor in our words; its signature stays as it is."""

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        cast("_EvidenceEstimator", args[0])._refuse_unknown(kwargs)
        init(*args, **kwargs)

    return checked


class _EvidenceEstimator(BaseEstimator):
    """Base of classifier and regressor; their docstrings say what the settings are."""

    @_refusing_unknown
    def __init__(
        self,
        hidden_layer_sizes: int | Sequence[int] = (64, 64),
        activation: str = "relu",
        *,
        module: Module | None = None,
        relevance: bool = True,
        estimator: str | None = DEFAULT_ESTIMATOR,
        prior: str | GaussianPrior = "layerwise",
        posterior: str | None = None,
        epochs: int | None = None,
        batch_size: int = 100,
        learning_rate: float | None = None,
        settings: Mapping[str, Any] | None = None,
        handle_unknown: str = "error",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.module = module
        self.relevance = relevance
        self.estimator = estimator
        self.prior = prior
        self.posterior = posterior
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.settings = settings
        self.handle_unknown = handle_unknown
        self.random_state = random_state
        self.verbose = verbose

    def set_params(self, **params: Any) -> Self:
        """Set parameters, by their names.

        Args:
            **params: Parameters of the estimator.

        Returns:
            The estimator itself.

        Raises:
            ConfigurationError: If the estimator does not have one of them.
        """
        self._refuse_unknown(params)
        return super().set_params(**params)

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str]) -> None:
        """Refuse parameters that the estimator does not have."""
        parameters = cls._get_param_names()
        for name in names:
            if name == "class_weight":
                raise ParameterError(
                    f"{cls.__name__} has no class_weight. Give weights of the rows to fit instead:"
                    " fit(X, y, sample_weight=...). For weights by class, take"
                    " sklearn.utils.class_weight.compute_sample_weight(class_weight, y)."
                )
            if name.partition("__")[0] not in parameters:
                raise ParameterError(
                    f"Invalid parameter '{name}': {cls.__name__} has none of this name."
                    f"{nearest(name, parameters)} There are {', '.join(parameters)}."
                )

    # ------------------------------------------------------------ tables

    def _training_table(
        self, X: Any, y: Any, sample_weight: Any, **checks: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The table as numbers, the targets, and weights where they are not all the same."""
        check_choice("handle_unknown", self.handle_unknown, UNKNOWN)
        self._columns = Columns(X, self.handle_unknown == "ignore")
        refuse_targets(y, is_classifier(self))
        checks["ensure_all_finite"] = False  # of X, whose columns are named
        if is_frame(X):
            validate_data(self, X, y, skip_check_array=True)
            X, y = check_X_y(self._columns.numbers(X), y, estimator=self, **checks)
        else:
            X, y = validate_data(self, X, y, dtype=np.float64, **checks)
            refuse_numbers(X)
        if sample_weight is None:
            return X, y, None
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        counted = weights > 0
        if (weights < 0).any() or not counted.any():
            raise InputError("sample_weight must be 0 or more, and not 0 for every row.")
        X, y, weights = X[counted], y[counted], weights[counted]
        is_whole = (weights == weights.round()).all()
        if is_whole and weights.sum() <= _MOST_REPEATED * len(weights):
            times = weights.astype(np.int64)
            return X.repeat(times, axis=0), y.repeat(times, axis=0), None
        return X, y, weights

    def inputs(self, X: Any) -> Tensor:
        """The inputs of the network ``result_.model``, as it gets them.

        Args:
            X: A table with the columns of the training table.

        Returns:
            (n, inputs): standardised numbers first, then zeros and ones for categories, in the type
            of the network and on its device.

        Raises:
            ValueError: If the table does not fit that of the training.
        """
        check_is_fitted(self)
        if is_frame(X):
            validate_data(self, X, reset=False, skip_check_array=True)
            X = check_array(self._columns.numbers(X), estimator=self, input_name="X")
        else:
            numbers = self._columns.numbers(X)
            X = validate_data(self, numbers, dtype=np.float64, reset=False, ensure_all_finite=False)
            refuse_numbers(X)
        return self._tensor(self._encoding(X), self.result_.model)

    @staticmethod
    def _tensor(values: np.ndarray, model: nn.Module) -> Tensor:
        return torch.as_tensor(values, device="cpu").to(next(model.parameters()))

    # ------------------------------------------------------------ training

    def _network(self, num_outputs: int, seed: int) -> nn.Module:
        """The network that is trained, whose parameters' type and device all else takes."""
        num_inputs = len(self._encoding.feature_of)
        if self.module is None:
            network = make_model(
                "mlp",
                (num_inputs,),
                num_outputs,
                seed,
                hidden=np.atleast_1d(self.hidden_layer_sizes).astype(int).tolist(),
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
                    "module is a torch module, or a function from the numbers of inputs and outputs"
                    f" to one; found {network!r}."
                )
        if not any(True for _ in network.parameters()):
            raise ConfigurationError("The module has no parameters: there is nothing to train.")
        return network

    def _fit(
        self,
        numbers: np.ndarray,
        targets: np.ndarray,
        weights: np.ndarray | None,
        likelihood: Likelihood,
        num_outputs: int,
        posterior: str | None,
    ) -> None:
        """Train and learn; ``targets`` are those of the likelihood."""
        if posterior is not None:  # refused before training if it could not be made after it
            check_choice("posterior", posterior, list(STRUCTURES))
            prior = self.prior.structure if isinstance(self.prior, GaussianPrior) else self.prior
            if (posterior, prior) == ("kfac", "diagonal"):
                raise ConfigurationError(
                    "posterior='kfac' needs one precision for each weight matrix, and a diagonal"
                    " prior has one for each weight: say posterior='diag', or another prior."
                )
        self._encoding = Encoding(numbers, self._columns.categories, weights)
        names = getattr(self, "feature_names_in_", range(numbers.shape[1]))
        check_constants(self._encoding.is_constant, names, len(numbers))
        state = self.random_state
        if not isinstance(state, int | np.integer):
            state = check_random_state(state).randint(2**31 - 1)
        model = self._network(num_outputs, int(state))
        x = self._tensor(self._encoding(numbers), model)
        if (output_shape := tuple(probe_outputs(model, x[:2]).shape[1:])) != (num_outputs,):
            raise ConfigurationError(
                f"The module has outputs of shape {output_shape} for each row, and these targets"
                f" need ({num_outputs},)."
            )
        scales = Relevance(self._encoding.feature_of, numbers.shape[1]).to(x)
        if self.relevance:
            model = nn.Sequential(OrderedDict(relevance=scales, network=model))
        y = torch.as_tensor(targets, device="cpu").to(x.device)
        y = y.to(x.dtype) if y.is_floating_point() else y
        if weights is not None:
            likelihood = Weighted(likelihood)
            y = likelihood.targets(y, torch.as_tensor(weights, device="cpu")).to(x)
        options = {
            "estimator": self.estimator,
            "prior": copy.deepcopy(self.prior),  # as it is bound to the network
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr": self.learning_rate,
            **self._checked_settings(),
        }
        self.result_: FitResult = fit(
            model,
            (x, y),
            likelihood=likelihood,
            hyperparameters=["relevance"] if self.relevance else [],
            seed=int(state),
            progress=bool(self.verbose),
            **grouped(options),
        )
        evidence = self.result_.evidence
        self.log_evidence_ = float("nan")
        if self.result_.estimator is not None:
            blocks = evidence.blocks((x, y)).round(_BLOCKS)
            self.log_evidence_ = fmean(evidence.estimate(block).log_evidence for block in blocks)
        if self.relevance:
            learned = scales.values.detach().double().cpu().numpy()
            learned[self._encoding.is_constant] = 0.0
            self.relevance_ = learned / learned.max()
        self.posterior_: Posterior | None = None
        if posterior is not None:
            self.posterior_ = evidence.posterior((x, y), structure=posterior)

    def _checked_settings(self) -> Mapping[str, Any]:
        settings = self.settings or {}
        single = {setting.name for kind in GROUPS.values() for setting in fields(kind)}
        allowed_names = single | {*signature(fit).parameters} - {*_OWN, *GROUPS}
        for name in settings:
            if name not in allowed_names:
                raise ConfigurationError(
                    f"settings are keywords of evigrad.fit, and fields of its groups, by their own"
                    f" names; '{name}' is none that can be set.{nearest(name, allowed_names)}"
                )
        return settings

    def _in_parts(self, X: Any, function: Callable[[Tensor], Tensor]) -> np.ndarray:
        """Return the values of a row-wise function of the network's inputs, part by part."""
        outputs = [function(part) for part in self.inputs(X).split(_AT_ONCE)]
        return torch.cat(outputs).double().cpu().numpy()


class EvidenceClassifier(ClassifierMixin, _EvidenceEstimator):
    """A network that classifies rows of a table, and learns how much to regularise in the same fit.

    Numbers are standardised and categories of a ``pandas.DataFrame`` (dtype ``category``,
    ``string`` or ``object``) become zeros and ones. The precision of each layer's weights, and the
    relevance of each column, are learned on the marginal likelihood of the training table: there is
    no validation split and nothing to search for.

    Args:
        hidden_layer_sizes: Units of each hidden layer of the network; none make it linear.
        activation: Non-linearity after each of them: relu, tanh, silu, gelu, elu, softplus or
            sigmoid.
        module: A network in place of the layers: a torch module from inputs (n, inputs) to outputs
            (n, classes), of which a copy is trained from the weights that it has, or a function
            from the two numbers to such a module. It is trained in its own type, on its device.
        relevance: Whether each column has a scale in front of the network that the evidence learns.
        estimator: Of the evidence, by its name; None learns nothing but the weights.
        prior: What has a precision of its own: layerwise, scalar, diagonal or a ``GaussianPrior``.
        posterior: Structure of the weights' posterior over which ``predict_proba`` averages: kfac,
            last-layer, diag, full or ntk. None takes the network alone, which has the better
            probabilities where it fits its data (docs/posterior.md).
        epochs: Passes over the training table. Default: that of ``evigrad.Schedule``.
        batch_size: Rows in a step of the weights.
        learning_rate: Of the weights, at the start. Default: that of ``evigrad.Optimization``.
        settings: Further settings of ``evigrad.fit`` by their names, also those of its groups, as
            ``{"burn_in": 20, "temperature": 0.5}``.
        handle_unknown: What becomes of a category that the training table does not have:
            ``"error"`` refuses it, ``"ignore"`` takes it for none of them.
        random_state: Seed of the initial weights and of all that is random in training.
        verbose: Whether training shows its progress.

    Attributes:
        classes_: The labels, sorted.
        relevance_: Learned scale of each column of the table, as a share of the largest, (d,). Near
            0 is a column that the network does not use. Only with ``relevance``.
        log_evidence_: Estimate of the log evidence of the training table, nats in all; NaN where no
            estimator was used. Of rows that are drawn it is a lower bound on average.
        posterior_: The ``evigrad.Posterior`` of the network's weights, or None.
        result_: The ``evigrad.FitResult``: network, evidence (with precisions), history.
        n_features_in_: Columns of the training table, d.
        feature_names_in_: Their names, where all are strings.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the network, and learn its precisions and relevances.

        Args:
            X: A table (n, d) of numbers, or a ``pandas.DataFrame`` of numbers and categories.
            y: Labels (n,), numbers or words.
            sample_weight: How often each row counts, (n,).

        Returns:
            The estimator itself.

        Raises:
            InputError: If the labels are of one class, or all weights zero.
            ValueError: If table, labels or settings do not fit.
        """
        numbers, y, weights = self._training_table(X, y, sample_weight)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(
                f"y has only one class, {self.classes_[0]!r}: there is nothing to learn."
            )
        numbers, labels, weights = in_order(numbers, labels, weights)
        count = len(self.classes_)
        self._fit(numbers, labels, weights, Categorical(), count, self.posterior)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probability of each class.

        Args:
            X: A table with the columns of the training table.

        Returns:
            (n, classes), in the order of ``classes_``.

        Raises:
            ValueError: If the table does not fit.
        """
        check_is_fitted(self)
        if (posterior := self.posterior_) is not None:
            return self._in_parts(X, lambda x: posterior(x).probabilities)
        model = self.result_.model
        return self._in_parts(X, lambda x: probe_outputs(model, x).double().softmax(dim=1))

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row.

        Args:
            X: A table with the columns of the training table.

        Returns:
            Labels (n,).

        Raises:
            ValueError: If the table does not fit.
        """
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]


class EvidenceRegressor(RegressorMixin, _EvidenceEstimator):
    """A network for numbers that depend on a table, with error bars, which regularises itself.

    Numbers are standardised, the target too, and categories of a ``pandas.DataFrame`` (dtype
    ``category``, ``string`` or ``object``) become zeros and ones. The precision of each layer's
    weights, the relevance of each column and the noise of the target are learned on the marginal
    likelihood of the training table: there is no validation split and nothing to search for.
    All that comes out is in the units of the target.

    Args:
        hidden_layer_sizes: Units of each hidden layer of the network; none make it linear.
        activation: Non-linearity after each of them: relu, tanh, silu, gelu, elu, softplus or
            sigmoid.
        module: A network in place of the layers: a torch module from inputs (n, inputs) to outputs
            (n, targets), of which a copy is trained from the weights that it has, or a function
            from the two numbers to such a module. It is trained in its own type, on its device.
        relevance: Whether each column has a scale in front of the network that the evidence learns.
        estimator: Of the evidence, by its name; None learns nothing but the weights.
        prior: What has a precision of its own: layerwise, scalar, diagonal or a ``GaussianPrior``.
        posterior: Structure of the weights' posterior for ``predict(X, return_std=True)``: kfac,
            the default, last-layer, diag, full or ntk.
        epochs: Passes over the training table. Default: that of ``evigrad.Schedule``.
        batch_size: Rows in a step of the weights.
        learning_rate: Of the weights, at the start. Default: that of ``evigrad.Optimization``.
        settings: Further settings of ``evigrad.fit`` by their names, also those of its groups, as
            ``{"burn_in": 20, "temperature": 0.5}``.
        handle_unknown: What becomes of a category that the training table does not have:
            ``"error"`` refuses it, ``"ignore"`` takes it for none of them.
        random_state: Seed of the initial weights and of all that is random in training.
        verbose: Whether training shows its progress.

    Attributes:
        noise_: Standard deviation of the targets about the network, in their units: a number, or
            one for each target where there are several.
        relevance_: Learned scale of each column of the table, as a share of the largest, (d,). Near
            0 is a column that the network does not use. Only with ``relevance``.
        log_evidence_: Estimate of the log evidence of the training table, nats in all; NaN where no
            estimator was used. Densities are those of the targets in their own units; of rows that
            are drawn it is a lower bound on average.
        posterior_: The ``evigrad.Posterior`` of the network's weights.
        result_: The ``evigrad.FitResult``: network, evidence (with precisions), history.
        n_features_in_: Columns of the training table, d.
        feature_names_in_: Their names, where all are strings.
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the network, and learn its precisions, relevances and the noise.

        Args:
            X: A table (n, d) of numbers, or a ``pandas.DataFrame`` of numbers and categories.
            y: Targets (n,), or several for each row (n, D).
            sample_weight: How often each row counts, (n,).

        Returns:
            The estimator itself.

        Raises:
            ValueError: If table, targets or settings do not fit.
        """
        numbers, y, weights = self._training_table(
            X, y, sample_weight, multi_output=True, y_numeric=True
        )
        self._target_shape = y.shape[1:]
        columns = y.reshape(len(y), -1).astype(np.float64)
        numbers, columns, weights = in_order(numbers, columns, weights)
        self._scaler = StandardScaler().fit(columns, sample_weight=weights)
        self._units = np.asarray(self._scaler.scale_)
        standardised = np.asarray(self._scaler.transform(columns))
        num_outputs = columns.shape[1]
        likelihood = Gaussian(num_outputs=None if num_outputs == 1 else num_outputs)
        posterior = self.posterior or DEFAULT_STRUCTURE
        self._fit(numbers, standardised, weights, likelihood, num_outputs, posterior)
        count = len(y) if weights is None else weights.sum()
        self.log_evidence_ -= float(count * np.log(self._units).sum())
        noise = likelihood.log_noise.detach().exp().double().cpu().numpy() * self._units
        self.noise_ = float(noise[0]) if num_outputs == 1 else noise
        return self

    @overload
    def predict(self, X: Any, return_std: Literal[False] = False) -> np.ndarray: ...

    @overload
    def predict(self, X: Any, return_std: Literal[True]) -> tuple[np.ndarray, np.ndarray]: ...

    def predict(
        self, X: Any, return_std: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The mean of each row's target.

        Args:
            X: A table with the columns of the training table.
            return_std: Whether to return the standard deviation of the target too, by its noise and
                by what the posterior leaves open of the network's weights.

        Returns:
            Means of the shape of the targets; with ``return_std`` a pair of means and deviations.

        Raises:
            ValueError: If the table does not fit.
        """
        check_is_fitted(self)
        if not return_std:
            outputs = self._in_parts(X, lambda x: probe_outputs(self.result_.model, x))
            return self._in_units(outputs)
        both = self._in_parts(X, self._mean_and_std)
        deviations = both[:, 1] * self._units
        return self._in_units(both[:, 0]), deviations.reshape(len(both), *self._target_shape)

    def _mean_and_std(self, x: Tensor) -> Tensor:
        """Both of standardised targets, (n, 2, C)."""
        predictive = cast("Posterior", self.posterior_)(x)
        return torch.stack([predictive.mean, predictive.std], dim=1)

    def _in_units(self, outputs: np.ndarray) -> np.ndarray:
        means = np.asarray(self._scaler.inverse_transform(outputs))
        return means.reshape(len(means), *self._target_shape)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
