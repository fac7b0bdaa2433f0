"""The keys that the file of an experiment may have, and must have."""

from collections.abc import Mapping
from typing import Any

from evigrad.errors import ConfigurationError, nearest
from evigrad.experiments.definition import Experiment

# Keys to the keys below them, None for anything; EACH for whatever the keys are called, and "!"
# behind one that must be there.
Keys = Mapping[str, Any]
EACH, _MUST = "*", "!"

_LEGEND: Keys = {"reference": None, "ordered": None, "differs": None}
_GRID: Keys = {"start!": None, "stop!": None, "count!": None, "log": None}
_PANEL: Keys = {
    "title": None,
    "axis!": None,
    "hyperparameter!": None,
    "grid!": _GRID,
    "training": {EACH: None},
}
_ROWS: Keys = {EACH: {EACH: None}}
_TRAINING: Keys = {"training!": {EACH: None}}
KINDS: Mapping[str, Keys] = {
    "bounds": {
        **_TRAINING,
        "panels!": {EACH: _PANEL},
        "curves!": {EACH: None},
        "orderings": None,
        "blocks": None,
    },
    "pareto": {**_TRAINING, "estimators!": None, "judge": None},
    "learning": {**_TRAINING, "quantities!": {EACH: None}, "groups!": {EACH: {EACH: None}}},
    "subsets": {**_TRAINING, "sizes!": None, "variants!": {EACH: None}, "rows!": _ROWS},
    "comparison": {
        **_TRAINING,
        "blocks!": {
            EACH: {"training": {EACH: None}, "rows!": _ROWS, "seeds": None, "yardstick": None}
        },
        "data_sets!": {EACH: None},
        "yardstick": None,
        "paper": {EACH: {EACH: {EACH: None}}},
    },
    "selection": {**_TRAINING, "architectures!": {EACH: _ROWS}, "judge!": None},
    "overview": {},
}


def check_keys(experiment: Experiment) -> None:
    """Refuse keys that do not exist, as a misspelt one would have no effect.

    Args:
        experiment: Of a kind of `KINDS`.

    Raises:
        ConfigurationError: If a key does not exist, is missing, or has no keys where it must.
    """
    _check(experiment.content, {**KINDS[experiment.kind], **_LEGEND}, experiment.name, ())


def _check(content: Any, keys: Keys | None, name: str, above: tuple[str, ...]) -> None:
    if keys is None:
        return
    where = f" in {'.'.join(above)}" if above else ""
    if not isinstance(content, Mapping):
        raise ConfigurationError(
            f"The experiment {name} has {content!r} for {'.'.join(above)}; give keys with values."
        )
    below = {key.removesuffix(_MUST): value for key, value in keys.items()}
    for key in keys:
        if key.endswith(_MUST) and key.removesuffix(_MUST) not in content:
            missing = key.removesuffix(_MUST)
            others = [each for each in map(str, content) if each not in below]
            raise ConfigurationError(
                f"The experiment {name} lacks the key '{missing}'{where}.{nearest(missing, others)}"
            )
    for key, value in content.items():
        if EACH not in below and key not in below:
            raise ConfigurationError(
                f"The experiment {name} has no key '{key}'{where}.{nearest(str(key), below)}"
                f" Known are {', '.join(below)}."
            )
        _check(value, below.get(key, below.get(EACH)), name, (*above, str(key)))
