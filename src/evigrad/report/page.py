"""A report as one HTML page that needs no other file."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from evigrad.plots import DARK, LIGHT
from evigrad.report.content import Drawing, Section, Table

# The same colours as the figures', so that these have no edges on the page.
_STYLE = f"""
:root {{
  color-scheme: light dark;
  --paper: {LIGHT.paper}; --ink: #1b1d21; --muted: {LIGHT.muted}; --line: {LIGHT.grid};
}}
@media screen and (prefers-color-scheme: dark) {{
  :root {{
    --paper: {DARK.paper}; --ink: {DARK.ink}; --muted: {DARK.muted}; --line: {DARK.grid};
  }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0 auto; padding: 1rem; max-width: 70rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere;
}}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }}
h2 {{ font-size: 1.15rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid var(--line); }}
p, figcaption {{ margin: 0.5rem 0; max-width: 45rem; }}
figcaption, .note, footer {{ color: var(--muted); font-size: 0.9rem; }}
.figures {{
  display: grid; gap: 1.5rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr));
}}
figure {{ margin: 0; max-width: 36rem; }}
img {{ display: block; width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{
  border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums;
  overflow-wrap: break-word;
}}
th, td {{
  padding: 0.25rem 0.75rem 0.25rem 0; text-align: left; vertical-align: top; min-width: 5rem;
  border-bottom: 1px solid var(--line); font-weight: normal;
}}
td {{ overflow-wrap: anywhere; }}
thead th {{ font-weight: 600; }}
tbody th {{ color: var(--muted); min-width: 8rem; max-width: 22rem; }}
summary {{ cursor: pointer; margin: 1rem 0 0.5rem; }}
footer {{ margin: 2rem 0 1rem; }}
@media print {{
  body {{ padding: 0; max-width: none; font-size: 10pt; }}
  h2 {{ break-after: avoid; }}
  figure, tr {{ break-inside: avoid; }}
  .figures {{ grid-template-columns: 1fr 1fr; }}
  .scroll {{ overflow: visible; }}
}}
"""


def render(
    title: str,
    lead: Sequence[str],
    parts: Sequence[Section | Table],
    folded: Sequence[Table],
    images: Mapping[str, tuple[bytes, bytes]],
) -> str:
    """The page.

    Args:
        title: What the report is of.
        lead: Paragraphs under the title.
        parts: Sections and tables, in their order; those with nothing in them are left out.
        folded: Tables that are shown on demand.
        images: Name of each drawing to its PNG for light and for dark screens.

    Returns:
        HTML in which every text is escaped.
    """
    body = [f"<h1>{escape(title)}</h1>"]
    body += [f"<p>{escape(paragraph)}</p>" for paragraph in lead]
    for part in parts:
        body += _table(part) if isinstance(part, Table) else _section(part, images)
    for table in folded:
        body += [
            f"<details><summary>{escape(table.title)}</summary>",
            *_rows(table),
            "</details>",
        ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            *body,
            "<footer>Written by evigrad report. The figures are in the folder figures beside this"
            " page.</footer>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _section(section: Section, images: Mapping[str, tuple[bytes, bytes]]) -> list[str]:
    if not section.drawings and not section.notes:
        return []
    lines = ["<section>", f"<h2>{escape(section.title)}</h2>"]
    if section.drawings:
        lines += ['<div class="figures">']
        lines += [_figure(drawing, *images[drawing.name]) for drawing in section.drawings]
        lines += ["</div>"]
    lines += [f'<p class="note">{escape(note)}</p>' for note in section.notes]
    return [*lines, "</section>"]


def _figure(drawing: Drawing, light: bytes, dark: bytes) -> str:
    return (
        "<figure><picture>"
        f'<source media="screen and (prefers-color-scheme: dark)" srcset="{_inline(dark)}">'
        f'<img src="{_inline(light)}" alt="{escape(drawing.title)}">'
        f"</picture><figcaption>{escape(drawing.sentence)}</figcaption></figure>"
    )


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _table(table: Table) -> list[str]:
    if not table.rows and not table.note:
        return []
    return ["<section>", f"<h2>{escape(table.title)}</h2>", *_rows(table), "</section>"]


def _rows(table: Table) -> list[str]:
    lines = []
    if table.rows:
        lines += ['<div class="scroll"><table>', "<thead><tr>"]
        lines += [f'<th scope="col">{escape(cell)}</th>' for cell in table.head]
        lines += ["</tr></thead>", "<tbody>"]
        for first, *rest in table.rows:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
            lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
        lines += ["</tbody>", "</table></div>"]
    if table.note:
        lines.append(f'<p class="note">{escape(table.note)}</p>')
    return lines
