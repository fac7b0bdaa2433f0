"""Time ``blockdiag`` and ``full`` by blocks of H and by the Gram matrices of their rows.

Both give equal numbers (Theorem 3 of the paper, block by block). The cheaper form depends on the
rows and weights of a block, and the library chooses it by operation counts. This script forces each
form in turn. It prints seconds of ``Evidence.backward`` on one block with learned precisions, and
the predicted memory. MiniNet's largest tensor has 12,800 weights, so each run by H takes about a
minute. Times do not depend on the data, which are random.

    python benchmarks/block_forms.py
    python benchmarks/block_forms.py --estimators full-10-C --repeats 3
"""

import argparse
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
from measure import machine, paired

from evigrad import Evidence
from evigrad.core.curvature import ntk
from evigrad.likelihoods import Categorical
from evigrad.models import make_model
from evigrad.priors import GaussianPrior

NUM_DATA, OUTPUTS, SHAPE = 1000, 10, (1, 28, 28)
ESTIMATORS = ("blockdiag-10-C", "blockdiag-100-1", "blockdiag-100-C")
FORMS = {"H": False, "rows": True}


def gradient(name: str, by_rows: bool) -> tuple[Callable[[], object], float]:
    """Return a gradient by one form, and its predicted MiB."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(int(name.split("-")[1]), *SHAPE, generator=generator)
    y = torch.randint(OUTPUTS, (len(x),), generator=generator)
    model = make_model("mininet", SHAPE, OUTPUTS, seed=0)
    prior = GaussianPrior("layerwise", precision=1.0)
    evidence = Evidence(model, Categorical(), prior, estimator=name, num_data=NUM_DATA, generator=0)
    # The form is chosen when the inputs are first seen.
    with patch.object(ntk, "is_cheaper", lambda *_: by_rows):
        plan = evidence.problem.plan_of(x)
        rows = evidence.problem.partition(plan).block_rows
        predicted = evidence.problem.curvature(plan).predicted_bytes(rows)
    return lambda: evidence.backward(x, y), predicted / 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each estimator."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--estimators", nargs="+", default=ESTIMATORS)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args(arguments)
    print(machine())
    for name in options.estimators:
        gradients = {form: gradient(name, by_rows) for form, by_rows in FORMS.items()}
        times = paired(
            {form: work for form, (work, _) in gradients.items()}, options.repeats, warmup=1
        )
        words = [f"by {f} {times[f]:.3g} s, {gradients[f][1]:.3g} MiB" for f in FORMS]
        print(f"{name}: {'; '.join(words)}; {times['H'] / times['rows']:.3g} x", flush=True)


if __name__ == "__main__":
    main()
