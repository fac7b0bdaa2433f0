"""The numbers that pages claim are those of the measurements, and pages do not contradict them."""

import csv
import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from test_benchmarks import load_script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RESULTS = DOCS / "results"
# Pages of users quote only results with the defaults of ``fit``.
FOR_USERS = (
    "README",
    *(f"docs/{name}" for name in ("index", "choosing", "limits", "usage", "faq")),
)
SUMMARIES = (*FOR_USERS, "docs/benchmarks")
# Scripts with the pages and options of their tables.
TABLES = {
    ("convergence", "start"): [],
    ("criteria", "criteria"): [],
    ("first_run", "results"): [],
    ("invariance_learning", "results"): ["--data", "mnist:rotated180"],
    ("multi_task", "results"): [],
    ("noise_models", "posterior"): [],
    ("noise_steps", "start"): [],
    ("posterior", "posterior"): [],
    ("prior_learning", "results"): ["--data", "mnist"],
    ("rivals", "rivals"): [],
    ("rotated", "rotated"): [],
    ("start", "start"): [],
    ("structures", "results"): [],
    ("tables", "results"): [],
    ("transfer", "transfer"): [],
}
PAPERS_SCHEDULE = ("prior_learning mnist", "prior_learning digits")


def read(page: str) -> str:
    return (ROOT / f"{page}.md").read_text()


def tables() -> dict[str, str]:
    """Return the generated tables of all pages by their markers."""
    pattern = re.compile(r"<!-- (?!end )(.+?) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
    pages = (path.read_text() for path in sorted(DOCS.glob("*.md")))
    return {marker: text for page in pages for marker, text in pattern.findall(page)}


def runs_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def rivals() -> dict[str, list[str]]:
    """Return test log likelihood, accuracy and time of each method on MNIST."""
    lines = [line.split(" | ") for line in tables()["rivals mnist"].splitlines()[2:]]
    return {line[0].removeprefix("| "): [line[1], line[4].split(" ")[0], line[8]] for line in lines}


@pytest.mark.parametrize(("script", "page"), TABLES)
def test_tables_are_those_of_the_runs(script, page, monkeypatch, tmp_path, capsys):
    module = load_script(script, monkeypatch)
    monkeypatch.setattr(module, "draw", lambda *_, **__: None, raising=False)
    (copy := tmp_path / "page.md").write_text(read(f"docs/{page}"))
    options = ["--results", str(RESULTS), "--table", "--pages", str(copy)]
    module.main([*options, *TABLES[script, page]])
    assert copy.read_text() == read(f"docs/{page}")


def test_readme_and_benchmarks_quote_the_comparison():
    measured = rivals()
    names = {
        "Weight decay 5e-4": "weight decay 5e-4",
        "Early stopping, 20 % held out": "early stopping",
        "Ensemble of three networks": "ensemble of 3",
        "Grid search over seven decays, 20 % held out": "grid search",
        "laplace-torch, `marglik_training`": "laplace-torch",
        "evigrad": "evigrad",
    }
    page = read("README").replace("**", "")
    for name, method in names.items():
        likelihood, accuracy, time = measured[method]
        assert f"| {name} | {likelihood} | {accuracy} % | {time}× |" in page
    page = read("docs/benchmarks")
    for method in ("weight decay 5e-4", "grid search", "laplace-torch", "evigrad"):
        likelihood, _, time = measured[method]
        assert f"| 1,000 MNIST digits | {method} | {likelihood} | {time} |" in page
    assert f"Training takes {measured['evigrad'][2]} times as long" in read("docs/index")


def test_the_faq_quotes_the_times_of_the_tables():
    texts = tables()
    last = [texts[f"rivals {name}"].splitlines()[-1] for name in ("digits", "mnist", "cifar10")]
    assert all(line.startswith("| evigrad |") for line in last)
    images = sorted(line.split(" | ")[8] for line in last)
    regressions = [
        line.split(" | ")[6]
        for line in texts["structures"].splitlines()
        if line.startswith(("| autompg | evigrad", "| yacht | evigrad"))
    ]
    assert f"took {images[0]} to {images[-1]} times as long" in read("docs/faq")
    assert f"{' and '.join(regressions)} times as long" in read("docs/faq")


def test_bold_methods_of_the_readme_are_on_par():
    """Bold are the best and all methods whose gain over evigrad is within two standard errors."""
    bold = re.findall(r"^\| ([^|]+) \| \*\*", read("README"), re.MULTILINE)
    assert bold == [
        "Grid search over seven decays, 20 % held out",
        "laplace-torch, `marglik_training`",
        "evigrad",
    ]
    for line in tables()["rivals mnist"].splitlines()[2:]:
        method, _, _, gain = line.removeprefix("| ").split(" | ")[:4]
        if gain != "–":
            mean, error = (abs(float(n.replace("−", "-"))) for n in gain.split(" ± "))
            assert (mean <= 2 * error + 0.0005) == (method in ("grid search", "laplace-torch"))


@pytest.mark.parametrize("page", SUMMARIES)
def test_quoted_means_are_in_a_table(page):
    """Numbers with errors, up to their sign: "0.1 better" is a gain of +0.1 or of −0.1."""
    measured = set(re.findall(r"[\d.]+ ± [\d.]+", "".join(tables().values())))
    assert not set(re.findall(r"[\d.]+ ± [\d.]+", read(page))) - measured


@pytest.mark.parametrize("page", FOR_USERS)
def test_pages_for_users_do_not_quote_the_papers_schedule(page):
    number = re.compile(r"−\d+\.\d{3}")
    texts = tables()
    papers = set(number.findall("".join(texts[marker] for marker in PAPERS_SCHEDULE)))
    others = (text for marker, text in texts.items() if marker not in PAPERS_SCHEDULE)
    assert not set(number.findall(read(page))) & (papers - set(number.findall("".join(others))))


def test_all_networks_of_the_criteria_are_worse_with_the_posterior():
    runs = runs_of("criteria")
    assert all(float(run["posterior"]) < float(run["plug-in"]) for run in runs)
    for page in ("criteria", "limits", "posterior"):
        assert re.search(rf"\b[Aa]ll {len(runs)} networks", read(f"docs/{page}")), page


def test_correlations_of_evidence_and_test_data_are_those_of_the_table():
    line = next(r for r in tables()["criteria"].splitlines() if r.startswith("| evidence"))
    cells = [cell.lstrip("+") for cell in line.split(" | ")]
    digits, mnist = cells[1:3], [cells[4].replace("−0.00", "0.00"), cells[5]]
    plug_in = f"{digits[0]} on (?:scikit-learn's )?digits and {mnist[0]} on MNIST"
    for page in ("limits", "marginal_likelihood", "benchmarks"):
        assert re.search(plug_in, read(f"docs/{page}")), page
    assert f"it was {digits[1]} and {mnist[1]}" in read("docs/limits")


def test_networks_of_the_selection_are_counted_once():
    counts = {8: "eight"}
    columns = ("weights", "log evidence", "test log likelihood")
    runs = runs_of("small/model_selection")
    networks = {tuple(float(run[c].replace(",", "")) for c in columns) for run in runs}
    number = counts[len(networks)]
    for page in ("benchmarks", "small", "marginal_likelihood"):
        text = read(f"docs/{page}").lower()
        assert re.search(rf"\b{number} (?:small )?networks", text), page
        assert not re.search(r"\bnine (?:small )?networks", text), page
    # The evidence and the test data rank them in the same order, as the pages claim.
    assert sorted(networks, key=lambda n: n[1]) == sorted(networks, key=lambda n: n[2])


def test_the_posterior_of_digits_costs_what_pages_say():
    cells = [line.split(" | ") for line in tables()["digits"].splitlines()[2:]]
    means = {cell[0]: float(cell[1].split(" ")[0].replace("−", "-")) for cell in cells}
    plug_in = means["| learned: plug-in"]
    for way, pages in {"full": ("posterior",), "kfac": ("posterior", "limits")}.items():
        cost = f"{plug_in - means[f'| learned: {way}, monte-carlo']:.2f} nats"
        for page in pages:
            assert cost in read(f"docs/{page}"), (page, cost)
