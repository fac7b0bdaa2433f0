"""An experiment as it is written down: a YAML file with presets."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from evigrad.errors import ConfigurationError, nearest

# The files of the paper's figures and tables: beside the package where it is installed, at the top
# of the source tree otherwise.
_INSTALLED = Path(__file__).parent / "paper"
_SOURCE = Path(__file__).parents[3] / "experiments" / "paper"

PAPER = "paper"  # the preset that the file itself is


@dataclass(frozen=True)
class Experiment:
    """A figure or a table: what is run for it, and how it is shown.

    Attributes:
        name: As ``fig4``.
        preset: As ``small``; ``paper`` is the file without any.
        kind: Which figure or table, a name of ``evigrad.experiments.kinds.KINDS``.
        title: In words.
        caption: What is to be seen.
        shows: Which one of the paper it is, as ``Figure 4``.
        seeds: Each is a run of its own.
        content: The rest, which the kind understands.
    """

    name: str
    preset: str
    kind: str
    title: str
    caption: str
    shows: str
    seeds: tuple[int, ...]
    content: dict[str, Any] = field(default_factory=dict)

    def take(self, name: str, default: Any = None) -> Any:
        """A part of the content.

        Args:
            name: Its key.
            default: Where there is none; None is no default.

        Returns:
            The part.

        Raises:
            ConfigurationError: If there is no such part.
        """
        if name in self.content:
            return self.content[name]
        if default is None:
            raise ConfigurationError(f"The experiment {self.name} lacks the key '{name}'.")
        return default


def paper_experiments() -> dict[str, Path]:
    """The paper's figures and tables.

    Returns:
        Name to file, in the paper's order.
    """
    folder = _INSTALLED if _INSTALLED.is_dir() else _SOURCE
    # One with an underscore is what others have in common.
    files = {p.stem: p for p in folder.glob("*.yaml") if not p.stem.startswith("_")}
    return dict(sorted(files.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[int, int, str]:
    """Figures by their number, those of the Appendix, tables, and what is not the paper's."""
    digits = "".join(c for c in name if c.isdigit())
    place = 0 if name.startswith("fig") else 1 if name.startswith("table") else 2
    return place, int(digits) if digits and place < 2 else 99, name


def read_experiment(name: str, preset: str = PAPER) -> Experiment:
    """Read an experiment.

    Args:
        name: Of the paper's, as ``fig4``; or the path of a file.
        preset: Of the file's.

    Returns:
        The experiment.

    Raises:
        ConfigurationError: If there is no such experiment or preset, or the file is wrong.
    """
    known = paper_experiments()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise ConfigurationError(
            f"There is no experiment '{name}'.{nearest(name, known)} Known are"
            f" {', '.join(known) or 'none'}, and YAML files."
        )
    return make_experiment(path.stem, _content(path), preset)


def _content(path: Path) -> dict[str, Any]:
    """The keys of a file, over those of the one beside it that it extends."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds no experiment.")
    base = content.pop("extends", None)
    if base is None:
        return content
    return merged(_content(path.with_name(f"{base}.yaml")), content)


def make_experiment(name: str, content: Mapping[str, Any], preset: str = PAPER) -> Experiment:
    """An experiment from its keys.

    Args:
        name: Its name.
        content: As in a file.
        preset: Of ``content["presets"]``, or ``paper``; empty for one without any.

    Returns:
        The experiment.

    Raises:
        ConfigurationError: If there is no such preset, or a key is missing.
    """
    rest = dict(content)
    presets = rest.pop("presets", {}) or {}
    if preset not in (PAPER, ""):
        if preset not in presets:
            known = [PAPER, *presets]
            raise ConfigurationError(
                f"The experiment {name} has the presets {', '.join(known)}, not"
                f" '{preset}'.{nearest(preset, known)}"
            )
        rest = merged(rest, presets[preset] or {})
    try:
        return Experiment(
            name=name,
            preset=preset,
            kind=rest.pop("kind"),
            title=rest.pop("title"),
            caption=" ".join(rest.pop("caption", "").split()),
            shows=rest.pop("shows", ""),
            seeds=tuple(rest.pop("seeds")),
            content=rest,
        )
    except KeyError as error:
        raise ConfigurationError(f"The experiment {name} lacks the key {error}.") from error


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A nested dictionary with changes.

    Args:
        base: Before.
        changes: Dictionaries go into dictionaries, null removes a key, and anything else takes the
            place of what was there.

    Returns:
        After.
    """
    result = dict(base)
    for name, value in changes.items():
        if value is None and name in result:
            del result[name]
            continue
        before = result.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = merged(before, value)
        result[name] = value
    return result
