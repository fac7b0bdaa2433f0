"""Hyperparameters of every likelihood have their names in the history, the files and the report."""

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import evigrad
from evigrad.likelihoods import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Joint,
    Likelihood,
    NaturalGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    Weighted,
)
from evigrad.training.history import read_metrics

pytest.importorskip("matplotlib")
pytest.importorskip("yaml")

from html_pages import Page
from matplotlib.image import imsave

from evigrad.report import write_report

# Likelihood, number of outputs, columns of the history, and words for its settings.
CASES: dict[str, tuple[Likelihood, int, list[str], str]] = {
    "categorical": (Categorical(), 3, [], "Categorical()"),
    "bernoulli": (Bernoulli(), 2, [], "Bernoulli()"),
    "poisson": (Poisson(), 1, [], "Poisson()"),
    "heteroscedastic": (HeteroscedasticGaussian(), 2, [], "HeteroscedasticGaussian()"),
    "natural-gaussian": (NaturalGaussian(), 2, [], "NaturalGaussian()"),
    "gaussian": (Gaussian(0.5), 1, ["noise"], "Gaussian()"),
    "gaussian of each output": (
        Gaussian(num_outputs=2, missing="nan"), 2, ["noise/0", "noise/1"], "missing='nan'"
    ),
    "student-t": (StudentT(0.5, degrees=5), 1, ["noise"], "StudentT(degrees=5)"),
    "negative-binomial": (
        NegativeBinomial(), 1, ["likelihood/dispersion"], "NegativeBinomial()"
    ),
    "ordinal": (
        Ordinal(3), 1, ["likelihood/threshold/0", "likelihood/threshold/1"], "num_classes=3"
    ),
    "weighted": (
        Weighted(NegativeBinomial()), 1, ["likelihood/dispersion"], "Weighted( (likelihood):"
    ),
    "joint": (
        Joint({
            "depth": (1, Gaussian()),
            "stars": (1, Ordinal(3)),
            "visits": (1, NegativeBinomial()),
            "size": (1, StudentT(degrees=7)),
            "kind": (2, Categorical()),
        }),
        6,
        [
            *("likelihood/depth/noise", "likelihood/stars/threshold/0"),
            *("likelihood/stars/threshold/1", "likelihood/visits/dispersion"),
            "likelihood/size/noise",
        ],
        "(size): StudentT(degrees=7)",
    ),
}  # fmt: skip


def test_no_built_in_likelihood_is_left_out() -> None:
    assert LIKELIHOODS.keys() < CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_hyperparameters_have_their_names(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = io.BytesIO()
    imsave(image, np.ones((2, 2)), format="png", cmap="gray")
    monkeypatch.setattr("evigrad.report.write._png", lambda make, palette: image.getvalue())
    likelihood, num_outputs, columns, settings = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x, model = torch.randn(40, 2), nn.Linear(2, num_outputs)
    y = likelihood.sample(torch.zeros(40, num_outputs), torch.Generator().manual_seed(0))
    result = evigrad.fit(
        model, (x, y), likelihood=likelihood, estimator="ntk-20-1", run_dir=tmp_path / "run",
        schedule=evigrad.Schedule(epochs=3, burn_in=1, every=1, steps=2), progress=False,
    )  # fmt: skip
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    for row in (result.history[-1], rows[-1]):
        named = [column for column in row if column.partition("/")[0] in ("noise", "likelihood")]
        assert named == columns
    for column in columns:  # learned, and not only listed
        assert len({row[column] for row in result.history}) > 1
    configuration = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings in configuration["likelihood_settings"]
    text = Page(write_report(tmp_path / "run")).text
    assert settings in text
    for column in columns:
        kind, _, shown = column.partition("/")
        if kind == "noise":
            shown = f"noise of output {shown}" if shown else "noise"
        assert f"{shown} from " in text
