"""PyTorch's default device is for the user's own tensors: the evidence works where the model is.

``meta`` stands in for a GPU. A tensor that is made there by mistake holds no numbers, so that its
first use with the model's tensors fails.
"""

import ast
import warnings
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
from evigrad.errors import EvigradError, EvigradWarning
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import LIKELIHOODS, Categorical, Gaussian, Likelihood, Weighted
from evigrad.priors import GaussianPrior, NormalHyperprior
from evigrad.sklearn import EvidenceClassifier, EvidenceRegressor
from evigrad.training.rounds import why_not_kept

N, SIZE, OUTPUTS = 12, 4, 4
SOURCE = Path(evigrad.__file__).parent
NAMES = [
    *("ntk-6-1", "ntk-6-2-iid", "ntk-7-rows", "ntk-8-rows-anchored", "ntk-8-C-grouped", "ntk-N-C"),
    *(
        "kfac-6-C",
        "kfac-N-1-mc",
        "kfac-6-1-ef",
        "blockdiag-6-1",
        "blockdiag-N-C",
        "blockdiag-6-rows",
    ),
    *("diag-6-C", "diag-N-1", "full-6-1", "full-N-C"),
]
PRIORS: dict[str, Callable[[], GaussianPrior]] = {
    "scalar": lambda: GaussianPrior("scalar", hyperprior=NormalHyperprior()),
    "diagonal": lambda: GaussianPrior("diagonal"),
    "groups": lambda: GaussianPrior({"a": ["0"], "b": ["2"]}, learnable={"a": False}),
    "initial": lambda: GaussianPrior(
        precision=dict.fromkeys(names_of(network()), 2.0), mean="initial"
    ),
}
STRUCTURES = ["kfac", "last-layer", "diag", "full", "ntk"]


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


def assert_same(compute: Callable[[], Any]) -> None:
    """The results are equal with PyTorch's own default device and with another one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvigradWarning)
        expected = compute()
        with elsewhere():
            results = compute()
    assert flat(results) == flat(expected)
    assert flat(expected)


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
        values.append(evidence.estimate(evidence.collect(blocks[0])).log_evidence)
    return [loss, values, gradients(evidence)]


@pytest.mark.parametrize("estimator", NAMES)
def test_names(estimator: str) -> None:
    assert_same(lambda: rounds(build(estimator), (X, LABELS)))


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("estimator", ["ntk-6-1", "kfac-N-C"])
def test_likelihoods(name: str, estimator: str) -> None:
    def compute() -> list[Any]:
        likelihood = LIKELIHOODS[name]()
        return rounds(build(estimator, likelihood), (X, targets(likelihood)))

    assert_same(compute)


@pytest.mark.parametrize("noise", [[0.5, 0.6, 0.7, 0.8], torch.full((OUTPUTS,), 0.5)])
def test_noises_and_weights(noise: Any) -> None:
    def compute() -> list[Any]:
        likelihood = Weighted(Gaussian(noise))
        y = likelihood.targets(numbers(N, OUTPUTS), torch.ones(N, device="cpu"))
        return rounds(build("ntk-6-1", likelihood), (X, y))

    assert_same(compute)


@pytest.mark.parametrize("name", PRIORS)
def test_priors(name: str) -> None:
    def compute() -> list[Any]:
        evidence = build("ntk-6-1", prior=PRIORS[name]())
        evidence.load_state_dict(evidence.state_dict())
        return [*rounds(evidence, (X, LABELS)), evidence.weight_decay()]

    assert_same(compute)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_posteriors(structure: str) -> None:
    def compute() -> list[Any]:
        evidence = build("ntk-6-1")
        posterior = evidence.posterior((X, LABELS), structure=structure)
        predicted = posterior(X[:3])
        again = evidence.posterior(structure=structure, state=posterior.state_dict())
        return [predicted.probabilities, predicted.epistemic_variance, again(X[:3]).mean]

    assert_same(compute)


def test_other_passes() -> None:
    def compute() -> list[Any]:
        settings = [Memory(micro_batch=5), Memory(micro_batch="auto"), Memory(rows_device="cpu")]
        estimates = [rounds(build("ntk-N-1", memory=memory), (X, LABELS)) for memory in settings]
        data = TensorDataset(X, LABELS)
        of_items = rounds(build("ntk-6-1"), data)
        # Not a loader, whose iteration reads a number of its own from the default device.
        batches = [data[:5], data[5:]]
        of_batches = build("kfac-N-C").estimate(batches).log_evidence
        return [estimates, of_items, of_batches]

    assert_same(compute)


class Tagger(nn.Module):
    """Scores at each of several places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("estimator", ["ntk-6-1", "ntk-8-rows-anchored", "kfac-N-C"])
def test_positions(estimator: str) -> None:
    y = LABELS.view(4, 3)
    assert_same(lambda: rounds(build(estimator, model=Tagger()), (X.view(4, 3, SIZE), y)))


def test_workers_of_a_loader() -> None:
    loader = DataLoader(TensorDataset(*LONGER), batch_size=4, num_workers=1)

    def compute() -> list[Any]:
        evidence = build("ntk-N-1", num_data=len(LONGER[0]))
        return [next(iter(evidence.blocks(loader))).inputs]

    assert_same(compute)


@pytest.mark.parametrize("estimator", ["ntk-6-1", "kfac-6-1", "ntk-8-rows-anchored"])
def test_transforms(estimator: str) -> None:
    images = numbers(N, 1, 2, 2)

    def compute() -> list[Any]:
        with torch.device("cpu"):
            model = nn.Sequential(nn.Flatten(), network())
            model = Averaged(model, AffineInvariance(ranges=0.3, learn=True), num_samples=2)
        evidence = build(estimator, model=model, hyperparameters=["invariance"])
        return rounds(evidence, (images, LABELS))

    assert_same(compute)
    with elsewhere():
        assert AffineInvariance().fill.is_meta  # as the parameters of every other module


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "ntk-8-rows-anchored"},
        {"estimator": "kfac-6-1", "optimization": Optimization(prior_update="adam")},
        {"estimator": "ntk-6-1", "optimization": Optimization(optimizer="sgd")},
        {"estimator": None},
    ],
)
def test_fit(settings: dict[str, Any], tmp_path: Path) -> None:
    folders = iter(("one", "other"))

    def compute() -> list[Any]:
        model, folder = network(), tmp_path / next(folders)
        arguments = {"test": (X, LABELS), "progress": False, "run_dir": folder, **settings}
        rounds = {"burn_in": 1, "every": 1, "steps": 1} if settings["estimator"] else {}
        schedule = Schedule(epochs=2, batch_size=5, **rounds)
        result = evigrad.fit(model, (X, LABELS), schedule=schedule, **arguments)
        again = evigrad.fit(network(), (X, LABELS), schedule=schedule, resume=True, **arguments)
        loaded = evigrad.load(folder, network())
        metrics = [result.train_metrics, result.test_metrics, again.test_metrics]
        return [list(model.parameters()), list(loaded.model.parameters()), metrics]

    assert_same(compute)


def test_bracket_and_learner() -> None:
    def compute() -> list[Any]:
        evidence = build("ntk-6-1")
        learner = Learner(evidence, (X, LABELS), Schedule(epochs=2, burn_in=1, every=1, steps=2))
        estimates = [learner.step(), learner.step()]
        values = [e.log_evidence for one in estimates if one is not None for e in one.estimates]
        bounds = evigrad.bracket(evidence, (X, LABELS))
        return [values, bounds.lower, bounds.upper]

    assert_same(compute)


def test_scikit_learn() -> None:
    x, y = X.numpy(), numbers(N).numpy()

    def compute() -> list[Any]:
        options: dict[str, Any] = {"random_state": 0, "epochs": 2}
        regressor = EvidenceRegressor(**options).fit(x, y)
        classifier = EvidenceClassifier(**options).fit(x, LABELS.numpy())
        return [regressor.predict(x), classifier.predict_proba(x)]

    assert_same(compute)


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
