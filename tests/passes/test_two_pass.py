"""The gradient in two passes against its twin, one graph over the whole block."""

import copy
import warnings
from typing import Any

import pytest
import torch
from likelihood_zoo import targets
from torch import Tensor, nn
from zoo import CASES, HYPERPARAMETERS, OUTPUTS

from benchmarks.one_graph import OneGraph
from evigrad import Evidence, Memory
from evigrad.errors import EvigradWarning, InputError
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.likelihoods import Categorical, Likelihood
from evigrad.priors import GaussianPrior

TOLERANCE = 1e-10
M = 7


def evidence_of(model: nn.Module, likelihood: Likelihood, estimator: str, **settings: Any):
    names = [n for n in (*HYPERPARAMETERS, "invariance") if hasattr(model, n)]
    prior = settings.pop("prior", "layerwise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EvigradWarning)  # of normalization layers
        return settings.pop("kind", Evidence)(
            model,
            likelihood,
            GaussianPrior(prior, precision=settings.pop("precision", 0.7)),
            estimator=estimator,
            num_data=settings.pop("num_data", 2 * M),
            hyperparameters=names,
            generator=3,
            **settings,
        )


def result(evidence: Evidence, x: Any, y: Any) -> tuple[list[float], dict[str, Tensor]]:
    estimate = evidence.backward(x, y)
    gradients = {}
    for name, p in evidence.hyperparameters().items():
        assert p.grad is not None
        gradients[name], p.grad = p.grad, None
    numbers = [estimate.log_evidence, estimate.log_likelihood, estimate.log_det]
    return numbers, gradients


def assert_twins(
    model: nn.Module,
    likelihood: Likelihood,
    x: Tensor,
    estimator: str,
    micro_batches: tuple[int | None, ...] = (3,),
    tolerance: float = TOLERANCE,
    **settings: Any,
) -> None:
    """Value and gradients of both, from the same draws, norm-wise per tensor.

    In micro-batches of 3, 3 and 1 data, as a rule. test_two_pass_pairs.py has all the choices.
    """
    y = targets(likelihood, len(x))
    twin = evidence_of(model, copy.deepcopy(likelihood), estimator, kind=OneGraph, **settings)
    numbers, expected = result(twin, x, y)
    assert any(name.startswith("model.") for name in expected)
    # As much as is left of a gradient whose parts cancel.
    floor = 1e-3 * max(float(g.norm()) for g in expected.values())
    for micro_batch in micro_batches:
        evidence = evidence_of(
            model,
            copy.deepcopy(likelihood),
            estimator,
            memory=Memory(micro_batch=micro_batch),
            **settings,
        )
        # What the first one found out about the model, which takes longer than the gradient.
        evidence.load_state_dict({**twin.state_dict(), "generator": evidence.generator.get_state()})
        got_numbers, got = result(evidence, x, y)
        assert got_numbers == pytest.approx(numbers, rel=1e-11)
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            error = float((got[name] - gradient).norm() / gradient.norm().clamp(min=floor))
            assert error < tolerance, f"{name}, micro-batches of {micro_batch}: {error:.1e}"


@pytest.mark.parametrize(
    ("structure", "outputs", "root"),
    [
        (structure, outputs, ("subblock", "fisher", "eigen")[(i + j) % 3])
        for i, structure in enumerate(("ntk", "kfac", "blockdiag"))
        for j, outputs in enumerate(("2", "rows"))
    ],
)
def test_outputs_that_the_pairs_leave_out(structure: str, outputs: str, root: str) -> None:
    model, x = CASES["conv2d"].build(M)
    assert_twins(model, Categorical(), x, f"{structure}-{M}-{outputs}", root=root)


@pytest.mark.each(1)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "linear-leading"])
def test_both_kinds_of_sharing(name: str, sharing: str) -> None:
    model, x = CASES[name].build(M)
    assert_twins(model, Categorical(), x, f"kfac-{M}-1", sharing=sharing)


# ------------------------------------------------------------------ random transforms


def convolutional() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(3, 4, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(4 * 9, OUTPUTS),
        ).double()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_random_transforms_and_sharing(sharing: str) -> None:
    model = Averaged(convolutional(), AffineInvariance(), num_samples=3).double()
    x = torch.randn(M, 1, 7, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert_twins(model, Categorical(), x, "kfac-7-1", sharing=sharing)


def test_transforms_do_not_depend_on_the_size_of_micro_batches() -> None:
    model = Averaged(convolutional(), AffineInvariance(), num_samples=2).double()
    x = torch.randn(M, 1, 7, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = targets(Categorical(), M)
    values = {
        evidence_of(model, Categorical(), "ntk-7-1", memory=Memory(micro_batch=size))
        .estimate(x, y)
        .log_evidence
        for size in (2, 5)
    }
    assert max(values) == pytest.approx(min(values), rel=1e-12)
    other = evidence_of(model, Categorical(), "ntk-7-1")
    first, second = other.estimate(x, y).log_evidence, other.estimate(x, y).log_evidence
    assert abs(first - second) > 1e-6  # each estimate draws anew


# ------------------------------------------------------------------ what comes in batches


def batches_of(x: Tensor, y: Tensor, size: int = 3) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", ["ntk-N-1", "kfac-N-C", "ntk-N-1-iid"])
@pytest.mark.parametrize("kind", ["list", "iterator"])
def test_all_the_data_in_batches(estimator: str, kind: str) -> None:
    model, x = CASES["linear"].build(M)
    y = targets(Categorical(), M)
    numbers, expected = result(
        evidence_of(model, Categorical(), estimator, num_data=M, kind=OneGraph), x, y
    )
    batches = batches_of(x, y)
    evidence = evidence_of(model, Categorical(), estimator, num_data=M)
    got_numbers, got = result(evidence, iter(batches) if kind == "iterator" else batches, None)
    assert got_numbers == pytest.approx(numbers, rel=1e-11)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)


def test_batches_that_change_between_the_passes_are_refused() -> None:
    class Shuffled:
        def __init__(self, batches: list[tuple[Tensor, Tensor]]) -> None:
            self.batches = batches

        def __iter__(self):
            self.batches = self.batches[1:] + self.batches[:1]
            return iter(self.batches)

    model, x = CASES["linear"].build(6)
    evidence = evidence_of(model, Categorical(), "ntk-N-1", num_data=6)
    before = evidence.generator.get_state()
    with pytest.raises(InputError, match="Switch off shuffling"):
        evidence.backward(Shuffled(batches_of(x, targets(Categorical(), 6))))
    assert all(p.grad is None for p in evidence.hyperparameters().values())
    assert torch.equal(before, evidence.generator.get_state())


# ------------------------------------------------------------------ how rows are kept


def test_rows_in_bfloat16_and_elsewhere() -> None:
    model, x = CASES["conv2d"].build(M)
    y = targets(Categorical(), M)

    def kept(**settings: Any) -> tuple[list[float], dict[str, Tensor]]:
        memory = Memory(micro_batch=3, **settings)
        return result(evidence_of(model, Categorical(), "ntk-7-1", memory=memory), x, y)

    exact, host = kept(), kept(rows_device="cpu")
    assert host[0] == exact[0]
    half = kept(rows_dtype=torch.bfloat16)
    assert half[0] == pytest.approx(exact[0], rel=1e-2)
    assert half[0] != exact[0]
    for name, gradient in exact[1].items():
        assert float((half[1][name] - gradient).norm()) < 0.05 * float(gradient.norm()) + 1e-3, name


def test_layers_without_rows() -> None:
    """Wide layers on few data: the Gram and its derivative from inputs and gradients alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)

        class Wide(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate = nn.Parameter(torch.zeros(30))
                self.body = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, OUTPUTS))

            def forward(self, x: Tensor) -> Tensor:  # two positions of each datum
                return self.body(x.unflatten(1, (2, 30)) * self.gate.exp()).mean(1)

        model = Wide().double()
        x = torch.randn(M, 60, dtype=torch.float64)
    for estimator in ("ntk-7-1", "ntk-7-2", "ntk-7-rows"):
        evidence = evidence_of(model, Categorical(), estimator)
        words = {report.name: report.curvature for report in evidence.describe(x)}
        assert "contracted" in words["body.0.weight"]
        assert_twins(model, Categorical(), x, estimator, (1, 3, None))
