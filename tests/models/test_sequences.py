"""The transformer and the GRU: what they compute, the paths of their rows, and what they learn."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Estimate, Evidence, Optimization, Schedule, fit
from evigrad.errors import ConfigurationError
from evigrad.likelihoods import Categorical
from evigrad.models.sequences import Attention, Recurrent, Transformer
from evigrad.network.written_out import WRITTEN_OUT
from evigrad.priors import GaussianPrior

pytestmark = pytest.mark.filterwarnings("ignore:The model has normalization layers")

OUTPUTS = 3
BUILDERS: dict[str, Callable[..., nn.Module]] = {"transformer": Transformer, "gru": Recurrent}
SMALL: dict[str, dict[str, Any]] = {
    "transformer": {"width": 4, "heads": 2, "layers": 1},
    "gru": {"width": 3},
}
HYPERPARAMETER = {"transformer": "attention_length", "gru": "pooling_time"}
# Input shape, and the settings for such inputs.
INPUTS: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
    "tokens": ((5,), {"vocabulary": 6}),
    "padded": ((5,), {"vocabulary": 6, "padding": 0}),
    "series": ((5,), {}),
    "vectors": ((5, 2), {}),
    "images": ((2, 4, 3), {}),
}


def make(
    name: str, kind: str, m: int = 4, start: float | None = 1.5, seed: int = 0, **changes: Any
) -> tuple[nn.Module, Tensor]:
    """A small float64 network and inputs for it; padded sequences have 3 tokens at least."""
    shape, settings = INPUTS[kind]
    settings = {**SMALL[name], **settings, HYPERPARAMETER[name]: start, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = BUILDERS[name](shape, OUTPUTS, **settings).double().eval()
        if kind in ("tokens", "padded"):
            x = torch.randint(1, 6, (m, *shape))
        else:
            x = torch.randn(m, *shape, dtype=torch.float64)
    if kind == "padded":
        x[1::2, 3:] = 0
    return model, x


def make_evidence(
    name: str, kind: str = "vectors", estimator: str = "ntk-N-C", m: int = 4, **options: Any
) -> tuple[Evidence, Tensor, Tensor]:
    model, x = make(name, kind, m)
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=estimator,
        num_data=m,
        hyperparameters=[HYPERPARAMETER[name]],
        generator=0,
        **options,
    )
    with torch.no_grad():  # precisions and lengths all different
        for p in evidence.hyperparameters().values():
            p += torch.linspace(-0.5, 0.7, p.numel(), dtype=p.dtype).reshape(p.shape)
    return evidence, x, torch.arange(m) % OUTPUTS


# ------------------------------------------------------------ what they compute


@pytest.mark.each(1)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("start", [None, 2.0])
@pytest.mark.parametrize("name", BUILDERS)
def test_maps_each_datum_by_itself(name: str, start: float | None, kind: str) -> None:
    model, x = make(name, kind, start=start)
    f = model(x)
    assert f.shape == (4, OUTPUTS)
    torch.testing.assert_close(f[1:2], model(x[1:2]))
    names = [n for n, _ in model.named_parameters() if HYPERPARAMETER[name] in n]
    assert names == ([] if start is None else [f"{HYPERPARAMETER[name]}.log"])


@pytest.mark.parametrize("start", [None, 2.0])
@pytest.mark.parametrize("name", BUILDERS)
def test_padding_is_as_if_it_were_not_there(name: str, start: float | None) -> None:
    model, x = make(name, "padded", start=start)
    torch.testing.assert_close(model(x)[1::2], model(x[1::2, :3]))
    assert not torch.allclose(model(x)[0::2], model(x[0::2, :3]))
    assert model(torch.zeros_like(x)).isfinite().all()


def test_heads_and_layers_have_a_length_each() -> None:
    model, x = make("transformer", "vectors", layers=3)
    assert model.get_parameter("attention_length.log").shape == (3, 2)
    torch.testing.assert_close(
        model.get_submodule("attention_length")(), torch.full((3, 2), 1.5).double()
    )
    before = model(x)
    with torch.no_grad():
        model.get_parameter("attention_length.log")[2, 1] += 0.1
    assert not torch.equal(model(x), before)


def test_long_attention_is_attention_without_a_length() -> None:
    unbounded, x = make("transformer", "vectors", start=None)
    model, _ = make("transformer", "vectors", start=1e9)
    missing, unexpected = model.load_state_dict(unbounded.state_dict(), strict=False)
    assert missing == ["attention_length.log"] and not unexpected
    torch.testing.assert_close(model(x), unbounded(x), rtol=0, atol=1e-8)


def test_attention_is_its_formula() -> None:
    torch.manual_seed(0)
    attention, h = Attention(4, 2).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    lengths = torch.tensor([0.5, 2.0], dtype=torch.float64)
    distances = torch.tensor([[0.0, 1, 2], [1, 0, 1], [2, 1, 0]], dtype=torch.float64)
    heads = []
    for head, length in enumerate(lengths):
        part = slice(2 * head, 2 * head + 2)
        q, k, v = (
            layer(h)[..., part] for layer in (attention.query, attention.key, attention.value)
        )
        scores = q @ k.mT / math.sqrt(2) - distances / length
        heads.append(scores.softmax(-1) @ v)
    expected = attention.output(torch.cat(heads, -1))
    bias = -(distances / lengths[:, None, None])[None]
    torch.testing.assert_close(attention(h, bias), expected)


def test_leaky_average_is_its_formula() -> None:
    model, x = make("gru", "vectors", start=1.5)
    assert isinstance(model, Recurrent)
    states, last = model.recurrence(x)
    weights = torch.exp(-torch.arange(4, -1, -1, dtype=torch.float64) / 1.5)
    pooled = torch.einsum("t,mtd->md", weights / weights.sum(), states)
    torch.testing.assert_close(model(x), model.head(pooled))
    model.pooling_time = None
    torch.testing.assert_close(model(x), model.head(last[-1]))


def test_short_and_long_average() -> None:
    state, x = make("gru", "padded", start=None)
    short, _ = make("gru", "padded", start=1e-3)
    torch.testing.assert_close(short(x), state(x))
    long, _ = make("gru", "vectors", start=1e9)
    assert isinstance(long, Recurrent)
    x = torch.randn(3, 5, 2, dtype=torch.float64)
    torch.testing.assert_close(long(x), long.head(long.recurrence(x)[0].mean(1)))


def test_padded_states_reach_no_further_than_the_last_token() -> None:
    model, x = make("gru", "padded", start=None)
    changed = x.clone()
    changed[1, 2] = 1 + x[1, 2] % 5
    difference = (model(changed) - model(x)).abs().sum(1)
    assert difference[1] > 0 and not difference[[0, 2, 3]].any()


# ------------------------------------------------------------ paths


@pytest.mark.each(1)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_weight_has_a_closed_form(name: str, kind: str) -> None:
    evidence, x, _ = make_evidence(name, kind, "kfac-N-C")
    for weight in evidence.describe(x):
        assert "generic" not in weight.rows and weight.rows != "unused", weight
        table = weight.name in ("tokens.weight", "positions.weight") and "linear" not in weight.rows
        if len(weight.shape) == 2 and not table:
            assert weight.curvature.startswith("kronecker"), weight


def test_paths_in_words() -> None:
    evidence, x, _ = make_evidence("gru", "vectors", "kfac-N-C")
    rows = {weight.name: weight.rows for weight in evidence.describe(x)}
    assert rows == {
        "recurrence.weight_ih_l0": "linear",
        "recurrence.weight_hh_l0": "5 x linear",
        "recurrence.bias_ih_l0": "linear",
        "recurrence.bias_hh_l0": "5 x linear",
        "head.weight": "linear",
        "head.bias": "linear",
    }


# ------------------------------------------------------------ gradients of the evidence


def test_twin_of_gru_without_closed_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed forms of the GRU against automatic differentiation, datum by datum."""
    evidence, x, y = make_evidence("gru", "tokens")
    model, _ = make("gru", "tokens")
    model.load_state_dict(evidence.model.state_dict())
    prior = GaussianPrior("layerwise")
    twin = Evidence(
        model,
        Categorical(),
        prior,
        estimator="ntk-N-C",
        num_data=4,
        hyperparameters=["pooling_time"],
    )
    prior.load_state_dict(evidence.prior.state_dict())
    with monkeypatch.context() as patched:
        patched.delitem(WRITTEN_OUT, torch.gru)
        assert {w.rows for w in twin.describe(x) if "recurrence" in w.name} == {"generic: loop"}
        expected = twin.backward(x, y)
    compare(evidence, evidence.backward(x, y), twin, expected)


def test_twin_with_pytorchs_transformer() -> None:
    """Our blocks against nn.TransformerEncoderLayer, whose attention is written out."""
    model, x = make("transformer", "tokens", start=None)
    assert isinstance(model, Transformer)
    twin, _ = make("transformer", "tokens", start=None)
    assert isinstance(twin, Transformer)
    layer = nn.TransformerEncoderLayer(
        4, 2, 8, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).double()
    block = model.blocks[0]
    weights = block.state_dict()
    weights["attention.key.bias"] = torch.zeros(4, dtype=torch.float64)  # without effect
    state = {k: v for k, v in weights.items() if not k.startswith("attention")}
    for kind in ("weight", "bias"):
        parts = [weights[f"attention.{part}.{kind}"] for part in ("query", "key", "value")]
        state[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
        state[f"self_attn.out_proj.{kind}"] = weights[f"attention.output.{kind}"]
    layer.load_state_dict(state)

    class WithoutBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, h: Tensor, bias: Tensor | None) -> Tensor:
            assert bias is None
            return self.layer(h)

    twin.blocks[0] = WithoutBias()
    for part in ("tokens", "positions", "head"):
        twin.get_submodule(part).load_state_dict(model.get_submodule(part).state_dict())
    # One precision for all: PyTorch's packed matrix could only have one for three of ours.
    evidence, other = (
        Evidence(net, Categorical(), GaussianPrior("scalar"), estimator="ntk-N-C", num_data=4)
        for net in (model, twin)
    )
    assert not any("generic" in w.rows for w in other.describe(x))
    y = torch.arange(4) % OUTPUTS
    compare(evidence, evidence.backward(x, y), other, other.backward(x, y))


def compare(evidence: Evidence, estimate: Estimate, twin: Evidence, expected: Estimate) -> None:
    assert estimate.log_evidence == pytest.approx(expected.log_evidence, rel=1e-10)
    for name, p in evidence.hyperparameters().items():
        other = twin.hyperparameters()[name]
        assert p.grad is not None and other.grad is not None
        torch.testing.assert_close(p.grad, other.grad, rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------ learning


@pytest.mark.parametrize("name", BUILDERS)
def test_a_short_fit_learns(name: str) -> None:
    """Which of three tokens comes last? A mean over a long time hides it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(OUTPUTS, (48, 6), generator=generator)
    torch.manual_seed(0)
    settings = {"width": 8, "vocabulary": OUTPUTS, HYPERPARAMETER[name]: 6.0}
    model = BUILDERS[name]((6,), OUTPUTS, **settings)
    before = model.get_submodule(HYPERPARAMETER[name])().detach().clone()
    result = fit(
        model,
        (x, x[:, -1]),
        estimator="ntk-N-1",
        hyperparameters=[HYPERPARAMETER[name]],
        schedule=Schedule(epochs=16, batch_size=16, burn_in=4, every=3, steps=4),
        optimization=Optimization(lr=0.03, hyper_lr=0.2, prior_update="adam"),
        progress=False,
    )
    after = model.get_submodule(HYPERPARAMETER[name])().detach()
    assert (after - before).abs().min() > 0.05
    if name == "gru":
        assert after < before
    rows = [row["log_evidence"] for row in result.history]
    learned = [value for value in rows if value is not None]
    assert learned[-1] > learned[0] + 0.1
    precisions = [weight.precision for weight in result.evidence.describe()]
    assert min(abs(math.log(precision)) for precision in precisions) > 1e-3


# ------------------------------------------------------------ errors


def test_errors_say_what_to_mend() -> None:
    for name in BUILDERS:
        for shape, settings, words in [
            ((2, 3, 4, 5), {}, "images (channels, height, width)"),
            ((5,), {"padding": 0}, "Set vocabulary=..."),
            ((5, 2), {"vocabulary": 3}, "needs inputs of shape (T,)"),
            ((5,), {"vocabulary": 0}, "at least 1"),
            ((5,), {"vocabulary": 3, "padding": 3}, "must be a token from 0 to 2"),
            ((5,), {"width": 0}, "must be at least 1, got 0"),
            ((5,), {"layers": 0}, "must be at least 1, got 0"),
            ((5,), {"START": 0.0}, "must be a positive number"),
            ((5,), {"START": math.inf}, "must be a positive number"),
        ]:
            renamed = {HYPERPARAMETER[name] if k == "START" else k: v for k, v in settings.items()}
            with pytest.raises(ConfigurationError) as error:
                BUILDERS[name](shape, OUTPUTS, **renamed)
            assert words in str(error.value)


def test_heads_divide_the_width() -> None:
    with pytest.raises(ConfigurationError, match="must be a multiple of heads = 3"):
        Transformer((5,), 2, width=4, heads=3)
