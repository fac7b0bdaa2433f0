"""An experiment as it is written down: a YAML file with presets."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from evigrad.errors import ConfigurationError, nearest
from experiments.cases import Case, Row
from experiments.figures import legend_order
from experiments.jobs import Job, distinct
from experiments.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent / "paper"
PAPER = "paper"  # the preset that the file itself is
CPU = "cpu"  # the paper's data, network and schedule, and what a processor does in hours
SMALL = "small"  # the default
TINY = "tiny"
PRESETS = (PAPER, CPU, SMALL, TINY)
Options = dict[str, Any]

# libyaml's is several times as fast, and in every wheel of PyYAML.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure or a table: what is run for it, and how it is shown. Each kind is a class.

    Attributes:
        name: As ``fig4``.
        preset: As ``small``; ``paper`` is the file without any.
        title: In words.
        caption: What is to be seen.
        shows: Which one of the paper it is, as ``Figure 4``.
        seeds: Each is a run of its own.
        training: Options of ``evigrad train`` that all trainings share.
        reference: Labels in black, which the others are compared with.
        ordered: Whether the others are in an order, as sizes are.
        differs: Where it differs from the paper, in words.
    """

    name: str
    preset: str = PAPER
    title: str
    caption: str = ""
    shows: str = ""
    seeds: list[int]
    training: Options = field(default_factory=dict)
    reference: list[str] = field(default_factory=list)
    ordered: bool = False
    differs: str = ""

    kinds: ClassVar[dict[str, type["Experiment"]]] = {}

    def __post_init__(self) -> None:
        if not self.seeds or min(self.seeds) < 0:
            raise ConfigurationError(
                f"The experiment {self.name} has {self.seeds} for seeds; give whole numbers, 0 or"
                " more."
            )

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        Experiment.kinds[cls.__name__.lower()] = cls

    def cases(self) -> list[Case]:
        """What is run."""
        raise NotImplementedError

    def table(self, rows: list[Row]) -> Table:
        """All numbers of the results."""
        raise NotImplementedError

    def figure(self, rows: list[Row]) -> "Figure | None":
        """The figure of the results, if it has one."""
        return None

    def remarks(self, rows: list[Row]) -> list[str]:
        """What theory demands and whether it holds, in words, if there is anything to say."""
        return []

    def jobs(self) -> list[Job]:
        """All jobs, each once, with what it needs before it."""
        return distinct(job for case in self.cases() for job in case.jobs.values())

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """The same with other seeds."""
        return replace(self, seeds=list(seeds))

    def own_settings(self) -> list[tuple[str, Options]]:
        """Names of panels, blocks or rows, and the options that their trainings have alone."""
        return []

    def in_order(self, rows: list[Row], part: str, parts: Sequence[str]) -> list[Row]:
        """Rows by one of their keys, and then as a legend has their labels."""
        labels = legend_order((row["label"] for row in rows), self.reference, self.ordered)
        return sorted(rows, key=lambda r: (parts.index(r[part]), labels.index(r["label"])))


def paper_experiments() -> dict[str, Path]:
    """The paper's figures and tables: name to file, in the paper's order."""
    # One with an underscore is what others have in common.
    files = {p.stem: p for p in FOLDER.glob("*.yaml") if not p.stem.startswith("_")}
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
    if not path.is_file():
        if path.suffix in (".yaml", ".yml"):
            raise ConfigurationError(f"There is no file {path}.")
        raise ConfigurationError(
            f"There is no experiment '{name}'.{nearest(name, known)} Known are"
            f" {', '.join(known) or 'none'}, and YAML files."
        )
    if path.stem in known and path.resolve() != known[path.stem].resolve():
        raise ConfigurationError(
            f"{path} has the name of an experiment of the paper, whose results it would overwrite;"
            " name it otherwise."
        )
    content = _content(path)
    if preset is None:
        presets = list(content.get("presets") or {})
        if presets and SMALL not in presets:
            raise ConfigurationError(
                f"{path} has presets, but none named '{SMALL}', which is taken where none is asked"
                f" for.{nearest(SMALL, presets)} Ask for one, --preset {', '.join(presets)}, or for"
                f" the file without any, --preset {PAPER}."
            )
        preset = SMALL if presets else PAPER
    return make_experiment(path.stem, content, preset)


def _content(path: Path, above: tuple[Path, ...] = ()) -> Options:
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
        preset: Of ``content["presets"]``, or ``paper``.

    Returns:
        The experiment.

    Raises:
        ConfigurationError: If there is no such preset or kind, or a key is missing, unknown, or of
            a value that makes no sense.
    """
    rest = deepcopy(dict(content))  # the parser writes into what it is given
    presets = rest.pop("presets", {}) or {}
    if preset != PAPER:
        if preset not in presets:
            known = [PAPER, *presets]
            raise ConfigurationError(
                f"The experiment {name} has the presets {', '.join(known)}, not"
                f" '{preset}'.{nearest(preset, known)}"
            )
        rest = merged(rest, presets[preset] or {})
    kind = str(rest.pop("kind", "none"))
    if kind not in Experiment.kinds:
        raise ConfigurationError(
            f"The experiment {name} is of the kind '{kind}'; known are"
            f" {', '.join(Experiment.kinds)}.{nearest(kind, Experiment.kinds)}"
        )
    made = Experiment.kinds[kind]
    keys = [each.name for each in fields(made)]
    for key in rest:
        if key not in keys:
            raise ConfigurationError(
                f"The experiment {name} has the key '{key}', which the kind {kind} does not"
                f" know.{nearest(key, keys)}"
            )
    parser = _parser(made)
    try:
        found = parser.instantiate(parser.parse_object({**rest, "name": name, "preset": preset}))
    except (ArgumentError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"The experiment {name} makes no sense: {' '.join(str(error).split())}"
        ) from error
    return made(**vars(found))


@cache
def _parser(kind: type[Experiment]) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False)
    return parser


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Options:
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
