"""Yes and no, or one frequent value, as real numbers: a regression fails, and a warning helps."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training.small_runs import SMALL, without_estimator

from evigrad.errors import EvigradWarning
from evigrad.likelihoods import (
    Categorical,
    Gaussian,
    Joint,
    KnownNoise,
    Likelihood,
    StudentT,
    Weighted,
)
from evigrad.training import fit, tune
from evigrad.training.convergence import tail_gain
from evigrad.training.data import RunData
from evigrad.training.settings import grouped

N = 60
SETTINGS = without_estimator(SMALL)


def table(num_values: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    return x, (torch.arange(N) % num_values)[:, None].float() - 0.5


def warnings_of(x: Tensor, y: Any, likelihood: str | Likelihood, num_outputs: int = 1) -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(nn.Linear(3, num_outputs), (x, y), likelihood=likelihood, **grouped(SETTINGS))
    assert all(issubclass(warning.category, EvigradWarning) for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)  # not a file of evigrad
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("likelihood", "num_outputs"), [("gaussian", 1), ("heteroscedastic", 2)])
def test_two_values_are_warned_of_once(likelihood: str, num_outputs: int) -> None:
    (words,) = warnings_of(*table(2), likelihood, num_outputs)
    assert "Column 0 of the targets has only two values." in words
    assert 'likelihood="bernoulli"' in words


def test_two_values_with_heavy_tails_have_one_warning() -> None:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    y = (torch.arange(100) % 10 == 0).float()[:, None]
    y = (y - y.mean()) / y.std()
    assert tail_gain(y) > 0.05
    (words,) = warnings_of(x, y, "gaussian")
    assert "only two values" in words


def test_other_warnings_name_the_caller_too() -> None:
    x, y = table(7)
    (words,) = warnings_of(x, 1000 * y, "gaussian")
    assert "The targets have a standard deviation of" in words
    loader = DataLoader(TensorDataset(x, y), batch_size=7, drop_last=True)
    with pytest.warns(EvigradWarning, match="omits 4 examples") as caught:
        fit(nn.Linear(3, 1), loader, likelihood="gaussian", **grouped(SETTINGS))
    assert [warning.filename for warning in caught] == [__file__]
    softmax = nn.Sequential(nn.Linear(3, 3), nn.Softmax(1))
    with pytest.warns(EvigradWarning, match="outputs are probabilities") as caught:
        fit(softmax, (x, torch.arange(N) % 3), **grouped(SETTINGS))
    assert [warning.filename for warning in caught] == [__file__]


def test_tune_names_its_caller() -> None:
    x, y = table(2)
    with pytest.warns(EvigradWarning, match="only two values") as caught:
        tune(nn.Linear(3, 1), (x, y), likelihood="gaussian", rounds=1, steps=1)
    assert {warning.filename for warning in caught if "two values" in str(warning.message)} == {
        __file__
    }


def test_two_values_with_weights_and_in_a_data_set() -> None:
    x, y = table(2)
    weighted = Weighted(Gaussian())
    (words,) = warnings_of(x, weighted.targets(y, torch.ones(N)).float(), weighted)
    assert "only two values" in words
    with pytest.warns(EvigradWarning, match="only two values"):
        fit(
            nn.Linear(3, 1),
            list(zip(x, y, strict=True)),
            likelihood="gaussian",
            **grouped(SETTINGS),
        )
    both = torch.cat([torch.randn(N, 1, generator=torch.Generator().manual_seed(1)), y], 1)
    (words,) = warnings_of(x, both, "gaussian", 2)
    assert "Column 1" in words


def test_other_targets_are_left_alone() -> None:
    x, y = table(7)
    assert not warnings_of(x, y, "gaussian")
    assert not warnings_of(x, y.clamp(max=-0.5), "gaussian")  # one value
    assert not warnings_of(x[:3], table(2)[1][:3], "gaussian")  # one value is there once
    rare = table(2)[1]
    rare = torch.cat([rare, rare, rare])
    rare[91] = 0.7  # which is not among the hundred that are looked at first
    assert not warnings_of(torch.cat([x, x, x]), rare, "gaussian")


def test_a_handful_of_values_and_counts_are_warned_of() -> None:
    x, y = table(4)
    (words,) = warnings_of(x, y, "gaussian")
    assert "has only 4 different values" in words and 'likelihood="categorical"' in words
    x, y = table(12)
    (words,) = warnings_of(x, (y + 0.5) / 2 * 2, "gaussian")
    assert "whole numbers from 0 to 11" in words and 'likelihood="poisson"' in words
    assert not warnings_of(x, y, "gaussian")  # halves are not counts
    assert not warnings_of(x, torch.randn(N, 1), "gaussian")


def of_zeros(share: float, rows: int = 200) -> tuple[Tensor, Tensor]:
    """Return targets with heavy tails, and zeros in a share of the rows."""
    x, y = torch.randn(2, rows, 1, generator=torch.Generator().manual_seed(0)).unbind()
    return x.expand(rows, 3), torch.where(torch.arange(rows)[:, None] % 100 < 100 * share, 0.0, y)


@pytest.mark.parametrize("likelihood", [Gaussian(), StudentT(), KnownNoise()], ids=type)
def test_a_frequent_value_is_warned_of_once(likelihood: Likelihood) -> None:
    x, y = of_zeros(0.55)
    y = y**3
    assert tail_gain(y) > 0.05  # but Student's t is not the advice
    if isinstance(likelihood, KnownNoise):
        y = likelihood.targets(y, noise=0.1)
    (words,) = warnings_of(x, y, likelihood)
    assert "Column 0 of the targets has the value 0 in 55 % of the rows." in words
    assert 'likelihood="heteroscedastic"' in words and "student-t" not in words


def test_rare_values_and_few_rows_are_left_alone() -> None:
    x, y = of_zeros(0.55)
    assert not warnings_of(x, y, "heteroscedastic", 2)
    assert not warnings_of(x[:15], y[45:60], "gaussian")  # a few rows
    for share in (0.15, 0.2):
        assert not warnings_of(*of_zeros(share), "gaussian")


def test_all_rows_decide_whether_a_value_is_frequent() -> None:
    x, y = of_zeros(0.0)
    data = RunData((x, torch.arange(len(x))[:, None]), torch.device("cpu"), 0)
    sampled = data.spread(100)[1].flatten()
    y[sampled[:15]] = 0.25
    assert not warnings_of(x, y, "gaussian")
    y[:60] = 0.25
    y[sampled[15:]] = torch.linspace(1.0, 2.0, len(sampled) - 15)[:, None]
    assert 0.2 < float((y == 0.25).float().mean())
    (words,) = warnings_of(x, y, "gaussian")
    assert "has the value 0.25 in" in words
    (words,) = warnings_of(*of_zeros(0.97, 500), "gaussian")  # a sample has few other values
    assert "has the value 0 in 97 % of the rows" in words


def test_heads_and_conditional_targets_are_looked_at() -> None:
    x, y = table(2)
    y[::7] = torch.nan  # missing targets do not hide the two values
    joint = Joint({"kind": (2, Categorical()), "flag": (1, Gaussian(missing="nan"))})
    targets = joint.targets({"kind": torch.arange(N) % 2, "flag": y})
    (words,) = warnings_of(x, targets, joint, 3)
    assert "Column 0 of the targets of 'flag' has only two values." in words
    targets = joint.targets({"kind": torch.arange(N) % 2, "flag": 1000 * x[:, :1]})
    (words,) = warnings_of(x, targets, joint, 3)
    assert words.startswith("The targets of 'flag' have a standard deviation of")
    known_noise = KnownNoise()
    (words,) = warnings_of(x, known_noise.targets(table(2)[1], noise=0.1), known_noise)
    assert "Column 0 of the targets has only two values." in words
    assert not warnings_of(x, known_noise.targets(x[:, :1], noise=torch.arange(N) % 2), known_noise)
