"""Compare one run of ``fit`` with the usual ways to choose weight decay, with their times.

All methods train the same network from the same initial weights, with the same optimizer, learning
rates, epochs and batches. These are the defaults of ``evigrad.fit``. They differ in how they choose
the weight decay (with N examples, a decay is a precision of decay · N). Grids, ranges and settings
below were fixed before the first run. The seed draws the held-out 20 %. The test set is only
evaluated, and this time does not count.

Classification: scikit-learn's ``digits`` (a random 80/20 split per seed, digitsnet), ``mnist``
(1,000 digits drawn by the seed, MiniNet, 10,000 test digits), ``cifar10`` (1,000 images, LeNet,
10,000 test images), and both with 10,000 training images (``mnist-10000``, ``cifar10-10000``):

* ``map-5e-4``: weight decay 5e-4.
* ``grid``: one decay for all weights, the best of seven by the log likelihood on 20 % held-out
  data, then trained again on all data. ``grid-5fold``: the same grid with five folds.
* ``tpe-12``, ``tpe-36``: Optuna's TPE over log decays of each parameter tensor, 1e-5 to 1e-1, on 20
  % held-out data, then trained again on all data; the first 12 trials of the study, and all 36.
* ``temperature``: decay 5e-4 on 80 % of the data, and a temperature of the logits fitted to the
  rest.
* ``early stopping``: no decay on 80 % of the data, from the best epoch by the log likelihood of the
  rest.
* ``ensemble-3``: mean probabilities of three networks with decay 5e-4, with different initial
  weights and orders of the data.
* ``laplace-torch``: its ``marglik_training`` with KFAC and layerwise precisions from 1 on; after 10
  epochs, 10 steps every 5 epochs.
* ``kfac-400-1``: ``fit`` with the paper's estimator. ``default``: ``fit`` with its defaults.
  ``choice``: ``fit(validation_fraction=0.5)``, for which one half of the data chooses the weight of
  the log-determinant. The last training uses all data.

Regression: UCI data sets with one split per seed and two hidden layers of 50. Features and target
are standardized, and log likelihoods refer to the standardized target:

* ``early stopping``: a plain loop with Adam at a constant rate, which learns the noise with the
  weights. It keeps the best weights on 10 % held-out data.
* ``grid``: 5 decays × 5 noise levels on 20 % held-out data, then trained again on all data.
* ``laplace-torch``: as above, with learned noise.
* ``map-noise``: decay 5e-4, with noise learned on the training loss. ``default`` and ``choice``:
  as above.
* ``default, posterior``, ``choice, posterior``: the same networks with predictions of their
  linearized posterior, by all rows of all data. ``laplace-torch, posterior``: its own posterior, by
  KFAC.

``log_likelihood`` refers to the MAP prediction unless the row names a posterior, in nats per
example. ``scaled`` is the log likelihood after the best scale of the logits, fitted to one half of
the test set and evaluated on the other, and vice versa. It measures the network's confidence, and
nothing uses it. ``ece`` is the expected calibration error with 15 bins. ``seconds`` are the process
time of a method, including its searches. ``trace`` has these seconds after each trial of a search,
with the test log likelihood of the best trial so far by held-out data. Its last entry is the
network trained on all data.

The script stores every finished run in one CSV file per data set, and resumes where it was stopped.
``default`` has the defaults at the time of the run: remove its lines to run it again. TPE needs
optuna, and laplace-torch needs laplace-torch==0.3 and asdl.

    python benchmarks/rivals.py --sets digits --seeds 0 1 2 3 4 5 6 7 8 9
    python benchmarks/rivals.py --sets mnist cifar10 --data-dir DIR --results docs/results
    python benchmarks/rivals.py --results docs/results --table --pages benchmarks/README.md
"""

import argparse
import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from learning import Result, Results, make_parser, parse
from measure import Clock, insert, mean_and_error, summaries, with_error
from scipy.optimize import minimize_scalar
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import evigrad
from evigrad import Optimization, Schedule
from evigrad.data import DataSet, load
from evigrad.data.dataset import Scaling, stratified_split
from evigrad.likelihoods import Categorical, Gaussian, Likelihood, make_likelihood
from evigrad.models import make_model
from evigrad.plots.style import LIGHT, decorate, name_points, new_figure, plain_ticks
from evigrad.priors import GaussianPrior
from evigrad.training.plan import plan_optimization, plan_schedule, planned
from evigrad.training.weight_choice import WeightChoice

UCI = ("yacht", "boston", "energy", "wine_red", "power", "naval")
USUAL = 5e-4
DECAYS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
NO_DECAY = 1e-10  # a Gaussian prior needs a positive precision; this one has no effect in float32
VALIDATION = 0.2
SCHEDULE = Schedule(eval_every=0)  # fit's defaults, without evaluations
FOLDS = 5
HELD_OUT_SHARE = 0.5  # of the data, for the choice of the weight of the log-determinant
TRIALS = {"tpe-12": 12, "tpe-36": 36}
LOWEST, HIGHEST = 1e-5, 1e-1  # range of decays of TPE
MEMBERS = 3
OTHER_MEMBER = 1000  # added to the seed for each network of an ensemble
LAPLACE = {"n_epochs_burnin": 10, "marglik_frequency": 5, "n_hypersteps": 10}
TABLE_DECAYS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
TABLE_NOISES = (0.02, 0.05, 0.125, 0.32, 0.8)
# Settings of early stopping in regression, fixed before the first run.
LR, BATCH, HELD_OUT, PATIENCE, MOST_EPOCHS = 1e-2, 64, 0.1, 20, 1000
BINS = 15
AT_ONCE = 1000

# Network, number of training examples, and default seeds.
IMAGES: dict[str, tuple[str, int | None, range]] = {
    "digits": ("digitsnet", None, range(10)),
    "mnist": ("mininet", 1000, range(3)),
    "cifar10": ("lenet", 1000, range(3)),
    "mnist-10000": ("mininet", 10_000, range(3)),
    "cifar10-10000": ("lenet", 10_000, range(3)),
}
HIDDEN = (50, 50)
BY_POSTERIOR = ", posterior"
FEW_SPLITS = ("power", "naval")  # large data sets: 3 splits instead of 20
SEEDS = {name: seeds for name, (_, _, seeds) in IMAGES.items()} | {
    name: range(3 if name in FEW_SPLITS else 20) for name in UCI
}
METRICS = ("log_likelihood", "accuracy", "rmse", "ece", "scaled")
SETTINGS = ("decay", "noise", "temperature", "weight")
COLUMNS = ("row", "seed", *METRICS, "seconds", "trial_seconds", *SETTINGS, "trace", "num_data")
COLUMNS = (*COLUMNS, "epochs", "threads")
# Packages that only these methods need, and what to install.
EXTRAS = {
    "tpe-12": ("optuna", "optuna"),
    "tpe-36": ("optuna", "optuna"),
    "laplace-torch": ("laplace", "laplace-torch==0.3 asdl"),
    f"laplace-torch{BY_POSTERIOR}": ("laplace", "laplace-torch==0.3 asdl"),
}
FIGURE = "images/rivals.png"
FIGURE_SETS = ("mnist", "yacht")  # the panels, if both have runs
LABELS = {
    "map-5e-4": "weight decay 5e-4",
    "grid": "grid search",
    "grid-5fold": "grid search, 5 folds",
    "tpe-12": "TPE, 12 trials",
    "tpe-36": "TPE, 36 trials",
    "temperature": "temperature scaling",
    "ensemble-3": "ensemble of 3",
    "kfac-400-1": "evigrad, kfac-400-1",
    "map-noise": "MAP, learned noise",
    "default": "evigrad",
    f"default{BY_POSTERIOR}": "evigrad, posterior",
    "choice": "evigrad, chosen weight",
    f"choice{BY_POSTERIOR}": "evigrad, chosen weight, posterior",
}
TITLES = {"mnist": "1,000 MNIST digits", "yacht": "yacht (277 examples, regression)"}
LOWEST_SHOWN = -1.0  # nats per example below the reference in the figure
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, BROWN, INK = LIGHT.lines
FAR = 14  # pixels from which a line joins a point with its name
GRAY, PURPLE, RED = "#888888", "#6A3D9A", "#C0392B"
# Methods of rivals.py and transfer.py. No figure has two methods of one color, except both TPEs.
COLORS = {
    **{"map-5e-4": GRAY, "usual": GRAY, "map-noise": BLUE, "last layer": BLUE},
    **{"grid": GREEN, "grid-5fold": GREEN, "tpe-12": YELLOW, "tpe-36": YELLOW},
    **{"temperature": SKY, "diag-ef": SKY, "early stopping": BROWN, "ensemble-3": PINK},
    **{"laplace-torch": PURPLE, "kfac-400-1": ORANGE, "default-2": ORANGE, "default": INK},
    **{"choice": RED, "choice-2": RED, "last layer, choice": RED},
}

Pair = tuple[Tensor, Tensor]
Settings = Mapping[str, Any]
Decay = float | Mapping[str, float]  # one, or one for each tensor


def fixed_prior(decay: Decay, num_data: int) -> GaussianPrior:
    """Return the fixed prior of one weight decay, or of one per tensor."""
    if isinstance(decay, Mapping):
        precision: Any = {name: value * num_data for name, value in decay.items()}
        return GaussianPrior("layerwise", precision, learnable=False)
    return GaussianPrior("scalar", decay * num_data, learnable=False)


@dataclass(frozen=True)
class Task:
    """A split of a data set with its network, and the seed of everything random in training."""

    data: DataSet
    model: str
    seed: int
    options: Settings
    schedule: Schedule | None = None  # instead of SCHEDULE

    def network(self, seed: int | None = None) -> nn.Module:
        """Return the network with the initial weights of a seed."""
        seed = self.seed if seed is None else seed
        data = self.data
        return make_model(self.model, data.input_shape, data.num_outputs, seed, **self.options)

    def fixed_prior(self, decay: Decay, num_data: int) -> GaussianPrior:
        """Return the prior of fixed weight decays."""
        return fixed_prior(decay, num_data)

    def held_out(self) -> tuple[Pair, Pair]:
        """Return 80 % of the training data, and the rest."""
        return self.data.split_validation(VALIDATION, self.seed)


@dataclass(frozen=True)
class Fitted:
    """A trained network, with the noise of its outputs (None for classes) and its decays.

    ``evidence`` comes from ``fit``.
    """

    model: nn.Module
    noise: float | None = None
    decay: Mapping[str, float] | None = None
    evidence: evigrad.Evidence | None = None
    choice: WeightChoice | None = None

    @property
    def likelihood(self) -> Likelihood:
        """Return the likelihood of the network's training, with its noise."""
        return likelihood_of(self.noise) if self.evidence is None else self.evidence.likelihood

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs for any number of inputs."""
        self.model.eval()
        with torch.no_grad():
            return torch.cat([self.model(part) for part in x.split(AT_ONCE)])

    def log_likelihood(self, data: Pair) -> float:
        """Return the log likelihood of the MAP prediction, in nats per example."""
        return log_likelihood(self.outputs(data[0]), data[1], self.noise)


class BestEpoch:
    """A callback of ``fit`` that keeps the modules of the epoch with the highest score."""

    def __init__(self, score: Callable[[], float], *modules: nn.Module) -> None:
        self._score, self._modules = score, modules
        self._best, self._kept = -math.inf, [module.state_dict() for module in modules]

    def __call__(self, _: object) -> None:
        """Keep a copy of the modules if an epoch is the best so far."""
        score = self._score()
        if score > self._best:
            self._best = score
            self._kept = [copy.deepcopy(module.state_dict()) for module in self._modules]

    def restore(self) -> None:
        """Load the best epoch into the modules."""
        for module, state in zip(self._modules, self._kept, strict=True):
            module.load_state_dict(state)


def log_likelihood(f: Tensor, y: Tensor, noise: float | None) -> float:
    """Return the mean log likelihood of the outputs, in nats per example."""
    return float(likelihood_of(noise).log_prob(f.double(), y).mean())


def likelihood_of(noise: float | None) -> Likelihood:
    """Return the likelihood of classes, or of numbers with a noise."""
    return Categorical() if noise is None else Gaussian(noise, learnable=False)


def best_scale(f: Tensor, y: Tensor) -> float:
    """Return the factor on the logits that maximizes the log likelihood."""

    def loss(log_scale: float) -> float:
        return -log_likelihood(f * math.exp(log_scale), y, None)

    return math.exp(minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded").x)


def cross_fitted(f: Tensor, y: Tensor) -> float:
    """Return the log likelihood with the best logit scale of the other half of the data."""
    halves = [(f[0::2], y[0::2]), (f[1::2], y[1::2])]
    total = 0.0
    for half, other in (halves, halves[::-1]):
        total += len(half[0]) * log_likelihood(half[0] * best_scale(*other), half[1], None)
    return total / len(f)


def calibration_error(f: Tensor, y: Tensor) -> float:
    """Return the expected calibration error, with bins of equal width."""
    confidence, predicted = f.double().softmax(1).max(1)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64)
    gaps.index_add_(0, bins, (predicted == y).double() - confidence)
    return float(gaps.abs().sum()) / len(f)


def metrics(f: Tensor, y: Tensor, noise: float | None = None) -> Result:
    """Return all columns that evaluate outputs on the test set."""
    columns: Result = {"log_likelihood": log_likelihood(f, y, noise)}
    if noise is not None:
        return columns | {"rmse": float((f - y).square().mean().sqrt()), "noise": noise}
    return columns | {
        "accuracy": float((f.argmax(1) == y).double().mean()),
        "ece": calibration_error(f, y),
        "scaled": cross_fitted(f, y),
    }


def judged(task: Task, fitted: Fitted) -> Result:
    """Return the columns of a network on the test set."""
    x, y = task.data.test
    return metrics(fitted.outputs(x), y, fitted.noise)


def train(
    task: Task,
    part: Pair | None = None,
    *,
    decay: Decay | None = None,
    noise: float | None = None,
    model: nn.Module | None = None,
    seed: int | None = None,
    schedule: Schedule | None = None,
    **options: Any,
) -> Fitted:
    """Return a training by ``fit``. With a decay, it is MAP with one decay, or one per tensor."""
    part = part or task.data.train
    likelihood: Any = task.data.likelihood
    if noise is not None:
        likelihood = Gaussian(noise, learnable=False)
    if decay is not None:
        options |= {"estimator": None, "prior": task.fixed_prior(decay, len(part[0]))}
    result = evigrad.fit(
        model or task.network(seed),
        part,
        likelihood=likelihood,
        seed=task.seed if seed is None else seed,
        schedule=schedule or task.schedule or SCHEDULE,
        progress=False,
        **options,
    )
    fitted_likelihood = result.evidence.likelihood
    return Fitted(
        result.model,
        float(fitted_likelihood.log_noise.detach().exp())
        if isinstance(fitted_likelihood, Gaussian)
        else None,
        {name: float(value) for name, value in result.evidence.weight_decay().items()},
        result.evidence,
        result.weight_choice,
    )


def learned(fitted: Fitted) -> Result:
    """Return the columns of what ``fit`` learned and chose."""
    columns: Result = {"decay": fitted.decay}
    if fitted.choice is not None:
        columns |= {"weight": fitted.choice.weight, "trial_seconds": fitted.choice.seconds}
    return columns


class Search:
    """Trials of settings on held-out data, and the test log likelihood of the best so far.

    Args:
        task: Task to train.
        folds: Pairs of training and held-out data. The score of a setting is the mean over them.
    """

    def __init__(self, task: Task, folds: Sequence[tuple[Pair, Pair]]) -> None:
        self.task, self.folds, self.clock = task, folds, Clock()
        self.best: Settings = {}
        self.score = self._judged = -math.inf
        self.trace: list[list[float]] = []

    def trial(self, **settings: Any) -> float:
        """Return the held-out log likelihood of settings."""
        with self.clock:
            networks = [train(self.task, part, **settings) for part, _ in self.folds]
            pairs = zip(networks, self.folds, strict=True)
            score = fmean(network.log_likelihood(held_out) for network, (_, held_out) in pairs)
        if score > self.score:
            self.best, self.score = settings, score
            self._judged = fmean(n.log_likelihood(self.task.data.test) for n in networks)
        self.trace.append([self.clock.seconds, self._judged])
        return score

    def finish(self) -> Result:
        """Return the columns after training on all data with the best settings so far."""
        with Clock() as clock:
            fitted = train(self.task, **self.best)
        columns = judged(self.task, fitted) | self.best
        seconds = self.clock.seconds + clock.seconds
        trace = [*self.trace, [seconds, columns["log_likelihood"]]]
        return columns | {"seconds": seconds, "trace": trace}


def run_usual(task: Task) -> Result:
    """Return the result of MAP with weight decay 5e-4."""
    with Clock() as clock:
        fitted = train(task, decay=USUAL)
    return judged(task, fitted) | {"seconds": clock.seconds, "decay": USUAL}


def run_learned(task: Task, **options: Any) -> Result:
    """Return the result of ``fit`` with some options instead of its defaults."""
    with Clock() as clock:
        fitted = train(task, **options)
    return judged(task, fitted) | {"seconds": clock.seconds} | learned(fitted)


def run_posterior(task: Task, **options: Any) -> list[Result]:
    """Return the results of ``fit`` and of its linearized posterior on all rows."""
    with Clock() as clock:
        fitted = train(task, **options)
    columns = judged(task, fitted) | {"seconds": clock.seconds} | learned(fitted)
    x, y = task.data.test
    assert fitted.evidence is not None
    with clock:
        predictive = fitted.evidence.posterior(task.data.train, structure="full")(x)
    mean_log_prob = float(predictive.log_prob(y).double().mean())
    return [columns, columns | {"log_likelihood": mean_log_prob, "seconds": clock.seconds}]


def run_grid(task: Task) -> Result:
    """Return the best decay on held-out data, for regression with the noise."""
    search = Search(task, [task.held_out()])
    for decay in DECAYS if task.data.is_classification else TABLE_DECAYS:
        for noise in (None,) if task.data.is_classification else TABLE_NOISES:
            search.trial(decay=decay, noise=noise)
    return search.finish()


def run_folds(task: Task) -> Result:
    """Return the result of one decay by five folds."""
    x, y = task.data.train
    splits = StratifiedKFold(FOLDS, shuffle=True, random_state=task.seed).split(x, y)
    search = Search(task, [((x[a], y[a]), (x[b], y[b])) for a, b in splits])
    for decay in DECAYS:
        search.trial(decay=decay)
    return search.finish()


def run_tpe(task: Task) -> list[Result]:
    """Return the first trials of a study with a decay per tensor, and all trials."""
    names = [name for name, _ in task.network().named_parameters()]
    return study(Search(task, [task.held_out()]), names, LOWEST, HIGHEST)


def study(search: Search, names: Sequence[str], lowest: float, highest: float) -> list[Result]:
    """Return the columns after each number of TRIALS of Optuna's TPE over log decays."""
    import optuna  # pyright: ignore[reportMissingImports]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    runs = []
    with search.clock:
        sampler = optuna.samplers.TPESampler(seed=search.task.seed)
        trials = optuna.create_study(direction="maximize", sampler=sampler)
    for count in range(1, max(TRIALS.values()) + 1):
        with search.clock:
            trial = trials.ask()
            decay = {name: trial.suggest_float(name, lowest, highest, log=True) for name in names}
        score = search.trial(decay=decay)
        with search.clock:
            trials.tell(trial, score)
        runs += [search.finish() for milestone in TRIALS.values() if milestone == count]
    return runs


def run_temperature(task: Task) -> Result:
    """Return decay 5e-4 on 80 % of the data, with a temperature fitted to the rest."""
    part, (x, y) = task.held_out()
    with Clock() as clock:
        fitted = train(task, part, decay=USUAL)
        scale = best_scale(fitted.outputs(x), y)
    test_x, test_y = task.data.test
    columns = metrics(fitted.outputs(test_x) * scale, test_y)
    return columns | {"seconds": clock.seconds, "decay": USUAL, "temperature": 1 / scale}


def stop_early(model: nn.Module, train: Pair, test: Pair, seed: int) -> Result:
    """Train with learned noise, and return the best network on held-out data."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train[0]), generator=generator)
    held, used = order.tensor_split([max(1, int(HELD_OUT * len(order)))])
    log_noise = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), log_noise], lr=LR)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        error = (model(x) - y) * (-log_noise).exp()
        return (0.5 * error.square() + log_noise + 0.5 * math.log(2 * math.pi)).mean()

    best, since, epoch, kept = math.inf, 0, 0, {}
    start = time.perf_counter()
    while since < PATIENCE and epoch < MOST_EPOCHS:
        for batch in used[torch.randperm(len(used), generator=generator)].split(BATCH):
            optimizer.zero_grad()
            loss_of(train[0][batch], train[1][batch]).backward()
            optimizer.step()
        with torch.no_grad():
            value = float(loss_of(train[0][held], train[1][held]))
        epoch, since = epoch + 1, since + 1
        if value < best:
            best, since = value, 0
            kept = copy.deepcopy((model.state_dict(), log_noise.detach()))
    seconds = time.perf_counter() - start
    model.load_state_dict(kept[0])
    with torch.no_grad():
        log_noise.copy_(kept[1])
        squared = (model(test[0]) - test[1]).square().mean()
        value = -float(loss_of(*test))
    rmse = math.sqrt(float(squared))
    return {"log_likelihood": value, "rmse": rmse, "seconds": seconds, "epochs": epoch}


def run_early(task: Task) -> Result:
    """Return the result without decay, at the best epoch on held-out data."""
    part, held_out = task.held_out()
    if not task.data.is_classification:
        with Clock() as clock:
            columns = stop_early(task.network(), task.data.train, task.data.test, task.seed)
        return {key: columns[key] for key in ("log_likelihood", "rmse", "epochs")} | {
            "seconds": clock.seconds
        }
    model = task.network()
    best = BestEpoch(lambda: Fitted(model).log_likelihood(held_out), model)
    with Clock() as clock:
        fitted = train(task, part, model=model, decay=NO_DECAY, callbacks=[best])
        best.restore()
    return judged(task, fitted) | {"seconds": clock.seconds, "decay": 0.0}


def train_members(task: Task, **options: Any) -> list[Fitted]:
    """Return networks with weight decay 5e-4, different initial weights and orders of the data."""
    seeds = [task.seed + OTHER_MEMBER * member for member in range(MEMBERS)]
    return [train(task, decay=USUAL, seed=seed, **options) for seed in seeds]


def run_ensemble(task: Task) -> Result:
    """Return the mean probabilities of several networks with weight decay 5e-4."""
    with Clock() as clock:
        networks = train_members(task)
    x, y = task.data.test
    log_probs = torch.stack([network.outputs(x).double().log_softmax(1) for network in networks])
    columns = metrics(log_probs.logsumexp(0) - math.log(MEMBERS), y)
    return columns | {"seconds": clock.seconds, "decay": USUAL}


class Batches(Sampler[Tensor]):
    """Batches of nearly equal size in a new order in each epoch. ``fit`` has the same."""

    def __init__(self, num_data: int, batch_size: int, seed: int) -> None:
        self._num_data, self._count = num_data, -(-num_data // batch_size)
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(self._num_data, generator=self._generator)
        return iter(order.tensor_split(self._count))


def train_laplace(task: Task, **rounds: Any) -> tuple[Any, Fitted]:
    """Return a training of laplace-torch, with the weights of the best log evidence."""
    from laplace import marglik_training  # pyright: ignore[reportMissingImports]

    data, model = task.data, task.network()
    x, y = data.train
    schedule = plan_schedule(task.schedule or SCHEDULE, len(x))
    rates = plan_optimization(Optimization(), make_likelihood(data.likelihood), "layerwise", len(x))
    batches = Batches(len(x), schedule.batch_size, task.seed)
    steps = planned(schedule.epochs) * len(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        laplace, model, _, _ = marglik_training(
            model,
            DataLoader(TensorDataset(x, y), sampler=batches, batch_size=None),
            likelihood="classification" if data.is_classification else "regression",
            hessian_structure="kron",
            optimizer_kwargs={"lr": rates.lr},
            scheduler_cls=torch.optim.lr_scheduler.CosineAnnealingLR,
            scheduler_kwargs={"T_max": steps, "eta_min": rates.lr_min},
            n_epochs=planned(schedule.epochs),
            prior_structure="layerwise",
            **(LAPLACE | rounds),
        )
    names = [name for name, _ in model.named_parameters()]
    precisions = laplace.prior_precision.detach().tolist()
    decay = {name: value / len(x) for name, value in zip(names, precisions, strict=True)}
    noise = None if data.is_classification else float(laplace.sigma_noise)
    return laplace, Fitted(model, noise, decay)


def run_laplace(task: Task) -> Result:
    """Return the MAP prediction of laplace-torch's training."""
    with Clock() as clock:
        _, fitted = train_laplace(task)
    return judged(task, fitted) | {"seconds": clock.seconds, "decay": fitted.decay}


def run_laplace_posterior(task: Task) -> list[Result]:
    """Return MAP and posterior predictions of laplace-torch for a regression."""
    with Clock() as clock:
        laplace, fitted = train_laplace(task)
    columns = judged(task, fitted) | {"seconds": clock.seconds, "decay": fitted.decay}
    x, y = task.data.test
    assert fitted.noise is not None
    with clock:
        mean, variance = laplace(x, pred_type="glm", link_approx="probit")
    deviation = (variance[:, :, 0] + fitted.noise**2).sqrt()
    mean_log_prob = float(torch.distributions.Normal(mean, deviation).log_prob(y).double().mean())
    return [columns, columns | {"log_likelihood": mean_log_prob, "seconds": clock.seconds}]


# Each returns the columns of its row, or of all rows that share it, in their order.
WAYS: dict[str, Callable[[Task], Any]] = {
    "map-5e-4": run_usual,
    "grid": run_grid,
    "grid-5fold": run_folds,
    "tpe-12": run_tpe,
    "tpe-36": run_tpe,
    "temperature": run_temperature,
    "early stopping": run_early,
    "ensemble-3": run_ensemble,
    "laplace-torch": run_laplace,
    "kfac-400-1": partial(run_learned, estimator="kfac-400-1"),
    "default": run_learned,
    "choice": partial(run_learned, validation_fraction=HELD_OUT_SHARE),
}
TABLE_WAYS: dict[str, Callable[[Task], Any]] = {
    "early stopping": run_early,
    "grid": run_grid,
    "laplace-torch": run_laplace_posterior,
    f"laplace-torch{BY_POSTERIOR}": run_laplace_posterior,
    "map-noise": partial(
        run_learned, estimator=None, optimization=Optimization(noise_on_loss=True)
    ),
    "default": run_posterior,
    f"default{BY_POSTERIOR}": run_posterior,
    "choice": (chosen := partial(run_posterior, validation_fraction=HELD_OUT_SHARE)),
    f"choice{BY_POSTERIOR}": chosen,
}
# The methods that others are compared with, split by split.
REFERENCES = ("map-5e-4", "default")
TABLE_REFERENCES = ("early stopping", f"default{BY_POSTERIOR}")


def random_split(data: DataSet, seed: int) -> DataSet:
    """Return another 80/20 split of all images, standardized by its training part."""
    (x, y), (test_x, test_y) = data.train, data.test
    x, y = torch.cat([x, test_x]), torch.cat([y, test_y])
    train, test = map(torch.from_numpy, stratified_split(y.numpy(), VALIDATION, seed))
    scale = Scaling.of(x[train].flatten())  # one channel
    return replace(data, train=(scale(x[train]), y[train]), test=(scale(x[test]), y[test]))


@lru_cache(maxsize=1)
def read(name: str, seed: int, data_dir: str | None) -> DataSet:
    """Return the data of a seed."""
    if name in UCI:
        return load(f"uci/{name}", data_dir, seed=seed)
    data = load(name.partition("-")[0], data_dir, subset=IMAGES[name][1], seed=seed)
    return random_split(data, seed) if name == "digits" else data


def make_task(name: str, seed: int, data_dir: str | None) -> Task:
    """Return the split of a seed with its network."""
    data = read(name, seed, data_dir)
    if name in UCI:
        return Task(data, "mlp", seed, {"hidden": HIDDEN})
    return Task(data, IMAGES[name][0], seed, {})


def ways_of(name: str) -> dict[str, Callable[[Task], Any]]:
    """Return the rows of a data set."""
    return TABLE_WAYS if name in UCI else WAYS


def columns_of(ways: Mapping[str, Callable[[Any], Any]], task: Task, row: str) -> dict[str, Result]:
    """Return the columns of a row and of the rows that share its training."""
    shared_rows = [other for other, way in ways.items() if way is ways[row]]
    columns = ways[row](task)
    return dict(zip(shared_rows, columns if len(shared_rows) > 1 else [columns], strict=True))


def run_way(task: Task, row: str) -> dict[str, Result]:
    """Return the complete rows of a method."""
    ways = WAYS if task.data.is_classification else TABLE_WAYS
    num_data = len(task.data.train[0])
    common = {
        "seed": task.seed,
        "num_data": num_data,
        "epochs": plan_schedule(SCHEDULE, num_data).epochs,
        "threads": torch.get_num_threads(),
    }
    return {
        name: dict.fromkeys(COLUMNS) | {"row": name} | common | columns
        for name, columns in columns_of(ways, task, row).items()
    }


def missing_runs(options: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Yield data set, seed and row of each missing run, in the order of the runs."""
    for name in options.sets:
        results = Results(path_of(options.results, name), COLUMNS)
        for seed in SEEDS[name] if options.seeds is None else options.seeds:
            for row in ways_of(name):
                if (options.rows is None or row in options.rows) and not results.has(row, seed):
                    yield name, seed, row


def path_of(results: Path, name: str) -> Path:
    """Return the file of a data set's runs."""
    return results / f"rivals_{name}.csv"


def likelihoods_of(runs: list[Result], name: str) -> dict[int, float]:
    """Return the test log likelihood of a method by seed."""
    return {run["seed"]: run["log_likelihood"] for run in runs if run["row"] == name}


def difference(runs: list[Result], row: str, reference: str) -> str:
    """Return the gain of a row over a reference, for the seeds that both have."""
    likelihoods, other = likelihoods_of(runs, row), likelihoods_of(runs, reference)
    shared = sorted(likelihoods.keys() & other.keys())
    if row == reference or not shared:
        return "–"
    ahead, error = mean_and_error([likelihoods[seed] - other[seed] for seed in shared])
    return f"{'+' if ahead >= 0 else ''}{with_error(ahead, error, 3)}"


def table_of(name: str, runs: list[Result]) -> list[str]:
    """Return lines of the means over the seeds, a row for each method."""
    table = name in UCI
    references = TABLE_REFERENCES if table else REFERENCES
    rows = summaries(runs, list(ways_of(name)), ("seconds", *METRICS))
    baseline = next((r["seconds"] for r in rows if r["row"] == references[0]), math.nan)
    lines = []
    for r in rows:

        def cell(key: str, digits: int, factor: float = 1.0, r: Result = r) -> str:
            return with_error(factor * r[key], factor * r[f"{key}_error"], digits)

        judged = [cell("rmse", 3)]
        if not table:
            judged = [cell("accuracy", 1, 100), cell("ece", 3), cell("scaled", 3)]
        cells = [
            *([name] if table else []),
            LABELS.get(r["row"], r["row"]),
            cell("log_likelihood", 3),
            *(difference(runs, r["row"], reference) for reference in references),
            *judged,
            f"{r['seconds']:.3g}",
            "–" if math.isnan(baseline) else f"{r['seconds'] / baseline:.1f}",
            r["seed_spans"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def head_of(table: bool) -> list[str]:
    """Return the header of an image table or of the UCI table."""
    references = TABLE_REFERENCES if table else REFERENCES
    judged = ["RMSE"] if table else ["accuracy, %", "calibration error", "rescaled log likelihood"]
    names = [LABELS.get(reference, reference) for reference in references]
    cells = [
        *(["data set"] if table else []),
        "method",
        "test log likelihood",
        *(f"gain over {name}" for name in names),
        *judged,
        "seconds",
        f"time, × {names[0]}",
        "seeds",
    ]
    return [f"| {' | '.join(cells)} |", "|" + "---|" * len(cells)]


def draw(
    runs_by_set: Mapping[str, list[Result]],
    references: Sequence[str],
    rows: Iterable[str],
    path: Path,
    labels: Mapping[str, str] = LABELS,
) -> None:
    """Draw the gain in test log likelihood over the time that each method took.

    Lines show the best trial so far of a search, points the end of each method. Hollow points are
    predictions of posteriors. Gains are differences to a reference, seed by seed. A point outside
    of the panel is left out.

    Args:
        runs_by_set: Runs of each data set, a panel for each.
        references: Row of each data set that the gains refer to.
        rows: Rows that may be drawn.
        path: Path of the PNG.
        labels: Names of rows in the figure. Default: the names of this comparison.
    """
    columns = min(2, len(runs_by_set))
    height = -(-len(runs_by_set) // columns)
    figure = new_figure(5.2 * columns, 3.9 * height)
    rows = list(dict.fromkeys(rows))
    panels: list[tuple[Any, list[tuple[str, float, float, str]]]] = []
    for place, (name, runs) in enumerate(runs_by_set.items()):
        axes, reference = figure.add_subplot(height, columns, place + 1), references[place]
        named = labels.get(reference, reference)
        title = TITLES.get(name, name)
        decorate(
            axes, title, "seconds, searches included", f"gain over {named}\n(nats per example)"
        )
        levels = likelihoods_of(runs, reference)
        ends, points = [0.0], []
        for row in rows:
            row_runs = [run for run in runs if run["row"] == row and run["seed"] in levels]
            if not row_runs:
                continue
            method = row.removesuffix(BY_POSTERIOR)
            color = COLORS[method]
            mean, error = mean_and_error(
                [run["log_likelihood"] - levels[run["seed"]] for run in row_runs]
            )
            error = 0.0 if math.isnan(error) else error
            seconds = fmean(run["seconds"] for run in row_runs)
            marker, size = ("*", 12) if method == "default" else ("o", 6)
            style = {"color": color, "marker": marker, "markersize": size, "elinewidth": 1.2}
            if row != method:
                style |= {"markerfacecolor": LIGHT.paper}
            axes.errorbar(seconds, mean, error, linestyle="", zorder=3, **style)
            ends += [mean - error, mean + error]
            points.append((labels.get(row, row), seconds, mean, color))
            if row_runs[0]["trace"] and row != "tpe-12":  # its trials are the first of tpe-36
                traces = torch.tensor([run["trace"] for run in row_runs], dtype=torch.float64)
                traces[:, :, 1] -= torch.tensor([levels[run["seed"]] for run in row_runs])[:, None]
                axes.plot(*traces.mean(0).T.tolist(), color=color, linewidth=1.2, alpha=0.7)
        lowest, highest = min(end for end in ends if end >= LOWEST_SHOWN), max(ends)
        margin = 0.12 * (highest - lowest) or 0.01
        axes.set_ylim(lowest - margin, highest + margin)
        axes.axhline(0.0, color=LIGHT.muted, linewidth=0.8)
        axes.set_xscale("log")
        left, right = min(point[1] for point in points), max(point[1] for point in points)
        axes.set_xlim(left / 2.2, right * 1.6)
        plain_ticks(axes.xaxis)
        arrow = {"arrowstyle": "-|>", "color": LIGHT.muted, "linewidth": 1.2}
        axes.annotate(
            "better",
            xy=(0.015, 0.98),
            xytext=(0.06, 0.91),
            textcoords="axes fraction",
            xycoords="axes fraction",
            fontsize=8,
            color=LIGHT.muted,
            arrowprops=arrow,
        )
        panels.append((axes, [p for p in points if p[2] >= lowest - margin]))
    figure.draw_without_rendering()  # now all positions are known
    for axes, points in panels:
        _name_points(axes, points)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _name_points(axes: Any, points: Sequence[tuple[str, float, float, str]]) -> None:
    """Write the name of each point next to it, clear of the lines and within the panel."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    paths = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
    bars = [bar for errors in axes.collections for bar in errors.get_segments()]
    of_lines = [text.get_window_extent() for text in axes.texts]
    for path in [*paths, *map(axes.transData.transform, bars)]:
        corners = torch.as_tensor(path)
        for begin, end in zip(corners, corners[1:], strict=False):
            along = begin + torch.linspace(0, 1, 60, dtype=begin.dtype)[:, None] * (end - begin)
            of_lines += [Bbox.from_extents(x - 1, y - 1, x + 1, y + 1) for x, y in along.tolist()]
    inside = axes.get_window_extent()
    places = [
        (side, sign * right, up)
        for right, ups in ((8, (-3, 7, -13)), (14, (14, -20)), (25, (24, -30, 40, -46, 56, -62)))
        for up in ups
        for side, sign in (("right", -1), ("left", 1))
    ]
    name_points(
        axes,
        points,
        places,
        half=5,
        occupied=of_lines,
        fits=lambda box: inside.x0 <= box.x0 and box.x1 <= inside.x1 + 60,
        path_effects=[withStroke(linewidth=2.5, foreground=LIGHT.paper)],
    )
    to_data = axes.transData.inverted()
    for (_, x, y, color), text in zip(points, axes.texts[-len(points) :], strict=True):
        (across, up), box = axes.transData.transform((x, y)), text.get_window_extent()
        end = min(max(across, box.x0), box.x1), min(max(up, box.y0 + 3), box.y1 - 3)
        if math.dist((across, up), end) > FAR:
            axes.plot(*zip((x, y), to_data.transform(end), strict=True), color=color, linewidth=0.6)


def show(options: argparse.Namespace) -> None:
    """Print the tables of all runs, and insert them into the pages with the figure."""
    runs_by_set = {name: Results(path_of(options.results, name), COLUMNS).read() for name in SEEDS}
    runs_by_set = {name: runs for name, runs in runs_by_set.items() if runs}
    if not runs_by_set:
        raise SystemExit(f"There are no runs in {options.results}.")
    tables = {
        f"rivals {name}": "\n".join([*head_of(False), *table_of(name, runs)])
        for name, runs in runs_by_set.items()
        if name not in UCI
    }
    lines = [
        line for name in UCI if name in runs_by_set for line in table_of(name, runs_by_set[name])
    ]
    if lines:
        tables["rivals uci"] = "\n".join([*head_of(True), *lines])
    for marker, table in tables.items():
        print(f"{marker}\n{table}\n")
        for page in options.pages:
            insert(page, marker, table)
    shown = {name: runs_by_set[name] for name in FIGURE_SETS if name in runs_by_set} or runs_by_set
    references = [(TABLE_REFERENCES if name in UCI else REFERENCES)[0] for name in shown]
    if options.pages:
        draw(shown, references, [*WAYS, *TABLE_WAYS], options.results.parent / FIGURE)


def check_extras(rows: Sequence[str]) -> None:
    """Raise an error for rows whose package is not installed."""
    for row in rows:
        module, package = EXTRAS.get(row, ("", ""))
        if module and find_spec(module) is None:
            raise SystemExit(f"{row} needs {package}. Install it with pip, or use other --rows.")


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and print the tables."""
    parser = make_parser(__doc__, seeds=None)
    rows = list(dict.fromkeys([*WAYS, *TABLE_WAYS]))
    parser.add_argument("--sets", nargs="+", choices=list(SEEDS), default=list(SEEDS))
    parser.add_argument("--rows", nargs="+", choices=rows, default=None)
    options = parse(parser, arguments)
    left = list(missing_runs(options))
    check_extras([row for _, _, row in left])
    for name, seed, row in left:
        results = Results(path_of(options.results, name), COLUMNS)
        if results.has(row, seed):  # some methods return two rows
            continue
        for run in run_way(make_task(name, seed, options.data_dir), row).values():
            results.add(run)
            print({key: run[key] for key in ("row", "seed", *METRICS, "seconds")}, flush=True)
    show(options)


if __name__ == "__main__":
    main()
