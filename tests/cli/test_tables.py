"""Tables of one's own on the command line: network, likelihood and scaling follow from the data."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evigrad.cli import main

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")
pa_csv: Any = pytest.importorskip("pyarrow.csv")
pytest.importorskip("jsonargparse")

SHORT = ("--epochs", "2", "--burn-in", "1", "--every", "1", "--steps", "1", "--no-figures")
SHORT += ("--estimator", "ntk-20-1", "--no-progress")


@pytest.fixture(scope="module")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one table in two files."""
    folder = tmp_path_factory.mktemp("tables")
    random = np.random.RandomState(0)
    area = 50 + 100 * random.rand(60)
    table = pa.table(
        {
            "area": area,
            "town": ["Bern", "Chur", "Genf"] * 20,
            "price": 3000 * area + 1e4 * random.randn(60),
            "stars": random.randint(3, 6, 60),
        }
    )
    pa_csv.write_csv(table, folder / "houses.csv")
    pq.write_table(table, folder / "houses.parquet")
    return folder


def test_an_invariance_is_for_images(houses, capsys):
    arguments = ["train", "--data", str(houses / "houses.csv"), "--target", "price"]
    assert main([*arguments, "--invariance", "rotation"]) == 2
    assert "--invariance and --flip need images, got" in capsys.readouterr().err


def rmse_of(words: str) -> float:
    """The test RMSE of the learned run, which follows two or three other numbers."""
    before = 3 if "as in training" in words else 2
    return float(re.findall(rf"evigrad (?:\S+ ){{{before}}}(\S+)", words)[0])


@pytest.mark.each(1, "suffix", "column")
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("target", "options", "column"),
    [
        ("price", (), "RMSE"),
        ("stars", (), "accuracy"),
        ("stars", ("gaussian",), "RMSE"),
        ("price", ("heteroscedastic",), "RMSE"),
        ("price", ("natural-gaussian",), "RMSE"),
    ],
)
def test_training_on_a_table(houses, tmp_path, capsys, suffix, target, options, column):
    run = tmp_path / "run"
    arguments = ["train", "--data", str(houses / f"houses.{suffix}"), "--target", target, *SHORT]
    arguments += [
        "--run-dir",
        str(run),
        *(word for name in options for word in ("--likelihood", name)),
    ]
    assert main(arguments) == 0
    said = capsys.readouterr()
    words = " ".join(said.out.split())
    assert "; mlp, with" in said.err and f"test {column}" in words
    metrics = json.loads((run / "results.json").read_text())["ntk-20-1"]["test"]
    assert ("accuracy" in metrics) == (column == "accuracy")
    if column == "RMSE":
        mean, deviation = map(
            float, re.findall(r"mean ([\d.e+]+), standard deviation ([\d.e+]+)", words)[0]
        )
        shown = rmse_of(words)
        assert shown == pytest.approx(deviation * metrics["squared_error"] ** 0.5, rel=1e-2)
        assert mean > 3.5 * deviation / 2
        assert f"lower by {np.log(deviation):.1f}"[:-1] in words
    assert "model: mlp" in (run / "config.yaml").read_text()
    assert main(["train", "--resume", str(run)]) == 0
    assert "Nothing is left to do" in capsys.readouterr().err


def test_columns_by_options(houses, tmp_path):
    run = tmp_path / "run"
    arguments = ["train", "--data", str(houses / "houses.csv"), "--target", "price", *SHORT]
    arguments += ["--drop", "town", "--categorical", "stars", "--run-dir", str(run)]
    assert main(arguments) == 0
    configuration = (run / "config.yaml").read_text()
    assert "drop: town" in configuration and "categorical: stars" in configuration


def test_counts_keep_their_units(houses, tmp_path, capsys):
    arguments = ["train", "--data", str(houses / "houses.csv"), "--target", "stars", *SHORT]
    assert main([*arguments, "--likelihood", "poisson", "--run-dir", str(tmp_path / "run")]) == 0
    words = " ".join(capsys.readouterr().out.split())
    metrics = json.loads((tmp_path / "run" / "results.json").read_text())["ntk-20-1"]["test"]
    shown = rmse_of(words)
    assert shown == pytest.approx(metrics["squared_error"] ** 0.5, rel=1e-2)
    assert "test RMSE" in words and "standardized" not in words


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("likelihood", "names"),
    [("negative-binomial", ["likelihood/dispersion"]), ("student-t", ["noise"])],
)
def test_learned_likelihoods_are_in_the_results(houses, tmp_path, likelihood, names):
    arguments = ["train", "--data", str(houses / "houses.csv"), "--target", "stars", *SHORT]
    assert main([*arguments, "--likelihood", likelihood, "--run-dir", str(tmp_path / "run")]) == 0
    run_results = json.loads((tmp_path / "run" / "results.json").read_text())["ntk-20-1"]
    learned = [
        name
        for name in run_results["hyperparameters"]
        if not name.startswith(("precision", "model"))
    ]
    assert learned == names


def test_mistakes_in_the_target(houses, capsys):
    file = str(houses / "houses.csv")
    for arguments, words in (
        (["--data", file], "--target NAME (target=...). The columns are area, town, price, stars"),
        (["--data", file, "--target", "prise"], "Did you mean 'price'?"),
        (["--data", file, "--target", "price", "--model", "digitsnet"], "needs images"),
        (["--data", "digits", "--target", "price"], "is only for tables"),
        (["--data", "digits", "--drop", "price"], "is only for tables"),
        (["--data", file, "--target", "price", "--drop", "twon"], "Did you mean 'town'?"),
        (
            ["--data", file, "--target", "price", "--categorical", "price"],
            "must not name the target",
        ),
    ):
        assert main(["train", *arguments]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
