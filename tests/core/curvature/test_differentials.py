"""The small step between two passes, and the products of the second one, against autograd."""

from collections.abc import Sequence

import pytest
import torch
from core.curvature.fakes import (
    Fake,
    Root,
    accumulated,
    make_fake,
    make_structure,
    random,
    weights_of,
)
from torch import Tensor

from evigrad.core.algebra import inner_gram
from evigrad.core.curvature import (
    Ntk,
    inner_product,
)
from evigrad.core.curvature.linalg import psd_eigenvalues
from evigrad.core.protocols import LOG_DETS, Purpose
from evigrad.fast.contraction import (
    MatrixUse,
    contracted,
    contraction_cotangents,
    contraction_gram,
    uses_cotangents,
    uses_gram,
)
from evigrad.fast.storage import Storage

M, C, K = 5, 3, 2
CPU = torch.device("cpu")
SHAPES = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (2, 2)}


def linear_fake(positions: int = 2) -> Fake:
    """Its weight "a.weight" has exact factors: rows are Σ_t gradients ⊗ inputs."""
    inputs, outputs = random(M, 1, positions, 3, seed=5), random(M, C, 1, positions, 2, seed=6)
    fake = make_fake(M, C, SHAPES)
    jacobian = dict(fake.jacobian)
    jacobian["a.weight"] = torch.einsum("mcgto,mgti->mcoi", outputs, inputs)
    return Fake(jacobian, {"a.weight": [(inputs, outputs)]})


def ntk_of(fake: Fake) -> Ntk:
    weights = weights_of(fake)
    return Ntk(weights, {name: name for name in weights})


def precisions_of() -> tuple[dict[str, Tensor], list[Tensor]]:
    shared, other = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.7, 2.0))
    return {"a.weight": shared, "a.bias": shared, "b.weight": other}, [shared, other]


def roots(padded: bool) -> Root:
    present = torch.ones(M, K, dtype=torch.bool)
    vectors, scale = random(M, K, C, seed=20), random(M, K, seed=21).exp()
    if padded:
        present[1, 0] = present[4, 1] = False
        vectors = vectors * present[..., None]
    return Root(vectors, scale, present if padded else None)


def test_the_cotangent_is_written_over_the_rows() -> None:
    fake = linear_fake()
    structure = ntk_of(fake)
    statistic = structure.collect(None, fake, roots(False))
    precisions, leaves = precisions_of()
    differential = structure.differentiate(statistic, precisions, leaves)
    for mine, stored in zip(differential.cotangent.tensors(), statistic.tensors(), strict=True):
        if mine.ndim == 2:
            assert mine.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("sizes", [(), (2,)])
def test_gram_matrices_replace_all_rows(purpose: Purpose, sizes: Sequence[int]) -> None:
    """If only log-determinants follow. The last of several micro-batches is released before."""
    fake, root = linear_fake(), roots(True)
    structure = ntk_of(fake)
    statistic = accumulated(structure, fake, root, sizes, structure.empty(purpose, M))
    assert bool(statistic.rows) == (bool(sizes) or purpose not in LOG_DETS)
    structure.log_det(statistic, precisions_of()[0])
    assert bool(statistic.rows) == (purpose not in LOG_DETS)
    assert structure.collect(structure.empty(purpose, M + 1), fake, root).rows


def test_rows_are_kept_in_the_storage_asked_for() -> None:
    fake = linear_fake()
    weights = weights_of(fake)
    storage = Storage(torch.bfloat16, torch.device("cpu"))
    structure = Ntk(weights, {name: name for name in weights}, store=storage.store)
    statistic = structure.collect(None, fake, roots(False))
    assert {t.dtype for rows in statistic.rows.values() for t in rows.tensors()} == {torch.bfloat16}
    precisions, leaves = precisions_of()
    exact = ntk_of(fake)
    value = exact.log_det(exact.collect(None, fake, roots(False)), precisions)
    differential = structure.differentiate(statistic, precisions, leaves)
    assert differential.log_det.value.dtype == torch.float64  # the products are not in bfloat16
    torch.testing.assert_close(differential.log_det.value, value.detach(), rtol=1e-2, atol=0)


# ------------------------------------------------------------------ contraction


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("k", [1, 2])
def test_contraction_against_rows(positions: int, k: int) -> None:
    inputs = random(M, positions, 4, seed=1).requires_grad_()
    gradients = random(M, k, positions, 3, seed=2).requires_grad_()
    rows = torch.einsum("mkto,mti->mkoi", gradients, inputs).flatten(0, 1).flatten(1)
    gram = contraction_gram((inputs, gradients), (inputs, gradients))
    torch.testing.assert_close(gram, rows @ rows.mT)
    cotangent = random(M * k, M * k, seed=3)
    cotangent = cotangent + cotangent.mT
    want = torch.autograd.grad((cotangent * (rows @ rows.mT)).sum(), [inputs, gradients])
    got = contraction_cotangents(inputs.detach(), gradients.detach(), cotangent)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-12)


def looked_up_rows(numbers: Tensor, gradients: Tensor, entries: int) -> Tensor:
    chosen = torch.nn.functional.one_hot(numbers, entries).to(gradients)
    return torch.einsum("mkti,mtv->mkvi", gradients, chosen).flatten(0, 1).flatten(1)


@pytest.mark.parametrize("kinds", ["l", "lp", "pl", "ll", "plp", "pp"])
def test_tied_uses_against_rows(kinds: str) -> None:
    """Lookups and products (l, p) of one matrix: Gram and cotangents."""
    for entries in [2, 5, 40]:
        for k in [1, 3]:
            generator = torch.Generator().manual_seed(entries)
            uses, rows = [], torch.zeros(M * k, entries * 4, dtype=torch.float64)
            for seed, kind in enumerate(kinds):
                positions = 3 + seed
                if kind == "l":
                    numbers = torch.randint(entries, (M, positions), generator=generator)
                    gradients = random(M, k, positions, 4, seed=seed).requires_grad_()
                    uses.append((numbers, gradients))
                    rows = rows + looked_up_rows(numbers, gradients, entries)
                else:
                    inputs = random(M, positions, 4, seed=10 + seed).requires_grad_()
                    gradients = random(M, k, positions, entries, seed=seed).requires_grad_()
                    uses.append((inputs, gradients))
                    products = torch.einsum("mkto,mti->mkoi", gradients, inputs)
                    rows = rows + products.flatten(0, 1).flatten(1)
            torch.testing.assert_close(uses_gram(uses), rows @ rows.mT)
            cotangent = random(M * k, M * k, seed=3)
            cotangent = cotangent + cotangent.mT
            leaves = [t for pair in uses for t in pair if t.requires_grad]
            want = torch.autograd.grad((cotangent * (rows @ rows.mT)).sum(), leaves)
            cotangents = uses_cotangents([(a.detach(), g.detach()) for a, g in uses], cotangent)
            got = [t for pair in cotangents for t in pair if t is not None]
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-11)


def test_lookups_are_contracted_where_the_table_is_long() -> None:
    long, short = MatrixUse(16, 8, 10_000, True), MatrixUse(16, 8, 10, True)
    head = MatrixUse(1, 8, 10_000)
    uses = {"long": (long,), "short": (short,), "tied": (long, head)}
    assert set(contracted(uses, 64, 1, CPU)) == {"long", "tied"}


def test_the_cheaper_way_by_operation_count() -> None:
    uses = {
        "wide": (MatrixUse(1, 1000, 500),),
        "tiny": (MatrixUse(1, 1, 2),),
        "long": (MatrixUse(64, 32, 32),),
    }
    assert set(contracted(uses, 100, 1, CPU)) == {"wide"}
    assert set(contracted(uses, 1000, 10, CPU)) == {"wide"}
    # One datum: T² (i + o + 1) products against 2 T i o or so.
    assert not contracted({"long": (MatrixUse(1000, 8, 8),)}, 10, 1, CPU)


def test_launches_count_on_other_devices() -> None:
    """Rows of small matrices are formed there, and rows of wide ones are not."""
    uses = {
        "narrow": (MatrixUse(1, 512, 10),),
        "wide": (MatrixUse(16, 4096, 4096),),
        "table": (MatrixUse(16, 8, 10_000, True), MatrixUse(1, 8, 10_000)),
    }
    assert set(contracted(uses, 100, 1, CPU)) == {"narrow", "wide", "table"}
    assert set(contracted(uses, 100, 1, torch.device("meta"))) == {"wide"}


# ------------------------------------------------------------------ linear algebra


def test_eigenvalues_of_low_rank() -> None:
    rows = random(4, 60, seed=1)
    rows[3] *= 1e-4
    rows.requires_grad_()
    gram = rows.mT @ rows
    few, all_of_them = psd_eigenvalues(gram, 4), psd_eigenvalues(gram)
    assert len(few) < 20 and len(all_of_them) == 60
    values = [eigenvalues.log1p().sum() for eigenvalues in (few, all_of_them)]
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=0)
    got, want = (torch.autograd.grad(v, rows, retain_graph=True)[0] for v in values)
    assert float((got - want).norm()) < 1e-9 * float(want.norm())
    assert len(psd_eigenvalues(gram, 30)) == 60  # no gain: the whole decomposition


def test_low_rank_batches_and_zeros() -> None:
    rows = random(3, 2, 50, seed=2)
    rows[1] = 0
    gram = rows.mT @ rows
    few = psd_eigenvalues(gram, 2)
    torch.testing.assert_close(few[1], torch.zeros_like(few[1]))
    whole = torch.linalg.eigvalsh(gram)
    torch.testing.assert_close(few.log1p().sum(-1), whole.clamp(min=0).log1p().sum(-1))


def test_inner_gram_by_autograd() -> None:
    rows, cotangent = random(2, 6, 3, seed=1).requires_grad_(), random(2, 3, 3, seed=2)
    value, expected = inner_gram(rows, cotangent), (cotangent * (rows.mT @ rows)).sum()
    torch.testing.assert_close(value, expected)
    (got,), (want,) = (torch.autograd.grad(v, rows) for v in (value, expected))
    torch.testing.assert_close(got, want)


def test_inner_product_of_statistics() -> None:
    fake = linear_fake()
    structure = make_structure("blockdiag", weights_of(fake))
    one = structure.collect(None, fake, roots(False))
    expected = sum((t * t).sum() for t in one.tensors())
    torch.testing.assert_close(inner_product(one, one), expected)
