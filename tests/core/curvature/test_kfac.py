"""KFAC against its exact cases, and against its formula written out elsewhere."""

from collections.abc import Sequence

import pytest
import torch
from core.curvature.fakes import (
    Fake,
    Root,
    accumulated,
    dense_log_det,
    make_structure,
    random,
    weights_of,
)
from torch import Tensor, nn

from evigrad.core.algebra import is_one_number
from evigrad.core.curvature import BlockDiagonal, Kfac
from evigrad.errors import ConfigurationError
from evigrad.network.linearization import Linearization
from evigrad.network.plan import plan

M, C, K = 3, 2, 2
GROUPS = {"w": 2, "v": 1}  # channel groups
POSITIONS = {"w": (3,), "v": (1, 4)}  # positions of each use; v is used twice
IN, OUT = 3, 2


def rows_of_uses(uses: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The Jacobian of a weight from its uses, (m, C, G o, i)."""
    return sum(
        (torch.einsum("mgti,mcgto->mcgoi", a, d).flatten(2, 3) for a, d in uses[1:]),
        torch.einsum("mgti,mcgto->mcgoi", *uses[0]).flatten(2, 3),
    )


def kronecker_fake(m: int = M, positions=None, groups=None, graph: bool = False) -> Fake:
    positions, groups = positions or POSITIONS, groups or GROUPS
    uses = {}
    for i, name in enumerate(positions):
        g = groups[name]
        uses[name] = [
            (
                random(m, g, t, IN, seed=10 * i + j).requires_grad_(graph),
                random(m, C, g, t, OUT, seed=100 + 10 * i + j).requires_grad_(graph),
            )
            for j, t in enumerate(positions[name])
        ]
    jacobian = {name: rows_of_uses(u) for name, u in uses.items()}
    jacobian["bias"] = random(m, C, 3, seed=40).requires_grad_(graph)
    jacobian["big"] = random(m, C, 2, 3, seed=41).requires_grad_(graph)
    return Fake(jacobian, uses)


def build(fake: Fake, sharing: str = "expand", **settings) -> Kfac:
    settings.setdefault("dense_limit", 5)  # "bias" is below it, "big" above
    structure = make_structure(
        "kfac", weights_of(fake), frozenset(fake.uses), sharing=sharing, **settings
    )
    assert isinstance(structure, Kfac)
    return structure


def precisions_of(fake: Fake) -> dict[str, Tensor]:
    return {n: random(seed=60 + i).exp().requires_grad_() for i, n in enumerate(fake.jacobian)}


def kronecker_formula(fake: Fake, root: Root, name: str, sharing: str, precision) -> Tensor:
    """Σ_G log|I + B ⊗ A / (examples δ)|, example by example."""
    uses = [(u.inputs, u.gradients) for u in fake.factors(root.vectors, [name])[name]]
    m, groups = len(root.vectors), uses[0][0].shape[1]
    total = torch.zeros((), dtype=torch.float64)
    for group in range(groups):
        a_sum = torch.zeros(IN, IN, dtype=torch.float64)
        b_sum = torch.zeros(OUT, OUT, dtype=torch.float64)
        count = 0
        for n in range(m):
            places = [(u, t) for u, (a, _) in enumerate(uses) for t in range(a.shape[2])]
            inputs = [uses[u][0][n, group, t] for u, t in places]
            if sharing == "reduce":
                inputs = [torch.stack(inputs).mean(0)]
            a_sum = a_sum + torch.stack([torch.outer(v, v) for v in inputs]).sum(0)
            count += len(inputs)
            for k in range(root.vectors.shape[1]):
                grads = [uses[u][1][n, k, group, t] for u, t in places]
                if sharing == "reduce":
                    grads = [torch.stack(grads).sum(0)]
                scale = 1 if root.scale is None else root.scale[n, k]
                b_sum = b_sum + torch.stack([torch.outer(v, v) for v in grads]).sum(0) * scale**2
        product = torch.kron(b_sum, a_sum) / count
        total = total + dense_log_det(product, precision.expand(len(product)))
    return total


def formula(fake: Fake, root: Root, precisions, sharing: str) -> Tensor:
    value = torch.zeros((), dtype=torch.float64)
    for name in fake.uses:
        value = value + kronecker_formula(fake, root, name, sharing, precisions[name])
    for name in ("bias", "big"):
        rows = fake.rows(root.vectors, [name])[name].flatten(2)
        rows = (rows if root.scale is None else rows * root.scale[:, :, None]).flatten(0, 1)
        h = rows.T @ rows
        h = h if name == "bias" else torch.diag(h.diagonal())
        value = value + dense_log_det(h, precisions[name].expand(len(h)))
    return value


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_value_and_gradients_against_the_formula(sharing):
    fake = kronecker_fake(graph=True)
    scale = random(M, K, seed=21).exp().requires_grad_()
    root = Root(random(M, K, C, seed=20).requires_grad_(), scale)
    precisions = precisions_of(fake)
    structure = build(fake, sharing)
    value = structure.log_det(accumulated(structure, fake, root, (1, 1)), precisions)
    expected = formula(fake, root, precisions, sharing)
    torch.testing.assert_close(value, expected, rtol=1e-11, atol=0)
    leaves = [root.vectors, *precisions.values(), fake.jacobian["bias"], fake.jacobian["big"]]
    leaves += [tensor for uses in fake.uses.values() for use in uses for tensor in use]
    leaves.append(scale)
    got = torch.autograd.grad(value, leaves)
    want = torch.autograd.grad(expected, leaves)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_one_datum_one_position_one_row_is_exact(sharing):
    fake = kronecker_fake(m=1, positions={"w": (1,), "v": (1,)}, groups={"w": 1, "v": 1})
    root = Root(random(1, 1, C, seed=20), random(1, 1, seed=21).exp())
    precisions = precisions_of(fake)
    values = []
    for structure in (build(fake, sharing, dense_limit=100), BlockDiagonal(weights_of(fake))):
        value = structure.log_det(accumulated(structure, fake, root), precisions)
        values.append([value, *torch.autograd.grad(value, list(precisions.values()))])
    for kfac, exact in zip(*values, strict=True):
        torch.testing.assert_close(kfac, exact, rtol=1e-10, atol=0)


# ------------------------------------------------------------------ real modules


class PerPosition(nn.Module):
    """A deep linear network with a loss per position: (m, T, 3) → (m, T · 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).flatten(1)


class Pooled(PerPosition):
    """The same with the outputs averaged over positions: (m, T, 3) → (m, 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).mean(1)


def statistics_of(model: nn.Module, x: Tensor, structures, sizes=(), vectors=None):
    """ℓ of each structure on a real network, all its outputs, unit noise."""
    weights = dict(model.named_parameters())
    jacobian_plan = plan(model, weights, x)
    results = []
    for name, settings in structures:
        structure = make_structure(name, weights, jacobian_plan.kronecker, **settings)
        statistic = None
        for part in x.split(sizes or len(x)):
            linearization = Linearization(model, weights, part, jacobian_plan, False)
            outputs = linearization.outputs.shape[1]
            eye = torch.eye(outputs, dtype=x.dtype).expand(len(part), outputs, outputs)
            statistic = structure.collect(statistic, linearization, Root(eye))
        precision = torch.tensor(0.3, dtype=x.dtype, requires_grad=True)
        value = structure.log_det(statistic, dict.fromkeys(weights, precision))
        results.append((value, torch.autograd.grad(value, precision)[0]))
    return results


EXACT = {"expand": PerPosition, "reduce": Pooled}


@pytest.mark.parametrize("sizes", [5, 2])
@pytest.mark.parametrize("sharing", EXACT)
def test_deep_linear_networks_are_exact_in_their_own_setting(sharing, sizes):
    torch.manual_seed(0)
    model, x = EXACT[sharing]().double(), random(5, 4, 3)
    kfac, exact = statistics_of(
        model, x, [("kfac", {"sharing": sharing}), ("blockdiag", {})], sizes=sizes
    )
    for got, want in zip(kfac, exact, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=0)


@pytest.mark.parametrize("sharing", EXACT)
def test_deep_linear_networks_are_not_exact_in_the_other_setting(sharing):
    torch.manual_seed(0)
    other = Pooled if sharing == "expand" else PerPosition
    model, x = other().double(), random(5, 4, 3)
    kfac, exact = statistics_of(model, x, [("kfac", {"sharing": sharing}), ("blockdiag", {})])
    assert abs(float((kfac[0] / exact[0]).detach()) - 1) > 1e-3


class TwoConvolutions(nn.Module):
    """What a convolution with two channel groups is, as two."""

    def __init__(self, grouped: nn.Conv2d) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Conv2d(2, 2, 2, bias=False) for _ in range(2)).double()
        for part, weight in zip(self.parts, grouped.weight.detach().chunk(2), strict=True):
            part.get_parameter("weight").data.copy_(weight)

    def forward(self, x: Tensor) -> Tensor:
        halves = [part(half) for part, half in zip(self.parts, x.chunk(2, dim=1), strict=True)]
        return torch.cat(halves, dim=1).tanh().flatten(1)


@pytest.mark.parametrize("sharing", EXACT)
def test_a_grouped_convolution_is_one_kronecker_pair_per_group(sharing):
    torch.manual_seed(0)
    grouped = nn.Conv2d(4, 4, 2, groups=2, bias=False).double()
    x = random(3, 4, 3, 3)
    settings = [("kfac", {"sharing": sharing})]
    (one,) = statistics_of(nn.Sequential(grouped, nn.Tanh(), nn.Flatten()), x, settings)
    (two,) = statistics_of(TwoConvolutions(grouped), x, settings)
    torch.testing.assert_close(one, two, rtol=1e-11, atol=0)


class Twice(nn.Module):
    """One layer at two places, and the same written as two positions."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        if self.stacked:
            return self.layer(x).tanh().prod(1)
        return self.layer(x[:, 0]).tanh() * self.layer(x[:, 1]).tanh()


@pytest.mark.parametrize("sharing", EXACT)
def test_a_layer_called_twice_has_the_positions_of_both_calls(sharing):
    results = []
    for stacked in (True, False):
        torch.manual_seed(0)
        model = Twice(stacked).double()
        results += statistics_of(model, random(4, 2, 3), [("kfac", {"sharing": sharing})])
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=0)


def test_parameters_without_factors_are_listed_and_kept():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 2)).double()
    weights = dict(model.named_parameters())
    structure = make_structure(
        "kfac", weights, plan(model, weights, random(3, 3)).kronecker, dense_limit=3
    )
    assert structure.describe() == {
        "0.weight": "kronecker 4 (x) 3, expand",
        "0.bias": "diagonal",
        "1.weight": "diagonal",
        "1.bias": "diagonal",
        "2.weight": "dense 1x1",
        "3.weight": "kronecker 2 (x) 4, expand",
        "3.bias": "dense 2x2",
    }


# ------------------------------------------------------------------ precisions and caches


def test_a_precision_that_varies_in_a_kronecker_block_is_refused():
    fake = kronecker_fake()
    constant = {name: name for name in fake.jacobian if name != "w"}
    with pytest.raises(ConfigurationError, match=r"\['w'\].*layerwise"):
        build(fake, precision_groups=constant)
    structure = build(fake)
    precisions = {n: p.detach() for n, p in precisions_of(fake).items()}
    precisions["v"] = torch.ones(OUT, IN, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match=r"\['v'\]"):
        structure.log_det(accumulated(structure, fake, Root(random(M, K, C))), precisions)


def test_a_precision_may_vary_in_the_other_blocks():
    fake = kronecker_fake()
    root = Root(random(M, K, C, seed=20))
    structure = build(fake, precision_groups={"w": 0, "v": 1})
    precisions = precisions_of(fake)
    varying = {
        n: precisions[n].detach().expand(fake.jacobian[n].shape[2:]) for n in ("bias", "big")
    }
    leaves = [(p * random(*p.shape, seed=5).exp()).requires_grad_() for p in varying.values()]
    mixed = precisions | dict(zip(varying, leaves, strict=True))
    value = structure.log_det(accumulated(structure, fake, root), mixed)
    expected = torch.zeros((), dtype=torch.float64)
    for name in fake.uses:
        expected = expected + kronecker_formula(fake, root, name, "expand", mixed[name])
    for name in ("bias", "big"):
        rows = fake.rows(root.vectors, [name])[name].flatten(2).flatten(0, 1)
        h = rows.T @ rows if name == "bias" else torch.diag(rows.square().sum(0))
        expected = expected + dense_log_det(h, mixed[name].flatten())
    torch.testing.assert_close(value, expected)
    for got, want in zip(
        torch.autograd.grad(value, leaves), torch.autograd.grad(expected, leaves), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_several_prior_steps_factor_once():
    fake = kronecker_fake()
    root = Root(random(M, K, C, seed=20))
    structure = build(fake)
    statistic = accumulated(structure, fake, root)
    structure.log_det(statistic, precisions_of(fake))
    for sums in statistic.factors.values():
        for matrix in (sums.inputs, sums.gradients):
            matrix.fill_(float("nan"))  # whoever factors again will show it
    for factor in (0.1, 20.0):
        precisions = {
            n: (factor * p.detach()).requires_grad_() for n, p in precisions_of(fake).items()
        }
        value = structure.log_det(statistic, precisions)
        expected = formula(fake, root, precisions, "expand")
        torch.testing.assert_close(value, expected, rtol=1e-11, atol=0)
        leaves = list(precisions.values())
        for got, want in zip(
            torch.autograd.grad(value, leaves), torch.autograd.grad(expected, leaves), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=0)


def test_a_weight_that_was_not_used_adds_nothing():
    fake = kronecker_fake()
    unused = Fake(fake.jacobian, {"w": fake.uses["w"], "v": []})
    root, precisions = Root(random(M, K, C, seed=20)), precisions_of(fake)
    values = []
    for fake_pass in (fake, unused):
        structure = build(fake_pass)
        values.append(structure.log_det(accumulated(structure, fake_pass, root), precisions))
    dropped = kronecker_formula(fake, root, "v", "expand", precisions["v"])
    torch.testing.assert_close(values[0] - values[1], dropped)


def test_float32_factors_summed_in_float64():
    fake = kronecker_fake()
    single = Fake(
        {n: j.float() for n, j in fake.jacobian.items()},
        {n: [(a.float(), d.float()) for a, d in uses] for n, uses in fake.uses.items()},
    )
    root = Root(random(M, K, C, seed=20).float(), random(M, K, seed=21).exp().float())
    precisions = {n: p.detach() for n, p in precisions_of(fake).items()}
    structure = build(single, gram_dtype=torch.float64)
    value = structure.log_det(accumulated(structure, single, root), precisions)
    assert value.dtype == torch.float64
    exact = Root(root.vectors.double(), random(M, K, seed=21).exp())
    torch.testing.assert_close(value, formula(fake, exact, precisions, "expand"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_rows_in_parts_are_those_at_once(sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, precisions = kronecker_fake(), precisions_of(kronecker_fake())
    root = Root(random(M, 5, C, seed=7), random(M, 5, seed=8).exp())
    at_once = build(fake, sharing).collect(None, fake, root)
    monkeypatch.setattr(Kfac, "rows_at_once", 2)
    in_parts = build(fake, sharing).collect(None, fake, root)
    for name, factors in at_once.factors.items():
        assert in_parts.factors[name].count == factors.count
        assert in_parts.factors[name].num_rows == factors.num_rows
    torch.testing.assert_close(in_parts.tensors(), at_once.tensors())
    curvature = build(fake, sharing)
    torch.testing.assert_close(
        curvature.log_det(in_parts, precisions), curvature.log_det(at_once, precisions)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_number_in_half_precision(dtype):
    one, two = (torch.zeros(size, requires_grad=True) for size in ((), (2,)))
    assert is_one_number(one.to(dtype).exp().expand(800, 1).flatten(), [one])
    assert is_one_number(torch.cat([one.to(dtype).exp().expand(k) for k in (301, 99)]), [one])
    assert not is_one_number(two.to(dtype).exp().expand(400, 2).flatten(), [two])
