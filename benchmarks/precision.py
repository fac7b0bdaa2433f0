"""Measure the errors of value and gradient at lower precision, relative to float64.

A network is trained for a few epochs on real digits, or stays at its initial weights on noise
(WRN-16-4). It has the ranges of an affine invariance to learn. "float32" is the default. "bfloat16
passes" runs forward and backward passes under autocast, with kernels and factors in float32.
"bfloat16 rows" keeps the rows of ntk in half of the memory, with products in float32. Errors are
relative to the log-determinant, and to the norms of the gradients in the log precisions and in the
ranges.

    python benchmarks/precision.py --csv docs/results/precision.csv
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import machine, seconds, train, write_csv
from torch import Tensor, nn

from evigrad import Evidence, Memory
from evigrad.data import load
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

VARIANTS: dict[str, dict[str, Any]] = {
    "float64": {},
    "float32": {},
    "bfloat16 passes": {"memory": Memory(autocast=torch.bfloat16)},
    "bfloat16 rows": {"memory": Memory(rows_dtype=torch.bfloat16)},
}
EPOCHS, BATCH = 5, 50


def network(name: str, num_data: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network and data for it."""
    if name == "mininet":
        data = load("mnist5k", subset=1000)
        model = make_model(name, data.input_shape, data.num_outputs, seed=0)
        x, y = data.train
        train(model, x, y, EPOCHS, BATCH)
        return model, x[:num_data], y[:num_data]
    model = make_model(name, (3, 32, 32), 10, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # Fixup starts with zeros, which would make most rows zero
        for p in model.parameters():
            if not p.any():
                p.copy_(0.05 * torch.randn(p.shape, generator=generator))
    x = torch.rand(num_data, 3, 32, 32, generator=generator)
    return model, x, torch.randint(10, (num_data,), generator=generator)


def measure(model_name: str, structure: str, num_data: int, repeats: int) -> list[dict[str, str]]:
    """Return the errors of all variants on one block with equal noise."""
    by_variant: dict[str, tuple[float, dict[str, Tensor], float]] = {}
    model, x, y = network(model_name, num_data)
    for variant, settings in VARIANTS.items():
        if variant == "bfloat16 rows" and structure != "ntk":
            continue
        dtype = torch.float64 if variant == "float64" else torch.float32
        averaged = Averaged(model, AffineInvariance(), num_samples=2).to(dtype)
        evidence = Evidence(
            averaged,
            Categorical(),
            GaussianPrior("layerwise", precision=10.0),
            estimator=f"{structure}-{num_data}-1",
            num_data=50_000,
            hyperparameters=["invariance"],
            generator=0,
            **settings,
        )
        inputs = x.to(dtype)
        estimate = evidence.backward(inputs, y)
        gradients = {}
        for name, parameter in evidence.hyperparameters().items():
            assert parameter.grad is not None
            gradients[name] = parameter.grad.double()
        taken = seconds(lambda e=evidence, i=inputs: e.backward(i, y), repeats, warmup=3)
        by_variant[variant] = estimate.log_det, gradients, taken
    log_det, exact, _ = by_variant.pop("float64")
    rows = []
    for variant, (value, gradients, taken) in by_variant.items():
        errors = {name: gradients[name] - exact[name] for name in exact}
        rows.append(
            {
                "model": model_name,
                "structure": structure,
                "variant": variant,
                "log-determinant": f"{abs(value / log_det - 1):.1e}",
                "gradient_of_precisions": _relative(errors, exact, "prior."),
                "gradient_of_ranges": _relative(errors, exact, "model."),
                "seconds_over_float32": f"{taken / by_variant['float32'][2]:.2f}",
                "machine": machine(),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _relative(errors: dict[str, Tensor], exact: dict[str, Tensor], prefix: str) -> str:
    names = [name for name in exact if name.startswith(prefix)]
    error = torch.cat([errors[name].flatten() for name in names]).norm()
    return f"{float(error / torch.cat([exact[name].flatten() for name in names]).norm()):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["mininet", "wrn16-4"])
    parser.add_argument("--data", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for model_name in arguments.models:
        for structure in ("ntk", "kfac"):
            rows += measure(model_name, structure, arguments.data, arguments.repeats)
            if arguments.csv:
                write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
