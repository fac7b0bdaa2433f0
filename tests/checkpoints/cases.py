"""What the stored checkpoints are of: evidences after some steps, and runs that stopped."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, Memory, Optimization, Schedule
from evigrad.invariances import AffineInvariance, Averaged, InputScale
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.priors import GaussianPrior

NUM_DATA, FEATURES, OUTPUTS = 10, 4, 3
Numbers = list[list[float]]


def data(*shape: int, targets: str = "labels") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, *(shape or (FEATURES,)), generator=generator).double()
    if targets == "labels":
        return x, torch.arange(NUM_DATA) % OUTPUTS
    if targets == "positions":
        x, y = (torch.randint(OUTPUTS, (NUM_DATA, 3), generator=generator) for _ in range(2))
        y[::3, 1] = -100
        return x, y
    return x, torch.randn(NUM_DATA, OUTPUTS, generator=generator).double()


class Tagger(nn.Module):
    """Scores at each place of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(OUTPUTS, 4), nn.Linear(4, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).cumsum(1).tanh())


def scaled() -> nn.Module:
    return nn.Sequential(
        InputScale(FEATURES), nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)
    )


def averaged() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, OUTPUTS))
    return Averaged(network, AffineInvariance(), num_samples=2)


def grouped() -> GaussianPrior:
    groups = {"first": ["1"], "last": ["3"]}
    return GaussianPrior(groups, learnable={"first": False}, mean={"3.bias": "initial"})


AUTOMATIC = Memory(micro_batch="auto", memory_budget=4000)
NETWORK: dict[str, Any] = {"build": scaled, "likelihood": Categorical, "data": data}
NETWORK |= {"prior": lambda: GaussianPrior("layerwise", 0.7), "hyperparameters": ["0"]}

# Name -> how to make the evidence of a state, and its data.
EVIDENCES: dict[str, dict[str, Any]] = {
    "anchored": NETWORK | {"estimator": "ntk-6-rows-anchored", "memory": AUTOMATIC},
    "averaged": NETWORK
    | {
        "build": averaged,
        "estimator": "kfac-3-1",
        "hyperparameters": ["invariance"],
        "memory": AUTOMATIC,
        "data": lambda: data(1, 4, 4),
    },
    "noisy": NETWORK
    | {
        "estimator": "blockdiag-4-1",
        "prior": grouped,
        "likelihood": lambda: Gaussian([0.5, 0.6, 0.7]),
        "data": lambda: data(targets="numbers"),
    },
    "positions": NETWORK
    | {
        "build": Tagger,
        "estimator": "diag-4-2-iid",
        "hyperparameters": [],
        "data": lambda: data(targets="positions"),
    },
}


def evidence_of(name: str, seed: int) -> Evidence:
    """A new evidence of the kind, whose weights and draws are those of the seed."""
    options = dict(EVIDENCES[name])
    build, y = options.pop("build"), options.pop("data")()[1]
    likelihood: Likelihood = options.pop("likelihood")()
    prior: GaussianPrior = options.pop("prior")()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().double()
    count = int((y != -100).sum()) if y.ndim > 1 and not y.is_floating_point() else len(y)
    return Evidence(model, likelihood, prior, num_data=count, generator=seed, **options)


def steps(evidence: Evidence, x: Tensor, y: Tensor, count: int) -> Numbers:
    """Steps of weights and hyperparameters.

    The numbers are the terms that a draw's control variate is no part of, and all parameters.
    """
    numbers: Numbers = []
    for block in evidence.blocks((x, y)).take(count):
        weights = evidence.weights().values()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of the transforms of a training pass
            loss = evidence.map_loss(x, y, indices=torch.arange(len(x)))
        gradients = torch.autograd.grad(loss, list(weights))
        estimate = evidence.backward(block)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight -= 0.1 * gradient
            for parameter in evidence.hyperparameters().values():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        numbers.append([estimate.log_likelihood, estimate.log_prior, *estimate.entropies])
    return [*numbers, *values_of(evidence)]


def values_of(evidence: Evidence) -> Numbers:
    """Weights, hyperparameters, and the next draw of the evidence."""
    parameters = [*evidence.weights().values(), *evidence.hyperparameters().values()]
    draw = torch.randint(2**31, (), generator=evidence.generator)
    return [*(p.detach().double().flatten().tolist() for p in parameters), [float(draw)]]


# ------------------------------------------------------------ runs

EPOCHS, STOPPED = 5, 3  # in the third epoch, so that the checkpoint is of the second
SCHEDULE: dict[str, Any] = {"batch_size": 4, "burn_in": 1, "every": 1, "steps": 2, "eval_every": 2}

RUNS: dict[str, dict[str, Any]] = {
    "anchored": {"estimator": "ntk-6-rows-anchored", "hyperparameters": ["0"]},
    "kfac": {
        "estimator": "kfac-4-C",
        "likelihood": "gaussian",
        "memory": AUTOMATIC,
        "optimization": Optimization(prior_update="adam"),
    },
}


def run(name: str, folder: Any, seed: int, stop_in: int | None = None, resume: bool = False) -> Any:
    """Train, from the start or from the folder's checkpoint; stop in an epoch by an error."""

    def stop(row: Mapping[str, Any]) -> None:
        if row["epoch"] == stop_in:
            raise Stopped

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = scaled().double()
    targets = "numbers" if RUNS[name].get("likelihood") == "gaussian" else "labels"
    schedule = Schedule(epochs=EPOCHS, checkpoint_every=1, **SCHEDULE)
    return evigrad.fit(
        model,
        data(targets=targets),
        schedule=schedule,
        test=data(targets=targets),
        run_dir=folder,
        resume=resume,
        progress=False,
        callbacks=[stop],
        **RUNS[name],
    )


class Stopped(BaseException):
    """Ends a run as a signal does."""


# A run of the command line, which stopped in the third epoch too.
COMMAND = (
    "train --data digits --subset 30 --test-subset 20 --model cnn --width 2 --epochs 5 --burn-in 1"
    " --estimator ntk-20-rows-anchored --every 1 --steps 2 --eval-every 2 --checkpoint-every 1"
    " --no-progress --no-figures --device cpu --evaluate-with ntk-20-C"
).split()
