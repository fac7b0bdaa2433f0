"""What every test runs under: shapes checked at run time, one thread, deterministic examples."""

import dataclasses
import functools
import gc
import importlib
import inspect
import itertools
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jaxtyping
import pytest
import torch
from hypothesis import settings

# Calls of a function that are all checked, and of those after them one in so many: checking every
# call more than doubles the time of tests with many small blocks.
_FIRST, _ONE_IN = 20, 50


def _checked_in_part(*, typechecker: Any) -> Callable[[Any], Any]:
    """As ``jaxtyping.jaxtyped``, for some of the calls of each function and data class."""

    def in_part(function: Callable[..., Any]) -> Callable[..., Any]:
        check = functools.cache(_jaxtyped(typechecker=typechecker))  # takes long: when called
        numbers = itertools.count()

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            number = next(numbers)
            is_due = number < _FIRST or number % _ONE_IN == 0
            return (check(function) if is_due else function)(*args, **kwargs)

        return call

    def decorate(function: Any) -> Any:
        annotated = getattr(function, "fget", getattr(function, "__func__", function))
        if "jaxtyping." not in str(getattr(annotated, "__annotations__", "")):
            return function  # no shapes; basedpyright checks all other types
        if inspect.isfunction(function):
            return in_part(function)
        if isinstance(function, property):
            return property(function.fget and in_part(function.fget), function.fset)
        if dataclasses.is_dataclass(function):  # its fields, when an instance is made
            function.__init__ = in_part(function.__init__)
            return function
        return _jaxtyped(function, typechecker=typechecker)

    return decorate


# Beartype draws which item of a list it checks: not from the generator that a run saves.
with patch("random.getrandbits", random.Random(0).getrandbits):
    importlib.import_module("beartype")

# Before anything imports evigrad, so that the annotated shapes in it are checked when called.
_jaxtyped, jaxtyping.jaxtyped = jaxtyping.jaxtyped, _checked_in_part
jaxtyping.install_import_hook("evigrad", "beartype.beartype")

torch.set_num_threads(1)

# Files of tests need not outlive a power cut, and a disk takes milliseconds to promise it.
patch("os.fsync", os.fstat).start()

# The same examples in every run, and no deadline: a slow machine is not a wrong result.
settings.register_profile(
    "evigrad", derandomize=True, deadline=None, max_examples=5, print_blob=True
)
settings.register_profile("long", settings.get_profile("evigrad"), max_examples=100)
settings.load_profile("evigrad")


def _covering(items: list[pytest.Item], strength: int, *names: str) -> list[pytest.Item]:
    """The tests that hold each combination of so many values of different parameters."""

    def combinations(item: pytest.Item) -> set[Any]:
        values = item.callspec.params if isinstance(item, pytest.Function) else {}
        # Equal numbers and texts are one value; others, such as likelihoods, may not be hashed.
        keys = {n: v if isinstance(v, str | float | int) else id(v) for n, v in values.items()}
        chosen = [(name, keys[name]) for name in names or keys]
        return set(itertools.combinations(chosen, strength))

    held = [combinations(item) for item in items]
    missing, covering = set().union(*held), []
    for gain in range(max(map(len, held)), 0, -1):
        for item, those in zip(items, held, strict=True):
            if len(those & missing) >= gain:
                missing -= those
                covering.append(item)
    return covering


@pytest.hookimpl(tryfirst=True)  # before the long ones are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what tests with ``one_in`` or ``each`` repeat for further parameters."""
    for _, group in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        tests = list(group)
        marks = {mark.name: mark.args for mark in tests[0].iter_markers()}
        if "one_in" in marks:
            kept = tests[:: marks["one_in"][0]]
        elif "each" in marks:
            kept = _covering(tests, *marks["each"])
        else:
            continue
        for test in set(tests).difference(kept):
            test.add_marker("long")


def pytest_collection_finish() -> None:
    """Leave the modules and tests out of every garbage collection: they stay to the end.

    Where memory is short the library collects, which otherwise looks at millions of objects.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Compute the mode gap of ``fit`` only in tests with the mark ``converges`` or ``long``.

    It and its warning take a third of a training of few epochs, and hardly a test looks at them.
    """
    trainer = sys.modules.get("evigrad.training.trainer")
    if trainer is None or {"converges", "long"} & set(item.keywords):
        return (yield)
    with patch.object(trainer, "steps_to_mode", lambda *_: []):
        return (yield)


REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with the real data sets; the test is skipped where there is none."""
    named = os.environ.get("EVIGRAD_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data here: EVIGRAD_DATA is not set to a folder, and no {folder}")
    return folder


@pytest.fixture
def by_h() -> Iterator[None]:
    """``full`` and ``blockdiag`` from H whatever is cheaper: another computation than ``ntk``."""
    from evigrad.core.curvature import ntk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ntk, "is_cheaper", lambda *_: False)
        yield
