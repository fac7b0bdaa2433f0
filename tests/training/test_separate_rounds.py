"""Rounds of the model's own hyperparameters beside those of prior and noise."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainers import learner_of, trainer_of

from benchmarks.one_graph import OneGraph
from evigrad.errors import ConfigurationError
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.passes.sweep import MicroBatchSweep
from evigrad.priors import GaussianPrior
from evigrad.training import fit
from evigrad.training.optimizers import cosine
from evigrad.training.settings import grouped
from evigrad.training.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "estimator": "ntk-6-1",
    "hyperparameters": ["invariance"],
    "epochs": 7,
    "batch_size": 12,
    "burn_in": 2,
    "every": 2,
    "steps": 2,
    "hyper_every": 1,
    "hyper_steps": 3,
    "prior_update": "adam",
    "hyper_lr": 0.04,
    "hyper_lr_min": 0.01,
    "progress": False,
}


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
        return Averaged(net, AffineInvariance({"rotation": 0.4, "shear": 0.2}), num_samples=2)


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, 1, 7, 7, generator=generator), torch.arange(12) % 3


def prepared(
    data: tuple[Tensor, Tensor], model: nn.Module | None = None, **changes: Any
) -> Trainer:
    return trainer_of(model or network(), data, **(SETTINGS | changes))


def values_of(trainer: Trainer) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainer.evidence.hyperparameters().items()}


def record_calls(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """Passes over blocks of data, and the kinds of hyperparameters that they are for."""
    calls: list[tuple[str, set[str]]] = []
    for name in ("collect", "backward"):
        method = getattr(trainer.evidence, name)

        def record(data, wrt, name=name, method=method):
            calls.append((name, {n.split(".")[0] for n in wrt}))
            return method(data, wrt=wrt)

        monkeypatch.setattr(trainer.evidence, name, record)
    return calls


def test_each_has_its_epochs_its_steps_and_its_cosine(images):
    trainer = prepared(images)
    rates: list[tuple[int, float, float]] = []
    epoch = 0

    def record(optimizer, *_: Any) -> None:
        prior, model_group = optimizer.param_groups
        is_own = all(p.grad is None for p in prior["params"])
        assert is_own != all(p.grad is None for p in model_group["params"])
        rates.append((epoch, is_own, (model_group if is_own else prior)["lr"]))

    learner_of(trainer).hyper_optimizer.register_step_pre_hook(record)
    taken = []
    for epoch in range(1, 8):
        assert learner_of(trainer).is_due(epoch) == (epoch >= 2)
        learner_of(trainer).learn(epoch)
        taken.append(learner_of(trainer).hyper_steps)
    of_prior = [(e, rate) for e, is_own, rate in rates if not is_own]
    of_own = [(e, rate) for e, is_own, rate in rates if is_own]
    assert [e for e, _ in of_prior] == [2, 2, 4, 4, 6, 6]
    assert [e for e, _ in of_own] == [e for e in range(2, 8) for _ in range(3)]
    assert [r for _, r in of_prior] == pytest.approx([cosine(s / 6, 0.1, 0.01) for s in range(6)])
    expected = [cosine(s / 18, 0.04, 0.01) for s in range(18)]
    assert [r for _, r in of_own] == pytest.approx(expected)
    assert taken == [0, 5, 8, 13, 16, 21, 24]
    # Those of an epoch come behind one another.
    assert [is_own for e, is_own, _ in rates if e == 2] == [False] * 2 + [True] * 3


def test_what_is_left_away_is_that_of_the_prior(images):
    for changes, every_and_steps in (
        ({"hyper_every": None}, (2, 3)),
        ({"hyper_steps": None}, (1, 2)),
    ):
        first, second = learner_of(prepared(images, **changes)).step_groups
        assert (first.every, first.steps) == (2, 2)
        assert (second.every, second.steps) == every_and_steps
        assert all(name.startswith("model.") for name in second.names)
        assert not any(name.startswith("model.") for name in first.names)
    (together,) = learner_of(prepared(images, hyper_every=None, hyper_steps=None)).step_groups
    assert (together.every, together.steps, len(together.names)) == (2, 2, 3)


def test_a_model_without_hyperparameters_and_a_prior_that_stays(images):
    averaged: Any = network()
    (only,) = learner_of(prepared(images, averaged.model, hyperparameters=())).step_groups
    assert (only.every, only.steps, only.names) == (2, 2, ["prior.log_precision"])
    (only,) = learner_of(prepared(images, prior=GaussianPrior(learnable=False))).step_groups
    assert (only.every, only.steps, len(only.names)) == (1, 3, 2)


def test_steps_are_those_of_two_optimisers_on_parts_of_the_gradient(images):
    trainer = prepared(images)
    twin = copy.deepcopy(trainer.evidence)
    learner_of(trainer).learn(2)
    parameters = twin.hyperparameters()
    model_parameters = {n: p for n, p in parameters.items() if n.startswith("model.")}
    other_parameters = {n: p for n, p in parameters.items() if n not in model_parameters}
    for part, steps, total, first, last in (
        (other_parameters, 2, 6, 0.1, 0.01),
        (model_parameters, 3, 18, 0.04, 0.01),
    ):
        optimizer = torch.optim.Adam(part.values())
        for step, block in enumerate(twin.blocks(images).take(steps)):
            for p in parameters.values():
                p.grad = None
            twin.backward(block)
            optimizer.param_groups[0]["lr"] = cosine(step / total, first, last)
            optimizer.step()
    for name, value in values_of(trainer).items():
        torch.testing.assert_close(value, parameters[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"estimator": "ntk-10-rows-anchored"}])
def test_steps_on_precisions_do_not_pay_for_the_ranges(images, monkeypatch, changes):
    """Each draws transforms of its own: no pass is shared, not even over anchors."""
    trainer = prepared(images, **changes)
    kinds: list[str] = []
    run = MicroBatchSweep.fold

    def counted(sweep, step, start, *, graph=False):
        kinds.append("second" if graph else "first")
        return run(sweep, step, start, graph=graph)

    monkeypatch.setattr(MicroBatchSweep, "fold", counted)
    learner_of(trainer).learn(2)
    assert kinds == ["first"] * 2 + ["first", "second"] * 3


def test_kept_passes_serve_the_prior_beside_learned_ranges(images, monkeypatch):
    trainer = prepared(images, prior_blocks=1, steps=5)
    calls = record_calls(trainer, monkeypatch)
    before = values_of(trainer)
    learned = learner_of(trainer).learn(2)
    assert calls == [("collect", {"prior"})] + [("backward", {"model"})] * 3
    assert (len(learned.estimates), learned.is_shared) == (8, True)
    assert all((values_of(trainer)[n] != value).any() for n, value in before.items())
    with pytest.raises(ConfigurationError, match="hyper_steps"):
        prepared(images, prior_blocks=1, hyper_every=None, hyper_steps=None)


class Gated(nn.Module):
    """A hyperparameter of the forward pass, and nothing drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.gate = (
            nn.Sequential(nn.Flatten(), nn.Linear(49, 3)),
            nn.Parameter(torch.tensor(0.5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.gate)


def test_full_batch_rounds_pass_once_for_the_prior(images, monkeypatch):
    trainer = prepared(images, Gated(), estimator="kfac-N-C", steps=4, hyperparameters=["gate"])
    calls = record_calls(trainer, monkeypatch)
    learner_of(trainer).learn(2)
    assert calls == [("collect", {"prior"})] + [("backward", {"model"})] * 3


def test_full_batch_rounds_of_a_model_that_draws_see_other_draws_in_each_step(images, monkeypatch):
    trainer = prepared(images, estimator="kfac-N-C", steps=4)
    calls = record_calls(trainer, monkeypatch)
    learner_of(trainer).learn(2)
    assert calls == [("backward", {"prior"})] * 4 + [("backward", {"model"})] * 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("estimator", ["kfac-N-C", "kfac-N-1", "ntk-N-1"])
def test_a_full_batch_round_in_micro_batches_is_the_one_graph_gradient(images, estimator):
    """One step of plain gradient on all the data, prior and ranges together."""
    data = (images[0].double(), images[1])
    changes: dict[str, Any] = {"hyper_every": None, "hyper_steps": None, "steps": 1}
    changes |= {"micro_batch": 5, "precision": 1.0}
    trainer = prepared(data, network().double(), estimator=estimator, **changes)
    gradients: dict[str, Tensor] = {}

    def record(*_: Any) -> None:
        for name, p in trainer.evidence.hyperparameters().items():
            assert p.grad is not None
            gradients[name] = p.grad.clone()

    learner_of(trainer).hyper_optimizer.register_step_pre_hook(record)
    state = trainer.evidence.generator.get_state()
    (estimate,) = learner_of(trainer).learn(2).estimates
    twin = OneGraph(
        network().double(),
        trainer.evidence.likelihood,
        GaussianPrior(),
        estimator=estimator,
        num_data=12,
        hyperparameters=["invariance"],
        generator=0,
    )
    twin.generator.set_state(state)
    expected = twin.backward(next(iter(twin.blocks(data))))
    assert estimate.log_evidence == pytest.approx(expected.log_evidence, rel=1e-10)
    assert gradients.keys() == twin.hyperparameters().keys()
    for name, p in twin.hyperparameters().items():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-8, atol=1e-11)


def test_the_state_holds_the_steps_of_each(images):
    trainer = prepared(images)
    learner_of(trainer).learn(2)
    state = copy.deepcopy(learner_of(trainer).state_dict())
    model_state = copy.deepcopy(trainer.evidence.model.state_dict())
    learner_of(trainer).learn(3)
    other = prepared(images)
    other.evidence.model.load_state_dict(model_state)
    learner_of(other).load_state_dict(state)
    assert [group.taken for group in learner_of(other).step_groups] == [2, 3]
    learner_of(other).learn(3)
    for name, value in values_of(trainer).items():
        assert torch.equal(value, values_of(other)[name])


def test_a_run_records_the_ranges(images):
    changes: dict[str, Any] = SETTINGS | {"epochs": 3}
    result = fit(network(), images, **grouped(changes))
    first, *_, last = result.history
    assert (first["range/rotation"], first["range/shear"]) == pytest.approx((0.4, 0.2))
    assert last["range/rotation"] != first["range/rotation"]
    ranges = [name for name in last if name.startswith(("range/", "model/"))]
    assert ranges == ["range/rotation", "range/shear"]  # those that are zero for good are not there
    assert [row["hyper_steps"] for row in result.history] == [0, 5, 8]
