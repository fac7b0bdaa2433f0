import math

import pytest
import torch
from torch import nn

from evigrad.distributed import Ranks
from evigrad.errors import InputError
from evigrad.likelihoods import Categorical, Gaussian
from evigrad.training import evaluate
from evigrad.training.metrics import _names_of_any_rank


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
    with pytest.raises(InputError, match="x holds 0 data and y 4"):
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
