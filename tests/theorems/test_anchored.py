"""The anchored bound as a property of the library's numbers."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from likelihood_zoo import LIKELIHOODS, targets
from passes.test_two_pass import evidence_of
from properties import examples
from torch import Tensor, nn
from zoo import OUTPUTS

from benchmarks.one_graph import OneGraph
from evigrad import Evidence, Memory, reference
from evigrad.blocks.anchors import AnchoredStream, Anchoring
from evigrad.blocks.anchors.partition import (
    GROUPED,
    AnchoredPartition,
    Groups,
    Scores,
    guessed,
    unit_score,
)
from evigrad.core import roots
from evigrad.core.block import Block, Draw
from evigrad.likelihoods import Categorical, categorical
from evigrad.priors import GaussianPrior

SLACK = 1e-8


def problem(seed: int, num_data: int, likelihood: str, gain: float) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, OUTPUTS)).double()
        with torch.no_grad():
            for w in model.parameters():
                w.mul_(gain)
        x = torch.randn(num_data, 2, dtype=torch.float64)
    return model, (x, targets(LIKELIHOODS[likelihood](OUTPUTS), num_data))


def anchored(
    model: nn.Module,
    likelihood: str,
    num_data: int,
    root: str,
    precision: float,
    rows: int,
    **anchoring: Any,
) -> Evidence:
    return Evidence(
        model,
        LIKELIHOODS[likelihood](OUTPUTS),
        GaussianPrior(precision=precision),
        estimator=f"ntk-{rows}-rows-anchored",
        num_data=num_data,
        root=root,
        anchoring=Anchoring(**anchoring),
        generator=0,
    )


def value(
    evidence: Evidence,
    blocks: AnchoredPartition,
    data: Any,
    number: int | None,
    probability: float = 1.0,
) -> float:
    draws = [] if number is None else [Draw(number, 1.0 / probability)]
    block = blocks.block(draws, torch.arange(blocks.num_data)[None])
    return evidence.estimate(with_data(block, data)).log_det


def with_data(block: Block, data: Any) -> Block:
    x, y = data
    return replace(block, inputs=x[block.indices], targets=y[block.indices])


@given(
    seed=st.integers(0, 10**6),
    num_data=st.integers(2, 5),
    likelihood=st.sampled_from(sorted(LIKELIHOODS)),
    root=st.sampled_from(["fisher", "eigen"]),
    gain=st.floats(0.1, 6.0),
    precision=st.floats(1e-3, 1e3),
    data=st.data(),
)
@examples(6)  # each builds networks and plans their passes
def test_a_bound_whatever_the_anchors_and_the_partition(
    seed: int,
    num_data: int,
    likelihood: str,
    root: str,
    gain: float,
    precision: float,
    data: st.DataObject,
) -> None:
    """ℓ(Z) ≤ ℓ(I) ≤ ℓ(Z) + Σ ℓ(B_m|Z) ≤ ℓ(Z) + Σ ℓ(B_m), and the ends meet."""
    total = num_data * OUTPUTS
    model, pair = problem(seed, num_data, likelihood, gain)
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=total, max_size=total)))
    anchors = (labels == 0).nonzero().squeeze(1)
    parts = [p for b in (1, 2, 3) if len(p := (labels == b).nonzero().squeeze(1))]
    evidence = anchored(model, likelihood, num_data, root, precision, total)
    blocks = AnchoredPartition(anchors, parts, num_data, OUTPUTS)
    exact = Evidence(
        model,
        LIKELIHOODS[likelihood](OUTPUTS),
        GaussianPrior(precision=precision),
        estimator="ntk-N-C",
        num_data=num_data,
        generator=0,
    )
    true = exact.estimate(*pair).log_det
    room = SLACK * (1.0 + abs(true))
    of_anchors = value(evidence, blocks, pair, None) if len(anchors) else 0.0
    assert of_anchors <= true + room
    # The mean over the blocks is the sum of their shares, whatever their probabilities.
    weights = data.draw(st.lists(st.floats(0.1, 1.0), min_size=len(parts), max_size=len(parts)))
    chances = [weight / sum(weights) for weight in weights]
    mean = of_anchors
    if parts:
        mean = sum(p * value(evidence, blocks, pair, m, p) for m, p in enumerate(chances))
    assert mean >= true - room
    if not parts or len(parts) == 1:
        assert mean == pytest.approx(true, abs=room, rel=1e-9)
    alone = [
        value(evidence, AnchoredPartition(anchors[:0], [part], num_data, OUTPUTS), pair, 0)
        for part in parts
    ]
    assert mean <= of_anchors + sum(alone) + room


@given(
    num_data=st.integers(2, 5),
    classes=st.integers(3, 7),
    seed=st.integers(0, 10**6),
    gain=st.floats(0.1, 6.0),
    num_rows=st.integers(1, 36),
    grouped=st.booleans(),
)
@examples(6)
@pytest.mark.usefixtures("by_h")
def test_a_bound_of_many_classes_whose_unlikely_ones_are_drawn(
    num_data: int, classes: int, seed: int, gain: float, num_rows: int, grouped: bool
) -> None:
    """All blocks of a partition, those of the tail included, with an eigen root of two classes."""
    total = classes * num_data
    num_rows = min(num_rows, total)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, classes)).double()
        with torch.no_grad():
            for w in model.parameters():
                w.mul_(gain)
        pair = torch.randn(num_data, 2).double(), torch.randint(classes, (num_data,))
    with pytest.MonkeyPatch.context() as patch:
        for module in (roots, categorical):
            patch.setattr(module, "TOP_CLASSES", 2)
        evidence = anchored(model, "categorical", num_data, "eigen", 0.5, num_rows, grouped=grouped)
        drawn = [evidence.estimate(block).log_det for block in evidence.blocks(pair).epoch()]
        true = evidence.with_estimator("full-N-C").estimate(*pair).log_det
        if 1 < num_rows < total:
            (block,) = evidence.blocks(pair).take(1)  # and one is drawn at all
            assert evidence.estimate(block).is_bound
    mean = sum(drawn) / len(drawn)
    room = SLACK * (1.0 + abs(true))
    assert mean >= true - room
    if num_rows == total:
        assert len(drawn) == 1
        assert mean == pytest.approx(true, rel=1e-9, abs=1e-9)


@given(
    num_data=st.integers(1, 7),
    columns=st.integers(1, 3),
    behind=st.integers(1, 6),
    num_rows=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
@examples(25)
def test_every_row_of_the_tail_is_in_one_block(
    num_data: int, columns: int, behind: int, num_rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    head = torch.rand(num_data, columns, generator=generator)
    scores = Scores(head, torch.rand(num_data, generator=generator), behind)
    anchors = torch.arange(min(num_rows - 1, head.numel()))
    blocks = AnchoredPartition.draw(anchors, scores, num_rows, generator)
    chosen = torch.zeros(1, dtype=torch.long)
    rows = []
    for number in range(blocks.num_parts):
        block = blocks.block([Draw(number)], chosen[None])
        assert block.columns is not None
        assert block.anchored is not None
        mine = block.anchored.labels == 1
        assert 0 < int(mine.sum()) <= max(1, num_rows - len(anchors))
        data = block.indices[:, None].expand_as(block.columns)
        rows += list(zip(data[mine].tolist(), block.columns[mine].tolist(), strict=True))
    rows += [divmod(int(row), columns) for row in anchors]
    every = [(n, d) for n in range(num_data) for d in range(columns + behind)]
    assert sorted(rows) == every


N = 4


class Gate(nn.Module):
    """A hyperparameter of the forward pass before a small network."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.gate = nn.Parameter(torch.tensor([0.4, -0.3]))
            self.first, self.last = nn.Linear(2, 3), nn.Linear(3, OUTPUTS)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x * self.gate.exp())))


def dense(
    evidence: Evidence, block_rows: list[list[tuple[int, int]]], data: Any, root: str
) -> Tensor:
    """−(log evidence)/N with ℓ(Z) + Σ ℓ(B_m|Z) from dense matrices, with a graph."""
    x, y = data
    model, weights, prior = evidence.model, evidence.weights(), evidence.prior
    jac = reference.jacobian(model, weights, x)
    f = reference.outputs(model, x)
    hessian = reference.softmax_hessian(f)
    precision = reference.vector(prior.precisions(), weights)

    def entropy(rows: list[tuple[int, int]]) -> Tensor:
        columns = torch.full((len(x), OUTPUTS), -1)
        for n, d in rows:
            columns[n, int((columns[n] >= 0).sum())] = d
        kept = reference.kept_curvature(hessian, columns, reference.softmax_root(f, root))
        return reference.log_det(reference.ggn(jac, kept), precision)

    anchors, *parts = block_rows
    of_anchors = entropy(anchors)
    total = of_anchors + sum(
        (entropy(anchors + part) - of_anchors for part in parts), start=torch.zeros(())
    )
    log_likelihood = Categorical().log_prob(f, y).sum()
    flat = torch.cat([w.detach().flatten() for w in weights.values()])
    log_prior = -0.5 * (precision * flat.square()).sum()
    return -(log_likelihood + log_prior - 0.5 * total) / len(x)


@pytest.mark.each(1)
@pytest.mark.parametrize(
    ("root", "micro_batch", "learned"),  # each pair of them
    [
        ("fisher", None, "all"),
        ("fisher", 1, "prior"),
        ("fisher", 3, "all"),
        ("eigen", None, "prior"),
        ("eigen", 1, "all"),
        ("eigen", 3, "prior"),
    ],
)
def test_all_draws_have_the_value_and_the_gradient_of_the_bound_for_their_mean(
    root: str, micro_batch: int | None, learned: str
) -> None:
    """Every block with every set of likelihood data, against dense matrices."""
    generator = torch.Generator().manual_seed(1)
    data = (
        torch.randn(N, 2, generator=generator, dtype=torch.float64) * 2,
        torch.tensor([0, 2, 1, 1]),
    )
    evidence = Evidence(
        Gate(),
        Categorical(),
        GaussianPrior("layerwise", precision=0.3),
        estimator="ntk-5-rows-anchored",
        num_data=N,
        hyperparameters=["gate"],
        root=root,
        memory=Memory(micro_batch=micro_batch),
        generator=0,
    )
    columns = OUTPUTS - (root == "eigen")  # the last one is zero
    pairs = [(n, d) for n in range(N) for d in range(columns)]
    order = torch.randperm(len(pairs), generator=generator)
    anchors, parts = order[:3], list(order[3:].split(2))
    blocks = AnchoredPartition(anchors, parts, N, columns)
    parameters = evidence.hyperparameters()
    names = [n for n in parameters if learned == "all" or n.startswith("prior.")]
    subsets = [torch.tensor(chosen) for chosen in combinations(range(N), 2)]
    # Probabilities are what a block's values and gradients are weighted with in the mean.
    chances = torch.arange(1, len(parts) + 1, dtype=torch.float64)
    chances /= chances.sum()
    mean = 0.0
    gradients = {name: torch.zeros_like(parameters[name]) for name in names}
    for number, chance in enumerate(chances.tolist()):
        for chosen in subsets:
            block = with_data(blocks.block([Draw(number, 1 / chance)], chosen[None]), data)
            estimate = evidence.backward(block, wrt=names)
            mean += chance / len(subsets) * estimate.log_evidence
            for name in names:
                gradient, parameters[name].grad = parameters[name].grad, None
                assert gradient is not None
                gradients[name] += chance / len(subsets) * gradient
    rows = [[pairs[i] for i in part.tolist()] for part in (anchors, *parts)]
    expected = dense(evidence, rows, data, root)
    expected_gradients = torch.autograd.grad(expected, [parameters[n] for n in names])
    assert -mean / N == pytest.approx(float(expected.detach()), rel=1e-10)
    for name, gradient in zip(names, expected_gradients, strict=True):
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12)


@given(
    num_data=st.integers(2, 9),
    outputs=st.integers(1, 4),
    num_rows=st.integers(1, 12),
    share=st.sampled_from([0.0, 0.5, 0.75]),
    grouped=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
@examples(25)
def test_every_row_is_an_anchor_or_in_one_block(
    num_data: int, outputs: int, num_rows: int, share: float, grouped: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_data, outputs, generator=generator)
    num_rows = min(num_rows, scores.numel())
    anchors = scores.flatten().argsort(descending=True)[: Anchoring(share).num_anchors(num_rows)]
    every = Scores(scores, torch.zeros(num_data), 0)
    others = torch.ones(scores.numel(), dtype=torch.bool)
    others[anchors] = False
    free = others.nonzero().squeeze(1)
    in_groups = free[torch.randperm(len(free), generator=generator)][: int(grouped * len(free))]
    parts = list(in_groups.split(num_rows - len(anchors))) if len(in_groups) else []
    shares = torch.arange(1.0, 1 + len(parts)).double()
    groups = Groups(parts, shares / shares.sum())
    blocks = AnchoredPartition.draw(anchors, every, num_rows, generator, groups)
    assert [part.tolist() for part in blocks.parts[: len(parts)]] == [p.tolist() for p in parts]
    of_groups = blocks.guesses[: len(parts)]
    assert of_groups.tolist() == pytest.approx((groups.shares * of_groups.sum()).tolist())
    # In the unit of the other blocks, whatever that of the kernel is.
    assert float(of_groups.sum()) == pytest.approx(
        float(guessed(scores.flatten(), unit_score(scores.flatten(), anchors))[in_groups].sum())
    )
    assert list(blocks.keys[: len(parts)]) == [GROUPED] * len(parts)
    assert len(blocks.guesses) == len(blocks.keys) == blocks.num_parts
    everything = torch.cat([anchors, *blocks.parts])
    assert sorted(everything.tolist()) == list(range(scores.numel()))
    assert all(0 < len(part) <= num_rows - len(anchors) for part in blocks.parts)
    for number, part in enumerate(blocks.parts):
        chosen = torch.randperm(num_data, generator=generator)[:1]
        block = blocks.block([Draw(number, 4.0)], chosen[None])
        assert block.columns is not None
        assert block.anchored is not None
        present = block.columns >= 0
        rows = (block.indices[:, None] * outputs + block.columns)[present]
        labels = block.anchored.labels[present]
        assert sorted(rows[labels == 0].tolist()) == sorted(anchors.tolist())
        assert sorted(rows[labels == 1].tolist()) == sorted(part.tolist())
        assert block.anchored.weights == (4.0,)
        assert block.likelihood_weights.sum() == num_data
        assert block.likelihood_weights[block.indices == chosen] == num_data
        # Data with as many rows lie together and go through the network without padding.
        counts = present.sum(1)
        assert bool((counts.diff() <= 0).all())
        bounds = [0, *block.cuts(), len(counts)]
        for start, stop in zip(bounds, bounds[1:], strict=False):
            columns = block.columns_of(slice(start, stop))
            assert columns is not None
            assert columns.shape == (stop - start, int(counts[start]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_two_passes_are_one_graph(name: str) -> None:
    likelihood = LIKELIHOODS[name](OUTPUTS)
    y = targets(likelihood, 9)
    x = torch.randn(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outcomes = []
    for kind, micro_batch in ((OneGraph, None), (Evidence, 1), (Evidence, 3)):
        evidence = evidence_of(
            Gate(),
            likelihood,
            "ntk-8-rows-anchored",
            num_data=9,
            kind=kind,
            memory=Memory(micro_batch=micro_batch),
            root="eigen",
        )
        for parameter in evidence.hyperparameters().values():
            parameter.grad = None
        (block,) = evidence.blocks((x, y)).take(1)
        estimate = evidence.backward(block)
        outcomes.append((estimate, [p.grad for p in evidence.hyperparameters().values()]))
    (first, reference), *others = outcomes
    assert len(reference) >= 2
    for estimate, gradients in others:
        assert estimate.log_det == pytest.approx(first.log_det, rel=1e-11)
        for mine, twin in zip(gradients, reference, strict=True):
            torch.testing.assert_close(mine, twin, rtol=1e-9, atol=1e-12)


def test_a_round_is_drawn_or_the_whole_partition() -> None:
    model, pair = problem(0, 9, "categorical", 1.0)
    evidence = anchored(model, "categorical", 9, "eigen", 0.5, 8)
    whole = list(evidence.blocks(pair).epoch())
    assert len(whole) > 3
    assert len(list(evidence.blocks(pair).round(100))) == len(whole)
    drawn = list(evidence.blocks(pair).round(3))
    assert len(drawn) == 3
    # Of one partition: the anchors are the same, and what is no anchor is in one block or the same.
    rows = []
    for block in drawn:
        assert block.columns is not None and block.anchored is not None
        mine = block.anchored.labels == 1
        data = block.indices[:, None].expand_as(block.columns)
        rows.append(set(zip(data[mine].tolist(), block.columns[mine].tolist(), strict=True)))
    for one in rows:
        assert all(one == other or not one & other for other in rows)


def gradients_of(evidence: Evidence) -> list[Tensor]:
    """Those that were added, and are taken away."""
    gradients = []
    for parameter in evidence.hyperparameters().values():
        assert parameter.grad is not None
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


# A parameter of these likelihoods changes more than the scale of the rows.
UNKEPT = {"own", "known noise", "negative binomial", "ordinal"}


@given(
    seed=st.integers(0, 10**6),
    num_data=st.integers(2, 6),
    likelihood=st.sampled_from(sorted(LIKELIHOODS.keys() - UNKEPT)),
    root=st.sampled_from(["fisher", "eigen"]),
    micro_batch=st.sampled_from([None, 1, 3]),
    rows=st.integers(2, 9),
    data=st.data(),
)
@examples(6)
def test_draws_that_share_a_pass_are_those_of_passes_of_their_own(
    seed: int,
    num_data: int,
    likelihood: str,
    root: str,
    micro_batch: int | None,
    rows: int,
    data: st.DataObject,
) -> None:
    """Values, gradients (of a noise too) and what is learned of each part; the same part twice."""
    total = num_data * OUTPUTS
    model, pair = problem(seed, num_data, likelihood, 2.0)
    labels = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=total, max_size=total)))
    anchors = (labels == 0).nonzero().squeeze(1)
    parts = [p for b in range(1, 5) if len(p := (labels == b).nonzero().squeeze(1))]
    blocks = AnchoredPartition(anchors, parts, num_data, OUTPUTS)
    numbers = data.draw(st.lists(st.integers(0, len(parts) - 1), max_size=5)) if parts else []
    draws = [Draw(number, data.draw(st.floats(1.0, 9.0)), 0.5, number) for number in numbers]
    evidence = Evidence(
        model,
        LIKELIHOODS[likelihood](OUTPUTS),
        GaussianPrior("layerwise", precision=0.7),
        estimator=f"ntk-{min(rows, total)}-rows-anchored",
        num_data=num_data,
        root=root,
        memory=Memory(micro_batch=micro_batch),
        generator=0,
    )
    if not (len(anchors) or draws):
        return
    num_chosen = data.draw(st.integers(1, num_data))
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(num_data, generator=generator)[:num_chosen] for _ in draws or [None]]
    together = with_data(blocks.block(draws, torch.stack(orders)), pair)
    kept = list(evidence.collect(together).draws())
    assert len(kept) == max(1, len(draws))
    values = []
    for part, draw, order in zip(kept, [[draw] for draw in draws] or [[]], orders, strict=True):
        alone = with_data(blocks.block(draw, order[None]), pair)
        expected, expected_gradients = evidence.backward(alone), gradients_of(evidence)
        estimate, gradients = evidence.backward_kept(part), gradients_of(evidence)
        assert estimate.log_evidence == pytest.approx(expected.log_evidence, rel=1e-10)
        assert estimate.log_det == pytest.approx(expected.log_det, rel=1e-9, abs=1e-12)
        for mine, theirs in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)
        # What the stream learns from it is of this part alone, and not of the whole block.
        assert estimate.entropies == pytest.approx(expected.entropies, rel=1e-9, abs=1e-12)
        assert part.block.anchored is not None
        assert part.block.anchored.draws == tuple(draw)
        values.append(estimate.log_det)
    mean = sum(values) / len(values)
    assert evidence.estimate(together).log_det == pytest.approx(mean, rel=1e-9, abs=1e-11)
    # A pass on all draws leaves as well the gradient of the mean.
    evidence.backward(together)
    whole = gradients_of(evidence)
    evidence.backward_kept(*kept)
    for mine, theirs in zip(gradients_of(evidence), whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


def test_draws_of_a_round_in_one_block() -> None:
    """Anchors once, each part with its rows, the data of as many likelihoods."""
    model, pair = problem(0, 30, "categorical", 1.0)
    evidence = anchored(model, "categorical", 30, "eigen", 0.5, 8)
    stream = evidence.blocks(pair)
    assert isinstance(stream, AnchoredStream)
    blocks = list(stream.drawn(7, whole=True).blocks(3))
    assert [block.num_draws for block in blocks] == [3, 3, 1]
    anchors = []
    for block in blocks:
        assert block.columns is not None
        layout = block.anchored
        assert layout is not None
        rows = block.indices[:, None] * OUTPUTS + block.columns
        anchors.append(sorted(rows[layout.labels == 0].tolist()))
        labels = {layout.label(draw) for draw in layout.draws}
        assert sorted(labels) == list(range(1, len(labels) + 1))
        assert all(int((layout.labels == label).sum()) > 0 for label in labels)
        assert (layout.likelihood_weights > 0).sum(1).tolist() == [2] * block.num_draws
        assert layout.likelihood_weights.sum(1).tolist() == pytest.approx([30] * block.num_draws)
        assert int((block.likelihood_weights > 0).sum()) == 2 * block.num_draws
    assert anchors[0] == anchors[1] == anchors[2]
    # Parts of one row, so that all partitions are the same.
    (everything,) = stream.drawn(10_000, whole=True).blocks(10_000)
    assert everything.anchored is not None
    assert everything.anchored.weights == pytest.approx([1.0] * everything.num_draws)
    whole = sum(evidence.estimate(block).log_det for block in stream.epoch())
    assert evidence.estimate(everything).log_det == pytest.approx(whole / everything.num_draws)
    assert not list(stream.round(0))
