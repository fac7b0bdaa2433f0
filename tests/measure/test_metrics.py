import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Schedule, fit
from evigrad.distributed import Ranks
from evigrad.errors import InputError
from evigrad.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from evigrad.measure import evaluate
from evigrad.measure.metrics import _names_of_any_rank


class Ordinal(Likelihood):
    """Four ordered classes by one output: p(y ≤ k|f) = sigmoid(cut_k − f)."""

    name = "ordinal"
    is_classification = True
    cuts = torch.tensor([-2.0, 0.0, 2.0])

    def probabilities(self, f: Tensor) -> Tensor:
        below = (self.cuts.to(f) - f).sigmoid()
        edges = [torch.zeros_like(f), below, torch.ones_like(f)]
        return torch.cat(edges, dim=1).diff(dim=1)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return Ordinal.probabilities(self, f).log().gather(1, y[:, None])[:, 0]

    def hessian(self, f: Tensor) -> Tensor:
        with torch.enable_grad():
            slopes = torch.func.jacrev(lambda g: Ordinal.probabilities(self, g).sum(0))(f)
        slopes = slopes[:, :, 0].T
        return (slopes.square() / Ordinal.probabilities(self, f)).sum(1)[:, None, None]


class WithoutProbabilities(Ordinal):
    name = "ordinal-density"

    def probabilities(self, f: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


class ManyLabels(Bernoulli):
    """Yes-or-no labels with the metrics of every likelihood."""

    def metrics(self, f: Tensor, y: Tensor) -> Mapping[str, Any]:
        return Likelihood.metrics(self, f, y)


class OtherDensity(Categorical):
    """Its inherited probabilities are those of another density."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(-f, y)


def test_classification_by_hand_over_uneven_batches():
    model = nn.Linear(2, 3)
    x = torch.randn(7, 2, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    with torch.no_grad():
        log_p = model(x).log_softmax(1)
    metrics = evaluate(model, Categorical(), (x, y), batch_size=3)
    assert metrics["log_likelihood"] == pytest.approx(float(log_p[torch.arange(7), y].mean()))
    assert metrics["accuracy"] == pytest.approx(float((log_p.argmax(1) == y).double().mean()))
    assert set(metrics) == {"log_likelihood", "accuracy"}


def test_regression_by_hand():
    model = nn.Linear(2, 1)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(5, 1)
    with torch.no_grad():
        squared = model(x).square().sum(1)
    metrics = evaluate(model, Gaussian(noise=0.5), (x, y))
    assert metrics["squared_error"] == pytest.approx(float(squared.mean()), rel=1e-5)
    expected = -0.5 * squared.mean() / 0.25 - math.log(0.5) - 0.5 * math.log(2 * math.pi)
    assert metrics["log_likelihood"] == pytest.approx(float(expected), rel=1e-5)


def test_accuracy_is_that_of_the_probabilities_and_not_of_the_outputs():
    """Ordered classes have one output, whose argmax is always 0."""
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    x, y = torch.tensor([[-3.0], [-1.0], [1.0], [3.0], [9.0]]), torch.tensor([0, 1, 2, 3, 0])
    assert evaluate(model, Ordinal(), (x, y))["accuracy"] == pytest.approx(0.8)
    assert set(evaluate(model, WithoutProbabilities(), (x, y))) == {"log_likelihood"}


def test_accuracy_of_labels_with_a_probability_each():
    model = nn.Linear(2, 3)
    x = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
    y = (torch.arange(24) % 5 < 2).reshape(8, 3)
    assert evaluate(model, ManyLabels(), (x, y)) == evaluate(model, Bernoulli(), (x, y))


def test_no_accuracy_by_the_probabilities_of_another_density():
    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.arange(4) % 3
    assert "accuracy" not in evaluate(nn.Linear(3, 3), OtherDensity(), (x, y))


def test_fit_reports_the_accuracy_of_probabilities():
    x = torch.linspace(-4, 4, 40)[:, None]
    y = (x[:, 0] > -2).long() + (x[:, 0] > 0) + (x[:, 0] > 2)
    schedule = Schedule(epochs=2, batch_size=20)
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    result = fit(model, (x, y), likelihood=Ordinal(), schedule=schedule, progress=False)
    assert result.train_metrics["accuracy"] > 0.8
    assert result.evidence.posterior((x, y))(x).probabilities.shape == (40, 4)
    bare = fit(model, (x, y), likelihood=WithoutProbabilities(), schedule=schedule, progress=False)
    assert "accuracy" not in bare.train_metrics and bare.history[-1]["train_accuracy"] is None


def test_a_fault_in_probabilities_is_told_before_training():
    class Broken(Ordinal):
        def probabilities(self, f: Tensor) -> Tensor:
            raise RuntimeError("no")

    x, y = torch.zeros(6, 1), torch.arange(6) % 4
    schedule = Schedule(epochs=1000)
    with pytest.raises(InputError, match="metrics of Broken, .* raised RuntimeError: no"):
        fit(nn.Linear(1, 1), (x, y), likelihood=Broken(), schedule=schedule, progress=False)


def test_dropout_is_off_and_the_mode_stays():
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(2, 3))
    x, y = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
    first = evaluate(model, Categorical(), (x, y))
    assert first == evaluate(model, Categorical(), (x, y), batch_size=1)
    assert model.training
    assert model[0].training


def test_data_that_do_not_fit():
    model = nn.Linear(2, 3)
    y = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InputError, match="the same number of examples, got 0 and 4"):
        evaluate(model, Categorical(), (torch.ones(0, 2), y))
    with pytest.raises(InputError):
        evaluate(model, Categorical(), (torch.ones(4, 2), y + 3))


def test_names_come_from_a_rank_whose_data_have_targets():
    class Gathering(Ranks):
        def gather(self, tensor):
            return [tensor.new_empty(0), tensor]

    names = ["log_likelihood", "correct"]
    assert _names_of_any_rank(names, Gathering()) == names
    assert _names_of_any_rank([], Gathering()) == []
