"""Choose a length scale by the log evidence of several trainings.

The first layer of the network is fixed: sin(ω x / length + phase) with random ω. The network learns
60 noisy points, with lengths from 0.3 to 3. Each training learns its weight decay and noise. Its
exact log evidence measures how well the length explains the points, and no data are held out. The
training loss would choose the shortest length.

With ``--learn`` the script learns the length by its gradient. The length then hardly changes: 0.31
from 0.3, and 2.07 from 2. The gradient is exact only at the mode of the weights. Between rounds,
the weights of ``fit`` do not follow far enough, so choose such a hyperparameter by comparing runs.

    python examples/length_scale.py
    python examples/length_scale.py --learn

It takes half a minute on one core. The log evidence is highest at 1.5, where the error is also
smallest. The training log likelihood is highest at 0.3.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import evigrad
from evigrad import Optimization, Schedule
from evigrad.likelihoods import Gaussian
from evigrad.plots import LIGHT, new_figure, save

NOISE = 0.3
LENGTHS = (0.3, 0.6, 1.0, 1.5, 2.0, 3.0)


class Waves(nn.Module):
    """Random waves of one length, and a linear layer; maps (m, 1) to (m, 1)."""

    frequency: Tensor
    phase: Tensor

    def __init__(self, length: float, waves: int = 200) -> None:
        super().__init__()
        self.log_length = nn.Parameter(torch.tensor(math.log(length)))
        self.register_buffer("frequency", torch.randn(waves))
        self.register_buffer("phase", 2 * math.pi * torch.rand(waves))
        self.out = nn.Linear(waves, 1)

    @property
    def length(self) -> float:
        """Return the length, in units of the inputs."""
        return math.exp(self.log_length.item())

    def forward(self, x: Tensor) -> Tensor:
        waves = (self.frequency * x * (-self.log_length).exp() + self.phase).sin()
        return self.out(waves * math.sqrt(2 / len(self.frequency)))


@dataclass(frozen=True)
class Training:
    """Result of training at one length.

    Attributes:
        length: Final length.
        log_evidence: Log evidence in nats per example.
        log_likelihood: Log likelihood of the training data in nats per example.
        error: Root mean squared error to the curve.
        outputs: Outputs on the grid.
    """

    length: float
    log_evidence: float
    log_likelihood: float
    error: float
    outputs: Tensor


def curve(x: Tensor) -> Tensor:
    """Return the true curve."""
    return (1.2 * x).sin() + 0.5 * (0.5 * x).cos()


def draw(
    path: str, data: tuple[Tensor, Tensor], grid: Tensor, trainings: dict[float, Training]
) -> None:
    """Draw the evidence and the error over the length, and three of the curves."""
    figure = new_figure(9.2, 3.1)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.5))
    lengths = list(trainings)
    best = max(trainings, key=lambda length: trainings[length].log_evidence)
    values = [training.log_evidence for training in trainings.values()]
    left.plot(lengths, values, "o-", color=LIGHT.lines[0])
    left.set_title("(a) Log evidence", loc="left", fontsize=10)
    left.set_ylabel("nats per example", fontsize=9)
    middle.plot(lengths, [t.error for t in trainings.values()], "o-", color=LIGHT.lines[1])
    middle.set_title("(b) Error", loc="left", fontsize=10)
    middle.set_ylabel("RMSE against the true curve", fontsize=9)
    middle.set_ylim(bottom=0)
    for axes in (left, middle):
        axes.axvline(best, color=LIGHT.muted, linestyle=":")
        axes.set_xscale("log")
        axes.set_xticks(lengths, [f"{length:g}" for length in lengths])
        axes.minorticks_off()
        axes.set_xlabel("length scale", fontsize=9)
    right.plot(data[0][:, 0], data[1][:, 0], ".", color=LIGHT.muted, markersize=4)
    shown = sorted({lengths[0], best, lengths[-1]})
    for length, color in zip(shown, (LIGHT.lines[4], LIGHT.lines[0], LIGHT.lines[3]), strict=False):
        outputs = trainings[length].outputs[:, 0]
        right.plot(grid[:, 0], outputs, color=color, label=f"length {length:g}")
    right.plot(grid[:, 0], curve(grid)[:, 0], ":", color=LIGHT.ink, label="true curve")
    right.set_title("(c) Trained networks and data", loc="left", fontsize=10)
    right.set_xlabel("input x", fontsize=9)
    right.set_ylabel("target y", fontsize=9)
    right.legend(frameon=False, fontsize=8)
    for axes in figure.axes:
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[float, Training]:
    """Train at every length, print the results, and return them by the initial length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=float, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--learn", action="store_true", help="also learn the length by its gradient"
    )
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--figure", help="draw into this file, a PNG")
    options = parser.parse_args(arguments)

    generator = torch.Generator().manual_seed(0)
    x = 8 * torch.rand(60, 1, generator=generator).double() - 4
    y = curve(x) + NOISE * torch.randn(x.shape, generator=generator).double()
    grid = torch.linspace(-4, 4, 400)[:, None].double()
    optimization = Optimization(lr=3e-2)
    if options.learn:
        optimization = Optimization(lr=3e-2, hyper_lr=0.1)
    trainings = {}
    print("final length  log evidence  training log likelihood  error")
    for length in options.lengths:
        torch.manual_seed(0)
        model = Waves(length).double()
        model.log_length.requires_grad_(options.learn)
        result = evigrad.fit(
            model,
            (x, y),
            likelihood=Gaussian(noise=0.5),
            estimator="ntk-N-C",
            hyperparameters=["log_length"] if options.learn else [],
            schedule=Schedule(epochs=options.epochs, batch_size=30),
            optimization=optimization,
            progress=False,
        )
        with torch.no_grad():
            outputs = model(grid)
        error = (outputs - curve(grid)).square().mean().sqrt().item()
        per_datum = result.evidence.estimate(x, y).per_datum
        fit = result.train_metrics["log_likelihood"]
        trainings[length] = training = Training(model.length, per_datum, fit, error, outputs)
        print(f"{length:6} {training.length:10.2f} {per_datum:13.3f} {fit:24.3f} {error:6.2f}")
    if options.figure:
        draw(options.figure, (x, y), grid, trainings)
    return trainings


if __name__ == "__main__":
    torch.set_num_threads(1)  # such a small network gains nothing from more
    main()
