"""The display of an experiment: its figure, its table, and a page of all results."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from evigrad.errors import ConfigurationError
from experiments.cases import Case, Row, coverage, rows_of, seeds_of
from experiments.definition import (
    CPU,
    PAPER,
    PRESETS,
    SMALL,
    Experiment,
    paper_experiments,
    read_experiment,
)
from experiments.jobs import Store
from experiments.trainings import stored

PAGE_PRESETS = (PAPER, CPU, SMALL)  # presets that a page shows by default
BEGIN, END = "<!-- experiments -->", "<!-- end experiments -->"

_MOST_NAMES = 6  # largest number of names in a sentence
_SUMMARY = "summary.json"
_WANTED = "seeds_wanted"
_IMAGES = "images"  # folder of the figures, next to the page


@dataclass(frozen=True)
class Shown:
    """The files of an experiment.

    Attributes:
        folder: Folder of its files.
        figure: Path of the PNG. None if there is only a table.
        table: Table as Markdown.
        summary: Jobs, seeds, machines, dates, seconds and remarks.
    """

    folder: Path
    figure: Path | None
    table: str
    summary: Mapping[str, Any]


def state_of(experiment: Experiment, store: Store) -> tuple[int, int, float]:
    """Return finished jobs, all jobs, and the total seconds of the finished ones."""
    results = [store.result(job) for job in experiment.jobs()]
    finished = [result for result in results if result is not None]
    return len(finished), len(results), float(sum(result["job_seconds"] for result in finished))


def shown_in(experiment: Experiment, store: Store) -> Path:
    """Return the folder of an experiment's figure and tables."""
    return _folder_of(experiment.name, experiment.preset, store)


def _folder_of(name: str, preset: str, store: Store) -> Path:
    return store.path / "shown" / name / preset


def present(experiment: Experiment, store: Store) -> Shown:
    """Draw the results of an experiment, and write its table.

    Args:
        experiment: Experiment.
        store: Results. The files go into a folder of it.

    Returns:
        The files.

    Raises:
        ConfigurationError: If there is no result yet.
    """
    cases = experiment.cases()
    rows = rows_of(cases, store)
    if cases and not rows:
        raise ConfigurationError(f"Nothing of {experiment.name} ({experiment.preset}) is done.")
    folder = shown_in(experiment, store)
    folder.mkdir(parents=True, exist_ok=True)
    table, figure = experiment.table(rows), experiment.figure(rows)
    (folder / "table.md").write_text(table.markdown() + "\n", encoding="utf-8")
    (folder / "table.csv").write_text(table.csv(), encoding="utf-8")
    (folder / "table.tex").write_text(table.latex(), encoding="utf-8")
    if figure is not None:
        figure.savefig(folder / "figure.png", dpi=130)
        figure.savefig(folder / "figure.pdf")
    jobs = experiment.jobs()
    finished = [result for result in map(store.result, jobs) if result is not None]
    summary = {
        "name": experiment.name,
        "preset": experiment.preset,
        "shows": experiment.shows,
        "seeds": sorted(seeds_of(rows)),
        _WANTED: experiment.seeds,
        "jobs": [len(finished), len(jobs)],
        "seconds": float(sum(result["job_seconds"] for result in finished)),
        "machines": sorted({result["machine"] for result in finished}),
        "dates": sorted({result["date"] for result in finished}),
        "remarks": [*experiment.remarks(rows), *_warnings(experiment, cases, rows, store)],
    }
    (folder / _SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    picture = None if figure is None else folder / "figure.png"
    return Shown(folder, picture, table.markdown(), summary)


def _warnings(
    experiment: Experiment, cases: Sequence[Case], rows: Sequence[Row], store: Store
) -> list[str]:
    """Return sentences about missing results and about rows that are not comparable."""
    warnings = []
    covered = coverage(cases, rows)
    if left := [name for name, (done, _) in covered.items() if not done]:
        warnings.append(f"Not run: {_enumerated(left)}.")
    partial = {name: both for name, both in covered.items() if 0 < both[0] < both[1]}
    if len(set(partial.values())) == 1 and len(partial) + len(left) == len(covered):
        done, total = next(iter(partial.values()))
        warnings.append(f"So far {done} of {total} seeds.")
    elif partial:
        progress = [f"{name} ({done} of {total})" for name, (done, total) in partial.items()]
        warnings.append(f"Fewer seeds than the others: {_enumerated(progress)}.")
    results = [(job, store.result(job)) for job in experiment.jobs()]
    reasons = Counter(filter(None, (store.failure(job) for job, result in results if not result)))
    for reason, count in reasons.items():
        warnings.append(f"Failed, {count} {'job' if count == 1 else 'jobs'}: {reason}")
    timed = {result["machine"] for job, result in results if result and job.kind == "time"}
    if len(timed) > 1:
        warnings.append(f"Times of several machines: {'; '.join(sorted(timed))}.")
    return warnings


def _enumerated(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def write_page(page: Path, store: Store, presets: Sequence[str] = PAGE_PRESETS) -> list[str]:
    """Write all results into a page of Markdown, and its figures into a folder next to it.

    Args:
        page: File. Sections of experiments in the store replace those between its markers, and
            other sections stay. Without markers, or without the file, the sections come at the end.
        store: Results. The page shows the experiments that ``present`` has shown before.
        presets: Presets to show.

    Returns:
        Names of the experiments on the page.

    Raises:
        ConfigurationError: If the page cannot be read.
    """
    before, sections, after = _read_page(page)
    parts, names = [], []
    for name, preset in product(paper_experiments(), PRESETS):
        command = _command(name, preset)
        if preset in presets and (experiment := _if_shown(name, preset, store)):
            sections[command] = write_section(experiment, present(experiment, store), page)
        if command in sections:
            parts.append(sections[command])
            names.append(name)
    page.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(parts)
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")
    return list(dict.fromkeys(names))


def _read_page(page: Path) -> tuple[str, dict[str, str], str]:
    """Return the text before the markers, the sections by command, and the text after."""
    try:
        content = page.read_text(encoding="utf-8") if page.exists() else ""
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{page} is not UTF-8 text ({error}). Save it as UTF-8, or name another file."
        ) from error
    before, begin, after_begin = content.partition(BEGIN + "\n")
    between, end, after = after_begin.partition(END)
    if not (begin and end):
        return content.rstrip("\n") + "\n\n" if content else "", {}, "\n"
    sections: dict[str, str] = {}
    for text in re.split(r"^(?=### )", between, flags=re.MULTILINE):
        if command := re.search(r"^ {4}(.+)$", text, flags=re.MULTILINE):
            sections[command[1]] = text.rstrip("\n") + "\n"
    return before, sections, after


def _if_shown(name: str, preset: str, store: Store) -> Experiment | None:
    """Return an experiment that was shown before, if it still has results."""
    summary = _folder_of(name, preset, store) / _SUMMARY
    if not summary.exists():  # checking this is faster than reading the experiment
        return None
    try:
        experiment = read_experiment(name, preset)
    except ConfigurationError:  # the preset no longer exists
        return None
    seeds = stored(summary).get(_WANTED, experiment.seeds)
    if seeds != experiment.seeds:  # otherwise panels and blocks keep their own seeds
        experiment = experiment.with_seeds(seeds)
    cases = experiment.cases()
    return experiment if not cases or rows_of(cases, store) else None


def _command(name: str, preset: str) -> str:
    return f"python -m experiments {name}" + ("" if preset == SMALL else f" --preset {preset}")


def write_section(experiment: Experiment, shown: Shown, page: Path) -> str:
    """Copy the figure of an experiment next to a page, and return its section of the page."""
    summary, (done, total) = shown.summary, shown.summary["jobs"]
    lines = [f"### {experiment.title}", "", _one_sentence_a_line(experiment.caption)]
    if shown.figure is not None:
        name = f"{_IMAGES}/{experiment.name}-{experiment.preset}.png"
        (page.parent / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shown.figure, page.parent / name)
        lines += ["", f"![{experiment.title}]({name})"]
    seeds = ", ".join(map(str, summary["seeds"]))
    how = f" Preset `{experiment.preset}`, seeds {seeds}." if total else ""
    facts = [*summary["remarks"], f"Shows: {experiment.shows}.{how}"]
    if experiment.differs:
        facts.append(f"Differences from the paper: {' '.join(experiment.differs.split())}")
    if total:
        machines = " and ".join(summary["machines"])
        facts.append(f"Machine: {machines}. Time of all runs: {duration(summary['seconds'])}.")
    if done < total:
        facts.append(f"{done} of {total} jobs are done.")
    lines += ["", shown.table, "", *(f"- {fact}" for fact in facts)]
    command = _command(experiment.name, experiment.preset)
    return "\n".join([*lines, "", f"    {command}"]) + "\n"


def _one_sentence_a_line(text: str) -> str:
    return re.sub(r"(?<=[.?]) (?=[A-Z])", "\n", " ".join(text.split()))


def duration(seconds: float) -> str:
    """Return a time in words."""
    day = 86400
    units = (("s", 1, 90), ("min", 60, 5400), ("h", 3600, 2 * day), ("days", day, 730 * day))
    for unit, size, below in units:
        if seconds < below:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / (365 * day):.0f} years"
