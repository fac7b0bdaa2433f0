"""Tables, figures and pages."""

import csv
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from small_experiments import TRAINING, bounds

import evigrad
from evigrad.core.names import Estimator
from evigrad.errors import ConfigurationError
from experiments.cases import Case, Mean, coverage, rows_of, seeds_of
from experiments.definition import Experiment, make_experiment, read_experiment
from experiments.jobs import Job, Store
from experiments.kinds import Bounds, overview
from experiments.kinds.bounds import published_curves
from experiments.kinds.selection import rank_correlation
from experiments.present import BEGIN, END, duration, present, shown_in, write_page
from experiments.tables import Column, Table

NAN = math.nan


def test_times_in_words():
    day = 86400
    times = (59.6, 89 * 60, 47 * 3600, 729 * day, 731 * day)
    assert [duration(time) for time in times] == ["60 s", "89 min", "47 h", "729 days", "2 years"]


def test_the_best_is_bold_with_all_that_overlaps():
    columns = [Column("method"), Column("score", 2, best="high"), Column("cost", 1, best="low")]
    rows = [
        ["a", Mean(1.00, 0.10, 3), Mean(5.0, 0.1, 2)],
        ["b", Mean(0.85, 0.06, 3), Mean(4.0, 0.1, 2)],
        ["c", Mean(0.50, 0.10, 3), None],
        ["other", Mean(0.10, 0.01, 3), Mean(9.0, NAN, 1)],
        ["another", Mean(NAN, NAN, 3), Mean(8.0, NAN, 1)],
    ]
    table = Table(columns, rows, ["x", "x", "x", "y", "y"])
    lines = table.markdown().splitlines()
    assert lines[2] == "| a | **1.00 ± 0.10** | 5.0 ± 0.1 |"
    assert lines[3] == "| b | **0.85 ± 0.06** | **4.0 ± 0.1** |"
    assert lines[4] == "| c | 0.50 ± 0.10 | – |"
    assert lines[5] == "| other | 0.10 ± 0.01 | 9.0 |"
    # Nothing overlaps with what has no error, and nothing is the best where that is better.
    alone = Table(
        columns[:2], [["a", Mean(1.0, 0.1, 3)], ["b", Mean(0.9, 0.1, 3)], ["c", Mean(1.2, NAN, 1)]]
    )
    assert "**" not in alone.markdown()
    assert lines[6] == "| another | – | 8.0 |"
    latex = table.latex()
    assert r"\textbf{1.00 {\scriptsize$\pm$} 0.10}" in latex
    assert latex.count(r"\midrule") == 2 and latex.count(r"\\") == 6
    cells = list(csv.reader(io.StringIO(table.csv())))
    assert cells[0] == ["method", "score", "score, error", "cost", "cost, error"]
    assert cells[1] == ["a", "1", "0.1", "5", "0.1"]
    assert cells[3] == ["c", "0.5", "0.1", "", ""]


def test_percent_is_escaped_in_latex():
    table = Table([Column("name"), Column("accuracy, %", 1, 100.0)], [["a_b", 0.5]])
    assert r"accuracy, \%" in table.latex() and r"a\_b & 50.0" in table.latex()
    table = Table([Column("a"), Column("b"), Column("c")], [["`x.py`", "~100 %", -1.5]])
    assert r"\texttt{x.py} & $\sim$100 \% & $-$1.500" in table.latex()
    assert r"\begin{tabular}{llr}" in table.latex()


def test_rank_correlation():
    assert rank_correlation([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert rank_correlation([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 4.0, 3.0]) == pytest.approx(0.8)


def test_rows_are_means_over_the_seeds_that_are_done(tmp_path):
    store = Store(tmp_path)

    def read(results):
        return {"value": results["a"]["v"], "curve": [results["a"]["v"], 1.0]}

    jobs = [Job("train", {"n": n}) for n in range(4)]
    cases = [Case({"label": "x"}, n, {"a": job}, read) for n, job in enumerate(jobs)]
    for job, value in zip(jobs[:3], (1.0, 2.0, 3.0), strict=True):
        store.finish(job, {"v": value})
    (row,) = rows_of(cases, store)
    assert row["value"] == Mean(2.0, pytest.approx(1 / math.sqrt(3)), 3)
    assert row["curve"].mean == [2.0, 1.0] and row["curve"].error[1] == 0.0
    assert row["value"].by_seed == {0: 1.0, 1: 2.0, 2: 3.0}
    assert coverage(cases, [row]) == {"x": (3, 4)} and seeds_of([row]) == {0, 1, 2}
    assert coverage(cases, []) == {"x": (0, 4)}


def remove(store: Store, job: Job) -> None:
    (store.folder(job) / "job.json").unlink()


def test_means_that_are_not_to_be_compared_are_named(tmp_path, monkeypatch):
    content = {"kind": "pareto", "title": "Pareto", "seeds": [0, 1], "training": TRAINING}
    experiment = make_experiment("mine", content | {"estimators": ["ntk-10-1", "ntk-20-1"]})
    monkeypatch.setattr(type(experiment), "figure", lambda *_: None)
    store = Store(tmp_path)
    fake(experiment, store)

    def remarks() -> list[str]:
        return present(experiment, store).summary["remarks"]

    assert len(remarks()) == 1
    jobs = [job for job in experiment.jobs() if job.kind == "time"]
    store.finish(jobs[0], (store.result(jobs[0]) or {}) | {"machine": "another"})
    remove(store, jobs[-1])
    _, partial, machines = remarks()
    assert partial.endswith("than the others: ntk-20-1 (1 of 2).")
    assert machines == "Times of several machines: another; none."
    remove(store, jobs[-2])
    store.fail(jobs[-2], "out of memory")
    _, left, failed, machines = remarks()
    assert left == "Not run: ntk-20-1." and failed == "Failed, 1 job: out of memory"
    fake(experiment, store)
    remove(store, jobs[0])
    assert remarks()[1] == "Fewer seeds than the others: ntk-10-1 (1 of 2)."
    remove(store, jobs[3])
    assert remarks()[1] == "So far 1 of 2 seeds."


def fake(experiment: Experiment, store: Store) -> None:
    """A result for every job, as if it had been run."""
    for number, job in enumerate(experiment.jobs()):
        value = -1.0 - 0.01 * number
        result: dict[str, Any] = {"job_seconds": 1.0, "machine": "none", "date": "2026-01-01"}
        if job.kind == "train":
            history = {"epoch": [1, 2], "value": [value, value + 0.1]}
            names = ("log_evidence", "test_log_likelihood", "range/rotation")
            result |= {
                "test": {"log_likelihood": value, "accuracy": 0.5},
                "history": dict.fromkeys(names, history),
                "seconds": 10.0 + number,
                "epochs": 2,
                "num_weights": 100 + number,
            }
        elif job.kind == "evaluate":
            result |= {"per_datum": value, "sem": 0.01}
        elif job.kind == "curve":
            grid = job.options["grid"]
            result |= {"mean": [value - abs(x) for x in grid], "sem": [0.01] * len(grid)}
        elif job.kind == "curves":
            curve = {"mean": [value - abs(x) for x in job.options["grid"]]}
            curve["sem"] = [0.01] * len(curve["mean"])
            result |= dict.fromkeys(job.options["estimators"], curve)
        else:
            result |= {"estimate_seconds": 0.1 * (1 + number % 7), "step_seconds": 0.05}
        store.finish(job, result)


def test_seeds_of_a_training_may_know_different_epochs(tmp_path):
    content = {"kind": "learning", "title": "Mine", "seeds": [0, 1], "training": TRAINING}
    content |= {"quantities": {"range/rotation": "rotation"}}
    experiment = make_experiment("mine", content | {"groups": {"one": {"ntk-20-1": "m = 20"}}})
    store = Store(tmp_path)
    fake(experiment, store)
    first = experiment.jobs()[0]
    result = store.result(first)
    assert result is not None
    result["history"]["range/rotation"] = {"epoch": [1], "value": [2.0]}
    store.finish(first, result)
    (row,) = rows_of(experiment.cases(), store)
    curve = row["range/rotation"]
    assert curve.mean[0] == pytest.approx((2.0 - 1.02) / 2) and math.isnan(curve.mean[1])
    (line,) = csv.DictReader(io.StringIO(experiment.table([row]).csv()))
    assert float(line["range/rotation at the end"]) == pytest.approx(curve.mean[0])
    assert experiment.figure([row]) is not None


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("fig1", "small"),
        ("fig4", "tiny"),
        ("fig7", "tiny"),
        ("table1", "tiny"),
        ("model_selection", "tiny"),
        ("fig_train_invariance", "tiny"),
    ],
)
def test_every_kind_can_be_shown(name, preset, tmp_path):
    experiment = read_experiment(name, preset)
    store = Store(tmp_path)
    with pytest.raises(ConfigurationError, match="Nothing of"):
        present(experiment, store)
    fake(experiment, store)
    shown = present(experiment, store)
    done, total = shown.summary["jobs"]
    assert done == total > 0
    assert (shown.figure is None) == (name == "table1")
    if shown.figure is not None:
        assert 10_000 < shown.figure.stat().st_size < 300_000
    rows = rows_of(experiment.cases(), store)
    body = shown.table.splitlines()[2:]
    assert len(body) == len(rows) or name == "table1"
    assert "nan" not in shown.table
    assert ("range/rotation at the end" in shown.table) == (
        name in ("fig1", "fig_train_invariance")
    )


def test_a_network_of_two_families_is_one_point():
    experiment: Any = read_experiment("model_selection", "small")

    def row(family: str, label: str, x: float) -> dict[str, Any]:
        values = {"x": x, "y": 2 * x, "weights": 100 * x, "accuracy": 0.5}
        means = {key: Mean(value, 0.1, 2) for key, value in values.items()}
        return {"family": family, "label": label} | means

    depth, width = experiment.architectures
    rows = [row(depth, "depth 1", 1.0), row(depth, "depth 3", 3.0), row(width, "width 16", 3.0)]
    assert experiment.remarks(rows) == [
        "depth 3 and width 16 are the same network, so there are 2 networks in total."
    ]
    figure = experiment.figure(rows)
    assert {text.get_text() for text in figure.axes[0].texts} == {"depth 1", "depth 3 = width 16"}
    assert not experiment.remarks(rows[:2])


def test_the_overview_needs_no_runs(tmp_path):
    shown = present(read_experiment("fig2", "small"), Store(tmp_path))
    assert shown.figure is not None and shown.summary["jobs"] == [0, 0]
    source = Path(evigrad.__file__).parent
    for box in overview.BOXES.values():
        Estimator.parse(
            box.names.split(",")[0].split(" ")[0].replace("-m-", "-5-").replace("-k-", "-5-")
        )
        for file in re.findall(r"[a-z_/]+\.py|[a-z/]*anchors/", box.code):
            assert (source / file).exists() or (source / "core/curvature" / file).exists(), file


def test_the_papers_numbers_stand_beside_ours(tmp_path):
    experiment, store = read_experiment("table1", "small"), Store(tmp_path)
    fake(experiment, store)
    shown = present(experiment, store)
    lines = shown.table.splitlines()
    assert "Not run: CIFAR-100." in shown.summary["remarks"]
    assert "**" not in shown.table  # one seed
    line = next(line for line in lines if "| kfac-100-1 |" in line)
    assert "−1.41 ± 0.02, −0.38 ± 0.00, 88.2 ± 0.1, 65 %" in line
    # The paper's rows that nothing stands for come last.
    assert any("| prior | kfac-N-C | – | – |" in line for line in lines)
    fake(large := read_experiment("table1").with_seeds([0]), store)
    line = next(line for line in present(large, store).table.splitlines() if "kfac-500-10" in line)
    assert "−1.31 ± 0.01, −0.38 ± 0.00, 88.6 ± 0.1, 81 %" in line
    assert "−3.95 ± 0.04, −1.26 ± 0.01, 67.9 ± 0.2, 70 %" in line


def test_both_widths_of_table_2_are_there(tmp_path):
    experiment, store = read_experiment("table2").with_seeds([0]), Store(tmp_path)
    widths = {job.training["width"] for job in experiment.jobs() if job.kind == "train"}
    assert widths == {None, 64}
    fake(experiment, store)
    table = present(experiment, store).table
    lines = [line for line in table.splitlines() if "| kfac-60-1 |" in line]
    assert len(lines) == 2 and all("−2.02 ± 0.10, 58.4 ± 0.3" in line for line in lines)
    assert "TinyImageNet: time, % of kfac-400-1, kfac-60-1" in table
    assert table.count("| partitioned networks | – | – | – | – | – | –, –, 48.6 ± 0.0, – |") == 2


def test_an_ordering_that_does_not_hold_is_told(tmp_path):
    experiment, store = bounds(), Store(tmp_path)
    fake(experiment, store)  # each later curve is lower: ntk-10-C before ntk-N-C
    (remark,) = experiment.remarks(rows_of(experiment.cases(), store))
    assert "ntk-N-C lies below ntk-10-C at 3 of 3 points (prior), by 0.01 nats" in remark


def test_an_ordering_is_checked_seed_by_seed(tmp_path):
    experiment, store = bounds(seeds=[0, 1]), Store(tmp_path)
    # Higher on average, but not for the second seed.
    values = {("ntk-N-C", 0): -1.0, ("ntk-N-C", 1): -2.0, ("ntk-10-C", 0): -3.0}
    for job in experiment.jobs():
        if job.kind == "curve":
            value = values.get((job.options["estimator"], job.training["seed"]), -1.9)
            store.finish(job, {"mean": [value] * 3, "sem": [0.0] * 3})
    (remark,) = experiment.remarks(rows_of(experiment.cases(), store))
    assert "ntk-N-C lies below ntk-10-C at 3 of 6 points (prior), by 0.1 nats" in remark


def test_orderings_that_hold_are_said_once(tmp_path):
    experiment, store = bounds(), Store(tmp_path)
    for job in experiment.jobs():
        if job.kind == "curve":
            value = -1.0 if job.options["estimator"] == "ntk-N-C" else -2.0
            store.finish(job, {"mean": [value] * 3, "sem": [0.0] * 3})
    (remark,) = experiment.remarks(rows_of(experiment.cases(), store))
    assert remark == "All orderings of the theory hold at every point, for every seed."


def test_the_papers_curves_stand_beside_ours(tmp_path):
    experiment, store = read_experiment("fig3", "cpu").with_seeds([0]), Store(tmp_path)
    assert isinstance(experiment, Bounds)
    grid = experiment.panels["prior"].grid.values()
    x, y = published_curves()["fig3", "prior", "kfac-N-C"]
    values = 0.1 * np.log(grid) - 3.0  # a line, on which interpolation is exact
    for case in experiment.cases():
        if case.keys["panel"] == "prior" and case.keys["estimator"] == "kfac-N-C":
            result: dict[str, Any] = {"mean": values.tolist(), "sem": [0.0] * len(grid)}
            result |= {"job_seconds": 1.0, "machine": "none", "date": "2026-01-01"}
            store.finish(case.jobs["curve"], result)
    shown = present(experiment, store)
    cells = shown.table.splitlines()[2].strip("| ").split(" | ")
    assert cells[:2] == ["prior", "KFAC"] and cells[5:8] == ["–", "−1.07", "14.2"]
    assert cells[2:5] == [f"−{3 - 0.1 * math.log(1e4):.3f}", "1e+04", "1"]
    distances = np.abs(0.1 * np.log(x) - 3.0 - y)
    assert float(cells[8]) == pytest.approx(distances.max(), abs=0.005)
    small = read_experiment("fig3", "small")
    assert isinstance(small, Bounds)
    assert not small.paper and len(small.table([]).columns) == 5


def test_the_closest_seed_is_named(tmp_path):
    grid = {"start": 10.0, "stop": 20.0, "count": 3}
    panels = {"prior": {"axis": "p", "hyperparameter": "precision", "grid": grid}}
    names = {"kfac-N-C": "KFAC", "diag-N-C": "diagonal", "ntk-7-C": "m = 7"}
    experiment = bounds(seeds=[0, 1], panels=panels, curves=names, paper=["fig3"], orderings=[])
    store = Store(tmp_path)
    tops = {"kfac-N-C": -1.073, "diag-N-C": -3.721, "ntk-7-C": 0.0}
    # The first seed is off by 0.1 and 0.3 nats, the second by 0.2 and 0.1.
    raised = {("kfac-N-C", 0): 0.1, ("diag-N-C", 0): -0.3, ("kfac-N-C", 1): 0.2}
    raised["diag-N-C", 1] = 0.1
    for case in experiment.cases():
        name = case.keys["estimator"]
        top = tops[name] + raised.get((name, case.seed), 0.0)
        values = {"mean": [top - 1.0, top, top - 1.0], "sem": [0.0] * 3}
        store.finish(case.jobs["curve"], values)
    rows = rows_of(experiment.cases(), store)
    (remark,) = experiment.remarks(rows)
    assert "Seed 1 of 2 seeds is closest" in remark and "at most 0.20 nats" in remark
    assert remark.endswith("(KFAC).")
    cells = {str(row[1]): [str(c) for c in row[2:]] for row in experiment.table(rows).rows}
    assert cells["KFAC"][3:5] == ["-0.97 to -0.87", "-1.07"]
    assert cells["m = 7"][3:] == ["0.00 to 0.00", "–", "–", "–"]
    # Only between 10 and 20: the paper's curve reaches far below at other precisions.
    x, y = published_curves()["fig3", "prior", "kfac-N-C"]
    inside = [b for a, b in zip(x, y, strict=True) if 10 <= a <= 20]
    assert float(cells["KFAC"][6]) < 1.0 + max(abs(b + 1.073) for b in inside) + 0.2


def test_curves_of_the_paper_belong_to_the_experiments():
    curves = published_curves()
    expected_curves = set[tuple[str, str, str]]()
    for name in ("fig3", "fig4"):
        experiment = read_experiment(name)
        assert isinstance(experiment, Bounds) and experiment.paper == [name]
        expected_curves |= {
            (name, panel, c) for panel in experiment.panels for c in experiment.curves
        }
    assert curves.keys() == expected_curves
    for x, y in curves.values():
        assert len(x) == len(y) > 10 and x == sorted(x) and max(y) < 0
    tops = {key: max(y) for key, (_, y) in curves.items()}
    assert tops["fig3", "prior", "diag-N-C"] == pytest.approx(-3.72, abs=0.01)
    assert tops["fig4", "rotation", "ntk-100-C"] == pytest.approx(-2.29, abs=0.02)


@pytest.fixture
def blank_figures(monkeypatch):
    """Figures that are not drawn, for which a page does not wait."""
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).write_bytes(b""))


def test_a_page_has_tables_and_differences(tmp_path, blank_figures):
    experiment, store = read_experiment("fig6", "cpu").with_seeds([0]), Store(tmp_path)
    fake(experiment, store)
    present(experiment, store)
    write_page(tmp_path / "page.md", store, ["cpu"])
    text = (tmp_path / "page.md").read_text()
    assert "\n| prior | m = 10 |" in text and "Differences from the paper:" in text


def test_a_page_holds_what_was_run(tmp_path, blank_figures):
    store, page = Store(tmp_path / "results"), tmp_path / "docs" / "page.md"
    fake(fig6 := read_experiment("fig6", "small"), store)
    assert write_page(page, store) == []  # nobody asked for one of these as yet
    present(fig6, store)
    assert write_page(page, store) == ["fig6"]
    # Drawn with other seeds, it stays so.
    present(fig6.with_seeds([1]), store)
    write_page(page, store)
    assert "Preset `small`, seeds 1." in page.read_text()
    present(fig6, store)
    assert write_page(page, store) == ["fig6"]
    # Another summary without results, as after a change of its settings, is no hindrance.
    stale = shown_in(read_experiment("fig7", "small"), store)
    stale.mkdir(parents=True)
    (stale / "summary.json").write_text("{}")
    assert write_page(page, store) == ["fig6"]
    text = page.read_text()
    assert "    python -m experiments fig6\n" in text and "Preset `small`, seeds 0, 1, 2" in text
    assert "![" in text and (page.parent / "images/fig6-small.png").exists()
    # What another folder of results knows stays, and what is known here is replaced.
    old = {
        name: f"### A figure\n\n    python -m experiments {name}\n\nold {name}\n"
        for name in ("fig5", "fig6", "fig99")
    }
    both = "\n".join(old.values())
    page.write_text(f"# Mine\n\n{BEGIN}\n{both}{END}\n\nafter\n")
    assert write_page(page, store) == ["fig5", "fig6"]
    kept = page.read_text()
    assert old["fig5"] + "\n### " in kept and "old fig6" not in kept and "fig99" not in kept
    write_page(page, store)
    assert page.read_text() == kept
    page.write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    write_page(page, store)
    again = page.read_text()
    assert again.startswith("# Mine\n\n") and again.endswith("\n\nafter\n")
    assert "\nold\n" not in again
    # Nothing is run for the overview, and nothing is said of machine and time.
    present(read_experiment("fig2", "small"), store)
    assert write_page(page, store) == ["fig2", "fig6"]
    overview = page.read_text().partition("experiments fig2\n")[0]
    assert "- Shows: Figure 2.\n" in overview and "Time of all runs" not in overview
    page.write_text("# Mine\n")
    write_page(page, store)
    assert page.read_text().startswith("# Mine\n\n" + BEGIN)
