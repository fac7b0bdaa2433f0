"""Check prose against the style of the project, in Markdown, docstrings and messages.

Run ``python tests/prose.py PATH...`` to print each violation with file, line and reason, and the
number and mean length of the sentences of each file. A path is a Markdown file, a Python file or
a folder. tests/test_prose.py runs the same check on everything that users read.

Code spans, code blocks, formulas, addresses and names in angle brackets are no words. Cells of
tables are checked for words, not for length.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_WORDS = 30
# A stretch of code, and a formula: symbols of no script, which no pattern takes for a word.
CODE, FORMULA = "\ue000", "\ue001"


class Problem(NamedTuple):
    """A violation: its line, its reason, and the words around it."""

    line: int
    reason: str
    text: str


class Text(NamedTuple):
    """A stretch of prose: its first line, what it is, and its words without any markup.

    ``kind`` is "prose", "item", "heading", "cell", "header", "link", "docstring" or "message".
    """

    line: int
    kind: str
    words: str


# Words and phrases that have a better one. Each pattern ignores case.
BANNED = {
    r"\bdat(?:um|ums)\b": "example, not datum",
    r"\bby heart\b": "memorize or overfit",
    r"\bin (?:the )?place of\b": "instead of",
    r"\b(?:leave|leaves|leaving)\b[^.,;:]{0,30}\baway\b|\bleft away\b": "omit",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bbeside\b": "compared with, or next to",
    r"\brefus(?:e|es|ed|ing|al|als)\b": "raises an error, or is not supported",
    r"\bof (?:your|my|his|her|its|our|their|one's) own\b": "custom, or your own X",
    r"\bof (?:yours|ours|theirs)\b": "your X, our X",
    r"\bone's\b": "your",
    r"\busual (?:weight )?decay\b": "weight decay 5e-4",
    r"\b(?:go|goes|going|gone|went) on\b(?! GitHub)": "continue or resume",
    r"% right\b": "accuracy",
    r"\bdear(?:er|est)?\b": "expensive",
    r"\bquarter of a minute\b": "15 s",
    r"\bdecay(?:s|ed|ing)? too much\b": "over-regularize",
    r"\b(?:is|are|was|were) had\b": "is computed",
    r"\brooms\b": "subpackages",
    r"\brivals?\b": "baseline or method",
    r"\bnobody\b": "no one, or say it without a person",
    r"(?<!there )(?<!why )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|better\b|worse\b"
    r"|larger\b|smaller\b|faster\b|slower\b|higher\b|lower than\b|guarantee\b|substitute\b"
    r"|different\b)": "is not a",
    r"\bhas no use\b": "is not needed",
    r"\bwithout a word\b": "silently",
    r"\bas many as are\b|\bas few as\b|\bas many\b(?! [\w-]+ as\b)(?! as\b)": "the same number of",
    r"\balone\b": "only",
    r"\bthat of\b|\bthose of\b": "repeat the noun",
    r"\b(?:too|how|very|so|as|more|less) sure\b|\bsureness\b|\bunsure\b": "confident, uncertain",
    r"\bnetworks? (?:die|dies|died)\b|\bhad died\b": "diverge or fail",
    r"\bmade (?:data|tables?|images?|texts?|sets?)\b": "synthetic",
    r"\bmisspelt\b": "misspelled",
    r"\bis all right\b": "is supported",
    r"\bthe face of\b": "the API of",
    r"\banew\b": "again",
    r"\bhand in hand\b": "together",
    r"\bfor free of\b": "without",
    r"\bbad teacher\b|\bin the eyes of\b": "say what happens",
    r"\b(?:networks?|bounds?|evidence|estimators?|data|datasets?|priors?|posteriors?|models?|"
    r"softmax|gradients?) (?:knows?|says?|asks?|trusts?|teach|teaches|thinks?|wants?|believes?)"
    r"\b": "code and people act; these do not",
    rf", as (?:of |in |with |by |for |from )?{CODE}"
    r"(?! (?:does|do|did|is|was|has|would|can|must)\b)": "such as",
    r"\bas that of\b|\bas those of\b": "repeat the noun",
}
_STEMS = (
    "anonym capital central character categor custom diagonal discret equal factor final formal "
    "general homogen initial linear local marginal material maxim memor minim modern neutral "
    "normal optim organ orthogonal orthonormal parallel parameter parametr penal polar "
    "quant random rational real recogn regular serial special stabil standard summar symmetr "
    "synchron token util vector visual"
)
BRITISH = {
    rf"\b\w*(?:{_STEMS.replace(' ', '|')})is(?:e|es|ed|er|ers|ing|ation|ations|able)\b": "-ize",
    r"\banalys(?:e|ed|ing)\b": "analyze",
    r"\b(?:colour|behaviour|favour|neighbour|honour|labour|flavour|rumour|harbour)\w*": "-or",
    r"\b(?:centre[sd]?|centring|metres?|litres?|fibres?|theatres?)\b": "-er",
    r"\b(?:licence|defence|offence|pretence)s?\b|\bpractis(?:e|es|ed|ing)\b": "-se, practice",
    r"\b(?:model|label|travel|cancel|signal|level|channel|total)l(?:ed|ing|er|ers)\b": "one l",
    r"\b(?:grey|catalogue|analogue|programme|sceptic\w*|judgement|artefacts?|ageing|whilst|amongst"
    r"|learnt|spelt|burnt|leant|dreamt|maths|towards|fulfil|skilful|per cent|focuss\w+)\b": (
        "American spelling"
    ),
}
PATTERNS = [
    (re.compile(pattern, re.IGNORECASE), f'"{{}}": {hint}')
    for pattern, hint in {**BANNED, **BRITISH}.items()
]
# What a sentence must not open with, unless it is a question.
OPENINGS = re.compile(r"(?:Of|Who|Where|What|Say)\b|By (?!default\b)|\d[\d,.]*(?![\d.]*\w|\.)\s")
# What is checked in Markdown only: code has its own numbers and signs.
HYPHEN_MINUS = re.compile(r"(?:(?<=[\s(|±,=/≤≥<>])|^)-(?=\.?\d)")
NO_ZERO = re.compile(r"(?<![\w.)\]…])\.\d")
NO_COMMA = re.compile(r"(?<![\w.,\-−#/])(?!(?:19|20)\d\d\b)\d{4,}(?![\w%]|[.,-]\d|-\w)")
GENERIC_LINKS = set(
    "why here measured results there how this that what where when more link page below above so "
    "it both others those these which cost numbers details measurements click read see docs yes no "
    "too also elsewhere then".split()
) | {
    "need not",
    "there too",
    "what works",
    "this page",
    "that page",
    "the page",
    "read more",
    "see here",
    "click here",
    "the others",
}
CRYPTIC_HEADERS = {"way", "ways", "%", "×", "?"}
ABBREVIATIONS = re.compile(r"\b(?:e\.g|i\.e|cf|vs|approx|al|Fig|Figs|Eq|Sec|Dr|No)\.$")
END = re.compile(r"[.!?](?:[\"'”’)\]]|\*\*|[*_])*(?=\s+\S)")
# What begins a sentence in lower case.
NAME = re.compile(r"evigrad\b")
WORD = re.compile(r"[^\W\d_][\w'’]*(?:-[\w'’]+)*")


def clean(text: str) -> str:
    """Replace code, formulas, links, tags and emphasis of Markdown by what a reader sees of them.

    Line breaks stay, so that a place in the text still has its line.
    """

    def lines(match: re.Match[str], words: str = "") -> str:
        return words + "\n" * (match[0].count("\n") - words.count("\n"))

    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", lambda m: lines(m, CODE), text, flags=re.DOTALL)
    formula = r"(?<![\\$\w])\$(?=[^\s$])(?:[^$]*[^\s$\\])?\$(?![\w$])"
    text = re.sub(formula, lambda m: lines(m, FORMULA), text)
    text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", lambda m: lines(m, m[1]), text)
    text = re.sub(r"<?https?://[^\s>)]+>?|\S+@\S+\.\w+", lambda m: lines(m, CODE), text)
    text = re.sub(r"</?[a-zA-Z][^<>]*>|\{[#:.][^{}]*\}|&\w+;", lines, text)
    return re.sub(r"\*\*|(?<!\w)[*_](?=\w)|(?<=[\w.,!?)])[*_](?!\w)", "", text)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Split prose into sentences, each with its offset."""
    start = 0
    for match in END.finditer(text):
        following = text[match.end() :].lstrip()
        begins = not following[:1].islower() or NAME.match(following)
        if not begins or ABBREVIATIONS.search(text[start : match.start() + 1]):
            continue
        yield start, text[start : match.end()]
        start = match.end()
    if text[start:].strip():
        yield start, text[start:]


def num_words(sentence: str) -> int:
    """Count words: code, formulas and numbers are none."""
    return len(WORD.findall(sentence))


def problems_of(text: Text, *, markdown: bool) -> Iterator[Problem]:
    """Find what is wrong with one stretch of prose."""

    def problem(offset: int, reason: str) -> Problem:
        shown = text.words[max(0, offset - 30) : offset + 50]
        line = text.line + text.words[:offset].count("\n")
        return Problem(line, reason, " ".join(shown.replace(CODE, "`…`").split()))

    for pattern, reason in PATTERNS:
        for match in pattern.finditer(text.words):
            if text.kind != "link":
                shown = " ".join(match[0].replace(CODE, "`…`").split())
                yield problem(match.start(), reason.format(shown))
    if text.kind == "link":
        if " ".join(text.words.lower().split()).strip(".,") in GENERIC_LINKS:
            yield problem(0, f'link text "{text.words}" does not name its target')
        return
    if text.kind == "header":
        shown = text.words.strip()
        if not shown:
            yield problem(0, "empty table header")
        elif shown.lower() in CRYPTIC_HEADERS:
            yield problem(0, f'cryptic table header "{shown}"')
    if markdown:
        for match in HYPHEN_MINUS.finditer(text.words):
            yield problem(match.start(), "hyphen as a minus: −")
        if text.kind in ("prose", "item"):
            for match in NO_COMMA.finditer(text.words):
                yield problem(match.start(), f"{match[0]}: write 1,000")
    if markdown or text.kind == "docstring":
        for match in NO_ZERO.finditer(text.words):
            yield problem(match.start(), "number without its zero: 0.67")
    if text.kind in ("cell", "header", "heading"):
        return
    if markdown and ";" in text.words:
        yield problem(text.words.index(";"), "semicolon: make two sentences")
    for offset, sentence in sentences(text.words):
        offset += len(sentence) - len(sentence.lstrip())
        length = num_words(sentence)
        if length > MAX_WORDS:
            yield problem(offset, f"sentence of {length} words")
        opening = OPENINGS.match(sentence.lstrip())
        if opening and length >= 5 and not sentence.rstrip().endswith("?"):
            yield problem(offset, f'sentence opens with "{opening[0].strip()}"')


def markdown_texts(source: str) -> Iterator[Text]:
    """Every stretch of prose of a Markdown page, without code and comments."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    source = re.sub(r"<!--.*?-->", blank, source, flags=re.DOTALL)
    source = re.sub(r"\A---\n.*?\n---\n", blank, source, flags=re.DOTALL)
    source = re.sub(
        r"^([ >]*)(`{3,}|~{3,}).*?^\1\2[ ]*$", blank, source, flags=re.DOTALL | re.MULTILINE
    )
    kind, first, gathered = "prose", 0, []

    def block() -> Iterator[Text]:
        words = "\n".join(gathered)
        gathered.clear()
        if words.strip():
            for match in re.finditer(r"(?<!!)\[([^\]]*)\]\([^)]*\)", words):
                line = first + words[: match.start()].count("\n")
                yield Text(line, "link", match[1])
            yield Text(first, kind, clean(words))

    lines = source.split("\n")
    for number, raw in enumerate(lines, start=1):
        line = re.sub(r"^\s*>\s?", "", raw)
        if line.lstrip().startswith("|"):
            yield from block()
            below = lines[number] if number < len(lines) else ""
            if re.fullmatch(r"\s*\|?[\s:|-]+\|?\s*", line) and "-" in line:
                continue
            header = bool(re.fullmatch(r"\s*\|[\s:|-]*-[\s:|-]*", below))
            row = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", CODE, line.strip())
            for cell in re.split(r"(?<!\\)\|", row.strip("|") if row.strip("|") else row[1:-1]):
                yield Text(number, "header" if header else "cell", clean(cell))
            if row.startswith("||") or (row.endswith("||") and header):
                yield Text(number, "header", "")
            for match in re.finditer(r"(?<!!)\[([^\]]*)\]\([^)]*\)", line):
                yield Text(number, "link", match[1])
            continue
        item = re.match(r"\s*(?:[-*+]|\d+[.)])\s+", line)
        heading = re.match(r"\s*#{1,6}\s+", line)
        admonition = re.match(r'\s*(?:!!!|\?\?\?\+?)\s+\w+(?:\s+"([^"]*)")?', line)
        if not line.strip() or item or heading or admonition:
            yield from block()
        if not line.strip():
            continue
        if heading:
            kind, first = "heading", number
            gathered.append(line[heading.end() :])
            yield from block()
        elif admonition:
            kind, first = "heading", number
            gathered.append(admonition[1] or "")
            yield from block()
        else:
            if not gathered:
                kind, first = "item" if item else "prose", number
            gathered.append(line[item.end() :] if item else line)
        if heading or admonition:
            kind = "prose"
    yield from block()


SECTION = re.compile(
    r"(Args|Arguments|Attributes|Returns|Yields|Raises|Examples?|Notes?|References|See Also):\s*$"
)


def docstring_texts(text: str, line: int) -> Iterator[Text]:
    """The paragraphs of a docstring in Google's style, and the texts of its arguments."""
    first, gathered, fence, doctest, literal = line, [], False, False, -1

    def block() -> Iterator[Text]:
        words = "\n".join(gathered)
        gathered.clear()
        if words.strip():
            yield Text(first, "docstring", clean(words))

    in_section, entry_indent = False, -1
    for number, raw in enumerate(text.split("\n"), start=line):
        stripped, indent = raw.strip(), len(raw) - len(raw.lstrip())
        if stripped.startswith("```"):
            yield from block()
            fence = not fence
            continue
        if not stripped:
            yield from block()
            doctest = False
            continue
        if literal >= 0 and indent <= literal:
            literal = -1
        if stripped.startswith(">>>"):
            yield from block()
            doctest = True
        if fence or doctest or literal >= 0:
            continue
        if SECTION.match(stripped):
            yield from block()
            in_section, entry_indent = True, -1
            continue
        if in_section and (entry_indent < 0 or indent <= entry_indent):
            if entry_indent >= 0 and indent < entry_indent:
                in_section = False
            entry_indent = indent
            yield from block()
            name = re.match(r"\*{0,2}[\w.\[\], ]+(?:\s*\([^)]*\))?:\s+|[`\w]+:\s+", stripped)
            stripped = stripped[name.end() :] if name else stripped
        elif item := re.match(r"(?:[-*]|\d+\.)\s+", stripped):
            yield from block()
            stripped = stripped[item.end() :]
        if not gathered:
            first = number
        if stripped.endswith("::"):
            stripped, literal = stripped[:-1], indent
        gathered.append(stripped)
    yield from block()


def string_of(node: ast.expr) -> str | None:
    """The text of a string in code, with a symbol for each value that is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (string_of(part) or CODE for part in node.values)
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = string_of(node.left), string_of(node.right)
        if left is not None or right is not None:
            return (CODE if left is None else left) + (CODE if right is None else right)
    return None


def message_texts(text: str, line: int) -> Iterator[Text]:
    """The paragraphs of a message, without indented lines: those are commands and lists."""
    for paragraph in re.split(r"\n\s*\n", text):
        prose = [words for words in paragraph.split("\n") if not words.startswith("  ")]
        if words := " ".join(prose).strip():
            yield Text(line, "message", clean(words))


def python_texts(source: str) -> Iterator[Text]:
    """Public docstrings of a module, and its messages: all strings in it that read as prose."""
    tree = ast.parse(source)
    strings: set[int] = set()

    def docstrings(node: ast.AST, public: bool) -> Iterator[Text]:
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            return
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            public = public and not getattr(node, "name", "public").startswith("_")
            for statement in body:
                # The docstring, and the strings below attributes.
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    value = statement.value
                    if isinstance(value.value, str):
                        strings.add(id(value))
                        if public:
                            yield from docstring_texts(value.value, value.lineno)
            inner = public and isinstance(node, ast.Module | ast.ClassDef)
            for statement in body:
                yield from docstrings(statement, inner)

    yield from docstrings(tree, True)
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        text = string_of(node) if isinstance(node, ast.expr) and id(node) not in strings else None
        if text is None:
            if isinstance(node, ast.Subscript):  # an annotation's, or a key
                pending.append(node.value)
            else:
                pending.extend(ast.iter_child_nodes(node))
            continue
        if num_words(text) >= 4 and re.search(r"\s", text.strip()):
            yield from message_texts(text, getattr(node, "lineno", 1))
        for part in ast.walk(node):
            if isinstance(part, ast.FormattedValue):
                pending.append(part.value)


def texts(path: Path) -> list[Text]:
    """Every stretch of prose of a file."""
    source = path.read_text(encoding="utf-8")
    return list(markdown_texts(source) if path.suffix == ".md" else python_texts(source))


def problems(path: Path) -> list[Problem]:
    """Every violation in a file, by lines."""
    markdown = path.suffix == ".md"
    every = (problem for text in texts(path) for problem in problems_of(text, markdown=markdown))
    return sorted(set(every))


def files(paths: Iterable[Path]) -> list[Path]:
    """The files with prose among the paths and in folders."""
    every: list[Path] = []
    for path in paths:
        if path.is_dir():
            every += sorted(file for kind in ("*.md", "*.py") for file in path.rglob(kind))
        else:
            every.append(path)
    return every


def main(arguments: list[str]) -> int:
    """Print the violations in the files and folders, and return whether there are any."""
    total = 0
    for path in files(map(Path, arguments)):
        here = problems(path)
        total += len(here)
        for problem in here:
            print(f"{path}:{problem.line}: {problem.reason}   [{problem.text}]")
        lengths = [
            num_words(sentence)
            for text in texts(path)
            if text.kind in ("prose", "item", "docstring", "message")
            for _, sentence in sentences(text.words)
        ]
        if lengths:
            mean = sum(lengths) / len(lengths)
            print(f"{path}: {len(here)} problems, {len(lengths)} sentences of {mean:.1f} words")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
