"""The warning that training has not converged: only if a step changes hyperparameters."""

import warnings
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from evigrad import Schedule, fit
from evigrad.errors import EvigradWarning
from evigrad.likelihoods import Gaussian
from evigrad.posterior import mode
from evigrad.priors import GaussianPrior
from evigrad.training import convergence
from evigrad.training.convergence import changes_at_mode, steps_to_mode, warn_of_mode
from evigrad.training.fit import prepare
from evigrad.training.settings import Settings
from evigrad.training.trainer import Trainer

NUM_GROUPS, NUM_DATA, EPOCHS = 20, 200, 10


class Grouped(nn.Module):
    """A linear model with an effect of each group. All effects have a common shift."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.groups, self.linear = nn.Embedding(NUM_GROUPS, 1), nn.Linear(1, 1)
        with torch.no_grad():
            self.groups.weight.copy_(shift + torch.linspace(-1.0, 1.0, NUM_GROUPS)[:, None])
            self.linear.weight.fill_(1.0)
            self.linear.bias.fill_(-shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, :1]) + self.groups(x[:, 1].long())


def trainer_of(model: nn.Module, x: Tensor, y: Tensor, **settings) -> Trainer:
    settings = {"likelihood": "gaussian", "schedule": Schedule(epochs=EPOCHS)} | settings
    return prepare(model.double(), (x.double(), y.double()), Settings(**settings))


def grouped(shift: float, **settings) -> Trainer:
    """Return a trainer whose weights fit the data well, apart from a shift that is not needed."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(NUM_DATA) % NUM_GROUPS
    x = torch.stack([torch.randn(NUM_DATA, generator=generator), group.float()], 1)
    noise = torch.randn(NUM_DATA, 1, generator=generator)
    y = Grouped(0.0)(x).detach() + 0.1 * noise
    return trainer_of(Grouped(shift), x, y, **{"likelihood": Gaussian(noise=0.1)} | settings)


def test_a_linear_model_shows_the_precisions_at_its_mode():
    trainer = grouped(0.7)
    evidence, weights = trainer.evidence, trainer.evidence.weights()
    saved = {name: weight.detach().clone() for name, weight in weights.items()}
    changes = changes_at_mode(trainer.evidence, trainer.data)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach(), saved[name], rtol=0, atol=0)
    # One Newton step on the loss, by automatic differentiation.
    x, y = trainer.data.fetch(torch.arange(NUM_DATA))
    names, sizes = list(weights), [weight.numel() for weight in weights.values()]
    flat = torch.cat([saved[name].flatten() for name in names])

    def loss(point: Tensor) -> Tensor:
        named = {
            name: part.view_as(saved[name])
            for name, part in zip(names, point.split(sizes), strict=True)
        }
        f = torch.func.functional_call(evidence.model, named, (x,))
        decay = sum(evidence.prior.precisions()[n] * named[n].square().sum() for n in names)
        return -evidence.likelihood.log_prob(f, y).sum() + 0.5 * decay

    hessian = torch.autograd.functional.hessian(loss, flat)
    flat.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(flat), flat)
    at_mode = (flat - torch.linalg.solve(hessian, gradient)).detach().split(sizes)
    before, after = changes["precision/groups.weight"]
    index = names.index("groups.weight")
    ratio = float(saved["groups.weight"].square().sum() / at_mode[index].square().sum())
    assert after / before == pytest.approx(ratio, rel=1e-6)


def test_a_few_nats_in_total_that_change_a_precision_are_warned_of():
    """At 0.09 nats per example, they were not."""
    trainer = grouped(0.7)
    gap = trainer.evidence.mode_gap(trainer.data)
    assert 1 / NUM_DATA < gap < 0.1
    with pytest.warns(
        EvigradWarning,
        match=r"has not converged.*precision/groups\.weight from 2 to .*, such as epochs=40\.",
    ):
        warn_of_mode(trainer.evidence, trainer.data, gap, EPOCHS)


def test_weights_near_the_mode_are_not_warned_of():
    trainer = grouped(0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gap in (trainer.evidence.mode_gap(trainer.data), None):
            warn_of_mode(trainer.evidence, trainer.data, gap, EPOCHS)


def test_less_than_one_parameter_counts_as_one(monkeypatch):
    trainer = grouped(0.7)
    monkeypatch.setattr(convergence, "_sizes", lambda *_: next(sizes))
    for before, after, change in ((1.4, 1e-6, 1.4), (1.4, 0.7, 1.4), (3.0, 1e-6, 3.0), (4, 8, 0.5)):
        sizes = iter([{"precision/groups.weight": s} for s in (before, after)])
        now, then = changes_at_mode(trainer.evidence, trainer.data)["precision/groups.weight"]
        assert then / now == pytest.approx(change)
    sizes = iter([{"precision/groups.weight": s} for s in (0.9, 9.0)])
    assert not changes_at_mode(trainer.evidence, trainer.data)


def test_some_examples_show_the_gap_and_the_changes(monkeypatch):
    trainer = grouped(0.7)
    monkeypatch.setattr(convergence, "_MOST_NUMBERS", 0)  # Kronecker factors
    gaps, changes = [], []
    for count in (NUM_DATA, NUM_DATA // 2):
        monkeypatch.setattr(convergence, "_EXAMPLES", count)
        steps = steps_to_mode(trainer.evidence, trainer.data)
        gaps.append(convergence.mode_gap(trainer.evidence, steps))
        changes.append(changes_at_mode(trainer.evidence, trainer.data)["precision/groups.weight"])
    assert gaps[0] != gaps[1] == pytest.approx(gaps[0], rel=0.5)
    assert changes[0] != changes[1]
    assert changes[1] == pytest.approx(changes[0], rel=0.5)


@pytest.mark.parametrize("gap_above", [0.0, 1.0])
def test_the_warning_uses_the_step_of_the_mode_gap(monkeypatch, gap_above):
    trainer = grouped(0.7)
    monkeypatch.setattr(convergence, "_FEW_ROWS", 0)
    monkeypatch.setattr(convergence, "_ROUGH", gap_above)
    steps = steps_to_mode(trainer.evidence, trainer.data)
    assert len(steps) == (1 if gap_above else 2)  # a small gap needs no better approximation
    expected = changes_at_mode(trainer.evidence, trainer.data)
    if not gap_above:
        monkeypatch.setattr(convergence, "newton_step", None)
    assert changes_at_mode(trainer.evidence, trainer.data, steps) == expected


def test_the_gradient_is_computed_once_for_all_approximations(monkeypatch):
    trainer = grouped(0.7)
    monkeypatch.setattr(convergence, "_FEW_ROWS", 0)
    monkeypatch.setattr(convergence, "_ROUGH", 0.0)
    with patch.object(mode, "log_joint", wraps=mode.log_joint) as log_joint:
        rows, factors = steps_to_mode(trainer.evidence, trainer.data)
    assert log_joint.call_count == 1
    alone = trainer.evidence.mode_gap(trainer.data, structure="kfac") * NUM_DATA
    assert factors.gap == pytest.approx(alone, rel=1e-6) != rows.gap


class Kink(nn.Module):
    """A model with its mode at a kink: −|w| with w = 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1e-9]))

    def forward(self, x: Tensor) -> Tensor:
        return x - self.weight.abs()


def test_a_gap_at_a_kink_changes_nothing():
    x = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    trainer = trainer_of(Kink(), x, x + 1.0)
    assert trainer.evidence.mode_gap(trainer.data) > 0.1
    before, after = changes_at_mode(trainer.evidence, trainer.data)["noise"]
    assert before == after


def test_a_gap_beyond_the_effective_parameters_is_warned_of():
    x = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    trainer = trainer_of(Kink(), x, x + 1.0)
    gap = trainer.evidence.mode_gap(trainer.data)
    with pytest.warns(EvigradWarning, match=r"mode gap is 24.8 nats for .* effective parameters"):
        warn_of_mode(trainer.evidence, trainer.data, gap, EPOCHS)


def test_a_fixed_prior_has_no_changes():
    trainer = grouped(0.7, prior=GaussianPrior(learnable=False))
    assert list(changes_at_mode(trainer.evidence, trainer.data)) == ["noise"]


@pytest.mark.converges
def test_warnings_name_the_line_that_calls_fit():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=generator)
    y = x[:, :1] + 0.1 * torch.tan(3.0 * torch.rand(200, 1, generator=generator) - 1.5)
    with pytest.warns(EvigradWarning, match="has not converged|heavy tails") as caught:
        fit(nn.Linear(3, 1), (x, y), likelihood="gaussian", schedule=Schedule(epochs=4))
    words = " ".join(str(w.message) for w in caught if w.filename == __file__)
    assert "has not converged" in words or "heavy tails" in words
