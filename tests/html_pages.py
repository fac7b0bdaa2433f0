"""A page as its tests see it: well-formed, with its texts and images."""

import base64
import io
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

_VOID = {"meta", "img", "source", "br", "link", "input", "hr"}
_INLINE = "data:image/png;base64,"


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        text: All that is read, in one line.
        images: The images for light screens, (height, width, 4).
        dark: Those for dark ones.
        captions: Under the images.
        tables: Each a list of rows of cells.
        tags: The names of all elements.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.images: list[np.ndarray] = []
        self.dark: list[np.ndarray] = []
        self.captions: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(self.source)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert len(named) == len(attrs)
        self.tags.add(tag)
        if tag not in _VOID:
            self.open.append(tag)
        for name in ("src", "srcset", "href"):
            if name in named:
                pixels = decode(named[name] or "")
                (self.images if tag == "img" else self.dark).append(pixels)
        if tag == "img":
            assert named["alt"]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "figcaption":
            self.captions.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if self.open[-1:] in (["td"], ["th"]):
            self.tables[-1][-1][-1] += data
        elif self.open[-1:] == ["figcaption"]:
            self.captions[-1] += data

    def cell(self, row: str, column: int = 1) -> str:
        """The cell in the first row of a name."""
        rows = [cells for table in self.tables for cells in table if cells[0] == row]
        return rows[0][column]


def decode(address: str) -> np.ndarray:
    """The pixels of an image that lies in the page itself."""
    from matplotlib.image import imread

    assert address.startswith(_INLINE), address[:80]
    content = base64.b64decode(address.removeprefix(_INLINE), validate=True)
    return imread(io.BytesIO(content), format="png")
