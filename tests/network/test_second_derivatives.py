"""A backward without a derivative must not make a gradient silently wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from evigrad import Evidence, Memory
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.passes import sweep
from evigrad.priors import GaussianPrior

N = 6


class Square(Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h * h

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (h,) = ctx.saved_tensors
        return 2 * h * gradients[0]


class OnceSquare(Square):
    backward: Any = staticmethod(once_differentiable(Square.backward))


class Net(nn.Module):
    """A network with a learned scale of its inputs, and a function of the test's."""

    def __init__(self, function: Callable[["Net", Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.tensor(1.3))
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
            self.table = nn.Parameter(torch.randn(5, 4))
            self.to(dtype)
        self.function = function

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x * self.scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.arange(N) % 3


def build(
    function: Callable[[Net, Tensor], Tensor],
    dtype: torch.dtype = torch.float64,
    likelihood: Likelihood | None = None,
    estimator: str = "ntk-N-C",
    **settings: Any,
) -> Evidence:
    return Evidence(
        Net(function, dtype),
        likelihood or Categorical(),
        GaussianPrior("layerwise"),
        estimator=estimator,
        num_data=N,
        generator=0,
        **{"hyperparameters": ["scale"], **settings},
    )


def behind(function: Any) -> Callable[[Net, Tensor], Tensor]:
    """Between the weights and the outputs."""
    return lambda net, x: function(net.last(net.hidden(x)))


def gradient(evidence: Evidence, x: Tensor, y: Tensor) -> Tensor:
    evidence.backward(x, y)
    (scale_gradient,) = (
        p.grad for n, p in evidence.hyperparameters().items() if n == "model.scale"
    )
    assert scale_gradient is not None
    return scale_gradient


@pytest.mark.parametrize("estimator", ["ntk-N-C", "kfac-N-C", "ntk-3-1"])
def test_a_backward_that_cannot_be_differentiated(estimator: str) -> None:
    x, y = data()
    evidence = build(behind(OnceSquare.apply), estimator=estimator)
    plain = build(behind(Square.apply), estimator=estimator)
    size = 3 if "3" in estimator else N
    x, y = x[:size], y[:size]
    # Estimates take first derivatives alone.
    assert evidence.estimate(x, y) == plain.estimate(x, y)
    state = evidence.generator.get_state()
    for _ in range(2):
        with pytest.raises(
            ConfigurationError, match="'OnceSquare' cannot be differentiated twice.*'model.scale'"
        ):
            evidence.backward(x, y)
    assert torch.equal(evidence.generator.get_state(), state)
    assert all(p.grad is None for p in evidence.model.parameters())
    assert gradient(plain, x, y).isfinite()
    # Precisions take no derivative of the rows.
    evidence.backward(x, y, wrt=["prior"])


def test_cotangents_without_a_graph() -> None:
    """A Gaussian's cotangents are constant, so that autograd leaves no node for its error."""
    x, y = data()[0], torch.zeros(N, 3, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="OnceSquare"):
        build(behind(OnceSquare.apply), likelihood=Gaussian(0.5)).backward(x, y)


def test_scores_that_depend_on_a_learned_noise() -> None:
    """The empirical Fisher's cotangents depend on the noise: the rows are differentiated in it."""
    x, y = data()[0], torch.ones(N, 3, dtype=torch.float64)
    settings: Any = {"estimator": "ntk-N-1-ef", "hyperparameters": []}
    with pytest.raises(ConfigurationError, match=r"'OnceSquare'.*'likelihood\."):
        build(behind(OnceSquare.apply), likelihood=Gaussian(0.5), **settings).backward(x, y)


def test_a_function_before_all_weights_is_right() -> None:
    """As the kernel of an augmentation: only its first derivative is needed."""
    x, y = data()
    values = [
        gradient(
            build(lambda net, x, f=square: net.last(torch.tanh(net.first(f.apply(x * net.scale))))),
            x,
            y,
        )
        for square in (OnceSquare, Square)
    ]
    assert torch.equal(*values)


def test_the_check_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        sweep, "refuse_once_differentiable", lambda *arguments: calls.append(arguments[2])
    )
    x, y = data()
    evidence = build(behind(Square.apply), memory=Memory(micro_batch=2))
    for _ in range(3):
        evidence.backward(x, y)
    assert calls == [["model.scale"]]


# ------------------------------------------------------------ embeddings


class Words(nn.Module):
    def __init__(self, call: Callable[["Words", Tensor], Tensor], **flags: Any) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.words = nn.Embedding(6, 4, **flags)
            self.scale, self.head = nn.Parameter(torch.tensor(1.3)), nn.Linear(4, 3)
        self.double()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.call(self, x).sum(1) * self.scale))


INDICES = torch.tensor([[0, 0, 1], [2, 2, 2], [3, 4, 4], [5, 5, 0], [1, 2, 2], [0, 3, 3]])


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", ["ntk-N-C", "kfac-N-C", "diag-N-C"])
@pytest.mark.parametrize("flag", ["scale_grad_by_freq", "sparse"])
def test_flags_of_an_embedding_change_nothing(flag: str, estimator: str) -> None:
    y, results = torch.arange(N) % 3, []
    for value in (False, True):
        model = Words(lambda net, x: net.words(x), **{flag: value})
        evidence = Evidence(
            model,
            Categorical(),
            GaussianPrior("layerwise"),
            estimator=estimator,
            num_data=N,
            hyperparameters=["scale"],
            generator=0,
        )
        estimate = evidence.backward(INDICES, y)
        variance = evidence.posterior((INDICES, y), structure="full")(INDICES).variance
        results.append((estimate, model.scale.grad, variance))
        assert getattr(model.words, flag) == value
    for one, other in zip(*results, strict=True):
        assert one == other if not isinstance(one, Tensor) else torch.allclose(one, other)


@pytest.mark.parametrize("bag", [False, True])
def test_gradients_scaled_by_a_function_are_refused(bag: bool) -> None:
    def call(net: Words, x: Tensor) -> Tensor:
        if bag:
            return F.embedding_bag(x, net.words.weight, scale_grad_by_freq=True)[:, None]
        return F.embedding(x, net.words.weight, scale_grad_by_freq=True)

    evidence = Evidence(
        Words(call), Categorical(), GaussianPrior(), estimator="ntk-N-C", num_data=N
    )
    with pytest.raises(ConfigurationError, match="scale_grad_by_freq=True.*Omit the argument"):
        evidence.estimate(INDICES, torch.arange(N) % 3)


# ------------------------------------------------------------ operations without second derivatives

BAGS = torch.arange(4)


def spread(d: Tensor) -> Tensor:
    """Some numbers of each datum as four."""
    return torch.tanh(d) @ torch.arange(4.0 * d.shape[1]).reshape(-1, 4).sin().to(d)


def segments(h: Tensor) -> Tensor:
    lengths = torch.tensor([1, 3])
    return torch.stack([torch.segment_reduce(row, "sum", lengths=lengths) for row in h])


def heads(h: Tensor) -> Tensor:
    return h[:, None, :, None]


def flash(net: Net, x: Tensor) -> Tensor:
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        return attention(net, x)


def attention(net: Net, x: Tensor) -> Tensor:
    h = heads(net.hidden(x))
    return net.last(F.scaled_dot_product_attention(h, h, h).flatten(1))


def on(change: Callable[[Net, Tensor], Tensor]) -> Callable[[Net, Tensor], Tensor]:
    return lambda net, x: net.last(change(net, net.hidden(x)))


def bag_of(net: Net, h: Tensor) -> Tensor:
    return h + F.embedding_bag(BAGS.repeat(len(h), 1), net.table * net.scale)


# Name → (a model with the operation, and one with what the message says instead).
OPERATIONS = {
    "embedding_bag": (
        on(bag_of),
        on(lambda net, h: h + F.embedding(BAGS.repeat(len(h), 1), net.table * net.scale).mean(-2)),
    ),
    "cdist": (
        on(lambda net, h: spread(torch.cdist(h, net.table))),
        on(
            lambda net, h: spread((h[..., :, None, :] - net.table[..., None, :, :]).norm(2, dim=-1))
        ),
    ),
    "pdist": (
        on(lambda net, h: torch.stack([spread(F.pdist(a.view(2, 2))[None])[0] for a in h])),
        on(
            lambda net, h: torch.stack(
                [
                    spread((a.view(2, 2)[i] - a.view(2, 2)[j]).norm(2, dim=1)[None])[0]
                    for a in h
                    for i, j in [torch.triu_indices(2, 2, 1)]
                ]
            )
        ),
    ),
    "segment_reduce": (
        on(lambda net, h: spread(segments(h))),
        on(
            lambda net, h: spread(
                torch.zeros(len(h), 2).to(h).index_add(1, torch.tensor([0, 1, 1, 1]), h)
            )
        ),
    ),
    "scaled_dot_product_flash_attention": (flash, attention),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_without_a_second_derivative(name: str) -> None:
    x, y = data()
    function, instead = OPERATIONS[name]
    evidence, other = (build(f) for f in (function, instead))
    expected = other.estimate(x, y).log_evidence
    assert evidence.estimate(x, y).log_evidence == pytest.approx(expected, rel=1e-8)
    with pytest.raises(
        ConfigurationError, match=f"uses '{name}', which has no second derivative.*Use instead: "
    ):
        evidence.backward(x, y)
    assert all(p.grad is None for p in evidence.model.parameters())
    assert gradient(other, x, y).isfinite()


def test_an_operation_without_a_derivative() -> None:
    x, y = data()
    evidence = build(on(lambda net, h: torch.igamma(h.abs() + 1, torch.ones_like(h))))
    with pytest.raises(ConfigurationError, match="uses 'igamma', which has no derivative"):
        evidence.estimate(x, y)


# ------------------------------------------------------------ derivatives inside forward


class Slopes(nn.Module):
    """A function and its derivative in the inputs, by autograd or by a formula."""

    def __init__(self, how: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)
            self.scale = nn.Parameter(torch.tensor(0.7))
        self.double()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.slopes(x)
        if self.how == "enabled":
            with torch.enable_grad():
                return self.slopes(x)
        h = torch.tanh(self.first(x * self.scale))
        slopes = ((1 - h.square()) * self.last.weight) @ self.first.weight * self.scale
        return torch.cat([self.last(h), slopes], 1)

    def slopes(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        u = self.last(torch.tanh(self.first(x * self.scale)))
        (slopes,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return torch.cat([u, slopes], 1)


@pytest.mark.parametrize("estimator", ["ntk-N-C", "kfac-N-C", "diag-3-1"])
def test_a_model_that_differentiates_inside_its_forward(estimator: str) -> None:
    def evidence_of(how: str) -> Evidence:
        return Evidence(
            Slopes(how),
            Gaussian(0.5),
            GaussianPrior("layerwise"),
            estimator=estimator,
            num_data=N,
            hyperparameters=["scale"],
            generator=0,
        )

    size = 3 if "3" in estimator else N
    x, y = data()[0][:size, :2], torch.ones(size, 3, dtype=torch.float64)
    with pytest.raises(InputError, match=r"torch.enable_grad\(\).*create_graph=True"):
        evidence_of("plain").estimate(x, y)
    values = []
    for how in ("enabled", "formula"):
        evidence = evidence_of(how)
        estimate = evidence.backward(x, y)
        scale = evidence.hyperparameters()["model.scale"].grad
        assert scale is not None
        values.append([estimate.log_evidence, float(scale)])
    assert values[0] == pytest.approx(values[1], rel=1e-9)
