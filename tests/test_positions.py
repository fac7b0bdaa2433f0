"""Outputs (m, …, C) with a target at each position, against the same network for one position."""

from collections import UserDict
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from every_draw import every_subset
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import evigrad
from evigrad.core import permutation
from evigrad.core.names import Estimator
from evigrad.core.partition import Partition
from evigrad.errors import ConfigurationError, InputError
from evigrad.inputs import AtPositions, Outputs
from evigrad.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from evigrad.measure.metrics import evaluate
from evigrad.priors import GaussianPrior

N, LENGTH, WORDS = 5, 4, 3
PRECISION = 3.0
ESTIMATORS = [
    *("ntk-6-1", "ntk-6-2-iid", "ntk-7-rows", "ntk-8-rows-anchored", "kfac-6-C", "kfac-N-1-mc"),
    *("blockdiag-N-C", "diag-N-1", "full-N-C", "kfac-6-1-ef"),
]


class Tagger(nn.Module):
    """Scores of a class at each place of a sequence, with a hyperparameter; causal."""

    def __init__(self, outputs: int = WORDS, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 3)
        self.inner = nn.Linear(3, 3)
        self.out = nn.Linear(3, outputs, bias=not tied)
        if tied:
            self.out.weight = self.words.weight
        self.scale = nn.Parameter(torch.zeros(()))

    def hidden(self, x: Tensor) -> Tensor:
        h = self.words(x) * self.scale.exp()
        places = torch.arange(1, x.shape[1] + 1, dtype=h.dtype)
        return (self.inner(h).cumsum(1) / places[:, None]).tanh() + h

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x))


class LateChange(Tagger):
    """The last layer's result is not the output."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * self.out(self.hidden(x)).sin()


class OnePosition(nn.Module):
    """The same network, with the position as an input."""

    def __init__(self, tagger: nn.Module) -> None:
        super().__init__()
        self.tagger = tagger

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        if type(self.tagger) is Tagger:  # its last layer acts on the position alone
            return self.tagger.out(self.at(self.tagger.hidden(x), position))
        return self.at(self.tagger(x), position)

    def at(self, f: Tensor, position: Tensor) -> Tensor:
        f = f.flatten(1, -2)
        chosen = torch.nn.functional.one_hot(position, f.shape[1]).to(f)
        return torch.einsum("mtc,mt->mc", f, chosen)


def tagger(kind: type[Tagger] = Tagger, **settings: Any) -> Tagger:
    torch.manual_seed(0)
    return kind(**settings).double()


def text() -> tuple[Tensor, Tensor]:
    """Token ids, and the next ones as targets; one sequence ends early."""
    x = torch.randint(WORDS, (N, LENGTH), generator=torch.Generator().manual_seed(1))
    y = torch.cat([x[:, 1:], torch.full((N, 1), -100)], 1)
    y[1, 1:] = -100
    return x, y


def as_pairs(x: Tensor, y: Tensor, counts: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    data, position = counts.nonzero(as_tuple=True)
    return (x[data], position), y.flatten(1, counts_dims(y, counts))[data, position]


def counts_dims(y: Tensor, counts: Tensor) -> int:
    """Dimensions of y that count positions."""
    return next(d for d in range(1, y.ndim) if prod(y.shape[1 : 1 + d]) == counts.shape[1])


def evidence(
    model: nn.Module,
    likelihood: Likelihood,
    estimator: str,
    num_data: int,
    precision: float = PRECISION,
    **options: Any,
) -> evigrad.Evidence:
    name = "tagger.scale" if isinstance(model, OnePosition) else "scale"
    return evigrad.Evidence(
        model,
        likelihood,
        GaussianPrior("layerwise", precision=precision),
        estimator=estimator,
        num_data=num_data,
        hyperparameters=[name] if any(n == name for n, _ in model.named_parameters()) else [],
        generator=3,
        **options,
    )


def results(one: evigrad.Evidence, block: Any) -> list[Tensor]:
    for parameter in one.hyperparameters().values():
        parameter.grad = None
    estimate = one.backward(block)
    numbers = [estimate.log_det, estimate.log_likelihood, estimate.log_prior]
    gradients = [p.grad for p in one.hyperparameters().values() if p.grad is not None]
    return [torch.tensor(numbers), *gradients]


def assert_same(one: evigrad.Evidence, data: Any, other: evigrad.Evidence, others: Any) -> None:
    pairs = zip(one.blocks(data).take(3), other.blocks(others).take(3), strict=True)
    for block, of_other in pairs:
        for a, b in zip(results(one, block), results(other, of_other), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_positions_are_data(estimator: str) -> None:
    x, y = text()
    pairs = as_pairs(x, y, y != -100)
    model, count = tagger(), len(pairs[1])
    precision = PRECISION
    one = evidence(model, Categorical(), estimator, count, precision)
    other = evidence(OnePosition(model), Categorical(), estimator, count, precision)
    assert_same(one, (x, y), other, pairs)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_shared_weights_of_kfac(sharing: str) -> None:
    x, y = text()
    pairs = as_pairs(x, y, y != -100)
    model, count = tagger(), len(pairs[1])
    one = evidence(model, Categorical(), "kfac-N-C", count, sharing=sharing)
    other = evidence(OnePosition(model), Categorical(), "kfac-N-C", count, sharing=sharing)
    assert_same(one, (x, y), other, pairs)


@pytest.mark.parametrize("settings", [{"tied": True}, {"kind": LateChange}])
def test_ways_to_make_the_outputs(settings: dict[str, Any]) -> None:
    x, y = text()
    pairs = as_pairs(x, y, y != -100)
    model = tagger(**settings)
    one = evidence(model, Categorical(), "ntk-6-1", len(pairs[1]))
    other = evidence(OnePosition(model), Categorical(), "ntk-6-1", len(pairs[1]))
    assert_same(one, (x, y), other, pairs)


@pytest.mark.parametrize(
    ("likelihood", "target"),
    [
        (Gaussian(0.5), lambda f: f + 0.1),
        (Bernoulli(), lambda f: (f > 0).double()),
    ],
    ids=lambda argument: getattr(argument, "name", ""),
)
def test_likelihoods_with_a_number_for_each_output(likelihood: Likelihood, target: Any) -> None:
    x, _ = text()
    model = tagger(outputs=2)
    y = target(model(x).detach())
    everywhere = torch.ones(N, LENGTH, dtype=torch.bool)
    one = evidence(model, likelihood, "ntk-6-1", N * LENGTH)
    other = evidence(OnePosition(model), likelihood, "ntk-6-1", N * LENGTH)
    pairs = as_pairs(x, y, everywhere)
    assert_same(one, (x, y), other, pairs)


class Painter(nn.Module):
    """Scores of classes at each pixel; channels come second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"beside": x, "scores": self.layers(x)}


def test_pixels_with_channels_second() -> None:
    torch.manual_seed(0)
    model = Outputs(Painter().double(), output="scores", channel_dim=1)
    x = torch.randn(4, 1, 2, 3, dtype=torch.float64)
    y = torch.randint(3, (4, 2, 3))
    y[0, 0, 0] = -100
    counts = (y != -100).flatten(1)
    pairs = as_pairs(x, y, counts)
    for estimator in ("kfac-6-C", "ntk-9-rows"):
        one = evidence(model, Categorical(), estimator, 23)
        other = evidence(OnePosition(model), Categorical(), estimator, 23)
        assert list(one.weights()) == [f"layers.{i}.{n}" for i in "02" for n in ("weight", "bias")]
        assert_same(one, (x, y), other, pairs)


# ------------------------------------------------------------ the number itself


def dense_log_det(model: nn.Module, x: Tensor, y: Tensor, precision: float) -> Tensor:
    """ℓ(I) over the positions that count, by J and Λ."""
    weights = {n: w.detach() for n, w in model.named_parameters() if n != "scale"}

    def f(w: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, w, (x,))[y != -100]

    rows = torch.func.jacrev(f)(weights)
    j = torch.cat([part.flatten(2) for part in rows.values()], 2)
    p = f(weights).softmax(-1)
    h = torch.einsum("ncp,ncd,ndq->pq", j, p.diag_embed() - p[:, :, None] * p[:, None], j)
    return torch.eye(len(h), dtype=h.dtype).add(h / precision).logdet()


@pytest.mark.parametrize("estimator", ["full-N-C", "ntk-N-C", "ntk-99-rows-anchored"])
def test_exact_value(estimator: str) -> None:
    x, y = text()
    model, count = tagger(), int((y != -100).sum())
    one = evidence(model, Categorical(), estimator, count)
    estimate = one.estimate(next(iter(one.blocks((x, y)))))
    torch.testing.assert_close(
        torch.tensor(estimate.log_det).double(), dense_log_det(model, x, y, PRECISION).detach()
    )
    nll = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
    assert estimate.log_likelihood == pytest.approx(-nll.item())


@pytest.mark.parametrize("estimator", ["ntk-2-1", "ntk-2-1-iid", "ntk-3-rows"])
def test_bound_over_all_draws(estimator: str) -> None:
    x, y = text()
    x, y = x[:2], y[:2]
    model, count = tagger(), int((y != -100).sum())
    one = evidence(model, Categorical(), estimator, count, root="eigen")
    partition = Partition(Estimator.parse(estimator), count, WORDS)
    source = next(iter(one.blocks((x, y)).take(1))).inputs
    assert isinstance(source, AtPositions)
    stream: Any = one.blocks((x, y))
    estimates = []
    m = count if "rows" in estimator else 2
    for block in every_subset(partition, m):
        inputs, targets = stream._source.fetch(block.indices)
        plain_block = evigrad.Block(
            block.indices, block.columns, block.scale, block.likelihood_weights, inputs, targets
        )
        estimates.append(one.estimate(plain_block))
    mean = torch.tensor([e.log_det for e in estimates]).double().mean()
    exact = dense_log_det(model, x, y, PRECISION)
    assert mean >= exact - 1e-9
    nll = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum").item()
    likelihood = sum(e.log_likelihood for e in estimates) / len(estimates)
    assert likelihood == pytest.approx(-nll)


@pytest.mark.each(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("estimator", ["ntk-6-1", "ntk-5-rows", "ntk-8-rows-anchored", "full-6-1"])
def test_long_tables_are_not_formed(
    estimator: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = text()
    model, count = tagger(tied=tied), int((y != -100).sum())
    outcomes = []
    for formed in (False, True):
        every = {} if formed else {"words.weight": "every"}
        monkeypatch.setattr(
            "evigrad.passes.problem.contracted",
            lambda uses, *_, every=every: {n: u for n, u in uses.items() if n in every},
        )
        one = evidence(model, Categorical(), estimator, count)
        outcomes.append([results(one, block) for block in one.blocks((x, y)).take(3)])
        words = {report.name: report.curvature for report in one.describe()}
        assert ("contracted" in words["words.weight"]) != formed
    for a, b in zip(*outcomes, strict=True):
        for one_value, other in zip(a, b, strict=True):
            torch.testing.assert_close(one_value, other, rtol=1e-9, atol=1e-9)


def test_kept_outputs_count_the_positions_of_one_data_set() -> None:
    x, y = text()
    other = y.flip(0)
    one = evidence(tagger(), Categorical(), "ntk-8-rows-anchored", int((y >= 0).sum()))
    one.blocks((x, y))
    before = one.generator.get_state()
    # The outputs that ``map_loss`` keeps were those of the data set that came last.
    with pytest.raises(InputError, match="not at the same positions"):
        one.blocks((x.flip(0), other))
    assert torch.equal(one.generator.get_state(), before)
    one.with_estimator("ntk-8-rows-anchored").blocks((x.flip(0), other))
    one.blocks((x, y.clone()))
    kept: list[Tensor] = []
    assert one.anchors is not None
    one.anchors.note = lambda indices, f, y: kept.append(indices)
    chosen = torch.tensor([3, 1])
    one.map_loss(x[chosen], y[chosen], indices=chosen)
    numbers = (y.flatten() >= 0).cumsum(0).view(y.shape) - 1
    expected = torch.cat([numbers[n][y[n] >= 0] for n in chosen.tolist()])
    assert torch.equal(kept[0], expected)


def test_last_layer_sees_the_position_alone() -> None:
    x, y = text()
    model = tagger()
    seen: list[int] = []
    one = evidence(model, Categorical(), "ntk-6-1", int((y != -100).sum()))
    block = next(iter(one.blocks((x, y))))
    model.out.register_forward_hook(lambda _, inputs, f: seen.append(f.numel()))
    one.estimate(block)
    assert seen
    assert max(seen) == len(block.indices) * WORDS


# ------------------------------------------------------------ all data at once, and loaders


def test_batches_and_subsets() -> None:
    x, y = text()
    model, count = tagger(), int((y != -100).sum())
    one = evidence(model, Categorical(), "kfac-N-C", count)
    whole = one.estimate(next(iter(one.blocks((x, y)))))
    in_batches = one.estimate([(x[:2], y[:2]), (x[2:], y[2:])])
    at_once = one.estimate(x, y)
    assert in_batches.log_evidence == pytest.approx(whole.log_evidence)
    assert at_once.log_evidence == pytest.approx(whole.log_evidence)


def padded(items: list[tuple[Tensor, Tensor]]) -> tuple[Any, Tensor]:
    """Sequences of different lengths as a batch of a tokenizer."""
    x, y = zip(*items, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return UserDict({"x": pad(list(x), True)}), pad(list(y), True, -100)


def test_sequences_of_different_lengths() -> None:
    x, y = text()
    lengths = [2, 4, 3, 4, 2]
    items = [(a[:n], b[:n]) for a, b, n in zip(x, y, lengths, strict=True)]
    loader = DataLoader(items, batch_size=2, collate_fn=padded)  # pyright: ignore[reportArgumentType]
    cut = y.clone()
    for row, n in zip(cut, lengths, strict=True):
        row[n:] = -100
    model, count = tagger(), int((cut != -100).sum())
    one = evidence(model, Categorical(), "ntk-6-1", count)
    other = evidence(model, Categorical(), "ntk-6-1", count)
    # The network is causal: what follows a position does not change it.
    for block, of_other in zip(
        one.blocks(loader).take(4), other.blocks((x, cut)).take(4), strict=True
    ):
        assert one.estimate(block).log_evidence == pytest.approx(
            other.estimate(of_other).log_evidence
        )


def test_loss_and_metrics() -> None:
    x, y = text()
    model, count = tagger(), int((y != -100).sum())
    one = evidence(model, Categorical(), "ntk-6-1", count)
    mean = cross_entropy(model(x).flatten(0, 1), y.flatten())
    decay = sum(w.square().sum() for w in one.weights().values()) * 0.5 * PRECISION / count
    torch.testing.assert_close(one.map_loss(x, y), mean + decay)
    metrics = evaluate(model, Categorical(), (x, y), batch_size=2)
    assert metrics["log_likelihood"] == pytest.approx(-mean.item())
    right = (model(x).argmax(-1) == y)[y != -100].double().mean()
    assert metrics["accuracy"] == pytest.approx(right.item())


def test_another_label_for_no_target() -> None:
    x, y = text()
    y[y == -100] = 9
    likelihood = Categorical(ignore_index=9)
    one = evidence(tagger(), likelihood, "ntk-6-1", int((y != 9).sum()))
    assert next(iter(one.blocks((x, y)))).inputs is not None
    assert "9" in repr(likelihood)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("estimator", ["ntk-6-1", "ntk-8-rows-anchored", None])
def test_fit(estimator: str | None, tmp_path: Path) -> None:
    x, y = text()
    model = tagger().float()
    rounds = {"burn_in": 1, "every": 1, "steps": 2} if estimator else {}
    schedule = evigrad.Schedule(epochs=4, batch_size=3, **rounds)
    whole = evigrad.fit(
        model, (x, y), estimator=estimator, schedule=schedule, test=(x, y), progress=False
    )
    assert whole.evidence.num_data == int((y != -100).sum())
    assert whole.test_metrics["log_likelihood"] == pytest.approx(
        -cross_entropy(model(x).flatten(0, 1), y.flatten()).item(), rel=1e-4
    )
    again = tagger().float()

    def stop(row: Any) -> None:
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"estimator": estimator, "schedule": schedule, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        evigrad.fit(again, (x, y), run_dir=tmp_path / "run", callbacks=[stop], **settings)
    evigrad.fit(again, (x, y), run_dir=tmp_path / "run", resume=True, **settings)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("structure", ["full", "kfac", "last-layer", "ntk"])
def test_posterior(structure: str) -> None:
    x, y = text()
    model, count = tagger(), int((y != -100).sum())
    pairs = as_pairs(x, y, y != -100)
    one = evidence(model, Categorical(), "ntk-6-1", count)
    other = evidence(OnePosition(model), Categorical(), "ntk-6-1", count)
    posterior = one.posterior((x, y), structure=structure)
    prediction = posterior(x, link="probit")
    assert prediction.mean.shape == (N, LENGTH, WORDS)
    assert prediction.covariance.shape == (N, LENGTH, WORDS, WORDS)
    expected = other.posterior(pairs, structure=structure)(pairs[0], link="probit")
    at = y != -100
    torch.testing.assert_close(prediction.covariance[at], expected.covariance)
    torch.testing.assert_close(prediction.probabilities[at], expected.probabilities)
    torch.testing.assert_close(prediction.log_prob(y)[at], expected.log_prob(pairs[1]))
    assert prediction.log_prob(y)[~at].isnan().all()
    sampled = posterior(x)
    assert sampled.sample(3).shape == (3, N, LENGTH, WORDS)
    torch.testing.assert_close(sampled.probabilities.sum(-1), torch.ones(N, LENGTH).double())


def test_description_and_kept_passes() -> None:
    x, y = text()
    one = evidence(tagger(), Categorical(), "ntk-N-C", int((y != -100).sum()))
    assert {report.rows for report in one.describe(x)} <= {"linear", "embedding"}
    block = next(iter(one.blocks((x, y))))
    kept = one.collect(block, wrt="prior")
    assert one.estimate_kept(kept).log_evidence == pytest.approx(one.estimate(block).log_evidence)


# ------------------------------------------------------------ sequences without a target


def with_empty(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The same data, and three sequences of which no target counts."""
    others = torch.randint(WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    nothing = torch.full_like(others, -100)
    parts = [(others[:1], nothing[:1]), (x[:2], y[:2]), (others[1:], nothing[1:]), (x[2:], y[2:])]
    xs, ys = zip(*parts, strict=True)
    return torch.cat(xs), torch.cat(ys)


@pytest.mark.parametrize("estimator", ["ntk-6-1", "ntk-8-rows-anchored", "kfac-N-C"])
def test_sequences_without_a_target_count_nothing(estimator: str) -> None:
    x, y = text()
    model, count = tagger(), int((y != -100).sum())
    one, other = (evidence(model, Categorical(), estimator, count) for _ in range(2))
    assert_same(one, with_empty(x, y), other, (x, y))
    metrics = evaluate(model, Categorical(), with_empty(x, y), batch_size=1)
    assert metrics == pytest.approx(evaluate(model, Categorical(), (x, y)))
    posteriors = [
        evidence_of_data.posterior(data, structure="kfac")(x)
        for evidence_of_data, data in ((one, with_empty(x, y)), (other, (x, y)))
    ]
    torch.testing.assert_close(posteriors[0].covariance, posteriors[1].covariance)


def test_missing_numbers_count_at_positions_and_alone() -> None:
    x = torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[:2, 1] = torch.nan
    for inputs, targets in ((x, y), (x[:, 1], y[:, 1])):
        fitted = evigrad.fit(
            nn.Linear(2, 2),
            (inputs, targets),
            likelihood=Gaussian(missing="nan"),
            estimator=None,
            schedule=evigrad.Schedule(epochs=1),
            progress=False,
        )
        assert fitted.evidence.num_data == targets[..., 0].numel()


def test_batches_without_a_target_count_nothing() -> None:
    x, y = text()
    nothing = torch.full_like(y, -100)
    model, count = tagger(), int((y != -100).sum())
    one = evidence(model, Categorical(), "kfac-N-C", count)
    batches = [(x[:2], nothing[:2]), (x[:3], y[:3]), (x[3:], y[3:]), (x[:1], nothing[:1])]
    expected = results(one, [(x, y)])
    for a, b in zip(results(one, batches), expected, strict=True):
        torch.testing.assert_close(a, b)
    loss = one.map_loss(x, nothing)
    loss.backward()
    assert loss.item() == 0
    assert all(not w.grad.any() for w in one.weights().values() if w.grad is not None)
    assert one.posterior((x, y), structure="kfac")(x).log_prob(nothing).isnan().all()


def test_fit_where_sequences_have_no_target() -> None:
    """Batches of two, some of which have no target at all."""
    x, y = with_empty(*text())
    y[4:6] = -100
    schedule = evigrad.Schedule(epochs=3, batch_size=2, burn_in=1, every=1, steps=1)
    for seed in range(8):
        fitted = evigrad.fit(
            tagger().float(),
            (x, y),
            estimator="ntk-4-1",
            schedule=schedule,
            test=(x, y),
            seed=seed,
            progress=False,
        )
        assert fitted.evidence.num_data == int((y != -100).sum())
        for row in fitted.history:
            assert row["loss"] is not None
            assert row["loss"] > 0.1


# ------------------------------------------------------------ more rows than can be listed


@pytest.mark.parametrize("n", [1, 2, 3, 17, 1000, 4097])
def test_permutation(n: int) -> None:
    drawn = permutation.Permutation(n, torch.Generator().manual_seed(n))
    numbers = drawn[0:n]
    assert torch.equal(numbers.sort().values, torch.arange(n))
    assert [drawn[i] for i in range(min(n, 5))] == numbers[:5].tolist()
    with pytest.raises(IndexError):
        drawn[n]


def test_numbers_of_a_permutation_are_uniform() -> None:
    first = torch.tensor(
        [permutation.Permutation(5, torch.Generator().manual_seed(s))[0] for s in range(2000)]
    )
    counts = first.bincount(minlength=5)
    assert ((counts - 400).square() / 400).sum() < 18.5  # χ² with 4 degrees, one in a thousand


@pytest.mark.parametrize("estimator", ["ntk-4-rows", "ntk-4-1", "ntk-4-2-iid"])
def test_partition_that_is_not_written_out(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "WRITTEN", 1)
    partition = Partition(Estimator.parse(estimator), 6, 3)
    blocks = partition.blocks(torch.Generator().manual_seed(0))
    pairs = []
    for block in blocks:
        assert block.columns is not None
        for n, columns in zip(block.indices.tolist(), block.columns.tolist(), strict=True):
            pairs += [(n, c) for c in columns if c >= 0]
    assert sorted(pairs) == [(n, c) for n in range(6) for c in range(3)]


def test_block_of_a_large_index_set() -> None:
    partition = Partition(Estimator.parse("ntk-64-rows"), 500_000, 50_000)
    block = partition.blocks(torch.Generator().manual_seed(0))[0]
    assert block.num_rows == 64
    assert block.scale == -(-500_000 * 50_000 // 64)


# ------------------------------------------------------------ bad input


def test_targets_elsewhere() -> None:
    x, y = text()
    one = evidence(tagger(), Categorical(), "ntk-6-1", 13)
    with pytest.raises(InputError, match="the shape of the outputs' positions"):
        one.map_loss(x, y[:, :-1])
    with pytest.raises(InputError, match="the shape of the outputs' positions"):
        one.blocks((x, y[:, :-1]))
    with pytest.raises(InputError, match="the shape of the outputs' positions"):
        one.estimate(x, y[:, 0])


def test_target_out_of_range() -> None:
    x, y = text()
    y[3, 1] = WORDS
    one = evidence(tagger(), Categorical(), "ntk-6-1", int((y != -100).sum()))
    for action in (one.map_loss, one.estimate, lambda x, y: one.blocks((x, y)).take(1)):
        with pytest.raises(InputError, match=r"Example 3, position 1: .*outside 0"):
            action(x, y)
    with pytest.raises(InputError, match=r"Example 3, position 1: .*outside 0"):
        evigrad.fit(tagger().float(), (x, y), progress=False)


def test_no_target() -> None:
    x, y = text()
    one = evidence(tagger(), Categorical(), "ntk-6-1", 13)
    nothing = torch.full_like(y, -100)
    for action in (
        one.estimate,
        lambda x, y: one.blocks((x, y)),
        lambda x, y: evaluate(tagger(), Categorical(), (x, y)),
        lambda x, y: evigrad.fit(tagger().float(), (x, y), progress=False),
    ):
        with pytest.raises(InputError, match="At least one target must count, got none"):
            action(x, nothing)


def test_a_subset_of_unknown_size() -> None:
    x, y = text()
    one = evidence(tagger(), Categorical(), "ntk-6-C", int((y != -100).sum()))
    with pytest.raises(InputError, match="1 to 3 targets each.*blocks"):
        one.estimate(x[:2], y[:2])
    assert one.estimate(x[2:], y[2:]).is_bound


def test_data_that_begin_without_targets() -> None:
    x, y = text()
    y[:2] = -100
    schedule = evigrad.Schedule(epochs=1, batch_size=N)
    fitted = evigrad.fit(
        tagger().float(), (x, y), estimator=None, schedule=schedule, progress=False
    )
    assert fitted.evidence.num_data == int((y != -100).sum())


def test_wrong_number_of_targets() -> None:
    one = evidence(tagger(), Categorical(), "ntk-N-1", N)
    with pytest.raises(InputError, match="num_data is 5.*has 13 positions"):
        one.blocks(text())


class Changing(Tagger):
    """Outputs lose their positions after a while."""

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        return f.mean(1) if hasattr(self, "averages") else f


class Wider(Tagger):
    """Outputs get a class more."""

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        return torch.cat([f, f[..., :1]], -1) if hasattr(self, "more") else f


@pytest.mark.parametrize("positions", [True, False])
@pytest.mark.parametrize("passes", [0, 20])
def test_another_number_of_outputs(passes: int, positions: bool) -> None:
    x, y = text()
    model = tagger(Wider)
    network = model if positions else nn.Sequential(model, Mean()).double()
    labels, count = (y, int((y != -100).sum())) if positions else (y[:, 0], N)
    one = evidence(network, Categorical(), "ntk-4-C", count)
    block = next(iter(one.blocks((x, labels))))
    for _ in range(passes):
        one.estimate(block)
    model.more = nn.Identity()
    with pytest.raises(InputError, match="4 outputs per example, but 3 before"):
        one.estimate(block)


class Mean(nn.Module):
    def forward(self, f: Tensor) -> Tensor:
        return f.mean(1)


class Longer(Tagger):
    """Outputs get a position more."""

    def forward(self, x: Tensor) -> Tensor:
        f = super().forward(x)
        return torch.cat([f, f[:, :1]], 1) if hasattr(self, "more") else f


def test_another_number_of_positions() -> None:
    x, y = text()
    model = tagger(Longer)
    one = evidence(model, Categorical(), "ntk-6-1", int((y != -100).sum()))
    block = next(iter(one.blocks((x, y))))
    one.estimate(block)
    model.more = nn.Identity()
    with pytest.raises(InputError, match="same shape for inputs of the same shape"):
        one.estimate(block)


def test_targets_that_are_no_labels() -> None:
    x, y = text()
    one_hot = torch.nn.functional.one_hot(y.clamp(min=0), WORDS)
    one = evidence(tagger(), Categorical(), "ntk-6-1", N * LENGTH)
    for action in (one.map_loss, one.estimate, lambda x, y: one.blocks((x, y))):
        with pytest.raises(InputError, match="Class labels must have the shape"):
            action(x, one_hot)
    for wrong, words in (
        (one_hot, "Class labels"),
        (y[:, 0], "the shape of the outputs' positions"),
    ):
        with pytest.raises(InputError, match=words):
            evigrad.fit(tagger().float(), (x, wrong), progress=False)


def test_channels_second_are_named() -> None:
    model = nn.Conv2d(1, 3, 1)
    data = torch.randn(4, 1, 6, 5), torch.zeros(4, 6, 5, dtype=torch.long)
    with pytest.raises(InputError, match="channel_dim=1"):
        evigrad.fit(model, data, progress=False)


def test_outputs_of_another_shape() -> None:
    x, y = text()
    model = tagger(Changing)
    one = evidence(model, Categorical(), "ntk-6-1", int((y != -100).sum()))
    block = next(iter(one.blocks((x, y))))
    one.estimate(block)
    model.averages = nn.Identity()
    with pytest.raises(InputError, match="same shape for inputs|one target|position"):
        one.estimate(block)
    with pytest.raises(InputError, match=r"\(5,\)"):
        one.map_loss(x, y)


def test_a_position_that_loses_its_target() -> None:
    x, y = text()

    class Jumping(torch.utils.data.Dataset[Any]):
        reads = 0

        def __len__(self) -> int:
            return N

        def __getitem__(self, n: int) -> Any:
            Jumping.reads += 1
            return x[n], y[n].roll(Jumping.reads // (2 * N))

    one = evidence(tagger(), Categorical(), "ntk-6-1", int((y != -100).sum()))
    with pytest.raises(InputError, match="had a target .* but has none now"):
        for _ in one.blocks(Jumping()).take(20):
            pass


# ------------------------------------------------------------ outputs in a result


@pytest.mark.parametrize(
    ("output", "result"),
    [
        ("scores", lambda f: SimpleNamespace(scores=f)),
        ("scores", lambda f: {"loss": 0, "scores": f}),
        (1, lambda f: (0, f)),
        (lambda r: r[0] * 1.0, lambda f: [f]),
        (None, lambda f: SimpleNamespace(logits=f)),
        ("logits", lambda f: SimpleNamespace(logits=f)),
        ("scores", lambda f: SimpleNamespace(logits=f[:, :1], scores=f)),
        (lambda r: r.logits, lambda f: SimpleNamespace(logits=f)),
    ],
)
def test_part_of_the_result(output: Any, result: Any) -> None:
    x, y = text()

    class Returning(Tagger):
        def forward(self, x: Tensor) -> Any:
            return result(super().forward(x))

    model = tagger(Returning)
    plain = tagger()
    wrapped = Outputs(model, output=output)
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    count = int((y != -100).sum())
    one = evidence(wrapped, Categorical(), "ntk-6-1", count)
    other = evidence(plain, Categorical(), "ntk-6-1", count)
    assert_same(one, (x, y), other, (x, y))
    wrapped.eval()
    assert not model.training


def test_parts_that_are_not_there() -> None:
    x, y = text()
    one = evidence(Outputs(tagger(), output="scores"), Categorical(), "ntk-6-1", 13)
    with pytest.raises(InputError, match="output='scores' of a Tensor raised AttributeError"):
        one.map_loss(x, y)
    with pytest.raises(InputError, match="must be a dimension of the outputs"):
        evidence(Outputs(tagger(), channel_dim=3), Categorical(), "ntk-6-1", 13).map_loss(x, y)
    with pytest.raises(ConfigurationError, match="channel_dim"):
        Outputs(tagger(), channel_dim=0)
    with pytest.raises(ConfigurationError, match="output must be a name"):
        Outputs(tagger(), output=1.5)  # pyright: ignore[reportArgumentType]
