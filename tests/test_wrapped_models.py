"""Parameters have the names of the bare model, whatever wraps it for speed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, Outputs, Schedule
from evigrad.errors import ConfigurationError
from evigrad.inputs import bare_names, named_parameters
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior
from evigrad.training import checkpoint

N, SIZE, OUTPUTS = 10, 3, 3
X = torch.linspace(-1, 1, N * SIZE).reshape(N, SIZE).sin()
Y = torch.arange(N) % OUTPUTS


class Network(nn.Module):
    """A submodule is called ``module``, which is no wrapper; a hyperparameter is beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.module = nn.Sequential(nn.Linear(SIZE, 4), nn.Tanh())
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.module(x * self.scale.exp())))


def network() -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def with_wrapped_part(model: Network) -> nn.Module:
    model.module = compiled(model.module)
    return model


WRAPPERS: dict[str, Callable[[Network], nn.Module]] = {
    "compile": compiled,
    "DataParallel": nn.DataParallel,
    "both": lambda model: nn.DataParallel(compiled(model)),
    "a part": with_wrapped_part,
    "Outputs": lambda model: Outputs(nn.DataParallel(model)),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:The model has normalization"),
    # TorchDynamo itself reads it while it compiles a part of a network.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def build(model: nn.Module, estimator: str = "ntk-N-C") -> Evidence:
    prior = GaussianPrior(
        {"body": ["module.0"], "end": ["head", "norm*"]}, mean={"head": "initial"}
    )
    return Evidence(
        model,
        Categorical(),
        prior,
        estimator=estimator,
        num_data=N,
        hyperparameters=["scale"],
        generator=0,
    )


def results(evidence: Evidence) -> list[Any]:
    estimate = evidence.backward(X, Y)
    gradients = [p.grad.tolist() for p in evidence.hyperparameters().values() if p.grad is not None]
    return [
        list(evidence.weights()),
        list(evidence.hyperparameters()),
        evidence.describe(),
        estimate.log_evidence,
        gradients,
        evidence.posterior((X, Y), structure="last-layer")(X).mean.tolist(),
    ]


@pytest.mark.each(1)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("estimator", ["ntk-N-C", "kfac-N-C"])
def test_names_and_numbers_are_those_of_the_bare_model(wrapper: str, estimator: str) -> None:
    wrapped = WRAPPERS[wrapper](network())
    names = [name for name, _ in network().named_parameters()]
    assert [name for name, _ in wrapped.named_parameters()] != names
    assert list(named_parameters(wrapped)) == names
    assert results(build(wrapped, estimator)) == results(build(network(), estimator))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_states_are_those_of_the_bare_model(wrapper: str) -> None:
    bare, wrapped = build(network()), build(WRAPPERS[wrapper](network()))
    posterior = wrapped.posterior((X, Y))
    for evidence in (bare, wrapped):
        evidence.estimate(X, Y)
    wrapped.load_state_dict(bare.state_dict())
    bare.load_state_dict(wrapped.state_dict())
    assert torch.equal(bare.posterior(state=posterior.state_dict())(X).mean, posterior(X).mean)


def with_names_of(model: nn.Module, state: Any) -> Any:
    """A state as it was before: with the names that wrappers change."""
    names = [*model.state_dict(), *dict(model.named_buffers())]
    full = {bare: name for name, bare in bare_names(model, names).items()}

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {full.get(key, key): renamed(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(renamed, value))
        return full.get(value, value) if isinstance(value, str) else value

    return renamed(state)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_older_states_of_a_wrapped_model(wrapper: str) -> None:
    wrapped = WRAPPERS[wrapper](network())
    evidence = build(wrapped)
    evidence.estimate(X, Y)
    state = copy.deepcopy(evidence.state_dict())
    older = with_names_of(wrapped, state)
    assert older["prior"]["_extra_state"] != state["prior"]["_extra_state"]
    again = build(WRAPPERS[wrapper](network()))
    again.load_state_dict(older)
    assert again.estimate(X, Y).log_evidence == evidence.estimate(X, Y).log_evidence

    saved = {"model": wrapped.state_dict(), "buffers": {}}
    learned = {
        "weights": list(evidence.weights()),
        "hyperparameters": list(evidence.hyperparameters()),
    }
    checkpoint.check_network({**saved, "learned": with_names_of(wrapped, learned)}, again, "x")
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.zero_()
    checkpoint.load_network(again.model, saved)
    assert torch.equal(again.model(X), wrapped(X))


@pytest.mark.parametrize("wrapper", ["compile", "DataParallel", "a part"])
def test_runs_go_on_without_the_wrapper(wrapper: str, tmp_path: Path) -> None:
    def train(model: nn.Module, epochs: int, **settings: Any) -> evigrad.FitResult:
        schedule = Schedule(epochs=epochs, burn_in=1, every=1, steps=1, batch_size=5)
        settings = {"hyperparameters": ["scale"], "estimator": "ntk-6-1", **settings}
        return evigrad.fit(model, (X, Y), schedule=schedule, progress=False, **settings)

    model = WRAPPERS[wrapper](network())
    result = train(model, 2, run_dir=tmp_path / "run")
    loaded = evigrad.load(tmp_path / "run", network())
    assert torch.equal(loaded.model(X), model.eval()(X))
    again = train(network(), 2, run_dir=tmp_path / "run", resume=True)
    assert again.train_metrics == result.train_metrics


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(ConfigurationError, match="'scal'.*scale"):
        Evidence(
            compiled(network()),
            Categorical(),
            GaussianPrior(),
            num_data=N,
            hyperparameters=["scal"],
        )
