"""How far does float32 move a log-determinant, and does evigrad's own estimate of that agree?

MiniNet on 1,000 MNIST digits and digitsnet on scikit-learn's digits, at their initial weights and
after 100 epochs of Adam. Each row has one estimator and one prior precision. It compares the
log-determinant of a block in float32 with the one in float64. ``estimated`` is the estimate of the
rounding that decides whether something is repeated in float64, and ``ratio`` is this estimate
divided by the true error. Errors are in nats, and the error of the gradient in the precisions is
relative.

    python benchmarks/rounding.py --data-dir DIR --csv docs/results/rounding.csv
"""

import argparse
import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measure import NETWORKS, machine, network_and_data, train, write_csv
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.core.curvature import kfac, linalg
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

ESTIMATORS = ("kfac-N-C", "kfac-100-1", "kfac-100-C", "ntk-100-1", "ntk-100-C", "full-20-C")
PRECISIONS = (100.0, 10.0, 1.0, 0.1, 0.01, 0.001)
EPOCHS, BATCH, WEIGHT_DECAY = 100, 100, 1e-3


def evaluated(
    model: nn.Module, x: Tensor, y: Tensor, estimator: str, precision: float
) -> tuple[float, Tensor, float]:
    """The block's log-determinant, the gradient in the precisions, and the estimated rounding."""
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise", precision=precision),
        estimator=estimator,
        num_data=len(x),
        generator=0,
    )
    block = next(iter(evidence.blocks((x, y))))
    estimated = 0.0

    def tolerate(nats: float, value: float) -> bool:
        nonlocal estimated
        del value
        estimated += nats
        return True

    def tolerate_kfac(nats: float, value: float) -> bool:
        return nats < math.inf and tolerate(nats, value)

    # The cheap bounds that precede the estimates are made too large to be used.
    with (
        mock.patch.object(linalg, "TOLERATED_NATS", -math.inf),
        mock.patch.object(linalg, "is_tolerated", tolerate),
        mock.patch.object(kfac, "is_tolerated", tolerate_kfac),
        mock.patch.object(kfac, "kronecker_rounding_rate", lambda *_: math.inf),
    ):
        estimate = evidence.backward(block)
    gradients = [p.grad for p in evidence.hyperparameters().values() if p.grad is not None]
    gradient = torch.cat([g.flatten().double() for g in gradients])
    return estimate.log_det / block.scale, gradient, estimated


def rows_of(network: str, data_dir: Path | None) -> Iterator[dict[str, Any]]:
    """All cases of a network."""
    model, x, y = network_and_data(network, data_dir)
    for weights in ("initial", "trained"):
        if weights == "trained":
            train(model, x, y, EPOCHS, BATCH, WEIGHT_DECAY)
        for estimator in ESTIMATORS:
            for precision in PRECISIONS:
                results = []
                for dtype in (torch.float32, torch.float64):
                    copy = deepcopy(model).to(dtype)
                    results.append(evaluated(copy, x.to(dtype), y, estimator, precision))
                (narrow, gradient, estimated), (wide, exact, _) = results
                yield {
                    "network": network,
                    "weights": weights,
                    "estimator": estimator,
                    "precision": precision,
                    "log_det": f"{wide:.5g}",
                    "error": f"{abs(narrow - wide):.1e}",
                    "estimated": f"{estimated:.1e}",
                    "ratio": f"{estimated / max(abs(narrow - wide), 1e-300):.2g}",
                    "tolerated": linalg.is_tolerated(estimated, wide),
                    "gradient_error": f"{float((gradient - exact).norm() / exact.norm()):.1e}",
                    "machine": machine(),
                }


def main() -> None:
    """Measure every network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    rows = []
    for network in arguments.networks:
        for row in rows_of(network, arguments.data_dir):
            rows.append(row)
            print({key: value for key, value in row.items() if key != "machine"}, flush=True)
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
