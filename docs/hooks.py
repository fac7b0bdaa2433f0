"""Add to the site what is not a page: formulas, API reference, tutorials, changelog, redirects.

MkDocs calls these functions (``hooks`` in mkdocs.yml). Formulas are written as on GitHub, ``$x$``
or a fenced block ``math``. They become MathML, which browsers show without a script. The pages of
the API reference are generated from the lists ``__all__``, so no public name is missing. Tutorials
are notebooks with their outputs, and become pages without being run. Addresses of pages and
sections that have moved lead to their new place.
"""

import ast
import base64
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
LINK = re.compile(r"\[([^\]\[]*)\]\(((?:\.\./)+)([^)#\s]+)([^)]*)\)")
NOTEBOOK = re.compile(r"(\]\([^)#\s]+)\.ipynb(?=[)#])")
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
# Where readers of old addresses go: of sections, and with "" of a whole page that is gone.
MOVED = {
    "anchored_bound": {
        "": "choosing#why-the-default-uses-anchors",
        "check-the-bound": "theory#in-numbers",
        "how-tight-it-is": "benchmarks#tightness-of-the-bounds",
        "when-to-use-something-else": "choosing",
    },
    "architecture": {
        "the-house": "architecture#subpackages",
        "where-fast-derivatives-are-checked": "src/evigrad/network/README.md",
    },
    "augmentation": {
        "": "inputs#learn-an-augmentation",
        "other-hyperparameters-of-the-forward-pass": (
            "inputs#other-hyperparameters-of-the-forward-pass"
        ),
    },
    "benchmarks": {
        "all-measurements": "benchmarks",
        "posterior-predictions": "posterior#when-it-helps-and-when-it-hurts",
        "rotated-digits": "inputs#learn-an-augmentation",
        "tightness-against-time": "benchmarks#tightness-of-the-bounds",
        "where-learning-starts": "benchmarks",
    },
    "choosing": {
        "predict-memory-before-a-run": "choosing#inspect-an-estimator-before-a-run",
        "when-a-looser-estimator-is-better": "choosing",
        "compare-by-one-estimator": "choosing#compare-runs-with-the-same-estimator",
        "compare-runs-with-one-estimator": "choosing#compare-runs-with-the-same-estimator",
        "estimators-for-comparison-only": "choosing",
        "look-before-a-run": "choosing#inspect-an-estimator-before-a-run",
    },
    "command_line": {
        "before-a-long-run": "command_line#examine-an-estimator-before-a-long-run",
        "configurations": "command_line#ready-configurations",
        "data": "command_line#choose-data",
        "invariances": "command_line#learn-invariances",
        "what-a-run-leaves": "command_line#resume-a-run",
    },
    "contributing": {"which-script-writes-which-table": "contributing#write-pages"},
    "criteria": {"": "limits#evidence-and-test-data-can-disagree"},
    "custom_loop": {"": "trainers#control-every-hyperparameter-step"},
    "data": {
        "": "fit#tensors-and-data-sets",
        "real-targets": "fit#real-targets",
        "tables": "fit#tables",
    },
    "estimators": {
        "": "theory#names-of-estimators",
        "anchors": "theory#anchors",
        "how-rows-are-matched-to-examples": "supported#layers",
        "load-a-run": "fine_tuning#load-a-run",
        "models-that-mix-examples": "supported#layers",
        "roots": "theory#blocks-of-outputs-and-roots",
        "tune-a-trained-network": "fine_tuning#tune-a-trained-network",
        "what-the-gradient-leaves-out": "theory#what-the-gradient-leaves-out",
    },
    "experiments": {"": "experiments/README.md", "predicted-times": "experiments/README.md"},
    "extending": {
        "": "likelihoods#write-a-custom-likelihood",
        "a-structure-of-the-curvature": "src/evigrad/network/README.md",
        "a-transform": "inputs#write-a-transform",
        "test-a-custom-autograd-function": "inputs#test-a-custom-autograd-function",
        "the-closed-form-of-a-layer": "src/evigrad/network/README.md",
        "the-exact-hessian": "src/evigrad/network/README.md",
        "write-a-transform": "inputs#write-a-transform",
    },
    "fine_tuning": {"when-it-helps": "fine_tuning#fine-tune-a-pretrained-network"},
    "gallery": {
        "a-hyperparameter-of-the-forward-pass": "gallery#more-scripts",
        "an-invariance": "tutorials/augmentation",
        "learn-the-range-of-rotations": "tutorials/augmentation",
        "fine-tune-lora-adapters": "gallery#more-scripts",
        "lora-adapters": "gallery#more-scripts",
        "more": "gallery#more-scripts",
        "relevant-columns-of-tabular-data": "tutorials/error_bars#see-which-columns-matter",
        "segmentation": "gallery#more-scripts",
        "tables-and-which-of-their-columns-matter": (
            "tutorials/error_bars#see-which-columns-matter"
        ),
    },
    "glossary": {"": "supported#glossary", "notation": "supported#notation"},
    "index": {
        "evigrad": "index",
        "keep-your-own-loop": "trainers#plain-pytorch",
        "keep-your-own-training-loop": "trainers#plain-pytorch",
        "say-how-sure-the-network-is": "index#predict-with-uncertainty",
        "what-it-does-to-training": "index#how-it-works",
        "where-to-go": "index#where-to-go-next",
    },
    "inputs": {"inputs-and-outputs": "inputs"},
    "install": {"install-with-make": "install#install-with-pip"},
    "large_data": {
        "": "scale",
        "data-that-can-only-be-iterated": "scale#data-that-can-only-be-iterated",
        "number-of-epochs": "scale#number-of-epochs",
        "very-large-data-sets": "scale#very-large-data-sets",
    },
    "layers": {"": "src/evigrad/network/README.md"},
    "limits": {
        "little-data-and-almost-no-noise": "limits#data",
        "normalisation-layers": "limits#normalization-layers",
        "small-data-and-noise-that-is-nearly-zero": "limits#data",
        "the-evidence-is-of-the-training-data-and-of-a-model-of-the-network": (
            "limits#evidence-and-test-data-can-disagree"
        ),
        "trained-networks": "fine_tuning#tune-a-trained-network",
        "what-is-no-bound": "limits#which-estimates-are-not-bounds",
        "what-it-does-not-learn": "limits#what-evigrad-does-not-learn",
    },
    "long_runs": {"": "scale#recover-long-runs"},
    "machines": {
        "": "scale#train-with-several-processes",
        "failures": "scale#failures-of-ranks",
        "weights-in-shards": "scale#weights-in-shards",
        "what-goes-wrong": "scale#failures-of-ranks",
        "what-is-not-supported": "scale#failures-of-ranks",
        "write-a-custom-loop": "scale#write-a-custom-loop",
        "your-own-loop": "scale#write-a-custom-loop",
    },
    "paper": {"": "experiments/paper/README.md"},
    "performance": {
        "": "benchmarks#time-and-memory",
        "how-a-gradient-is-taken": "theory#how-the-gradient-is-computed",
        "how-the-gradient-is-computed": "theory#how-the-gradient-is-computed",
        "memory-that-is-kept": "faq#training-is-slow",
        "other-ways-to-speed": "scale#save-time-and-memory",
        "save-time-and-memory": "scale#save-time-and-memory",
        "threads": "scale#save-time-and-memory",
    },
    "posterior": {
        "keeping-it": "posterior#save-and-load-a-posterior",
        "two-levels-of-noise": "posterior#regression",
        "which-structure": "posterior#choose-a-structure",
    },
    "releases": {
        "": "contributing#versions",
        "deprecations": "contributing#deprecations",
        "making-a-release": "contributing#make-a-release",
        "what-is-public": "contributing#what-is-public",
        "what-is-supported": "supported",
    },
    "results": {"": "benchmarks"},
    "rivals": {"": "benchmarks#against-other-methods"},
    "rotated": {"": "inputs#learn-an-augmentation"},
    "sklearn": {
        "another-network-other-settings": "sklearn#use-another-network-or-other-settings",
        "comparison-with-other-estimators": "benchmarks#tabular-data-with-scikit-learn",
        "measured": "benchmarks#tabular-data-with-scikit-learn",
    },
    "small": {"": "experiments/paper/README.md"},
    "start": {"": "benchmarks"},
    "trainers": {
        "use-evigrad-in-other-trainers": "trainers",
        "why-not-the-optimisers-weight_decay": "trainers#why-not-the-optimizers-weight_decay",
    },
    "training": {
        "": "fit",
        "check-convergence": "fit#check-convergence",
        "effective-parameters": "fit#effective-parameters",
        "many-steps-from-one-pass": "trainers#many-steps-from-one-pass",
        "noise-and-hyperparameters-of-the-forward-pass": "fit#how-hyperparameters-are-updated",
        "precisions-mackays-fixed-point": "fit#how-hyperparameters-are-updated",
        "the-schedule": "fit#the-schedule",
        "the-weight-decay": "fit#the-weight-decay",
        "what-the-update-neglects": "fit#how-hyperparameters-are-updated",
    },
    "transfer": {"": "benchmarks#fine-tuning"},
    "tune_and_load": {
        "": "fine_tuning",
        "load-a-run": "fine_tuning#load-a-run",
        "save-a-run": "fine_tuning#save-a-run",
        "tune-a-trained-network": "fine_tuning#tune-a-trained-network",
    },
    "usage": {
        "": "fit",
        "a-hyperparameter-of-the-forward-pass": "inputs#learn-an-augmentation",
        "a-likelihood-of-your-own": "likelihoods#write-a-custom-likelihood",
        "a-target-at-each-position": "inputs#a-target-at-each-position",
        "a-training-loop-of-your-own": "trainers#control-every-hyperparameter-step",
        "data-that-can-only-be-iterated": "scale#data-that-can-only-be-iterated",
        "fine-tuning": "fine_tuning#fine-tune-a-pretrained-network",
        "guides": "index#where-to-go-next",
        "inputs-of-several-tensors": "inputs#inputs-of-several-tensors",
        "likelihoods": "likelihoods#choose-a-likelihood",
        "noise-that-depends-on-the-input": "likelihoods#noise-that-depends-on-the-input",
        "smoothed-and-wrong-labels": "likelihoods#smoothed-and-wrong-labels",
        "very-large-data-sets": "scale#very-large-data-sets",
        "very-many-data": "scale#very-large-data-sets",
        "weights-of-examples": "likelihoods#weights-of-examples",
        "what-is-supported": "supported",
        "write-a-custom-likelihood": "likelihoods#write-a-custom-likelihood",
        "write-a-custom-training-loop": "trainers#control-every-hyperparameter-step",
    },
}
# A page that is gone: it leads on, also without a script.
GONE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>This page has moved</title>
<script>const moved = {moved};
location.replace(moved[decodeURIComponent(location.hash.slice(1))] || moved[""]);</script>
<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript>
<p>This page has moved to <a href="{target}">{target}</a>.</p></html>
"""


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


def tutorial(notebook: File) -> tuple[str, list[bytes]]:
    """Return the cells of a notebook with their outputs as Markdown, and its figures."""
    name, parts, figures = Path(notebook.name).stem, [], []
    for cell in json.loads(notebook.content_string)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        # A cell may print in several pieces.
        if printed := "".join("".join(output.get("text", "")) for output in cell["outputs"]):
            parts.append(f"```text\n{printed.rstrip()}\n```")
        for output in cell["outputs"]:
            if image := output.get("data", {}).get("image/png"):
                figures.append(base64.b64decode(image))
                titles = re.findall(r"^#+ (.*)", "\n".join(parts), re.MULTILINE)
                parts.append(f"![{titles[-1]}]({name}-{len(figures)}.png)")
    parts.append(f'<a href="{name}.ipynb" download>Download this notebook</a>')
    return "\n\n".join(parts), figures


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
    """Add the reference, tutorials, changelog, and files outside of docs/ that pages link to."""
    for package in packages(config):
        page = reference_page(package)
        files.append(File.generated(config, page_of(package), content=page))
    for name in public_names("evigrad"):
        files.append(File.generated(config, page_of("evigrad", name), content=name_page(name)))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page, figures = tutorial(notebook)
        place = notebook.src_uri.removesuffix(".ipynb")
        files.append(File.generated(config, f"{place}.md", content=page))
        for number, figure in enumerate(figures, start=1):
            files.append(File.generated(config, f"{place}-{number}.png", content=figure))
    # Its links to files start at the root of the checkout.
    changelog = re.sub(r"\]\((?!\w+:|#)", "](../", (ROOT / "CHANGELOG.md").read_text())
    changelog = changelog.replace("](../docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changelog))
    for page, moved in MOVED.items():
        if "" in moved:
            gone = GONE.format(moved=json.dumps(redirects(page)), target=redirects(page)[""])
            files.append(File.generated(config, f"{page}.html", content=gone))
    linked = {new for moved in MOVED.values() for new in moved.values() if new.endswith(".md")}
    for file in files.documentation_pages():
        out = "../" * len(PurePosixPath(file.src_uri).parts)
        linked |= {name for _, up, name, _ in LINK.findall(file.content_string) if up == out}
    for name in sorted(linked - set(WITHIN)):
        if (path := ROOT / name).is_file():
            files.append(File.generated(config, f"source/{name}.txt", content=path.read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to pages of notebooks and to copies of files; links to folders become text."""
    del config, files
    up = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)

    def moved(match: re.Match[str]) -> str:
        words, out, name, anchor = match.groups()
        if out != f"../{up}":
            return match[0]
        if (ROOT / name).is_dir():
            return words
        return f"[{words}]({up}{WITHIN.get(name, f'source/{name}.txt')}{anchor})"

    return LINK.sub(moved, NOTEBOOK.sub(r"\1.md", markdown))


def redirects(page: str) -> dict[str, str]:
    """Return the sections that a page no longer has, with their addresses seen from there."""
    if page == "reference/evigrad":
        return {f"evigrad.{name}": f"evigrad.{name}.html" for name in public_names("evigrad")}
    return {section: address(new) for section, new in MOVED.get(page, {}).items()}


def address(target: str) -> str:
    """Return the address of a section, or of the copy of a file of the checkout."""
    page, mark, section = target.partition("#")
    return f"source/{page}.txt" if page.endswith(".md") else f"{page}.html{mark}{section}"


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
