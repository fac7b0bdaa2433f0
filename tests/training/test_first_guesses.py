"""What a newcomer tries first is taken, or refused with what to write instead."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training.small_runs import SMALL

import evigrad
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import Gaussian
from evigrad.training.settings import grouped

N = 24
SETTINGS = grouped(SMALL | {"estimator": "ntk-20-1"})


def net(num_outputs: int = 1, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, num_outputs)).to(dtype)


def table() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def test_a_field_of_a_group_names_the_group() -> None:
    untyped: Any = evigrad
    with pytest.raises(ConfigurationError, match=r"Use schedule=Schedule\(epochs=3\)"):
        untyped.fit(net(), table(), epochs=3)
    with pytest.raises(ConfigurationError, match=r"Use optimization=Optimization\(lr=0.1\)"):
        untyped.tune(net(), table(), lr=0.1)
    with pytest.raises(TypeError, match="epoch"):
        untyped.fit(net(), table(), epoch=3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrays_and_single_targets(dtype: torch.dtype) -> None:
    x, y = (part.to(dtype) for part in table())
    results = []
    for data in (
        (x, y),
        (x, y[:, 0]),
        (x.numpy(), y.numpy()),
        [x.double().numpy(), y[:, 0].double().numpy()],
        list(zip(x, y[:, 0], strict=True)),
    ):
        result = evigrad.fit(net(dtype=dtype), data, test=data, likelihood="gaussian", **SETTINGS)
        results.append({**result.history[-1], **result.test_metrics})
    for other in results[1:]:
        for name, value in results[0].items():
            if "seconds" not in name and value is not None:
                assert other[name] == pytest.approx(value, rel=1e-5), name


def test_single_targets_of_two_outputs() -> None:
    x, y = table()
    result = evigrad.fit(net(2), (x, y[:, 0]), likelihood="heteroscedastic", **SETTINGS)
    assert result.train_metrics["squared_error"] > 0
    with pytest.raises(InputError, match="shape of the outputs"):
        evigrad.fit(net(2), (x, y[:, 0]), likelihood=Gaussian(), **SETTINGS)


def test_two_targets() -> None:
    x, y = table()
    with pytest.raises(InputError, match=r"torch.cat\(\[y1, y2\], dim=1\)"):
        evigrad.fit(net(2), (x, (y, y)), likelihood="gaussian", **SETTINGS)


def test_several_labels() -> None:
    x, y = table()
    labels = torch.cat([y > 0, y < 1], 1).long()
    with pytest.raises(InputError, match='use likelihood="bernoulli"'):
        evigrad.fit(net(2), (x, labels), **SETTINGS)
