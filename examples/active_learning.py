"""Choose which digits to label: at random, by BALD, or in batches by joint samples.

The network has labels for 20 of scikit-learn's 1,437 training digits. It is trained again after
each batch of 20 further labels, until it has 200. evigrad learns its prior from these labels, so
it needs no validation data.

* ``random`` labels random digits.
* ``BALD`` labels the 20 digits with the largest mutual information between their label and the
  network. It looks at each digit by itself, so a batch may contain the same question 20 times.
* ``batch`` labels digits in turn. Each has the most information that is left after the digits
  before it (BatchBALD, A. Kirsch, J. van Amersfoort and Y. Gal, 2019, arXiv:1906.08158). This needs
  joint samples: each sample of ``posterior.joint(pool).sample(n)`` is one function for all digits.

The samples have the shape (n, m, C). Baal's heuristics take (m, C, n): ``samples.movedim(0, -1)``.

    python examples/active_learning.py --figure active_learning.png
"""

import argparse
import warnings
from collections.abc import Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor, nn

import evigrad
from evigrad import Schedule
from evigrad.data import load
from evigrad.plots import LIGHT, new_figure, save
from evigrad.plots.style import add_legend, decorate, draw_line

METHODS = ("random", "BALD", "batch")
# Functions for the information, and draws of the labels of a batch.
FUNCTIONS, DRAWS = 200, 100


def entropy(p: Tensor) -> Tensor:
    """Return the entropy of probabilities (..., C) in nats."""
    return -torch.xlogy(p, p).sum(-1)


def best_alone(p: Tensor, is_free: Tensor, size: int) -> list[int]:
    """Return the digits with the largest mutual information, for p (functions, m, C)."""
    information = entropy(p.mean(0)) - entropy(p).mean(0)
    return information.where(is_free, -torch.inf).topk(size).indices.tolist()


def best_together(p: Tensor, is_free: Tensor, size: int, generator: torch.Generator) -> list[int]:
    """Return digits in turn, given draws of the labels of all digits before."""
    drawn = torch.randint(len(p), (DRAWS,), generator=generator)
    weights = torch.ones(DRAWS, len(p)).to(p)  # of the functions, given the labels of a draw
    chosen, is_free, noise = list[int](), is_free.clone(), entropy(p).mean(0)
    for _ in range(size):
        predicted = (weights / weights.sum(1, keepdim=True)) @ p.flatten(1)
        information = entropy(predicted.view(DRAWS, *p.shape[1:])).mean(0) - noise
        best = int(information.where(is_free, -torch.inf).argmax())
        labels = torch.multinomial(p[drawn, best], 1, generator=generator).squeeze(1)
        weights = weights * p[:, best, labels].T
        chosen.append(best)
        is_free[best] = False
    return chosen


def run(method: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Return the test accuracy after each training."""
    data, generator = load("digits"), torch.Generator().manual_seed(seed)
    (x, y), (test_x, test_y) = data.train, data.test
    labeled = torch.randperm(len(x), generator=generator)[: options.first].tolist()
    accuracies = list[float]()
    while True:
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 10))
        few = x[labeled], y[labeled]
        schedule = Schedule(epochs=options.epochs, batch_size=25, every=max(1, options.epochs // 8))
        result = evigrad.fit(network, few, schedule=schedule, seed=seed, progress=False)
        with torch.no_grad():
            accuracies.append(float((network(test_x).argmax(1) == test_y).float().mean()))
        if len(labeled) >= options.last:
            return accuracies
        is_free = torch.ones(len(x), dtype=torch.bool)
        is_free[labeled] = False
        size = min(options.batch, options.last - len(labeled))
        if method == "random":
            order = torch.randperm(len(x), generator=generator)
            labeled += order[is_free[order]][:size].tolist()
            continue
        posterior = result.evidence.posterior(few, structure="last-layer")
        p = posterior.joint(x).sample(FUNCTIONS, generator).softmax(-1)
        if method == "BALD":
            labeled += best_alone(p, is_free, size)
        else:
            labeled += best_together(p, is_free, size, generator)


def draw(path: str, counts: list[int], curves: dict[str, list[list[float]]]) -> None:
    figure = new_figure(6.4, 3.4)
    axes = figure.subplots()
    lines = []
    for name, color in zip(METHODS, (LIGHT.muted, *LIGHT.lines), strict=False):
        values = 100 * torch.tensor(curves[name])
        errors = (values.std(0) / len(values) ** 0.5).tolist() if len(values) > 1 else []
        draw_line(axes, counts, values.mean(0).tolist(), errors, color=color)
        lines.append((name, color, "-"))
    decorate(axes, "", "labeled digits", "test accuracy, %")
    add_legend(figure, lines)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[list[float]]]:
    """Return the test accuracies of each method and seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--first", type=int, default=20, help="number of random digits to begin")
    parser.add_argument("--last", type=int, default=200, help="number of labels at the end")
    parser.add_argument("--batch", type=int, default=20, help="number of labels at once")
    parser.add_argument("--epochs", type=int, default=80, help="epochs of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--figure", help="draw into this file, a PNG")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "Training has not converged")
    counts = [*range(options.first, options.last, options.batch), options.last]
    curves = dict[str, list[list[float]]]()
    print("labels: " + " ".join(f"{count:5}" for count in counts))
    for method in METHODS:
        curves[method] = [run(method, seed, options) for seed in options.seeds]
        means = torch.tensor(curves[method]).mean(0).tolist()
        print(f"{method:8}" + " ".join(f"{100 * mean:5.1f}" for mean in means), flush=True)
    for method, runs in curves.items():
        areas = [100 * fmean(accuracies) for accuracies in runs]
        error = f" ± {stdev(areas) / len(areas) ** 0.5:.1f}" if len(areas) > 1 else ""
        print(f"{method}: {fmean(areas):.1f}{error} % on average over the curve")
    if options.figure:
        draw(options.figure, counts, curves)
    return curves


if __name__ == "__main__":
    torch.set_num_threads(1)  # such a small network gains nothing from more
    main()
