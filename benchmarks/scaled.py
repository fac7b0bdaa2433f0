"""Compare anchored rows with scaled curvature where there are about as many weights as examples.

``mnist-N`` trains an MLP with one hidden layer of 100 on N images with the schedule of
``large_images.py``, next to weight decay 5e-4. The other sets are rows with ten normal inputs, and
networks with two hidden layers of 50 and the default schedule of ``fit``: ``noisy-N`` and
``clean-N`` have the classes of ``starts.py``, with and without random labels, and ``NOISE-N`` the
numbers of a random network with normal noise. The script prints one line per training, and trains
again on every call.

    python benchmarks/scaled.py --sets mnist-60000 noisy-3000 0.5-3000 --data-dir DIR
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import large_images
import starts
import torch
from learning import make_parser, parse
from rivals import Fitted, Pair, fixed_prior, metrics
from torch import nn

import evigrad
from evigrad import Schedule
from evigrad.data import load
from evigrad.likelihoods import Gaussian

ESTIMATORS = (
    "ntk-400-rows-anchored",
    *(f"kfac-{size}-C-scaled" for size in (100, 200, 400)),
)


def numbers(size: int, noise: float, seed: int) -> tuple[Pair, Pair]:
    """Return training and test rows of a random network with one output."""
    generator = torch.Generator().manual_seed(1000 + seed)
    first = torch.randn(starts.INPUTS, 32, generator=generator) * 1.5 / starts.INPUTS**0.5
    last = torch.randn(32, 1, generator=generator) / 32**0.5 * 1.5

    def draw(size: int) -> Pair:
        x = torch.randn(size, starts.INPUTS, generator=generator)
        return x, torch.tanh(x @ first) @ last + noise * torch.randn(size, 1, generator=generator)

    return draw(size), draw(starts.TEST_ROWS)


def data_of(kind: str, size: int, seed: int, data_dir: str | None) -> tuple[Pair, Pair]:
    """Return training and test data."""
    if kind == "mnist":
        data = load("mnist", data_dir, subset=None if size == 60_000 else size, seed=seed)
        return data.train, data.test
    if kind in ("noisy", "clean"):
        with patch.object(starts, "NOISE", starts.NOISE if kind == "noisy" else 0.0):
            return starts.rows(size, seed)
    return numbers(size, float(kind), seed)


def run(name: str, estimator: str | None, seed: int, data_dir: str | None) -> float:
    """Return the test log likelihood of a training. Without an estimator, the decay is 5e-4."""
    kind, _, size = name.rpartition("-")
    train, (x, y) = data_of(kind, int(size), seed, data_dir)
    torch.manual_seed(seed)
    schedule, outputs = Schedule(batch_size=100, eval_every=0), 1 if y.is_floating_point() else 4
    if kind == "mnist":
        epochs = large_images.EPOCHS[int(size)]
        schedule = Schedule(batch_size=100, eval_every=0, epochs=epochs)
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    else:
        hidden = nn.Linear(starts.INPUTS, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()
        model = nn.Sequential(*hidden, nn.Linear(50, outputs))
    options: dict[str, Any] = {"estimator": estimator}
    if estimator is None:
        options["prior"] = fixed_prior(5e-4, int(size))
    if y.is_floating_point():
        options["likelihood"] = "gaussian"
    result = evigrad.fit(model, train, schedule=schedule, seed=seed, progress=False, **options)
    likelihood = result.evidence.likelihood
    noise = float(likelihood.log_noise.exp()) if isinstance(likelihood, Gaussian) else None
    return metrics(Fitted(result.model).outputs(x), y, noise)["log_likelihood"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the test log likelihood of each training."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", required=True)
    options = parse(parser, arguments)
    for seed in options.seeds:
        for name in options.sets:
            for estimator in (*ESTIMATORS, *([None] if name.startswith("mnist") else [])):
                value = run(name, estimator, seed, options.data_dir)
                print(name, seed, estimator or "weight decay 5e-4", round(value, 4), flush=True)


if __name__ == "__main__":
    main()
