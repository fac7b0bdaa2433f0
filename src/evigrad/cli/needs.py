"""Options that only work with others, and the refusal of those that would be ignored."""

import re
from collections.abc import Callable, Iterable

from jsonargparse import ArgumentParser, Namespace

from evigrad.cli.messages import show
from evigrad.errors import ConfigurationError


def check_needs(parser: ArgumentParser, options: Namespace, typed: Iterable[str]) -> None:
    """Refuse options that were typed and would be ignored, and name those of a file.

    Those of a file are only named, as a file may serve several runs that use different options.

    Args:
        parser: The options' parser.
        options: The parsed options.
        typed: The arguments as they were typed.

    Raises:
        ConfigurationError: If one was typed; the text says what it works with.
    """
    given = {
        word[2:].partition("=")[0].removeprefix("no-").replace("-", "_")
        for word in typed
        if word.startswith("--")
    }
    defaults = parser.get_defaults()
    idle: list[str] = []
    for names, needed, is_met in NEEDS:
        for name in names:
            if name not in options or options[name] == defaults[name] or is_met(options):
                continue
            flag = f"--{name.replace('_', '-')}"
            if name in given:
                raise ConfigurationError(
                    f"{flag} would be ignored: it is of use only {needed}. Change that, or leave"
                    f" {flag} away."
                )
            idle.append(f"{name} is of use only {needed}")
    if idle:
        show("note", f"Of the configuration file, {'; '.join(dict.fromkeys(idle))}.")


def _uses(part: str) -> Callable[[Namespace], bool]:
    """Whether a word is in the name of a training's estimator."""

    def uses(options: Namespace) -> bool:
        names = options.get("estimators") or [options.estimator or "map"]
        return any(part in name.split("-") for name in names)

    return uses


def _transforms(options: Namespace) -> bool:
    return bool(options.invariance)


def _averages(options: Namespace) -> bool:
    return bool(options.invariance or options.flip)


def _evidence(options: Namespace) -> bool:
    """Whether a training takes steps on an estimate of the evidence."""
    return options.get("estimator", "ntk") not in (None, "map", "augerino")


def _ranges(options: Namespace) -> bool:
    return bool(options.invariance and options.learn_invariance)


def _adam(options: Namespace) -> bool:
    """Whether Adam has something to learn: the prior, or a noise, which only tables have."""
    by_name = options.likelihood is None and re.search("[/.]", options.data)
    return options.prior_update == "adam" or options.likelihood == "gaussian" or bool(by_name)


_Need = tuple[tuple[str, ...], str, Callable[[Namespace], bool]]
# Options, what they work with, and whether that is there. The first failure is reported.
NEEDS: tuple[_Need, ...] = (
    (("initial_range", "learn_invariance"), "with --invariance", _transforms),
    (("samples", "average"), "with --invariance or --flip", _averages),
    (
        (
            *("burn_in", "every", "steps", "prior_blocks", "hyper_every", "hyper_steps"),
            *("prior_update", "prior_lr", "prior_lr_min", "root", "gram_dtype"),
        ),
        "with an --estimator of the evidence, as ntk-100-1",
        _evidence,
    ),
    (
        ("hyper_lr", "hyper_lr_min"),
        "with an --estimator that learns, as ntk-100-1 or augerino",
        lambda options: _evidence(options) or options.estimator == "augerino",
    ),
    (
        ("hyper_every", "hyper_steps", "hyper_lr", "hyper_lr_min"),
        "with an --invariance that is learned",
        _ranges,
    ),
    (
        ("prior_lr", "prior_lr_min"),
        "with --prior-update adam, or a noise to learn (--likelihood gaussian)",
        _adam,
    ),
    (("augerino_weight",), "with --estimator augerino", lambda o: o.get("estimator") == "augerino"),
    (("sharing",), "with a kfac estimator", _uses("kfac")),
    (("parameter_partition",), "with a blockdiag estimator", _uses("blockdiag")),
    (("rows_dtype", "rows_device"), "with an ntk estimator", _uses("ntk")),
)
