"""The average over transforms: equal to a loop over them, with noise that belongs to the datum."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, InputError
from evigrad.invariances import AdditiveNoise, AffineInvariance, Averaged
from evigrad.invariances.noise import PackedModel, Stochastic, current_samples, sampled
from evigrad.models import make_model

RANGES = {"rotation": 1.0, "translation_x": 0.2, "scale_y": 0.3}


class Network(nn.Module):
    """A small smooth network that remembers how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.output = nn.Linear(3, 4)
        self.calls: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append((len(x), current_samples()))
        return self.output(torch.tanh(self.conv(x)).square().mean((2, 3)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def averaged(num_samples: int = 5, **settings: object) -> Averaged:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = Network()
    return Averaged(model, AffineInvariance(RANGES, flip=True), num_samples, **settings).double()  # pyright: ignore[reportArgumentType]


def calls(model: Averaged) -> list[tuple[int, int]]:
    """Batch sizes and numbers of samples with which the network was called."""
    assert isinstance(model.model, Network)
    return model.model.calls


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 1, 6, 6, generator=generator(1), dtype=torch.float64)


def by_loop(model: Averaged, x: Tensor, noise: Tensor) -> Tensor:
    """One sample after the other."""
    outputs = [
        model.model(model.invariance(x, noise[:, s].to(x.dtype))) for s in range(noise.shape[1])
    ]
    if model.average == "probabilities":
        return torch.stack([f.softmax(-1) for f in outputs]).mean(0).log()
    return torch.stack(outputs).mean(0)


@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_equals_a_loop(average: str, num_samples: int) -> None:
    model, x = averaged(num_samples, average=average), images()
    noise = model.draw(6, generator())
    assert noise.shape == (6, num_samples, 7)
    with model.held(noise):
        outputs = model(x)
    torch.testing.assert_close(outputs, by_loop(model, x, noise), rtol=1e-12, atol=1e-12)
    if average == "probabilities":
        torch.testing.assert_close(outputs.exp().sum(1), torch.ones(6, dtype=x.dtype))


@pytest.mark.each(1)
@pytest.mark.parametrize("average", ["logits", "probabilities"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 9])
def test_chunks_change_nothing_but_memory(average: str, chunk: int) -> None:
    x, results = images(), []
    for chosen in (None, chunk):
        model = averaged(5, average=average, chunk=chosen)
        torch.manual_seed(3)
        outputs = model(x)
        gradients = torch.autograd.grad(outputs.square().sum(), [*model.parameters()])
        torch.manual_seed(3)
        with torch.no_grad():
            torch.testing.assert_close(model(x), outputs)
        results.append([outputs, *gradients])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-11, atol=1e-11)
    passes = [size for size, _ in calls(model)]
    expected = [6 * min(chunk, 5 - start) for start in range(0, 5, chunk)]
    # Forward, once more for the gradient unless it is all in one pass, and without a gradient.
    again = expected if chunk < 5 else []
    assert passes[: len(expected)] == expected
    assert sorted(passes) == sorted(expected + again + expected)


def test_chunks_are_not_kept_for_the_gradient() -> None:
    """What a pass saves is dropped, not kept until the gradient is taken."""

    def saved(chunk: int | None) -> int:
        model, x, sizes = averaged(8, chunk=chunk), images(), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        ):
            outputs = model(x)
        assert outputs.requires_grad
        return sum(sizes)

    assert saved(2) < saved(None) / 10


def test_says_how_many_samples_there_are() -> None:
    model, x = averaged(5), images()
    model(x)
    with sampled(2):
        model(x)
    assert calls(model) == [(30, 5), (30, 10)]
    assert current_samples() == 1
    chunked = averaged(5, chunk=2)
    with torch.no_grad():
        chunked(x)
    assert calls(chunked) == [(12, 2), (12, 2), (6, 1)]


def test_evidence_passes_see_all_samples_at_once() -> None:
    model, x = averaged(5, chunk=2), images()
    with model.held(model.draw(6, generator())):
        model(x)
    assert calls(model) == [(30, 5)]


def test_samples_of_a_datum_lie_side_by_side() -> None:
    class Shift(nn.Module):
        def sample(self, n: int, generator: torch.Generator) -> Tensor:
            return torch.rand(n, 2, generator=generator)

        def apply(self, x: Tensor, eps: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return x + eps

    seen: list[Tensor] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return x

    # Whatever has the two methods is a transform.
    model = Averaged(Watched(), Shift(), 3)
    x, noise = torch.randn(4, 2), model.draw(4, generator())
    with model.held(noise):
        torch.testing.assert_close(model(x), x + noise.mean(1))
    torch.testing.assert_close(seen[0].view(4, 3, 2), x[:, None] + noise)


# ---------------------------------------------------------------------------- noise


def test_a_datum_does_not_depend_on_its_batch() -> None:
    model, x = averaged(), images()
    noise = model.draw(6, generator())
    with model.held(noise):
        whole = model(x)
    for size in (1, 4):
        parts = []
        for start in range(0, 6, size):
            with model.held(noise[start : start + size]):
                parts.append(model(x[start : start + size]))
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
    drawn = PackedModel(model, x, [noise])
    packed = drawn.pack(x, [noise])
    torch.testing.assert_close(drawn(packed), whole)
    order = torch.tensor([3, 1, 5])
    torch.testing.assert_close(drawn(packed[order]), whole[order], rtol=1e-12, atol=1e-12)


def test_the_default_generator_is_used_where_no_noise_is_held_and_only_there() -> None:
    model, x = averaged(), images()
    noise = model.draw(6, generator())
    state = torch.get_rng_state()
    with model.held(noise):
        held = model(x)
    model.draw(6, generator())
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(5)
    first, second = model(x), model(x)
    assert not torch.equal(first, second) and not torch.equal(first, held)
    torch.manual_seed(5)
    assert torch.equal(model(x), first)
    assert not torch.equal(model.eval()(x), model(x))  # in evaluation mode too
    # What is drawn is what `draw` gives, from that generator.
    torch.manual_seed(5)
    noise = model.draw(6, torch.default_generator)
    torch.testing.assert_close(first, by_loop(model, x, noise), rtol=1e-12, atol=1e-12)


def test_noise_is_held_until_the_end_of_the_context() -> None:
    model, x = averaged(), images()
    outer, inner = (model.draw(6, generator(seed)) for seed in (0, 1))
    with model.held(outer):
        expected = model(x)
        with pytest.raises(RuntimeError, match="stop"), model.held(inner):
            assert not torch.equal(model(x), expected)
            raise RuntimeError("stop")
        assert torch.equal(model(x), expected)
        assert torch.equal(model(x), expected)
        with pytest.raises(InputError, match="for 5 inputs, got noise for 6"):
            model(x[:5])
    assert not torch.equal(model(x), expected)


def test_the_number_of_samples_can_change() -> None:
    model, x = averaged(2), images()
    model.num_samples = 7
    model(x)
    assert calls(model) == [(42, 7)]
    assert model.draw(3, generator()).shape == (3, 7, 7)


# ---------------------------------------------------------------------------- derivatives


def jacobian_norm(model: Averaged, x: Tensor, create_graph: bool) -> Tensor:
    """A function of the Jacobian in the weights, as the evidence is one."""
    weights = [*model.model.parameters()]
    total = torch.zeros((), dtype=x.dtype)
    outputs = model(x)
    for n in range(len(x)):
        rows = torch.autograd.grad(
            outputs[n, 1], weights, create_graph=create_graph, retain_graph=True
        )
        total = total + torch.stack([row.square().sum() for row in rows]).sum().log1p()
    return total


@pytest.mark.parametrize("average", ["logits", "probabilities"])
def test_derivative_of_jacobians_in_the_ranges(average: str) -> None:
    """One backward pass through the resampling, of a graph that holds gradients in weights."""
    model, x = averaged(3, average=average), images(3)
    noise = model.draw(3, generator())
    parameters = list(model.invariance.parameters())
    assert len(parameters) == 3
    with model.held(noise):
        gradients = torch.autograd.grad(jacobian_norm(model, x, True), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            values = []
            for step in (1e-6, -1e-6):
                with torch.no_grad():
                    parameter += step
                values.append(jacobian_norm(model, x, False).item())
                with torch.no_grad():
                    parameter -= step
            numeric = (values[0] - values[1]) / 2e-6
            assert abs(numeric) > 1e-4
            assert gradient.item() == pytest.approx(numeric, rel=1e-5, abs=1e-8)


def test_works_datum_by_datum_under_vmap() -> None:
    model, x = averaged(3), images(3)
    noise = model.draw(3, generator())
    drawn = PackedModel(model, x, [noise])
    weights = {name: p.detach() for name, p in drawn.named_parameters()}

    def outputs(weights: dict[str, Tensor], datum: Tensor) -> Tensor:
        return torch.func.functional_call(drawn, weights, (datum[None],))[0]

    jacobian = torch.func.vmap(torch.func.jacrev(outputs), (None, 0))(
        weights, drawn.pack(x, [noise])
    )
    with model.held(noise):
        f = model(x)
    for name, parameter in model.named_parameters():
        (expected,) = torch.autograd.grad(f[1, 2], parameter, retain_graph=True)
        torch.testing.assert_close(jacobian[name][1, 2], expected)


# ---------------------------------------------------------------------------- the house


def test_is_stochastic_and_named_as_documented() -> None:
    model = averaged()
    assert isinstance(model, Stochastic)
    names = [name for name, _ in model.named_parameters()]
    assert names[:2] == ["model.conv.weight", "model.conv.bias"]
    assert names[-3:] == [f"invariance.{name}" for name in ("translation_x", "rotation", "scale_y")]
    assert set(model.state_dict()) >= set(names)


def test_copies() -> None:
    model, x = averaged(), images()
    noise = model.draw(6, generator())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with model.held(noise), copied.held(noise):
            assert torch.equal(model(x), copied(x))


def test_takes_the_paper_s_networks() -> None:
    model = Averaged(make_model("wrn16-4", (3, 8, 8), 10, seed=0), AffineInvariance(flip=True), 2)
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 10)


def test_noise_on_tables() -> None:
    net = nn.Linear(3, 2)
    model = Averaged(net, AdditiveNoise(3, level=0.3), 4)
    x, noise = torch.randn(5, 3), model.draw(5, generator())
    assert noise.shape == (5, 4, 3)
    with model.held(noise):
        torch.testing.assert_close(model(x), net(x + 0.3 * noise.mean(1)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"average": "logit"}, "Did you mean 'logits'"),
        ({"num_samples": 0}, "at least 1, got 0 and None"),
        ({"chunk": 0}, "at least 1, got 2 and 0"),
        ({"invariance": nn.ReLU()}, "sample(n, generator), got ReLU"),
        ({"model": averaged()}, "must not draw noise, but its module Averaged does"),
    ],
)
def test_errors_say_what_to_mend(settings: dict, words: str) -> None:
    arguments = {"model": Network(), "invariance": AffineInvariance(), "num_samples": 2}
    with pytest.raises(ConfigurationError) as error:
        Averaged(**{**arguments, **settings})
    assert words in str(error.value)
