"""The exceptions and the warning of evigrad, and what makes them of others' exceptions."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from importlib import import_module
from os.path import commonprefix
from typing import Any

# Names less alike than this are other names, and a hint to one of them misleads. A slip in one of
# few letters weighs more.
_ALIKE, _ALIKE_IF_SHORT, _SHORT = 0.7, 0.65, 4
# A shorter part is in many names.
_LEAST_PART = 3

# Of the CPU's allocator, and of libraries that allocate past PyTorch's.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)

# What autograd says of a derivative that is taken without a graph, and what to do in a model.
_NO_GRAPH = "does not require grad and does not have a grad_fn"
_DIFFERENTIATES = (
    ". evigrad also calls the model under torch.no_grad(). A forward that takes derivatives"
    " itself needs a graph: put that part under torch.enable_grad(), call requires_grad_() on the"
    " input there, and pass create_graph=True to torch.autograd.grad."
)


class EvigradError(Exception):
    """Base of every error that evigrad raises on purpose; its text says how to mend the cause."""


class InputError(EvigradError, ValueError):
    """Data that cannot be used: wrong shapes, labels out of range, NaN, too few or too many."""


class ConfigurationError(EvigradError, ValueError):
    """A setting that does not exist or does not fit the others."""


class MemoryBudgetError(EvigradError, MemoryError):
    """A structure whose predicted memory exceeds what is free.

    Args:
        need: What takes how much, and what is free.
        cheaper: What to take instead. It ends the message.

    Attributes:
        need: As given, for a caller that knows other ways out.
    """

    def __init__(self, need: str, cheaper: str = "") -> None:
        super().__init__(f"{need} {cheaper}".rstrip())
        self.need = need


class NotFiniteError(EvigradError, ArithmeticError):
    """An estimate or its gradient is NaN or infinite."""


class NotFiniteOutputError(InputError, NotFiniteError):
    """Outputs of the model are NaN or infinite, by its inputs, weights or hyperparameters."""


class NotPositiveDefiniteError(EvigradError, ArithmeticError):
    """A matrix whose log-determinant was asked for is not positive definite."""


class RankError(EvigradError, RuntimeError):
    """Another process of the process group failed, or was lost."""


class EvigradWarning(UserWarning):
    """Something that the user should know, but that does not stop the computation."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest candidate; an empty string if none is close."""
    best = max(candidates, key=lambda candidate: _likeness(name, candidate), default="")
    return f" Did you mean '{best}'?" if _likeness(name, best) else ""


def _likeness(name: str, other: str) -> float:
    """How alike two names are, from 0 to 1; 0 where a slip does not lead from one to the other."""
    # What is in front in both, as the hyphens of options or a folder, says nothing.
    shared = max(commonprefix([name, other]).rfind(mark) for mark in "-/") + 1
    one, two = name[shared:].lower(), other[shared:].lower()
    short, long = sorted((one, two), key=len)
    if sorted(one) == sorted(two):
        return 1.0
    ratio = SequenceMatcher(None, one, two).ratio()
    is_part = len(short) >= _LEAST_PART and short in long
    least = _ALIKE_IF_SHORT if len(long) <= _SHORT else _ALIKE
    return ratio if is_part or (ratio >= least and one[:1] == two[:1]) else 0.0


def listed(names: Sequence[str]) -> str:
    """Names in words as ``'a', 'b'``, the first five of many."""
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch's allocators, Python or CUDA's libraries say that memory did not suffice."""
    import torch  # here, as whoever only reads the help does not wait for it

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def memory_for(what: str, cheaper: str) -> Iterator[None]:
    """Make an allocator's error one that says ``what`` did not fit, and what is ``cheaper``.

    Raises:
        MemoryBudgetError: From an allocator's error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, EvigradError) or not is_out_of_memory(error):
            raise
        raise MemoryBudgetError(f"Out of memory for {what}. Use {cheaper}.") from error


@contextmanager
def raised_in(whose: str) -> Iterator[None]:
    """Make an exception of the user's own code an error that says whose it is.

    Those of evigrad, and those that say that memory did not suffice, pass as they are. ``whose``
    is the code and what it was given, the subject of the error's sentence.

    Raises:
        InputError: From any other exception.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, EvigradError) or is_out_of_memory(error):
            raise
        hint = _DIFFERENTIATES if _NO_GRAPH in str(error) else ""
        raise InputError(f"{whose} raised {type(error).__name__}: {error}{hint}") from error


def require(module: str, purpose: str, extra: str = "data") -> Any:
    """Return a module that an extra of evigrad installs.

    ``purpose`` says what needs it, as the subject of the error's sentence.

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
