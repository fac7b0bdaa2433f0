"""What estimates may touch: the hyperparameters' gradients, the generator, and nothing else."""

import copy
import io
import pickle
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, HYPERPARAMETERS

from evigrad import Evidence, Memory
from evigrad.core.names import STRUCTURES
from evigrad.errors import ConfigurationError, EvigradWarning, InputError
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.priors import GaussianPrior, NormalHyperprior

STATEFUL = [
    "batch-norm",
    "dropout",
    "lstm",
    "gru",
    "transformer",
    "residual",
    "parametrized",
    "tied",
    "conv2d",
]
pytestmark = pytest.mark.filterwarnings(
    "ignore:The model has normalization:evigrad.errors.EvigradWarning"
)


def make(name: str, estimator: str, m: int = 4, **kwargs: Any) -> tuple[Evidence, Tensor, Tensor]:
    model, x = CASES[name].build(m)
    names = [n for n in HYPERPARAMETERS if hasattr(model, n)]
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior(),
        estimator=estimator,
        num_data=m,
        hyperparameters=names,
        **{"generator": 0, **kwargs},
    )
    return evidence, x, torch.arange(m) % 3


def log_precision(evidence: Evidence) -> nn.Parameter:
    return evidence.hyperparameters()["prior.log_precision"]


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that an estimate could disturb."""
    modules = dict(model.named_modules())
    return {
        "parameters": {
            n: (id(p), p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()
        },
        "grads": {
            n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()
        },
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "modes": {n: m.training for n, m in modules.items()},
        "attributes": {n: sorted(vars(m)) for n, m in modules.items()},
        "hooks": {
            n: [len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)]
            for n, m in modules.items()
        },
        "flat": {
            n: [id(w) for w in m._flat_weights]
            for n, m in modules.items()
            if isinstance(m, nn.RNNBase)
        },
        "random": torch.get_rng_state(),
    }


def assert_same(before: Any, after: Any) -> None:
    if isinstance(before, Tensor):
        assert torch.equal(before, after)
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    elif isinstance(before, list | tuple):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert_same(one, other)
    else:
        assert before == after


@pytest.mark.parametrize(
    ("name", "structure"), list(zip(STATEFUL, cycle(STRUCTURES), strict=False))
)
def test_a_model_is_left_as_it_was(name: str, structure: str) -> None:
    evidence, x, y = make(name, f"{structure}-N-C")
    model = evidence.model
    for i, module in enumerate(model.modules()):  # mixed modes must come back one by one
        module.training = i % 3 != 1
    for w in evidence.weights().values():
        w.grad = torch.full_like(w, 0.25)
    before = snapshot(model)
    evidence.estimate(x, y)
    assert_same(before, snapshot(model))
    evidence.backward(x, y)
    after = snapshot(model)
    for hyperparameter in HYPERPARAMETERS:
        if hasattr(model, hyperparameter):
            assert before["grads"].pop(hyperparameter) is None
            assert after["grads"].pop(hyperparameter) is not None
    assert_same(before, after)
    clone = copy.deepcopy(model)
    restored = pickle.loads(pickle.dumps(model.state_dict()))
    clone.load_state_dict(restored)
    if name != "parametrized":  # PyTorch itself refuses to pickle those
        torch.save(model, io.BytesIO())


FUSE = [-1]


class Fragile(nn.Module):
    """Raises in the forward pass that counts the fuse down to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.gate = nn.Parameter(torch.ones(3))
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.relu_(self.first(x))) * self.gate
        FUSE[0] -= 1
        if FUSE[0] == 0:
            raise RuntimeError("fuse")
        return self.last(h)


@pytest.mark.each(1)
@pytest.mark.parametrize("structure", ["ntk", "kfac", "blockdiag"])
@pytest.mark.parametrize("fuse", [1, 2, 3])
def test_an_exception_passes_through_and_leaves_nothing_behind(structure: str, fuse: int) -> None:
    model = Fragile().double().train()
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior(),
        estimator=f"{structure}-N-C",
        num_data=6,
        hyperparameters=["gate"],
        memory=Memory(micro_batch=2),
        generator=0,
    )
    x, y = torch.randn(6, 3).double(), torch.arange(6) % 3
    reference = evidence.estimate(x, y).log_evidence  # planned and prepared from here on
    before = snapshot(model)
    for call in (evidence.estimate, evidence.backward):
        FUSE[0] = fuse
        with pytest.raises(InputError, match="The model, given .* raised RuntimeError.*fuse"):
            call(x, y)
        FUSE[0] = -1
        assert all(p.grad is None for p in evidence.hyperparameters().values())
        assert_same(before, snapshot(model))
    assert evidence.estimate(x, y).log_evidence == pytest.approx(reference, rel=1e-12)


def test_map_loss_is_the_weights_alone() -> None:
    evidence, x, y = make("conv2d", "ntk-N-C")
    loss = evidence.map_loss(x, y)
    loss.backward()
    assert all(p.grad is None for p in evidence.hyperparameters().values())
    for w in evidence.weights().values():
        assert w.grad is not None
    # value: mean NLL + (T/2N) wᵀ P0 w
    model = evidence.model
    precisions = evidence.prior.precisions()
    decay = sum((precisions[n] * w**2).sum() for n, w in evidence.weights().items())
    expected = nn.functional.cross_entropy(model(x), y) + decay / (2 * len(x))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def test_map_loss_has_the_temperature_on_the_prior() -> None:
    model = nn.Linear(2, 2).double()
    x, y = torch.randn(5, 2).double(), torch.randn(5, 2).double()
    likelihood = Gaussian(0.5)
    evidence = Evidence(
        model,
        likelihood,
        GaussianPrior("scalar", 3.0),
        estimator="ntk-N-C",
        num_data=50,
        temperature=0.1,
    )
    loss = evidence.map_loss(x, y)
    loss.backward()
    assert likelihood.log_noise.grad is None
    nll = -torch.distributions.Normal(model(x), 0.5).log_prob(y).sum(1).mean()
    decay = 3.0 * sum((w**2).sum() for w in model.parameters())
    assert loss.item() == pytest.approx((nll + 0.1 / (2 * 50) * decay).item(), rel=1e-6)


def test_weights_and_hyperparameters_share_nothing() -> None:
    evidence, _, _ = make("conv2d", "ntk-2-1")
    weights = {id(w) for w in evidence.weights().values()}
    hyperparameters = {id(p) for p in evidence.hyperparameters().values()}
    assert not weights & hyperparameters
    assert set(evidence.hyperparameters()) == {
        "prior.log_precision",
        "model.gate",
        "model.input_scale",
    }


def test_hyperparameters_by_prefix_and_shared_ones_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior(),
        estimator="ntk-2-1",
        num_data=4,
        hyperparameters=["b"],
    )
    assert set(evidence.weights()) == {"a.bias"}
    assert len(evidence.hyperparameters()) == 3


def test_two_estimates_draw_differently_and_the_same_seed_alike() -> None:
    one, x, y = make("linear", "ntk-N-1", m=6)
    other, _, _ = make("linear", "ntk-N-1", m=6)
    values = [one.estimate(x, y).log_det for _ in range(12)]
    assert len({round(v, 9) for v in values}) == 3, "one of three outputs in each draw"
    assert [other.estimate(x, y).log_det for _ in range(12)] == values


def test_a_forward_pass_with_noise_of_its_own_is_refused() -> None:
    """Its Jacobian is not defined; the global random state stays as it was all the same."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + torch.randn(())

    evidence = Evidence(
        Noisy().double(), Gaussian(), GaussianPrior(), estimator="ntk-N-C", num_data=4, generator=0
    )
    x, y = torch.randn(4, 2).double(), torch.randn(4, 2).double()
    state = torch.get_rng_state()
    with pytest.raises(ConfigurationError, match="deterministic"):
        evidence.estimate(x, y)
    assert torch.equal(torch.get_rng_state(), state)


def test_call_order_changes_nothing_else() -> None:
    """backward after estimate equals backward alone; gradients add up over calls."""
    alone, x, y = make("conv1d", "kfac-N-C")
    alone.backward(x, y)
    after, _, _ = make("conv1d", "kfac-N-C")
    after.estimate(x, y)
    after.map_loss(x, y)
    after.describe()
    after.backward(x, y)
    for one, other in zip(
        alone.hyperparameters().values(), after.hyperparameters().values(), strict=True
    ):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad)
    first = {n: p.grad.clone() for n, p in alone.hyperparameters().items() if p.grad is not None}
    alone.backward(x, y)
    for name, parameter in alone.hyperparameters().items():
        torch.testing.assert_close(parameter.grad, 2 * first[name])


def test_planning_does_not_shift_the_draws() -> None:
    fresh, x, y = make("linear", "ntk-N-1", m=5)
    planned, _, _ = make("linear", "ntk-N-1", m=5)
    planned.describe(x)
    assert planned.estimate(x, y).log_det == fresh.estimate(x, y).log_det


def test_prior_changed_between_estimates_is_seen() -> None:
    evidence, x, y = make("linear", "ntk-N-C")
    before = evidence.estimate(x, y)
    with torch.no_grad():
        log_precision(evidence).add_(1.0)
    after = evidence.estimate(x, y)
    assert after.log_det < before.log_det
    assert after.log_prior == pytest.approx(before.log_prior * torch.e, rel=1e-9)


def test_hyperprior_is_reported_and_differentiated_apart() -> None:
    def build(hyperprior: Any) -> tuple[Evidence, Tensor, Tensor]:
        model, x = CASES["linear"].build(4)
        prior = GaussianPrior(hyperprior=hyperprior, precision=2.0)
        evidence = Evidence(model, Categorical(), prior, estimator="ntk-N-C", num_data=4)
        return evidence, x, torch.arange(4) % 3

    plain, x, y = build(None)
    penalised, _, _ = build(NormalHyperprior(0.0, 0.5))
    one, other = plain.backward(x, y), penalised.backward(x, y)
    assert one.log_hyperprior == 0.0
    assert other.log_evidence == pytest.approx(one.log_evidence, rel=1e-12)
    learned = log_precision(penalised)
    normal = torch.distributions.Normal(0.0, 0.5)
    assert other.log_hyperprior == pytest.approx(normal.log_prob(learned).sum().item(), rel=1e-6)
    shift = learned.detach() / 0.25 / 4  # −∂/∂ρ log N(ρ; 0, 0.5²) / N
    gradient = log_precision(plain).grad
    assert gradient is not None
    torch.testing.assert_close(learned.grad, gradient + shift)


def test_state_dict_round_trip_continues_the_same_draws() -> None:
    one, x, y = make("linear", "ntk-N-1", m=6)
    with torch.no_grad():
        log_precision(one).add_(0.3)
    one.estimate(x, y)
    stream = io.BytesIO()
    torch.save(one.state_dict(), stream)
    stream.seek(0)
    other, _, _ = make("linear", "ntk-N-1", m=6, generator=99)
    other.load_state_dict(torch.load(stream))
    for _ in range(4):
        assert other.estimate(x, y) == one.estimate(x, y)


def test_normalisation_layers_get_one_warning() -> None:
    model, _ = CASES["batch-norm"].build()
    with pytest.warns(EvigradWarning, match="normalization layers") as caught:
        for _ in range(2):
            Evidence(model, Categorical(), GaussianPrior(), estimator="ntk-N-C", num_data=3)
    assert len(caught) == 1
    assert "judge the network by its predictions" in str(caught[0].message)
    assert len(str(caught[0].message)) < 250


def test_describe_names_every_weight() -> None:
    evidence, x, _ = make("transformer", "kfac-N-C")
    reports = evidence.describe(x)
    assert [r.name for r in reports] == list(evidence.weights())
    assert all(r.rows and r.curvature for r in reports)
    assert {r.precision for r in reports} == {1.0}


def test_map_loss_of_a_module_under_two_names() -> None:
    """What a model registers twice stays one module with parameters."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3)})
    model["b"] = model["a"]
    gated = nn.Sequential(nn.Linear(3, 3), model["a"], model["b"], nn.PReLU())
    evidence = Evidence(
        gated.double(),
        Categorical(),
        GaussianPrior(),
        estimator="ntk-2-1",
        num_data=4,
        hyperparameters=["1", "3"],
    )
    x = torch.randn(4, 3).double()
    before = snapshot(gated)
    evidence.map_loss(x, torch.arange(4) % 3).backward()
    assert isinstance(gated[1].weight, nn.Parameter)
    for w in evidence.weights().values():
        w.grad = None
    assert_same(before, snapshot(gated))


class ChangesItsInput(nn.Module):
    """Scales its input in place, and keeps things from its last pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        self.last = self.linear(x.mul_(2.0))
        self.kept.append(self.last)
        return self.last


@pytest.mark.parametrize("estimator", ["ntk-N-C", "kfac-N-1", "diag-N-2-mc"])
def test_the_users_inputs_stay_as_they_are(estimator: str) -> None:
    model = ChangesItsInput().double()
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior(precision=9.0),
        estimator=estimator,
        num_data=5,
        generator=0,
    )
    x, y = torch.randn(5, 3).double(), torch.arange(5) % 3
    before = x.clone()
    first = evidence.estimate(x, y)
    evidence.backward(x, y)
    evidence.map_loss(x, y)
    assert torch.equal(x, before)
    plain = Evidence(
        nn.Sequential(model.linear),
        Categorical(),
        GaussianPrior(precision=9.0),
        estimator=estimator,
        num_data=5,
        generator=0,
    )
    assert first.log_evidence == pytest.approx(plain.estimate(2 * x, y).log_evidence, rel=1e-10)


def test_nothing_of_a_first_estimate_stays_in_the_model() -> None:
    model = ChangesItsInput().double()
    evidence = Evidence(model, Categorical(), GaussianPrior(), estimator="ntk-N-C", num_data=5)
    before = sorted(vars(model))
    evidence.backward(torch.randn(5, 3).double(), torch.arange(5) % 3)
    assert sorted(vars(model)) == before
    assert model.kept == []
    assert model.get_buffer("calls") == 0
    copy.deepcopy(model)


def test_random_state_of_numpy_stays() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            np.random.rand()
            return self.linear(x)

    evidence = Evidence(Draws(), Categorical(), GaussianPrior(), estimator="ntk-N-C", num_data=5)
    before = np.random.get_state(legacy=True)
    evidence.backward(torch.randn(5, 3), torch.arange(5) % 3)
    assert str(np.random.get_state(legacy=True)) == str(before)
