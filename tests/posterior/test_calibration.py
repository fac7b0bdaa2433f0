"""Predictions of classes after calibration on held-out data."""

import math
from dataclasses import replace

import pytest
import torch
from posterior.cases import case

from evigrad.errors import ConfigurationError
from evigrad.posterior.calibration import best_scales
from evigrad.posterior.predictive import Predictive
from evigrad.sklearn import EvidenceClassifier


def test_the_scales_maximize_the_held_out_log_likelihood():
    generator = torch.Generator().manual_seed(0)
    outputs = 6.0 * torch.randn(400, 3, generator=generator).double()
    y = (outputs / 3.0).softmax(1).multinomial(1, generator=generator).squeeze(1)
    likelihood = case("categorical").evidence.likelihood
    prediction = Predictive(outputs, torch.eye(3).double().expand(400, 3, 3), likelihood)

    def value(a: float, c: float) -> float:
        scaled = replace(prediction, outputs=a * outputs, covariance=c * prediction.covariance)
        return float(scaled.log_prob(y).mean())

    a, c = best_scales(prediction, y)
    assert 0.2 < a < 0.6  # the labels are drawn at a third of the outputs
    best = value(a, c)
    assert all(best >= value(a * s, c * t) - 1e-6 for s in (0.9, 1, 1.1) for t in (0.8, 1, 1.2))


@pytest.mark.parametrize("structure", ["ntk", "kfac", "diag", "full", "last-layer"])
def test_all_predictions_have_the_scales(structure, monkeypatch):
    monkeypatch.setattr("evigrad.posterior.posterior.best_scales", lambda *_: (0.5, 4.0))
    small_case = case("categorical")
    x, posterior = (
        small_case.test,
        small_case.evidence.posterior(small_case.train, structure=structure),
    )
    calibrated, before = posterior.calibrate(x, torch.zeros(len(x))), posterior.joint(x)
    assert torch.allclose(calibrated(x).outputs, 0.5 * posterior(x).outputs)
    assert torch.allclose(calibrated(x).covariance, 4.0 * posterior(x).covariance)
    joint = calibrated.joint(x)
    assert torch.allclose(joint.covariance, 4.0 * before.covariance)
    expected = 0.5 * before.mean + 2.0 * (before.sample(4, 0) - before.mean)
    assert torch.allclose(joint.sample(4, 0), expected)
    again = small_case.evidence.posterior(state=calibrated.state_dict())
    assert torch.equal(again(x).outputs, calibrated(x).outputs)
    with pytest.raises(ConfigurationError, match="do not belong to weights"):
        calibrated.sample_weights(1)


def test_only_classes_are_calibrated():
    small_case = case("gaussian")
    posterior = small_case.evidence.posterior(small_case.train, structure="diag")
    with pytest.raises(ConfigurationError, match="calibrate needs a classification"):
        posterior.calibrate(*small_case.train)


def test_a_classifier_trains_without_the_rows_that_calibrate_it():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator).numpy()
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).astype(int)
    options = {"hidden_layer_sizes": (4,), "epochs": 5, "random_state": 0}
    classifier = EvidenceClassifier(calibrate=0.25, **options).fit(x, y)
    assert classifier.result_.evidence.num_data == 60
    assert math.isclose(classifier.predict_proba(x).sum(), 80, rel_tol=1e-5)
    assert classifier.posterior_ is not None
    assert classifier.posterior_.structure == "kfac"
    with pytest.raises(ConfigurationError, match="calibrate must be a share"):
        EvidenceClassifier(calibrate=1.5, **options).fit(x, y)
