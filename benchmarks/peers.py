"""What do other packages take for one estimate and its gradient in layerwise precisions?

Both run on the same network, data and prior precisions, in turns in one process. ``ratio`` is the
time of the other package divided by the time of evigrad, so evigrad is faster above 1. The passes
1, 2, 4, 8 and 16, in which evigrad checks its derivatives, do not count.

* ``laplace-torch``: its KFAC of all data, with the default backend (curvlinops).
* ``curvlinops``: only the Kronecker factors of all data, without a determinant or a gradient.
* ``paper``: the code that the authors of the paper published, with their forks of two libraries.
  It is not a dependency: give the folder of a checkout with ``--paper-code``.

    python benchmarks/peers.py --data-dir DIR --csv docs/results/peers.csv
    python benchmarks/peers.py --data-dir DIR --paper-code FOLDER --csv docs/results/peers_paper.csv
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from measure import NETWORKS, machine, network_and_data, paired, write_csv
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from evigrad import Evidence
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

PRECISION = 1.0
# Data that the packages take through the network at once.
BATCH = 250
STRUCTURES = {
    "kfac": "KronLaplace",
    "ntk": "FunctionalLaplace",
    "diag": "DiagLaplace",
    "full": "FullLaplace",
    "blockdiag": "BlockDiagLaplace",
}


class Batches:
    """A loader of one set of tensors, as the paper's code takes it."""

    def __init__(self, x: Tensor, y: Tensor, size: int, num_data: int) -> None:
        self._batches = list(zip(x.split(size), y.split(size), strict=True))
        self.dataset = range(num_data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def by_evigrad(model: nn.Module, x: Tensor, y: Tensor, estimator: str) -> Callable[[], object]:
    """One ``backward`` on the first examples."""
    prior = GaussianPrior("layerwise", precision=PRECISION)
    evidence = Evidence(
        model, Categorical(), prior, estimator=estimator, num_data=len(x), generator=0
    )
    block = next(iter(evidence.blocks((x, y))))
    for _ in range(17):
        evidence.backward(block)
    return lambda: evidence.backward(block)


def by_laplace_torch(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """KFAC of all data: ``fit``, the log marginal likelihood and its gradient."""
    from laplace import Laplace  # pyright: ignore[reportMissingImports]

    logs = torch.full((len(list(model.parameters())),), PRECISION).log().requires_grad_()
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)

    def work() -> None:
        laplace = Laplace(
            model, "classification", subset_of_weights="all", hessian_structure="kron"
        )
        laplace.fit(loader)
        logs.grad = None
        laplace.log_marginal_likelihood(logs.exp()).backward()

    return work


def by_curvlinops(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], object]:
    """KFAC of all data: the Kronecker factors only."""
    from curvlinops import KFACLinearOperator  # pyright: ignore[reportMissingImports]

    batches = [*zip(x.split(BATCH), y.split(BATCH), strict=True)]
    settings: dict[str, Any] = {"fisher_type": "type-2", "check_deterministic": False}

    def work() -> None:
        loss, parameters = nn.CrossEntropyLoss(reduction="sum"), list(model.parameters())
        KFACLinearOperator(model, loss, parameters, batches, **settings).compute_kronecker_factors()

    return work


# Packages that are on the index, by the name of the distribution.
PACKAGES = {"laplace-torch": by_laplace_torch, "curvlinops-for-pytorch": by_curvlinops}


def by_paper(model: nn.Module, x: Tensor, y: Tensor, estimator: str) -> Callable[[], object]:
    """``fit`` of the paper's code on the first examples, and the gradient."""
    import laplace  # pyright: ignore[reportMissingImports]
    from laplace.curvature import AsdlGGN  # pyright: ignore[reportMissingImports]

    structure, subset, outputs = estimator.split("-")
    is_full = subset == "N"
    size = len(x) if is_full else int(subset)
    logs = torch.full((len(list(model.parameters())),), PRECISION).log().requires_grad_()
    settings: dict[str, Any] = {
        "sod": not is_full,
        "single_output": outputs == "1",
        "single_output_iid": False,
    }
    if structure == "ntk":
        settings["independent"] = outputs == "1"
    backend = {"differentiable": structure == "ntk", "kron_jac": True}
    batches = Batches(x[:size], y[:size], BATCH if is_full else size, len(x))

    def work() -> None:
        approximation = getattr(laplace, STRUCTURES[structure])(
            model,
            "classification",
            sigma_noise=1,
            prior_precision=logs.exp(),
            temperature=1.0,
            backend=AsdlGGN,
            backend_kwargs=backend,
            **settings,
        )
        approximation.fit(batches)
        logs.grad = None
        approximation.log_marginal_likelihood().backward()

    return work


def main() -> None:
    """Compare with the packages, or with the paper's code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--estimators", nargs="+", help="With --paper-code only.")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--paper-code", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.paper_code is None:
        cases = [(f"{name} {version(name)}", work, "kfac-N-C") for name, work in PACKAGES.items()]
    else:
        for name in ("asdl", "laplace"):
            sys.path.insert(0, str(arguments.paper_code / "dependencies" / name))
        sizes = ("10", "100", "500", "1000", "N")
        estimators = [f"{s}-{m}-{c}" for s in ("ntk", "kfac") for m in sizes for c in "1C"]
        # The paper's kernels of more than 5,000 rows do not fit.
        estimators = [e for e in estimators if e not in ("ntk-1000-C", "ntk-N-C")]
        estimators = arguments.estimators or estimators
        cases = [("paper", partial(by_paper, estimator=e), e) for e in estimators]
    rows = []
    for network in arguments.networks:
        model, x, y = network_and_data(network, arguments.data_dir)
        for peer, other, estimator in cases:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                works = {
                    "evigrad": by_evigrad(model, x, y, estimator),
                    peer: other(model, x, y),
                }
                times = paired(works, arguments.repeats)
            rows.append(
                {
                    "network": network,
                    "estimator": estimator,
                    "peer": peer,
                    "evigrad_seconds": f"{times['evigrad']:.4f}",
                    "peer_seconds": f"{times[peer]:.4f}",
                    "ratio": f"{times[peer] / times['evigrad']:.2f}",
                    "machine": machine(),
                }
            )
            print({key: value for key, value in rows[-1].items() if key != "machine"}, flush=True)
            if arguments.csv:
                write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
