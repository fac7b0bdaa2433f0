import math
from typing import Any

import pytest
import torch
from torch import nn
from trainers import learner_of, settings_of

from evigrad import Evidence
from evigrad.errors import ConfigurationError, EvigradError, EvigradWarning
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior
from evigrad.training.data import RunData
from evigrad.training.optimizers import cosine, make_hyper_optimizer, make_weight_optimizer
from evigrad.training.plan import plan
from evigrad.training.settings import Settings
from evigrad.training.trainer import Trainer
from evigrad.training.weights import training_mode

_DEFAULTS: dict[str, Any] = {
    "estimator": "ntk-20-1",
    "precision": 1.0,
    "prior_update": "adam",
    "epochs": 10,
    "batch_size": 25,
    "lr": 0.01,
    "lr_min": 0.0001,
    "burn_in": 2,
    "every": 2,
    "steps": 3,
    "eval_every": 0,
    "checkpoint_every": 10,
}


def make_settings(**changes) -> Settings:
    return plan(settings_of(**{**_DEFAULTS, **changes}), 60)


def make_trainer(net, data, likelihood=None, prior=None, **changes) -> Trainer:
    settings = make_settings(**changes)
    evidence = Evidence(
        net,
        likelihood or Categorical(),
        prior or GaussianPrior(),
        estimator=settings.estimator or "ntk-20-1",
        num_data=len(data[0]),
        hyperparameters=settings.hyperparameters,
        generator=0,
    )
    return Trainer(evidence, RunData(data, next(net.parameters()).device), settings)


def log_precision_of(trainer: Trainer) -> nn.Parameter:
    return trainer.evidence.hyperparameters()["prior.log_precision"]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor([0.5]))
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(self.gate * x)


def test_each_optimiser_holds_its_own_parameters_and_no_decay():
    evidence = Evidence(
        Gated(),
        Gaussian(noise=1.0),
        GaussianPrior(),
        estimator="ntk-20-1",
        num_data=60,
        hyperparameters=["gate"],
    )
    for name in ("adam", "sgd"):
        optimizer = make_weight_optimizer(
            evidence.weights(), make_settings(optimizer=name).optimization
        )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in evidence.weights().values()}
        assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    settings = make_settings(prior_lr=0.3, hyper_lr=0.2)
    optimizer = make_hyper_optimizer(evidence.hyperparameters(), settings.optimization)
    named = {id(p): name for name, p in evidence.hyperparameters().items()}
    groups = {
        group["lr"]: {named[id(p)] for p in group["params"]} for group in optimizer.param_groups
    }
    assert groups == {
        0.3: {"prior.log_precision", "likelihood.log_noise"},
        0.2: {"model.gate"},
    }
    assert all(group["weight_decay"] == 0 for group in optimizer.param_groups)
    settings = make_settings(prior_update="fixed_point")
    optimizer = make_hyper_optimizer(evidence.hyperparameters(), settings.optimization)
    held = {named[id(p)] for group in optimizer.param_groups for p in group["params"]}
    assert held == {"likelihood.log_noise", "model.gate"}


def test_hyperparameters_without_a_gradient_stay(blobs, make_net, monkeypatch):
    # Weight decay would shrink them also where the evidence is flat.
    trainer = make_trainer(make_net(), blobs[0])
    log_precision = log_precision_of(trainer)
    with torch.no_grad():
        log_precision.fill_(3.0)

    backward = trainer.evidence.backward

    def flat(block, wrt):
        estimate = backward(block, wrt=wrt)
        log_precision.grad = torch.zeros_like(log_precision)
        return estimate

    monkeypatch.setattr(trainer.evidence, "backward", flat)
    learner_of(trainer).learn(2)
    assert learner_of(trainer).hyper_steps == 3
    assert torch.equal(log_precision.detach(), torch.full_like(log_precision, 3.0))


def test_precisions_without_bound_do_not_let_weights_diverge(blobs, make_net) -> None:
    """With a decay of more than 2(1 + momentum)/lr, plain steps of SGD pass the mean by more."""
    trainer = make_trainer(make_net(), blobs[0], optimizer="sgd", batch_size=20, lr=0.1)
    with torch.no_grad():
        log_precision_of(trainer).fill_(18.0)  # a decay of a million
    sizes = []
    for epoch in range(1, 31):
        assert math.isfinite(trainer.train_weights(epoch)[0])
        sizes.append(
            max(float(w.detach().abs().max()) for w in trainer.evidence.weights().values())
        )
    assert sizes[-1] < sizes[0] < 2.0, sizes


def test_an_epoch_is_plain_gradient_descent_on_the_map_loss(blobs, make_net):
    # One batch of all data, before there is momentum: the step can be written down.
    data = blobs[0]
    trainer = make_trainer(make_net(), data, optimizer="sgd", batch_size=60, lr=0.1)
    twin = make_net()
    before = log_precision_of(trainer).detach().clone()
    x, y = data
    loss = nn.functional.cross_entropy(twin(x), y)
    loss = loss + 0.5 / 60 * sum(w.square().sum() for w in twin.parameters())
    gradients = torch.autograd.grad(loss, list(twin.parameters()))
    mean, skipped = trainer.train_weights(1)
    assert skipped == 0
    assert mean == pytest.approx(loss.item(), rel=1e-5)
    for w, start, gradient in zip(
        trainer.evidence.weights().values(), twin.parameters(), gradients, strict=True
    ):
        torch.testing.assert_close(w.detach(), start.detach() - 0.1 * gradient)
        assert w.grad is None
    assert torch.equal(log_precision_of(trainer).detach(), before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("outputs", [1, 3])
def test_steps_of_the_weights_are_as_long_however_small_the_noise_becomes(blobs, make_net, outputs):
    # A round may divide the noise by ten, and the gradients of the likelihood grow a hundredfold.
    x = blobs[0][0]
    data = (x, x[:, :3].clone())

    def distance(jump: float) -> float:
        likelihood = Gaussian(num_outputs=outputs if outputs > 1 else None)
        trainer = make_trainer(make_net(), data, likelihood, epochs=100, batch_size=6, lr=0.001)
        for epoch in range(1, 31):  # Adam's running means settle
            trainer.train_weights(epoch)
        with torch.no_grad():
            likelihood.log_noise.sub_(math.log(jump))
        before = [w.detach().clone() for w in trainer.evidence.weights().values()]
        trainer.train_weights(31)
        after = trainer.evidence.weights().values()
        return math.sqrt(
            sum((a - b).square().sum().item() for a, b in zip(after, before, strict=True))
        )

    assert 0.5 < distance(10.0) / distance(1.0) < 2


def test_the_loss_that_is_reported_has_the_noise_in_it(blobs, make_net):
    x = blobs[0][0]
    data = (x, x[:, :3].clone())
    trainer = make_trainer(
        make_net(), data, Gaussian(noise=0.1), optimizer="sgd", batch_size=60, lr=1e-3
    )
    expected = trainer.evidence.map_loss(*data)
    gradients = torch.autograd.grad(expected, list(trainer.evidence.weights().values()))
    before = [w.detach().clone() for w in trainer.evidence.weights().values()]
    mean, _ = trainer.train_weights(1)
    assert mean == pytest.approx(expected.item(), rel=1e-5)
    for w, start, gradient in zip(
        trainer.evidence.weights().values(), before, gradients, strict=True
    ):
        torch.testing.assert_close(w.detach(), start - 1e-3 * 0.1**2 * gradient)


def test_learning_rates_follow_their_cosines(blobs, make_net):
    trainer = make_trainer(make_net(), blobs[0], epochs=6, burn_in=2, every=2, steps=2)
    weight_rates, prior_rates = [], []
    learner_of(trainer).hyper_optimizer.register_step_pre_hook(
        lambda optimizer, *_: prior_rates.append(optimizer.param_groups[0]["lr"])
    )
    for epoch in range(1, 7):
        trainer.train_weights(epoch)
        weight_rates.append(trainer.weights.optimizer.param_groups[0]["lr"])
        if learner_of(trainer).is_due(epoch):
            learner_of(trainer).learn(epoch)
    assert weight_rates == pytest.approx([cosine(e / 6, 0.01, 0.0001) for e in range(6)])
    assert prior_rates == pytest.approx([cosine(s / 6, 0.1, 0.01) for s in range(6)])


def test_an_optimiser_of_the_users_own(blobs, make_net):
    def slow_biases(weights):
        biases = [w for name, w in weights.items() if name.endswith("bias")]
        others = [w for name, w in weights.items() if not name.endswith("bias")]
        groups = [{"params": biases, "lr": 0.001}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.01)

    trainer = make_trainer(make_net(), blobs[0], optimizer=slow_biases)
    trainer.train_weights(6)
    slow, fast = (group["lr"] for group in trainer.weights.optimizer.param_groups)
    assert fast == pytest.approx(cosine(0.5, 0.01, 0.0001))
    assert slow == pytest.approx(fast / 10)

    def decaying(weights):
        return torch.optim.SGD(weights.values(), lr=0.01, weight_decay=0.1)

    with pytest.raises(ConfigurationError, match="weight decay"):
        make_trainer(make_net(), blobs[0], optimizer=decaying)

    def forgetful(weights):
        return torch.optim.SGD(list(weights.values())[1:], lr=0.01)

    with pytest.raises(ConfigurationError, match="exactly the named weights"):
        make_trainer(make_net(), blobs[0], optimizer=forgetful)


def test_batches_cover_the_data_once_and_are_about_as_large(blobs, make_net, monkeypatch):
    trainer = make_trainer(make_net(), blobs[0], batch_size=59)
    seen = []
    map_loss = trainer.evidence.map_loss

    def record(x, y, **options):
        seen.append(x)
        assert torch.equal(x, blobs[0][0][options["indices"]])
        return map_loss(x, y, **options)

    monkeypatch.setattr(trainer.evidence, "map_loss", record)
    trainer.train_weights(1)
    assert [len(x) for x in seen] == [30, 30]  # 59 and a batch of one would be no better
    first = torch.cat(seen)
    assert not torch.equal(first, blobs[0][0])
    assert torch.equal(first.sort(dim=0).values, blobs[0][0].sort(dim=0).values)
    seen.clear()
    trainer.train_weights(2)
    assert not torch.equal(torch.cat(seen), first)


def test_modules_kept_in_evaluation_mode_stay_so():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5))
    model.train()
    model[0].eval()
    with training_mode(model):
        assert model[1].training
        assert not model[0].training
    model.eval()
    with pytest.raises(KeyError), training_mode(model):
        assert model[0].training
        raise KeyError
    assert not any(module.training for module in model.modules())


def test_divergence_names_the_epoch_and_the_cure(blobs, make_net):
    trainer = make_trainer(make_net(), blobs[0], optimizer="sgd", lr=1e30, lr_min=0.0)
    with pytest.raises(EvigradError, match=r"diverged in epoch 1 of 10.*Lower lr"):
        trainer.train_weights(1)


def test_an_estimate_that_fails_names_the_epoch(blobs, make_net):
    trainer = make_trainer(make_net(), blobs[0])
    with torch.no_grad():
        log_precision_of(trainer).fill_(float("inf"))
    with pytest.warns(EvigradWarning, match="skipped 3 of 3 hyperparameter steps"):
        assert learner_of(trainer).learn(6).estimates == []
    with pytest.raises(EvigradError, match="after epoch 8"):
        learner_of(trainer).learn(8)
    assert log_precision_of(trainer).grad is None


def test_settings_out_of_range():
    for changes, words in [
        ({"epochs": 0}, "epochs must be an integer of at least 1"),
        ({"epochs": "10"}, "epochs must be an integer of at least 1, got '10'"),
        ({"batch_size": True}, "batch_size must be an integer"),
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"lr": float("nan")}, "lr must be a positive number"),
        ({"lr_min": 0.5}, "lr_min must be between 0 and lr"),
        ({"optimizer": "sdg"}, "Did you mean 'sgd'"),
        ({"prior_update": "fixedpoint"}, "Did you mean 'fixed_point'"),
        ({"burn_in": 11}, "no hyperparameter would be learned"),
        ({"every": 0}, "every must be an integer of at least 1"),
        ({"steps": 0}, "steps must be"),
        ({"prior_lr": 0.0}, "prior_lr must be a positive"),
        ({"hyper_lr_min": 1.0}, "hyper_lr_min must be between"),
        ({"seed": -1}, "seed must be an integer of at least 0"),
        ({"prior_blocks": 0}, "prior_blocks must be an integer of at least 1"),
        ({"hyper_every": 0}, "hyper_every must be an integer of at least 1"),
        ({"hyper_steps": 0}, "hyper_steps must be an integer of at least 1"),
        ({"hyper_lr": 0.0}, "hyper_lr must be a positive"),
        ({"noise_on_loss": True}, "'ntk-20-1', the evidence determines the noise"),
        (
            {"estimator": "map"},
            "'map' is not an estimator. For plain MAP training, use estimator=None",
        ),
        ({"estimator": "map-noise"}, r"estimator=None with Optimization\(noise_on_loss=True\)"),
        ({"estimator": "augerino"}, "experiments/augerino.py"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            make_settings(**changes)


class Idle(nn.Module):
    """No output depends on the scale, or on one of the two layers."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("update", ["adam", "fixed_point"])
def test_precisions_that_nothing_determines_are_named_once(blobs, update):
    trainer = make_trainer(Idle(), blobs[0], prior_update=update)
    names = trainer.evidence.prior.group_names
    before = log_precision_of(trainer).detach().clone()
    with pytest.warns(EvigradWarning, match="'scale', 'idle.weight', so nothing determines"):
        learner_of(trainer).learn(2)
    learner_of(trainer).learn(4)
    moved = dict(zip(names, (log_precision_of(trainer).detach() - before).tolist(), strict=True))
    assert moved["idle.weight"] < 0 and moved["scale"] < 0


@pytest.mark.parametrize(
    "prior",
    [
        GaussianPrior("scalar"),
        GaussianPrior({"all": ["used", "idle"], "scale": ["scale"]}, learnable={"scale": False}),
    ],
)
def test_precisions_that_others_determine_or_that_are_fixed_are_not(blobs, prior):
    learner_of(make_trainer(Idle(), blobs[0], prior=prior)).learn(2)
