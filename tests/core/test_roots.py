"""Roots of Λ: they multiply to it, and so do their derivatives."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from likelihood_zoo import LIKELIHOODS
from peak_bytes import PeakBytes
from torch import Tensor
from torch.autograd import gradcheck
from torch.linalg import LinAlgError  # pyright: ignore[reportAttributeAccessIssue]

from evigrad.core import roots
from evigrad.core.roots import differentiable_root
from evigrad.errors import ConfigurationError, NotFiniteError
from evigrad.likelihoods import (
    ROOTS,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NaturalGaussian,
    base,
    categorical,
)

SEEDS = st.integers(0, 2**31 - 1)


class PlainCategorical(Likelihood):
    """The categorical from its log probability alone."""

    name = "plain"
    couples_outputs = True
    is_classification = True

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        return f.log_softmax(dim=1).gather(1, y[:, None]).squeeze(1)


class PlainPoisson(Likelihood):
    """A diagonal Λ from the log probability alone, with a parameter of its own."""

    name = "poisson"
    couples_outputs = False

    def __init__(self) -> None:
        super().__init__()
        self.log_exposure = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def log_prob(self, f: Float[Tensor, "m C"], y: Tensor) -> Float[Tensor, " m"]:
        rate = f + self.log_exposure
        return (y * rate - rate.exp() - torch.lgamma(y + 1)).sum(dim=1)


MAKERS = LIKELIHOODS | {
    "heteroscedastic": lambda _: HeteroscedasticGaussian(),
    "natural": lambda _: NaturalGaussian(),
    "plain categorical": lambda _: PlainCategorical(),
    "plain poisson": lambda _: PlainPoisson(),
}


def random_outputs(seed: int, m: int, c: int, spread: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(m, c, generator=generator, dtype=torch.float64)


def every(f: Tensor) -> Tensor:
    """All columns, listed."""
    return torch.arange(f.shape[1]).expand(len(f), -1)


def scaled(likelihood: Likelihood, f: Tensor, columns: Tensor | None, kind: str) -> Tensor:
    """The columns of R as rows (m, k, C), scale included."""
    root = likelihood.root(f, columns, kind)
    return root.vectors if root.scale is None else root.vectors * root.scale.unsqueeze(-1)


def product(rows: Tensor) -> Tensor:
    """R Rᵀ of rows (m, k, C)."""
    return rows.mT @ rows


def restricted(curvature: Tensor, columns: Tensor) -> Tensor:
    """Λ with zeros outside each datum's listed outputs."""
    m, c, _ = curvature.shape
    inside = torch.zeros(m, c, dtype=curvature.dtype)
    for n in range(m):
        inside[n, [d for d in columns[n].tolist() if d >= 0]] = 1.0
    return curvature * inside.unsqueeze(1) * inside.unsqueeze(2)


def same_gradient(one: Tensor, other: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    first = torch.autograd.grad(one, inputs, allow_unused=True, retain_graph=True)
    second = torch.autograd.grad(other, inputs, allow_unused=True, retain_graph=True)
    for a, b, x in zip(first, second, inputs, strict=True):
        a = torch.zeros_like(x) if a is None else a
        b = torch.zeros_like(x) if b is None else b
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- value


@given(seed=SEEDS, c=st.integers(2, 6))
def test_a_softmax_has_no_more_rows_than_its_rank(seed: int, c: int) -> None:
    f = random_outputs(seed, 2, c)
    rows = Categorical().root(f).vectors
    assert rows.shape[1] == c - 1
    torch.testing.assert_close(rows.sum(-1), torch.zeros(2, c - 1, dtype=f.dtype))


@given(seed=SEEDS, c=st.integers(2, 6))
def test_fisher_columns_are_scores(seed: int, c: int) -> None:
    f = random_outputs(seed, 1, c)
    p = f.softmax(1)
    rows = Categorical().root(f, every(f), "fisher").vectors
    for d in range(c):
        score = Categorical().score(f, torch.tensor([d]))
        torch.testing.assert_close(rows[:, d], p[:, d : d + 1].sqrt() * score)


@pytest.mark.parametrize("maker", [Categorical, PlainCategorical])
@given(seed=SEEDS, c=st.integers(2, 6))
def test_eigen_columns_are_orthogonal_and_descend(maker, seed: int, c: int) -> None:
    f = random_outputs(seed, 3, c)
    rows = maker().root(f, every(f), "eigen").vectors
    values = torch.linalg.eigvalsh(Categorical().hessian(f)).flip(-1).clamp(min=0)
    torch.testing.assert_close(rows @ rows.mT, values.diag_embed(), rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- derivative


def test_softmax_vectors_against_finite_differences() -> None:
    for kind in ["subblock", "fisher"]:
        for columns in [None, [[0, 1, 2], [2, 0, 1]], [[1, -1, 2], [0, -1, -1]], [[2], [0]]]:
            f = random_outputs(0, 2, 3).requires_grad_()
            picked = None if columns is None else torch.tensor(columns)
            root = partial(Categorical().root, columns=picked, kind=kind)
            assert gradcheck(lambda f, root=root: root(f).vectors, (f,))


def test_eigen_rotation_is_constant_in_derivatives() -> None:
    for columns in [None, [[0, 2], [-1, 1]]]:
        f = random_outputs(0, 2, 3)
        picked = every(f) if columns is None else torch.tensor(columns)
        fisher = Categorical().root(f, every(f), "fisher").vectors
        rotation = torch.linalg.eigh(fisher @ fisher.mT).eigenvectors.flip(-1)
        frozen = f.clone().requires_grad_()
        oracle = rotation.mT @ Categorical().root(frozen, every(f), "fisher").vectors
        oracle = oracle.gather(1, picked.clamp(min=0)[..., None].expand(-1, -1, 3))
        oracle = oracle * (picked >= 0)[..., None]
        variable = f.clone().requires_grad_()
        rows = Categorical().root(variable, picked, "eigen").vectors
        torch.testing.assert_close(rows, oracle)
        probe = random_outputs(5, 2 * rows.shape[1], 3).view_as(rows)
        (one,) = torch.autograd.grad((probe * rows).sum(), variable)
        (other,) = torch.autograd.grad((probe * oracle).sum(), frozen)
        torch.testing.assert_close(one, other)


def test_differentiable_root_where_the_range_turns() -> None:
    """Λ = g gᵀ of rank one: every derivative leaves the range of Λ."""
    x = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    probe = random_outputs(2, 3, 3).unsqueeze(0)
    for symmetric in (True, False):
        g = torch.stack([x.cos(), x.sin(), 2 * x])
        curvature = torch.outer(g, g).unsqueeze(0)
        root = differentiable_root(curvature, symmetric)
        torch.testing.assert_close(root @ root.mT, curvature)
        same_gradient((probe * (root @ root.mT)).sum(), (probe * curvature).sum(), [x], 1e-9)


@pytest.mark.parametrize("symmetric", [True, False])
def test_differentiable_root_of_equal_eigenvalues(symmetric: bool) -> None:
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    curvature = torch.eye(3, dtype=torch.float64) + torch.outer(x, x) + torch.diag(x)
    root = differentiable_root(curvature.unsqueeze(0), symmetric)[0]
    probe = random_outputs(2, 3, 3)
    same_gradient((probe * (root @ root.mT)).sum(), (probe * curvature).sum(), [x], 1e-12)


# ---------------------------------------------------------------- saturation


SATURATED = [[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4], [0.0, 0.0, -1e4], [1e4, 1e4, 1e4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ROOTS)
def test_saturated_softmax(dtype: torch.dtype, kind: str) -> None:
    """Value and gradient stay finite and are those of Λ where probabilities underflow."""
    for columns in [None, [0, 1, 2], [2, 1, 0], [0, -1, 1], [1, -1, -1], [-1, -1, -1], [2]]:
        f = torch.tensor(SATURATED, dtype=dtype, requires_grad=True)
        picked = None if columns is None else torch.tensor(columns).expand(len(f), -1)
        rows = Categorical().root(f, picked, kind).vectors
        probe = random_outputs(0, 4 * rows.shape[1], 3).view_as(rows).to(dtype)
        (gradient,) = torch.autograd.grad((probe * rows).sum(), f, retain_graph=True)
        assert rows.isfinite().all() and gradient.isfinite().all()
        whole = picked is None or sorted(columns or []) == [0, 1, 2]
        if kind == "subblock" or whole:
            curvature = Categorical().hessian(f)
            if picked is not None:
                curvature = restricted(curvature, picked)
            torch.testing.assert_close(product(rows), curvature)
            probe = random_outputs(1, 12, 3).view(4, 3, 3).to(dtype)
            tolerance = 1e-5 if dtype == torch.float32 else 1e-12
            same_gradient((probe * product(rows)).sum(), (probe * curvature).sum(), [f], tolerance)


@pytest.mark.parametrize("maker", [Bernoulli, PlainCategorical])
@pytest.mark.parametrize("kind", ROOTS)
def test_saturated_others_stay_finite(maker, kind: str) -> None:
    f = torch.tensor(SATURATED, requires_grad=True)
    rows = maker().root(f, None, kind).vectors
    (gradient,) = torch.autograd.grad(rows.square().sum() + rows.sum(), f)
    assert rows.isfinite().all() and gradient.isfinite().all()
    torch.testing.assert_close(product(rows), maker().hessian(f), rtol=1e-3, atol=1e-6)


def test_a_diagonal_root_that_underflows_has_a_gradient() -> None:
    f = torch.tensor([[-1e4, 0.0]], dtype=torch.float64, requires_grad=True)
    rows = scaled(PlainPoisson(), f, None, "fisher")
    (gradient,) = torch.autograd.grad(rows.sum(), f)
    assert rows[0, 0, 0] == 0 and gradient[0, 0] == 0
    assert gradient[0, 1].item() == pytest.approx(0.5 * rows[0, 1, 1].item())


def test_confident_predictions_keep_their_digits() -> None:
    """With p = 1 − 1e-10, one minus p is rounding in float32, but the root is not."""
    for columns in [[[0]], [[0, 2]], [[0, 1, 2]], None]:
        for kind in ["subblock", "fisher"]:
            f = torch.tensor([[23.0, 0.0, -1.0]])
            picked = None if columns is None else torch.tensor(columns)
            single = Categorical().root(f, picked, kind).vectors.double()
            double = Categorical().root(f.double(), picked, kind).vectors
            # log p itself is off by one eps of the largest logit, hence 23 eps and a factor.
            torch.testing.assert_close(single, double, rtol=1e-5, atol=0)


def test_no_nan_passes_through_the_graph_of_an_empty_outside() -> None:
    """Not even one that a mask would stop: users debug with anomaly detection."""
    f = random_outputs(0, 2, 3).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        rows = Categorical().root(f, torch.tensor([[0, 1, 2], [1, -1, 2]]), "subblock").vectors
        (gradient,) = torch.autograd.grad(rows.square().sum(), f)
    assert gradient.isfinite().all()


def test_all_listed_outputs_are_the_fisher_root_exactly() -> None:
    f = random_outputs(0, 3, 4).requires_grad_()
    order = torch.tensor([[3, 1, 0, 2], [0, 1, 2, 3], [2, 3, 1, 0]])
    rows = Categorical().root(f, order, "subblock").vectors
    oracle = Categorical().root(f, order, "fisher").vectors
    torch.testing.assert_close(rows, oracle, rtol=1e-14, atol=0)
    probe = random_outputs(1, 12, 4).view_as(rows)
    same_gradient((probe * rows).sum(), (probe * oracle).sum(), [f], 1e-13)


# ---------------------------------------------------------------- what carries which gradient


@pytest.mark.parametrize("columns", [None, [[2, -1], [0, 1]]])
def test_gaussian_noise_is_in_the_scale_alone(columns) -> None:
    gaussian = Gaussian(noise=[0.5, 1.0, 2.0]).double()
    f = random_outputs(0, 2, 3)
    picked = None if columns is None else torch.tensor(columns)
    root = gaussian.root(f, picked, "subblock")
    assert not root.vectors.requires_grad
    assert root.scale is not None

    def weighted(log_noise: Tensor) -> Tensor:
        scale = torch.func.functional_call(
            _Scale(gaussian), {"gaussian.log_noise": log_noise}, (f, picked)
        )
        return scale * root.vectors.sum(-1)

    assert gradcheck(weighted, (gaussian.log_noise,))
    expected = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)
    if columns is None:
        torch.testing.assert_close(root.scale, expected.expand(2, 3))
    else:
        torch.testing.assert_close(root.scale[0, 0], expected[2])
        torch.testing.assert_close(root.scale[1], expected[:2])


class _Scale(torch.nn.Module):
    def __init__(self, gaussian: Gaussian) -> None:
        super().__init__()
        self.gaussian = gaussian

    def forward(self, f: Tensor, columns: Tensor | None) -> Tensor | None:
        return self.gaussian.root(f, columns, "subblock").scale


def test_dtype_follows_the_outputs() -> None:
    f = random_outputs(0, 2, 3).float()
    root = Gaussian().double().root(f)
    assert root.scale is not None
    assert root.vectors.dtype == root.scale.dtype == torch.float32
    for kind in ROOTS:
        assert Categorical().root(f, None, kind).vectors.dtype == torch.float32
        assert PlainCategorical().root(f, None, kind).vectors.dtype == torch.float32


def test_unknown_kind() -> None:
    for kind in ["eigne", "cholesky"]:
        for maker in MAKERS.values():
            with pytest.raises(
                ConfigurationError, match="root must be one of subblock, fisher, eigen"
            ):
                maker(4).root(random_outputs(0, 2, 4), None, kind)


@pytest.fixture
def three_turned(monkeypatch: pytest.MonkeyPatch) -> int:
    """An eigen root that turns the columns of three classes only, as of sixteen among hundreds."""
    for module in (roots, categorical):
        monkeypatch.setattr(module, "TOP_CLASSES", 3)
    return 3


@pytest.mark.parametrize("c", [4, 6, 9])
def test_a_root_of_many_classes(three_turned: int, c: int) -> None:
    likelihood, f = Categorical(), random_outputs(c, 5, c)
    whole = likelihood.root(f, every(f), "eigen").vectors
    torch.testing.assert_close(whole.mT @ whole, likelihood.hessian(f))
    # The first ones are orthogonal, largest first; the others are scores of the unlikely labels.
    gram = whole[:, :three_turned] @ whole[:, :three_turned].mT
    torch.testing.assert_close(gram, gram.diagonal(dim1=1, dim2=2).diag_embed())
    assert bool((gram.diagonal(dim1=1, dim2=2).diff(dim=1) <= 1e-12).all())
    order = f.argsort(dim=1, descending=True)
    fisher = likelihood.root(f, order[:, three_turned:], "fisher").vectors
    torch.testing.assert_close(whole[:, three_turned:], fisher)
    columns = torch.tensor([[c - 1, 0, -1], [2, -1, 1], [3, 1, 0], [-1, -1, -1], [0, 3, 2]])
    listed = likelihood.root(f, columns, "eigen").vectors
    for n, row in enumerate(columns.tolist()):
        for j, column in enumerate(row):
            vector = whole[n, column] if column >= 0 else torch.zeros(c).double()
            torch.testing.assert_close(listed[n, j], vector)


@pytest.mark.parametrize("c", [4, 7])
def test_the_derivative_of_a_root_of_many_classes(three_turned: int, c: int) -> None:
    del three_turned
    likelihood, f = Categorical(), random_outputs(1, 3, c).requires_grad_()
    weights = random_outputs(2, 3 * c, c).reshape(3, c, c)
    rows = likelihood.root(f, every(f), "eigen").vectors
    (slope,) = torch.autograd.grad((weights * (rows.mT @ rows)).sum(), f)
    (expected,) = torch.autograd.grad((weights * likelihood.hessian(f)).sum(), f)
    torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize("kind", ["fisher", "eigen"])
def test_norms_of_rows(three_turned: int, kind: str) -> None:
    for c in [2, 3, 4, 8]:
        likelihood, f = Categorical(), random_outputs(3, 6, c)
        norms = likelihood.root(f, every(f), kind).vectors.square().sum(-1)
        torch.testing.assert_close(likelihood.row_norms(f, kind), norms, atol=1e-12, rtol=1e-6)
        condensed = likelihood.condensed(f, kind)
        head, tail = likelihood.row_scores(condensed, kind)
        if kind == "eigen" and c > three_turned:
            # Nearly so: what is left of the others is only their probability together.
            assert condensed.shape == (6, three_turned + 1)
            torch.testing.assert_close(head, norms[:, :three_turned], atol=0.05, rtol=0.3)
            assert tail is not None
            torch.testing.assert_close(tail, norms[:, three_turned:].sum(1), atol=0.05, rtol=0.5)
        else:
            torch.testing.assert_close(head, norms[:, : head.shape[1]], atol=1e-12, rtol=1e-6)
            # Columns that are left out are zero for certain.
            assert float(norms[:, head.shape[1] :].abs().sum()) < 1e-10
            assert tail is None


@pytest.mark.parametrize("name", [name for name in LIKELIHOODS if name != "categorical"])
def test_norms_of_rows_of_other_likelihoods(name: str) -> None:
    likelihood, f = LIKELIHOODS[name](4), random_outputs(3, 6, 4)
    root = likelihood.root(f, torch.arange(4).expand(6, -1), "eigen")
    scale = 1.0 if root.scale is None else root.scale.detach()
    norms = (root.vectors.square().sum(-1) * scale**2).detach()
    head, tail = likelihood.row_scores(likelihood.condensed(f, "eigen"), "eigen")
    torch.testing.assert_close(head, norms)
    assert tail is None


def test_outputs_that_are_not_finite_have_no_eigenvalues() -> None:
    """A saturated or overflown output gives NaN probabilities, on which LAPACK fails raw."""
    f = torch.tensor([[0.0, 1.0, 2.0], [0.0, math.inf, math.inf]])
    columns = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(NotFiniteError, match="Λ of the outputs contains NaN or infinite"):
        Categorical().root(f, columns, "eigen")


def test_eigenvalues_are_taken_in_float64_where_float32_fails(monkeypatch) -> None:
    f, columns = random_outputs(0, 4, 3).float(), torch.zeros(4, 1, dtype=torch.int64)
    expected = Categorical().root(f, columns, "eigen").vectors
    eigh = torch.linalg.eigh

    def failing(matrix: Tensor) -> Any:
        if matrix.dtype == torch.float32 or fails_always:
            raise LinAlgError("did not converge")
        return eigh(matrix)

    fails_always = False
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    actual = Categorical().root(f, columns, "eigen").vectors
    torch.testing.assert_close(actual.abs(), expected.abs(), rtol=1e-4, atol=1e-5)
    fails_always = True
    with pytest.raises(NotFiniteError, match="outputs are too large"):
        Categorical().root(f, columns, "eigen")


@pytest.mark.parametrize("name", sorted(LIKELIHOODS.keys() - {"categorical", "joint", "ordinal"}))
def test_norms_of_rows_are_those_of_a_class_with_its_own_root(name: str) -> None:
    maker = LIKELIHOODS[name]

    class Doubled(type(maker(4))):
        def root(self, f, columns=None, kind="subblock"):
            root = super().root(f, columns, kind)
            return replace(root, vectors=2 * root.vectors)

    plain, doubled, f = maker(4), maker(4), random_outputs(3, 6, 4)
    doubled.__class__ = Doubled
    torch.testing.assert_close(doubled.row_norms(f, "eigen"), 4 * plain.row_norms(f, "eigen"))


@pytest.mark.parametrize("name", ["gaussian", "bernoulli", "poisson"])
def test_norms_of_rows_of_many_outputs_take_no_matrix_of_outputs(name: str) -> None:
    likelihood, f = LIKELIHOODS[name](300), random_outputs(3, 20, 300)
    with PeakBytes() as held:
        likelihood.row_norms(f, "eigen")
    assert held.most <= 8 * f.numel() * f.element_size()


def test_a_root_without_a_closed_form_is_made_for_a_few_examples_at_a_time(monkeypatch) -> None:
    likelihood, f = NaturalGaussian(), random_outputs(3, 20, 60)
    with PeakBytes() as of_whole:
        whole = likelihood.row_norms(f, "fisher")
    monkeypatch.setattr(base, "ROOT_BYTES", 2 * 60**2 * f.element_size())
    with PeakBytes() as held:
        parts = likelihood.row_norms(f, "fisher")
    torch.testing.assert_close(parts, whole)
    assert held.most < of_whole.most / 5


@given(seed=SEEDS, num_outputs=st.integers(2, 6), scale=st.sampled_from([0.1, 3.0, 200.0]))
def test_a_single_column_of_the_softmax_is_a_subblock(
    seed: int, num_outputs: int, scale: float
) -> None:
    """The formula for one column against the general one, also for padding."""
    generator = torch.Generator().manual_seed(seed)
    f = scale * torch.randn(5, num_outputs, dtype=torch.float64, generator=generator)
    columns = torch.randint(-1, num_outputs, (5, 1), generator=generator)
    leaf = f.clone().requires_grad_()
    log_p, pick = leaf.log_softmax(1), roots.one_hot(f, columns)
    general = roots._label_rows(log_p, pick, pick.sum(dim=1) == 0)
    rows = roots.softmax_rows(leaf, columns, "subblock")
    torch.testing.assert_close(rows, general)
    cotangent = torch.randn(rows.shape, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((r * cotangent).sum(), leaf)[0] for r in (rows, general)]
    torch.testing.assert_close(*gradients)
