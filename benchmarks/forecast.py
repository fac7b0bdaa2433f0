"""How well does ``python -m experiments NAME --dry-run`` predict the times of jobs?

Predicts finished jobs again, and divides the predictions by the recorded times. The results must
come from a machine like this one, with the same number of threads.

    python benchmarks/forecast.py --results docs/results/paper.jsonl.gz
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from experiments.forecast import forecast  # noqa: E402
from experiments.jobs import exported  # noqa: E402
from experiments.trainings import Place  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    """Print the ratios of predicted to recorded times for each kind of job."""
    parser = argparse.ArgumentParser(description="Compare predicted with recorded times of jobs.")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE")
    parser.add_argument("--least", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="use each N-th job")
    options = parser.parse_args(argv)
    place = Place(Path("results"), device="cpu", threads=1)
    recorded = [
        (job, result["job_seconds"])
        for job, result in exported(options.results)
        if "1 thread," in result.get("machine", "")
        and result.get("job_seconds", 0) >= options.least
    ][:: options.every]
    ratios: dict[str, list[float]] = {}
    for job, seconds in recorded:
        predicted = forecast(job, place)
        if predicted is not None:
            ratio = predicted / seconds
            ratios.setdefault(job.kind, []).append(ratio)
            print(f"{ratio:6.2f}  {seconds:8.0f} s  {job.label}", flush=True)
    for kind, values in ratios.items():
        low, *_, high = quantiles(values, n=10) if len(values) > 1 else (values[0], values[0])
        print(
            f"{kind}: median {median(values):.2f}, 80 % between {low:.2f} and {high:.2f}, ", end=""
        )
        within = sum(0.5 <= value <= 2 for value in values)
        print(f"within a factor of two: {within} of {len(values)}")


if __name__ == "__main__":
    main()
