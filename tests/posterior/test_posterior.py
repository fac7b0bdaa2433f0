"""Keeping a posterior, and what is refused."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from posterior.cases import case
from torch import nn

from evigrad.errors import ConfigurationError, EvigradWarning, InputError, MemoryBudgetError
from evigrad.passes import memory
from evigrad.posterior import STRUCTURES
from evigrad.posterior import posterior as of_posterior


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_saved_posterior_predicts_the_same(structure):
    own = case("gaussian")
    posterior = own.evidence.posterior(own.train, structure=structure)
    expected = posterior(own.test)
    file = io.BytesIO()
    torch.save(posterior.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = case("gaussian")  # the same weights
    other.evidence.prior.load_state_dict(own.evidence.prior.state_dict())
    other.evidence.likelihood.get_parameter("log_noise").data += 1.0  # kept in the state
    fresh = other.evidence.posterior(state=state)
    taken = other.evidence.posterior(own.train, structure=structure)
    assert not torch.equal(taken(own.test).std, expected.std)
    taken.load_state_dict(state)
    for found in (fresh(own.test), taken(own.test)):
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.covariance, expected.covariance)
        assert torch.equal(found.std, expected.std)
        assert torch.equal(found.sample(3), expected.sample(3))


def test_later_hyperparameters_do_not_matter_and_later_weights_are_refused():
    own = case("gaussian")
    posterior = own.evidence.posterior(own.train, structure="full")
    expected, state = posterior(own.test), posterior.state_dict()
    own.lower_precisions(1.0)
    own.evidence.likelihood.get_parameter("log_noise").data += 1.0
    found = posterior(own.test)
    assert torch.equal(found.std, expected.std)
    weight = own.weights["4.bias"]
    kept = weight.detach().clone()
    weight.data += 0.1
    for refused in (
        lambda: posterior(own.test),
        lambda: posterior.load_state_dict(state),
        lambda: own.evidence.posterior(state=state),
    ):
        with pytest.raises(
            ConfigurationError, match="have changed since the posterior was made: '4.bias'"
        ):
            refused()
    weight.data = kept
    assert torch.equal(posterior(own.test).std, expected.std)


def test_settings_that_do_not_exist_or_fit():
    own = case(structure="diagonal")
    posterior = own.evidence.posterior
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"structure": "kronecker"}, "structure must be one of kfac, last-layer, diag, full, ntk"),
        ({"structure": "full", "rows": 5}, "Omit rows"),
        ({"structure": "ntk", "rows": 0}, "rows must be a positive integer"),
        ({"structure": "kfac"}, "varies within"),
        ({"state": {}}, "or state"),
    )
    for options, words in refused:
        with pytest.raises(ConfigurationError, match=words):
            posterior(own.train, **options)
    with pytest.raises(ConfigurationError, match="needs either the data or state"):
        posterior()
    with pytest.raises(ConfigurationError, match="is not the result of posterior.state_dict"):
        posterior(state={})
    made = posterior(own.train, structure="diag")
    with pytest.raises(ConfigurationError, match="link must be one of monte-carlo"):
        made(own.test, link="mackay")
    with pytest.raises(ConfigurationError, match="n must be"):
        made.sample(own.test, 0)
    with pytest.raises(ConfigurationError, match="must come from a 'diag' posterior"):
        made.load_state_dict(posterior(own.train, structure="full").state_dict())
    with pytest.raises(ConfigurationError, match="lacks covariance"):
        made.load_state_dict({k: v for k, v in made.state_dict().items() if k != "covariance"})


def test_data_that_do_not_fit_change_nothing():
    own = case()
    x, y = own.train
    before = own.evidence.generator.get_state()
    with pytest.raises(InputError, match="num_data is 9"):
        own.evidence.posterior((x[:4], y[:4]), structure="full")
    with pytest.raises(InputError, match="outside 0"):
        own.evidence.posterior((x, y + 2), structure="full")
    assert torch.equal(own.evidence.generator.get_state(), before)
    posterior = own.evidence.posterior(own.train, structure="full")
    with pytest.raises(InputError, match="given inputs of shape"):
        posterior(own.test[:, :, :3])
    with pytest.raises(InputError, match="NaN"):
        posterior(own.test * torch.nan)


def test_inputs_with_other_outputs_are_refused():
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.mT).squeeze(2)[:, 1:]

    own = case("bernoulli", model=Ends())
    posterior = own.evidence.posterior(own.train, structure="full")
    with pytest.raises(InputError, match="4 outputs for these inputs, but had 3"):
        posterior(torch.ones(2, 1, 5).double())


class Masked(nn.Module):
    """Takes its inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.linear((values * mask).flatten(1))


@pytest.mark.parametrize("structure", ("full", "last-layer", "ntk"))
def test_inputs_may_be_a_tree(structure):
    plain, named = case(model=nn.Sequential(nn.Flatten(), nn.Linear(4, 3))), case(model=Masked())
    for own, other in zip(named.weights.values(), plain.weights.values(), strict=True):
        own.data = other.detach().clone()
    (x, y), mask = named.train, torch.ones(len(named.train[0]), 1, 4)
    mask[0, 0, 0] = 0.0
    expected = plain.evidence.posterior((x * mask, y), structure=structure)(plain.test)
    posterior = named.evidence.posterior(({"values": x, "mask": mask}, y), structure=structure)
    found = posterior({"values": plain.test, "mask": torch.ones_like(plain.test)})
    torch.testing.assert_close(found.covariance, expected.covariance)
    torch.testing.assert_close(found.mean, expected.mean)


def test_a_matrix_that_does_not_fit_names_smaller_ones(monkeypatch):
    own = case()
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 20_000)
    with pytest.raises(MemoryBudgetError, match=r"over 33 weights .* GiB .* 'last-layer'"):
        own.evidence.posterior(own.train, structure="full")
    own.evidence.posterior(own.train, structure="diag")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_does_not_fit_is_not_recommended(structure, monkeypatch):
    own = case()
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 100)
    with pytest.raises(MemoryBudgetError, match=f"posterior '{structure}'") as caught:
        own.evidence.posterior(own.train, structure=structure)
    advice = str(caught.value).rsplit("Use ", 1)[1]
    assert f"'{structure}'" not in advice
    assert "blockdiag" not in str(caught.value)  # an estimator's


@pytest.mark.parametrize("structure", ["last-layer", "full"])
def test_a_matrix_that_takes_minutes_is_warned_of_before_the_work(structure, monkeypatch):
    own = case()
    monkeypatch.setattr(of_posterior, "_seconds_per_operation", lambda *_: 1.0)
    monkeypatch.setattr(of_posterior, "collect", lambda *_: pytest.fail("the work began"))
    weights = {"last-layer": 21, "full": 33}[structure]
    words = rf"'{structure}' over {weights} weights takes about .* seconds .*'kfac'"
    with pytest.raises(EvigradWarning, match=words), warnings.catch_warnings():
        warnings.simplefilter("error")
        own.evidence.posterior(own.train, structure=structure)
    monkeypatch.undo()
    own.evidence.posterior(own.train, structure=structure)  # without a warning


def test_a_posterior_shares_the_model_and_copies_as_one():
    own = case()
    posterior = own.evidence.posterior(own.train, structure="full")
    assert repr(posterior) == "Posterior('full', weights=33, num_outputs=3)"
    again = copy.deepcopy(posterior)
    assert torch.equal(again(own.test).covariance, posterior(own.test).covariance)
