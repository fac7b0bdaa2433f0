"""Does Bayesian optimization with evigrad find better points than with other models of BoTorch?

All methods maximize the same acquisition function (``LogExpectedImprovement``) from the same first
points. ``simple regret`` is the optimum minus the best value so far. ``seconds`` is the CPU time of
one thread per observation, for the model and for the acquisition function.

* ``evigrad``: ``EvidenceModel``, which trains its network after every third observation, and
  adds the others in closed form.
* ``gp``: BoTorch's ``SingleTaskGP``, fitted after every observation.
* ``laplace-bayesopt``: ``LaplaceBoTorch`` with the same network, trained after every observation as
  its authors do, for 1,000 epochs. It is in constraints-laplace.txt.

Each run has a process of its own, which is stopped after ``--limit`` seconds. A run that fails is
reported, and runs again next time. Everything takes about three hours of one core.

    python benchmarks/bayesian_optimization.py --results docs/results --pages benchmarks/README.md
"""

import multiprocessing
import time
import warnings
from collections.abc import Sequence
from itertools import product
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
from learning import Result, Results, make_parser, parse
from measure import machine, show
from torch import Tensor, nn

from evigrad.botorch import EvidenceModel, make_network

# Functions to minimize, with the number of first points and of further observations.
FUNCTIONS = {
    "branin-2": (lambda: Branin(), 6, 15),
    "levy-4": (lambda: Levy(4), 10, 15),
    "hartmann-6": (lambda: Hartmann(6), 14, 20),
    "ackley-20": (lambda: Ackley(20), 20, 30),
}
RETRAIN = 3
COLUMNS = ("row", "seed", "function", "method", "regret", "seconds", "machine")


class Evigrad:
    """Train on all data after every third observation, and add the others in closed form."""

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
        return make_network(d, 1).double()

    # A smaller learning rate than the default of its training, 0.1.
    return LaplaceBoTorch(
        network, x, y, Normalize(d, center=0.0), Standardize(1), noise_var=None, lr=1e-2
    )


MODELS = {
    "evigrad": Evigrad,
    "gp": lambda: gaussian_process,
    "laplace-bayesopt": lambda: laplace_bayesopt,
}


def run(function: str, method: str, seed: int, steps: int | None = None) -> Result:
    """Return the simple regret after each observation, and the seconds per observation."""
    make, first, observations = FUNCTIONS[function]
    problem = make().double()
    bounds = problem.bounds.double()
    torch.manual_seed(seed)
    engine = torch.quasirandom.SobolEngine(problem.dim, scramble=True, seed=seed)
    x = bounds[0] + (bounds[1] - bounds[0]) * engine.draw(first).double()
    y = -problem(x)[:, None]
    train, regrets, seconds = MODELS[method](), [], 0.0
    for step in range(observations if steps is None else steps):
        start = time.process_time()
        model = train(x, y, seed=1000 * seed + step)
        function_of_x = LogExpectedImprovement(model, best_f=y.max())
        candidate, _ = optimize_acqf(
            function_of_x, bounds, q=1, num_restarts=4, raw_samples=64, options={"maxiter": 50}
        )
        seconds += time.process_time() - start
        candidate = candidate.detach()
        x, y = torch.cat([x, candidate]), torch.cat([y, -problem(candidate)[:, None]])
        regrets.append(float(-problem.optimal_value - y.max()))
    return {"regret": regrets, "seconds": seconds / len(regrets), "machine": machine()}


def table_of(runs: Sequence[Result]) -> str:
    lines = ["| function | method | simple regret | seconds per observation | seeds |"]
    lines.append("|---|---|---|---|---|")
    for function in FUNCTIONS:
        for method in MODELS:
            chosen = [r for r in runs if r["row"] == f"{function} {method}"]
            if chosen:
                last = [r["regret"][-1] for r in chosen]
                error = f" ± {stdev(last) / len(last) ** 0.5:.1g}" if len(last) > 1 else ""
                seconds = mean(r["seconds"] for r in chosen)
                lines.append(
                    f"| {function} | {method} | {mean(last):.2g}{error} | {seconds:.2g}"
                    f" | {len(chosen)} |"
                )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__, seeds=range(10))
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    parser.add_argument("--methods", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, help="fewer observations, for a trial")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of a run")
    options = parse(parser, arguments)
    warnings.simplefilter("ignore")
    results = Results(options.results / "bayesian_optimization.csv", COLUMNS)
    for seed, function, method in product(options.seeds, options.functions, options.methods):
        row = f"{function} {method}"
        if results.has(row, seed):
            continue
        with multiprocessing.get_context("fork").Pool(1) as pool:
            try:
                job = pool.apply_async(run, (function, method, seed, options.steps))
                outcome = job.get(options.limit)
            except Exception as error:
                print(f"{row}, seed {seed}: {type(error).__name__} {error}", flush=True)
                continue
        results.add({"row": row, "seed": seed, "function": function, "method": method, **outcome})
        regret, seconds = outcome["regret"][-1], outcome["seconds"]
        print(f"{row}, seed {seed}: {regret:.3g}, {seconds:.2f} s", flush=True)
    show("bayesian_optimization", table_of(runs := results.read()), options.pages)
    return runs


if __name__ == "__main__":
    main()
