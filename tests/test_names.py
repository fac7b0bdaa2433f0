"""Names of local variables say what they hold (DESIGN, section 6)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_variable_has_a_vague_name(file: Path) -> None:
    names = bound_names(ast.parse(file.read_text()))
    vague = [f"line {line}: {name}" for line, name in names if name in VAGUE]
    assert not vague, f"Say what these hold: {', '.join(vague)}."


@pytest.mark.parametrize(
    "code",
    [
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
    ],
)
def test_every_way_to_bind_a_name_counts(code: str) -> None:
    assert VAGUE & {name for _, name in bound_names(ast.parse(code))}
