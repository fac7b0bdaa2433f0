"""``evigrad reproduce``: a figure or a table of the paper from nothing."""

from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from rich.box import SIMPLE_HEAD
from rich.table import Table

from evigrad.cli.experiments import PLACE_TYPES, add_list, place_from, place_of, reproduce
from evigrad.cli.messages import results_console, show
from evigrad.cli.parser import Options, Parser
from evigrad.errors import ConfigurationError
from evigrad.experiments import (
    Experiment,
    Place,
    missing,
    paper_experiments,
    read_experiment,
    state_of,
)
from evigrad.experiments.page import PRESETS, write_page
from evigrad.experiments.present import jobs_of

_DESCRIPTION = """\
Run what a figure or a table of the paper is made of, draw it, and write its table.

Each run is known by all its settings: what is done is never done again, what was interrupted goes
on from its last checkpoint. The preset 'small' shows the effect in minutes on a small machine,
'tiny' in a minute that it works, and 'paper' has the paper's settings.

examples:
  evigrad reproduce --list                          what there is, and how much of it is done
  evigrad reproduce fig4 --preset tiny
  evigrad reproduce table1 --data-dir DIR
  evigrad reproduce FILE.yaml --seeds 0 1           an experiment of your own"""

_TYPES: dict[str, Any] = {"preset": str | None, "list": bool, "dry_run": bool, "page": str | None}


def make_parser() -> Parser:
    """The options of ``evigrad reproduce``.

    Returns:
        The parser.
    """
    parser = Parser(description=_DESCRIPTION, usage="evigrad reproduce NAME [options]")
    group = parser.add_argument_group("what to reproduce")
    group.add_argument(
        "name", type=str, nargs="?", default=None, metavar="NAME", help="As fig4, or a YAML file."
    )
    options = Options(parser)
    options.add_group("how much of it", chosen, tuple(_TYPES), _TYPES)
    add_list(parser, "--seeds", int, None, "Seeds in the place of the preset's.")
    options.add_group("where", place_of, tuple(PLACE_TYPES), PLACE_TYPES)
    return parser


def chosen(
    name: str,
    preset: str | None = None,
    seeds: list[int] | None = None,
    list: bool = False,
    dry_run: bool = False,
    page: str | None = None,
) -> Experiment:
    """The experiment that options name.

    Args:
        name: As fig4, or a YAML file.
        preset: How much of it: paper, small or tiny. Default: small, where there is such a preset.
        seeds: In the place of the preset's.
        list: Only say what there is, how many of its jobs are done, and what those took.
        dry_run: Only say which jobs are missing.
        page: Markdown file to put all that was run of the paper into, of the presets paper and
            small: figures, tables, settings, seeds, machine and date. Without a NAME nothing is
            run for it.

    Returns:
        The experiment.
    """
    experiment = read_experiment(name, preset)
    return experiment if seeds is None else experiment.with_seeds(seeds)


def run(parser: Parser, options: Namespace) -> int:
    """Reproduce as the options say.

    Args:
        parser: The parser of the options.
        options: The options.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: If there is no such experiment.
    """
    place = place_from(options)
    if options.list:
        names = list(paper_experiments()) if options.name is None else [options.name]
        results_console().print(_overview(names, place))
        return 0
    if options.name is None and options.page is not None:
        return _write_page(options.page, place)
    if options.name is None:
        raise ConfigurationError(
            "Name what to reproduce, as in evigrad reproduce fig4; --list says what there is."
        )
    experiment = chosen(options.name, options.preset, options.seeds)
    if options.dry_run:
        jobs = jobs_of(experiment)
        left = missing(jobs, place)
        for job in left:
            begun = ", begun" if place.store.is_begun(job) else ""
            print(f"{job.id}  {job.kind}: {job.label}{begun}")
        show("note", f"{len(left)} of {len(jobs)} jobs are missing.")
        return 0
    code = reproduce(experiment, place)
    return code if options.page is None else max(code, _write_page(options.page, place))


def _write_page(page: str, place: Place) -> int:
    shown = write_page(Path(page), place.store)
    show("note", f"{page} shows {', '.join(shown) or 'nothing, as nothing was run'}")
    return 0


def _overview(names: list[str], place: Place) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        title="Experiments",
        caption="Jobs done of all, and the time that those took, one after the other.",
        caption_justify="left",
    )
    table.add_column("name", no_wrap=True)
    for name in ("shows", *PRESETS):
        table.add_column(name)
    for name in names:
        whole = read_experiment(name)
        cells, shows = [], whole.shows or whole.title
        for preset in PRESETS:
            try:
                experiment = read_experiment(name, preset)
            except ConfigurationError:
                cells.append("–")
                continue
            state = state_of(experiment, place.store)
            spent = f", {_duration(state.spent)}" if state.done else ""
            cells.append(f"{state.done}/{state.total}{spent}")
        table.add_row(whole.name, shows, *cells)
    return table


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"
