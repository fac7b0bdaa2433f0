"""Transforms of features: scales and noise."""

import math

import pytest
import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError
from evigrad.invariances import AdditiveNoise, Averaged, InputScale


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
    with pytest.raises(ConfigurationError, match="scale="):
        InputScale(3, scale=value)
    with pytest.raises(ConfigurationError, match="level="):
        AdditiveNoise(3, level=value)
