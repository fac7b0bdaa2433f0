"""Imports that only an extra installs, with an error that names the extra."""

from importlib import import_module
from types import ModuleType

from evigrad.errors import EvigradError


def require(module: str, purpose: str, extra: str = "data") -> ModuleType:
    """Import a module that an extra of evigrad installs.

    Args:
        module: Dotted name of the module.
        purpose: What needs it, as the subject of the error's sentence.
        extra: The extra's name.

    Returns:
        The module.

    Raises:
        EvigradError: If it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise EvigradError(
            f"{purpose} needs the package '{package}', which is not installed: "
            f"pip install 'evigrad[{extra}]'"
        ) from error
