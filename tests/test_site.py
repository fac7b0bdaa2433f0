"""The documentation as a site: it builds without a warning, is whole, and needs no network."""

import html.parser
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = "likelihoods priors invariances errors botorch sklearn lightning transformers".split()
PACKAGES += "data models plots pruning testing".split()


class Page(html.parser.HTMLParser):
    """What a page refers to, what can be referred to in it, and its words outside of code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.loaded, self.anchors, self.words = [], [], set(), []
        self._verbatim = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        self._verbatim += tag in ("code", "script", "style")
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        elif tag in ("script", "img", "link"):
            self.loaded += [attributes[name] for name in ("src", "href") if name in attributes]

    def handle_endtag(self, tag: str) -> None:
        self._verbatim -= tag in ("code", "script", "style")

    def handle_data(self, data: str) -> None:
        if not self._verbatim:
            self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    return {page: Page(page.read_text()) for page in folder.rglob("*.html")}


def test_links_inside_resolve(site: dict[Path, Page]) -> None:
    assert len(site) > 20
    for path, page in site.items():
        if path.name == "404.html":
            continue
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path.parent / unquote(parts.path) if parts.path else path
            target = Path(os.path.normpath(target))
            assert target.is_file(), f"{path.name}: {link}"
            if parts.fragment and target in site:
                anchor = unquote(parts.fragment)
                assert anchor in site[target].anchors, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        for link in page.loaded:
            assert not urlsplit(link).netloc, f"{path.name}: {link}"


def test_formulas_are_no_source(site: dict[Path, Page]) -> None:
    for path, page in site.items():
        words = "".join(page.words)
        left = re.findall(r"\$[^$\s][^$\n]*\$|\\(?:frac|sum|log|mathcal)\b", words)
        assert not left, f"{path.name}: {left[:3]}"


def test_short_names_and_numbers_are_not_broken(site: dict[Path, Page]) -> None:
    pages = {path.name: path.read_text() for path in site}
    assert '<code class="whole">ntk-400-rows-anchored</code>' in pages["choosing.html"]
    assert re.search(r'<td class="whole">[−.\d]+ ± [.\d]+</td>', pages["benchmarks.html"])


def test_every_public_name_is_in_the_reference(site: dict[Path, Page]) -> None:
    import evigrad

    for package in ("evigrad", *(f"evigrad.{name}" for name in PACKAGES)):
        try:
            module = getattr(evigrad, package.partition(".")[2]) if "." in package else evigrad
        except evigrad.EvigradError:  # an extra that is not installed
            continue
        pages = [p for path, p in site.items() if path.parent.name == "reference"]
        anchors = set().union(*(page.anchors for page in pages))
        assert package in anchors
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == package and name[0] != "_"
        ]
        missing = [name for name in names if f"{package}.{name}" not in anchors]
        assert names and not missing, f"{package}: {missing}"


def test_docstrings_link_their_guide(site: dict[Path, Page]) -> None:
    pages = {path.name: page for path, page in site.items() if path.parent.name == "reference"}
    assert "../fine_tuning.html" in pages["evigrad.tune.html"].links
    assert "../likelihoods.html" in pages["likelihoods.html"].links
    assert not [name for name, page in pages.items() if "docs/" in " ".join(page.words)]


def test_names_of_evigrad_have_pages_of_their_own(site: dict[Path, Page]) -> None:
    import evigrad

    pages = {path.name: page for path, page in site.items() if path.parent.name == "reference"}
    for name in ("fit", "Evidence", "Learner", "Posterior", "Schedule"):
        assert f"evigrad.{name}" in pages[f"evigrad.{name}.html"].anchors
        assert f"evigrad.{name}.html" in pages["evigrad.html"].links
    # The function, not the module of the same name.
    assert "evigrad.training.fit.fit" in pages["evigrad.fit.html"].anchors
    assert "prepare_evidence" not in pages["evigrad.fit.html"].words
    purposes = " ".join(" ".join(pages["evigrad.html"].words).split())
    for name in ("fit", "load", "tune"):  # not those of evigrad.data, which also has a load
        assert (inspect.getdoc(getattr(evigrad, name)) or "").partition("\n")[0] in purposes


def test_moved_pages_and_sections_lead_to_their_new_place(site: dict[Path, Page]) -> None:
    """From a script on the page, as servers do not see what comes after #."""
    (folder,) = {path.parent for path in site if path.name == "theory.html"}
    count = 0
    for path, page in site.items():
        for moved in re.findall(r"const moved = (\{.*?\});", path.read_text()):
            for old, new in json.loads(moved).items():
                target, _, section = new.partition("#")
                assert old not in page.anchors, f"{path.name}: {old} has not moved"
                there = Path(os.path.normpath(path.parent / target))
                assert there.is_file(), f"{path.name}: {new}"
                assert not section or section in site[there].anchors, f"{path.name}: {new}"
                count += 1
    assert count > 50
    usage = (folder / "usage.html").read_text()
    assert "inputs.html#a-target-at-each-position" in usage and "url=fit.html" in usage
    assert "source/experiments/README.md.txt" in (folder / "experiments.html").read_text()


# What a fresh reader wants, and the page and section that show it.
TASKS = {
    "learn a weight decay in my own training loop": "trainers.html#plain-pytorch",
    "get error bars of a regression": "posterior.html#error-bars-of-a-regression",
    "resume a run after a kill": "scale.html#recover-long-runs",
    "find an estimator for five million weights": "choosing.html",
    "learn the range of an augmentation": "inputs.html#learn-an-augmentation",
    "predict the prices in a table": "sklearn.html",
    "model counts or outliers": "likelihoods.html#choose-a-likelihood",
    "find out whether it helps on my data": "limits.html#summary",
    "fix a run that is out of memory": "scale.html#save-time-and-memory",
    "fine-tune a pretrained network": "fine_tuning.html",
}


@pytest.mark.parametrize("task", TASKS)
def test_a_reader_finds_each_task_in_two_clicks(site: dict[Path, Page], task: str) -> None:
    """The first click leads to a page, by the home page's own text, the second to a section."""
    (home,) = [path for path in site if path.name == "index.html"]
    first = set(re.findall(r"<article.*</article>", home.read_text(), re.DOTALL))
    pages = {link.partition("#")[0] for text in first for link in Page(text).links}
    page, _, section = TASKS[task].partition("#")
    assert page in pages
    contents = site[home.parent / page].links
    assert not section or f"#{section}" in contents


def test_every_page_has_a_place_in_the_navigation() -> None:
    listed = re.findall(r"[ :] ?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(listed)
    assert len(listed) == len(set(listed))
