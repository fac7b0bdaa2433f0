"""Learn the weights of two tasks of one network.

A network learns a depth and a kind from two features of 100 examples. The depth is a number, and
the kind is one of two classes. The noise of the depth determines how much its errors count compared
with the kind, so learned noise is a learned weight of the task. The script learns the noise twice:
on the training loss, and from the evidence.

    python examples/two_heads.py
    python examples/two_heads.py --figure two_heads.png

It takes about 15 s on one core. The true noise is 0.2. On the training loss, the noise falls to
0.03, because the network fits the noise of the training data. From the evidence, it ends at 0.20.
The test log likelihoods are −80 and 0.02 for the depth, and −0.28 and −0.16 for the kind.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import evigrad
from evigrad import Optimization, Schedule
from evigrad.likelihoods import Categorical, Gaussian, Joint
from evigrad.plots import LIGHT, new_figure, save
from evigrad.plots.runs import series
from evigrad.training import FitResult

NUM_DATA, NUM_TEST, NOISE = 100, 2000, 0.2
ON_LOSS, LEARNED = "training loss", "evidence"

Pair = tuple[Tensor, dict[str, Tensor]]


def make_data(count: int, seed: int) -> Pair:
    """Return two features, and the targets of both heads."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator)
    depth = mean_depth(x) + NOISE * torch.randn(count, 1, generator=generator)
    shift = 0.3 * torch.randn(count, generator=generator)
    return x, {"depth": depth, "kind": (x[:, 0] - x[:, 1] + shift > 0).long()}


def mean_depth(x: Tensor) -> Tensor:
    """Return depths (m, 1) without noise."""
    return x[:, :1].sin() + 0.5 * x[:, 1:]


def train(x: Tensor, y: dict[str, Tensor], test: Pair, **settings: Any) -> FitResult:
    """Train both heads. These lines are all that you need for your data."""
    likelihood = Joint({"depth": (1, Gaussian()), "kind": (2, Categorical())})
    body = nn.Sequential(nn.Linear(x.shape[1], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return evigrad.fit(
        nn.Sequential(body, nn.Linear(64, 3)),  # an output for the depth, and two for the kind
        (x, likelihood.targets(y)),
        likelihood=likelihood,
        test=(test[0], likelihood.targets(test[1])),
        progress=False,
        **settings,
    )


def draw(path: str, x: Tensor, y: dict[str, Tensor], results: dict[str, FitResult]) -> None:
    """Draw the noise over training, and the depth along the first feature."""
    figure = new_figure(9.5, 3.4)
    left, right = figure.subplots(1, 2)
    line = torch.zeros(200, 2)
    line[:, 0] = torch.linspace(-2.5, 2.5, len(line))
    across = line[:, 0]
    for (name, result), color in zip(results.items(), LIGHT.lines, strict=False):
        history = series(result.history, "likelihood/depth/noise")
        left.plot(*history, color=color, label=f"{name}: {history[1][-1]:.2f}")
        with torch.no_grad():
            mean = result.model(line)[:, 0]
        width = 1.96 * history[1][-1]
        right.fill_between(across, mean - width, mean + width, color=color, alpha=0.25, linewidth=0)
        right.plot(across, mean, color=color, label=name)
    left.axhline(NOISE, color=LIGHT.muted, linestyle=":", label=f"truth: {NOISE}")
    left.set_yscale("log")
    left.set_yticks([0.03, 0.1, 0.3, 1.0], ["0.03", "0.1", "0.3", "1"])
    left.minorticks_off()
    left.set_xlabel("epoch")
    left.set_title("learned noise of the depth", loc="left", fontsize=10)
    right.plot(across, mean_depth(line)[:, 0], color=LIGHT.muted, linestyle=":", label="truth")
    is_near = x[:, 1].abs() < 0.3
    right.plot(x[is_near, 0], y["depth"][is_near, 0], ".", color=LIGHT.ink, label="data nearby")
    right.set_ylim(-2, 2)
    right.set_xlabel("first feature (the second is 0)")
    right.set_title("depth, with 95 % of the learned noise", loc="left", fontsize=10)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[str, FitResult]:
    """Train with both methods from the same weights, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", help="draw into this file, a PNG")
    options = parser.parse_args(arguments)

    x, y = make_data(NUM_DATA, options.seed)
    test = make_data(NUM_TEST, options.seed + 1)
    results = {}
    print("noise learned on  noise  log likelihood: depth     kind   RMSE of the depth")
    for name in (ON_LOSS, LEARNED):
        settings: dict[str, Any] = {"schedule": Schedule(epochs=options.epochs)}
        if name == ON_LOSS:
            settings |= {"estimator": None, "optimization": Optimization(noise_on_loss=True)}
        torch.manual_seed(options.seed)
        results[name] = result = train(x, y, test, **settings)
        metrics = result.test_metrics
        print(
            f"{name:16} {result.history[-1]['likelihood/depth/noise']:6.3f}"
            f" {metrics['depth/log_likelihood']:22.3f} {metrics['kind/log_likelihood']:8.3f}"
            f" {metrics['depth/squared_error'] ** 0.5:19.3f}",
            flush=True,
        )
    if options.figure:
        draw(options.figure, x, y, results)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)  # such a small network gains nothing from more
    main()
