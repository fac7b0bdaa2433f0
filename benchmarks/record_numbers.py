"""Record every number that must survive a change of the code, and compare two records.

``FAMILIES`` of recorded_families.py lists the cases: estimates and gradients of every name, root,
likelihood, prior and structure on small networks, stored passes, posteriors, trainings, and two
processes. The script uses only public names of evigrad.

    python benchmarks/record_numbers.py before.json --jobs 2           # at the old revision
    python benchmarks/record_numbers.py after.json --jobs 2 --against before.json
    python benchmarks/record_numbers.py part.json --only posteriors ranks --against before.json

Numbers are compared relative to the largest of their list, by the tolerance of their family. Larger
differences are listed, and the exit status is 1. A family takes less than a minute.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from recorded_families import EXACT, FAMILIES
from recorded_measures import Case, Numbers

from evigrad.errors import EvigradWarning

Record = dict[str, dict[str, Numbers]]

# Smaller numbers are compared as if they had this size, because cancellation leaves rounding.
LEAST = 1e-3


def set_up() -> None:
    """Use one thread, so that sums have one order, and ignore warnings."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", EvigradWarning)
    warnings.filterwarnings("ignore", "enable_nested_tensor")  # of PyTorch's transformer


def numbers_of(case: Case) -> tuple[Numbers, float]:
    """Return the numbers of a case, and their processor time in seconds."""
    start = time.process_time()
    return case.record(), time.process_time() - start


def recorded(names: list[str], jobs: int) -> Record:
    """Return the records of some families, from several processes."""
    cases = [(name, case) for name in names for case in FAMILIES[name].cases()]
    record, spent = {name: {} for name in names}, dict.fromkeys(names, 0.0)
    for (name, case), (numbers, seconds) in zip(cases, computed(cases, jobs), strict=True):
        assert case.key not in record[name], f"{name} has {case.key} twice."
        record[name][case.key] = numbers
        spent[name] += seconds
    for name in names:
        refused = sum(isinstance(n[0], str) for n in record[name].values())
        print(f"{name:18} {len(record[name]):5} cases, {refused:4} refused, {spent[name]:6.1f} s")
    return record


def computed(cases: list[tuple[str, Case]], jobs: int) -> Iterator[tuple[Numbers, float]]:
    """Yield the numbers of each case, in order."""
    alone = [case for _, case in cases]
    if jobs == 1:
        set_up()
        yield from map(numbers_of, alone)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), set_up) as pool:
        yield from pool.map(numbers_of, alone, chunksize=4)


def difference(new: Numbers, old: Numbers) -> float:
    """Return the largest difference relative to the largest number, infinite if unlike."""
    if len(new) != len(old):
        return math.inf
    return max((between(a, b) for a, b in zip(new, old, strict=True)), default=0.0)


def between(new: list[float] | str, old: list[float] | str) -> float:
    """Return the difference of two lists, or of two errors."""
    if isinstance(new, str) or isinstance(old, str):
        return 0.0 if new == old else math.inf
    if len(new) != len(old):
        return math.inf
    scale = max((abs(value) for value in old if math.isfinite(value)), default=0.0)
    gaps = [abs(a - b) for a, b in zip(new, old, strict=True) if a != b and (a == a or b == b)]
    if not all(map(math.isfinite, gaps)):
        return math.inf
    return max(gaps, default=0.0) / max(scale, LEAST)


def compare(new: Mapping[str, Mapping[str, Numbers]], old: Record, exact: float) -> bool:
    """Print the differences of two records, and return whether they agree."""
    agree = True
    for name, cases in new.items():
        limit, before = FAMILIES[name].tolerance, old.get(name, {})
        limit = exact if limit == EXACT else limit
        gaps = dict.fromkeys(before.keys() ^ cases.keys(), math.inf)
        gaps |= {key: difference(cases[key], before[key]) for key in cases.keys() & before.keys()}
        too_far = {key: gap for key, gap in sorted(gaps.items()) if not gap <= limit}
        for key, gap in too_far.items():
            print(f"{gap:.1e}  {name}  {key}")
        print(
            f"{name:18} largest difference {max(gaps.values(), default=0.0):.1e},"
            f" {len(too_far)} of {len(gaps)} beyond {limit:.0e}"
        )
        agree &= not too_far
    return agree


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="written: the record, as JSON")
    parser.add_argument("--against", type=Path, help="an earlier record to compare with")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    parser.add_argument("--tolerance", type=float, default=EXACT, help="of families in float64")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    record = recorded(options.only, options.jobs)
    options.file.write_text(json.dumps(record, separators=(",", ":")))
    count = sum(map(len, record.values()))
    print(f"{count} cases in {options.file}, {time.perf_counter() - start:.0f} s")
    if options.against is not None:
        old = json.loads(options.against.read_text())
        raise SystemExit(not compare(record, old, options.tolerance))


if __name__ == "__main__":
    main()
