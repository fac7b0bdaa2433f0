"""Hostile cases: a few dozen in every run of the tests, thousands in those of the long ones."""

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from evigrad.errors import EvigradError, EvigradWarning

Check = Callable[[Path, Any], object]
# Cases so far in which something was refused.
REFUSED = [0]


def hostile(
    cases: st.SearchStrategy[Any], few: int, many: int, well: float = 0.0
) -> Callable[[Check], Callable[..., None]]:
    """Make a test of a check, which gets a folder and a case: ``few`` cases, and ``many`` long.

    In a share ``well`` of them at least nothing is refused, and the check does not return False:
    else it would pass where everything is refused. It is about half of what was measured, and 0
    where that was hardly anything.
    """

    def decorate(check: Check) -> Callable[..., None]:
        @pytest.mark.filterwarnings("ignore:Generating overly large repr")
        @pytest.mark.parametrize("number", [few, pytest.param(many, marks=pytest.mark.long)])
        @wraps(check)
        def test(number: int, tmp_path: Path) -> None:
            # The same few cases in every run; the many are others each time.
            @settings(
                max_examples=number,
                derandomize=number == few,
                database=None,
                deadline=None,
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
            )
            @given(cases)
            def every(case: Any) -> None:
                before = REFUSED[0]
                accepted.append(check(tmp_path, case) is not False and before == REFUSED[0])

            accepted: list[bool] = []
            every()
            assert sum(accepted) >= well * len(accepted), (
                f"{sum(accepted)} of {len(accepted)} are not refused"
            )

        del test.__wrapped__  # pytest would take the arguments of the check for fixtures
        return test

    return decorate


@contextmanager
def errors_of_ours():
    """Let errors of evigrad pass as a right answer, and nothing else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvigradWarning)
        try:
            yield
        except EvigradError as error:
            REFUSED[0] += 1
            assert str(error).strip(), "an error says what to do"


@st.composite
def mutated(draw: Callable[..., Any], content: bytes) -> bytes:
    """A file that was cut, in which bits flipped, or bytes were lost, repeated or overwritten."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(damaged) - 1, 0)))
        size = draw(st.sampled_from([1, 2, 4, 8, 64, 512]))
        kind = draw(st.sampled_from(["flip", "cut", "lose", "repeat", "overwrite", "insert"]))
        if kind == "flip" and damaged:
            damaged[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del damaged[place:]
        elif kind == "lose":
            del damaged[place : place + size]
        elif kind == "repeat":
            damaged[place:place] = damaged[place : place + size]
        elif kind == "overwrite":
            damaged[place : place + size] = draw(st.sampled_from([b"\0", b"\xff", b"\x80"])) * size
        else:
            damaged[place:place] = draw(st.binary(min_size=1, max_size=16))
    return bytes(damaged)


def texts() -> st.SearchStrategy[str]:
    """Texts of any characters, and some that have been trouble elsewhere."""
    nasty = ["", "\0", "../../etc/passwd", "<script>alert(1)</script>", "%s%n", "𝟏", "-", "1e999"]
    nasty += ["nan", "None", "!!python/name:os.system", "${HOME}", "a" * 10_000, "\ud800", "١٢"]
    return st.one_of(st.text(max_size=30), st.sampled_from(nasty))


def values() -> st.SearchStrategy[Any]:
    """Values of any type that a file can hold."""
    plain = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), texts(), st.integers(-3, 3)
    )
    return st.one_of(
        plain, st.lists(plain, max_size=3), st.dictionaries(texts(), plain, max_size=2)
    )
