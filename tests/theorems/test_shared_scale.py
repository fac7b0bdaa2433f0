"""Layers of a ReLU network without biases share their scale, as docs/limits.md says."""

import pytest
import torch
from torch import nn

from evigrad import Evidence
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior


def test_only_the_product_of_precisions_counts() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 5).double(), torch.randint(3, (30,))
    inner, outer = nn.Linear(5, 20, bias=False), nn.Linear(20, 3, bias=False)
    model = nn.Sequential(inner, nn.ReLU(), outer).double()

    def log_evidence(first: float, second: float) -> float:
        prior = GaussianPrior({"first": ["0"], "second": ["2"]}, {"first": first, "second": second})
        evidence = Evidence(model, Categorical(), prior, estimator="ntk-N-C", num_data=30)
        return evidence.estimate(x, y).log_evidence

    before = log_evidence(1.0, 1.0)
    with torch.no_grad():
        inner.weight *= 3
        outer.weight /= 3
    assert log_evidence(1 / 9, 9.0) == pytest.approx(before, rel=1e-12)
    assert abs(log_evidence(1.0, 1.0) - before) > 0.1
