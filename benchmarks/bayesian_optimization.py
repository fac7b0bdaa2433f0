"""Does Bayesian optimization with evigrad find better points than with other models of BoTorch?

All methods maximize the same acquisition function (``LogExpectedImprovement``) from the same first
points. ``simple regret`` is the optimum minus the best value so far. ``seconds`` is the time per
observation, for the model and for the acquisition function.

* ``evigrad``: ``EvidenceModel``, which trains its network after every 10 observations, and adds
  the others in closed form.
* ``gp``: BoTorch's ``SingleTaskGP``, fitted after every observation.
* ``laplace-bayesopt``: ``LaplaceBoTorch`` with the same network, trained after every observation as
  its authors do. It is in constraints-laplace.txt.

Finished runs are not repeated.

    python benchmarks/bayesian_optimization.py --csv docs/results/bayesian_optimization.csv
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from botorch.acquisition import LogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from botorch.optim import optimize_acqf
from botorch.test_functions import Ackley, Branin, Hartmann, Levy
from gpytorch.mlls import ExactMarginalLogLikelihood
from learning import Results
from measure import machine
from torch import Tensor, nn

from evigrad.botorch import EvidenceModel

# Functions to minimize, with the number of first points and of further observations.
FUNCTIONS = {
    "branin-2": (lambda: Branin(), 6, 30),
    "levy-4": (lambda: Levy(4), 10, 40),
    "hartmann-6": (lambda: Hartmann(6), 14, 50),
    "ackley-20": (lambda: Ackley(20), 40, 80),
}
METHODS = ("evigrad", "gp", "laplace-bayesopt")
RETRAIN = 10
COLUMNS = ("row", "seed", "function", "method", "regret", "seconds", "machine")


class Evigrad:
    """Train on all data after every 10 observations, and add the others in closed form."""

    def __init__(self) -> None:
        self.model: Any = None

    def __call__(self, x: Tensor, y: Tensor, seed: int) -> Any:
        is_due = self.model is None or len(x) >= self.trained_on + RETRAIN
        if is_due:
            self.model, self.trained_on = EvidenceModel.fit(x, y, seed=seed), len(x)
        else:
            self.model = self.model.condition_on_observations(x[-1:], y[-1:])
        return self.model


def gaussian_process(x: Tensor, y: Tensor, seed: int) -> Any:
    model = SingleTaskGP(
        x, y, input_transform=Normalize(x.shape[1]), outcome_transform=Standardize(1)
    )
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def laplace_bayesopt(x: Tensor, y: Tensor, seed: int) -> Any:
    from laplace_bayesopt.botorch import LaplaceBoTorch

    d = x.shape[1]

    def network() -> nn.Module:
        layers = nn.Linear(d, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 1)
        return nn.Sequential(*layers).double()

    # A smaller learning rate than the default of its training, 0.1.
    return LaplaceBoTorch(
        network, x, y, Normalize(d, center=0.0), Standardize(1), noise_var=None, lr=1e-2
    )


def run(function: str, method: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """Return the simple regret after each observation, and the seconds per observation."""
    make, first, observations = FUNCTIONS[function]
    problem = make().double()
    bounds = problem.bounds.double()
    torch.manual_seed(seed)
    engine = torch.quasirandom.SobolEngine(problem.dim, scramble=True, seed=seed)
    x = bounds[0] + (bounds[1] - bounds[0]) * engine.draw(first).double()
    y = -problem(x)[:, None]
    models = {"evigrad": Evigrad(), "gp": gaussian_process, "laplace-bayesopt": laplace_bayesopt}
    train, regrets, seconds = models[method], [], 0.0
    for step in range(observations if steps is None else steps):
        start = time.perf_counter()
        model = train(x, y, seed=1000 * seed + step)
        function_of_x = LogExpectedImprovement(model, best_f=y.max())
        candidate, _ = optimize_acqf(
            function_of_x, bounds, q=1, num_restarts=4, raw_samples=64, options={"maxiter": 50}
        )
        seconds += time.perf_counter() - start
        candidate = candidate.detach()
        x, y = torch.cat([x, candidate]), torch.cat([y, -problem(candidate)[:, None]])
        regrets.append(float(-problem.optimal_value - y.max()))
    return {"regret": regrets, "seconds": seconds / len(regrets), "machine": machine()}


def table(runs: Sequence[dict[str, Any]]) -> str:
    lines = ["| function | method | simple regret | seconds per observation | seeds |"]
    lines.append("|---|---|---|---|---|")
    for row in dict.fromkeys(one["row"] for one in runs):
        of_row = [one for one in runs if one["row"] == row]
        last = [one["regret"][-1] for one in of_row]
        error = stdev(last) / len(last) ** 0.5 if len(last) > 1 else float("nan")
        seconds = mean(one["seconds"] for one in of_row)
        lines.append(
            f"| {of_row[0]['function']} | {of_row[0]['method']} | {mean(last):.3g} ± {error:.2g}"
            f" | {seconds:.3g} | {len(of_row)} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, default=Path("docs/results/bayesian_optimization.csv"))
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--steps", type=int, help="fewer observations, for a trial")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    results = Results(options.csv, COLUMNS)
    for seed in options.seeds:
        for function in options.functions:
            for method in options.methods:
                row = f"{function} {method}"
                if results.has(row, seed):
                    continue
                outcome = run(function, method, seed, options.steps)
                results.add(
                    {"row": row, "seed": seed, "function": function, "method": method, **outcome}
                )
                print(
                    row,
                    seed,
                    f"{outcome['regret'][-1]:.3g}",
                    f"{outcome['seconds']:.2f} s",
                    flush=True,
                )
    print(table(runs := results.read()))
    return runs


if __name__ == "__main__":
    main()
