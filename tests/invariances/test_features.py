"""Transforms of features: scales and noise."""

import math

import pytest
import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.invariances import AdditiveNoise, Averaged, InputScale, Transform


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_input_scale_is_a_layer_and_a_transform() -> None:
    scale = InputScale(3, scale=2.0)
    with torch.no_grad():
        scale.log_scale[1] = math.log(0.5)
    x = torch.randn(4, 3)
    expected = x * torch.tensor([2.0, 0.5, 2.0])
    torch.testing.assert_close(scale(x), expected)
    eps = scale.sample(4, generator())
    assert len(eps) == 4 and eps.is_floating_point()
    torch.testing.assert_close(scale.apply(x, eps), expected)
    net = nn.Linear(3, 2)
    torch.testing.assert_close(Averaged(net, scale, 1)(x), net(expected))
    torch.testing.assert_close(nn.Sequential(scale, net)(x), net(expected))


def test_input_scale_has_a_gradient_for_each_feature() -> None:
    scale = InputScale((2, 3)).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda log_scale: torch.func.functional_call(scale, {"log_scale": log_scale}, (x,)),
        scale.log_scale,
    )


def test_additive_noise() -> None:
    noise = AdditiveNoise((2, 3), level=0.5)
    state = torch.get_rng_state()
    eps = noise.sample(2000, generator())
    assert torch.equal(eps, noise.sample(2000, generator()))
    assert torch.equal(state, torch.get_rng_state())
    assert eps.shape == (2000, 2, 3)
    assert eps.mean().item() == pytest.approx(0, abs=0.03)
    assert eps.std().item() == pytest.approx(1, abs=0.03)
    x = torch.randn(2000, 2, 3)
    torch.testing.assert_close(noise(x, eps), x + 0.5 * eps)
    assert noise.raw_level.shape == ()


def test_additive_noise_per_feature() -> None:
    noise = AdditiveNoise(3, level=0.5, per_feature=True)
    with torch.no_grad():
        noise.raw_level.copy_(torch.tensor([0.1, -0.2, 0.0]))
    torch.testing.assert_close(noise.level, torch.tensor([0.1, 0.2, 0.0]))
    x, eps = torch.randn(4, 3), noise.sample(4, generator())
    noise(x, eps).sum().backward()
    expected = eps.sum(0) * torch.tensor([1.0, -1.0, 1.0])
    assert noise.raw_level.grad is not None
    torch.testing.assert_close(noise.raw_level.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_dtype_of_the_input_is_kept(dtype: torch.dtype) -> None:
    x: Tensor = torch.randn(4, 3).to(dtype)
    noise = AdditiveNoise(3)
    assert noise(x, noise.sample(4, generator())).dtype == dtype


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_errors(value: float) -> None:
    with pytest.raises(ConfigurationError, match="scale must be positive"):
        InputScale(3, scale=value)
    with pytest.raises(ConfigurationError, match="level must be finite"):
        AdditiveNoise(3, level=value)


class Widened(Transform):
    """Inputs plus noise up to ± width, with a width between two bounds."""

    bounds = {"width": (0.5, 2.0)}

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.tensor(width))

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        return 2 * torch.rand(n, 1, generator=generator) - 1

    def forward(self, x: Tensor, eps: Tensor) -> Tensor:
        return x + self.width * eps


@pytest.mark.parametrize(
    ("bounds", "raw", "value", "slope"),
    [
        ((0.5, 2.0), 1.3, 1.3, 1.0),
        ((0.5, 2.0), 2.3, 1.7, -1.0),
        ((0.5, 2.0), 0.3, 0.7, -1.0),
        ((0.5, 2.0), -1.3, 1.7, 1.0),
        ((-1.0, math.inf), -1.5, -0.5, -1.0),
        ((-1.0, math.inf), 90.0, 90.0, 1.0),
        ((-math.inf, 3.0), 4.0, 2.0, -1.0),
        ((-math.inf, 3.0), -50.0, -50.0, 1.0),
    ],
)
def test_a_parameter_is_reflected_at_its_bounds(bounds, raw, value, slope) -> None:
    transform = Widened()
    transform.bounds = {"width": bounds}
    with torch.no_grad():
        dict(transform.named_parameters())["width"].fill_(raw)
    transform(torch.zeros(1, 1), torch.zeros(1, 1))
    assert transform.width.item() == pytest.approx(value)
    transform.width.backward()
    assert transform.get_parameter("width").grad == slope


def test_a_parameter_with_bounds_can_be_set_and_frozen() -> None:
    class Initialized(Widened):
        def __init__(self) -> None:
            super().__init__()
            nn.init.constant_(self.width, 0.7)

    transform = Initialized()
    assert transform.width.item() == pytest.approx(0.7)
    Averaged(nn.Linear(1, 1), transform, num_samples=2)  # from here on it is reflected
    transform.get_parameter("width").requires_grad_(False)
    assert not transform.width.requires_grad
    transform.get_parameter("width").fill_(2.5)
    assert transform.width.item() == pytest.approx(1.5)


def test_any_optimiser_and_loop_stays_inside_of_the_bounds() -> None:
    for make in (torch.optim.SGD, torch.optim.Adam):
        model = Averaged(nn.Linear(1, 1), Widened(), num_samples=2)
        optimizer = make([dict(model.named_parameters())["invariance.width"]], lr=0.4)
        for _ in range(20):
            optimizer.zero_grad()
            (-model.invariance.width).backward()
            optimizer.step()
            assert 0.5 <= model.invariance.width.item() <= 2.0


def test_the_state_has_the_parameter_itself() -> None:
    transform = Widened(1.5)
    assert transform.state_dict()["width"] == 1.5
    transform.load_state_dict({"width": torch.tensor(2.5)})
    transform(torch.zeros(1, 1), torch.zeros(1, 1))
    assert transform.state_dict()["width"] == 2.5 and transform.width == 1.5


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"widht": (0.0, 1.0)}, "got 'widht'.*Did you mean 'width'"),
        ({"width": (2.0, 1.0)}, "a lower bound and a larger upper bound"),
        ({"width": (-math.inf, math.inf)}, "one of which may be infinite"),
        ({"width": (2.0, 3.0)}, "must start within its bounds .* got 1.0"),
    ],
)
def test_bounds_that_do_not_fit(bounds, words) -> None:
    transform = Widened()
    transform.bounds = bounds
    with pytest.raises(ConfigurationError, match=words):
        Averaged(nn.Linear(1, 1), transform, num_samples=2)
