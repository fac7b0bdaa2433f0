"""The policy of estimator ``auto``, on made-up measurements."""

import math
from collections.abc import Callable

import pytest

from evigrad.errors import ConfigurationError
from evigrad.training.budget import DRAWS, MORE_DRAWS, choose
from evigrad.training.candidates import Candidate, Draws, Family, even, two_digits
from evigrad.training.choice import Choice, Trial

STEP = 0.01
# As noise around the mean: of mean 0 and a deviation of about 1.
NOISE = [-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]


def size_of(candidate: Candidate) -> int:
    size = candidate.name.split("-")[1]
    return 1000 if size == "N" else int(size)


class Fake:
    """Structures by name: seconds for each size, and mean and deviation of the log-determinant."""

    def __init__(self, **structures: tuple[Callable[[int], float | str], float, float]) -> None:
        self.structures = structures
        self.tried: list[str] = []
        self.drawn: dict[str, int] = {}
        self.past = 0.0

    def seconds(self, candidate: Candidate) -> float | str:
        assert candidate.name not in self.tried, "measured twice"
        self.tried.append(candidate.name)
        found = self.structures[candidate.name.split("-")[0]][0](size_of(candidate))
        self.past += 3 * found if isinstance(found, float) else 0.0
        return found

    def draws(self, candidate: Candidate, count: int) -> Draws:
        self.drawn[candidate.name] = self.drawn.get(candidate.name, 0) + count
        _, mean, deviation = self.structures[candidate.name.split("-")[0]]
        return Draws([mean + deviation * (NOISE * 10)[i] for i in range(count)], 50.0)

    def elapsed(self) -> float:
        return self.past


def family(
    structure: str,
    *,
    largest: int = 1000,
    exact: bool = False,
    is_bound: bool = True,
    sharing: float = 1.0,
) -> Family:
    def make(size: int) -> Candidate:
        word = "N" if size == 1000 else str(size)
        return Candidate(f"{structure}-{word}-C", None, None, is_bound, exact and word == "N")

    return Family(make, 25, largest, sharing=sharing)


def linear(per_size: float) -> Callable[[int], float | str]:
    return lambda size: STEP * per_size * size


def chosen(meter: Fake, *families: Family, fallback: tuple[Family, ...] = (), **changes) -> Choice:
    given = {"step_seconds": STEP, "step_budget": 5.0, "steps": 10**6} | changes
    return choose(families, fallback, meter, **given)


def test_the_tightest_within_the_budget_wins():
    meter = Fake(
        full=(linear(0.02), 90.0, 1.0), ntk=(linear(0.01), 60.0, 1.0), diag=(linear(1), 40.0, 1.0)
    )
    choice = chosen(meter, family("full"), family("ntk"), family("diag"))
    # The third has the least mean, but no size of it is fast enough: at 25 it takes 25 steps.
    assert choice.name == "ntk-480-C"
    assert choice.ratio == pytest.approx(4.8)
    assert choice.lower == 50.0
    full, ntk, diag = choice.trials
    assert (full.name, full.fits, full.mean) == ("full-240-C", True, 90.0)
    assert (ntk.name, ntk.fits, ntk.mean) == ("ntk-480-C", True, 60.0)
    assert (diag.name, diag.fits, diag.mean) == ("diag-25-C", False, None)
    assert ntk.deviation == pytest.approx(1.0, rel=0.1)
    assert "ntk-480-C has the smallest mean log-determinant of the 2 bounds" in choice.reason
    assert "60 ± " in choice.reason and "at most 1.2 times the exact one" in choice.reason
    assert "the next is full-240-C with 90" in choice.reason


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("budget", [1.0, 5.0, 40.0])
def test_the_largest_size_that_keeps_to_the_budget_is_found_without_slow_measurements(
    power, budget
):
    took: list[float] = []

    def seconds(size: int) -> float:
        took.append(STEP * (0.1 + (size / 100) ** power))
        return took[-1]

    choice = chosen(Fake(ntk=(seconds, 1.0, 0.0)), family("ntk", largest=10**6), step_budget=budget)
    assert choice.ratio <= budget
    best = 100 * (budget - 0.1) ** (1 / power)
    assert 0.75 * best <= size_of(Candidate(choice.name)) <= best
    assert max(took) <= 8.1 * budget * STEP  # a size that doubles costs eight times as much


def test_of_equally_tight_ones_the_least_noisy_wins():
    noisy, calm = (linear(0.01), 60.0, 20.0), (linear(0.01), 62.0, 1.0)
    meter = Fake(ntk=noisy, full=calm)
    choice = chosen(meter, family("ntk"), family("full"))
    assert choice.name.startswith("full-")
    assert "the least noise of these" in choice.reason
    # Both were looked at more closely.
    assert set(meter.drawn.values()) == {DRAWS + MORE_DRAWS}
    clear = Fake(ntk=noisy, full=(linear(0.01), 100.0, 1.0))
    assert chosen(clear, family("ntk"), family("full")).name.startswith("ntk-")
    assert set(clear.drawn.values()) == {DRAWS}


def test_an_exact_one_wins_at_once():
    meter = Fake(ntk=(linear(0.001), 60.0, 0.0), full=(linear(0.001), 10.0, 1.0))
    choice = chosen(meter, family("ntk", exact=True), family("full"))
    assert choice.name == "ntk-N-C"
    assert choice.reason == "ntk-N-C is exact, and a step of it takes 1 training steps."
    assert meter.drawn == {"ntk-N-C": 1}
    assert not any(name.startswith("full") for name in meter.tried)


def test_steps_that_share_a_pass_make_the_exact_one_affordable():
    def seconds(size: int) -> float:
        return STEP * (0.6 if size == 1000 else 0.00001 * size**2)

    # 800 would take more than the 5 steps, all of them shared by ten steps do not.
    found = chosen(
        Fake(ntk=(seconds, 1.0, 0.0)), family("ntk", exact=True, sharing=10.0), step_budget=1.0
    )
    assert found.name == "ntk-N-C"
    alone = chosen(Fake(ntk=(seconds, 1.0, 0.0)), family("ntk", exact=True), step_budget=1.0)
    assert 250 < size_of(Candidate(alone.name)) <= 316


def test_without_a_bound_the_fallback_and_else_the_tightest_of_the_fastest():
    structures = {
        "ntk": (linear(1.0), 60.0, 1.0),
        "full": (lambda size: STEP * (20 + 0.1 * size), 40.0, 1.0),
    }
    kfac = family("kfac", is_bound=False)
    meter = Fake(kfac=(linear(0.01), 5.0, 0.0), **structures)
    choice = chosen(meter, family("ntk"), family("full"), fallback=(kfac,))
    assert choice.name == "kfac-480-C"
    assert "No bound keeps to 5 training steps: the fastest, ntk-6-C, takes 6." in choice.reason
    assert "kfac-480-C, which is no guaranteed bound, takes 4.8." in choice.reason
    assert [(t.name, t.fits, t.is_bound) for t in choice.trials] == [
        ("kfac-480-C", True, False),
        ("ntk-25-C", False, True),
        ("full-25-C", False, True),
    ]
    # Where that is too slow too, some more time is better than none.
    meter = Fake(kfac=(linear(10.0), 5.0, 0.0), **structures)
    choice = chosen(meter, family("ntk"), family("full"), fallback=(kfac,))
    assert choice.name == "ntk-6-C" and choice.ratio == pytest.approx(6.0)
    assert choice.reason.startswith("No bound keeps to 5 training steps")
    assert not next(t for t in choice.trials if t.name == "ntk-6-C").fits


def test_what_fits_no_memory_is_left_out():
    def seconds(size: int) -> float | str:
        return 0.001 * STEP * size if size <= 130 else "ntk needs more memory."

    choice = chosen(Fake(ntk=(seconds, 60.0, 1.0)), family("ntk"))
    assert 100 <= size_of(Candidate(choice.name)) <= 130
    assert "is the only one tried" in choice.reason
    nothing: tuple[Callable[[int], str], float, float] = (lambda size: "no memory.", 0.0, 0.0)
    meter = Fake(ntk=nothing, kfac=(linear(0.01), 1.0, 0.0))
    choice = chosen(meter, family("ntk"), fallback=(family("kfac", is_bound=False),))
    assert choice.name == "kfac-480-C"
    assert choice.trials[1].note == "no memory." and choice.trials[1].seconds is None
    with pytest.raises(ConfigurationError, match="no estimator can be used here. no memory."):
        chosen(Fake(ntk=nothing), family("ntk"))


def test_the_search_ends(monkeypatch):
    """After a quarter of the time of all steps of the run, however slow measuring is."""
    monkeypatch.setattr("evigrad.training.budget._LEAST_SECONDS", 0.0)
    meter = Fake(**{name: (linear(0.01), 60.0, 1.0) for name in ("ntk", "full", "diag")})
    families = [family(name) for name in ("ntk", "full", "diag")]
    choice = chosen(meter, *families, steps=40)
    assert meter.past <= 1.25 * 10 * 5 * STEP
    assert choice.name == "ntk-480-C"
    assert not any(name.startswith(("full", "diag")) for name in meter.tried)


def test_variants_are_confirmed_at_the_size_of_their_family():
    def anchored(share: float) -> Callable[[int], Candidate]:
        return lambda size: Candidate(f"ntk-{size}-rows-anchored", share)

    class Shares(Fake):
        def seconds(self, candidate: Candidate) -> float:
            return STEP * size_of(candidate) * (0.011 if candidate.share == 0.9 else 0.01)

        def draws(self, candidate: Candidate, count: int) -> Draws:
            return Draws([100.0 * (candidate.share or 0.0)] * count)

    others = (anchored(0.5), anchored(0.9))
    choice = chosen(Shares(), Family(anchored(0.75), 25, 10**6, variants=others))
    assert [(t.name, t.share) for t in choice.trials] == [
        ("ntk-480-rows-anchored", 0.75),
        ("ntk-480-rows-anchored", 0.5),
        ("ntk-430-rows-anchored", 0.9),
    ]
    assert (choice.name, choice.share) == ("ntk-480-rows-anchored", 0.5)
    assert "ntk-480-rows-anchored --anchor-share 0.5 is this run" in choice.describe()


def test_sizes():
    assert [two_digits(n) for n in (0, 7, 99, 101, 789, 12345)] == [1, 7, 99, 100, 780, 12000]
    for total in (1, 7, 60, 1000):
        for size in range(1, total + 1):
            found = even(size, total)
            assert found <= size
            assert math.ceil(total / found) == math.ceil(total / size)
    assert even(950, 1000) == 500


def test_a_choice_survives_its_record():
    trials = (
        Trial("ntk-9-C", None, "fisher", True, True, 0.5, 1.0, 2.0, 8),
        Trial("full-9-C", None, None, True, False, None, note="No."),
    )
    choice = Choice("ntk-9-C", None, "fisher", 0.5, 0.1, 5.0, None, 3.0, trials, "Because.")
    assert Choice.from_record(choice.as_record()) == choice
    assert trials[0].label == "ntk-9-C (root fisher)"
    assert "--estimator ntk-9-C --root fisher is this run" in choice.describe()
