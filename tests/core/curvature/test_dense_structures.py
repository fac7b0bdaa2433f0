"""ntk, full, blockdiag (by H and by the rows) and diag against dense matrices of the same rows."""

import pytest
import torch
from core.curvature.fakes import (
    SHAPES,
    Fake,
    Root,
    accumulated,
    dense_log_det,
    dense_rows,
    flat_precision,
    make_fake,
    make_structure,
    random,
    weights_of,
)
from hypothesis import given
from hypothesis import strategies as st

from evigrad.core.block import Conditioning
from evigrad.core.curvature import (
    BlockDiagonal,
    BlockKernel,
    Curvature,
    Diagonal,
    Full,
    Ntk,
)
from evigrad.core.curvature.base import log_det_of
from evigrad.core.names import STRUCTURES
from evigrad.errors import ConfigurationError
from evigrad.passes.parameter_blocks import partition_names

M, C, K = 4, 3, 2
GROUPS = {"first": ["a"], "second": ["b", "scalar"]}
TENSOR_PARTS = [range(0, 6), range(6, 8), range(8, 12), range(12, 13)]
MODULE_PARTS = [range(0, 8), range(8, 12), range(12, 13)]
PARTS = {
    "ntk": [range(13)],
    "full": [range(13)],
    "blockdiag": TENSOR_PARTS,
    "blockdiag-module": MODULE_PARTS,
    "blockdiag-groups": [range(0, 8), range(8, 13)],
    "diag": [range(i, i + 1) for i in range(13)],
}
# The same numbers from the Gram matrices of the rows of each block.
DUAL = [name for name in PARTS if name.startswith(("full", "blockdiag"))]
PARTS |= {f"kernel:{name}": PARTS[name] for name in DUAL}


def precisions_of(kind: str, seed: int = 50) -> dict[str, torch.Tensor]:
    """One leaf for each tensor: "constant", "varying", or "mixed"."""
    result = {}
    for i, (name, shape) in enumerate(SHAPES.items()):
        varies = kind == "varying" or (kind == "mixed" and i % 2 == 0)
        result[name] = random(*(shape if varies else ()), seed=seed + i).exp().requires_grad_()
    return result


def build(name: str, weights, kind: str = "constant", **settings):
    form, _, name = name.rpartition(":")
    structure, _, partition = name.partition("-")
    if partition:
        settings["parameter_partition"] = GROUPS if partition == "groups" else partition
    constant = {n: n for n, p in precisions_of(kind).items() if p.ndim == 0 or not SHAPES[n]}
    curvature = make_structure(structure, weights, precision_groups=constant, **settings)
    if not form:
        return curvature
    assert isinstance(curvature, BlockDiagonal)
    return BlockKernel(curvature, weights, constant, settings.get("gram_dtype"))


def expected_log_det(fake: Fake, root: Root, precisions, parts) -> torch.Tensor:
    rows = dense_rows(fake, root)
    hessian = rows.T @ rows
    p0 = flat_precision(precisions, weights_of(fake))
    values = []
    for part in parts:
        chosen = torch.tensor(list(part))
        values.append(dense_log_det(hessian[chosen][:, chosen], p0[chosen]))
    return torch.stack(values).sum()


@given(
    m=st.integers(1, 5), k=st.integers(1, 4), log_scale=st.floats(-4, 4), seed=st.integers(0, 99)
)
def test_theorem_3_and_theorem_1_for_any_rows_and_precisions(m, k, log_scale, seed):
    """ntk = full (Weinstein-Aronszajn), and a finer partition of the weights has more slack."""
    fake = make_fake(m, C, seed=seed)
    scale = (log_scale + random(m, k, seed=seed + 7)).exp()
    root = Root(random(m, k, C, seed=seed + 5), scale)
    kind = ["constant", "varying", "mixed"][seed % 3]
    precisions = {n: p.detach() for n, p in precisions_of(kind, seed=seed).items()}
    value = {}
    for name in PARTS:
        structure = build(name, weights_of(fake), kind)
        value[name] = float(structure.log_det(accumulated(structure, fake, root), precisions))
    assert value["ntk"] == pytest.approx(value["full"], rel=1e-9)
    for name in DUAL:
        assert value[f"kernel:{name}"] == pytest.approx(value[name], rel=1e-9)
    order = ["full", "blockdiag-module", "blockdiag", "diag"]
    for coarse, fine in zip(order, order[1:], strict=False):
        assert 0 <= value[coarse] <= value[fine] * (1 + 1e-12)
    assert value["full"] < value["diag"]


# ------------------------------------------------------------------ ntk: groups and kept Grams


def ntk_case():
    fake = make_fake(M, C)
    root = Root(random(M, K, C, seed=20), random(M, K, seed=21).exp())
    with torch.no_grad():
        scalar, other = torch.tensor(0.7), torch.tensor(2.0)
    shared = {"a.weight": scalar, "a.bias": scalar, "b.weight": other, "scalar": other}
    return fake, root, {n: p.double().requires_grad_() for n, p in shared.items()}


def test_precision_groups_give_the_same_number_with_fewer_grams():
    fake, root, precisions = ntk_case()
    weights = weights_of(fake)
    grouped = Ntk(weights, {"a.weight": 0, "a.bias": 0, "b.weight": 1, "scalar": 1})
    alone = Ntk(weights, {name: name for name in weights})
    statistics = [accumulated(structure, fake, root) for structure in (grouped, alone)]
    values = [
        structure.log_det(statistic, precisions)
        for structure, statistic in zip((grouped, alone), statistics, strict=True)
    ]
    torch.testing.assert_close(values[0], values[1], rtol=1e-13, atol=0)
    assert [len(statistic.grams) for statistic in statistics] == [2, 4]


def test_several_prior_steps_on_one_statistic_read_the_rows_once():
    fake, root, precisions = ntk_case()
    structure = Ntk(weights_of(fake), {name: name for name in precisions})
    statistic = accumulated(structure, fake, root, (2,))
    structure.log_det(statistic, precisions)
    kept = dict(statistic.grams)
    for rows in statistic.rows.values():
        for chunk in rows.tensors():
            chunk.fill_(float("nan"))  # whoever reads the rows again will show it
    for factor in (0.1, 1.0, 30.0):
        other = {n: (factor * p.detach()).requires_grad_() for n, p in precisions.items()}
        value = structure.log_det(statistic, other)
        expected = expected_log_det(fake, root, other, [range(13)])
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=0)
        got = torch.autograd.grad(value, list(other.values()))
        want = torch.autograd.grad(expected, list(other.values()))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-12)
    assert all(statistic.grams[key] is gram for key, gram in kept.items())


def test_a_step_on_the_scale_keeps_the_grams():
    fake, root, precisions = ntk_case()
    structure = Ntk(weights_of(fake), {name: name for name in precisions})
    statistic = accumulated(structure, fake, root, (1,))
    structure.log_det(statistic, precisions)
    scale = random(M, K, seed=77).exp().requires_grad_()
    moved, precisions = structure.rescaled(statistic, precisions, scale.flatten(), [])
    value = structure.log_det(moved, precisions)
    assert moved.grams is statistic.grams and len(moved.grams) == 4
    expected = expected_log_det(fake, Root(root.vectors, scale), precisions, [range(13)])
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=0)
    (got,), (want,) = (torch.autograd.grad(v, scale) for v in (value, expected))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_micro_batches_with_and_without_a_scale_mix():
    fake, _, precisions = ntk_case()
    vectors, scale = random(M, K, C, seed=20), random(2, K, seed=3).exp()
    structure = Ntk(weights_of(fake), {name: name for name in precisions})
    first = structure.collect(None, fake.part(slice(0, 2)), Root(vectors[:2]))
    both = structure.collect(first, fake.part(slice(2, 4)), Root(vectors[2:], scale))
    whole = Root(vectors, torch.cat([torch.ones(2, K, dtype=scale.dtype), scale]))
    expected = expected_log_det(fake, whole, precisions, [range(13)])
    torch.testing.assert_close(structure.log_det(both, precisions), expected)


def test_kept_and_unkept_grams_agree(monkeypatch):
    fake, root, precisions = ntk_case()
    structure = Ntk(weights_of(fake), {name: name for name in precisions})
    results = []
    for limit in (2**30, 0):
        monkeypatch.setattr("evigrad.core.curvature.ntk.GRAM_CACHE_BYTES", limit)
        statistic = accumulated(structure, fake, Root(root.vectors.repeat(1, 3, 1)))
        value = structure.log_det(statistic, precisions)
        results.append([value, *torch.autograd.grad(value, list(precisions.values()))])
        assert bool(statistic.grams) == bool(limit)
    for kept, unkept in zip(*results, strict=True):
        torch.testing.assert_close(kept, unkept, rtol=1e-11, atol=1e-13)


def test_rows_with_a_graph_are_never_replaced_by_kept_grams():
    fake, root, precisions = ntk_case()
    fake = Fake({name: j.requires_grad_() for name, j in fake.jacobian.items()}, {})
    structure = Ntk(weights_of(fake), {name: name for name in precisions})
    statistic = accumulated(structure, fake, root)
    structure.log_det(statistic, precisions)
    assert not statistic.grams


def test_groups_that_do_not_share_their_precision_are_refused():
    fake, root, precisions = ntk_case()
    groups = dict.fromkeys(precisions, "all")
    structure = Ntk(weights_of(fake), groups)
    with pytest.raises(ConfigurationError, match="have different precisions"):
        structure.log_det(accumulated(structure, fake, root), precisions)
    varying = {n: p.detach() for n, p in precisions_of("varying").items()}
    alone = Ntk(weights_of(fake), {name: name for name in precisions})
    with pytest.raises(ConfigurationError, match="a.weight"):
        alone.log_det(accumulated(alone, fake, root), varying)


# ------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("name", PARTS)
def test_float32_rows_with_a_float64_gram(name):
    single = Fake({n: j.float() for n, j in make_fake(M, C).jacobian.items()}, {})
    vectors, scale = random(M, K, C, seed=20).float(), random(M, K, seed=21).exp().float()
    root = Root(vectors, scale)
    precisions = {n: p.detach().float().requires_grad_() for n, p in precisions_of("mixed").items()}
    structure = build(name, weights_of(single), "mixed", gram_dtype=torch.float64)
    value = structure.log_det(accumulated(structure, single, root, (3,)), precisions)
    assert value.dtype == torch.float64
    # The rows are rounded (einsum in float32), their products are not.
    double = Fake({n: j.double() for n, j in single.jacobian.items()}, {})
    double_root = Root(vectors.double(), scale.double())
    expected = expected_log_det(double, double_root, precisions, PARTS[name])
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=0, check_dtype=False)
    grads = torch.autograd.grad(value, list(precisions.values()))
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in grads)


@pytest.mark.parametrize("name", PARTS)
def test_half_precision_rows_are_summed_in_float32(name):
    fake = make_fake(M, C)
    half = Fake({n: j.bfloat16() for n, j in fake.jacobian.items()}, {})
    precisions = {n: p.detach().bfloat16() for n, p in precisions_of("constant").items()}
    structure = build(name, weights_of(half))
    value = structure.log_det(
        accumulated(structure, half, Root(random(M, K, C).bfloat16())), precisions
    )
    assert value.dtype == torch.float32
    expected = expected_log_det(fake, Root(random(M, K, C)), precisions_of("constant"), PARTS[name])
    torch.testing.assert_close(value.double(), expected, rtol=0.03, atol=0)


# ------------------------------------------------------------------ words and refusals


def test_describe():
    weights = weights_of(make_fake(M, C))
    assert build("ntk", weights).describe() == dict.fromkeys(weights, "gram")
    shared = Ntk(weights, {"a.weight": "first", "a.bias": "first"}).describe()
    assert shared["a.bias"] == "gram of group 'first'" and shared["b.weight"] == "scaled rows"
    assert build("diag", weights).describe() == dict.fromkeys(weights, "diagonal")
    assert build("blockdiag", weights).describe()["a.weight"] == "dense 6x6"
    module = build("blockdiag-module", weights).describe()
    assert module["a.weight"] == "dense 8x8 (block 'a' of 2 parameters)"
    assert list(module) == list(weights)
    assert "13x13" in build("full", weights).describe()["scalar"]
    kernel = build("kernel:blockdiag-module", weights).describe()
    assert kernel == {name: f"{words}, by the Gram of its rows" for name, words in module.items()}


def test_a_partition_that_is_none_is_refused():
    for partition, message in [
        ("modul", "Did you mean 'module'"),
        ({"x": ["a"]}, "Weights without a group: 'b.weight', 'scalar'"),
        ({"x": ["a", "b"], "y": ["scalar", "a.bias"]}, "'a.bias' is in several groups: x, y"),
        ({"x": ["a", "b.wieght", "scalar"]}, "Did you mean 'b.weight'"),
        ([["a", "b", "scalar"], []], "got none for '1'"),
    ]:
        weights = weights_of(make_fake(M, C))
        with pytest.raises(ConfigurationError, match=message):
            make_structure("blockdiag", weights, parameter_partition=partition)


def test_groups_take_prefixes_patterns_and_lists():
    weights = weights_of(make_fake(M, C))
    for groups in (
        {"x": ["*.weight"], "y": ["a.bias", "scalar"]},
        [["a.weight", "b"], ["*.bias", "scalar"]],
    ):
        words = BlockDiagonal(weights, partition_names(list(weights), groups)).describe()
        assert words["b.weight"].startswith("dense 10x10")
        assert words["scalar"].startswith("dense 3x3")


def test_a_parametrized_weight_belongs_to_its_module():
    names = ["a.bias", "a.parametrizations.weight.original0", "ab.weight"]
    weights = {name: torch.zeros(2) for name in names}
    words = BlockDiagonal(weights, partition_names(names, "module")).describe()
    assert [words[name][:9] for name in names] == ["dense 4x4", "dense 4x4", "dense 2x2"]


def test_unknown_names_get_the_nearest():
    weights = weights_of(make_fake(M, C))
    with pytest.raises(ConfigurationError, match="Did you mean 'diag'"):
        make_structure("diga", weights)


def test_each_name_has_its_class():
    weights = weights_of(make_fake(M, C))
    for name, kind in {"full": Full, "blockdiag": BlockDiagonal, "diag": Diagonal}.items():
        structure = make_structure(name, weights)
        assert type(structure) is kind and structure.name == name
        if name != "diag":
            assert build(f"kernel:{name}", weights).name == name


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_what_the_table_says(name: str) -> None:
    curvature, facts = make_structure(name, weights_of(make_fake(M, C))), STRUCTURES[name]
    takes_anchors = type(curvature).conditional is not Curvature.conditional
    assert curvature.keeps_rows == takes_anchors == facts.keeps_rows
    if not takes_anchors:
        with pytest.raises(ConfigurationError, match=f"'{name}' does not support anchors"):
            log_det_of(curvature, None, {}, Conditioning(torch.zeros(1, dtype=torch.int64), ()))
