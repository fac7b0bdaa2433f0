from typing import Any

import pytest
import torch
from core.curvature.fakes import random
from torch import Tensor

from evigrad.core.curvature.linalg import (
    kronecker_rounding,
    kronecker_rounding_rate,
    log_det_dense,
    log_det_diagonal,
    log_det_identity_plus,
    log_det_kronecker,
    psd_eigenvalues,
)
from evigrad.errors import ConfigurationError, EvigradWarning, NotPositiveDefiniteError


def psd(n: int, rank: int, seed: int = 0) -> torch.Tensor:
    rows = random(rank, n, seed=seed)
    return rows.T @ rows


def symmetric_grad(matrix, function):
    """Value and gradient in a symmetric matrix."""
    leaf = matrix.clone().requires_grad_()
    value = function(leaf)
    (grad,) = torch.autograd.grad(value, leaf)
    return value.detach(), grad


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_identity_plus_is_slogdet(rank):
    matrix = psd(5, rank)
    value, grad = symmetric_grad(matrix, log_det_identity_plus)
    shifted = torch.eye(5, dtype=torch.float64) + matrix
    torch.testing.assert_close(value, torch.linalg.slogdet(shifted)[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad, torch.linalg.inv(shifted), rtol=1e-11, atol=1e-12)


def test_identity_plus_scales_its_cotangent():
    matrix = psd(4, 2).requires_grad_()
    (grad,) = torch.autograd.grad(-0.5 * log_det_identity_plus(matrix), matrix)
    inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) + matrix.detach())
    torch.testing.assert_close(grad, -0.5 * inverse)


def test_second_derivative_is_an_error_and_not_a_number():
    matrix = psd(3, 3).requires_grad_()
    for value in (log_det_identity_plus(matrix), psd_eigenvalues(matrix).sum()):
        with pytest.raises(ConfigurationError, match="create_graph"):
            torch.autograd.grad(value + matrix.sum(), matrix, create_graph=True)


def test_an_empty_matrix_has_log_determinant_zero():
    assert log_det_identity_plus(torch.zeros(0, 0, dtype=torch.float64)) == 0


def test_float32_that_needs_float64_gets_it_without_jitter():
    # Powers of two: S is exact in float32, but its identity is lost in I + S.
    rows = torch.tensor([[2.0**15, 2.0**16, 2.0**14]])
    matrix = rows.T @ rows
    assert torch.linalg.cholesky_ex(torch.eye(3) + matrix).info > 0
    with pytest.warns(EvigradWarning, match="may be off by about") as caught:
        value, grad = symmetric_grad(matrix, log_det_identity_plus)
    assert "was added" not in str(caught[0].message)
    exact = torch.eye(3, dtype=torch.float64) + matrix.double()
    assert value.dtype == grad.dtype == torch.float32
    torch.testing.assert_close(value, torch.log1p(rows.double().square().sum()).float())
    torch.testing.assert_close(grad, torch.linalg.inv(exact).float(), rtol=1e-4, atol=1e-5)


def test_rounding_gets_jitter_and_a_warning_that_says_how_much():
    rows = random(2, 20).float() * 3e4
    matrix = rows.T @ rows
    shifted = torch.eye(20, dtype=torch.float64) + matrix.double()
    assert torch.linalg.eigvalsh(shifted)[0] < 0
    with pytest.warns(EvigradWarning, match=r"\d.* was added to its diagonal") as caught:
        value, grad = symmetric_grad(matrix, log_det_identity_plus)
    added = float(str(caught[0].message).split("rounding, so ")[1].split()[0])
    assert 0 < added <= 10 * torch.finfo(torch.float32).eps * matrix.trace()
    said = float(str(caught[0].message).split("up to about ")[1].split()[0])
    exact = torch.linalg.slogdet(torch.eye(20) + rows.double().T @ rows.double())[1]
    assert 1.0 < float(value) - float(exact) < said < 3 * float(value)
    expected = torch.linalg.slogdet(shifted + added * torch.eye(20))[1]
    torch.testing.assert_close(value.double(), expected, rtol=0.02, atol=0)
    assert grad.isfinite().all()


def test_an_indefinite_matrix_is_refused_and_not_repaired():
    with pytest.raises(NotPositiveDefiniteError, match="precisions are positive"):
        log_det_identity_plus(torch.diag(torch.tensor([3.0, -2.0])))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_not_finite_is_refused(bad, size):
    matrix = torch.eye(size, dtype=torch.float64)
    matrix[0, 0] = bad
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinite"):
        log_det_identity_plus(matrix)
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinite"):
        log_det_diagonal(matrix.diagonal(), torch.tensor(1.0))
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinite"):
        psd_eigenvalues(matrix)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_dense_and_diagonal_against_dense_algebra(shape):
    matrix = psd(4, 6)
    precision = random(*shape, seed=3).exp().requires_grad_()
    leaf = matrix.clone().requires_grad_()
    for value, h in (
        (log_det_dense(leaf, precision), leaf),
        (log_det_diagonal(leaf.diagonal(), precision), torch.diag(leaf.diagonal())),
    ):
        p0 = torch.diag(precision.expand(4))
        expected = torch.linalg.slogdet(h + p0)[1] - torch.linalg.slogdet(p0)[1]
        torch.testing.assert_close(value, expected)
        got = torch.autograd.grad(value, [leaf, precision])
        want = torch.autograd.grad(expected, [leaf, precision])
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-10)


def test_diagonal_refuses_what_is_not_positive():
    with pytest.raises(NotPositiveDefiniteError, match="precisions are positive"):
        log_det_diagonal(torch.tensor([0.5, -1.5]), torch.tensor(1.0))


def kronecker(a: torch.Tensor, b: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return log_det_kronecker(psd_eigenvalues(a), psd_eigenvalues(b), factor)


DEGENERATE = {
    "generic": (psd(3, 5), psd(2, 4, seed=1)),
    "identity": (torch.eye(3, dtype=torch.float64), psd(2, 4, seed=1)),
    "both identity": (torch.eye(3, dtype=torch.float64), torch.eye(2, dtype=torch.float64)),
    "rank one": (psd(3, 1), psd(2, 4, seed=1)),
    "rank one both": (psd(3, 1), psd(2, 1, seed=1)),
    "zero": (torch.zeros(3, 3, dtype=torch.float64), psd(2, 2, seed=1)),
}


@pytest.mark.parametrize("case", DEGENERATE)
def test_kronecker_against_the_dense_product(case):
    a, b = (matrix.clone().requires_grad_() for matrix in DEGENERATE[case])
    factor = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    value = kronecker(a, b, factor)
    dense = torch.eye(6, dtype=torch.float64) + factor * torch.kron(a, b)
    expected = torch.linalg.slogdet(dense)[1]
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    got = torch.autograd.grad(value, [a, b, factor])
    want = torch.autograd.grad(expected, [a, b, factor])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("size", [4, 128])
def test_rounding_of_kronecker_factors_is_near_its_estimate(size):
    """By the Grams of many rows whose directions are of very different size."""
    for kind in ["decay", "spike", "mean"]:
        for decades in [3, 6]:
            generator = torch.Generator().manual_seed(0)
            factors = []
            for _ in range(2):
                rows = torch.randn(2000, size, generator=generator, dtype=torch.float64)
                basis = torch.linalg.qr(torch.randn(size, size, generator=generator).double()).Q
                scales = torch.logspace(0, -decades, size, dtype=torch.float64)
                if kind == "spike":
                    scales[1:] = scales[-1]
                rows = rows * scales[-1] + 1 if kind == "mean" else rows * scales @ basis
                factors.append(rows.float())
            for factor in (1e-6, 1e-2, 1e2):
                tau = torch.tensor(factor, dtype=torch.float64)
                left, right = (psd_eigenvalues(f.double().mT @ f.double()) for f in factors)
                value = float(log_det_kronecker(left, right, tau))
                left, right = (psd_eigenvalues(f.mT @ f) for f in factors)
                estimate = float(kronecker_rounding(left, right, tau))
                assert estimate <= kronecker_rounding_rate(left, right) * factor * (1 + 1e-5)
                error = abs(float(log_det_kronecker(left, right, tau)) - value)
                assert error <= 3 * estimate + 1e-6 * value


def test_null_directions_keep_their_derivative_where_rounding_is_negative():
    # Rank one in float32: some eigenvalues of zero come out below it, and are clamped.
    rows = random(1, 6).float() * 30
    a = (rows.T @ rows).requires_grad_()
    b = torch.eye(2)
    assert (torch.linalg.eigvalsh(a.detach()) < 0).any()
    (got,) = torch.autograd.grad(kronecker(a, b, torch.tensor(1.0)), a)
    exact = (rows.double().T @ rows.double()).requires_grad_()
    dense = torch.eye(12, dtype=torch.float64) + torch.kron(exact, b.double())
    (want,) = torch.autograd.grad(torch.linalg.slogdet(dense)[1], exact)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-3)


def test_eigenvalues_of_a_batch():
    batch = torch.stack([psd(3, 2), psd(3, 3, seed=5)]).requires_grad_()
    values = psd_eigenvalues(batch)
    assert (values >= 0).all()
    torch.testing.assert_close(values, torch.linalg.eigvalsh(batch.detach()))
    torch.testing.assert_close(psd_eigenvalues(batch.detach()), values.detach())
    (grad,) = torch.autograd.grad(values.square().sum(), batch)
    torch.testing.assert_close(grad, 2 * batch.detach())


@pytest.mark.parametrize("name", ["eigh", "eigvalsh"])
def test_eigenvalues_that_float32_makes_nan_are_those_of_float64(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LAPACK returns NaN for some finite matrices in single precision, without an error."""
    real = getattr(torch.linalg, name)

    def faulty(matrix: Tensor) -> Any:
        decomposition = real(matrix)
        if matrix.dtype == torch.float32:
            for part in decomposition if name == "eigh" else (decomposition,):
                part.detach().fill_(torch.nan)
        return decomposition

    rows = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    matrix = rows.mT @ rows
    expected = psd_eigenvalues(matrix.double())
    monkeypatch.setattr(torch.linalg, name, faulty)
    leaf = matrix.requires_grad_(name == "eigh")
    torch.testing.assert_close(psd_eigenvalues(leaf).double(), expected, rtol=1e-5, atol=1e-5)
