"""Test how well networks with input-dependent noise recover two levels of noise.

Every row trains two hidden layers of 64 by ``fit`` with its defaults, with ``heteroscedastic`` or
``natural-gaussian`` outputs. The N synthetic examples are y = x₀ + σ(x₁) ε. σ is 0.1 for negative
x₁ and 0.6 otherwise. The table has the root mean square of the predicted σ in either half of 2,000
test examples. ``plug-in`` is the MAP prediction, ``kfac`` the posterior prediction. Test data are
only evaluated. The script stores every finished run and resumes where it was stopped.

    python benchmarks/noise_models.py --results docs/results --pages docs/posterior.md
"""

import torch
from learning import Result, Results, make_parser, parse
from measure import show, summaries, with_error
from torch import Tensor

import evigrad
from evigrad.models import make_model

SIZES = (200, 1000)
METHODS = ("heteroscedastic", "natural-gaussian")
SIGMAS, NUM_TEST = (0.1, 0.6), 2000
KEYS = ("log_likelihood", "posterior_log_likelihood", "low_sigma", "high_sigma")
COLUMNS = ("row", "seed", *KEYS, "seconds", "threads")

Pair = tuple[Tensor, Tensor]


def synthetic(num_data: int, seed: int) -> tuple[Pair, Pair]:
    """Return training and test data of a seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_data + NUM_TEST, 2, generator=generator)
    sigma = torch.where(x[:, 1:] < 0, *SIGMAS)
    y = x[:, :1] + sigma * torch.randn(len(x), 1, generator=generator)
    return (x[:num_data], y[:num_data]), (x[num_data:], y[num_data:])


def run_row(num_data: int, method: str, seed: int) -> Result:
    """Return the numbers of one training on one draw of the data."""
    train, test = synthetic(num_data, seed)
    model = make_model("mlp", train[0].shape[1:], 2, seed)
    result = evigrad.fit(model, train, test=test, likelihood=method, seed=seed, progress=False)
    predictive = result.evidence.posterior(train, structure="kfac")(test[0])
    no_covariance = torch.zeros(len(test[0]), 2, 2)
    moments = predictive.likelihood.moments(predictive.outputs, no_covariance)
    assert moments is not None
    variance, is_low = moments[2], test[0][:, 1] < 0
    return {
        "log_likelihood": result.test_metrics["log_likelihood"],
        "posterior_log_likelihood": float(predictive.log_prob(test[1]).double().mean()),
        "low_sigma": float(variance[is_low].mean().sqrt()),
        "high_sigma": float(variance[~is_low].mean().sqrt()),
        "seconds": result.seconds,
    }


def table_of(runs: list[Result]) -> str:
    """Return means of the seeds as Markdown."""
    lines = [
        "| N | likelihood | test log likelihood, MAP | posterior, kfac"
        " | σ (true 0.1) | σ (true 0.6) |",
        "|---|---|---|---|---|---|",
    ]
    for num_data in SIZES:
        for row in summaries(runs, [f"{num_data}: {method}" for method in METHODS], KEYS):
            cells = [with_error(row[key], row[f"{key}_error"], 3) for key in KEYS]
            method = row["row"].rpartition(": ")[2]
            lines.append(f"| {' | '.join([f'{num_data:,}', method, *cells])} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    options = parse(parser, arguments)
    results = Results(options.results / "noise_models.csv", COLUMNS)
    for seed in options.seeds:
        for num_data in SIZES:
            for method in METHODS:
                row = f"{num_data}: {method}"
                if not results.has(row, seed):
                    run = run_row(num_data, method, seed)
                    results.add({"row": row, "seed": seed, "threads": options.threads} | run)
    show("noise models", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
