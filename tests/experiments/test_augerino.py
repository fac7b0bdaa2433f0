"""The baseline that learns ranges on the training loss."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trainers import settings_of

from evigrad.errors import ConfigurationError
from evigrad.invariances import AdditiveNoise, AffineInvariance, Averaged, Transform
from evigrad.training import fit, load
from evigrad.training.optimizers import cosine
from evigrad.training.settings import grouped
from experiments.augerino import WIDEST, AugerinoTrainer, fit_augerino, prepare_augerino

SMALL: dict[str, Any] = {"epochs": 3, "batch_size": 12, "lr": 0.01}


def trainer_of(
    model: nn.Module, data: tuple[Tensor, Tensor], weight: float = 0.01, **changes: Any
) -> AugerinoTrainer:
    return prepare_augerino(model, data, settings_of(estimator=None, **changes), weight)


class Cut(Transform):
    """A transform of one's own with an unbounded range."""

    def __init__(self, reach: float) -> None:
        super().__init__()
        self.reach = nn.Parameter(torch.tensor(reach))

    @property
    def ranges(self) -> Tensor:
        return self.reach.abs()[None]

    def named_ranges(self) -> dict[str, float]:
        return {"reach": float(self.reach.detach().abs())}

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        return 2 * torch.rand(n, 1, generator=generator) - 1

    def forward(self, x: Tensor, eps: Tensor) -> Tensor:
        return x + (self.ranges * eps).to(x.dtype)[:, :, None, None]


def network(transform: nn.Module | None = None) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    ranges = {"rotation": 0.4, "shear": 0.2, "scale_x": 0.3}
    transform = transform or AffineInvariance(ranges, learn=["rotation", "shear"])
    return Averaged(net, transform, num_samples=2)


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, 1, 7, 7, generator=generator), torch.arange(12) % 3


def test_the_loss_is_that_of_the_weights_less_the_width_of_learned_ranges(images):
    trainer = trainer_of(network(), images, **SMALL, weight=0.3, precision=2.0)
    assert trainer.learned == ["model.invariance.rotation", "model.invariance.shear"]
    assert not any("invariance" in name for name in trainer.evidence.weights())
    x, y = images
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        loss = trainer.loss(x, y, torch.arange(len(x)), 1.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        plain = F.cross_entropy(trainer.evidence.model(x), y)
    decay = sum(w.square().sum() for w in trainer.evidence.weights().values())
    # Whole widths, from one end to the other; a fixed range is no part of it.
    expected = plain + 0.5 * 2.0 / 12 * decay - 0.3 * 2 * math.hypot(0.4, 0.2)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    loss.backward()
    for name in ("rotation", "shear"):
        gradient = trainer.evidence.model.get_parameter(f"invariance.{name}").grad
        assert gradient is not None and float(gradient.abs()) > 0


def test_ranges_step_with_the_weights_at_their_own_rates(images):
    rates = {"hyper_lr": 0.05, "hyper_lr_min": 0.01}
    trainer = trainer_of(network(), images, **SMALL | {"batch_size": 6, "precision": 1.0}, **rates)
    seen: list[float] = []
    trainer.weights.loss_optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[1]["lr"])
    )
    before = {n: p.detach().clone() for n, p in trainer.evidence.model.named_parameters()}
    prior = trainer.evidence.prior.log_precision
    for epoch in (1, 2, 3):
        trainer.train_weights(epoch)
    assert seen == pytest.approx([cosine(e / 3, 0.05, 0.01) for e in (0, 0, 1, 1, 2, 2)])
    for name, value in trainer.evidence.model.named_parameters():
        assert not torch.equal(value, before[name]), name
        assert value.grad is None
    assert prior is not None and float(prior.detach().abs().max()) == 0.0
    assert trainer.learner is None


def test_a_large_reward_widens_up_to_the_limit_and_no_reward_does_not(images):
    ends = {}
    for weight in (0.0, 100.0):
        settings = SMALL | {"epochs": 60, "hyper_lr": 0.1, "hyper_lr_min": 0.05}
        trainer = trainer_of(
            network(AffineInvariance({"rotation": 0.4})), images, **settings, weight=weight
        )
        for epoch in range(1, 61):
            trainer.train_weights(epoch)
        model: Any = trainer.evidence.model
        ends[weight] = model.invariance.named_ranges()["rotation"]
    assert ends[0.0] < 1.0
    assert math.pi - 0.15 < ends[100.0] <= math.pi


def test_there_is_no_reward_for_very_wide_ranges(images):
    for reach, factor in ((0.49 * WIDEST, 1), (0.51 * WIDEST, 0)):
        trainer = trainer_of(network(Cut(reach)), images, **SMALL, weight=0.5)
        value = -trainer.reward()
        assert float(value.detach()) == pytest.approx(-0.5 * 2 * reach * factor)
        value.backward()
        gradient = trainer.evidence.model.get_parameter("invariance.reach").grad
        assert gradient is not None and float(gradient) == pytest.approx(-factor)


def test_a_range_of_zero_has_a_gradient(images):
    trainer = trainer_of(network(AffineInvariance({"rotation": 0.0})), images, **SMALL)
    trainer.loss(*images, indices=torch.arange(12), scale=1.0).backward()
    gradient = trainer.evidence.model.get_parameter("invariance.rotation").grad
    assert gradient is not None and bool(torch.isfinite(gradient).all())
    assert float(gradient.abs()) > 0


def test_fit_tells_its_end(images):
    result = fit_augerino(network(), images, test=images, progress=False, **grouped(SMALL))
    assert result.estimator is None
    last = result.history[-1]
    assert last["range/rotation"] != result.history[0]["range/rotation"]
    assert last["range/scale_x"] == pytest.approx(0.3)
    assert (last["hyper_steps"], last["log_evidence"]) == (0, None)
    settings = grouped(SMALL | {"hyperparameters": ["invariance"]})
    named = fit_augerino(network(), images, progress=False, **settings)
    assert named.history[-1]["range/rotation"] == last["range/rotation"]
    precision = last["precision/model.3.weight"]
    assert precision == pytest.approx(5e-4 * 12)  # kept, the usual weight decay


def test_an_interrupted_training_goes_on_by_augerino_alone(images, tmp_path):
    settings: dict[str, Any] = grouped(SMALL)
    whole = fit_augerino(network(), images, progress=False, **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(network(), images, **SMALL).train(
            tmp_path / "run", progress=False, stop=lambda: True
        )
    place: dict[str, Any] = {"run_dir": tmp_path / "run", "resume": True, "progress": False}
    ranges = ["invariance.rotation", "invariance.shear"]
    with pytest.raises(ConfigurationError, match="has estimator=augerino, not None"):
        fit(network(), images, estimator=None, hyperparameters=ranges, **place, **settings)
    result = fit_augerino(network(), images, **place, **settings)
    assert result.history[-1]["range/rotation"] == whole.history[-1]["range/rotation"]
    assert load(tmp_path / "run", network()).settings["augerino_weight"] == 0.01


def test_a_reward_is_no_punishment(images):
    with pytest.raises(ConfigurationError, match="must be 0 or more, not -0.1"):
        trainer_of(network(), images, **SMALL, weight=-0.1)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(49, 3)),
        Averaged(nn.Sequential(nn.Flatten(), nn.Linear(49, 3)), AffineInvariance(learn=False), 2),
        Averaged(nn.Sequential(nn.Flatten(), nn.Linear(49, 3)), AdditiveNoise((1, 7, 7)), 2),
    ],
)
def test_it_needs_ranges_to_learn(images, model, tmp_path):
    with pytest.raises(ConfigurationError, match=r"learns the ranges.*Averaged\(model"):
        fit_augerino(model, images, run_dir=tmp_path / "run", **grouped(SMALL))
    assert not (tmp_path / "run").exists()


def test_map_keeps_the_ranges(images):
    settings: dict[str, Any] = SMALL | {"estimator": None}
    result = fit(
        network(), images, progress=False, hyperparameters=["invariance"], **grouped(settings)
    )
    assert result.history[-1]["range/rotation"] == pytest.approx(0.4)
    assert result.estimator is None
