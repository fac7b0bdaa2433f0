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
    small_case = case("gaussian")
    posterior = small_case.evidence.posterior(small_case.train, structure=structure)
    expected = posterior(small_case.test)
    file = io.BytesIO()
    torch.save(posterior.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = case("gaussian")  # the same weights
    other.evidence.prior.load_state_dict(small_case.evidence.prior.state_dict())
    other.evidence.likelihood.get_parameter("log_noise").data += 1.0  # kept in the state
    fresh = other.evidence.posterior(state=state)
    taken = other.evidence.posterior(small_case.train, structure=structure)
    assert not torch.equal(taken(small_case.test).std, expected.std)
    taken.load_state_dict(state)
    for prediction in (fresh(small_case.test), taken(small_case.test)):
        assert torch.equal(prediction.mean, expected.mean)
        assert torch.equal(prediction.covariance, expected.covariance)
        assert torch.equal(prediction.std, expected.std)
        assert torch.equal(prediction.sample(3), expected.sample(3))


def test_later_hyperparameters_do_not_matter_and_later_weights_are_refused():
    small_case = case("gaussian")
    posterior = small_case.evidence.posterior(small_case.train, structure="full")
    expected, state = posterior(small_case.test), posterior.state_dict()
    small_case.lower_precisions(1.0)
    small_case.evidence.likelihood.get_parameter("log_noise").data += 1.0
    prediction = posterior(small_case.test)
    assert torch.equal(prediction.std, expected.std)
    weight = small_case.weights["4.bias"]
    kept = weight.detach().clone()
    weight.data += 0.1
    for refused in (
        lambda: posterior(small_case.test),
        lambda: posterior.load_state_dict(state),
        lambda: small_case.evidence.posterior(state=state),
    ):
        with pytest.raises(
            ConfigurationError, match="have changed since the posterior was made: '4.bias'"
        ):
            refused()
    weight.data = kept
    assert torch.equal(posterior(small_case.test).std, expected.std)


def test_settings_that_do_not_exist_or_fit():
    small_case = case(structure="diagonal")
    posterior = small_case.evidence.posterior
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"structure": "kronecker"}, "structure must be one of kfac, last-layer, diag, full, ntk"),
        ({"structure": "full", "rows": 5}, "Omit rows"),
        ({"structure": "ntk", "rows": 0}, "rows must be a positive integer"),
        ({"structure": "kfac"}, "varies within"),
        ({"state": {}}, "or state"),
    )
    for options, words in refused:
        with pytest.raises(ConfigurationError, match=words):
            posterior(small_case.train, **options)
    with pytest.raises(ConfigurationError, match="needs either the data or state"):
        posterior()
    with pytest.raises(ConfigurationError, match="is not the result of posterior.state_dict"):
        posterior(state={})
    diagonal = posterior(small_case.train, structure="diag")
    with pytest.raises(ConfigurationError, match="link must be one of monte-carlo"):
        diagonal(small_case.test, link="mackay")
    with pytest.raises(ConfigurationError, match="n must be"):
        diagonal.sample(small_case.test, 0)
    with pytest.raises(ConfigurationError, match="must come from a 'diag' posterior"):
        diagonal.load_state_dict(posterior(small_case.train, structure="full").state_dict())
    with pytest.raises(ConfigurationError, match="lacks covariance"):
        diagonal.load_state_dict(
            {k: v for k, v in diagonal.state_dict().items() if k != "covariance"}
        )


@pytest.mark.each(1)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_a_subset_can_count_as_all_data(likelihood, structure):
    """Four copies of the data have the posterior of one copy, as the error recommends."""
    small_case = case(likelihood)
    evidence, (x, y) = small_case.evidence, small_case.train
    count = len(x)
    temperature = evidence.temperature
    whole = evidence.with_estimator("kfac-N-C", num_data=4 * count)
    copies = torch.cat([x] * 4), torch.cat([y] * 4)
    with pytest.raises(InputError, match="up to 4 times too large") as caught:
        whole.posterior((x, y), structure=structure)
    words = str(caught.value)
    call = words[words.index("evidence.with_estimator") : words.rindex(".posterior")]
    part = eval(call, {"evidence": whole})
    assert part.temperature == pytest.approx(temperature / 4)
    expected = whole.posterior(copies, structure=structure)(small_case.test)
    ours = part.posterior((x, y), structure=structure)(small_case.test)
    assert torch.allclose(ours.covariance, expected.covariance, rtol=1e-6)
    assert torch.allclose(ours.mean, expected.mean)
    assert torch.allclose(ours.variance, expected.variance, rtol=1e-6)


def test_data_that_do_not_fit_change_nothing():
    small_case = case()
    x, y = small_case.train
    before = small_case.evidence.generator.get_state()
    with pytest.raises(InputError, match="num_data is 9"):
        small_case.evidence.posterior((x[:4], y[:4]), structure="full")
    with pytest.raises(InputError, match="outside 0"):
        small_case.evidence.posterior((x, y + 2), structure="full")
    assert torch.equal(small_case.evidence.generator.get_state(), before)
    posterior = small_case.evidence.posterior(small_case.train, structure="full")
    with pytest.raises(InputError, match="given 3 examples of shape"):
        posterior(small_case.test[:, :, :3])
    with pytest.raises(InputError, match="NaN"):
        posterior(small_case.test * torch.nan)


def test_inputs_with_other_outputs_are_refused():
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.mT).squeeze(2)[:, 1:]

    small_case = case("bernoulli", model=Ends())
    posterior = small_case.evidence.posterior(small_case.train, structure="full")
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
    for weight, other in zip(named.weights.values(), plain.weights.values(), strict=True):
        weight.data = other.detach().clone()
    (x, y), mask = named.train, torch.ones(len(named.train[0]), 1, 4)
    mask[0, 0, 0] = 0.0
    expected = plain.evidence.posterior((x * mask, y), structure=structure)(plain.test)
    posterior = named.evidence.posterior(({"values": x, "mask": mask}, y), structure=structure)
    prediction = posterior({"values": plain.test, "mask": torch.ones_like(plain.test)})
    torch.testing.assert_close(prediction.covariance, expected.covariance)
    torch.testing.assert_close(prediction.mean, expected.mean)


def test_a_matrix_that_does_not_fit_names_smaller_ones(monkeypatch):
    small_case = case()
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 20_000)
    with pytest.raises(MemoryBudgetError, match=r"over 33 weights .* GiB .* 'last-layer'"):
        small_case.evidence.posterior(small_case.train, structure="full")
    small_case.evidence.posterior(small_case.train, structure="diag")


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_does_not_fit_is_not_recommended(structure, monkeypatch):
    small_case = case()
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 100)
    with pytest.raises(MemoryBudgetError, match=f"posterior '{structure}'") as caught:
        small_case.evidence.posterior(small_case.train, structure=structure)
    advice = str(caught.value).rsplit("Use ", 1)[1]
    assert f"'{structure}'" not in advice
    assert "blockdiag" not in str(caught.value)  # an estimator's


@pytest.mark.parametrize("structure", ["last-layer", "full"])
def test_a_matrix_that_takes_minutes_is_warned_of_before_the_work(structure, monkeypatch):
    small_case = case()
    monkeypatch.setattr(of_posterior, "_seconds_per_operation", lambda *_: 1.0)
    monkeypatch.setattr(of_posterior, "collect", lambda *_: pytest.fail("the work began"))
    weights = {"last-layer": 21, "full": 33}[structure]
    words = rf"'{structure}' over {weights} weights takes about .* seconds .*'kfac'"
    with pytest.raises(EvigradWarning, match=words), warnings.catch_warnings():
        warnings.simplefilter("error")
        small_case.evidence.posterior(small_case.train, structure=structure)
    monkeypatch.undo()
    small_case.evidence.posterior(small_case.train, structure=structure)  # without a warning


def test_a_posterior_shares_the_model_and_copies_as_one():
    small_case = case()
    posterior = small_case.evidence.posterior(small_case.train, structure="full")
    assert repr(posterior) == "Posterior('full', weights=33, num_outputs=3)"
    again = copy.deepcopy(posterior)
    assert torch.equal(again(small_case.test).covariance, posterior(small_case.test).covariance)
