"""Predict with error bars after learning noise and weight decay.

A network with one hidden layer learns a wave from 60 noisy points, with no points between 0.5 and
2. From these points evigrad learns the noise of the targets and a precision for each tensor.
Together they define a posterior, and so error bars for the curve. With a fixed noise of 0.5 and
fixed precisions of 1, the curve is too smooth, and the true curve leaves the band.

    python examples/uncertainty.py
    python examples/uncertainty.py --figure uncertainty.png

It takes about half a minute on one core. The learned noise is 0.18, and the true noise is 0.2. The
standard deviation of the curve is 0.08 near the data and 0.38 in the gap.
"""

import argparse
from collections.abc import Sequence
from math import pi

import torch
from torch import Tensor, nn

import evigrad
from evigrad import Optimization, Schedule
from evigrad.likelihoods import Gaussian
from evigrad.plots import LIGHT, new_figure, save
from evigrad.posterior import Predictive

NOISE, GAP = 0.2, (0.5, 2.0)


def wave(x: Tensor) -> Tensor:
    """Return the true curve."""
    return (pi * x / 2).sin() + 0.3 * x


def draw(path: str, x: Tensor, y: Tensor, grid: Tensor, predicted: dict[str, Predictive]) -> None:
    """Draw the curve with 95 % intervals for the curve and for targets."""
    figure = new_figure(8.2, 4.0)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, predictive) in zip(panels, predicted.items(), strict=True):
        axes.axvspan(*GAP, color=LIGHT.grid, alpha=0.6, linewidth=0, label="gap without data")
        across, mean = grid[:, 0], predictive.mean[:, 0]
        for variance, shade, label in (
            (predictive.variance, 0.18, "targets"),
            (predictive.epistemic_variance, 0.35, "curve"),
        ):
            width = 1.96 * variance[:, 0].sqrt()
            axes.fill_between(
                across,
                mean - width,
                mean + width,
                color=LIGHT.lines[0],
                alpha=shade,
                linewidth=0,
                label=f"95 % band of the {label}",
            )
        axes.plot(across, mean, color=LIGHT.lines[0], label="network")
        axes.plot(across, wave(across), color=LIGHT.lines[1], linestyle="--", label="true curve")
        axes.plot(x[:, 0], y[:, 0], ".", color=LIGHT.ink, markersize=4, label="training data")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("input x", fontsize=9)
        axes.set_xlim(float(grid.min()), float(grid.max()))
        axes.set_ylim(-3.5, 3.5)
        axes.tick_params(labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("target y", fontsize=9)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[str, Predictive]:
    """Train, predict and print. Return the predictions with fixed and learned noise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=1500)
    parser.add_argument("--figure", help="draw into this file, a PNG")
    options = parser.parse_args(arguments)

    generator = torch.Generator().manual_seed(0)
    x = 7 * torch.rand(90, 1, generator=generator).double() - 3
    x = x[(x[:, 0] < GAP[0]) | (x[:, 0] > GAP[1])][:60]
    y = wave(x) + NOISE * torch.randn(x.shape, generator=generator).double()
    grid = torch.linspace(-5, 6, 300)[:, None].double()

    predicted = {}
    for learned in (False, True):
        torch.manual_seed(0)
        likelihood = Gaussian(noise=0.5)
        result = evigrad.fit(
            nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)).double(),
            (x, y),
            likelihood=likelihood,
            precision=1.0,
            estimator=None if not learned else "ntk-N-C",
            schedule=Schedule(epochs=options.epochs, batch_size=60),
            optimization=Optimization(lr=3e-2),
            progress=False,
        )
        predictive = result.evidence.posterior((x, y), structure="ntk")(grid)
        noise = likelihood.reported()["noise"]
        title = f"{'(b) Learned' if learned else '(a) Fixed'} noise {noise:.2f} and precisions"
        predicted[title] = predictive
        inside = (grid[:, 0] > GAP[0]) & (grid[:, 0] < GAP[1])
        spread = predictive.epistemic_variance[:, 0].sqrt()
        print(
            f"{title:36} standard deviation of the curve: {spread[inside].mean():.2f} in the gap,"
            f" {spread[(grid[:, 0] > -3) & (grid[:, 0] < 0)].mean():.2f} among the data"
        )
    if options.figure:
        draw(options.figure, x, y, grid, predicted)
    return predicted


if __name__ == "__main__":
    torch.set_num_threads(1)  # such a small network gains nothing from more
    main()
