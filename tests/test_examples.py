"""The scripts in ``examples/`` and the first experiments, in a short form and to their end."""

import importlib.util
import json
import math
from pathlib import Path
from statistics import fmean
from types import ModuleType

import pytest

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parent.parent / "examples"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("sequences")
    short = "--subset 20 --epochs 3 --estimator ntk-10-1 --judge ntk-10-1".split()
    learned = script.main(short)
    printed = capsys.readouterr().out
    assert set(learned) == {"transformer", "gru"}
    assert "8 x linear" in printed and "generic" not in printed
    for name, result in learned.items():
        assert printed.count(f"\n{name} ") >= 2
        values = result.model.get_submodule(script.TASKS[name].hyperparameter)().detach()
        assert values.isfinite().all()
        assert all(abs(math.log(w.precision)) > 1e-4 for w in result.evidence.describe())


def test_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    found = load_script("fine_tuning").main("--epochs 4 --old-epochs 2 --subset 30".split())
    assert capsys.readouterr().out.count("initial ") == 4
    assert all(math.isfinite(value) for values in found.values() for value in values)


@pytest.mark.long
def test_fine_tuning_gains_by_the_mean() -> None:
    means = {name: fmean(values) for name, values in load_script("fine_tuning").main([]).items()}
    assert means["initial"] >= means["zero"] + 0.01


@pytest.mark.long
def test_sequences_converge() -> None:
    for result in load_script("sequences").main([]).values():
        assert result.test_metrics["accuracy"] >= 0.9
        assert result.test_metrics["log_likelihood"] >= -0.4


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ahead", "accuracy"), [("mnist5k", 0.05, 0.93), ("digits", -0.01, 0.97)]
)
def test_the_first_experiments_show_learning_ahead_of_map_or_level(
    name: str, ahead: float, accuracy: float, tmp_path: Path
) -> None:
    pytest.importorskip("jsonargparse")
    pytest.importorskip("mlxtend")
    from evigrad.cli import main

    config = EXAMPLES.parent / "experiments" / f"{name}.yaml"
    run = ["train", "--config", str(config), "--run-dir", str(tmp_path / name), "--no-progress"]
    assert main(run) == 0
    results = json.loads((tmp_path / name / "results.json").read_text())
    fixed, learned = (results[method]["test"] for method in results)
    assert learned["log_likelihood"] >= fixed["log_likelihood"] + ahead
    assert learned["accuracy"] >= accuracy
