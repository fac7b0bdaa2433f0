"""How well does ``python -m experiments NAME --dry-run`` predict the times of jobs?

Predicts finished jobs again, and divides the predictions by the recorded times. The results must
come from a machine like this one, with the same number of threads.

    python benchmarks/forecast.py --results docs/results/paper.jsonl.gz
"""

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.forecast import forecast  # noqa: E402
from experiments.jobs import Job  # noqa: E402
from experiments.trainings import Place  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    """Print the ratios of predicted to recorded times for each kind of job."""
    parser = argparse.ArgumentParser(description="Compare predicted with recorded times of jobs.")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    parser.add_argument("--least", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="use each N-th job")
    options = parser.parse_args(argv)
    place = Place(Path("results"), device="cpu", threads=1)
    lines = map(json.loads, gzip.decompress(options.results.read_bytes()).decode().splitlines())
    recorded = [
        (job_of(line["job"]), line["result"]["job_seconds"])
        for line in lines
        if "1 thread," in line["result"].get("machine", "")
        and line["result"].get("job_seconds", 0) >= options.least
    ][:: options.every]
    ratios: dict[str, list[float]] = {}
    predicted = forecast([job for job, _ in recorded], place)
    for job, seconds in recorded:
        if job.id in predicted:
            ratio = predicted[job.id] / seconds
            ratios.setdefault(job.kind, []).append(ratio)
            print(f"{ratio:6.2f}  {seconds:8.0f} s  {job.label}", flush=True)
    for kind, values in ratios.items():
        low, *_, high = quantiles(values, n=10) if len(values) > 1 else (values[0], values[0])
        print(
            f"{kind}: median {median(values):.2f}, 80 % between {low:.2f} and {high:.2f}, ", end=""
        )
        within = sum(0.5 <= value <= 2 for value in values)
        print(f"within a factor of two: {within} of {len(values)}")


def job_of(statepoint: dict[str, object]) -> Job:
    """Return the job of an exported result."""
    options = dict(statepoint)
    kind, training = options.pop("kind"), options.pop("training")
    assert isinstance(kind, str) and isinstance(training, dict)
    return Job(kind, training, options)


if __name__ == "__main__":
    main()
