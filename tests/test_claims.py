"""The numbers that pages claim are those of the measurements, and pages do not contradict them."""

import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from test_benchmarks import load_script

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
# The page with the full tables, and the conclusions of studies that are finished.
MEASURED = "benchmarks/README"
PAGES = ("README", *(f"docs/{path.stem}" for path in sorted((ROOT / "docs").glob("*.md"))))
# Scripts whose tables come from the CSV files.
SCRIPTS = (
    *("block_sizes", "fixed_decays", "large_images", "large_tables", "posterior", "pretrained"),
    *("relevance", "rivals", "rotated", "sklearn_tables", "transfer"),
)
WITH_ERROR = re.compile(r"\d[\d.,]* ± [\d.,]*\d")


def read(page: str) -> str:
    return (ROOT / f"{page}.md").read_text()


def tables() -> dict[str, str]:
    """Return the generated tables by their markers."""
    pattern = re.compile(r"<!-- (?!end )(.+?) -->\n(.*?)<!-- end \1 -->", re.DOTALL)
    return dict(pattern.findall(read(MEASURED)))


def rivals(data: str) -> dict[str, tuple[str, str]]:
    """Return test log likelihood and time of each method."""
    lines = [line.split(" | ") for line in tables()[f"rivals {data}"].splitlines()[2:]]
    return {line[0].removeprefix("| "): (line[1], line[8]) for line in lines}


@pytest.mark.parametrize("script", SCRIPTS)
def test_tables_are_those_of_the_runs(script, monkeypatch, tmp_path, capsys):
    module = load_script(script, monkeypatch)
    monkeypatch.setattr(module, "draw", lambda *_, **__: None, raising=False)
    (copy := tmp_path / "page.md").write_text(read(MEASURED))
    options = ["--results", str(RESULTS), "--table", "--pages", str(copy)]
    module.main(options)
    assert copy.read_text() == read(MEASURED)


def test_tables_of_time_and_memory_are_those_of_the_runs(monkeypatch, tmp_path):
    module = load_script("performance", monkeypatch)
    (copy := tmp_path / "README.md").write_text(read(MEASURED))
    monkeypatch.setattr(module, "HERE", tmp_path)
    module.main()
    assert copy.read_text() == read(MEASURED)


def test_readme_and_benchmarks_quote_the_comparison():
    methods = ("weight decay 5e-4", "grid search", "laplace-torch", "evigrad")
    sets = {"mnist": "MNIST | 1,000", "digits": "scikit-learn's digits | 1,438"}
    for data, words in (sets | {"cifar10": "CIFAR-10 | 1,000"}).items():
        measured = rivals(data)
        fixed, *others, (evigrad, time) = (measured[method] for method in methods)
        searches = " | ".join(f"{likelihood} ({slower}×)" for likelihood, slower in others)
        assert f"| {words} | {fixed[0]} | {searches} | {evigrad} | {time}× |" in read("README")
    page = read("docs/benchmarks")
    ours = rivals("mnist")["evigrad"][0]
    assert f"| MNIST | 1,000 | 14,538 | laplace-torch | {ours} |" in page
    assert tables()["overview"] in page


def test_quoted_means_are_measured():
    """Numbers with errors, up to their sign: "0.1 better" is a gain of +0.1 or of −0.1."""
    measured = set(WITH_ERROR.findall(read(MEASURED)))
    invented = {page: set(WITH_ERROR.findall(read(page))) - measured for page in PAGES}
    assert not any(invented.values()), invented


def test_pages_do_not_quote_the_papers_schedule():
    """They quote only results with the defaults of ``fit``."""
    number = re.compile(r"−\d+\.\d{3}")
    measured = read(MEASURED)
    (study,) = re.findall(r"^\*\*Paper's schedule\*\*.*?\n\n", measured, re.MULTILINE | re.DOTALL)
    others = set(number.findall(measured.replace(study, "")))
    assert len(papers := set(number.findall(study)) - others) > 5
    quoted = {page: set(number.findall(read(page))) & papers for page in PAGES}
    assert not any(quoted.values()), quoted


def test_the_faq_quotes_the_times_of_the_tables():
    texts = tables()
    lines = [
        line
        for name in ("digits", "mnist", "cifar10")
        for line in texts[f"rivals {name}"].splitlines()
        if line.startswith("| evigrad |")
    ]
    assert len(lines) == 3
    images = sorted(line.split(" | ")[8] for line in lines)
    for quoted in re.findall(r"took ([\d.]+) to ([\d.]+) times as long", read("docs/faq")):
        assert quoted == (images[0], images[-1])


def test_the_posterior_of_digits_costs_what_pages_say():
    cells = [line.split(" | ") for line in tables()["digits"].splitlines()[2:]]
    means = {cell[0]: float(cell[1].split(" ")[0].replace("−", "-")) for cell in cells}
    pages = "".join(read(page) for page in PAGES)
    for way, cost in re.findall(r"`(full|kfac)` loses (\d\.\d\d) nats", pages):
        loss = means["| learned: plug-in"] - means[f"| learned: {way}, monte-carlo"]
        assert cost == f"{loss:.2f}", way


def test_correlations_of_evidence_and_test_data_are_those_of_the_study():
    pattern = re.compile(r"(\d\.\d\d) on (?:scikit-learn's )?digits and (\d\.\d\d) on MNIST")
    pages = "".join(read(page) for page in PAGES)
    assert set(pattern.findall(pages)) == set(pattern.findall(read(MEASURED)))


def test_networks_of_the_selection_are_counted_once():
    counts = {8: "eight"}
    lines = re.findall(r"^\| (?:depth|width) \(.*", read("experiments/paper/README"), re.MULTILINE)
    cells = [line.replace("*", "").replace("−", "-").split(" | ") for line in lines]
    numbers = [[cell.split(" ± ")[0].replace(",", "") for cell in row[2:5]] for row in cells]
    networks = {tuple(map(float, row)) for row in numbers}
    number = counts[len(networks)]
    text = read("docs/marginal_likelihood").lower()
    assert re.search(rf"\b{number} (?:small )?networks", text)
    # The evidence and the test data rank them in the same order, as the page claims.
    assert sorted(networks, key=lambda n: n[1]) == sorted(networks, key=lambda n: n[2])


def test_figures_of_the_site_are_those_of_the_experiments():
    for figure in (ROOT / "docs" / "images" / "experiments").iterdir():
        assert figure.read_bytes() == (ROOT / "experiments/paper/images" / figure.name).read_bytes()
