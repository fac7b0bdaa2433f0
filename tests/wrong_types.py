"""Calls with objects of the wrong type, each of which must end in an EvigradError.

Run as a script by ``test_evidence_errors``: the checker of annotations, which the tests install,
would refuse these calls before the library sees them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from evigrad import Evidence, EvigradError, Memory, fit
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior

N = 6
X, Y = torch.linspace(-1, 1, 2 * N).reshape(N, 2), torch.arange(N) % 3

WRONGLY: Any = fit
WRONG_MEMORY: Any = Memory


def build(estimator: Any = "ntk-4-1", **kwargs: Any) -> Any:
    parts: dict[str, Any] = {
        "model": nn.Linear(2, 3),
        "likelihood": Categorical(),
        "prior": GaussianPrior(),
        "num_data": N,
        **kwargs,
    }
    model, likelihood, prior = (parts.pop(n) for n in ("model", "likelihood", "prior"))
    return Evidence(model, likelihood, prior, estimator=estimator, **parts)


CALLS: dict[str, Callable[[], Any]] = {
    "a pair for x": lambda: build().estimate((X, Y)),
    "numpy inputs": lambda: build().estimate(X.numpy(), Y),
    "no inputs": lambda: build().estimate(None),
    "batches of three": lambda: build("ntk-N-1").estimate([(X, Y, Y)]),
    "batches that are dicts": lambda: build("ntk-N-1").estimate([{"x": X}]),
    "wrong width": lambda: build().estimate(torch.zeros(N, 5), Y),
    "wrong type": lambda: build(model=nn.Linear(2, 3).double()).estimate(X, Y),
    "integer inputs": lambda: build().estimate(X.long(), Y),
    "map_loss of numpy": lambda: build().map_loss(X.numpy(), Y),
    "map_loss of NaN": lambda: build().map_loss(X * float("nan"), Y),
    "map_loss of the wrong width": lambda: build().map_loss(torch.zeros(N, 5), Y),
    "likelihood by name": lambda: build(likelihood="categorical"),
    "prior by name": lambda: build(prior="layerwise"),
    "learnable a number": lambda: GaussianPrior(learnable=1),  # pyright: ignore
    "learnable of a group a number": lambda: GaussianPrior("scalar", learnable={"all": 0}),  # pyright: ignore
    "learnable a list": lambda: GaussianPrior(learnable=["0.weight"]),  # pyright: ignore
    "learnable noise by name": lambda: Gaussian(learnable={"0": False}),  # pyright: ignore
    "a function as model": lambda: build(model=lambda x: x),
    "no estimator": lambda: build(None),
    "a number as estimator": lambda: build(3),
    "temperature in words": lambda: build(temperature="hot"),
    "no temperature": lambda: build(temperature=None),
    "hyperparameters None": lambda: build(hyperparameters=None),
    "root a number": lambda: build(root=3),
    "no parameter partition": lambda: build(parameter_partition=None),
    "generator in words": lambda: build(generator="x"),
    "gram_dtype of integers": lambda: build(memory=Memory(gram_dtype=torch.int64)),
    "micro_batch in words": lambda: build(memory=WRONG_MEMORY(micro_batch="all")),
    "memory a number": lambda: build(memory=3),
    "an empty state": lambda: build().load_state_dict({}),
    "fit with gram_dtype of integers": lambda: WRONGLY(
        nn.Linear(2, 3),
        (X, Y),
        estimator="ntk-4-1",
        memory=WRONG_MEMORY(gram_dtype="int64"),
        progress=False,
    ),
}

if __name__ == "__main__":
    for name, call in CALLS.items():
        try:
            call()
        except EvigradError as error:
            print(f"ok: {name}: {error}")
        except Exception as error:
            print(f"raw: {name}: {type(error).__name__}: {error}")
        else:
            print(f"accepted: {name}")
