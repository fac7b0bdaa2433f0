"""``python -m experiments``: reproduce a figure or a table of the paper."""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from evigrad import cli
from evigrad.errors import ConfigurationError, EvigradError
from experiments import kinds  # noqa: F401  # the kinds that files may name
from experiments.checks import problems
from experiments.definition import PRESETS, Experiment, paper_experiments, read_experiment
from experiments.jobs import Job, Store
from experiments.present import PAGE_PRESETS, duration, present, state_of, write_page
from experiments.runner import PARTIAL, RUN, missing, run
from experiments.trainings import Place, place_of

_DESCRIPTION = """\
Reproduce a figure or table from the paper: run the experiments, draw the figure, and write the
table.

A run is identified by all its settings. Finished runs never run again, and interrupted runs resume
from their last checkpoint.

presets:
  tiny    checks in a minute that it works
  small   shows the effect in minutes on a small machine (the default)
  cpu     the paper's data and networks, scaled down to hours on a CPU
  paper   the paper's settings

examples:
  python -m experiments --list                      list experiments and their progress
  python -m experiments fig4 --preset tiny
  python -m experiments table1 --data-dir DIR
  python -m experiments FILE.yaml --seeds 0 1       a custom experiment
  python -m experiments pareto --help               compare estimators on your data
  python -m experiments bounds --help               draw bounds along a hyperparameter"""
# Modules of commands that take the options of ``evigrad train``, and more.
_COMMANDS = ("bounds", "pareto")
_INTERRUPTED = 130
_PIPE_WIDTH = 100  # width of tables outside of a terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments. Default: the arguments of the process.

    Returns:
        The exit code: zero for success, 1 if a run failed, 2 for a mistake that the user can fix,
            and 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in _COMMANDS:
        name, *others = arguments
        command = import_module(f"experiments.{name}")
        return cli.reported(lambda: cli.run_command(command, others))
    options = make_parser().parse_args(arguments)
    try:
        return _run(options)
    except EvigradError as error:
        _say(f"error: {error}")
        return 2
    except OSError as error:
        _say(f"error: {error.filename or 'A file'}: {error.strerror or error}.")
        return 2
    except KeyboardInterrupt:
        _say("Interrupted. Run the same command to resume.")
        return _INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="name, such as fig4, or a YAML file")
    add("--preset", help=f"size: {', '.join(PRESETS)} (default: small, if the file has it)")
    add(
        "--seeds",
        type=int,
        nargs="+",
        metavar="N",
        help="seeds that replace the seeds of the preset",
    )
    add("--list", action="store_true", help="only list experiments and their progress")
    add("--dry-run", action="store_true", help="only list the missing jobs")
    add("--no-run", action="store_true", help="only draw the existing results")
    add(
        "--page",
        type=Path,
        metavar="FILE",
        help="Markdown file that gets all results of --preset (default: paper, cpu and small);"
        " without a NAME nothing runs; other sections of the file stay",
    )
    add("--results", default="results", metavar="DIR", help="folder of all results")
    add(
        "--import",
        dest="imported",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="results to start from, which --export wrote on any machine; may be repeated",
    )
    add(
        "--export",
        type=Path,
        metavar="FILE",
        help="write all results, without the trained networks, into a file (.jsonl.gz)",
    )
    add("--data-dir", metavar="DIR", help="folder of data sets (default: EVIGRAD_DATA)")
    add("--device", default="auto", help="cpu, cuda, or auto (cuda if available)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: one per core)")
    return parser


def _run(options: argparse.Namespace) -> int:
    place = place_of(options.results, options.data_dir, options.device, options.threads)
    store = Store(place.results)
    if options.page is not None and options.name not in (None, *paper_experiments()):
        raise ConfigurationError(
            f"--page only shows experiments of the paper, got '{options.name}'. Omit --page. The"
            f" figure and tables are in {place.results / 'shown'}."
        )
    for file in options.imported:
        _say(f"{store.take(file)} results of {file} are new in {place.results}")
    code = _done(options, place, store)
    if options.page is not None:
        presets = [options.preset] if options.preset else PAGE_PRESETS
        shown = write_page(options.page, store, presets)
        _say(f"{options.page} shows {', '.join(shown) or 'nothing, because nothing was run'}")
    if options.export is not None:
        _say(f"{options.export} holds {store.export(options.export)} results")
    return code


def _done(options: argparse.Namespace, place: Place, store: Store) -> int:
    """List or run what the options request, and return the exit code."""
    if options.list:
        names = [options.name] if options.name else list(paper_experiments())
        presets = [options.preset] if options.preset else PRESETS
        _console().print(_overview(names, presets, store))
        return 0
    if options.name is None:
        if not (options.page or options.export or options.imported):
            raise ConfigurationError(
                "Name an experiment, for example python -m experiments fig4. --list shows all."
            )
        return 0
    experiment = read_experiment(options.name, options.preset)
    if options.seeds is not None:
        experiment = experiment.with_seeds(options.seeds)
    if options.dry_run:
        jobs = experiment.jobs()
        left = missing(jobs, store)
        for job in left:
            print(f"{job.id}  {job.label}{_begun(job, store)}")
        _say(f"{len(left)} of {len(jobs)} jobs are missing.")
        _warn(problems(left, place), left)
        return 0
    if options.no_run:
        return 0 if _show(experiment, store) else 1
    return reproduce(experiment, place)


def reproduce(experiment: Experiment, place: Place) -> int:
    """Run what is missing of an experiment, draw its figure, and print its table.

    Args:
        experiment: Experiment.
        place: Where to run.

    Returns:
        The exit code: 1 if a run failed.

    Raises:
        ConfigurationError: If nothing of it can run here, or if there is nothing to show.
    """
    store, start = Store(place.results), time.perf_counter()
    forbidden = _left_out(experiment, place)
    jobs = [job for job in experiment.jobs() if job.id not in forbidden]
    left = missing(jobs, store)
    _say(f"{experiment.name}, {experiment.preset}: {experiment.title}")
    if jobs:
        _say(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done, in {place.results}")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(experiment.name, total=len(left))

        def tell(message: str, over: int, count: int) -> None:
            bar.update(task, completed=over)
            line = f"[{over}/{count}] {message}"
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

        failures = run(jobs, place, tell)
    by_reason: dict[str, list[str]] = {}
    for failure in failures:
        by_reason.setdefault(failure.reason, []).append(failure.job.label)
    for reason, names in by_reason.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        _say(f"warning: {names[0]}{others} failed: {reason}")
    if left:
        _say(f"{len(left) - len(failures)} jobs in {time.perf_counter() - start:.0f} s")
    return 0 if _show(experiment, store) and not (failures or forbidden) else 1


def _show(experiment: Experiment, store: Store) -> bool:
    """Draw the figure, print the table, and return whether there is anything to show."""
    try:
        shown = present(experiment, store)
    except ConfigurationError as error:
        _say(f"error: {error}")
        return False
    print(shown.table)
    for remark in shown.summary["remarks"]:
        _say(remark)
    _say(f"Figure, tables and summary: {shown.folder}")
    return True


def _begun(job: Job, store: Store) -> str:
    """Return the state of a missing job, as words behind its label."""
    if store.result(job) is not None:
        return ", again: its network was not imported"
    if store.failure(job) is not None:
        return ", failed the last time"
    begun = any((store.folder(job) / name).exists() for name in (RUN, PARTIAL))
    return ", begun" if begun else ""


def _left_out(experiment: Experiment, place: Place) -> set[str]:
    """Return the jobs that cannot run here, after a warning. Raise if nothing can be shown."""
    store, cases = Store(place.results), experiment.cases()
    left = missing(experiment.jobs(), store)
    jobs_by_reason = problems(left, place)
    forbidden = {job.id for jobs in jobs_by_reason.values() for job in jobs}
    if cases and all(any(job.id in forbidden for job in case.jobs.values()) for case in cases):
        raise ConfigurationError(" ".join(jobs_by_reason))
    _warn(jobs_by_reason, left)
    for reason, jobs in jobs_by_reason.items():
        for job in jobs:
            store.fail(job, reason)
    return forbidden


def _warn(jobs_by_reason: Mapping[str, Sequence[Job]], left: Sequence[Job]) -> None:
    for reason, jobs in jobs_by_reason.items():
        _say(f"warning: {len(jobs)} of {len(left)} jobs cannot run: {reason}")


def _overview(names: Sequence[str], presets: Sequence[str], store: Store) -> Table:
    caption = "Finished jobs, all jobs, and the total time of the finished ones."
    table = Table(box=SIMPLE_HEAD, title="Experiments", caption=caption, caption_justify="left")
    table.add_column("name", no_wrap=True)
    for head in ("shows", *presets):
        table.add_column(head)
    for name in names:
        whole, cells = read_experiment(name), []
        for preset in presets:
            try:
                done, total, spent = state_of(read_experiment(name, preset), store)
                cells.append(f"{done}/{total}" + (f", {duration(spent)}" if done else ""))
            except ConfigurationError:  # no such preset
                cells.append("–")
        table.add_row(whole.name, whole.shows or whole.title, *cells)
    return table


def _say(text: str) -> None:
    """Print one line on standard error."""
    print(" ".join(text.split()), file=sys.stderr)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


if __name__ == "__main__":
    sys.exit(main())
