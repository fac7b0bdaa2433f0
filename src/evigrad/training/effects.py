"""Settings that would have no effect in a run, and errors that say what to use instead.

A setting that still has its default never raises an error. Settings that only limit a size, such as
``batch_size``, have no effect on few data and raise no error. ``Memory``, ``sharing`` and
``temperature`` also matter without an estimator, because ``result.evidence.posterior`` uses them.
"""

from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any, NoReturn

from evigrad.errors import ConfigurationError, listed
from evigrad.evidence import Evidence
from evigrad.priors import GaussianPrior
from evigrad.training.plan import LEARNED_PRECISION
from evigrad.training.settings import Optimization, Schedule, Settings
from evigrad.training.starts import comparison

# Names of settings, the condition under which they have no effect, and what to do instead.
Idle = tuple[Collection[str], str, str]

_OF_MODEL = ("hyper_every", "hyper_steps", "hyper_lr", "hyper_lr_min")
_OF_ROUNDS = ("burn_in", "every", "steps", "prior_blocks", *_OF_MODEL)
_WEIGHTS = ("optimizer", "lr", "lr_min")
_RATES = ("prior_lr", "prior_lr_min")
# Settings of ``fit`` that a loop of the caller makes useless.
OF_FIT = (
    *("max_epochs", "epoch_size", "batch_size", "eval_every", "bracket_every", "checkpoint_every"),
    *("noise_on_loss", *_WEIGHTS),
)
# Settings of ``fit`` that ``tune`` does not use.
OF_TRAINING = (*_WEIGHTS, "start_decay")


def refuse(settings: Collection[object], idle: Iterator[Idle] | Collection[Idle]) -> None:
    """Raise an error for the first setting without effect.

    Args:
        settings: Objects of dataclasses, such as ``Schedule``. Only fields that differ from their
            defaults are settings.
        idle: Settings without effect.

    Raises:
        ConfigurationError: If one of the settings has no effect.
    """
    changed = {
        field.name: value
        for group in settings
        for field in fields(group)  # pyright: ignore[reportArgumentType]
        if (value := getattr(group, field.name)) != field.default
    }
    for names, condition, instead in idle:
        for name in names:
            if name in changed:
                _refuse_one(name, changed[name], condition, instead)


def refuse_idle(settings: Settings, complete: Settings, evidence: Evidence) -> None:
    """Raise an error for the first setting of ``fit`` or ``tune`` that has no effect.

    Args:
        settings: Settings as the user specified them.
        complete: The same settings with values for all defaults, from ``plan``.
        evidence: Initial evidence of the run.

    Raises:
        ConfigurationError: If a setting has no effect.
    """
    groups = (settings.laplace, settings.schedule, settings.optimization)
    refuse(groups, _of_root(evidence))
    refuse(groups, of_learner(complete.schedule, complete.optimization, evidence))
    refuse(groups, _of_starts(complete))
    refuse(groups, _of_optimizer(settings))
    _check_precision(settings, complete, evidence)


def refuse_without_estimator(settings: Settings) -> None:
    """Raise an error for a setting that has no effect on training without an estimator.

    Args:
        settings: Settings without an estimator.

    Raises:
        ConfigurationError: If a setting has no effect.
    """
    without = "without an estimator, because only the evidence"
    learn = "Set an estimator"
    on_loss = settings.optimization.noise_on_loss
    rates = "Set lr, with which noise_on_loss learns the noise" if on_loss else learn
    keep = "Set precision, which is the weight decay times N"
    if settings.anchoring is not None:
        anchored = "Use an estimator with anchors, such as 'ntk-400-rows-anchored'"
        _refuse_one("anchoring", settings.anchoring, f"{without} has anchors", anchored)
    prior = settings.prior
    if isinstance(prior, GaussianPrior) and prior.hyperprior is not None:
        condition = f"{without} learns the prior's precisions"
        _refuse_one("hyperprior", prior.hyperprior, condition, learn)
    idle: list[Idle] = [
        (_OF_ROUNDS, f"{without} has rounds of hyperparameter steps", learn),
        (
            ("root", "parameter_partition", "log_det_weight"),
            f"{without} needs the curvature",
            learn,
        ),
        (("prior_update", "start_decay"), f"{without} learns the prior's precisions", keep),
        (_RATES, f"{without} has its own learning rates", rates),
    ]
    refuse((settings.laplace, settings.schedule, settings.optimization), idle)
    refuse([settings.optimization], _of_optimizer(settings))


def of_learner(
    schedule: Schedule, optimization: Optimization, evidence: Evidence
) -> Iterator[Idle]:
    """Yield settings of rounds and updates without effect, for a complete schedule and updates."""
    kinds = {name.partition(".")[0] for name in evidence.hyperparameters()}
    uses_adam = optimization.prior_update == "adam"
    if "model" not in kinds:
        words = "unless the evidence learns parameters of the model"
        yield _OF_MODEL, words, "Name such parameters in hyperparameters, or set an invariance"
    elif kinds == {"model"}:
        words = "if the evidence learns only parameters of the model and {0} is set"
        for name in ("every", "steps"):
            if getattr(schedule, f"hyper_{name}") is not None:
                other = f"hyper_{name}"
                yield (name,), words.format(other), f"Set only {other}"
    if evidence.estimator.is_full_batch:
        words = f"with {evidence.estimator.name}, which has only one block"
        yield ("prior_blocks",), words, "Use an estimator with a subset, such as ntk-100-C"
    if "prior" not in kinds:
        words = "if all precisions of the prior are fixed"
        yield ("prior_update",), words, "Use a prior with learnable=True"
        yield ("start_decay",), words, "Set the precision of the prior"
        if "likelihood" not in kinds:
            yield _RATES, "if prior and likelihood are fixed", "Set hyper_lr"
        return
    if not uses_adam and "likelihood" not in kinds:
        words = "with prior_update='fixed_point' and a likelihood without a noise to learn"
        yield _RATES, words, "Set prior_update='adam'"
    if uses_adam:
        words = "with prior_update='adam', which starts from the precision of the prior"
        yield ("start_decay",), words, "Set precision, or prior_update='fixed_point'"
    elif not schedule.burn_in:
        words = "without a burn-in, because precisions then start from the precision of the prior"
        yield ("start_decay",), words, "Set burn_in or precision"
    elif not _learns_around_zero(evidence):
        words = "if no learned precision is of weights with the prior mean zero"
        yield ("start_decay",), words, "Set prior_update='adam' and precision"


def _of_root(evidence: Evidence) -> Iterator[Idle]:
    """Yield ``root`` if the estimator and the likelihood make all roots equal."""
    spec = evidence.estimator
    instead = "Use an estimator with some of the outputs, such as ntk-100-1"
    if spec.curvature != "ggn":
        yield ("root",), f"with {spec.name}, whose rows are scores of labels", instead
    elif not spec.rows and spec.outputs is None:
        yield ("root",), f"with {spec.name}, whose blocks contain all outputs", instead
    elif not evidence.likelihood.couples_outputs:
        name = evidence.likelihood.name
        yield ("root",), f"with the likelihood {name}, which does not couple outputs", ""


def of_one_start(optimization: Optimization) -> Iterator[Idle]:
    """Yield ``start_decay`` if it has several values, of which only ``fit`` compares results."""
    if len(optimization.start_decays) > 1:
        words = "beyond its first value, because only evigrad.fit compares several starts"
        yield ("start_decay",), words, "Use one value"


def _of_starts(complete: Settings) -> Iterator[Idle]:
    """Yield ``start_decay`` if the run is too short to compare its values."""
    if len(complete.optimization.start_decays) > 1 and not comparison(complete.schedule):
        words = "beyond its first value, because the run has too few rounds to compare starts"
        yield ("start_decay",), words, "Use one value, raise epochs, or lower burn_in and every"


def _of_optimizer(settings: Settings) -> Iterator[Idle]:
    """Yield ``lr`` if a function of the user makes the optimizer of the weights."""
    if not isinstance(settings.optimization.optimizer, str):
        yield (
            ("lr",),
            "with a custom optimizer",
            "Set it in the optimizer's function",
        )


def _check_precision(settings: Settings, complete: Settings, evidence: Evidence) -> None:
    """Raise an error for a precision that the burn-in of the fixed point replaces."""
    prior, schedule = evidence.prior, complete.schedule
    is_learned = any(name.startswith("prior.") for name in evidence.hyperparameters())
    starts = complete.optimization.prior_update == "fixed_point" and schedule.burn_in
    if not (is_learned and starts):
        return
    is_object = isinstance(settings.prior, GaussianPrior)
    value = prior.learned_precision if is_object else settings.precision
    if value is not None and value != LEARNED_PRECISION:
        condition = "with prior_update='fixed_point', which replaces learned precisions by a start"
        adam = "prior_update='adam'"
        around_zero = _learns_around_zero(evidence)
        ways = f"start_decay, the weight decay of the burn-in, or {adam}" if around_zero else adam
        names = prior.learned_groups()
        if len(names) == len(prior.group_names):
            _refuse_one("precision", value, condition, f"Set {ways}")
        # The dict of precisions must keep the precision of the fixed groups.
        raise ConfigurationError(
            f"precision has no effect {condition}, got {value!r}. Set {ways}, or use"
            f" {LEARNED_PRECISION} for the learned groups {listed(names)}."
        )


def _learns_around_zero(evidence: Evidence) -> bool:
    """Return whether a learned precision is of weights with the prior mean zero."""
    prior = evidence.prior
    with_mean = {prior.group_name(name) for name in prior.means()}
    return not with_mean.issuperset(prior.learned_groups())


def _refuse_one(name: str, value: Any, condition: str, instead: str) -> NoReturn:
    """Raise ConfigurationError for a setting without effect."""
    remedy = f"{instead}, or remove" if instead else "Remove"
    raise ConfigurationError(f"{name} has no effect {condition}, got {value!r}. {remedy} {name}.")
