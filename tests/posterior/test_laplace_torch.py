"""Mean and covariance of the outputs are those of laplace-torch, by its GGN matrix of BackPACK."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evigrad import Evidence
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.priors import GaussianPrior

pytest.importorskip("laplace")

NUM_DATA, OUTPUTS, PRECISION, NOISE, TEMPERATURE = 60, 3, 0.7, 0.4, 0.5
# Weights and matrix by the names of laplace-torch.
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


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """laplace-torch casts the noise to the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore::UserWarning:laplace", "ignore::DeprecationWarning")
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("network", NETWORKS)
def test_moments_are_those_of_laplace_torch(network: str, task: str, structure: str) -> None:
    from laplace import Laplace  # pyright: ignore[reportMissingImports]
    from laplace.curvature import BackPackGGN  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    shape, layers = NETWORKS[network]
    model = nn.Sequential(*layers())
    x, test = torch.randn(NUM_DATA, *shape), torch.randn(20, *shape)
    y = torch.randn(NUM_DATA, OUTPUTS)
    likelihood: Likelihood = Gaussian(NOISE)
    options: dict[str, Any] = {"sigma_noise": NOISE}
    if task == "classification":
        likelihood, options, y = Categorical(), {}, y.argmax(1)
    evidence = Evidence(
        model,
        likelihood,
        GaussianPrior("scalar", precision=PRECISION),
        estimator="diag-N-C",
        num_data=NUM_DATA,
        temperature=TEMPERATURE,
    )
    predictive = evidence.posterior((x, y), structure=structure)(test)
    subset, hessian = STRUCTURES[structure]
    theirs: Any = Laplace(
        model,
        task,
        subset_of_weights=subset,
        hessian_structure=hessian,
        prior_precision=PRECISION,
        temperature=TEMPERATURE,
        backend=BackPackGGN,
        **options,
    )
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=20))
    mean, covariance = theirs._glm_predictive_distribution(test)
    torch.testing.assert_close(predictive.mean, mean.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(predictive.covariance, covariance.detach(), rtol=1e-10, atol=1e-12)
