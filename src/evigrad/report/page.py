"""A report as one HTML page that needs no other file."""

import base64
from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, select_autoescape

from evigrad.plots import DARK, LIGHT
from evigrad.report.content import Section, Table

_TEMPLATES = Environment(
    loader=PackageLoader("evigrad.report", "."),
    autoescape=select_autoescape(["html.jinja"]),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(
    title: str,
    lead: Sequence[str],
    parts: Sequence[Section | Table],
    folded: Sequence[Table],
    images: Mapping[str, tuple[bytes, bytes]],
) -> str:
    """The page as HTML, with all texts escaped.

    Args:
        title: Title of the report.
        lead: Paragraphs under the title.
        parts: Sections and tables, in their order; empty ones are left out.
        folded: Tables that are shown on demand.
        images: Name of each drawing to its PNG for light and for dark screens.

    Returns:
        The page.
    """
    inlined = {
        name: {"light": _inline(light), "dark": _inline(dark)}
        for name, (light, dark) in images.items()
    }
    return _TEMPLATES.get_template("page.html.jinja").render(
        title=title, lead=lead, parts=parts, folded=folded, images=inlined, light=LIGHT, dark=DARK
    )


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
