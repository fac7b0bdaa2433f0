"""Steps on one precision for each block, by eigenvalues from the second on."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import evigrad
from evigrad.core.curvature import linalg
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Categorical
from evigrad.passes.kept import KeptPass
from evigrad.priors import GaussianPrior

PRECISIONS = [0.01, 0.3, 2.0, 50.0]
# Each block of the parameters has one precision, in Grams of 24 rows and in dense blocks.
CASES = [
    ("ntk-8-C", "scalar", 8),
    ("blockdiag-8-C", "layerwise", 8),
    ("blockdiag-40-C", "layerwise", 40),
    ("full-40-C", "scalar", 40),
    ("kfac-8-C", "layerwise", 8),
]


def made(estimator: str, structure: str, m: int, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    prior = GaussianPrior(structure)  # pyright: ignore[reportArgumentType]
    evidence = evigrad.Evidence(model, Categorical(), prior, estimator=estimator, num_data=40)
    x, y = torch.randn(m, 4, dtype=dtype), torch.randint(3, (m,))
    return evidence, x, y


def log_precision(evidence: evigrad.Evidence) -> nn.Parameter:
    parameter = evidence.prior.log_precision
    assert parameter is not None
    return parameter


def steps(evidence: evigrad.Evidence, arguments: list) -> Iterator[tuple[float, torch.Tensor]]:
    for precision in PRECISIONS:
        log_precision(evidence).data.fill_(precision).log_()
        evidence.prior.zero_grad()
        is_kept = isinstance(arguments[0], KeptPass)
        estimate = (evidence.backward_kept if is_kept else evidence.backward)(*arguments)
        slope = log_precision(evidence).grad
        assert slope is not None
        yield estimate.log_evidence, slope.clone()


@pytest.mark.each(1)
@pytest.mark.parametrize("limit", [2**30, 0])
@pytest.mark.parametrize("estimator, structure, m", CASES)
def test_values_and_gradients_are_those_of_factorisations(
    estimator: str, structure: str, m: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evigrad.core.curvature.ntk.GRAM_CACHE_BYTES", limit)
    evidence, x, y = made(estimator, structure, m)
    kept = evidence.collect(x, y)
    expected = list(steps(evidence, [x, y]))
    for _ in range(2):
        for (value, slope), (right, right_slope) in zip(
            steps(evidence, [kept]), expected, strict=True
        ):
            assert value == pytest.approx(right, rel=1e-12)
            torch.testing.assert_close(slope, right_slope, rtol=1e-9, atol=1e-11)


@pytest.mark.each(1)
@pytest.mark.parametrize("limit", [2**30, 0])
@pytest.mark.parametrize("estimator, structure, m", CASES)
def test_later_steps_factorise_nothing(
    estimator: str, structure: str, m: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evigrad.core.curvature.ntk.GRAM_CACHE_BYTES", limit)
    evidence, x, y = made(estimator, structure, m)
    kept = evidence.collect(x, y)
    list(steps(evidence, [kept]))
    with (
        mock.patch.object(linalg, "factor_identity_plus", side_effect=AssertionError),
        mock.patch.object(torch.linalg, "eigvalsh", side_effect=AssertionError),
    ):
        list(steps(evidence, [kept]))


def test_of_few_outer_products_only_their_span_is_diagonalised() -> None:
    rows = torch.randn(60, 4, dtype=torch.float64)
    spectra = linalg.Spectra()
    assert spectra.at_second_use("a", lambda: rows @ rows.mT, 4) is None
    spectrum = spectra.at_second_use("a", lambda: rows @ rows.mT, 4)
    assert spectrum is not None and len(spectrum.values) == 4 + linalg.OVERSAMPLING
    precision = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    value, exact = spectrum.log_det(precision), linalg.log_det_dense(rows @ rows.mT, precision)
    torch.testing.assert_close(value, exact, rtol=1e-12, atol=0)
    slopes = [torch.autograd.grad(log_det, precision) for log_det in (value, exact)]
    torch.testing.assert_close(*slopes, rtol=1e-11, atol=0)


def test_several_precisions_of_a_block_factorise() -> None:
    evidence, x, y = made("ntk-8-C", "layerwise", 8)
    kept = evidence.collect(x, y)
    with mock.patch.object(torch.linalg, "eigvalsh", side_effect=AssertionError):
        actual, expected = list(steps(evidence, [kept])), list(steps(evidence, [x, y]))
    assert [value for value, _ in actual] == pytest.approx([value for value, _ in expected])


def test_rounding_is_said() -> None:
    evidence, x, y = made("ntk-8-C", "scalar", 8, torch.float32)
    kept = evidence.collect(torch.cat([x[:4], x[:4]]), y)  # rows that depend on one another
    evidence.estimate_kept(kept)
    log_precision(evidence).data.fill_(1e-9).log_()
    with pytest.warns(EvigradWarning, match="rounding in float32"):
        evidence.estimate_kept(kept)
