"""Run every check that needs a GPU, in three minutes at most.

    python benchmarks/gpu.py --csv gpu.csv
    python benchmarks/gpu.py --device cpu       # a dry run

- Numbers of `record_numbers.py` in float64 on the device and on the CPU, with the largest
  difference relative to the largest number of a list. They must agree to 1e-9.
- The time of a hyperparameter gradient in training steps, and the peak memory of both.
- The number of synchronizations in a warm gradient. An estimate reads numbers, so there are a few.

The script needs torch, numpy and jaxtyping only.
"""

import argparse
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recorded_measures
import torch
from measure import paired, write_csv
from record_numbers import difference
from recorded_families import FAMILIES
from recorded_measures import Case
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from evigrad import Evidence
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

# Families whose draws and kept steps fit, and the number of their cases, evenly spaced.
RECORDED = (*("names", "networks", "likelihoods", "priors", "layers", "positions"), "more-priors")
CASES, TOLERANCE = 12, 1e-9
ESTIMATORS = ("ntk-100-1", "kfac-100-1")
NUM_DATA, REPEATS, LENGTH, UNITS, WORDS = 50_000, 5, 128, 256, 1000

Row = dict[str, Any]


class Sequences(nn.Module):
    """A network with one attention block, and a score for each sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, UNITS)
        self.attention = nn.MultiheadAttention(UNITS, 4, batch_first=True)
        self.up, self.down = nn.Linear(UNITS, 4 * UNITS), nn.Linear(4 * UNITS, UNITS)
        self.head = nn.Linear(UNITS, 10)

    def forward(self, words: Tensor) -> Tensor:
        h = self.words(words)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.down(torch.nn.functional.gelu(self.up(h)))
        return self.head(h.mean(1))


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))


def linear() -> nn.Module:
    hidden = [nn.Linear(784, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU()]
    return nn.Sequential(*hidden, nn.Linear(2048, 10))


@dataclass(frozen=True)
class Setting:
    """A network and its random inputs."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]


SETTINGS = {
    "linear": Setting(linear, lambda m: torch.rand(m, 784)),
    "convolutional": Setting(convolutional, lambda m: torch.rand(m, 3, 32, 32)),
    "sequences": Setting(Sequences, lambda m: torch.randint(WORDS, (m, LENGTH))),
}


def recorded(case: Case, device: torch.device) -> Any:
    """Return the numbers of a case whose network and data are on the device."""
    original = recorded_measures.model_and_data

    def moved(case: Case) -> Any:
        model, likelihood, x, y = original(case)
        x, y = tree_map(lambda leaf: leaf.to(device), (x, y))
        return model.to(device), likelihood.to(device), x, y

    recorded_measures.model_and_data = moved
    try:
        return case.record()
    finally:
        recorded_measures.model_and_data = original


def compared(families: tuple[str, ...], count: int, device: torch.device) -> Iterator[Row]:
    """Yield the largest difference between the device and the CPU for each family."""
    for name in families:
        cases = list(FAMILIES[name].cases())
        cases = cases[:: -(-len(cases) // count)]
        start, gaps = time.perf_counter(), dict[str, float]()
        for case in cases:
            expected = recorded(case, torch.device("cpu"))
            gaps[case.key] = difference(recorded(case, device), expected)
        worst = max(gaps, key=lambda key: gaps[key])
        yield {
            "check": f"numbers of {len(cases)} cases: {name}",
            "value": f"{gaps[worst]:.1e}",
            "agrees": gaps[worst] <= TOLERANCE,
            "detail": worst,
            "seconds": round(time.perf_counter() - start, 1),
        }


def peak(work: Callable[[], object], device: torch.device) -> float:
    """Return the peak memory of a work above the memory before it in MiB, or NaN on a CPU."""
    if device.type != "cuda":
        work()
        return float("nan")
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def synchronizations(work: Callable[[], object], device: torch.device) -> int:
    """Return how often the host waits for the device, or -1 on a CPU."""
    if device.type != "cuda":
        work()
        return -1
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def costs(name: str, num_data: int, repeats: int, device: torch.device) -> Iterator[Row]:
    """Yield time, memory and synchronizations of the gradients, against a training step."""
    setting = SETTINGS[name]
    torch.manual_seed(0)
    model, x = setting.build().to(device), setting.inputs(num_data).to(device)
    y = (torch.arange(num_data) % 10).to(device)
    weights = list(model.parameters())

    def step() -> None:
        torch.autograd.grad(nn.functional.cross_entropy(model(x), y), weights)

    works: dict[str, Callable[[], object]] = {"training step": step}
    for estimator in ESTIMATORS:
        estimator = estimator.replace("100", str(num_data))
        evidence = Evidence(
            model,
            Categorical(),
            GaussianPrior("layerwise"),
            estimator=estimator,
            num_data=NUM_DATA,
            generator=0,
        )
        works[estimator] = lambda evidence=evidence: evidence.backward(x, y)
    times = paired(works, repeats, warmup=2)  # plans and checks
    for label, work in works.items():
        yield {
            "check": f"{name}: {label}",
            "value": f"{times[label] / times['training step']:.2f} steps",
            "milliseconds": round(1e3 * times[label], 2),
            "peak_mib": round(peak(work, device), 1),
            "synchronizations": synchronizations(work, device),
        }


def table(rows: list[Row], columns: list[str]) -> str:
    cells = [columns, *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--families", nargs="*", choices=RECORDED, default=list(RECORDED))
    parser.add_argument("--networks", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--cases", type=int, default=CASES, help="number of cases of a family")
    parser.add_argument("--data", type=int, default=100, help="number of examples of a gradient")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--csv", type=Path, help="written: the table")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", EvigradWarning)
    device, start = torch.device(options.device), time.perf_counter()
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "CPU"
    rows = list(compared(tuple(options.families), options.cases, device))
    for network in options.networks:
        rows += costs(network, options.data, options.repeats, device)
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "detail"))
    print(f"{name}, torch {torch.__version__}, {time.perf_counter() - start:.0f} s")
    print(table(rows, columns))
    if options.csv is not None:
        write_csv(options.csv, [{"device": name, **row} for row in rows])
    different = [row for row in rows if row.get("agrees") is False]
    for row in different:
        print(f"{row['check']} differs from the CPU, most in {row['detail']}")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
