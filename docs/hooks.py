"""Add to the site what is not a page: formulas, API reference, changelog, linked files.

MkDocs calls these functions (``hooks`` in mkdocs.yml). Formulas are written as on GitHub, ``$x$``
or a fenced block ``math``. They become MathML, which browsers show without a script. The pages of
the API reference are generated from the lists ``__all__``, so no public name is missing.
"""

import ast
import re
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
    """Add formulas to the Markdown extensions."""
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


def reference_page(package: str) -> str:
    """Return the page of a package: its docstring, then each public name with its docstring."""
    head = f"::: {package}\n    options:\n      members: false\n      heading_level: 1\n"
    head += "      show_root_full_path: true\n"
    return "\n".join([head, *(f"::: {package}.{name}\n" for name in public_names(package))])


def packages(config: MkDocsConfig) -> list[str]:
    """Return the packages in the API reference of the navigation, at whatever depth it is."""

    def entries(items: Any, title: str) -> list[str]:
        if isinstance(items, list):
            return [name for item in items for name in entries(item, title)]
        if isinstance(items, dict):
            return [name for key, value in items.items() for name in entries(value, key)]
        return [title] if str(items).startswith("reference/") else []

    return entries(config.nav, "")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, the changelog, and files outside of docs/ that pages link to."""
    for package in packages(config):
        page = f"reference/{package.removeprefix('evigrad.')}.md"
        files.append(File.generated(config, page, content=reference_page(package)))
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


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark text inside which a line must not break."""
    del page, config, files
    return WHOLE.sub(lambda match: match[0].replace(">", ' class="whole">', 1), html)
