"""Add to the site what is not a page: formulas, API reference, changelog, files, redirects.

MkDocs calls these functions (``hooks`` in mkdocs.yml). Formulas are written as on GitHub, ``$x$``
or a fenced block ``math``. They become MathML, which browsers show without a script. The pages of
the API reference are generated from the lists ``__all__``, so no public name is missing. Addresses
of sections that have moved lead to their new place.
"""

import ast
import json
import re
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Pages that are files of the checkout.
WITHIN = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"\[([^\]\[]*)\]\(\.\./([^)#\s]+)([^)]*)\)")
# How docstrings name a guide.
GUIDE = re.compile(r"\bdocs/(\w+)\.md\b")
# Not a dollar of a price or of a variable in a shell: no space inside, no digit or letter outside.
INLINE = r"(?<![\\$\w])\$(?=[^\s$])([^$\n]*[^\s$\\])\$(?![\w$])"


# What latex2mathml leaves to be spaced: bars and strokes as signs between numbers, which they are
# not, and no space between a function's name and its argument.
TIGHT = re.compile(r"<mo>(&#x0007C;|&#x02016;|&#x0002F;)</mo>")
NAMES = re.compile(r"(<mi>(?:log|exp)</mi>)(?!<mo stretchy)")
# Short code, and cells of one name or of a number with its error: a phone's line has room for them.
WHOLE = re.compile(
    r"<code>[^<>\n]{1,24}</code>|<td>(?:[^<>\s]{1,24}|[^<>\s]{1,8} ± [^<>\s]{1,8})</td>"
)
# Sections that have moved: "PAGE#SECTION" and the new address.
MOVED = {
    "architecture#the-house": "architecture#subpackages",
    "criteria#what-other-criteria-say": "criteria#other-criteria",
    "estimators#which-datum-a-row-belongs-to-and-data-that-mix": (
        "estimators#how-rows-are-matched-to-examples"
    ),
    "experiments#experiments-of-your-own": "experiments#write-a-custom-experiment",
    "experiments#what-there-is": "experiments#experiments-of-the-paper",
    "estimators#load-a-run": "tune_and_load#load-a-run",
    "estimators#tune-a-trained-network": "tune_and_load#tune-a-trained-network",
    "extending#a-structure-of-the-curvature": "layers#add-a-structure-of-the-curvature",
    "extending#the-closed-form-of-a-layer": "layers#add-the-closed-form-of-a-layer",
    "extending#the-exact-hessian": "layers#the-exact-hessian",
    "gallery#more": "gallery#more-scripts",
    "index#keep-your-own-loop": "index#keep-your-own-training-loop",
    "index#say-how-sure-the-network-is": "index#predict-with-uncertainty",
    "index#what-it-does-to-training": "index#how-it-works",
    "index#where-to-go": "index#where-to-go-next",
    "limits#small-data-and-noise-that-is-nearly-zero": "limits#little-data-and-almost-no-noise",
    "limits#the-evidence-is-of-the-training-data-and-of-a-model-of-the-network": (
        "limits#evidence-and-test-data-can-disagree"
    ),
    "limits#what-it-does-not-learn": "limits#what-evigrad-does-not-learn",
    "long_runs#tried": "long_runs#how-this-is-tested",
    "machines#a-training": "machines#train-with-several-processes",
    "machines#what-goes-wrong": "machines#failures",
    "machines#what-is-not-there": "machines#what-is-not-supported",
    "machines#who-does-what": "machines#how-the-work-is-divided-among-ranks",
    "machines#your-own-loop": "machines#write-a-custom-loop",
    "paper#a-rotation-that-is-learned-as-well": "paper#learned-rotation",
    "paper#bounds-for-weights-that-were-trained-once": "paper#bounds-for-fixed-weights",
    "paper#cifar-10-with-ranges-that-are-learned": "paper#cifar-10",
    "paper#precisions-that-are-learned": "paper#learned-precisions",
    "performance#many-steps-on-the-prior-for-one-pass": "performance#many-prior-steps-for-one-pass",
    "performance#other-ways-to-speed": "performance#save-time-and-memory",
    "posterior#keeping-it": "posterior#save-and-load-a-posterior",
    "posterior#which-structure": "posterior#choose-a-structure",
    "results#anchors-for-the-parametric-structures": (
        "results#do-anchors-help-parametric-structures"
    ),
    "results#do-anchors-still-pay-where-data-are-many": (
        "results#do-anchors-help-on-large-data-sets"
    ),
    "results#does-learning-an-invariance-pay": "results#does-learning-an-invariance-help",
    "results#runs-that-are-killed": "results#interrupted-runs",
    "results#tables-do-the-defaults-lose-to-early-stopping": (
        "results#regression-on-tabular-data-against-early-stopping"
    ),
    "rivals#1000-images-of-cifar-10": "rivals#1000-cifar-10-images",
    "rivals#ucis-tables": "rivals#uci-data-sets",
    "sklearn#measured": "sklearn#comparison-with-other-estimators",
    "start#a-direction-that-nothing-determines": "start#precisions-that-the-data-cannot-determine",
    "start#from-weak-and-strong-starts": "start#weak-and-strong-starts",
    "start#precisions-per-layer": "start#learned-precisions-per-layer",
    "trainers#why-not-the-optimisers-weight_decay": "trainers#why-not-the-optimizers-weight_decay",
    "usage#a-hyperparameter-of-the-forward-pass": "augmentation#make-the-range-a-hyperparameter",
    "usage#a-likelihood-of-your-own": "likelihoods#write-a-custom-likelihood",
    "usage#a-target-at-each-position": "inputs#a-target-at-each-position",
    "usage#a-training-loop-of-your-own": "custom_loop#control-every-hyperparameter-step",
    "usage#data-that-can-only-be-iterated": "large_data#data-that-can-only-be-iterated",
    "usage#fine-tuning": "fine_tuning#fine-tune-a-pretrained-network",
    "usage#inputs-of-several-tensors": "inputs#inputs-of-several-tensors",
    "usage#likelihoods": "likelihoods#choose-a-likelihood",
    "usage#noise-that-depends-on-the-input": "likelihoods#noise-that-depends-on-the-input",
    "usage#smoothed-and-wrong-labels": "likelihoods#smoothed-and-wrong-labels",
    "usage#very-large-data-sets": "large_data#very-large-data-sets",
    "usage#very-many-data": "large_data#very-large-data-sets",
    "usage#weights-of-examples": "likelihoods#weights-of-examples",
    "usage#what-is-supported": "supported#what-is-supported",
    "usage#write-a-custom-likelihood": "likelihoods#write-a-custom-likelihood",
    "usage#write-a-custom-training-loop": "custom_loop#control-every-hyperparameter-step",
}


def mathml(source: str, display: str) -> str:
    """Return a formula as MathML."""
    tight = TIGHT.sub(
        r'<mo lspace="0" rspace="0" stretchy="false">\1</mo>', convert(source, display=display)
    )
    return NAMES.sub(r'\1<mspace width="0.17em" />', tight)


class _InlineMath(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        del data
        return self.md.htmlStash.store(mathml(m.group(1), "inline")), m.start(0), m.end(0)


class Formulas(Extension):
    """Inline formulas, ``$x$``, as MathML."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Handle formulas after code, and before backslashes and underscores."""
        md.inlinePatterns.register(_InlineMath(INLINE, md), "formula", 185)


def formula_block(source: str, *others: Any, **keywords: Any) -> str:
    """Return a fenced block ``math`` as MathML."""
    del others, keywords
    return f'<div class="formula">{mathml(source, "block")}</div>'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add formulas to the Markdown extensions, and names of ``evigrad`` to the navigation."""
    reference = next(entry["Reference"] for entry in config.nav or [] if "Reference" in entry)
    api = next(entry["API reference"] for entry in reference if "API reference" in entry)
    names = sorted(public_names("evigrad"), key=str.lower)
    api[0]["evigrad"] = [
        {"evigrad": page_of("evigrad")},
        *({name: page_of("evigrad", name)} for name in names),
    ]
    config.markdown_extensions.append(Formulas())  # pyright: ignore[reportArgumentType]
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "formula", "format": formula_block}]
    return config


def public_names(package: str) -> list[str]:
    """Return the public names of a package: its ``__all__``, or a module's public classes.

    ``evigrad`` itself lists them once, with the modules that they come from.
    """
    place = ROOT / "src" / Path(*package.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    body = ast.parse(file.read_text()).body
    for statement in body:
        if not isinstance(statement, ast.Assign):
            continue
        if ast.unparse(statement.targets[0]) in ("__all__", "_HOMES"):
            return list(ast.literal_eval(statement.value))
    return [s.name for s in body if isinstance(s, ast.ClassDef) and s.name[0] != "_"]


def home_of(name: str) -> str:
    """Return the module that a name of ``evigrad`` comes from."""
    init = ast.parse((ROOT / "src" / "evigrad" / "__init__.py").read_text())
    homes = next(
        ast.literal_eval(statement.value)
        for statement in init.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "_HOMES"
    )
    return homes[name]


def purpose(name: str) -> str:
    """Return the first paragraph of the docstring of a name of ``evigrad``."""
    home = ROOT / "src" / Path(*home_of(name).split("."))
    for file in sorted(home.rglob("*.py")) if home.is_dir() else [home.with_suffix(".py")]:
        for statement in ast.parse(file.read_text()).body:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement.name == name:
                text = ast.get_docstring(statement) or ""
                return text.partition("\n\n")[0].replace("\n", " ")
    return ""


def page_of(package: str, name: str = "") -> str:
    """Return the page of a package, or of a name of ``evigrad``, each of which has a page."""
    if package == "evigrad":
        return f"reference/{f'evigrad.{name}' if name else 'evigrad'}.md"
    return f"reference/{package.removeprefix('evigrad.')}.md"


def reference_page(package: str) -> str:
    """Return the page of a package: its docstring, and each public name with its docstring."""
    head = f"::: {package}\n    options:\n      members: false\n      heading_level: 1\n"
    head += "      show_root_full_path: true\n"
    names = public_names(package)
    if package != "evigrad":
        return "\n".join([head, *(f"::: {package}.{name}\n" for name in names)])
    names = sorted(names, key=str.lower)
    rows = [f"| [`{name}`](evigrad.{name}.md) | {purpose(name)} |" for name in names]
    return "\n".join([head, "| Name | Purpose |", "|---|---|", *rows])


def name_page(name: str) -> str:
    """Return the page of one name of ``evigrad``.

    ``evigrad.fit`` would be the module ``evigrad.training.fit``, so a function whose module has the
    same name is found by its full path.
    """
    options = "    options:\n      heading_level: 1\n"
    module = f"{home_of(name)}.{name}"
    if not (ROOT / "src" / Path(*module.split("."))).with_suffix(".py").is_file():
        return f"::: evigrad.{name}\n{options}"
    return f'<a id="evigrad.{name}"></a>\n\n::: {module}.{name}\n{options}'


def packages(config: MkDocsConfig) -> list[str]:
    """Return the packages in the API reference of the navigation, at whatever depth it is."""

    def entries(items: Any, title: str) -> list[str]:
        if isinstance(items, list):
            return [name for item in items for name in entries(item, title)]
        if isinstance(items, dict):
            return [name for key, value in items.items() for name in entries(value, key)]
        return [title] if title.startswith("evigrad") else []

    return entries(config.nav, "")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, the changelog, and files outside of docs/ that pages link to."""
    for package in packages(config):
        page = reference_page(package)
        files.append(File.generated(config, page_of(package), content=page))
    for name in public_names("evigrad"):
        files.append(File.generated(config, page_of("evigrad", name), content=name_page(name)))
    changelog = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changelog))
    for file in list(files.documentation_pages()):
        for _, name, _ in LINK.findall(file.content_string):
            path = ROOT / name
            if name not in WITHIN and path.is_file():
                copy = f"source/{name}.txt"
                if files.get_file_from_path(copy) is None:
                    files.append(File.generated(config, copy, content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to copies in the site; replace links to folders by their text."""
    del config, files
    up = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)

    def moved(match: re.Match[str]) -> str:
        words, name, anchor = match.groups()
        if (ROOT / name).is_dir():
            return words
        return f"[{words}]({up}{WITHIN.get(name, f'source/{name}.txt')}{anchor})"

    return LINK.sub(moved, markdown)


def redirects(page: str) -> dict[str, str]:
    """Return the sections that a page no longer has, with their addresses seen from there."""
    moved = {}
    if page == "reference/evigrad":
        moved = {f"evigrad.{name}": f"evigrad.{name}.html" for name in public_names("evigrad")}
    for old, new in MOVED.items():
        if old.partition("#")[0] == page:
            target, _, section = new.partition("#")
            moved[old.partition("#")[2]] = f"{target}.html#{section}"
    return moved


def guide(name: str, page: Page) -> str:
    """Return a link from a page to a guide, whose text is the title of the guide."""
    title = (ROOT / "docs" / f"{name}.md").read_text().partition("\n")[0].removeprefix("# ")
    up = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)
    return f'<a href="{up}{name}.html">{escape(title)}</a>'


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link guides, mark text inside which a line must not break, and lead to moved sections."""
    del config, files
    if page.file.src_uri.startswith("reference/"):
        html = GUIDE.sub(lambda match: guide(match[1], page), html)
    html = WHOLE.sub(lambda match: match[0].replace(">", ' class="whole">', 1), html)
    if moved := redirects(page.file.src_uri.removesuffix(".md")):
        html += (
            f"<script>{{const moved = {json.dumps(moved)};"
            "const to = moved[decodeURIComponent(location.hash.slice(1))];"
            "if (to) location.replace(to);}</script>"
        )
    return html
