"""Hyperparameters learned beside a loop of one's own, and the decay that acts in it."""

import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import evigrad
from evigrad import Evidence, Learner, Optimization, Schedule
from evigrad.errors import ConfigurationError, EvigradWarning
from evigrad.invariances import InputScale
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior
from evigrad.training.data import stream
from evigrad.training.learner import LAST_RATE
from evigrad.training.optimizers import cosine

EPOCHS = 6
SCHEDULE = Schedule(epochs=EPOCHS, burn_in=2, every=2, steps=3)

PRIORS: dict[str, Callable[[], GaussianPrior]] = {
    "scalar": lambda: GaussianPrior("scalar", precision=3.0),
    "layerwise": lambda: GaussianPrior(
        precision={"0.weight": 1.0, "0.bias": 2.0, "3.weight": 3.0, "3.bias": 4.0}
    ),
    "diagonal": lambda: GaussianPrior("diagonal", precision=2.0),
    "mean": lambda: GaussianPrior(mean={"0": "initial"}, precision=5.0),
}


def evidence_of(net: nn.Module, prior: GaussianPrior | None = None, **changes: Any) -> Evidence:
    settings: dict[str, Any] = {"estimator": "ntk-20-1", "num_data": 60, "generator": 0, **changes}
    return Evidence(net, Categorical(), prior or GaussianPrior(), **settings)


def parameters_of(evidence: Evidence) -> list[Tensor]:
    named = {**evidence.weights(), **evidence.hyperparameters()}
    return [parameter.detach().clone() for parameter in named.values()]


@pytest.mark.each(1)
@pytest.mark.parametrize("own_loss", [False, True])
@pytest.mark.parametrize("update", ["adam", "fixed_point"])
def test_a_loop_by_hand_is_fit(blobs, make_net, update, own_loss):
    """In every digit where the loss is the same; a loss of one's own rounds otherwise."""
    (x, y), optimization = blobs[0], Optimization(prior_update=update)
    fitted = evigrad.fit(
        make_net(),
        (x, y),
        estimator="ntk-20-1",
        schedule=replace(SCHEDULE, batch_size=20),
        optimization=replace(optimization, lr=0.02),
        seed=3,
        progress=False,
    )
    net = make_net().train()
    evidence = evidence_of(net, generator=stream(3, "evidence"))
    learner = Learner(evidence, (x, y), SCHEDULE, optimization)
    optimizer = torch.optim.Adam(evidence.weights().values(), lr=0.02)
    estimates = []
    for epoch in range(1, EPOCHS + 1):
        optimizer.param_groups[0]["lr"] = cosine((epoch - 1) / EPOCHS, 0.02, 1e-6)
        order = torch.randperm(60, generator=stream(3, "shuffle", epoch))
        for batch in order.tensor_split(3):
            optimizer.zero_grad()
            if own_loss:
                cross_entropy(net(x[batch]), y[batch]).backward()
                evidence.add_weight_decay()
            else:
                evidence.map_loss(x[batch], y[batch], indices=batch).backward()
            optimizer.step()
        learned_round = learner.step()
        estimates += [] if learned_round is None else learned_round.estimates
    assert learner.hyper_steps == len(estimates) == 9
    pairs = zip(parameters_of(evidence), parameters_of(fitted.evidence), strict=True)
    for parameter, theirs in pairs:
        error = 1e-3 if own_loss else 0.0
        torch.testing.assert_close(parameter, theirs, rtol=error, atol=error)


@pytest.mark.parametrize("prior", PRIORS)
def test_the_decay_is_the_gradient_of_the_prior(blobs, make_net, prior):
    x, y = blobs[0][0].double(), blobs[0][1]
    net = make_net().double()
    evidence = evidence_of(net, PRIORS[prior](), temperature=0.5)
    for weight in net.parameters():
        weight.data += 0.1
    evidence.map_loss(x, y).backward()
    expected = [weight.grad for weight in net.parameters()]
    net.zero_grad()
    cross_entropy(net(x), y).backward()
    evidence.add_weight_decay()
    for weight, gradient in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-10, atol=1e-12)
    decay, precisions = evidence.weight_decay(), evidence.prior.precisions()
    for name, value in decay.items():
        torch.testing.assert_close(value, 0.5 / 60 * precisions[name].detach())
    net.zero_grad()  # a weight that a batch does not use decays all the same
    evidence.add_weight_decay()
    weight = evidence.weights()["3.weight"]
    torch.testing.assert_close(weight.grad, decay["3.weight"] * weight.detach())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_it_is_what_optimisers_that_add_it_to_the_gradient_call_weight_decay(blobs, make_net, kind):
    x, y = blobs[0]
    nets = [make_net(), make_net()]
    evidence = evidence_of(nets[0], PRIORS["layerwise"]())
    decay = evidence.weight_decay()
    groups = [
        {"params": [p], "weight_decay": decay[n].item()} for n, p in nets[1].named_parameters()
    ]
    optimizers = [kind(nets[0].parameters(), lr=0.1), kind(groups, lr=0.1)]
    for _ in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            if net is nets[0]:
                evidence.add_weight_decay()
            optimizer.step()
    for weight, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(weight, theirs)


def test_a_step_of_sgd_does_not_pass_the_mean(make_net):
    """Where the data determine nothing, precisions grow without bound, and the decay with them."""
    net = make_net()
    prior = GaussianPrior(mean={"3": "initial"}, precision=1e6)
    evidence = evidence_of(net, prior)
    mean = net[3].weight.detach().clone()
    net[3].weight.data += 1
    optimizer = torch.optim.SGD(
        [{"params": net[0].parameters(), "lr": 0.0}, {"params": net[3].parameters()}], lr=0.1
    )
    before = net[0].weight.detach().clone()
    assert evidence.weight_decay()["3.weight"] > 10  # 1/lr
    evidence.add_weight_decay(optimizer)
    optimizer.step()
    torch.testing.assert_close(net[3].weight.detach(), mean)
    assert torch.equal(net[0].weight, before)


def test_the_loss_has_no_larger_decay_than_the_optimiser_can_take(blobs, make_net):
    """Of each group by its own rate; in units of the loss, whose gradients are scaled."""
    net, (x, y) = make_net(), blobs[0]
    evidence = evidence_of(net, GaussianPrior("scalar", precision=1e6), temperature=0.5)
    groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[3].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    plain = torch.nn.functional.cross_entropy(net(x), y)
    limits = {"0": 100.0 / 3.0, "3": 10.0 / 3.0}  # 1/(lr scale)
    decay = sum(0.5 * limits[n[0]] * w.square().sum() for n, w in net.named_parameters())
    torch.testing.assert_close(
        evidence.map_loss(x, y, optimizer=optimizer, scale=3.0), plain + decay
    )
    whole = sum(0.5 * (0.5 / 60) * 1e6 * w.square().sum() for w in net.parameters())
    torch.testing.assert_close(evidence.map_loss(x, y), plain + whole)


@pytest.mark.parametrize("decoupled", [False, True])
def test_decoupled_decay_ends_elsewhere_than_at_the_map(blobs, decoupled):
    x, y = blobs[0]
    net = nn.Linear(4, 3)
    evidence = evidence_of(net, GaussianPrior("scalar", precision=6.0))
    decay = evidence.weight_decay()["weight"].item()
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=0.05, weight_decay=decay if decoupled else 0.0
    )
    for step in range(500):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 500)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        if not decoupled:
            evidence.add_weight_decay()
        optimizer.step()
    net.zero_grad()
    evidence.map_loss(x, y).backward()
    gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    assert (gradient.norm() > 1e-2) if decoupled else (gradient.norm() < 1e-4)


def test_accumulated_and_scaled_gradients(blobs, make_net):
    """Two halves of a batch, each loss divided by two, and by a scaler of half precision."""
    x, y = blobs[0]
    steps = []
    for halves in (False, True):
        net = make_net()
        evidence = evidence_of(net, PRIORS["layerwise"]())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=halves)
        for part in torch.arange(60).split(30 if halves else 60):
            loss = cross_entropy(net(x[part]), y[part]) / (2 if halves else 1)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        evidence.add_weight_decay()
        scaler.step(optimizer)
        steps.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    torch.testing.assert_close(steps[0], steps[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("estimator", ["ntk-20-1", "ntk-20-rows-anchored"])
def test_a_loop_that_is_resumed_gives_the_same_numbers(blobs, make_net, estimator):
    x, y = blobs[0]

    def train(net: nn.Module, epochs: range, state: dict[str, Any] | None) -> dict[str, Any]:
        evidence = evidence_of(net, estimator=estimator)
        learner = Learner(evidence, (x, y), SCHEDULE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if state is not None:
            net.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])
            learner.load_state_dict(state["learner"])
        for _ in epochs:
            optimizer.zero_grad()
            evidence.map_loss(x, y).backward()
            optimizer.step()
            learner.step()
        parts = {"net": net, "optimizer": optimizer, "learner": learner}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    whole = train(make_net(), range(EPOCHS), None)
    again = train(make_net(seed=1), range(3), train(make_net(), range(3), None))
    torch.testing.assert_close(again["net"], whole["net"], rtol=0, atol=0)
    states = [saved["learner"]["evidence"]["prior"]["log_precision"] for saved in (again, whole)]
    assert torch.equal(*states)
    assert again["learner"]["hyper_steps"] == whole["learner"]["hyper_steps"] == [9]


@pytest.mark.parametrize(("number", "precision"), [(60, 0.6), (10_000, 15.0)])
def test_the_burn_in_of_many_data_has_no_stronger_prior_than_that_of_few(
    blobs, make_net, number, precision
):
    x, y = (part.repeat(-(-number // 60), *[1] * (part.ndim - 1))[:number] for part in blobs[0])
    evidence = evidence_of(make_net(), num_data=number)
    Learner(evidence, (x, y), Schedule(epochs=10))
    for group_precision in evidence.prior.precisions().values():
        assert group_precision.item() == pytest.approx(precision)


def test_the_unit_of_the_schedule_is_a_call(blobs, make_net):
    """Steps of an optimiser, for example; after the last of them the rates stay."""
    learner = Learner(evidence_of(make_net()), blobs[0], Schedule(epochs=50, steps=1))
    with pytest.warns(EvigradWarning, match="more than Schedule.epochs=50 times"):
        due = [count for count in range(1, 61) if learner.step() is not None]
    assert due == list(range(5, 61, 2))  # a tenth is burn-in, then 20 rounds
    assert learner.fixed_point is not None
    assert learner.fixed_point.rate == pytest.approx(LAST_RATE)


def test_rounds_are_kept_and_shown_in_a_line(blobs, make_net):
    learner = Learner(evidence_of(make_net()), blobs[0], SCHEDULE)
    rounds = [learner.step() for _ in range(EPOCHS)]
    learned = [outcome for outcome in rounds if outcome is not None]
    assert len(learner.history) == len(learned) > 1
    steps = [count for count, outcome in enumerate(rounds, 1) if outcome is not None]
    assert [row["step"] for row in learner.history] == steps
    last = statistics.fmean(estimate.per_datum for estimate in learned[-1].estimates)
    assert learner.history[-1]["log_evidence"] == pytest.approx(last)
    assert "precision/0.weight" in learner.history[-1]
    assert repr(learned[-1]).startswith(f"Round(log evidence {last:.4g} nats per example, ")
    assert len(repr(learned[-1])) < 100
    other = Learner(evidence_of(make_net()), blobs[0], SCHEDULE)
    other.load_state_dict(learner.state_dict())
    assert other.history == learner.history
    other.history.clear()
    assert learner.history


def test_a_step_leaves_weights_gradients_and_modes(blobs, make_net):
    net = make_net(dropout=0.3).train()
    net[0].eval()
    cross_entropy(net(blobs[0][0]), blobs[0][1]).backward()
    before = [(p.detach().clone(), p.grad) for p in net.parameters()]
    state = torch.get_rng_state()
    schedule = Schedule(epochs=1, burn_in=0, steps=2)
    assert Learner(evidence_of(net), blobs[0], schedule).step() is not None
    for parameter, (value, gradient) in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, value) and parameter.grad is gradient
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in net] == [False, True, True, True]


@pytest.mark.parametrize(
    ("schedule", "prior", "words"),
    [
        (Schedule(), GaussianPrior(), "Schedule.epochs is required, got None"),
        (Schedule(epochs=3, burn_in=4), GaussianPrior(), "no hyperparameter would be learned"),
        (Schedule(epochs=3), GaussianPrior(learnable=False), "There is nothing to learn"),
    ],
)
def test_what_is_refused(blobs, make_net, schedule, prior, words):
    with pytest.raises(ConfigurationError, match=words):
        Learner(evidence_of(make_net(), prior), blobs[0], schedule)


def test_a_state_of_another_schedule_is_refused(blobs, make_net):
    net = make_net()
    parts = Schedule(epochs=3, prior_blocks=1)
    one = Learner(evidence_of(net), blobs[0], Schedule(epochs=3))
    state = one.state_dict()
    state["hyper_steps"] = [1, 2]
    with pytest.raises(ConfigurationError, match="does not match"):
        Learner(evidence_of(net), blobs[0], parts).load_state_dict(state)


def test_a_state_of_other_epochs_is_refused_and_more_calls_are_warned_of(blobs, make_net):
    learner = Learner(evidence_of(make_net()), blobs[0], SCHEDULE)
    longer = Learner(evidence_of(make_net()), blobs[0], replace(SCHEDULE, epochs=60))
    with pytest.raises(ConfigurationError, match="'epochs': 6, .*but this learner has .*: 60"):
        longer.load_state_dict(learner.state_dict())
    for _ in range(EPOCHS):
        learner.step()
    with pytest.warns(EvigradWarning, match="more than Schedule.epochs=6 times"):
        learner.step()
    learner.step()


def scaled_learner(x: Tensor, **changes: Any) -> tuple[nn.Module, Learner]:
    """A model with an input scale to learn, and a noise."""
    torch.manual_seed(0)
    net = nn.Sequential(InputScale(4), nn.Linear(4, 1))
    evidence = Evidence(
        net,
        Gaussian(),
        GaussianPrior(),
        estimator="ntk-20-1",
        num_data=60,
        hyperparameters=["0"],
        generator=0,
    )
    return net, Learner(evidence, (x, x[:, :1]), replace(SCHEDULE, **changes))


@pytest.mark.parametrize("name", ["model.0.log_scale", "likelihood.log_noise"])
def test_an_optimizer_that_trains_hyperparameters_is_refused(blobs, name):
    x = blobs[0][0]
    learner = scaled_learner(x)[1]
    evidence = learner.evidence
    optimizer = torch.optim.Adam([*evidence.weights().values(), evidence.hyperparameters()[name]])
    for epoch in range(2):
        evidence.map_loss(x, x[:, :1], wrt=name if epoch else ()).backward()
        optimizer.step()
        if epoch == 0:
            learner.step()  # without a gradient, nothing has changed
    words = rf"{name} changed from 0 to \S+ before the first round.*evidence.weights\(\).values\(\)"
    with pytest.raises(ConfigurationError, match=words):
        learner.step()
    assert learner.count == 1


def test_hyperparameters_may_change_by_rounds_by_checkpoints_and_in_type(blobs):
    x = blobs[0][0]
    net, learner = scaled_learner(x)
    start = copy.deepcopy(net.state_dict())
    net.double()
    net.float()
    rounds = [learner.step() for _ in range(4)]
    assert [outcome is not None for outcome in rounds] == [False, True, False, True]
    late, state = copy.deepcopy(net.state_dict()), learner.state_dict()
    net.load_state_dict(start)  # an earlier network, between two rounds
    assert learner.step() is None and learner.step() is not None
    for is_first in (True, False):  # the states of a run that is resumed, in either order
        net, resumed = scaled_learner(x)
        if is_first:
            net.load_state_dict(late)
        resumed.load_state_dict(state)
        net.load_state_dict(late)
        assert resumed.step() is None and resumed.step() is not None
