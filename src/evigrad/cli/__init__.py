"""The command ``evigrad``: one module for each subcommand."""

import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from evigrad.errors import EvigradError, EvigradWarning, RankError, is_out_of_memory

_NEEDS = "The command line needs more packages than the library: pip install 'evigrad[all]'"
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments after the program's name. Default: those of the process.

    Returns:
        The exit code: 0, 2 for a mistake that the user can mend, 130 after Ctrl-C, 143 where
        the process was asked to end.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    missing = [name for name in ("jsonargparse", "rich", "yaml") if find_spec(name) is None]
    if missing:
        print(f"{_NEEDS} ({', '.join(missing)} missing).", file=sys.stderr)
        return 2
    from evigrad.cli.commands import run
    from evigrad.cli.messages import is_first_process, show

    said: set[str] = set()

    def show_warning(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if not issubclass(category, EvigradWarning):
            return plain(message, category, *rest)
        if str(message) not in said:  # two runs in one command warn of the same model once
            said.add(str(message))
            show("warning", str(message))

    plain = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always", EvigradWarning)
        warnings.showwarning = show_warning
        try:
            return run(arguments)
        except EvigradError as error:
            # Mistakes are those of all processes, and one says them.
            if is_first_process() or isinstance(error, RankError):
                show("error", str(error))
            return 2
        except OSError as error:  # as a full disk, of a file that is no run's
            show("error", f"{error.filename or 'A file'}: {error.strerror or error}.")
            return 2
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            show("error", f"Memory does not suffice: {error} Take less data or a smaller network.")
            return 2
        except KeyboardInterrupt as error:
            show("error", f"Interrupted. {error}")
            return getattr(error, "exit_code", _INTERRUPTED)
