"""Shared parts of the benchmarks: timing, peak memory in a separate process, tables."""

import csv
import ctypes
import gc
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.data import load
from evigrad.models import make_model
from evigrad.plots.style import with_minus

MIB = 2**20
# Small networks and the data that benchmarks of whole estimates use.
NETWORKS = {"mininet": "mnist", "digitsnet": "digits"}
_NUM_DIGITS = 1000


def seconds(work: Callable[[], object], repeats: int, warmup: int = 1) -> float:
    """Return the median wall time of several runs, including the queue of the device."""
    for _ in range(warmup):
        work()
    times = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter()
        work()
        _synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def paired(
    works: Mapping[str, Callable[[], object]], repeats: int, warmup: int = 1
) -> dict[str, float]:
    """Return median wall times of several works that run in turns, so that noise hits all alike."""
    for work in works.values():
        for _ in range(warmup):
            work()
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work, 1, warmup=0))
    return {name: statistics.median(values) for name, values in times.items()}


def network_and_data(network: str, data_dir: Path | None) -> tuple[nn.Module, Tensor, Tensor]:
    """Return one of ``NETWORKS`` at its initial weights, and its training data."""
    is_mnist = NETWORKS[network] == "mnist"
    subset = {"subset": _NUM_DIGITS, "seed": 0} if is_mnist else {}
    data = load(NETWORKS[network], data_dir=data_dir, **subset)
    return make_model(network, data.input_shape, data.num_outputs, seed=0), *data.train


def pass_checks(evidence: Evidence, x: Tensor, y: Tensor, passes: int) -> None:
    """Pass over a few examples until the next ``passes`` calls check nothing.

    In its passes 1, 2, 4, 8, ..., an evidence compares its derivatives with plain automatic
    differentiation. Benchmarks do not measure these checks.
    """
    for _ in range(2 ** passes.bit_length()):
        evidence.estimate(x, y)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Clock:
    """Process time of the work within it, summed over all entries."""

    seconds = 0.0

    def __enter__(self) -> "Clock":
        self._start = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._start


class Peak:
    """Peak memory of a block of code, in bytes above the start.

    On the CPU, it is the resident memory of the process. The allocator keeps freed memory, so each
    process can measure only once (``in_own_process``). Free memory is returned before.
    """

    def __enter__(self) -> "Peak":
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            give_back()  # otherwise later work seems to need no memory
            # Linux resets the peak here, which planning may have set.
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self._before
        else:
            self.bytes = max(0, _resident("VmHWM") - self._before)


def give_back() -> None:
    """Return free memory to the system, if its C library is glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))


def _resident(field: str) -> int:
    """Return resident memory in bytes, now (VmRSS) or at its peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("The system does not report the resident memory.")


def in_own_process(
    script: str, arguments: Sequence[str], timeout: float, source: Path | None = None
) -> dict[str, Any]:
    """Run a single case of a benchmark in a separate process.

    ``source`` is the folder to import evigrad from, if not the installed one.

    Returns:
        The JSON of its last line of output, or ``{"failed": reason}``.
    """
    path = {} if source is None else {"PYTHONPATH": str(source.resolve())}
    try:
        done = subprocess.run(
            [sys.executable, script, *arguments],
            env=os.environ | path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {timeout:.0f} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        killed = done.returncode in (-9, 137)
        return {"failed": "out of memory" if killed else last[:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is NaN if there is none."""
    mean = statistics.fmean(values) if values else math.nan
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return mean, math.nan
    return mean, statistics.stdev(values) / len(values) ** 0.5


def with_error(mean: float, error: float, digits: int) -> str:
    """Return both as text, or only the mean if there is no error, and no text for NaN."""
    if math.isnan(mean):
        return ""
    spread = f" ± {error:.{digits}f}" if math.isfinite(error) else ""
    return f"{mean:.{digits}f}{spread}"


def cells_of(
    summary: Mapping[str, Any], columns: Iterable[tuple[str, int, float]], errors: bool = True
) -> list[str]:
    """Return means of a summary as text, from names, digits and factors of its columns."""
    return [
        with_error(
            factor * summary[key], factor * summary[f"{key}_error"] if errors else math.nan, digits
        )
        for key, digits, factor in columns
    ]


def spans(numbers: Iterable[int]) -> str:
    """Return integers as ranges, ``0-2, 5``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in ranges)


def summaries(
    results: Sequence[Mapping[str, Any]], rows: Sequence[str], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the mean of every key over the seeds and ``KEY_error``, for each row with results.

    None does not count, such as the seconds of a suspended run. ``seed_spans`` are the seeds.
    """
    averaged_rows = []
    for row in rows:
        runs = [r for r in results if r["row"] == row]
        if runs:
            seed_spans = spans(r["seed"] for r in runs)
            summary: dict[str, Any] = {"row": row, "seeds": len(runs), "seed_spans": seed_spans}
            for key in keys:
                numbers = [r[key] for r in runs if r[key] is not None]
                summary[key], summary[f"{key}_error"] = mean_and_error(numbers)
            averaged_rows.append(summary)
    return averaged_rows


def with_gains(runs: Sequence[Mapping[str, Any]], rows: Sequence[str]) -> list[dict[str, Any]]:
    """Return the runs of some rows with their gain and time ratio over the first row, by seed.

    The ratio is None if one of the two runs has no ``seconds``, because they are from different
    sessions.
    """
    first = {r["seed"]: r for r in runs if r["row"] == rows[0]}
    return [
        {
            **r,
            "gain": r["log_likelihood"] - first[r["seed"]]["log_likelihood"],
            "ratio": r["seconds"] and s and r["seconds"] / s,
        }
        for r in runs
        if r["row"] in rows and r["seed"] in first
        for s in [first[r["seed"]]["seconds"]]
    ]


def machine() -> str:
    """Return the machine, its threads and the date."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        name = platform.processor() or platform.machine()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
        name += f", {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}; {date.today().isoformat()}"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV, with columns in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def measured_on(machines: Iterable[str]) -> str:
    """Return the line below a table of times: the machines, without dates."""
    names = (re.sub(r"; \d{4}-\d\d-\d\d$", "", name) for name in machines)
    names = (name.replace(" 1 threads", " 1 thread").replace("; ", ", ") for name in names)
    return f"*Machine: {' and '.join(dict.fromkeys(names))}.*"


def insert(page: Path, marker: str, text: str) -> None:
    """Replace the text between two markers of a page. A page without them stays as it is."""
    before, opening, following = page.read_text().partition(f"<!-- {marker} -->\n")
    if opening:
        _, end, after = following.partition(f"<!-- end {marker} -->")
        page.write_text(f"{before}{opening}{with_minus(text)}\n{end}{after}")


def show(marker: str, text: str, pages: Sequence[Path]) -> None:
    """Print a text and put it between the markers of some pages."""
    print(text)
    for page in pages:
        insert(page, marker, text)
