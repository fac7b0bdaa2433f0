"""The scripts in ``examples/`` run, in a short form."""

import importlib.util
import math
from pathlib import Path
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
    short = "--subset 40 --epochs 3 --estimator ntk-20-1 --judge ntk-20-1".split()
    learned = script.main(short)
    printed = capsys.readouterr().out
    assert set(learned) == {"transformer", "gru"}
    assert "8 x linear" in printed and "generic" not in printed
    for name, result in learned.items():
        assert printed.count(f"\n{name} ") >= 2
        values = result.model.get_submodule(script.TASKS[name].hyperparameter)().detach()
        assert values.isfinite().all()
        assert all(abs(math.log(w.precision)) > 1e-4 for w in result.evidence.describe())
