"""Exceptions and the warning category of evigrad, and conversions from other exceptions."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from importlib import import_module
from os.path import commonprefix
from typing import Any

# A hint to a less similar name would mislead. In a short name, one wrong letter weighs more.
_ALIKE, _ALIKE_IF_SHORT, _SHORT = 0.7, 0.65, 4
# Shorter parts are in many names.
_LEAST_PART = 3

# Messages of the CPU's allocator, and of libraries that bypass PyTorch's allocator.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)

# Advice for PyTorch's errors in the user's code, by a part of the message.
_ADVICE = {
    "does not require grad and does not have a grad_fn": (
        ". evigrad also calls the model under torch.no_grad(). A forward that takes derivatives"
        " itself needs a graph: put that part under torch.enable_grad(), call requires_grad_() on"
        " the input there, and pass create_graph=True to torch.autograd.grad."
    ),
    "must have the same dtype": ". Convert the inputs to the type of the weights: x.float().",
    "Expected hidden": (
        ". If forward keeps a hidden state for the next call, remove this. evigrad calls the model"
        " with different numbers of examples, and the output for an example must not depend on"
        " earlier calls."
    ),
}


class EvigradError(Exception):
    """Base class of all evigrad errors. The message explains how to fix the problem.

    See also: docs/faq.md.
    """


class InputError(EvigradError, ValueError):
    """Data that cannot be used: wrong shapes or labels, NaN, or a wrong number of examples.

    See also: docs/faq.md.
    """


class ConfigurationError(EvigradError, ValueError):
    """A setting that is unknown, invalid or incompatible with other settings.

    See also: docs/faq.md.
    """


class MemoryBudgetError(EvigradError, MemoryError):
    """A computation needs, or is predicted to need, more memory than is free.

    Args:
        need: Sentence about the needed memory and the free memory.
        cheaper: Sentence with advice on what to use instead. Default: no advice.

    Attributes:
        need: The argument ``need``.

    See also: docs/faq.md.
    """

    def __init__(self, need: str, cheaper: str = "") -> None:
        super().__init__(f"{need} {cheaper}".rstrip())
        self.need = need


class NotFiniteError(EvigradError, ArithmeticError):
    """An estimate or its gradient is NaN or infinite.

    See also: docs/faq.md.
    """


class NotFiniteOutputError(InputError, NotFiniteError):
    """The model's outputs are NaN or infinite, because of inputs, weights or hyperparameters.

    See also: docs/faq.md.
    """


class NotPositiveDefiniteError(EvigradError, ArithmeticError):
    """A matrix is not positive definite, so its log-determinant cannot be computed.

    See also: docs/faq.md.
    """


class RankError(EvigradError, RuntimeError):
    """Another process of the process group failed, or the connection to it was lost.

    See also: docs/faq.md.
    """


class ConformanceError(EvigradError, AssertionError):
    """A custom likelihood, layer rule or curvature does not fulfill its contract.

    See also: docs/likelihoods.md.
    """


class EvigradWarning(UserWarning):
    """A warning about a problem that does not stop the computation.

    See also: docs/faq.md.
    """


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the most similar candidate, or "" if none is similar."""
    best = max(candidates, key=lambda candidate: _likeness(name, candidate), default="")
    return f" Did you mean '{best}'?" if _likeness(name, best) else ""


def _likeness(name: str, other: str) -> float:
    """Return how similar two names are, from 0 to 1, and 0 if they differ by more than a typo."""
    # A common start, such as the hyphens of options or a folder, is not evidence of a typo.
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
    """Return the first five names in quotes, and the number of remaining names, as text."""
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def shape_or_type(value: object, m: int | None = None) -> str:
    """Return the shape of a tensor, or the type of any other object, for messages.

    A first dimension of size ``m``, the number of examples in a trial, is shown as "m".
    """
    shape = getattr(value, "shape", None)
    if shape is None:
        return f"a {type(value).__name__}"
    sizes = [str(size) for size in shape]
    if sizes and shape[0] == m:
        sizes[0] = "m"
    return f"shape ({', '.join(sizes)}{',' * (len(sizes) == 1)})"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error from PyTorch, Python or a CUDA library means "out of memory"."""
    import torch  # here, so that --help does not wait for it

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


@contextmanager
def memory_for(what: str, cheaper: str) -> Iterator[None]:
    """Turn an out-of-memory error into a MemoryBudgetError.

    Its message says that there was not enough memory for ``what`` and recommends ``cheaper``.

    Raises:
        MemoryBudgetError: If the code in this context runs out of memory.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, EvigradError) or not is_out_of_memory(error):
            raise
        raise MemoryBudgetError(f"There is not enough memory for {what}. Use {cheaper}.") from error


@contextmanager
def raised_in(whose: str | Callable[[], str], hint: str = "") -> Iterator[None]:
    """Turn an exception from the user's code into an InputError that names this code.

    evigrad's errors and out-of-memory errors pass unchanged. ``whose`` names the code and its
    arguments, as the subject of the message. If it is a function, it returns these words.
    ``hint`` is appended to the message.

    Raises:
        InputError: If the code in this context raises any other exception.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, EvigradError) or is_out_of_memory(error):
            raise
        hint = next((advice for words, advice in _ADVICE.items() if words in str(error)), hint)
        words = str(error).rstrip(".") if hint else error
        whose = whose if isinstance(whose, str) else whose()
        raise InputError(f"{whose} raised {type(error).__name__}: {words}{hint}") from error


def require(module: str, purpose: str, extra: str = "data") -> Any:
    """Return a module that ``pip install 'evigrad[EXTRA]'`` installs.

    ``purpose`` names what needs the module, as the subject of the error message.

    Raises:
        EvigradError: If the module is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise EvigradError(
            f"{purpose} needs the package '{package}', which is not installed. Run:"
            f" pip install 'evigrad[{extra}]'"
        ) from error
