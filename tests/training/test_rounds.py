"""Rounds of hyperparameter steps: when, what their blocks are, and how the precisions move."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainers import learner_of, trainer_of

from evigrad.blocks import Block
from evigrad.core.curvature import linalg
from evigrad.errors import ConfigurationError, EvigradError, EvigradWarning, MemoryBudgetError
from evigrad.likelihoods import Gaussian
from evigrad.priors import GaussianPrior, NormalHyperprior
from evigrad.training import fit
from evigrad.training.fixed_point import FixedPoint
from evigrad.training.learner import FIRST_RATE, LAST_RATE, StepGroup
from evigrad.training.optimizers import cosine, make_hyper_optimizer
from evigrad.training.rounds import RoundBlocks, is_keepable, shared_if_possible
from evigrad.training.settings import grouped
from evigrad.training.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "estimator": "ntk-20-1",
    "epochs": 4,
    "batch_size": 20,
    "burn_in": 2,
    "every": 2,
    "steps": 3,
    "lr": 0.02,
    "progress": False,
}


def small(**changes: Any) -> dict[str, Any]:
    return {**SETTINGS, **changes}


@pytest.fixture
def regression(blobs) -> tuple[Tensor, Tensor]:
    x = blobs[0][0]
    return x, x[:, :3] + 0.3 * x[:, 1:].flip(0)


def prepared(net: nn.Module, data: tuple[Tensor, Tensor], **changes: Any) -> Trainer:
    """The trainer of a run that has not started."""
    return trainer_of(net, data, **(SETTINGS | changes))


def hyperparameters_of(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.evidence.hyperparameters().values()])


def record_passes(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """Blocks that are passed over, whether they are kept or not."""
    seen: list[Block] = []
    for name in ("collect", "backward"):
        method = getattr(trainer.evidence, name)

        def record(data, method=method, **keywords):
            if isinstance(data, Block):
                seen.append(data)
            return method(data, **keywords)

        monkeypatch.setattr(trainer.evidence, name, record)
    return seen


def test_whether_a_pass_can_be_kept_is_no_exception(make_net, regression):
    x, y = regression
    evidence = prepared(make_net(), (x, y), likelihood=Gaussian([0.5, 0.6, 0.7])).evidence
    assert is_keepable(evidence, x, ["prior", "likelihood"])
    sums = evidence.with_estimator("kfac-20-C")
    assert is_keepable(sums, x, ["prior"])
    assert not is_keepable(sums, x, ["likelihood"])
    # A misconfiguration was taken for a no.
    with pytest.raises(ConfigurationError, match="'noise'"):
        is_keepable(evidence, x, ["prior", "noise"])


@pytest.mark.each(1)
@pytest.mark.parametrize("update", ["adam", "fixed_point"])
@pytest.mark.parametrize("estimator", ["ntk-20-1", "kfac-20-C", "full-20-1"])
def test_steps_on_kept_blocks_are_steps_on_their_data(
    make_net, regression, monkeypatch, estimator, update
):
    settings: dict[str, Any] = {
        "likelihood": Gaussian(0.7),
        "estimator": estimator,
        "prior_update": update,
    }
    trainer = prepared(
        make_net().double(),
        (regression[0].double(), regression[1].double()),
        prior_blocks=2,
        steps=6,
        **settings,
    )
    twin = copy.deepcopy(trainer.evidence)
    seen = record_passes(trainer, monkeypatch)
    learned = learner_of(trainer).learn(2)
    assert len(seen) == 2
    assert len({int(i) for block in seen for i in block.indices}) == 40  # of one partition
    assert (len(learned.estimates), learned.is_shared, learner_of(trainer).hyper_steps) == (
        6,
        True,
        6,
    )
    # By hand: the mean of the gradients on the blocks themselves.
    parameters = twin.hyperparameters()
    optimizer = make_hyper_optimizer(parameters, trainer.settings.optimization)
    fixed_point = FixedPoint(twin)
    for step in range(6):
        for p in parameters.values():
            p.grad = None
        values = [twin.backward(block).log_evidence for block in seen]
        for p in parameters.values():
            assert p.grad is not None
            p.grad /= 2
        assert learned.estimates[step].log_evidence == pytest.approx(sum(values) / 2, rel=1e-9)
        for group in optimizer.param_groups:
            group["lr"] = cosine(step / 12, group["lr_first"], group["lr_last"])
        optimizer.step()
        if update == "fixed_point":
            fixed_point.rate = cosine(step / 12, 0.5, 0.05)
            fixed_point.step()
    by_hand = torch.cat([p.detach().flatten() for p in parameters.values()])
    torch.testing.assert_close(hyperparameters_of(trainer), by_hand, rtol=1e-8, atol=1e-10)
    assert all(p.grad is None for p in trainer.evidence.hyperparameters().values())


def test_a_block_for_each_step_by_default(make_net, regression, monkeypatch):
    trainer = prepared(make_net(), regression, likelihood=Gaussian(0.7), steps=5)
    seen = record_passes(trainer, monkeypatch)
    assert not learner_of(trainer).learn(2).is_shared
    assert len(seen) == 5


@pytest.mark.parametrize("estimator", ["ntk-N-C", "kfac-N-C"])
def test_one_pass_where_every_block_is_the_same(make_net, regression, monkeypatch, estimator):
    """Also with a noise to learn."""
    trainer = prepared(make_net(), regression, likelihood=Gaussian(0.7), estimator=estimator)
    seen = record_passes(trainer, monkeypatch)
    before = hyperparameters_of(trainer)
    assert learner_of(trainer).learn(2).is_shared
    assert len(seen) == 1
    assert (hyperparameters_of(trainer) != before).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("estimator", ["ntk-N-C", "full-N-C"])
def test_steps_on_one_precision_share_one_eigendecomposition(
    make_net, blobs, monkeypatch, estimator
):
    prior, data = GaussianPrior("scalar", 0.5), (blobs[0][0].double(), blobs[0][1])
    settings: dict[str, Any] = {"prior": prior, "estimator": estimator, "steps": 10}
    trainer = prepared(make_net().double(), data, prior_update="adam", **settings)
    seen, calls = record_passes(trainer, monkeypatch), list[int]()
    decompose = linalg.psd_eigenvalues

    def counted(matrix: Tensor, rank: int | None = None) -> Tensor:
        calls.append(len(matrix))
        return decompose(matrix, rank)

    monkeypatch.setattr(linalg, "psd_eigenvalues", counted)
    assert len(learner_of(trainer).learn(2).estimates) == 10
    assert (len(seen), len(calls)) == (1, 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("estimator", ["ntk-N-C", "blockdiag-N-C", "full-N-C"])
def test_a_single_step_keeps_no_pass(make_net, regression, monkeypatch, estimator):
    """Keeping one would factor its matrices twice: for a trial that no later step needs."""
    settings: dict[str, Any] = {"likelihood": Gaussian(0.7), "estimator": estimator}
    data = (regression[0].double(), regression[1].double())
    trainer = prepared(make_net().double(), data, steps=1, prior_update="fixed_point", **settings)
    kept = copy.deepcopy(trainer.evidence)
    monkeypatch.setattr(trainer.evidence, "collect", None)
    (estimate,) = learner_of(trainer).learn(2).estimates
    assert estimate.log_evidence == pytest.approx(
        kept.backward_kept(kept.collect(*data)).log_evidence, rel=1e-10
    )


@pytest.mark.parametrize("prior_blocks", [None, 2])
def test_steps_share_the_pass_over_their_anchors(
    make_net, regression, monkeypatch, prior_blocks: int | None
):
    """As many draws as steps, a step on each; or the mean of some of them again and again."""
    trainer = prepared(
        make_net().double(),
        (regression[0].double(), regression[1].double()),
        likelihood=Gaussian(0.7),
        estimator="ntk-20-rows-anchored",
        prior_update="adam",
        steps=4,
        prior_blocks=prior_blocks,
    )
    twin = copy.deepcopy(trainer.evidence)
    seen = record_passes(trainer, monkeypatch)
    learned = learner_of(trainer).learn(2)
    (block,) = seen
    assert block.anchored is not None
    draws = block.anchored.draws
    assert len(draws) == (prior_blocks or 4)
    assert learned.is_shared == (prior_blocks is not None)
    # By hand: each draw's own block.
    parameters = twin.hyperparameters()
    optimizer = make_hyper_optimizer(parameters, trainer.settings.optimization)
    for step in range(4):
        for p in parameters.values():
            p.grad = None
        numbers = [step] if prior_blocks is None else range(len(draws))
        values = [twin.backward(block.of_draw(number)).log_evidence for number in numbers]
        for p in parameters.values():
            assert p.grad is not None
            p.grad /= len(numbers)
        mean = sum(values) / len(numbers)
        assert learned.estimates[step].log_evidence == pytest.approx(mean, rel=1e-9)
        for group in optimizer.param_groups:
            group["lr"] = cosine(step / 8, group["lr_first"], group["lr_last"])
        optimizer.step()
    by_hand = torch.cat([p.detach().flatten() for p in parameters.values()])
    torch.testing.assert_close(hyperparameters_of(trainer), by_hand, rtol=1e-8, atol=1e-10)


def test_what_fits_makes_no_difference_to_what_is_drawn(make_net, regression, monkeypatch):
    """Fewer draws in a pass, the same draws; also in the rounds after it, and with OOM errors."""
    net, runs = make_net(), {}
    for most in (6, 2, 1):
        settings = {"likelihood": Gaussian(0.7), "estimator": "ntk-20-rows-anchored", "steps": 6}
        trainer = prepared(copy.deepcopy(net), regression, **settings)
        collect, tried, collected = trainer.evidence.collect, [], []

        def limited(
            block: Block, collect=collect, tried=tried, collected=collected, most=most, **keywords
        ):
            tried.append(block.num_draws)
            if block.num_draws > most:
                raise torch.OutOfMemoryError("rows") if most > 1 else MemoryBudgetError("rows")
            collected.append(block)
            return collect(block, **keywords)

        monkeypatch.setattr(trainer.evidence, "collect", limited)
        learned = [
            estimate for epoch in (2, 4) for estimate in learner_of(trainer).learn(epoch).estimates
        ]
        assert tried[:5] == {6: [6, 6], 2: [6, 3, 2, 2, 2], 1: [6, 3, 2, 1, 1]}[most][:5]
        draws = [draw.weight for block in collected for draw in block.anchored.draws]
        runs[most] = (
            draws,
            [e.log_evidence for e in learned],
            trainer.evidence.generator.get_state(),
        )
    draws, values, state = runs[6]
    assert len(values) == 12
    for most in (2, 1):
        assert runs[most][0] == pytest.approx(draws, rel=1e-4)
        assert runs[most][1] == pytest.approx(values, rel=1e-4)
        assert torch.equal(runs[most][2], state)


def test_a_later_pass_that_does_not_fit_is_cut_too(make_net, regression, monkeypatch):
    settings = {"likelihood": Gaussian(0.7), "estimator": "ntk-20-rows-anchored", "steps": 8}
    trainer = prepared(make_net(), regression, **settings)
    collect, tried = trainer.evidence.collect, []

    def limited(block: Block, **keywords: Any):
        tried.append(block.num_draws)
        if block.num_draws > (4 if len(tried) < 3 else 2):
            raise MemoryBudgetError("rows")
        return collect(block, **keywords)

    monkeypatch.setattr(trainer.evidence, "collect", limited)
    assert len(learner_of(trainer).learn(2).estimates) == 8
    assert tried == [8, 4, 4, 2, 2]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("prior_blocks", [None, 3])
def test_all_steps_share_one_pass_where_all_rows_are_anchors(
    make_net, regression, monkeypatch, prior_blocks
):
    settings = {"likelihood": Gaussian(0.7), "estimator": "ntk-180-rows-anchored", "steps": 4}
    trainer = prepared(make_net(), regression, prior_blocks=prior_blocks, **settings)
    seen = record_passes(trainer, monkeypatch)
    learned = learner_of(trainer).learn(2)
    assert (len(seen), len(learned.estimates), learned.is_shared) == (1, 4, True)
    exact = trainer.evidence.with_estimator("ntk-N-C").estimate(*regression).log_det
    assert trainer.evidence.estimate(seen[0]).log_det == pytest.approx(exact, rel=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("prior_blocks", [None, 5])
def test_ratios_are_learned_from_rounds_as_from_single_blocks(blobs, make_net, prior_blocks):
    """What is expected of blocks settles, and draws do not get wilder from round to round."""
    data = blobs[0]
    trainer = prepared(
        make_net(), data, estimator="ntk-20-rows-anchored", steps=10, prior_blocks=prior_blocks
    )
    evidence = trainer.evidence
    names = list(evidence.hyperparameters())
    assert evidence.anchors is not None

    def spread() -> Tensor:
        log_dets = [evidence.estimate(block).log_det for block in evidence.blocks(data).take(40)]
        return torch.tensor(log_dets).std()

    before = spread()
    ratios = dict(evidence.anchors._predictor._ratios)
    for _ in range(8):
        stream = evidence.blocks(data)
        blocks = RoundBlocks(evidence, stream, data[0][:3], names, 10, prior_blocks)
        for block in shared_if_possible(blocks).take()[0]:
            if isinstance(block, Block):
                evidence.estimate(block)
            else:
                evidence.estimate_kept(*block)
    for key, ratio in evidence.anchors._predictor._ratios.items():
        assert abs(ratio - ratios.get(key, ratio)) < 1.0
    assert spread() < 2 * before


@pytest.mark.parametrize(
    "changes",
    [
        {"prior": GaussianPrior("diagonal")},
        {"hyperparameters": ["gate"]},
        {"steps": 1},
    ],
)
def test_where_anchors_are_not_shared_each_step_has_its_block(
    make_net, regression, monkeypatch, changes: dict[str, Any]
):
    steps = changes.get("steps", 3)
    settings = {"likelihood": Gaussian(0.7), "estimator": "ntk-20-rows-anchored", **changes}
    net = Gated() if "hyperparameters" in changes else make_net()
    trainer = prepared(net, regression, **settings)
    seen = record_passes(trainer, monkeypatch)
    assert not learner_of(trainer).learn(2).is_shared
    assert [block.num_draws for block in seen] == [1] * steps


def test_passes_that_cannot_be_kept_are_made_again(make_net, regression, monkeypatch):
    noise = Gaussian(0.7, num_outputs=3)
    trainer = prepared(make_net(), regression, likelihood=noise, estimator="kfac-N-C")
    seen = record_passes(trainer, monkeypatch)
    assert not learner_of(trainer).learn(2).is_shared
    assert len(seen) == 3


def test_no_more_blocks_than_a_partition_has(make_net, regression, monkeypatch):
    settings: dict[str, Any] = {"likelihood": Gaussian(0.7), "prior_blocks": 50}
    trainer = prepared(make_net(), regression, **settings)
    seen = record_passes(trainer, monkeypatch)
    learner_of(trainer).learn(2)
    assert len(seen) == 9  # three groups of data times three outputs


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.gate * x)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hyperparameters": ["gate"], "prior_blocks": 2}, r"model\.gate changes the pass"),
        (
            {"likelihood": Gaussian(0.7), "estimator": "ntk-20-1-ef", "prior_blocks": 2},
            r"likelihood\.log_noise changes the pass",
        ),
        (
            {
                "likelihood": Gaussian(0.7, num_outputs=3),
                "estimator": "kfac-20-C",
                "prior_blocks": 2,
            },
            "sums rows with different scales",
        ),
        (
            {"prior": GaussianPrior(hyperprior=NormalHyperprior()), "prior_update": "fixed_point"},
            "hyperprior",
        ),
        (
            {
                "prior": GaussianPrior(learnable=False),
                "hyperparameters": ["gate"],
                "prior_update": "fixed_point",
            },
            "Use a prior with learnable=True",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_training(regression, blobs, tmp_path, changes, words):
    data = regression if "likelihood" in changes else blobs[0]
    net = Gated()
    before = net.linear.weight.detach().clone()
    with pytest.raises(ConfigurationError, match=words):
        fit(net, data, run_dir=tmp_path / "run", **grouped(small(**changes)))
    assert torch.equal(net.linear.weight, before)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------ the fixed point in training


def test_the_rate_of_the_fixed_point_follows_its_cosine(make_net, blobs, monkeypatch):
    settings: dict[str, Any] = {"epochs": 6, "prior_update": "fixed_point"}
    trainer = prepared(make_net(), blobs[0], **settings)
    rates, update = [], learner_of(trainer).fixed_point
    assert update is not None
    step = update.step

    def record():
        rates.append(update.rate)
        step()

    monkeypatch.setattr(update, "step", record)
    for epoch in (2, 4, 6):
        learner_of(trainer).learn(epoch)
    assert rates == pytest.approx([cosine(s / 9, FIRST_RATE, LAST_RATE) for s in range(9)])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("start", [0.1, 1.0])
def test_the_fixed_point_finds_what_adam_finds(make_net, blobs, start):
    """All data in one block, trained for long: both end at the same precisions."""
    log_precisions = {}
    for update in ("adam", "fixed_point"):
        settings = small(estimator="ntk-N-C", epochs=35, burn_in=5, every=2, lr_min=1e-4)
        settings |= {"prior_update": update, "steps": 6}
        if update == "adam":
            settings |= {"precision": start, "prior_lr": 0.3}
        result = fit(make_net(), blobs[0], **grouped(settings))
        log_precisions[update] = result.evidence.prior.log_precision
        assert result.history[-1]["log_evidence"] is not None
    assert (
        float((log_precisions["adam"] - log_precisions["fixed_point"]).detach().abs().max()) < 0.2
    )


def test_noise_and_the_models_own_keep_adam(regression):
    result = fit(
        Gated(),
        regression,
        hyperparameters=["gate"],
        likelihood=Gaussian(0.7),
        **grouped(dict(**SETTINGS, prior_update="fixed_point")),
    )
    first, last = result.history[0], result.history[-1]
    for name in ("noise", "model/gate", "precision/linear.weight"):
        assert first[name] != last[name]


def test_the_standard_error_is_of_independent_steps(make_net, blobs):
    for changes, has_error in (({}, True), ({"prior_blocks": 2}, False), ({"steps": 1}, False)):
        result = fit(make_net(), blobs[0], **grouped(small(**changes)))
        assert (result.history[-1]["log_evidence_sem"] is not None) == has_error
        assert result.history[-1]["log_evidence"] is not None


def test_a_failing_fixed_point_names_the_epoch(make_net, blobs):
    trainer = prepared(make_net(), blobs[0], prior_update="fixed_point", prior_blocks=1)
    log_precision = trainer.evidence.prior.log_precision
    assert log_precision is not None
    with torch.no_grad():
        log_precision.fill_(float("inf"))
    with pytest.warns(EvigradWarning, match="3 of 3 hyperparameter steps"):
        assert learner_of(trainer).learn(8).skipped == 3
    assert log_precision.grad is None
    with pytest.raises(EvigradError, match="after epoch 10"):  # no step in two rounds on end
        learner_of(trainer).learn(10)
    assert log_precision.grad is None


@pytest.mark.parametrize(
    ("burn_in", "every", "expected"),
    [
        (10, 5, [10, 15, 20, 25, 30]),
        (0, 10, [10, 20, 30]),
        (3, 9, [3, 12, 21, 30]),
        (30, 1, [30]),
        (31, 1, []),
    ],
)
def test_rounds_follow_the_last_epoch_of_the_burn_in_and_every_kth_after(burn_in, every, expected):
    group = StepGroup(["noise"], every, 2, burn_in, 30)
    assert [epoch for epoch in range(1, 31) if group.is_due(epoch)] == expected
    group.taken = 1
    if expected:
        assert group.progress == 1 / (2 * len(expected))
