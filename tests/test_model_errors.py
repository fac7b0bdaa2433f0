"""What goes wrong in the user's own model or likelihood is said to be theirs, in every verb."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evigrad
from evigrad import Evidence, Schedule, fit
from evigrad.errors import ConfigurationError, EvigradError, InputError
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.priors import GaussianPrior
from evigrad.training.settings import grouped

N = 8
X, Y = torch.linspace(-1, 1, 2 * N).reshape(N, 2), torch.arange(N) % 3


class Returns(nn.Module):
    """Outputs as a function makes them of a linear layer's."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda f: f) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.layer(x))


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Unlike(Exception):
    """An exception that nobody else has."""


def build(model: nn.Module, estimator: str = "ntk-4-1", **settings: Any) -> Evidence:
    likelihood = settings.pop("likelihood", None) or Categorical()
    return Evidence(
        model, likelihood, GaussianPrior(), estimator=estimator, num_data=N, generator=0, **settings
    )


VERBS: dict[str, Callable[[Evidence], Any]] = {
    "map_loss": lambda e: e.map_loss(X, Y),
    "estimate": lambda e: e.estimate(X[:4], Y[:4]),
    "backward": lambda e: e.backward(X[:4], Y[:4]),
    "collect": lambda e: e.collect(X[:4], Y[:4]),
    "blocks": lambda e: e.estimate(next(iter(e.blocks((X, Y))))),
    "bracket": lambda e: evigrad.bracket(e, (X, Y), rows=6),
    "describe": lambda e: e.describe(X),
    "fit": lambda e: fit(
        e.model,
        (X, Y),
        estimator="ntk-4-1",
        schedule=Schedule(epochs=1, burn_in=1, steps=1),
        progress=False,
    ),
}


@pytest.mark.each(1)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.argmax(1, keepdim=True), "type torch.int64.*before any argmax"),
        (lambda f: f > 0, "type torch.bool.*comparison"),
        (lambda f: f * 1j, "type torch.complex64.*view_as_real"),
        (lambda f: f.to_sparse(), r"torch.sparse_coo tensor.*to_dense\(\)"),
        (lambda f: f.tolist(), "returned a list"),
        (lambda f: f.to("meta"), "returned a tensor on the meta device"),
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_outputs_that_have_no_derivatives(verb: str, change: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        VERBS[verb](build(Returns(change)))


def under(mode: Any) -> Callable[[nn.Module, Tensor], Tensor]:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        with mode():
            return model(x)

    return forward


class Cut(nn.Module):
    """Outputs whose graph does not lead to the weights."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.cut = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self.layer, x)


@pytest.mark.each(1)
@pytest.mark.parametrize(
    "cut",
    [under(torch.no_grad), under(torch.inference_mode), lambda layer, x: layer(x).detach()],
    ids=["no_grad", "inference_mode", "detach"],
)
@pytest.mark.parametrize("verb", [*VERBS, "map"])
def test_outputs_without_a_graph(verb: str, cut: Any) -> None:
    evidence = build(Cut(cut))
    before = {name: w.clone() for name, w in evidence.weights().items()}
    with pytest.raises(InputError, match="No weight has a derivative.*no_grad.*detach"):
        if verb == "map":
            fit(evidence.model, (X, Y), estimator=None, schedule=Schedule(epochs=1), progress=False)
        else:
            VERBS[verb](evidence)
    assert all(torch.equal(w, before[name]) for name, w in evidence.weights().items())


def test_a_part_without_a_graph_is_a_part_of_the_model() -> None:
    """Features that are fixed; and a loss that is only looked at."""
    model = nn.Sequential(Cut(under(torch.no_grad)), nn.Linear(3, 3))
    evidence = build(model)
    assert evidence.estimate(X[:4], Y[:4]).log_det > 0
    with torch.no_grad():
        assert not build(Returns()).map_loss(X, Y).requires_grad


class Fused(nn.Module):
    """Fails in the call after so many."""

    def __init__(self, error: Exception, calls: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.error, self.left = error, [calls]

    def forward(self, x: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise self.error
        return self.layer(x)


@pytest.mark.each(1)
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "describe"])
@pytest.mark.parametrize("when", ["first", "last"])
def test_exceptions_of_the_model(verb: str, when: str) -> None:
    """In the first call of a verb, or in its last, when the model is known well."""
    error = KeyError("x")
    counting = Fused(error, 10**6)
    evidence = build(counting)
    evidence.describe(X)
    counting.left[0] = 10**6
    VERBS[verb](evidence)
    calls = 10**6 - counting.left[0]

    model = Fused(error, 10**6)
    evidence = build(model)
    evidence.describe(X)
    model.left[0] = 0 if when == "first" else calls - 1
    words = (
        r"The model, given \d examples of shape \(2,\) and type torch.float32, raised KeyError: 'x'"
    )
    with pytest.raises(InputError, match=words) as caught:
        VERBS[verb](evidence)
    causes, cause = [], caught.value.__cause__
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__
    assert error in causes
    assert all(p.grad is None for p in evidence.hyperparameters().values())


@pytest.mark.parametrize("error", [Unlike("own"), StopIteration(), NotImplementedError()], ids=repr)
def test_exceptions_of_any_type(error: Exception) -> None:
    with pytest.raises(InputError, match=f"raised {type(error).__name__}") as caught:
        build(Fused(error, 0)).estimate(X[:4], Y[:4])
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ConfigurationError("mine")])
def test_what_passes_as_it_is(error: BaseException) -> None:
    def change(f: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)) as caught:
        build(Returns(change)).estimate(X[:4], Y[:4])
    assert caught.value is error


class Own(Likelihood):
    """A density without a check of its targets."""

    name = "own"
    is_classification = True

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return f.log_softmax(1).gather(1, y[:, None])[:, 0]


@pytest.mark.parametrize("verb", ["map_loss", "estimate", "backward", "collect"])
def test_exceptions_of_the_likelihood(verb: str) -> None:
    evidence = build(Returns(), likelihood=Own(), estimator="ntk-N-1")
    with pytest.raises(InputError, match=r"log_prob of Own, given outputs .* raised RuntimeError"):
        getattr(evidence, verb)(X, Y + 5)


@pytest.mark.parametrize(
    "module", [nn.LazyLinear(3), nn.Sequential(nn.Linear(2, 3), nn.LazyBatchNorm1d())]
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules(module: nn.Module) -> None:
    for call in (build, lambda model: fit(model, (X, Y), estimator=None, progress=False)):
        with pytest.raises(
            ConfigurationError,
            match=r"lazy parameters.* Call model\(x\) on one batch",
        ):
            call(module)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3, track_running_stats=False),
        Applied(lambda f: nn.functional.batch_norm(f, None, None, training=True)),
    ],
)
@pytest.mark.filterwarnings("ignore:The model has normalization")
def test_batch_statistics(layer: nn.Module) -> None:
    # It was PyTorch's "Expected more than 1 value per channel when training".
    evidence = build(nn.Sequential(Returns(), layer))
    before = evidence.generator.get_state()
    for attempt in (
        lambda: evidence.estimate(X[:4], Y[:4]),
        lambda: evidence.estimate(X[:1], Y[:1]),
        lambda: evidence.blocks((X, Y)),
    ):
        with pytest.raises(ConfigurationError, match="track_running_stats=True helps"):
            attempt()
    assert torch.equal(evidence.generator.get_state(), before)


class Sequences(nn.Module):
    """The last output of a layer for sequences, or the first entry along dimension 0."""

    def __init__(self, layer: nn.Module, along: int = 1, state: str = "new") -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(4, 2)
        self.along, self.state, self.kept = along, state, None

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.MultiheadAttention):
            out = self.layer(x, x, x)[0]
        elif isinstance(self.layer, nn.GRU):
            if self.state == "kept if it fits" and self.kept is not None:
                self.kept = self.kept if self.kept.shape[1] == len(x) else None
            out, kept = self.layer(x, self.kept)
            self.kept = None if self.state == "new" else kept.detach()
        else:
            out = self.layer(x)
        return self.last(out.select(self.along, -1))


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.GRU(4, 4), "'layer (GRU)'"),
        (nn.MultiheadAttention(4, 2), "'layer (MultiheadAttention)'"),
        (nn.TransformerEncoderLayer(4, 2, 8, 0.0), "'layer.self_attn (MultiheadAttention)'"),
    ],
)
@pytest.mark.filterwarnings("ignore:The model has normalization")
def test_layers_without_batch_first_are_named(layer: nn.Module, name: str, along: int) -> None:
    x, y = torch.randn(8, 5, 4), torch.zeros(8, dtype=torch.long)
    model = Sequences(layer, along)
    evidence = Evidence(model, Categorical(), GaussianPrior(), estimator="ntk-4-C", num_data=8)
    schedule = {"epochs": 2, "progress": False}
    for attempt in (
        lambda: evidence.estimate(x[:4], y[:4]),
        lambda: evidence.blocks((x, y)),
        lambda: fit(model, (x, y), **grouped(schedule)),
    ):
        with pytest.raises(EvigradError, match=f"dimension 1: {re.escape(name)}.*batch_first=True"):
            attempt()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("kept", "keeps a hidden state for the next call, remove this"),
        ("kept if it fits", "keeps no state, such as a hidden state, for the next call"),
    ],
)
def test_a_hidden_state_that_is_kept_is_named(state: str, words: str) -> None:
    x, y = torch.randn(8, 5, 4), torch.zeros(8, dtype=torch.long)
    model = Sequences(nn.GRU(4, 4, batch_first=True), state=state)
    evidence = Evidence(model, Categorical(), GaussianPrior(), estimator="ntk-4-C", num_data=8)
    for attempt in (
        lambda: evidence.blocks((x, y)),
        lambda: fit(model, (x, y), **grouped({"epochs": 2, "progress": False})),
    ):
        with pytest.raises(EvigradError, match=words) as caught:
            attempt()
        assert "batch_first" not in str(caught.value)


def test_inputs_of_another_type_are_told_how_to_be_converted() -> None:
    x, y = torch.randn(8, 4).double(), torch.zeros(8, dtype=torch.long)
    with pytest.raises(InputError, match=r"same dtype.*to the type of the weights: x.float\(\)"):
        fit(nn.Linear(4, 2), (x, y), **grouped({"epochs": 1, "progress": False}))


@pytest.mark.each(1)
@pytest.mark.parametrize("verb", ["map_loss", "estimate", "backward", "collect"])
@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
def test_targets_on_another_device(verb: str, likelihood: Likelihood) -> None:
    y = torch.empty(N, 3, device="meta") if isinstance(likelihood, Gaussian) else Y.to("meta")
    evidence = build(Returns(), likelihood=likelihood, estimator="ntk-N-1")
    with pytest.raises(InputError, match="on the same device as the outputs .cpu., got meta"):
        getattr(evidence, verb)(X, y)
    with pytest.raises(InputError, match="on the same device as the outputs .cpu., got meta"):
        evidence.blocks((X, y))
    settings: dict[str, Any] = {"likelihood": likelihood.name, "estimator": None}
    with pytest.raises(InputError, match="Targets must contain numbers, got .* meta"):
        fit(Returns(), (X, y), progress=False, **grouped(settings))


def test_a_mask_that_leaves_nothing_of_a_datum() -> None:
    class Mean(Returns):
        def forward(self, x: Tensor) -> Tensor:
            kept = (x > 0).to(x)
            return super().forward((x * kept).sum(1, keepdim=True) / kept.sum(1, keepdim=True) * x)

    evidence, x = build(Mean(), estimator="ntk-N-1"), X.abs() + 1
    evidence.estimate(x, Y)
    x[-1] = -1.0
    with pytest.raises(
        InputError, match=rf"NaN .* only 1 of {N} examples.*mask hides an entire example"
    ):
        evidence.estimate(x, Y)


@pytest.mark.parametrize("verb", VERBS)
def test_a_weight_that_is_nan(verb: str) -> None:
    model = Returns()
    with torch.no_grad():
        model.layer.weight[0, 0] = torch.nan
    if verb == "map_loss":  # whose value says it, without a pause for a check in each batch
        assert build(model).map_loss(X, Y).isnan()
        return
    with pytest.raises(InputError, match="outputs .* NaN or infinite"):
        VERBS[verb](build(model))
