"""Expectations by enumerating every draw of tiny cases with C = 3.

Partitions are of N = 7 data, three in a block, so that the last block is ragged. Subsets are all
those of two from three data.
"""

from typing import Any

import pytest
import torch
from every_draw import every_subset
from torch import Tensor, nn

from evigrad import Evidence, reference
from evigrad.blocks import Block
from evigrad.core.names import STRUCTURES, Estimator
from evigrad.core.partition import Partition
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior

N, C = 7, 3

SPLITS = ["1", "2", "C", "1-iid", "2-iid"]
NAMES = [
    *(f"{s}-3-{o}" for s in STRUCTURES for o in SPLITS),
    *(f"{s}-N-{o}" for s in ("ntk", "full", "kfac") for o in ("1", "2", "C")),
    *(f"{s}-2-rows" for s in ("ntk", "full", "diag", "kfac")),
    *(f"{s}-3-1-ef" for s in STRUCTURES),
    *(f"{s}-3-1-grouped" for s in ("ntk", "full", "kfac")),
    "ntk-3-C-grouped",
    "ntk-4-rows",
    "ntk-3-1-mc",
]


class Net(nn.Module):
    """Two Linear layers with a gate: KFAC's formula is short, and h acts inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.gate = nn.Parameter(torch.tensor([0.5, -0.3]))
        self.second = nn.Linear(2, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.gate.exp())


def problem(num_data: int = N) -> tuple[Net, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net().double()
        x = torch.randn(num_data, 2, dtype=torch.float64)
        y = torch.randint(C, (num_data,))
    return model, x, y


def build(
    estimator: str, root: str | None = None, num_data: int = N
) -> tuple[Evidence, Tensor, Tensor]:
    model, x, y = problem(num_data)
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise", precision=2.0),
        estimator=estimator,
        num_data=num_data,
        hyperparameters=["gate"],
        root=root,
        generator=3,
    )
    return evidence, x, y


def with_data(block: Block, x: Tensor, y: Tensor) -> Block:
    i = block.indices
    return Block(i, block.columns, block.scale, block.likelihood_weights, x[i], y[i])


def kfac_log_det(evidence: Evidence, x: Tensor, rows: list[list[Tensor]]) -> Tensor:
    """The formula: (Σ a aᵀ) ⊗ (Σ g gᵀ) / m for weights, exact blocks for biases.

    ``rows[n]`` are the cotangents of datum n, vectors of length C.
    """
    model = evidence.model
    assert isinstance(model, Net)
    precisions = evidence.prior.precisions()
    z1 = model.first(x)
    a2 = torch.tanh(z1) * model.gate.exp()
    f = model.second(a2)
    factors = {"first": (x, []), "second": (a2, [])}
    for n, cotangents in enumerate(rows):
        for v in cotangents:
            g1, g2 = torch.autograd.grad((f[n] * v).sum(), [z1, f], create_graph=True)
            factors["first"][1].append(g1[n])
            factors["second"][1].append(g2[n])
    total = torch.zeros((), dtype=torch.float64)
    for layer, (inputs, gradients) in factors.items():
        if not gradients:
            continue
        g = torch.stack(gradients)
        b = g.T @ g
        kron = torch.kron(b, inputs.T @ inputs) / len(x)
        for name, h in ((f"{layer}.weight", kron), (f"{layer}.bias", b)):
            precision = precisions[name].expand(len(h))
            total = total + reference.log_det(h, precision)
    return total


def whole_jacobian(evidence: Evidence, x: Tensor) -> Tensor:
    """(N, C, P), with a graph, which all blocks of the data share."""
    return reference.jacobian(evidence.model, evidence.weights(), x)


def dense_terms(
    evidence: Evidence, block: Block, x: Tensor, y: Tensor, whole: Tensor
) -> tuple[Tensor, Tensor]:
    """(log likelihood, log-determinant) estimates of a block by dense matrices, with a graph."""
    spec = evidence.estimator
    i = block.indices
    xs, ys = x[i], y[i]
    weights = evidence.weights()
    f = reference.outputs(evidence.model, xs)
    log_prob = f.log_softmax(-1).gather(1, ys[:, None])[:, 0]
    log_lik = (block.likelihood_weights * log_prob).sum()
    hessian = reference.softmax_hessian(f)
    score = nn.functional.one_hot(ys, C) - f.softmax(-1)
    if spec.structure == "kfac":
        rows: list[list[Tensor]] = []
        for n in range(len(i)):
            if spec.curvature == "ef":
                rows.append([score[n]])
                continue
            columns = (
                list(range(C))
                if block.columns is None
                else [int(c) for c in block.columns[n] if c >= 0]
            )
            if not columns:
                rows.append([])
            elif evidence.root == "subblock" and len(columns) < C:
                # any root of the sub-block: the eigen decomposition would have a bad gradient
                sub = torch.linalg.cholesky(hessian[n][columns][:, columns])
                embed = torch.zeros(C, len(columns), dtype=f.dtype)
                embed = embed.index_put((torch.tensor(columns),), sub)
                rows.append(list(embed.T))
            else:
                kind = "fisher" if evidence.root == "subblock" else evidence.root
                rows.append(list(reference.softmax_root(f[n : n + 1], kind)[0].T[columns]))
        return log_lik, block.scale * kfac_log_det(evidence, xs, rows)
    jac = whole[i]
    if spec.curvature == "ef":
        rows_ef = torch.einsum("nc,ncp->np", score, jac)
        h = rows_ef.T @ rows_ef
    else:
        split = evidence.root != "subblock"
        root = reference.softmax_root(f, evidence.root) if split else None
        kept = reference.kept_curvature(hessian, block.columns, root)
        h = reference.ggn(jac, kept)
    precision = reference.vector(evidence.prior.precisions(), weights)
    parts = reference.parameter_partition(spec.structure, weights)
    return log_lik, block.scale * reference.log_det(h, precision, parts)


def expected_objective(
    evidence: Evidence, blocks: list[Block], x: Tensor, y: Tensor
) -> tuple[Tensor, ...]:
    whole = whole_jacobian(evidence, x)
    terms = [dense_terms(evidence, block, x, y, whole) for block in blocks]
    log_lik = torch.stack([t[0] for t in terms]).mean()
    log_det = torch.stack([t[1] for t in terms]).mean()
    precision = reference.vector(evidence.prior.precisions(), evidence.weights())
    flat = torch.cat([w.detach().flatten() for w in evidence.weights().values()])
    return log_lik, log_det, log_lik - 0.5 * (precision * flat**2).sum() - 0.5 * log_det


def check_blocks(
    evidence: Evidence, blocks: list[Block], x: Tensor, y: Tensor
) -> tuple[float, float]:
    """Mean of value and gradient over the blocks against the dense expectation."""
    estimates = [evidence.backward(with_data(block, x, y)) for block in blocks]
    value = sum(e.log_evidence for e in estimates) / len(blocks)
    log_lik, log_det, objective = expected_objective(evidence, blocks, x, y)
    assert value == pytest.approx(objective.item(), rel=1e-9)
    named = evidence.hyperparameters()
    gradients = torch.autograd.grad(-objective / len(x), list(named.values()))
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        assert parameter.grad is not None
        error = (parameter.grad / len(blocks) - gradient).norm() / gradient.norm()
        assert error < 1e-8, f"{name}: {error:.1e}"
    return log_lik.item(), log_det.item()


def full_terms(evidence: Evidence, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The exact log likelihood, and ℓ of the same structure with everything in one block."""
    n = len(x)
    everything = Block(torch.arange(n), None, 1.0, torch.ones(n, dtype=torch.float64))
    log_lik, log_det = dense_terms(evidence, everything, x, y, whole_jacobian(evidence, x))
    return log_lik.item(), log_det.item()


def roots_for(name: str) -> list[str]:
    spec = Estimator.parse(name)
    if spec.curvature != "ggn" or (spec.outputs is None and not spec.rows):
        return [spec.default_root]
    return ["subblock", "fisher", "eigen"]


def by_turns(name: str, root: str) -> Any:
    """A case, long if another root is this name's by turns."""
    roots = roots_for(name)
    is_due = root == roots[NAMES.index(name) % len(roots)]
    return pytest.param(name, root, marks=[] if is_due else pytest.mark.long)


CASES = [(name, root) for name in NAMES for root in roots_for(name)]


@pytest.mark.parametrize(
    ("name", "root"), [by_turns(*c) for c in CASES if "grouped" not in c[0] and "mc" not in c[0]]
)
def test_every_draw_of_a_random_subset(name: str, root: str) -> None:
    num_data = 3
    evidence, x, y = build(name, root, num_data)
    spec = evidence.estimator
    size = num_data if spec.subset is None else 2
    blocks = list(every_subset(Partition(spec, num_data, C), size))
    # Which blocks there are, and how often, is a matter of the splits and not of a structure or a
    # root. Where it says nothing new a fixed sample will do: value and gradient agree by draw.
    usual = root == spec.default_root
    few = 9 if usual else 6
    alike = spec.structure != "ntk" or not usual
    if alike and len(blocks) > few:
        check_blocks(evidence, blocks[:: len(blocks) // 6 + 1], x, y)
        return
    log_lik, log_det = check_blocks(evidence, blocks, x, y)
    exact_lik, exact_det = full_terms(evidence, x, y)
    assert log_lik == pytest.approx(exact_lik, rel=1e-10)
    if spec.is_bound(root, couples_outputs=True):
        assert log_det >= exact_det - 1e-9


# Which blocks there are is a matter of the name; that each root's block is right, of the draws.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "root"),
    [c for c in CASES if "mc" not in c[0] and c[1] == roots_for(c[0])[0]],
)
def test_every_block_of_a_partition(name: str, root: str) -> None:
    """M times the mean block is Σ_m ℓ(B_m), the ragged last block (7 = 3 + 3 + 1) included."""
    evidence, x, y = build(name, root)
    blocks = list(evidence.blocks((x, y)).epoch())
    for block in blocks:
        assert block.inputs is not None
        assert torch.equal(block.inputs, x[block.indices])
    log_lik, log_det = check_blocks(evidence, blocks, x, y)
    exact_lik, exact_det = full_terms(evidence, x, y)
    assert log_lik == pytest.approx(exact_lik, rel=1e-10)
    if evidence.estimator.is_bound(root, couples_outputs=True):
        assert log_det >= exact_det - 1e-9


def test_sampled_fisher_averages_to_the_fisher() -> None:
    """All 3^N label draws of `mc`, weighted by their probability: H has expectation H_GGN."""
    evidence, x, y = build("full-N-1-mc")
    weights = evidence.weights()
    f = reference.outputs(evidence.model, x)
    jac = reference.jacobian(evidence.model, weights, x)
    exact = reference.ggn(jac, reference.softmax_hessian(f))
    p = f.softmax(-1)
    total = torch.zeros_like(exact)
    for label in range(C):
        score = nn.functional.one_hot(torch.full((N,), label), C) - p
        rows = torch.einsum("nc,ncp->np", score, jac) * p[:, label : label + 1].sqrt()
        total = total + rows.T @ rows
    torch.testing.assert_close(total, exact)
    # and one draw of the library is the log-determinant of one such set of rows
    state = evidence.generator.get_state()
    value = evidence.estimate(x, y).log_det
    log_dets = []
    evidence.generator.set_state(state)
    for labels in torch.cartesian_prod(*[torch.arange(C)] * N):
        rows = torch.einsum("nc,ncp->np", nn.functional.one_hot(labels, C) - p, jac)
        gram = rows / reference.vector(evidence.prior.precisions(), weights) @ rows.T
        log_dets.append(torch.linalg.slogdet(torch.eye(N, dtype=f.dtype) + gram)[1].item())
    assert min(abs(value - other) for other in log_dets) < 1e-9 * abs(value)


def test_single_output_regression_has_no_factor_of_outputs() -> None:
    """N/m alone scales a single-output regression, in every spelling of the outputs."""
    model = nn.Linear(2, 1).double()
    x, y = torch.randn(6, 2).double(), torch.randn(6, 1).double()
    values = []
    for name in ("ntk-3-1", "ntk-3-C", "ntk-3-1-iid"):
        evidence = Evidence(model, Gaussian(), GaussianPrior(), estimator=name, num_data=6)
        estimate = evidence.estimate(x[:3], y[:3])
        assert estimate.is_bound
        values.append(estimate.log_det)
    assert values[1] == pytest.approx(values[0], rel=1e-12)
    assert values[2] == pytest.approx(values[0], rel=1e-12)


def test_kernel_of_rows_holds_no_padding() -> None:
    """A datum with two rows of the block must not double the kernel of all the others."""
    evidence, x, y = build("ntk-8-rows")
    block = next(iter(evidence.blocks((x, y))))
    assert block.columns is not None
    assert block.columns.numel() > 8
    evidence.hyperparameters()["model.gate"].requires_grad_(False)
    plain = Evidence(
        evidence.model, Categorical(), GaussianPrior(), estimator="ntk-8-rows", num_data=N
    )
    assert plain.collect(block).statistic.num_rows == 8
