"""An experiment as it is written down: a YAML file with presets."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from evigrad.errors import ConfigurationError, nearest

# The files of the paper's figures and tables: beside the package where it is installed, at the top
# of the source tree otherwise.
_INSTALLED = Path(__file__).parent / "paper"
_SOURCE = Path(__file__).parents[3] / "experiments" / "paper"

PAPER = "paper"  # the preset that the file itself is
SMALL = "small"  # the one that is taken where nothing is said

# libyaml's is several times as fast, and in every wheel of PyYAML.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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

    @property
    def digest(self) -> str:
        """A few letters that tell it from others of the same name."""
        text = json.dumps([self.kind, list(self.seeds), self.content], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:6]

    def with_seeds(self, seeds: Sequence[int]) -> "Experiment":
        """The same with other seeds, in blocks that have their own as well.

        Args:
            seeds: Each is a run of its own.

        Returns:
            A copy.

        Raises:
            ConfigurationError: If they are no seeds.
        """
        content = dict(self.content)
        if "blocks" in content:
            content["blocks"] = {
                name: {key: value for key, value in block.items() if key != "seeds"}
                for name, block in content["blocks"].items()
            }
        return replace(self, seeds=_seeds(seeds, self.name), content=content)

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


def read_experiment(name: str, preset: str | None = PAPER) -> Experiment:
    """Read an experiment.

    Args:
        name: Of the paper's, as ``fig4``; or the path of a file.
        preset: Of the file's. None takes ``small`` where there is one, else the file itself.

    Returns:
        The experiment.

    Raises:
        ConfigurationError: If there is no such experiment or preset, or the file is wrong.
    """
    known = paper_experiments()
    path = known.get(name, Path(name))
    if path.suffix in (".yaml", ".yml") and not path.is_file():
        raise ConfigurationError(f"There is no file {path}.")
    if path.stem in known and path.resolve() != known[path.stem].resolve():
        raise ConfigurationError(
            f"{path} has the name of an experiment of the paper, whose results it would overwrite;"
            " name it otherwise."
        )
    if not path.is_file():
        raise ConfigurationError(
            f"There is no experiment '{name}'.{nearest(name, known)} Known are"
            f" {', '.join(known) or 'none'}, and YAML files."
        )
    content = _content(path)
    if preset is None:
        preset = SMALL if SMALL in (content.get("presets") or {}) else PAPER
    return make_experiment(path.stem, content, preset)


def _content(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The keys of a file, over those of the one beside it that it extends."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds no experiment.")
    base = content.pop("extends", None)
    if base is None:
        return content
    below = path.with_name(f"{base}.yaml")
    if below in above or below == path:
        raise ConfigurationError(f"{path} extends itself, by {below.name}.")
    return merged(_content(below, (*above, path)), content)


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
            seeds=_seeds(rest.pop("seeds"), name),
            content=rest,
        )
    except KeyError as error:
        raise ConfigurationError(f"The experiment {name} lacks the key {error}.") from error


def _seeds(value: Any, name: str) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and value and all(type(s) is int and s >= 0 for s in value):
        return tuple(value)
    raise ConfigurationError(
        f"The experiment {name} has {value!r} for seeds; give a list of whole numbers, 0 or more."
    )


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
