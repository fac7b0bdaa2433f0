"""Learn the weight decay of each tensor, and compare it with a fixed one.

A small convolutional network learns 500 MNIST digits. With weight decay 5e-4 it overfits. evigrad
learns a precision for each tensor on the same digits while the network trains. No data are held
out.

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
from evigrad.training import FitResult

MAP, LEARNED = "weight decay 5e-4", "evigrad"


def draw(path: str, fits: dict[str, FitResult]) -> None:
    """Draw test log likelihoods over training, and the learned precisions."""
    figure = new_figure(9.5, 3.4)
    left, right = figure.subplots(1, 2)
    for (name, result), colour in zip(fits.items(), LIGHT.lines, strict=False):
        left.plot(*series(result.history, "test_log_likelihood"), color=colour, label=name)
    left.set_title("test log likelihood, nats per example", loc="left", fontsize=10)
    left.set_ylim(bottom=-0.8)
    left.legend(frameon=False, fontsize=9)
    history = fits[LEARNED].history
    names = [name for name in history[-1] if name.startswith("precision/")]
    weights = [name for name in names if name.endswith("weight")]
    for name, colour in zip(weights, LIGHT.lines, strict=False):
        label = name.removeprefix("precision/")
        right.plot(*series(history, name), color=colour, label=label)
    right.set_yscale("log")
    right.set_title("learned precisions of the weights", loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=8)
    for axes in figure.axes:
        axes.set_xlabel("epoch")
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[str, FitResult]:
    """Train with both methods from the same weights, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default="mnist5k")
    parser.add_argument("--model", default="mininet")
    parser.add_argument("--subset", type=int, default=500, help="number of training examples")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", help="draw into this file, a PNG")
    options = parser.parse_args(arguments)

    data = load(options.data, subset=options.subset, seed=options.seed)
    fits = {}
    print("method            test log likelihood  accuracy, %  seconds")
    for name in (MAP, LEARNED):
        model = make_model(options.model, data.input_shape, data.num_outputs, seed=options.seed)
        fits[name] = result = evigrad.fit(
            model,
            data.train,
            test=data.test,
            estimator=None if name == MAP else "ntk-400-rows-anchored",
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
