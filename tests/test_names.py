"""Names of local variables say what they hold (DESIGN, section 6)."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Participles and pronouns that stand for any value at all.
VAGUE = {"found", "own", "each", "given", "known", "rest", "made", "some", "wanted"}
FOLDERS = ("src", "experiments", "examples", "benchmarks", "tests")
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every variable and parameter that a syntax tree binds, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.lineno, node.name


def test_no_variable_has_a_vague_name() -> None:
    vague = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in FILES
        for line, name in bound_names(ast.parse(file.read_text()))
        if name in VAGUE
    ]
    assert not vague, "Say what these hold:\n" + "\n".join(vague)


def test_no_variable_of_the_package_says_only_what_it_belongs_to() -> None:
    unnamed = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in FILES
        if file.is_relative_to(ROOT / "src")
        for line, name in bound_names(ast.parse(file.read_text()))
        if name.startswith("of_")
    ]
    assert not unnamed, "Say what these are, as in `head_outputs` for `of_head`:\n" + "\n".join(
        unnamed
    )


def test_every_way_to_bind_a_name_counts() -> None:
    codes = [
        "found = 1",
        "for each in x: pass",
        "[own for own in x]",
        "def f(given): pass",
        "def f(*, known=1): pass",
        "lambda rest: 0",
        "with x as made: pass",
        "a, *some = x",
        "if (wanted := x): pass",
        "try: pass\nexcept ValueError as found: pass",
    ]
    assert not [c for c in codes if not VAGUE & {name for _, name in bound_names(ast.parse(c))}]
