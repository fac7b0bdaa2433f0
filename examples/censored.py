"""Learn from censored targets with a custom likelihood.

The data are the progression of diabetes in 442 patients (from scikit-learn). A meter records values
only up to a limit, which two fifths of the training targets exceed. The script compares three
methods, each with learned precisions and noise. The first uses the recorded values as they are, the
second omits the censored targets, and the third describes the meter in the likelihood. Test targets
are the true values.

    python examples/censored.py
    python examples/censored.py --quantile 0.4

It takes one minute on one core. With the censored likelihood, the mean test log likelihood over
three seeds is −5.48 nats per example. It is −6.47 with the recorded values, and −8.23 without the
censored targets. The root mean squared errors are 55 to 60, 80 to 85 and 93 to 99, for a score from
25 to 346.

Observed and censored targets have different densities, and therefore different Hessians. evigrad
needs a curvature Λ(f) that does not depend on the target. So ``hessian`` returns the Fisher
information: the mean over all values that the meter could have recorded.
"""

import argparse
import math
from collections.abc import Sequence
from statistics import fmean

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.distributions import Normal

import evigrad
from evigrad import Optimization, Schedule
from evigrad.data import Scaling
from evigrad.errors import InputError
from evigrad.likelihoods import Gaussian, Likelihood
from evigrad.models import make_model

HEAD = "seed method         noise  test RMSE  test log likelihood"
TEST_SIZE = 88


class Censored(Likelihood):
    """Gaussian noise, recorded up to a limit: y = min(f + σ·ε, limit)."""

    name, couples_outputs = "censored", False

    def __init__(self, limit: float, noise: float = 1.0) -> None:
        super().__init__()
        self.limit = limit
        self.log_noise = nn.Parameter(torch.tensor(math.log(noise)))

    def validate(self, f_shape: Sequence[int], y: Tensor) -> None:
        super().validate(f_shape, y)
        if tuple(y.shape) != tuple(f_shape) or bool((y > self.limit).any()):
            raise InputError(f"Targets are (m, C), up to the limit {self.limit}.")

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        noise = self.log_noise.exp()
        beyond = torch.special.log_ndtr((f - self.limit) / noise)
        return torch.where(y < self.limit, Normal(f, noise).log_prob(y), beyond).sum(1)

    def hessian(self, f: Tensor) -> Tensor:
        """Return the Fisher information (Φ + φ (h − z)) / σ², z = (limit − f)/σ, h = φ/(1 − Φ)."""
        noise = self.log_noise.exp()
        z = (self.limit - f) / noise
        log_density = Normal(0.0, 1.0).log_prob(z)
        hazard = (log_density - torch.special.log_ndtr(-z)).exp()
        seen = torch.special.ndtr(z) + log_density.exp() * (hazard - z)
        return (seen / noise**2).diag_embed()

    def reported(self) -> dict[str, float]:
        return {"noise": self.log_noise.exp().item()}


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Train with each of the three methods and every seed, and print the results.

    Returns:
        The test log likelihoods of the true targets, one for each seed, by method.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quantile", type=float, default=0.6, help="share of targets that are not censored"
    )
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)

    x, y = (torch.from_numpy(array) for array in load_diabetes(return_X_y=True, scaled=False))
    y = y[:, None]
    log_likelihoods: dict[str, list[float]] = {}
    print(HEAD)
    for seed in options.seeds:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        test, train = order[:TEST_SIZE], order[TEST_SIZE:]
        inputs, limit = Scaling.of(x[train]), y[train].quantile(options.quantile)
        recorded = y[train].clamp(max=limit)
        targets = Scaling.of(recorded)  # of the records, because the true mean is unknown
        x_train, y_train = inputs(x[train]).float(), targets(recorded).float()
        # Rounding must not move the limit.
        highest, (x_test, y_test) = y_train.max(), (inputs(x[test]), targets(y[test]))
        seen = y_train[:, 0] < highest
        methods = {
            "as recorded": (Gaussian(), x_train, y_train),
            "left out": (Gaussian(), x_train[seen], y_train[seen]),
            "censored": (Censored(highest.item()), x_train, y_train),
        }
        for method, (likelihood, *pair) in methods.items():
            model = make_model("mlp", (x.shape[1],), 1, seed)
            evigrad.fit(
                model,
                tuple(pair),
                likelihood=likelihood,
                precision=100.0,  # a weak initial prior would let it fit noise
                schedule=Schedule(epochs=options.epochs),
                optimization=Optimization(prior_update="adam"),
                seed=seed,
                progress=False,
            )
            noise = likelihood.reported()["noise"]
            with torch.no_grad():
                mean = model(x_test.float()).double()
            error = targets.std * (y_test - mean).square().mean().sqrt()
            density = Normal(mean, noise).log_prob(y_test).mean() - targets.std.log()
            log_likelihood = density.item()
            units = (targets.std * noise).item()  # noise in the units of the targets
            print(f"{seed:4} {method:12} {units:8.1f} {error.item():10.1f} {log_likelihood:20.3f}")
            log_likelihoods.setdefault(method, []).append(log_likelihood)
    print("\nMean test log likelihood of the true targets, nats per example:")
    print("   ".join(f"{method} {fmean(values):.3f}" for method, values in log_likelihoods.items()))
    return log_likelihoods


if __name__ == "__main__":
    torch.set_num_threads(1)  # such a small network gains nothing from more
    main()
