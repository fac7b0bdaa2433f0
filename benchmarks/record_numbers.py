"""Records every number that must survive a change of the code, and compares two records.

For every estimator name, root, likelihood, prior and structure on a few small networks: value and
gradient of several draws from a fixed generator, of kept passes and of micro-batches, in float64.

    python benchmarks/record_numbers.py before.json          # at the old revision
    python benchmarks/record_numbers.py after.json --against before.json

It takes about five minutes. Numbers are compared relative to the largest of their estimate; what
exceeds ``--tolerance`` is listed, and the exit status is 1.
"""

import argparse
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import evigrad
from evigrad import Memory
from evigrad.errors import EvigradError, EvigradWarning
from evigrad.estimators import CURVATURES, ROOTS, STRUCTURES, EstimatorSpec
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from evigrad.priors import GaussianPrior

NUM_DATA, NUM_OUTPUTS, DRAWS = 8, 3, 2


class Gated(nn.Module):
    """A perceptron whose gate is a hyperparameter of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, NUM_OUTPUTS)
        self.gate = nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * torch.sigmoid(self.gate))


class Attentive(nn.Module):
    """Attention and a parameter outside of layers: the general way to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.shift = nn.Parameter(torch.randn(4) / 2)
        self.last = nn.Linear(4, NUM_OUTPUTS)
        self.gate = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        h = x.unflatten(1, (2, 2)).repeat(1, 1, 2) * self.gate.exp()
        h = self.attention(h, h, h, need_weights=False)[0]
        return self.last(torch.sin(h + self.shift).mean(1))


def convolutional() -> nn.Module:
    """A convolutional network under a learned affine augmentation."""
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, NUM_OUTPUTS)
    )
    return Averaged(network, AffineInvariance(), num_samples=2)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "gated": (Gated, (4,), "gate"),
    "attentive": (Attentive, (4,), "gate"),
    "convolutional": (convolutional, (1, 4, 4), "invariance"),
}
LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "categorical": Categorical,
    "gaussian": lambda: Gaussian(0.5),
    "gaussians": lambda: Gaussian([0.5, 0.7, 0.9]),
    "bernoulli": Bernoulli,
}
PRIORS: dict[str, Callable[[], GaussianPrior]] = {
    "layerwise": lambda: GaussianPrior("layerwise", 0.7),
    "scalar": lambda: GaussianPrior("scalar", 0.7),
    "diagonal": lambda: GaussianPrior("diagonal", 0.7),
    "groups": lambda: GaussianPrior({"last": ["last"], "rest": ["first"]}, {"last": 2, "rest": 1}),
}
USUAL = {"model": "gated", "likelihood": "categorical", "prior": "layerwise", "root": ""}


def names() -> list[str]:
    """Every name of the grammar with subsets of 3 and of all data."""
    found = []
    curvatures = ("", *CURVATURES[1:])
    for parts in itertools.product(
        STRUCTURES, ("3", "N"), ("1", "2", "C", "rows"), ("", "iid", "grouped", "anchored"),
        curvatures,
    ):  # fmt: skip
        name = "-".join(part for part in parts if part)
        try:
            EstimatorSpec.parse(name)
        except EvigradError:
            continue
        found.append(name)
    return found


def cases() -> Iterator[dict[str, str]]:
    """What is recorded: each axis in full against the usual values of the others."""
    axes = {
        "model": tuple(MODELS),
        "likelihood": tuple(LIKELIHOODS),
        "prior": tuple(PRIORS),
        "root": ROOTS,
    }
    seen = set()
    for name in names():
        for axis, values in axes.items():
            for value in values:
                case = {"estimator": name, **USUAL, axis: value}
                if (key := json.dumps(case)) not in seen:
                    seen.add(key)
                    yield case


def data_of(likelihood: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, float64."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_DATA, *shape, generator=generator, dtype=torch.float64)
    if likelihood == "categorical":
        return x, torch.randint(NUM_OUTPUTS, (NUM_DATA,), generator=generator)
    y = torch.randn(NUM_DATA, NUM_OUTPUTS, generator=generator, dtype=torch.float64)
    return x, (y > 0).double() if likelihood == "bernoulli" else y


def recorded(case: dict[str, str], micro_batch: int | None) -> list[list[float]] | str:
    """Numbers of each draw: the estimate's, then the gradient; or the error's kind."""
    make, shape, hyperparameter = MODELS[case["model"]]
    torch.manual_seed(0)
    model = make().double()
    data = data_of(case["likelihood"], shape)
    try:
        evidence = evigrad.Evidence(
            model,
            LIKELIHOODS[case["likelihood"]](),
            PRIORS[case["prior"]](),
            estimator=case["estimator"],
            num_data=NUM_DATA,
            hyperparameters=[hyperparameter],
            root=case["root"] or None,
            memory=Memory(micro_batch=micro_batch),
            temperature=0.8,
            generator=3,
        )
        found = []
        for block in evidence.blocks(data).take(DRAWS):
            found.append(_numbers(evidence, evidence.backward(block)))
        learned = ["prior"]
        try:
            kept = evidence.collect(next(iter(evidence.blocks(data).take(1))), wrt=learned)
        except EvigradError as error:
            return [*found, [float(len(type(error).__name__))]]
        for _ in range(2):
            found.append(_numbers(evidence, evidence.backward(kept, wrt=learned)))
            with torch.no_grad():
                for name, p in evidence.hyperparameters().items():
                    if name.startswith("prior."):
                        p += 0.1
    except EvigradError as error:
        return type(error).__name__
    return found


def _numbers(evidence: evigrad.Evidence, estimate: evigrad.Estimate) -> list[float]:
    """The estimate and the gradients, which are then cleared."""
    numbers = [estimate.log_evidence, estimate.log_likelihood, estimate.log_prior, estimate.log_det]
    for p in evidence.hyperparameters().values():
        if p.grad is not None:
            numbers += p.grad.flatten().tolist()
            p.grad = None
    return numbers


def difference(new: list[list[float]] | str, old: list[list[float]] | str) -> float:
    """Largest difference relative to the largest number of an estimate; infinite where unlike."""
    if isinstance(new, str) or isinstance(old, str):
        return 0.0 if new == old else math.inf
    if [len(n) for n in new] != [len(n) for n in old]:
        return math.inf
    worst = 0.0
    for a, b in zip(new, old, strict=True):
        scale = max(1.0, *map(abs, b))
        worst = max(worst, *(abs(p - q) / scale for p, q in zip(a, b, strict=True)))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-12)
    options = parser.parse_args()
    warnings.simplefilter("ignore", EvigradWarning)
    torch.set_num_threads(1)
    record = {}
    for case in cases():
        alone = all(case[axis] == value for axis, value in USUAL.items() if axis != "model")
        for micro_batch in (None, 2) if alone else (None,):
            record[json.dumps({**case, "micro_batch": micro_batch})] = recorded(case, micro_batch)
    options.file.write_text(json.dumps(record))
    refused = sum(isinstance(numbers, str) for numbers in record.values())
    print(f"{len(record)} records, {refused} of them refusals, in {options.file}")
    if options.against is None:
        return
    old = json.loads(options.against.read_text())
    unlike = [
        (key, difference(record[key], old[key]) if key in record and key in old else math.inf)
        for key in sorted(record.keys() | old.keys())
    ]
    too_far = [(key, by) for key, by in unlike if not by <= options.tolerance]
    for key, by in too_far:
        print(f"{by:.1e}  {key}")
    print(f"largest difference {max(by for _, by in unlike):.1e}, {len(too_far)} beyond tolerance")
    raise SystemExit(bool(too_far))


if __name__ == "__main__":
    main()
