"""What is imported when: the public names on first use, PyTorch not before."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import evigrad

PACKAGE = Path(evigrad.__file__).parent


def run_fresh(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", f"import sys\n{code}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_does_not_wait_for_pytorch():
    pytest.importorskip("jsonargparse")
    code = """
from evigrad.cli import main
for words in ([], ["--help"], ["--version"], ["train", "--help"]):
    assert main(words) == 0
assert main(["trian"]) == 2
assert not {"torch", "numpy", "jsonargparse"} & set(sys.modules)
"""
    assert run_fresh(code).count("usage: evigrad") == 3


def test_a_name_is_imported_when_it_is_used():
    code = """
import evigrad
assert set(evigrad.__all__) < set(dir(evigrad)) and issubclass(evigrad.EvigradError, Exception)
assert "torch" not in sys.modules
assert evigrad.invariances.Averaged and evigrad.likelihoods.Categorical and evigrad.priors
from evigrad import *
assert all(globals()[name] is getattr(evigrad, name) for name in evigrad.__all__)
assert fit.__module__ == "evigrad.training.fit" and "fit" in vars(evigrad)
assert "sklearn" not in sys.modules and "pandas" not in sys.modules
sys.modules["sklearn"] = None
try:
    import evigrad.sklearn
except evigrad.EvigradError as error:
    assert "pip install 'evigrad[sklearn]'" in str(error)
else:
    raise AssertionError
"""
    run_fresh(code)


def test_what_a_type_checker_sees_is_what_there_is():
    statements = ast.parse((PACKAGE / "__init__.py").read_text()).body
    checked = next(s for s in statements if isinstance(s, ast.If)).body
    imports = [s for s in checked if isinstance(s, ast.ImportFrom)]
    homes = {alias.name: s.module for s in imports for alias in s.names}
    assert homes == vars(evigrad)["_HOMES"] and sorted(homes) == sorted(evigrad.__all__)
    assert not hasattr(evigrad, "fti")
