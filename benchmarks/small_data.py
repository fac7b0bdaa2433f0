"""Compare lengths of training on few data: the default, longer training, and added cycles.

Usage: python benchmarks/small_data.py [--data-dir DIR]. Each line is the result of one training.
"""

import argparse
import json
import warnings

import torch
from torch import Tensor, nn

import evigrad
from evigrad.data import load
from evigrad.training import cycles
from evigrad.training.plan import plan
from evigrad.training.settings import Settings

NOISE = 0.3
UCI = (("yacht", nn.ReLU), ("yacht", nn.SiLU), ("boston", nn.ReLU), ("energy", nn.SiLU))


def sinusoid(seed: int, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(count, 1, generator=generator) - 2
    return x, torch.sin(3 * x) + NOISE * torch.randn(count, 1, generator=generator)


def network(inputs: int, activation: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 50), activation(), nn.Linear(50, 1))


def compare(name: str, train, test, activation: type[nn.Module]) -> None:
    planned = plan(Settings(likelihood="gaussian"), len(train[0])).schedule.epochs
    assert planned is not None
    lengths = {
        "first cycle": {"epochs": planned},
        "2.5 times": {"epochs": round(2.5 * planned)},
        **{
            f"cycles from {rate} lr": {"epochs": planned, "max_epochs": 4 * planned, "rate": rate}
            for rate in (0.1, 0.3, 1.0)
        },
    }
    for what, options in lengths.items():
        cycles.LATER_RATE = options.pop("rate", 0.3)
        schedule = evigrad.Schedule(eval_every=0, **options)
        model = network(train[0].shape[1], activation)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = evigrad.fit(
                model, train, "gaussian", test=test, schedule=schedule, progress=False
            )
        predictive = result.evidence.posterior(train)(test[0])
        row = {
            "set": name,
            "training": what,
            "epochs": len(result.history),
            "seconds": round(result.seconds, 1),
            "noise": float(result.evidence.likelihood.noise),
            "plug-in": result.test_metrics["log_likelihood"],
            "posterior": float(predictive.log_prob(test[1]).mean()),
            "warned": any("converged" in str(warning.message) for warning in caught),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir")
    data_dir = parser.parse_args().data_dir
    for seed in range(5):
        train, test = sinusoid(seed, 100), sinusoid(100 + seed, 2000)
        compare(f"sinusoid {seed}", train, test, nn.Tanh)
    for seed in range(2):
        for name, activation in UCI:
            data = load(f"uci/{name}", data_dir, seed=seed)
            compare(f"{name} {activation.__name__} {seed}", data.train, data.test, activation)


if __name__ == "__main__":
    main()
