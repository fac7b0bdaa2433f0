"""Rates fall by a cosine, and Fixup's scalars have one of their own."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainers import trainer_of

from evigrad import Optimization, Schedule, fit
from evigrad.errors import ConfigurationError
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.models import fixup_scalars, make_model
from evigrad.training import optimizers
from evigrad.training.optimizers import clear_negligible, cosine

SMALL: dict[str, Any] = {"estimator": None, "epochs": 4, "lr": 0.01, "lr_min": 0.0001}


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 1, 8, 8, generator=generator), torch.arange(6) % 3


def resnet() -> torch.nn.Module:
    return make_model("resnet18", (1, 8, 8), 3, seed=0, width=2)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_scalars_have_a_tenth_of_the_rate_all_along(images, optimizer):
    # Also where the network lies within another module.
    model = Averaged(resnet(), AffineInvariance(0.1), num_samples=1)
    changes = {"hyperparameters": ["invariance"], "optimizer": optimizer}
    trainer = trainer_of(model, images, **SMALL, **changes)
    weights, scalars = trainer.weights.optimizer.param_groups
    slow = {id(p) for p in fixup_scalars(model).values()}
    assert {id(p) for p in scalars["params"]} == slow
    held = [id(p) for p in (*weights["params"], *scalars["params"])]
    assert sorted(held) == sorted(id(w) for w in trainer.evidence.weights().values())
    for epoch in range(1, 5):
        trainer.weights.set_rates(epoch)
        rate = cosine((epoch - 1) / 4, 0.01, 0.0001)
        assert weights["lr"] == pytest.approx(rate)
        assert scalars["lr"] == pytest.approx(rate / 10)


def test_a_step_of_sgd_goes_a_tenth_as_far(images, monkeypatch):
    steps = {}
    for factor in (1.0, 0.1):
        model = resnet()
        monkeypatch.setattr(optimizers, "SCALAR_RATE", factor)
        trainer = trainer_of(model, images, **SMALL, optimizer="sgd")
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        trainer.train_weights(1)
        steps[factor] = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    scalars = fixup_scalars(resnet())
    assert any(float(steps[1.0][name].abs()) > 0 for name in scalars)
    for name, step in steps[0.1].items():
        expected = steps[1.0][name] * (0.1 if name in scalars else 1)
        torch.testing.assert_close(step, expected, rtol=1e-3, atol=1e-7)


def test_other_networks_and_optimisers_have_one_group(images):
    model = make_model("mlp", (1, 8, 8), 3, seed=0)
    assert len(trainer_of(model, images, **SMALL).weights.optimizer.param_groups) == 1

    def own(weights):
        return torch.optim.SGD(weights.values(), lr=0.01)

    trainer = trainer_of(resnet(), images, **SMALL, optimizer=own)
    assert len(trainer.weights.optimizer.param_groups) == 1


def test_scalars_that_are_frozen_or_hyperparameters_are_nobodys(images):
    model = resnet()
    names = list(fixup_scalars(model))
    model.get_parameter(names[0]).requires_grad_(False)
    trainer = trainer_of(model, images, **SMALL, hyperparameters=[names[1]])
    held = {id(p) for group in trainer.weights.optimizer.param_groups for p in group["params"]}
    assert not held & {id(model.get_parameter(name)) for name in names[:2]}
    assert len(trainer.weights.optimizer.param_groups[1]["params"]) == len(names) - 2


def test_cosine_starts_ends_and_halves_where_it_should():
    assert cosine(0.0, 0.1, 0.01) == pytest.approx(0.1)
    assert cosine(1.0, 0.1, 0.01) == pytest.approx(0.01)
    assert cosine(0.5, 0.1, 0.01) == pytest.approx(0.055)
    assert cosine(0.25, 1.0, 0.0) == pytest.approx(0.5 + 0.5 * math.sqrt(0.5))


def test_adam_refuses_float16_before_training_and_other_optimisers_do_not():
    """Adam's ε is zero in float16: its first step would make NaN."""
    x, y = torch.linspace(-1, 1, 20)[:, None].half(), torch.linspace(-1, 1, 20)[:, None]
    model = nn.Linear(1, 1).half()
    before = model.weight.detach().clone()
    arguments: dict[str, Any] = {"likelihood": "gaussian", "estimator": None, "progress": False}
    schedule = Schedule(epochs=2)
    with pytest.raises(ConfigurationError, match=r"float16: 'weight', 'bias'.*model.float\(\)"):
        fit(model, (x, y), schedule=schedule, **arguments)
    assert torch.equal(model.weight, before)
    sgd = Optimization(optimizer="sgd", lr=0.1)
    result = fit(model, (x, y), schedule=schedule, optimization=sgd, **arguments)
    assert math.isfinite(result.train_metrics["log_likelihood"])


def test_weights_of_inactive_units_become_zero_before_they_are_subnormal(monkeypatch):
    x, y = torch.rand(20, 3), torch.arange(20) % 2
    trained = []
    for is_cleared in (True, False):
        model = make_model("mlp", (3,), 2, seed=0, hidden=(4,), activation="relu")
        first = next(m for m in model.modules() if isinstance(m, nn.Linear))
        with torch.no_grad():
            first.weight[0], first.bias[0] = 1e-33, -10.0
        if not is_cleared:
            monkeypatch.setattr("evigrad.training.weights.clear_negligible", lambda _: None)
        trainer = trainer_of(model, (x, y), **SMALL, optimizer="sgd", batch_size=5)
        trainer.train_weights(1)
        momentum = trainer.weights.optimizer.state[first.weight]["momentum_buffer"]
        for tensor in (first.weight, momentum):
            assert tensor[0].any() != is_cleared
            assert tensor[1:].all()
        trained.append([p.detach().clone() for p in model.parameters()])
    for cleared, kept in zip(*trained, strict=True):
        torch.testing.assert_close(cleared, kept, rtol=0, atol=1e-30)


def test_negligible_states_of_adam_become_zero_too():
    weight = nn.Parameter(torch.tensor([1e-35, 0.5]))
    unused = nn.Parameter(torch.tensor([1e-35, -1e-29], dtype=torch.float64))
    adam = torch.optim.Adam([weight, unused], lr=0.0)
    weight.grad = torch.tensor([1e-33, 1.0])
    adam.step()
    clear_negligible(adam)
    assert torch.equal(weight, torch.tensor([0.0, 0.5]))
    assert torch.equal(unused, torch.tensor([0.0, -1e-29], dtype=torch.float64))
    state = adam.state[weight]
    assert torch.equal(state["exp_avg"], torch.tensor([0.0, 0.1]))
    assert state["step"] == 1
    assert unused not in adam.state
