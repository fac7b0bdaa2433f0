"""The definition of an experiment: a YAML file with presets."""

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
CPU = "cpu"  # the paper's data and networks, scaled down to hours on a CPU
SMALL = "small"  # the default
TINY = "tiny"
PRESETS = (PAPER, CPU, SMALL, TINY)
Options = dict[str, Any]

# libyaml's loader is several times as fast and is in every wheel of PyYAML.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure or a table: the runs that it needs and how to show them. Each kind is a class.

    Attributes:
        name: Name, such as ``fig4``.
        preset: Preset, such as ``small``. ``paper`` is the file without presets.
        title: Title of the figure or table.
        caption: Caption of the figure or table.
        shows: Part of the paper, such as ``Figure 4``.
        seeds: Seeds. Each one is a run.
        training: Options of ``evigrad train`` that all trainings share.
        reference: Labels in black, with which the others are compared.
        ordered: Whether the other labels have an order, such as sizes.
        differs: Differences from the paper.
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
                f"The experiment {self.name} must have integer seeds of 0 or more,"
                f" got {self.seeds}."
            )

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        Experiment.kinds[cls.__name__.lower()] = cls

    def cases(self) -> list[Case]:
        """Return all cases to run."""
        raise NotImplementedError

    def table(self, rows: list[Row]) -> Table:
        """Return all numbers of the results."""
        raise NotImplementedError

    def figure(self, rows: list[Row]) -> "Figure | None":
        """Return the figure of the results, if there is one."""
        return None

    def remarks(self, rows: list[Row]) -> list[str]:
        """Return sentences about the results, such as whether an ordering of the theory holds."""
        return []

    def jobs(self) -> list[Job]:
        """Return all jobs, each once and after the jobs that it needs."""
        return distinct(job for case in self.cases() for job in case.jobs.values())

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """Return the experiment with other seeds."""
        return replace(self, seeds=list(seeds))

    def in_order(self, rows: list[Row], part: str, parts: Sequence[str]) -> list[Row]:
        """Return rows sorted by one of their keys, then in the order of the legend."""
        labels = legend_order((row["label"] for row in rows), self.reference, self.ordered)
        return sorted(rows, key=lambda r: (parts.index(r[part]), labels.index(r["label"])))


def paper_experiments() -> dict[str, Path]:
    """Return the paper's figures and tables: name to file, in the order of the paper."""
    # A file with an underscore holds the common settings of other files.
    files = {p.stem: p for p in FOLDER.glob("*.yaml") if not p.stem.startswith("_")}
    return dict(sorted(files.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[int, int, str]:
    """Return a sort key: figures by number, the Appendix, tables, and additions to the paper."""
    digits = "".join(c for c in name if c.isdigit())
    place = 0 if name.startswith("fig") else 1 if name.startswith("table") else 2
    return place, int(digits) if digits and place < 2 else 99, name


def read_experiment(name: str, preset: str | None = PAPER) -> Experiment:
    """Read an experiment.

    Args:
        name: Name of a figure or table of the paper, such as ``fig4``, or the path of a file.
        preset: Preset of the file. Default: ``small``, or the file itself if it has no presets.

    Returns:
        The experiment.

    Raises:
        ConfigurationError: If there is no such experiment or preset, or if the file is invalid.
    """
    paper_files = paper_experiments()
    path = paper_files.get(name, Path(name))
    if not path.is_file():
        if path.suffix in (".yaml", ".yml"):
            raise ConfigurationError(f"There is no file {path}.")
        raise ConfigurationError(
            f"There is no experiment '{name}'.{nearest(name, paper_files)} Use one of"
            f" {', '.join(paper_files) or 'none'}, or a YAML file."
        )
    if path.stem in paper_files and path.resolve() != paper_files[path.stem].resolve():
        raise ConfigurationError(
            f"{path} has the name of an experiment of the paper, and would overwrite its results."
            " Use another name."
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
    """Return the keys of a file, merged over the file that it extends."""
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
    """Return an experiment from its keys.

    Args:
        name: Name of the experiment.
        content: Keys, as in a file.
        preset: Key of ``content["presets"]``, or ``paper``.

    Returns:
        The experiment.

    Raises:
        ConfigurationError: If there is no such preset or kind, or if a key is missing, unknown or
            has an invalid value.
    """
    options = deepcopy(dict(content))  # the parser changes its input
    presets = options.pop("presets", {}) or {}
    if preset != PAPER:
        if preset not in presets:
            names = [PAPER, *presets]
            raise ConfigurationError(
                f"The experiment {name} has the presets {', '.join(names)}, not"
                f" '{preset}'.{nearest(preset, names)}"
            )
        options = merged(options, presets[preset] or {})
    kind = str(options.pop("kind", "none"))
    if kind not in Experiment.kinds:
        raise ConfigurationError(
            f"The experiment {name} is of the kind '{kind}'; known are"
            f" {', '.join(Experiment.kinds)}.{nearest(kind, Experiment.kinds)}"
        )
    experiment_class = Experiment.kinds[kind]
    keys = [attribute.name for attribute in fields(experiment_class)]
    for key in options:
        if key not in keys:
            raise ConfigurationError(
                f"The experiment {name} has the key '{key}', which the kind {kind} does not"
                f" know.{nearest(key, keys)}"
            )
    parser = _parser(experiment_class)
    try:
        parsed = parser.instantiate(
            parser.parse_object({**options, "name": name, "preset": preset})
        )
    except (ArgumentError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"The experiment {name} makes no sense: {' '.join(str(error).split())}"
        ) from error
    return experiment_class(**vars(parsed))


@cache
def _parser(kind: type[Experiment]) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, as_group=False)
    return parser


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Options:
    """Return a nested dictionary with changes.

    Args:
        base: The original.
        changes: Dictionaries are merged, null removes a key, and other values replace the original.

    Returns:
        The changed dictionary.
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
