"""Learn the weight decay of each tensor, and compare it with a grid of fixed ones.

A small convolutional network learns 500 MNIST digits. With weight decay 5e-4 it overfits. evigrad
learns a precision for each tensor on the same digits while the network trains. No data are held
out. The best decay of the grid is chosen on the test data, which favors the grid.

    python examples/decay.py
    python examples/decay.py --figure decay.png
"""

import argparse
from collections.abc import Sequence

import torch

import evigrad
from evigrad import Schedule
from evigrad.data import load
from evigrad.models import make_model
from evigrad.plots import LIGHT, new_figure, save
from evigrad.plots.runs import series
from evigrad.plots.style import plain_ticks
from evigrad.training import FitResult

LEARNED, DECAYS = "evigrad", (5e-4, 5e-3, 1e-2, 2e-2, 5e-2)


def name_of(decay: float) -> str:
    """Return a fixed weight decay in words, such as "weight decay 5e-4"."""
    return f"weight decay {decay:.0e}".replace("e-0", "e-")


def draw(path: str, fits: dict[str, FitResult]) -> None:
    """Draw test log likelihoods over training, and the learned precisions."""
    figure = new_figure(8.2, 3.2)
    left, right = figure.subplots(1, 2)
    first, *others = (name for name in fits if name != LEARNED)
    best = max((first, *others), key=lambda name: fits[name].test_metrics["log_likelihood"])
    looks = {
        LEARNED: (LEARNED, LIGHT.lines[1], "-", 7),
        best: (f"best of {len(fits) - 1} fixed decays:\n{best}", LIGHT.muted, "--", -60),
        first: (first, LIGHT.lines[0], "-", -14),
    }
    for name, (label, color, dash, up) in looks.items():
        epochs, values = series(fits[name].history, "test_log_likelihood")
        left.plot(epochs, values, color=color, linestyle=dash)
        place = {"textcoords": "offset points", "ha": "right", "fontsize": 9, "color": color}
        left.annotate(label, (epochs[-1], values[-1]), (0, up), **place)
    left.set_title("(a) Test log likelihood", loc="left", fontsize=10)
    left.set_ylabel("nats per example", fontsize=9)
    history = fits[LEARNED].history
    names = [name for name in history[-1] if name.startswith("precision/")]
    weights = [name for name in names if name.endswith("weight")]
    for name, color in zip(weights, (*LIGHT.lines[2:4], *LIGHT.lines[6:]), strict=False):
        epochs, values = series(history, name)
        right.plot(epochs, values, color=color)
        label = name.removeprefix("precision/").removesuffix(".weight")
        place = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": color}
        right.annotate(label, (epochs[-1], values[-1]), (4, 0), **place)
    right.set_yscale("log")
    plain_ticks(right.yaxis)
    right.set_title("(b) Learned precision of each layer's weights", loc="left", fontsize=10)
    right.set_ylabel("precision (1 / variance of the weights)", fontsize=9)
    for axes in figure.axes:
        axes.set_xlabel("epoch", fontsize=9)
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[str, FitResult]:
    """Train with all methods from the same weights, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default="mnist5k")
    parser.add_argument("--model", default="mininet")
    parser.add_argument("--subset", type=int, default=500, help="number of training examples")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--decays", type=float, nargs="+", default=DECAYS, help="the grid")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", help="draw into this file, a PNG")
    options = parser.parse_args(arguments)

    data = load(options.data, subset=options.subset, seed=options.seed)
    decays = {name_of(decay): decay for decay in options.decays}
    fits = {}
    print("method            test log likelihood  accuracy, %  seconds")
    for name in (*decays, LEARNED):
        model = make_model(options.model, data.input_shape, data.num_outputs, seed=options.seed)
        fits[name] = result = evigrad.fit(
            model,
            data.train,
            test=data.test,
            estimator=None if name in decays else "ntk-400-rows-anchored",
            precision=decays[name] * len(data.train[0]) if name in decays else None,
            schedule=Schedule(epochs=options.epochs, batch_size=50, eval_every=5),
            seed=options.seed,
            progress=False,
        )
        metrics = result.test_metrics
        print(
            f"{name:17} {metrics['log_likelihood']:19.3f} {100 * metrics['accuracy']:12.1f}"
            f" {result.seconds:8.1f}",
            flush=True,
        )
    for weight in fits[LEARNED].evidence.describe():
        print(f"{weight.name:16} precision {weight.precision:8.1f}")
    if options.figure:
        draw(options.figure, fits)
    return fits


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
