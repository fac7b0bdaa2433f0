"""Docstrings: each public name has one, their examples run, and the pages that they name exist."""

import doctest
import inspect
import re
from collections.abc import Iterable, Iterator
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
EXTRAS = ("botorch", "cli", "lightning", "sklearn", "transformers")


# Public names with an example in their docstring.
SHOWN = """
    data.Pairs data.Scaling data.load invariances.AdditiveNoise invariances.AffineInvariance
    invariances.Averaged invariances.InputScale invariances.Transform likelihoods.Bernoulli
    likelihoods.Categorical likelihoods.Conditional likelihoods.Gaussian
    likelihoods.HeteroscedasticGaussian likelihoods.KnownNoise
    likelihoods.Joint likelihoods.Likelihood likelihoods.NaturalGaussian
    likelihoods.NegativeBinomial likelihoods.Ordinal likelihoods.Poisson likelihoods.StudentT
    likelihoods.Weighted likelihoods.make_likelihood lightning.EvidenceCallback models.Choices
    plots.learning_curves plots.precision_paths pruning.UnitImportance pruning.importances
    priors.GaussianPrior priors.NormalHyperprior
    sklearn.EvidenceClassifier sklearn.EvidenceRegressor
    transformers.EvidenceCallback
    Anchoring Evidence JointPredictive Laplace Learner Memory Optimization Outputs Posterior
    Predictive Schedule
    botorch.EvidenceModel bracket fit load testing.check_curvature testing.check_likelihood
    testing.check_rule tune
""".split()
# Packages whose public names have guides.
GUIDED = [
    *("", "data", "errors", "invariances", "likelihoods", "models", "plots", "priors", "sklearn"),
    *("botorch", "lightning", "pruning", "testing", "transformers"),
]
# Public names without a guide: types, colors, and functions for other modules.
WITHOUT_GUIDE = """
    Palette Split fixup_scalars make_network new_figure save save_all
""".split()


def imported(name: str) -> ModuleType | None:
    """The module, or None if the extra that it needs is not installed."""
    try:
        return import_module(name)
    except (ImportError, EvigradError):
        if not name.removeprefix("evigrad.").startswith(EXTRAS):
            raise
        return None


def installed(names: Iterable[str]) -> Iterator[tuple[str, ModuleType]]:
    return ((name, module) for name in names if (module := imported(name)) is not None)


def test_public_methods_say_what_they_do() -> None:
    silent = [
        f"{name}.{kind.__name__}.{method}"
        for name, module in installed(MODULES)
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == name and kind.__name__[0] != "_"
        for method, value in vars(kind).items()
        if method[0] != "_"
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(kind, method))
    ]
    assert not silent, "These need a docstring:\n" + "\n".join(silent)


@pytest.mark.parametrize("part", sorted({name.split(".")[1] for name in MODULES}))
def test_examples_run(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the package, and of each of its modules and subpackages."""
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    names = [name for name in [*MODULES, *PACKAGES] if f"{name}.".startswith(f"evigrad.{part}.")]
    if part == "evidence":
        names.append("evigrad")
    modules = list(installed(names))
    if not modules:
        pytest.skip("an extra is not installed")
    for _, module in modules:
        for test in doctest.DocTestFinder(exclude_empty=True).find(module):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                runner.run(test)
    assert runner.failures == 0


def test_public_names_have_examples() -> None:
    without = []
    for name in SHOWN:
        package, _, attribute = f"evigrad.{name}".rpartition(".")
        for _, module in installed([package]):
            if ">>>" not in (inspect.getdoc(getattr(module, attribute)) or ""):
                without.append(name)
    assert not without


def test_public_names_link_their_guide() -> None:
    ends = re.compile(r"See also: docs/\w+\.md\.$")
    for package, module in installed(f"evigrad.{name}".rstrip(".") for name in GUIDED):
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == package
        ]
        docstrings = {
            name: inspect.getdoc(value) or ""
            for name in names
            if callable(value := getattr(module, name)) and name not in WITHOUT_GUIDE
        }
        assert docstrings, package
        missing = [name for name, text in docstrings.items() if not ends.search(text)]
        assert not missing, f"{package}: {missing}"


def test_pages_that_docstrings_name_exist() -> None:
    root = SOURCE.parent
    texts = (file.read_text() for file in SOURCE.rglob("*.py"))
    pages = {page for text in texts for page in re.findall(r"See also: (\S+\.md)", text)}
    assert pages and not [page for page in pages if not (root / page).is_file()]
