"""Every public function and method has a docstring, or overrides a method that has one."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest

from evigrad.errors import EvigradError

SOURCE = Path(__file__).parents[1] / "src"
MODULES = sorted(
    ".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in SOURCE.rglob("[!_]*.py")
)
# What these need is installed by an extra.
EXTRAS = ("cli", "lightning", "report", "sklearn", "transformers")


@pytest.mark.parametrize("name", MODULES)
def test_public_methods_say_what_they_do(name: str) -> None:
    try:
        module = import_module(name)
    except (ImportError, EvigradError):
        if not name.removeprefix("evigrad.").startswith(EXTRAS):
            raise
        pytest.skip("an extra is not installed")
    classes = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == name and kind.__name__[0] != "_"
    ]
    silent = [
        f"{kind.__name__}.{method}"
        for kind in classes
        for method, value in vars(kind).items()
        if method[0] != "_"
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(kind, method))
    ]
    assert not silent
