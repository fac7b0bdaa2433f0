"""Compare learned weights of two tasks with a grid of 5 × 5 weights.

A network with two hidden layers of 64 and two heads predicts two targets. All methods train it from
the same initial weights, with the learning rates and the length that are the defaults of ``fit``.

* ``naval``: two real targets (decay of compressor and turbine), 1,000 rows drawn by the seed.
* ``wine_red``: the quality, as one of six classes, and the alcohol, as a number, from the other ten
  columns.
* ``mnist``: the class and the angle of 1,000 digits drawn by the seed, each rotated once by an
  angle uniform in ±45°. Pixels are averaged to 14 × 14.

Inputs and real targets are standardized. UCI data have one split per seed.

* ``grid``: a weight from ``WEIGHTS`` for the loss of each head, with weight decay 5e-4. A factor of
  both weights has the same effect as another decay, so the grid contains both the relative weight
  and the decay. 25 trainings on 80 % of the training data. The best sum of the heads' log
  likelihoods on the other 20 % is trained again on all.
* ``grid, 80 %``: the chosen network before it is trained again. ``best on test, 80 %``: the network
  of the grid with the highest sum of log likelihoods on the test set, for information only.
* ``equal weights``: weight 1 for each head. ``training loss``: noise and weight of the real heads
  learned on the training loss (Kendall et al., 2018), with weight decay 5e-4 and all data.
* ``evidence``: ``fit`` with its defaults, which are two starts, and all data. ``evidence,
  posterior``: predictions of its posterior with ``kfac``. ``evidence, from 0.01`` and ``evidence,
  from 0.001``: with only one of the two starts. ``evidence, 80 %``: only on the part that the grid
  trains on.

All log likelihoods of a real head refer to Gaussian noise: learned if the method learns it, and
otherwise the root mean squared error on the held-out 20 %. (With ``grid`` and ``equal weights``, it
is the error of the network that was trained on 80 %.) Log likelihoods of classes have no
temperature. The test set is only evaluated. ``seconds`` are process time, and ``grid`` includes its
search. ``weights`` are the weights of the two losses, and 1/σ² if the noise σ is learned.

The script stores every finished run and resumes where it was stopped.

    python benchmarks/multi_task.py --data-dir DIR --results docs/results --pages docs/results.md
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from learning import Result, Results, make_parser, parse
from measure import Clock, mean_and_error, show, spans, with_error
from prior_learning import VALIDATION
from torch import Tensor, nn
from torch.nn import functional

import evigrad
from evigrad import Optimization, Schedule
from evigrad.data import load
from evigrad.data.dataset import Scaling
from evigrad.likelihoods import Categorical, Gaussian, Joint, Weighted
from evigrad.models import make_model
from evigrad.training.plan import BURN_IN_DECAY, WEAK_DECAY

SETS = ("naval", "wine_red", "mnist")
WEIGHTS = (0.01, 0.1, 1.0, 10.0, 100.0)
NUM_DATA, NUM_TEST = 1000, 2000  # of naval and mnist, and of mnist
DEGREES = 45.0
SCHEDULE = Schedule(eval_every=0)
WARM_UP = Schedule(epochs=2, burn_in=1, steps=1, eval_every=0)
SEARCHED = ("grid", "grid, 80 %", "best on test, 80 %", "equal weights")
BY_POSTERIOR = "evidence, posterior"
STARTS = {"evidence, from 0.01": BURN_IN_DECAY, "evidence, from 0.001": WEAK_DECAY}
LEARNED = ("training loss", "evidence", BY_POSTERIOR, *STARTS, "evidence, 80 %")
METHODS = (*SEARCHED, *LEARNED)
KEYS = ("first", "second", "first_error", "second_error", "seconds")
COLUMNS = ("row", "seed", *KEYS, "noise", "weights", "num_data", "epochs", "threads")

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """Two targets of the same inputs.

    Attributes:
        heads: Number of classes of each head, or 0 for a real target.
        x: Inputs of the training data (N, F).
        y: Targets of each head (N,) for classes, or (N, 1).
        test_x: Inputs of the test data.
        test_y: Targets of the test data.
    """

    heads: Mapping[str, int]
    x: Tensor
    y: Mapping[str, Tensor]
    test_x: Tensor
    test_y: Mapping[str, Tensor]

    def rows(self, index: Tensor) -> "Problem":
        """Return the problem with some of the training data."""
        return replace(self, x=self.x[index], y={name: y[index] for name, y in self.y.items()})


def make_problem(name: str, seed: int, data_dir: str | None) -> Problem:
    """Return the data of a seed."""
    if name == "mnist":
        return rotated_digits(seed, data_dir)
    if name == "naval":
        options: dict[str, Any] = {"subset": NUM_DATA}
        targets = {"compressor": "compressor_decay", "turbine": "turbine_decay"}
        features = [
            *("lever_position", "ship_speed", "gt_shaft_torque", "gt_rpm", "gg_rpm"),
            *("starboard_propeller_torque", "port_propeller_torque"),
            *("hp_turbine_exit_temperature", "compressor_outlet_temperature"),
            *("hp_turbine_exit_pressure", "compressor_outlet_pressure", "exhaust_pressure"),
            *("turbine_injection_control", "fuel_flow"),
        ]
    else:
        options = {}
        targets = {"quality": "quality", "alcohol": "alcohol"}
        features = [
            *("fixed_acidity", "volatile_acidity", "citric_acid", "residual_sugar", "chlorides"),
            *("free_sulfur_dioxide", "total_sulfur_dioxide", "density", "pH", "sulphates"),
        ]
    sets = {
        head: load(
            f"uci/{name}",
            data_dir,
            seed=seed,
            target=target,
            features=features,
            likelihood="categorical" if target == "quality" else "gaussian",
            **options,
        )
        for head, target in targets.items()
    }
    first, second = sets.values()
    assert torch.equal(first.train[0], second.train[0])  # the same rows
    return Problem(
        {head: 0 if head != "quality" else data.num_outputs for head, data in sets.items()},
        first.train[0],
        {head: data.train[1] for head, data in sets.items()},
        first.test[0],
        {head: data.test[1] for head, data in sets.items()},
    )


def rotated_digits(seed: int, data_dir: str | None) -> Problem:
    """Return digits that are each rotated once, with their classes and standardized angles."""
    data = load("mnist", data_dir, subset=NUM_DATA, seed=seed).with_test_subset(NUM_TEST)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for images, labels in (data.train, data.test):
        degrees = DEGREES * (2 * torch.rand(len(images), 1, generator=generator) - 1)
        parts.append((rotated(images, degrees), {"digit": labels, "angle": degrees}))
    (x, y), (test_x, test_y) = parts
    angles = Scaling.of(y["angle"])
    for targets in (y, test_y):
        targets["angle"] = angles(targets["angle"]).float()
    return Problem({"digit": 10, "angle": 0}, x, y, test_x, test_y)


def rotated(images: Tensor, degrees: Tensor) -> Tensor:
    """Return images (m, 1, 28, 28) rotated by angles (m, 1), as 14 × 14 pixels in a row."""
    angle = degrees[:, 0] * math.pi / 180
    zero, cosine, sine = torch.zeros_like(angle), angle.cos(), angle.sin()
    maps = torch.stack([cosine, -sine, zero, sine, cosine, zero], 1).view(-1, 2, 3)
    grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
    black = images.min()
    turned = functional.grid_sample(images - black, grid, align_corners=False) + black
    return functional.avg_pool2d(turned, 2).flatten(1)


def joined(problem: Problem, weights: Iterable[float] | None) -> tuple[Joint, Tensor]:
    """Return the likelihood with fixed weights of the losses or with learned noise, and targets.

    A Gaussian with the noise w^-1/2 has the squared error with the weight w/2 as its loss.
    """
    heads, y = {}, dict(problem.y)
    fixed = [None] * len(problem.heads) if weights is None else list(weights)
    for (name, classes), weight in zip(problem.heads.items(), fixed, strict=True):
        if not classes:
            noise = 1.0 if weight is None else weight**-0.5
            heads[name] = (1, Gaussian(noise=noise, learnable=weight is None))
        elif weight is None:
            heads[name] = (classes, Categorical())
        else:
            weighted = Weighted(Categorical())
            y[name] = weighted.targets(y[name], torch.full((len(y[name]),), weight))
            heads[name] = (classes, weighted)
    likelihood = Joint(heads)
    return likelihood, likelihood.targets(y)


def train(problem: Problem, seed: int, weights: Iterable[float] | None, **options: Any) -> Result:
    """Return a trained network, with the number of epochs, learned noise, and process time."""
    options = {"schedule": SCHEDULE} | options
    likelihood, y = joined(problem, weights)
    num_outputs = sum(likelihood.sizes.values())
    model = make_model("mlp", problem.x.shape[1:], num_outputs, seed)
    with Clock() as clock:
        result = evigrad.fit(
            model,
            (problem.x, y),
            likelihood=likelihood,
            seed=seed,
            progress=False,
            **options,
        )
    noise = {
        name.removesuffix("/noise"): value
        for name, value in result.evidence.likelihood.reported().items()
    }
    return {
        "model": model,
        "evidence": result.evidence,
        "noise": noise,
        "epochs": len(result.history),
        "num_data": len(problem.x),
        "seconds": clock.seconds,
    }


@torch.no_grad()
def scores(
    problem: Problem, model: nn.Module, x: Tensor, y: Mapping[str, Tensor], noise: dict[str, float]
) -> dict[str, tuple[float, float]]:
    """Return each head's log likelihood and error: the root mean square, or % of wrong classes.

    A real head without a noise gets its root mean squared error as the noise, in ``noise``.
    """
    outputs = model(x).split([classes or 1 for classes in problem.heads.values()], 1)
    results = {}
    for (name, classes), f in zip(problem.heads.items(), outputs, strict=True):
        if classes:
            value = -float(functional.cross_entropy(f, y[name]))
            error = 100 * float((f.argmax(1) != y[name]).double().mean())
        else:
            squared = float((f - y[name]).double().square().mean())
            error = math.sqrt(squared)
            sigma = noise.setdefault(name, error)
            value = -0.5 * (squared / sigma**2 + math.log(2 * math.pi * sigma**2))
        results[name] = (value, error)
    return results


def run_of(problem: Problem, trained: Result, **changes: Any) -> Result:
    """Return the line of a trained network, with test scores."""
    noise = changes.get("noise", trained["noise"])
    first, second = scores(
        problem, trained["model"], problem.test_x, problem.test_y, noise
    ).values()
    weights = [noise[name] ** -2 if name in noise else 1.0 for name in problem.heads]
    return {
        "first": first[0],
        "second": second[0],
        "first_error": first[1],
        "second_error": second[1],
        "noise": noise,
        "weights": weights,
        **{key: trained[key] for key in ("seconds", "num_data", "epochs")},
    } | changes


def search(
    problem: Problem, part: Problem, held: Problem, seed: int
) -> Iterator[tuple[str, Result]]:
    """Yield the rows of ``SEARCHED``."""
    runs, values = [], []
    for weights in itertools.product(WEIGHTS, WEIGHTS):
        trained = train(part, seed, weights, estimator=None)
        noise: dict[str, float] = {}
        validation = scores(problem, trained["model"], held.x, held.y, noise)
        values.append(sum(value for value, _ in validation.values()))
        runs.append(run_of(problem, trained, noise=noise, weights=list(weights)))
    seconds = sum(run["seconds"] for run in runs)
    best = runs[values.index(max(values))]
    on_test = max(runs, key=lambda run: run["first"] + run["second"])
    yield "grid, 80 %", best | {"seconds": seconds}
    yield "best on test, 80 %", on_test | {"seconds": seconds}
    equal = next(run for run in runs if run["weights"] == [1.0, 1.0])
    for method, run, before in (("grid", best, seconds), ("equal weights", equal, 0.0)):
        again = train(problem, seed, run["weights"], estimator=None)
        changes = {"noise": run["noise"], "weights": run["weights"]}
        yield method, run_of(problem, again, **changes, seconds=before + again["seconds"])


def learn(
    problem: Problem, part: Problem, seed: int, methods: Collection[str]
) -> Iterator[tuple[str, Result]]:
    """Yield some of the rows of ``LEARNED``."""
    if "training loss" in methods:
        on_loss = Optimization(noise_on_loss=True)
        trained = train(problem, seed, None, estimator=None, optimization=on_loss)
        yield "training loss", run_of(problem, trained)
    if {"evidence", BY_POSTERIOR} & set(methods):
        trained = train(problem, seed, None)
        run = run_of(problem, trained)
        yield "evidence", run
        yield BY_POSTERIOR, run | by_posterior(problem, trained)
    for method, decay in STARTS.items():
        if method in methods:
            optimization = Optimization(start_decay=decay)
            yield method, run_of(problem, train(problem, seed, None, optimization=optimization))
    if "evidence, 80 %" in methods:
        yield "evidence, 80 %", run_of(problem, train(part, seed, None))


@torch.no_grad()
def by_posterior(problem: Problem, trained: Result) -> Result:
    """Return what differs with predictions of the posterior."""
    _, y = joined(problem, None)
    with Clock() as clock:
        posterior = trained["evidence"].posterior((problem.x, y), structure="kfac")
    prediction = posterior(problem.test_x)
    changes: Result = {"seconds": trained["seconds"] + clock.seconds}
    for key, (name, classes) in zip(("first", "second"), problem.heads.items(), strict=True):
        head, targets = prediction[name], problem.test_y[name]
        changes[key] = float(head.log_prob(targets).double().mean())
        if classes:
            wrong = head.probabilities.argmax(1) != targets
            changes[f"{key}_error"] = 100 * float(wrong.double().mean())
    return changes


def run_set(
    results: Results, name: str, seed: int, methods: Iterable[str], data_dir: str | None
) -> None:
    """Store the runs of a data set that are missing."""
    missing = [method for method in methods if not results.has(f"{name}: {method}", seed)]
    if not missing:
        return
    problem = make_problem(name, seed, data_dir)
    order = torch.randperm(len(problem.x), generator=torch.Generator().manual_seed(seed))
    held, used = order.tensor_split([int(VALIDATION * len(order))])
    part = problem.rows(used)
    train(part, seed, None, schedule=WARM_UP)  # imports and checks that no method should pay for
    parts = []
    if set(missing) & set(LEARNED):
        parts.append(learn(problem, part, seed, missing))
    if set(missing) & set(SEARCHED):
        parts.append(search(problem, part, problem.rows(held), seed))
    for method, run in itertools.chain(*parts):
        if method in missing:
            line = {"row": f"{name}: {method}", "seed": seed} | run
            results.add(line | {"threads": torch.get_num_threads()})
            print(line, flush=True)


def table_of(runs: list[Result]) -> str:
    """Return means of the seeds as Markdown."""
    lines = [
        "| data | method | gain over grid | log likelihood, head 1 | head 2 | RMSE or wrong, %,"
        " head 1 | head 2 | seconds | time, × grid | seeds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_run = {(run["row"], run["seed"]): run for run in runs}
    for name, method in itertools.product(SETS, METHODS):
        mine = [run for run in runs if run["row"] == f"{name}: {method}"]
        pairs = [(run, by_run.get((f"{name}: grid", run["seed"]))) for run in mine]
        pairs = [(run, grid) for run, grid in pairs if grid is not None]
        if not pairs:
            continue
        gains = [
            run["first"] + run["second"] - grid["first"] - grid["second"] for run, grid in pairs
        ]
        columns = {key: [run[key] for run, _ in pairs] for key in KEYS}
        ratios = [run["seconds"] / grid["seconds"] for run, grid in pairs]
        is_search = method in ("grid, 80 %", "best on test, 80 %")
        cells = [
            name,
            method,
            "–" if method == "grid" else with_error(*mean_and_error(gains), 3),
            *(with_error(*mean_and_error(columns[key]), 3) for key in ("first", "second")),
            *(f"{fmean(columns[key]):.3g}" for key in ("first_error", "second_error")),
            "–" if is_search else f"{fmean(columns['seconds']):.1f}",
            "–" if is_search else f"{fmean(ratios):.3f}",
            spans(run["seed"] for run, _ in pairs),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parse(parser, arguments)
    results = Results(options.results / "multi_task.csv", COLUMNS)
    for seed, name in itertools.product(options.seeds, options.sets):
        run_set(results, name, seed, options.methods, options.data_dir)
    show("multi_task", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
