"""Docstrings: each public name has one, their examples run, and the pages that they name exist."""

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from evigrad.errors import EvigradError

SOURCE = Path(__file__).parents[1] / "src"
MODULES = sorted(
    ".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in SOURCE.rglob("[!_]*.py")
)
PACKAGES = sorted(
    ".".join(file.parent.relative_to(SOURCE).parts) for file in SOURCE.rglob("__init__.py")
)
# What these need is installed by an extra.
EXTRAS = ("cli", "lightning", "sklearn", "transformers")


# Public names with an example in their docstring.
SHOWN = """
    data.Pairs data.Scaling data.load invariances.AdditiveNoise invariances.AffineInvariance
    invariances.Averaged invariances.InputScale invariances.Transform likelihoods.Bernoulli
    likelihoods.Categorical likelihoods.Conditional likelihoods.Gaussian
    likelihoods.HeteroscedasticGaussian likelihoods.KnownNoise
    likelihoods.Joint likelihoods.Likelihood likelihoods.NaturalGaussian
    likelihoods.NegativeBinomial likelihoods.Ordinal likelihoods.Poisson likelihoods.StudentT
    likelihoods.Weighted likelihoods.make_likelihood lightning.EvidenceCallback models.Choices
    plots.learning_curves plots.precision_paths priors.GaussianPrior priors.NormalHyperprior
    sklearn.EvidenceClassifier sklearn.EvidenceRegressor
    transformers.EvidenceCallback
    Anchoring Evidence Laplace Learner Memory Optimization Outputs Posterior Predictive Schedule
    bracket fit load tune
""".split()
# Public names without a guide: types, colors, and functions for other modules.
WITHOUT_GUIDE = """
    Palette Split fixup_scalars make_network new_figure save save_all
""".split()


def imported(name: str) -> ModuleType:
    try:
        return import_module(name)
    except (ImportError, EvigradError):
        if not name.removeprefix("evigrad.").startswith(EXTRAS):
            raise
        pytest.skip("an extra is not installed")


@pytest.mark.parametrize("name", MODULES)
def test_public_methods_say_what_they_do(name: str) -> None:
    module = imported(name)
    classes = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == name and kind.__name__[0] != "_"
    ]
    silent = [
        f"{kind.__name__}.{method}"
        for kind in classes
        for method, value in vars(kind).items()
        if method[0] != "_"
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(kind, method))
    ]
    assert not silent


@pytest.mark.parametrize("name", [*MODULES, *PACKAGES])
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    for test in doctest.DocTestFinder(exclude_empty=True).find(imported(name)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            runner.run(test)
    assert runner.failures == 0


@pytest.mark.parametrize("name", SHOWN)
def test_public_names_have_examples(name: str) -> None:
    package, _, own_name = f"evigrad.{name}".rpartition(".")
    assert ">>>" in (inspect.getdoc(getattr(imported(package), own_name)) or "")


@pytest.mark.parametrize(
    "package",
    ["", *"data errors invariances likelihoods models plots priors sklearn".split()]
    + ["lightning", "transformers"],
)
def test_public_names_link_their_guide(package: str) -> None:
    module = imported(f"evigrad.{package}".rstrip("."))
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    docstrings = {
        name: inspect.getdoc(value) or ""
        for name in names
        if callable(value := getattr(module, name)) and name not in WITHOUT_GUIDE
    }
    ends = re.compile(r"See also: docs/\w+\.md\.$")
    assert docstrings and not [name for name, text in docstrings.items() if not ends.search(text)]


def test_pages_that_docstrings_name_exist() -> None:
    root = SOURCE.parent
    texts = (file.read_text() for file in SOURCE.rglob("*.py"))
    pages = {page for text in texts for page in re.findall(r"See also: (\S+\.md)", text)}
    assert pages and not [page for page in pages if not (root / page).is_file()]
