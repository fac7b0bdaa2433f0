"""Learn rates from counts with different exposures.

The data are synthetic, so that the truth is known. Each site was observed for a time, its exposure,
between 0.06 and 18. Sites further to the right were observed for longer. The mean μ of a count is
exposure times rate. Its variance is μ + d μ² with a dispersion d of 0.3. The script compares the
negative binomial and the Poisson likelihood with exposures, and the negative binomial likelihood
without exposures. Without exposures, the network predicts the mean count of a site. The script
divides it by the mean exposure to compare it with the rate.

    python examples/counts.py
    python examples/counts.py --figure counts.png

It takes about 70 s on one core. The mean test log likelihood of three seeds is −1.868 nats with the
negative binomial likelihood, −2.236 with Poisson and −2.074 without exposures. The true
distribution reaches −1.861. The learned dispersions are 0.35, 0.29 and 0.30 with exposures, and
0.75 to 0.78 without. Bands are too narrow. The true rate is in the 95 % band at 59 to 89 % of the
test sites with the negative binomial likelihood, and at 41 to 68 % with Poisson.
"""

import argparse
import copy
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
from torch import Tensor, nn

import evigrad
from evigrad import Optimization, Schedule
from evigrad.likelihoods import NegativeBinomial, Poisson
from evigrad.plots import LIGHT, new_figure, save
from evigrad.posterior import Posterior

DISPERSION = 0.3
HEAD = (
    "seed method                          log likelihood dispersion error of log rate in 95 % band"
)
METHODS = {
    "negative binomial, exposures": NegativeBinomial(exposure=True),
    "Poisson, exposures": Poisson(exposure=True),
    "negative binomial, no exposures": NegativeBinomial(),
}


def rate(x: Tensor) -> Tensor:
    """Return the true rate."""
    return (1.5 * (1.5 * x).sin() + 0.5).exp()


def observe(num_sites: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return places, exposures and counts of sites, each (m, 1)."""
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(num_sites, 1, generator=generator) - 3
    exposure = 10 ** (0.25 * x + torch.rand(num_sites, 1, generator=generator) - 0.5)
    counts = NegativeBinomial(DISPERSION).sample((exposure * rate(x)).log(), generator)
    return x, exposure, counts


def learn(
    likelihood: NegativeBinomial | Poisson, x: Tensor, targets: Tensor, epochs: int
) -> Posterior:
    """Train a network, learn precisions and dispersion, and return the posterior."""
    torch.manual_seed(0)
    result = evigrad.fit(
        nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1)),
        (x, targets),
        likelihood=likelihood,
        schedule=Schedule(epochs=epochs),
        optimization=Optimization(lr=1e-2),
        progress=False,
    )
    return result.evidence.posterior((x, targets), structure="ntk")


def draw(
    path: str, x: Tensor, exposure: Tensor, counts: Tensor, posteriors: dict[str, Posterior]
) -> None:
    """Draw the rates with 95 % bands, and the observed counts per exposure."""
    figure = new_figure(10, 3.8)
    grid = torch.linspace(-3, 3, 200)[:, None]
    places = figure.subplots(1, len(posteriors), sharey=True)
    for axes, (title, posterior) in zip(places, posteriors.items(), strict=True):
        prediction = posterior(grid)
        log_rate = prediction.outputs[:, 0]
        if not METHODS[title].has_conditions:  # the output is a mean count instead of a rate
            log_rate = log_rate - exposure.mean().log()
        width = 1.96 * prediction.covariance[:, 0, 0].sqrt()
        axes.scatter(
            x[:, 0],
            (counts / exposure)[:, 0],
            s=(4 * exposure[:, 0]).tolist(),
            color=LIGHT.muted,
            alpha=0.35,
            linewidths=0,
            label="count / exposure",
        )
        axes.fill_between(
            grid[:, 0],
            (log_rate - width).exp(),
            (log_rate + width).exp(),
            color=LIGHT.lines[0],
            alpha=0.35,
            linewidth=0,
            label="95 % of rate",
        )
        axes.plot(grid[:, 0], log_rate.exp(), color=LIGHT.lines[0], label="learned rate")
        axes.plot(grid[:, 0], rate(grid)[:, 0], ":", color=LIGHT.ink, label="true rate")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("place")
        axes.set_yscale("function", functions=(np.sqrt, np.square))  # shows zeros too
        axes.set_ylim(0, 30)
        axes.spines[["top", "right"]].set_visible(False)
    places[0].set_ylabel("events per unit of exposure")
    places[0].legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Train with each method and seed, and print the results.

    Returns:
        The test log likelihood of each seed, by method.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-train", type=int, default=1000, help="number of training sites")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--figure", help="draw the first seed into this file, a PNG")
    options = parser.parse_args(arguments)

    log_likelihoods: dict[str, list[float]] = {}
    print(HEAD)
    for seed in options.seeds:
        x, exposure, counts = observe(options.num_train, seed)
        x_test, exposure_test, counts_test = observe(5000, 1000 + seed)
        posteriors = {}
        for method, template in METHODS.items():
            likelihood = copy.deepcopy(template)
            targets, targets_test, offset = counts, counts_test, exposure.mean().log()
            if likelihood.has_conditions:
                targets = likelihood.targets(counts, exposure=exposure)
                targets_test = likelihood.targets(counts_test, exposure=exposure_test)
                offset = 0.0
            posterior = posteriors[method] = learn(likelihood, x, targets, options.epochs)
            prediction = posterior(x_test)
            log_likelihood = prediction.log_prob(targets_test).double().mean().item()
            log_likelihoods.setdefault(method, []).append(log_likelihood)
            error = (prediction.outputs - offset - rate(x_test).log()).abs()[:, 0]
            inside = (error < 1.96 * prediction.covariance[:, 0, 0].sqrt()).double().mean()
            dispersion = likelihood.reported().get("dispersion")
            print(
                f"{seed:4} {method:31} {log_likelihood:14.3f}"
                f" {'' if dispersion is None else f'{dispersion:.2f}':>10}"
                f" {error.square().mean().sqrt().item():17.2f} {100 * inside.item():12.0f}",
                flush=True,
            )
        log_means = (exposure_test * rate(x_test)).log()
        best = NegativeBinomial(DISPERSION).log_prob(log_means, counts_test).mean().item()
        print(f"{seed:4} {'truth':31} {best:14.3f} {DISPERSION:10.2f}")
        if options.figure and seed == options.seeds[0]:
            draw(options.figure, x, exposure, counts, posteriors)
    print("\nMean test log likelihood, nats per site:")
    for method, values in log_likelihoods.items():
        print(f"{method:31} {fmean(values):8.3f}")
    return log_likelihoods


if __name__ == "__main__":
    torch.set_num_threads(1)  # such a small network gains nothing from more
    main()
