"""A page of all experiments that were run, made from their results."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from evigrad.errors import ConfigurationError
from evigrad.experiments.definition import PAPER, Experiment, paper_experiments, read_experiment
from evigrad.experiments.kinds.comparison import STANDS_FOR
from evigrad.experiments.present import SUMMARY, has_results, jobs_of, present, shown_in
from evigrad.experiments.store import Store
from evigrad.training.files import replacing, writing

PRESETS = (PAPER, "small", "tiny")
BEGIN, END = "<!-- experiments -->", "<!-- end experiments -->"
_IMAGES = "images/experiments"


def write_page(page: Path, store: Store, presets: tuple[str, ...] = (PAPER, "small")) -> list[str]:
    """Put all that was run into a page of Markdown, and its figures beside it.

    Args:
        page: The file. What stands between its markers is replaced; without such, or without the
            file, they come to its end.
        store: Results.
        presets: Which are shown.

    Returns:
        Names of the experiments that are shown.

    Raises:
        ConfigurationError: If the page cannot be written.
    """
    parts, shown, left, reduced = [], [], [], []
    for name in paper_experiments():
        found = []
        for preset in presets:
            if _is_shown(name, preset, store):
                found.append(_section(read_experiment(name, preset), store, page.parent))
        if found:
            shown.append(name)
            parts += found
            if jobs_of(read_experiment(name)) and not _is_shown(name, PAPER, store):
                reduced.append(f"`{name}`")
        else:
            experiment = read_experiment(name)
            left.append(f"`{name}` ({experiment.shows or experiment.title})")
    if left or reduced:
        said = [f"At the paper's settings: {_sentence(reduced)}"] if reduced else []
        said += [f"Not at all: {_sentence(left)}"] if left else []
        parts.append("### Not run\n\n" + "\n\n".join(said) + "\n")
    text = "\n".join(parts)
    before, after = "", ""
    if page.exists():
        try:
            text_before = page.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{page} is no text in UTF-8 ({error}). Save it as UTF-8, or name another file."
            ) from error
        before, found_begin, rest = text_before.partition(BEGIN + "\n")
        _, found_end, after = rest.partition(END)
        if not (found_begin and found_end):
            before, after = before.rstrip("\n") + "\n\n", "\n"
    with writing(page):
        page.parent.mkdir(parents=True, exist_ok=True)
    with replacing(page) as file:
        file.write(f"{before}{BEGIN}\n{text}{END}{after or ''}".encode())
    return shown


def _is_shown(name: str, preset: str, store: Store) -> bool:
    """Whether it was shown before, and still is: some of its jobs may be those of another one."""
    try:
        experiment = read_experiment(name, preset)
    except ConfigurationError:  # it has no such preset
        return False
    return (shown_in(experiment, store) / SUMMARY).exists() and has_results(experiment, store)


def _section(experiment: Experiment, store: Store, folder: Path) -> str:
    shown = present(experiment, store)
    summary = json.loads((shown.folder / SUMMARY).read_text(encoding="utf-8"))
    title = f"### {experiment.title}"
    command = f"evigrad reproduce {experiment.name}"
    command += "" if experiment.preset == "small" else f" --preset {experiment.preset}"
    done, total = summary["jobs"]
    lines = [title, "", f"    {command}", "", experiment.caption]
    if shown.figure is not None:
        stem = f"{experiment.name}-{experiment.preset}.png"
        target = folder / _IMAGES / stem
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(shown.figure, target)
        lines += ["", f"![{experiment.title}]({_IMAGES}/{stem})"]
    lines += ["", shown.table, ""]
    lines += [f"- {remark}" for remark in shown.remarks]
    lines.append(f"- What it shows: {experiment.shows}.{_how(experiment, summary)}")
    if total:
        lines += [
            f"- Settings: {_settings(experiment)}.",
            f"- {'; '.join(summary['machines'])}; {_dates(summary['dates'])};"
            f" {summary['seconds'] / 60:.0f} minutes of runs.",
        ]
    if summary["num_data"]:
        lines.append(f"- Training data: {', '.join(f'{n:,}' for n in summary['num_data'])}.")
    if done < total:
        lines.append(f"- {done} of {total} jobs are done.")
    if differs := experiment.content.get("differs"):
        lines.append(f"- Where it differs from the paper: {' '.join(differs.split())}")
    return "\n".join(lines) + "\n"


def _how(experiment: Experiment, summary: Mapping[str, Any]) -> str:
    if not summary["jobs"][1]:  # drawn, from nothing that is run
        return ""
    seeds = ", ".join(map(str, summary["seeds"]))
    return f" Preset `{experiment.preset}`, seeds {seeds}."


def _settings(experiment: Experiment) -> str:
    """What all trainings have in common, and what is of a panel, a block or a row alone."""
    content = experiment.content
    found = [_in_line(experiment.take("training", {}))]
    for parts in ("panels", "blocks"):
        for name, part in content.get(parts, {}).items():
            if own := part.get("training"):
                found.append(f"{name}: {_in_line(own)}")
            found += _of_rows(part.get("rows", {}))
    found += _of_rows(content.get("rows", {}))
    return "; ".join(found)


def _of_rows(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a row has beside its estimator."""
    others = {
        name: {k: v for k, v in options.items() if k not in ("estimator", STANDS_FOR)}
        for name, options in rows.items()
    }
    return [f"{name}: {_in_line(own)}" for name, own in others.items() if own]


def _in_line(options: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(options), default_flow_style=True, width=10**6, sort_keys=False)
    return "`" + text.strip().strip("{}") + "`"


def _dates(dates: list[str]) -> str:
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _sentence(names: list[str]) -> str:
    return ", ".join(names) + "."
