"""The policy of estimator ``auto``: the tightest bound that a budget of time pays for.

Whatever a bound's structure and blocks are, its expected log-determinant is at least the exact one,
ℓ(I), which is the same number for all of them at the same weights and hyperparameters: the smallest
mean is the tightest bound. So of each family (a way to spend time, with a size) the largest member
that keeps to the budget is found by measuring ever larger ones, and among these some draws decide.

Nothing here looks at a clock or at a network: ``Meter`` does.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from evigrad.errors import ConfigurationError
from evigrad.training.candidates import Candidate, Family, Meter
from evigrad.training.choice import Choice, Trial

# A measurement that is expected to take more budgets than this is not begun.
_FAR = 3.0
# Draws of the log-determinant for each estimator that is compared, and more of them for those whose
# means lie within so many standard errors of the least one.
DRAWS, MORE_DRAWS = 8, 16
_RIVALS = 2.0
# No new measurement begins when the search has taken as long as this part of the run's
# hyperparameter steps, if these use up their budget, or as so many of them, where that is less; but
# some seconds are there in any case, as the search for a tiny network is its fixed costs.
_PART, _MOST_STEPS, _LEAST_SECONDS = 0.25, 150, 10.0
# The part of that which sizes may take; the rest is for draws.
_SIZES_SHARE = 0.5
# Where no bound keeps to the budget, what counts as nearly as fast as the fastest one.
_NEARLY = 1.25
# How often a size that turned out too slow is made smaller.
_SHRINKS = 3
# Of the time that is there, what a size is chosen for: measurements differ by a few per cent.
_AIM = 0.97


def choose(
    families: Sequence[Family],
    fallback: Sequence[Family],
    meter: Meter,
    step_seconds: float,
    step_budget: float,
    steps: int,
) -> Choice:
    """The tightest bound that keeps to the budget.

    An exact one that does wins at once. Where no bound does, the first of the other families that
    does is taken; where nothing does, the tightest of the bounds that are about as fast as the
    fastest one.

    Args:
        families: Of bounds, the most promising ones first.
        fallback: Of others.
        meter: Measures.
        step_seconds: Of a step of the weights.
        step_budget: Time of a hyperparameter step, as a multiple of that.
        steps: Hyperparameter steps of the run.

    Returns:
        The choice.

    Raises:
        ConfigurationError: If no estimator can be used at all.
    """
    return _Search(meter, step_seconds, step_budget, steps).choose(families, fallback)


class _Search:
    """The measurements of a search, each made once."""

    def __init__(self, meter: Meter, step_seconds: float, step_budget: float, steps: int) -> None:
        self.meter, self.step_seconds, self.step_budget = meter, step_seconds, step_budget
        self.budget = step_budget * step_seconds
        self.limit = max(_LEAST_SECONDS, min(_MOST_STEPS, _PART * steps) * self.budget)
        self.measured: dict[Candidate, float | str] = {}
        self.trials: dict[Candidate, Trial] = {}
        self.values: dict[Candidate, list[float]] = {}
        self.lower: float | None = None

    def choose(self, families: Sequence[Family], fallback: Sequence[Family]) -> Choice:
        found = self._contenders(families, self.budget)
        if found:
            return self._tightest(found, f"keep to {_steps(self.step_budget)}")
        fastest = min(self._known(lambda c: c.is_bound), default=None, key=lambda pair: pair[0])
        why = (
            f"No bound keeps to {_steps(self.step_budget)}: the fastest,"
            f" {fastest[1].name}, takes {fastest[0] / self.step_seconds:.3g}."
            if fastest
            else "No bound can be used here."
        )
        others = self._contenders(fallback, self.budget)
        if others:
            return self._made(
                others[0],
                f"{why} {others[0].name}, which is no guaranteed bound, takes"
                f" {self._ratio(others[0]):.3g}.",
            )
        fastest = fastest or min(self._known(), default=None, key=lambda pair: pair[0])
        if fastest is None:
            reasons = {str(each) for each in self.measured.values()}
            raise ConfigurationError(
                f"estimator 'auto': no estimator can be used here. {' '.join(sorted(reasons))}"
            )
        if not fastest[1].is_bound:
            return self._made(
                fastest[1],
                f"{why} {fastest[1].name}, which is no guaranteed bound, takes"
                f" {self._ratio(fastest[1]):.3g}.",
            )
        budget = _NEARLY * fastest[0]
        found = self._contenders(families, budget) or [fastest[1]]
        return self._tightest(found, "are about as fast", f"{why} ")

    # ------------------------------------------------------------ sizes

    def _contenders(self, families: Iterable[Family], budget: float) -> list[Candidate]:
        """The largest of each family that keeps to a budget; an exact one stands alone."""
        found: list[Candidate] = []
        varied: list[tuple[Family, int]] = []
        for family in families:
            if found and self._is_over(_SIZES_SHARE):
                break
            size = self._largest(family, budget)
            if size is None:
                first = family.make(family.first)
                self.trials[first] = self._trial(first)
                continue
            best = family.make(size)
            if best.is_exact:
                return [best]
            found.append(best)
            varied.append((family, size))
        for family, size in varied:
            for variant in family.variants:
                over = self._is_over(_SIZES_SHARE)
                fitting = None if over else self._shrunk(variant, family.rounded, size, budget)
                if fitting is not None:
                    found.append(variant(fitting))
        return list(dict.fromkeys(found))

    def _largest(self, family: Family, budget: float) -> int | None:
        """The largest size that keeps to a budget, None if not even a small one does."""
        steps: list[tuple[int, float]] = []  # sizes that keep to it, with their seconds
        size, over = family.first, math.inf
        while True:
            seconds = self._seconds(family.make(size))
            if not isinstance(seconds, float) or seconds > budget:
                over = seconds if isinstance(seconds, float) else math.inf
                break
            steps.append((size, seconds))
            if size == family.largest or self._is_over(_SIZES_SHARE):
                return size
            size = family.rounded(2 * size) if 2 * size < family.largest else family.largest
            if _predicted(steps, size) > _FAR * budget:
                break
        if not steps:
            smaller = family.rounded(max(1, family.first // 4))
            fits = smaller < family.first and self._fits(family.make(smaller), budget)
            return smaller if fits else None
        last, seconds = steps[-1]
        top = _predicted(steps, family.largest, 2.0) / family.sharing
        if family.sharing > 1 and top <= budget and self._fits(family.make(family.largest), budget):
            return family.largest
        # Between one that keeps to the budget and one that does not, or would not.
        growth = _growth([*steps, (size, over)] if over < math.inf else steps, 0.3)
        aimed = min(last * (_AIM * budget / seconds) ** (1.0 / growth), 0.95 * size)
        between = family.rounded(int(aimed))
        if between > 1.05 * last:
            return self._shrunk(family.make, family.rounded, between, budget, last)
        return last

    def _shrunk(
        self,
        make: Callable[[int], Candidate],
        rounded: Callable[[int], int],
        size: int,
        budget: float,
        least: int | None = None,
    ) -> int | None:
        """A size as large as the given one, or smaller, that keeps to a budget; else ``least``."""
        for _ in range(_SHRINKS):
            seconds = self._seconds(make(size))
            if isinstance(seconds, float) and seconds <= budget:
                return size
            factor = _AIM * budget / seconds if isinstance(seconds, float) else 0.8
            smaller = rounded(max(1, int(size * max(0.5, min(0.9, factor)))))
            if smaller in (size, least) or smaller < (least or 0):
                break
            size = smaller
        return least

    def _fits(self, candidate: Candidate, budget: float) -> bool:
        seconds = self._seconds(candidate)
        return isinstance(seconds, float) and seconds <= budget

    def _seconds(self, candidate: Candidate) -> float | str:
        if candidate not in self.measured:
            self.measured[candidate] = self.meter.seconds(candidate)
        return self.measured[candidate]

    def _known(
        self, wanted: Callable[[Candidate], bool] = lambda _: True
    ) -> list[tuple[float, Candidate]]:
        return [(s, c) for c, s in self.measured.items() if isinstance(s, float) and wanted(c)]

    def _is_over(self, share: float = 1.0) -> bool:
        return self.meter.elapsed() > share * self.limit

    # ------------------------------------------------------------ slack

    def _tightest(self, found: Sequence[Candidate], words: str, before: str = "") -> Choice:
        """The one of the smallest mean log-determinant; of several the one of the least noise."""
        for index, candidate in enumerate(found):
            self.trials[candidate] = self._trial(candidate)
            if index and self._is_over():
                note = "not compared: the search had used up its time"
                self.trials[candidate] = replace(self.trials[candidate], note=note)
                continue
            self._draw(candidate, 1 if candidate.is_exact else DRAWS)
        compared = [c for c in found if self.trials[c].mean is not None]
        least = min(compared, key=lambda c: _mean(self.trials[c]))
        rivals = [c for c in compared if self._are_equal(c, least, _RIVALS)]
        for candidate in rivals if len(rivals) > 1 else ():
            if not self._is_over():
                self._draw(candidate, MORE_DRAWS)
        least = min(compared, key=lambda c: _mean(self.trials[c]))
        equal = [c for c in compared if self._are_equal(c, least)]
        best = min(equal, key=lambda c: self.trials[c].deviation or 0.0)
        return self._made(best, before + self._why(best, least, compared, words))

    def _draw(self, candidate: Candidate, count: int) -> None:
        drawn = self.meter.draws(candidate, count)
        values = self.values.setdefault(candidate, [])
        values += drawn.values
        self.trials[candidate] = replace(
            self.trials[candidate],
            mean=statistics.mean(values),
            deviation=statistics.stdev(values) if len(values) > 1 else None,
            draws=len(values),
        )
        if drawn.lower is not None:
            self.lower = max(drawn.lower, self.lower or drawn.lower)

    def _are_equal(self, one: Candidate, least: Candidate, errors: float = 1.0) -> bool:
        """Whether the difference of two means is no more than some of its standard errors."""
        a, b = self.trials[one], self.trials[least]
        error = math.hypot(_error(a), _error(b))
        return _mean(a) - _mean(b) <= errors * error

    def _why(
        self, best: Candidate, least: Candidate, compared: Sequence[Candidate], words: str
    ) -> str:
        trial, takes = self.trials[best], f"takes {self._ratio(best):.3g}"
        if best.is_exact:
            return f"{trial.label} is exact, and a step of it {takes} training steps."
        if len(compared) == 1:
            return f"Of the bounds that {words}, {trial.label} is the only one tried (it {takes})."
        proved = ""
        if self.lower is not None and self.lower > 0:
            proved = f", at most {_mean(trial) / self.lower:.3g} times the exact one"
        mean = f"{_mean(trial):.4g} ± {_error(trial):.2g} nats{proved}"
        of = f"of the {len(compared)} bounds that {words} (it {takes})"
        if best == least:
            others = [self.trials[c] for c in compared if c != best]
            next_one = min(others, key=_mean)
            return (
                f"{trial.label} has the smallest mean log-determinant {of}: {mean}; the next is"
                f" {next_one.label} with {_mean(next_one):.4g}."
            )
        other = self.trials[least]
        return (
            f"{trial.label} has, within the error, the smallest mean log-determinant {of}, and the"
            f" least noise of these: {mean}; {other.label} has {_mean(other):.4g} ±"
            f" {_error(other):.2g}."
        )

    # ------------------------------------------------------------ the result

    def _trial(self, candidate: Candidate) -> Trial:
        seconds = self.measured[candidate]
        known = isinstance(seconds, float)
        return Trial(
            name=candidate.name,
            share=candidate.share,
            root=candidate.root,
            is_bound=candidate.is_bound,
            fits=isinstance(seconds, float) and seconds <= self.budget,
            seconds=seconds if isinstance(seconds, float) else None,
            note="" if known else str(seconds),
        )

    def _ratio(self, candidate: Candidate) -> float:
        return float(self.measured[candidate]) / self.step_seconds

    def _made(self, candidate: Candidate, reason: str) -> Choice:
        self.trials.setdefault(candidate, self._trial(candidate))
        return Choice(
            name=candidate.name,
            share=candidate.share,
            root=candidate.root,
            seconds=float(self.measured[candidate]),
            step_seconds=self.step_seconds,
            step_budget=self.step_budget,
            lower=self.lower,
            search_seconds=self.meter.elapsed(),
            trials=tuple(sorted(self.trials.values(), key=lambda trial: not trial.fits)),
            reason=reason,
        )


def _growth(steps: Sequence[tuple[int, float]], least: float) -> float:
    """The exponent by which time grows with the size, from the last two measurements."""
    if len(steps) < 2:
        return max(1.0, least)
    (one, seconds), (other, later) = steps[-2:]
    if seconds <= 0 or later <= seconds:
        return least
    return min(3.0, max(least, math.log(later / seconds) / math.log(other / one)))


def _predicted(steps: Sequence[tuple[int, float]], size: int, least: float = 1.0) -> float:
    """The time of a larger size than those that were measured."""
    last, seconds = steps[-1]
    return seconds * (size / last) ** _growth(steps, least)


def _mean(trial: Trial) -> float:
    return math.inf if trial.mean is None else trial.mean


def _error(trial: Trial) -> float:
    return (trial.deviation or 0.0) / math.sqrt(max(1, trial.draws))


def _steps(budget: float) -> str:
    return f"{budget:g} training step{'' if budget == 1 else 's'}"
