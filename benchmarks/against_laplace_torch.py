"""Compare posteriors with laplace-torch: largest differences of mean and covariance.

The structures are ``full``, ``diag`` and ``last-layer`` of small networks in float64, with
laplace-torch's GGN matrix by BackPACK. Install laplace-torch to run this script.

    python benchmarks/against_laplace_torch.py
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import evigrad
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior

NUM_DATA, OUTPUTS, PRECISION, NOISE, TEMPERATURE = 60, 3, 0.7, 0.4, 0.5
STRUCTURES = {
    "full": ("all", "full"),
    "diag": ("all", "diag"),
    "last-layer": ("last_layer", "full"),
}
NETWORKS = {
    "mlp": ((6,), lambda: [nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, OUTPUTS)]),
    "convolutions": (
        (1, 6, 6),
        lambda: [nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, OUTPUTS)],
    ),
}


def moments(
    model: nn.Module, task: str, structure: str, train: tuple[Tensor, Tensor], x: Tensor
) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of the outputs by laplace-torch."""
    from laplace import Laplace  # pyright: ignore[reportMissingImports]
    from laplace.curvature import BackPackGGN  # pyright: ignore[reportMissingImports]

    subset, hessian = STRUCTURES[structure]
    options: dict[str, Any] = {"sigma_noise": NOISE} if task == "regression" else {}
    laplace = Laplace(
        model,
        task,
        subset_of_weights=subset,
        hessian_structure=hessian,
        prior_precision=PRECISION,
        temperature=TEMPERATURE,
        backend=BackPackGGN,
        **options,
    )
    laplace.fit(DataLoader(TensorDataset(*train), batch_size=20))
    mean, covariance = laplace._glm_predictive_distribution(x)
    return mean.detach(), covariance.detach()


def main(arguments: list[str] | None = None) -> None:
    """Print the largest relative differences. Fail if one exceeds 1e-5."""
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    worst = 0.0
    for network, (shape, layers) in NETWORKS.items():
        for task in ("classification", "regression"):
            torch.manual_seed(0)
            model = nn.Sequential(*layers())
            x, test = torch.randn(NUM_DATA, *shape), torch.randn(20, *shape)
            y = torch.randn(NUM_DATA, OUTPUTS)
            likelihood = Gaussian(NOISE)
            if task == "classification":
                likelihood, y = Categorical(), y.argmax(1)
            evidence = evigrad.Evidence(
                model,
                likelihood,
                GaussianPrior("scalar", precision=PRECISION),
                estimator="diag-N-C",
                num_data=NUM_DATA,
                temperature=TEMPERATURE,
            )
            for structure in STRUCTURES:
                predictive = evidence.posterior((x, y), structure=structure)(test)
                theirs = moments(model, task, structure, (x, y), test)
                for what, mine, other in zip(
                    ("mean", "covariance"),
                    (predictive.mean, predictive.covariance),
                    theirs,
                    strict=True,
                ):
                    difference = float((mine - other).abs().max() / other.abs().max())
                    worst = max(worst, difference)
                    print(f"{network:13} {task:15} {structure:11} {what:11} {difference:.1e}")
    if worst > 1e-5:
        raise SystemExit(f"A difference of {worst:.1e} is above 1e-5.")


if __name__ == "__main__":
    main()
