"""PyTorch's default device is for the user's own tensors: the evidence works where the model is.

``meta`` stands in for a GPU. A tensor that is made there by mistake holds no numbers, so that its
first use with the model's tensors fails.
"""

import ast
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._device import _device_constructors
from torch.utils.data import DataLoader, TensorDataset

import evigrad
from evigrad import Evidence, Learner, Memory, Optimization, Schedule
from evigrad.errors import EvigradError
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import LIKELIHOODS, Categorical, Gaussian, Likelihood, Weighted
from evigrad.priors import GaussianPrior, NormalHyperprior
from evigrad.training.rounds import why_not_kept

N, SIZE, OUTPUTS = 12, 4, 4
SOURCE = Path(evigrad.__file__).parent
PRIORS: dict[str, Callable[[], GaussianPrior]] = {
    "scalar": lambda: GaussianPrior("scalar", hyperprior=NormalHyperprior()),
    "diagonal": lambda: GaussianPrior("diagonal"),
    "groups": lambda: GaussianPrior({"a": ["0"], "b": ["2"]}, learnable={"a": False}),
    "initial": lambda: GaussianPrior(
        precision=dict.fromkeys(names_of(network()), 2.0), mean="initial"
    ),
}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), device="cpu")


X, LABELS = numbers(N, SIZE), torch.arange(N) % OUTPUTS


# Enough for a worker.
LONGER = numbers(24, SIZE), torch.arange(24) % OUTPUTS


def network() -> nn.Module:
    with torch.device("cpu"), torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(SIZE, 5), nn.Tanh(), nn.Linear(5, OUTPUTS))


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def build(estimator: str, likelihood: Likelihood | None = None, **settings: Any) -> Evidence:
    prior = settings.pop("prior", None) or GaussianPrior(precision=50.0)
    model = settings.pop("model", None) or network()
    likelihood = likelihood or Categorical()
    settings = {"num_data": N, "generator": 0, **settings}
    return Evidence(model, likelihood, prior, estimator=estimator, **settings)


def targets(likelihood: Likelihood) -> Tensor:
    return likelihood.reference_targets(numbers(N, OUTPUTS))[0]


@contextmanager
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def flat(value: Any) -> list[float]:
    if isinstance(value, Tensor):
        return value.detach().double().flatten().tolist()
    if isinstance(value, np.ndarray):
        return value.astype(float).ravel().tolist()
    if isinstance(value, dict):
        return flat(list(value.values()))
    if isinstance(value, list | tuple):
        return [entry for part in value for entry in flat(part)]
    return [float(value)]


def gradients(evidence: Evidence) -> list[Tensor]:
    return [p.grad for p in evidence.hyperparameters().values() if p.grad is not None]


def rounds(evidence: Evidence, data: Any) -> list[Any]:
    """Values and gradients on blocks, on kept passes and of the loss, whose outputs are kept."""
    x, y = data if isinstance(data, tuple) else data[:]
    with torch.random.fork_rng():  # of which a transform draws
        torch.manual_seed(0)
        loss = evidence.map_loss(x, y, indices=torch.arange(len(x), device="cpu"))
    blocks = list(evidence.blocks(data).take(2))
    values = [evidence.backward(block).log_evidence for block in blocks]
    if why_not_kept(evidence, x) is None:
        values.append(evidence.estimate_kept(evidence.collect(blocks[0])).log_evidence)
    return [loss, values, gradients(evidence)]


class Tagger(nn.Module):
    """Scores at each of several places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def of_likelihood(estimator: str, likelihood: Likelihood) -> list[Any]:
    return rounds(build(estimator, likelihood), (X, targets(likelihood)))


def of_weights(noise: Any) -> list[Any]:
    likelihood = Weighted(Gaussian(noise))
    y = likelihood.targets(numbers(N, OUTPUTS), torch.ones(N, device="cpu"))
    return rounds(build("ntk-6-1", likelihood), (X, y))


def of_prior(name: str) -> list[Any]:
    evidence = build("ntk-6-1", prior=PRIORS[name]())
    evidence.load_state_dict(evidence.state_dict())
    return [*rounds(evidence, (X, LABELS)), evidence.weight_decay()]


def of_posterior(structure: str) -> list[Any]:
    evidence = build("ntk-6-1")
    posterior = evidence.posterior((X, LABELS), structure=structure)
    predicted = posterior(X[:3])
    again = evidence.posterior(structure=structure, state=posterior.state_dict())
    return [predicted.probabilities, predicted.epistemic_variance, again(X[:3]).mean]


def of_transform(estimator: str) -> list[Any]:
    with torch.device("cpu"):
        model = nn.Sequential(nn.Flatten(), network())
        model = Averaged(model, AffineInvariance(ranges=0.3, learn=True), num_samples=2)
    evidence = build(estimator, model=model, hyperparameters=["invariance"])
    return rounds(evidence, (numbers(N, 1, 2, 2), LABELS))


def of_worker() -> list[Any]:
    loader = DataLoader(TensorDataset(*LONGER), batch_size=4, num_workers=1)
    evidence = build("ntk-N-1", num_data=len(LONGER[0]))
    return [next(iter(evidence.blocks(loader))).inputs]


def of_fit(folder: Path, **settings: Any) -> list[Any]:
    model = network()
    arguments = {"test": (X, LABELS), "progress": False, "run_dir": folder, **settings}
    every = {"burn_in": 1, "every": 1, "steps": 1} if settings["estimator"] else {}
    schedule = Schedule(epochs=2, batch_size=5, **every)
    result = evigrad.fit(model, (X, LABELS), schedule=schedule, **arguments)
    again = evigrad.fit(network(), (X, LABELS), schedule=schedule, resume=True, **arguments)
    loaded = evigrad.load(folder, network())
    metrics = [result.train_metrics, result.test_metrics, again.test_metrics]
    return [list(model.parameters()), list(loaded.model.parameters()), metrics]


def of_bracket() -> list[Any]:
    evidence = build("ntk-6-1")
    learner = Learner(evidence, (X, LABELS), Schedule(epochs=2, burn_in=1, every=1, steps=2))
    estimates = [learner.step(), learner.step()]
    values = [e.log_evidence for one in estimates if one is not None for e in one.estimates]
    bounds = evigrad.bracket(evidence, (X, LABELS))
    return [values, bounds.lower, bounds.upper]


def of_sklearn() -> list[Any]:
    from evigrad.sklearn import EvidenceClassifier, EvidenceRegressor

    x = X.numpy()
    options: dict[str, Any] = {"random_state": 0, "epochs": 2}
    regressor = EvidenceRegressor(**options).fit(x, numbers(N).numpy())
    classifier = EvidenceClassifier(**options).fit(x, LABELS.numpy())
    return [regressor.predict(x), classifier.predict_proba(x)]


DATA = (X, LABELS)
IN_BATCHES = [(X[:5], LABELS[:5]), (X[5:], LABELS[5:])]
AT_POSITIONS = (X.view(4, 3, SIZE), LABELS.view(4, 3))
# One of each kind; each takes a folder.
CALLS: dict[str, Callable[[Path], Any]] = {
    **{
        name: lambda _, name=name: rounds(build(name), DATA)
        for name in (
            *("ntk-6-2-iid", "ntk-7-rows", "ntk-8-rows-anchored", "ntk-8-C-grouped", "ntk-N-C"),
            *("kfac-N-1-mc", "kfac-6-1-ef", "blockdiag-6-rows", "diag-6-C", "full-6-1"),
        )
    },
    **{
        name: lambda _, name=name: of_likelihood("ntk-6-1", LIKELIHOODS[name]())
        for name in LIKELIHOODS
    },
    "kfac of a likelihood": lambda _: of_likelihood("kfac-N-C", Gaussian()),
    "weights": lambda _: of_weights(torch.full((OUTPUTS,), 0.5, device="cpu")),
    **{f"{name} prior": lambda _, name=name: of_prior(name) for name in PRIORS},
    **{
        f"{structure} posterior": lambda _, structure=structure: of_posterior(structure)
        for structure in ("kfac", "last-layer", "diag", "full", "ntk")
    },
    "micro-batches": lambda _: rounds(build("ntk-N-1", memory=Memory(micro_batch=5)), DATA),
    "rows elsewhere": lambda _: rounds(build("ntk-N-1", memory=Memory(rows_device="cpu")), DATA),
    "items": lambda _: rounds(build("ntk-6-1"), TensorDataset(*DATA)),
    # Not a loader, whose iteration reads a number of its own from the default device.
    "batches": lambda _: build("kfac-N-C").estimate(IN_BATCHES).log_evidence,
    "worker": lambda _: of_worker(),
    "positions": lambda _: rounds(build("ntk-8-rows-anchored", model=Tagger()), AT_POSITIONS),
    "transform": lambda _: of_transform("kfac-6-1"),
    "anchors under a transform": lambda _: of_transform("ntk-8-rows-anchored"),
    "fit": lambda folder: of_fit(folder, estimator="ntk-8-rows-anchored"),
    "fit with optimizers": lambda folder: of_fit(
        folder,
        estimator="kfac-6-1",
        optimization=Optimization(prior_update="adam", optimizer="sgd"),
    ),
    "fit by MAP": lambda folder: of_fit(folder, estimator=None),
    "bracket": lambda _: of_bracket(),
    "scikit-learn": lambda _: of_sklearn(),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::evigrad.errors.EvigradWarning")
def test_calls(name: str, tmp_path: Path) -> None:
    """With another default device the results have numbers, which meta tensors do not."""
    with elsewhere():
        assert all(math.isfinite(number) for number in flat(CALLS[name](tmp_path)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["ntk-6-2-iid", "worker", "fit", "scikit-learn"])
@pytest.mark.filterwarnings("ignore::evigrad.errors.EvigradWarning")
def test_results_do_not_depend_on_the_default_device(name: str, tmp_path: Path) -> None:
    expected = flat(CALLS[name](tmp_path / "one"))
    with elsewhere():
        assert flat(CALLS[name](tmp_path / "other")) == expected
        assert AffineInvariance().fill.is_meta  # as the parameters of every other module


def test_a_model_without_numbers() -> None:
    with elsewhere():
        model = nn.Linear(SIZE, OUTPUTS)
        with pytest.raises(EvigradError, match="meta"):
            build("ntk-6-1", model=model)
        with pytest.raises(EvigradError, match="meta"):
            evigrad.fit(model, (X, LABELS), estimator=None, progress=False)


# ------------------------------------------------------------ in the source


def calls_without_device(tree: ast.AST) -> Iterator[str]:
    """Lines of calls that make a tensor and name no device, but for the state of modules.

    Parameters and buffers begin on the default device, as those of PyTorch's own modules do.
    """
    makers = {function.__name__ for function in _device_constructors()}

    def visit(node: ast.AST, is_state: bool) -> Iterator[str]:
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            package, _, name = function.rpartition(".")
            named = {keyword.arg for keyword in node.keywords} & {"device", None}
            if package == "torch" and name in makers and not named and not is_state:
                yield f"line {node.lineno}: {function}"
            is_state = name in ("Parameter", "register_buffer", "Positive")
        elif isinstance(node, ast.stmt):
            is_state = False
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_state)

    yield from visit(tree, False)


def test_tensors_name_their_device() -> None:
    unnamed = [
        f"{path.relative_to(SOURCE)}, {call}"
        for path in sorted(SOURCE.rglob("*.py"))
        for call in calls_without_device(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not unnamed, "Name the device of these tensors:\n" + "\n".join(unnamed)
