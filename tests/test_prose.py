"""What users read keeps to the style: words of the field, short sentences, named columns."""

from pathlib import Path

import pytest
from prose import clean, main, markdown_texts, num_words, problems, sentences

ROOT = Path(__file__).parents[1]


def test_what_users_read_keeps_to_the_style() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    code = [*(ROOT / "examples").glob("*.py"), *(ROOT / "src" / "evigrad").rglob("*.py")]
    violations = [
        f"{file.relative_to(ROOT)}:{problem.line}: {problem.reason} [{problem.text}]"
        for file in sorted(pages + code)
        for problem in problems(file)
    ]
    assert not violations, "\n".join(violations)


def reasons(tmp_path: Path, text: str, name: str = "page.md") -> list[str]:
    path = tmp_path / name
    path.write_text(text)
    return [problem.reason for problem in problems(path)]


VIOLATIONS = [
    ("Each datum counts once.", "example"),
    ("Leave the option away.", "omit"),
    ("Call it again to go on with\nthe run.", "resume"),
    ("It gets 96 % right.", "accuracy"),
    ("KFAC is no bound.", "is not a"),
    ("Wrappers, as `Averaged`, go around it.", "such as"),
    ("We normalise the inputs.", "-ize"),
    ("The first one is long; the second is short.", "semicolon"),
    ("Of these networks the second one wins.", "opens with"),
    ("400 rows are enough for this network.", "opens with"),
    ("It ends at -0.15 nats.", "minus"),
    ("It costs .67 of the time.", "zero"),
    ("We train on 1000 digits.", "1,000"),
    ("Read [why](theory.md) it holds.", "link text"),
    ("| | b |\n|---|---|\n| 1 | 2 |", "empty table header"),
    ("| way | b |\n|---|---|\n| 1 | 2 |", "cryptic table header"),
    ("| a | b |\n|---|---|\n| 1 | -2.5 |", "minus"),
    ("| a | b |\n|---|---|\n| 1 | one datum |", "example"),
    ("> A quoted datum.", "example"),
    ("- An item with a datum.", "example"),
    ("# A datum", "example"),
    (" ".join(["word"] * 31) + ".", "sentence of 31 words"),
    ("- " + " ".join(["word"] * 31), "sentence of 31 words"),
    ("\n".join(["word"] * 31), "sentence of 31 words"),
]
GOOD = [
    "The log evidence is −0.15 ± 0.02 for 1,000 examples in 2023, with 0.67 s per step.",
    "Set `datum = -0.5; by heart` or $-0.5 ; x$ first.",
    "Call [`fit`](usage.md) as in [the guide to custom loops](usage.md#datum).",
    "See <https://example.org/beside;datum>.",
    "Use a range of 3-5 epochs, as `fit` does. There is no bound. It is no longer slow.",
    "By default, the prior is layerwise. What is the evidence?",
    "| Method | Time |\n|:---|---:|\n| `a|b` | " + " ".join(["word"] * 40) + " |",
    " ".join(["word"] * 30) + ".",
    " ".join(["`code` 12 $x$"] * 40) + ".",
    "The value, e.g. " + " ".join(["word"] * 20) + ". Then " + " ".join(["word"] * 20) + ".",
]


def test_violations_in_markdown_count(tmp_path: Path) -> None:
    for text, reason in VIOLATIONS:
        assert any(reason in problem for problem in reasons(tmp_path, text)), text
        assert not reasons(tmp_path, f"```\n{text}\n```\n"), text
        assert not reasons(tmp_path, f"<!--\n{text}\n-->\n"), text


def test_good_prose_passes(tmp_path: Path) -> None:
    assert not {text: wrong for text in GOOD if (wrong := reasons(tmp_path, text))}


CODE = '''
"""A module about each datum."""


def call(a: int) -> None:
    """Return it.

    Args:
        a: A number in the place of another one.
            It is dear.

    Examples:
        >>> datum = 1
    """
    if a:
        raise ValueError(f"Leave {a} away, " + "or mend it.")
    parser.add_argument("--datum", help="Each datum of the set counts.")


class _Private:
    """A datum."""


def _private() -> None:
    """A datum."""
'''


def test_docstrings_and_messages_count(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    counts = [(problem.line, problem.reason.split('"')[1]) for problem in problems(path)]
    assert counts == [
        (2, "datum"),
        (9, "in the place of"),
        (10, "dear"),
        (16, "Leave `…` away"),
        (16, "mend"),
        (17, "datum"),
    ]


def test_long_sentences_in_docstrings_and_messages_count(tmp_path: Path) -> None:
    long = " ".join(["word"] * 31)
    assert reasons(tmp_path, f'"""{long}."""', "code.py") == ["sentence of 31 words"]
    assert reasons(tmp_path, f'warn("{long}", stacklevel=2)', "code.py") == ["sentence of 31 words"]
    listed = (
        f'"""Return.\n\nArgs:\n    a: {long[:70]}.\n    b: {long[:70]}.\n    c: {long[:70]}.\n"""'
    )
    assert not reasons(tmp_path, listed, "code.py")


def test_problems_have_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "# Title\n\nFirst line with\n`code\nof two lines` and a\ndatum in it.\n\n- datum\n"
    )
    assert [problem.line for problem in problems(path)] == [6, 8]


def test_words_and_sentences() -> None:
    assert num_words(clean("A *well-known* `code` of 12 $x^2$ [words here](a.md).")) == 5
    text = "One, e.g. this. Two? (Three.) `x` is four."
    assert len([sentence for _, sentence in sentences(clean(text))]) == 4
    kinds = [text.kind for text in markdown_texts("# A\nb\n- c\n\n| d |\n|---|\n| e |\n\nf [g](h)")]
    assert kinds == ["heading", "prose", "item", "header", "cell", "link", "prose"]


def test_the_command_prints_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text("A datum.\n")
    assert main([str(tmp_path)]) == 1
    assert f"{tmp_path / 'page.md'}:1:" in capsys.readouterr().out
    (tmp_path / "page.md").write_text("An example.\n")
    assert main([str(tmp_path / "page.md")]) == 0
