"""The structure of the source: modules import one another in no circle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules and names that a module imports, also those for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_modules_import_one_another_in_no_circle() -> None:
    """Import-linter ignores imports under TYPE_CHECKING."""
    trees = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): ast.parse(path.read_text())
        for path in SOURCE.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {name: {n for n in imports(tree) if n in trees} for name, tree in trees.items()}
    assert "evigrad.core.protocols" in graph["evigrad.core.algorithm"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("folder", ["core", "passes"])
def test_classes_have_at_most_ten_public_methods(folder: str) -> None:
    """Properties count as methods. Overloads and private methods do not count."""
    many = []
    for path in sorted((SOURCE / "evigrad" / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
                public = {name for name in methods if not name.startswith("_")}
                many += [(path.name, node.name, sorted(public))] if len(public) > 10 else []
    assert not many
