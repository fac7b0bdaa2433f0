"""Packages that take seconds to import, imported when a test first uses them.

Every worker collects all tests, but only one of them runs the tests of such a package.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Late:
    """A module by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip the tests of a module if one of the packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
