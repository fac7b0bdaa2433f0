"""Passes that are kept: many steps on precisions and noise, each as if on the data themselves."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from likelihood_zoo import RelativeNoise
from torch import Tensor, nn

from evigrad import Evidence, Memory
from evigrad.core.names import STRUCTURES
from evigrad.errors import ConfigurationError, InputError
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.passes.kept import KeptPass
from evigrad.priors import GaussianPrior
from evigrad.training.rounds import why_not_kept

N, OUTPUTS = 10, 3


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, dtype=torch.float64, generator=generator)
    return x, torch.randn(N, OUTPUTS, dtype=torch.float64, generator=generator)


def make(estimator: str, likelihood: Likelihood, **settings: Any) -> Evidence:
    return Evidence(
        settings.pop("model", None) or network(),
        likelihood,
        GaussianPrior(settings.pop("prior", "layerwise"), settings.pop("precision", 0.5)),
        estimator=estimator,
        num_data=N,
        generator=0,
        **settings,
    )


def values_and_gradients(evidence: Evidence, *data: Any) -> tuple[list[float], list[Tensor]]:
    is_kept = isinstance(data[0], KeptPass)
    estimate = (evidence.backward_kept if is_kept else evidence.backward)(*data)
    gradients = []
    for p in evidence.hyperparameters().values():
        assert p.grad is not None
        gradients.append(p.grad)
        p.grad = None
    return [estimate.log_evidence, estimate.log_likelihood, estimate.log_det], gradients


def assert_follows(estimator: str, likelihood: Likelihood, **settings: Any) -> None:
    """Steps of Adam on a kept pass, each compared with the block itself."""
    settings.setdefault("memory", Memory(micro_batch=4))
    evidence = make(estimator, likelihood, **settings)
    block = next(iter(evidence.blocks(data())))
    passes = evidence.collect(block)
    parameters = list(evidence.hyperparameters().values())
    optimizer = torch.optim.Adam(parameters, lr=0.3)
    state = evidence.generator.get_state()
    for _ in range(4):
        evidence.generator.set_state(state)
        numbers, gradients = values_and_gradients(evidence, passes)
        evidence.generator.set_state(state)
        expected_numbers, expected = values_and_gradients(evidence, block)
        assert numbers == pytest.approx(expected_numbers, rel=1e-11)
        assert evidence.estimate_kept(passes).log_evidence == pytest.approx(numbers[0], rel=1e-12)
        for parameter, gradient, block_gradient in zip(
            parameters, gradients, expected, strict=True
        ):
            torch.testing.assert_close(gradient, block_gradient, rtol=1e-9, atol=1e-12)
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


CHOICES = ["N-C", "N-1", "4-1", "4-2", "4-C", "4-1-iid", "7-rows"]


@pytest.mark.each(1)
@pytest.mark.parametrize(
    ("structure", "choice"),  # three structures of each
    [
        (structure, choice)
        for i, structure in enumerate(STRUCTURES)
        for j, choice in enumerate(CHOICES)
        if (i + j) % 5 in (0, 1, 3)
    ],
)
def test_steps_on_precisions_and_one_noise(structure: str, choice: str) -> None:
    assert_follows(f"{structure}-{choice}", Gaussian(0.6), temperature=1.3, log_det_weight=0.4)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_kernel_follows_a_noise_of_each_output(choice: str) -> None:
    assert_follows(f"ntk-{choice}", Gaussian([0.5, 0.5, 1.5]))


@pytest.mark.parametrize("choice", ["N-C", "4-1-iid"])
def test_the_kernel_follows_scales_that_depend_on_the_outputs(choice: str) -> None:
    assert_follows(f"ntk-{choice}", RelativeNoise())


@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
def test_blocks_of_one_output_follow_its_own_noise(structure: str) -> None:
    assert_follows(f"{structure}-4-1", Gaussian(0.5, num_outputs=OUTPUTS))


@pytest.mark.parametrize("prior", ["scalar", "diagonal", {"first": ["0"], "last": ["2"]}])
def test_every_structure_of_prior(prior: Any) -> None:
    assert_follows("ntk-4-2", Gaussian(0.6), prior=prior)
    assert_follows("diag-4-2", Gaussian(0.6), prior=prior)


def test_a_fixed_noise_and_no_noise_at_all() -> None:
    assert_follows("kfac-4-C", Gaussian([0.5, 1.0, 2.0], learnable=False))
    assert_follows("full-4-C", Gaussian([0.5, 1.0, 2.0]))  # fewer rows than weights: it keeps them
    evidence = make("ntk-4-1", Categorical())
    x, _ = data()
    blocks = list(evidence.blocks((x, torch.arange(N) % OUTPUTS)).take(3))
    for block in blocks:
        kept = evidence.estimate_kept(evidence.collect(block))
        assert kept.log_evidence == pytest.approx(evidence.estimate(block).log_evidence, rel=1e-12)


def test_several_passes_are_their_mean() -> None:
    evidence = make("ntk-4-1", Gaussian(0.6))
    blocks = list(evidence.blocks(data()).epoch())[:3]
    passes = [evidence.collect(block) for block in blocks]
    with torch.no_grad():
        for p in evidence.hyperparameters().values():
            p += 0.4
    numbers, gradients = values_and_gradients(evidence, *passes)
    per_block = [values_and_gradients(evidence, block) for block in blocks]
    means = [sum(part) / 3 for part in zip(*(values for values, _ in per_block), strict=True)]
    assert numbers == pytest.approx(means, rel=1e-11)
    for i, gradient in enumerate(gradients):
        torch.testing.assert_close(
            gradient, sum(part[i] for _, part in per_block) / 3, rtol=1e-9, atol=0
        )
    assert evidence.estimate_kept(*passes).log_evidence == pytest.approx(numbers[0], rel=1e-12)


def test_no_pass_through_the_network() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.calls = network(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x)

    model = Counted()
    evidence = make("kfac-4-1", Gaussian(0.6), model=model)
    passes = [evidence.collect(block) for block in evidence.blocks(data()).take(2)]
    model.calls = 0
    for _ in range(3):
        evidence.backward_kept(*passes)
        evidence.estimate_kept(*passes)
    assert model.calls == 0


def test_inputs_are_not_kept_in_memory() -> None:
    evidence = make("ntk-4-1", Gaussian(0.6))
    passes = evidence.collect(next(iter(evidence.blocks(data()))))
    assert passes.outputs
    assert all(chunk.x.untyped_storage().nbytes() == 0 for chunk, _ in passes.outputs)


# ------------------------------------------------------------------ what is refused


def assert_refused(evidence: Evidence, words: str, y: Tensor | None = None) -> None:
    x, numbers = data()
    block = next(iter(evidence.blocks((x, numbers if y is None else y))))
    before = evidence.generator.get_state()
    with pytest.raises(ConfigurationError, match=words):
        evidence.collect(block)
    reason = why_not_kept(evidence, x)
    assert reason is not None and re.search(words, reason)
    assert torch.equal(evidence.generator.get_state(), before)
    evidence.backward(block)  # the data themselves are fine


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", ["kfac-N-C", "kfac-4-2", "diag-4-1-iid"])
@pytest.mark.parametrize("noise", [[0.5, 1.0, 2.0], [0.5, 0.5, 0.5]])
def test_sums_over_outputs_cannot_follow_a_noise_of_each(
    estimator: str, noise: list[float]
) -> None:
    """Also where the noises are equal as yet."""
    assert_refused(make(estimator, Gaussian(noise)), "sums rows with different scales")


def test_a_block_of_ones_own_with_several_outputs() -> None:
    evidence = make("kfac-4-1", Gaussian(0.5, num_outputs=OUTPUTS))
    block = next(iter(evidence.blocks(data())))
    columns = torch.arange(4)[:, None] % OUTPUTS
    passes = evidence.collect(replace(block, columns=columns))
    with pytest.raises(ConfigurationError, match="sums rows with different scales"):
        evidence.backward_kept(passes)


@pytest.mark.parametrize("estimator", ["ntk-4-1-ef", "kfac-4-2-mc"])
def test_rows_that_depend_on_the_noise(estimator: str) -> None:
    learned = make(estimator, Gaussian(0.6))
    assert_refused(learned, r"likelihood\.log_noise changes the pass")
    fixed = make(estimator, Gaussian(0.6, learnable=False))
    assert why_not_kept(fixed, data()[0]) is None
    block = next(iter(fixed.blocks(data())))
    state = fixed.generator.get_state()
    expected = fixed.estimate(block).log_evidence
    fixed.generator.set_state(state)
    assert fixed.estimate_kept(fixed.collect(block)).log_evidence == pytest.approx(expected)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4).double())
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.gate * x)


def test_hyperparameters_of_the_model() -> None:
    evidence = make("ntk-4-1", Gaussian(0.6), model=Gated(), hyperparameters=["gate"])
    assert_refused(evidence, r"but model\.gate changes the pass")


def test_passes_of_another_evidence_or_of_other_weights() -> None:
    model = network()
    evidence = make("ntk-4-1", Gaussian(0.6), model=model)
    other = make("ntk-4-1", Gaussian(0.6), model=copy.deepcopy(model))
    block = next(iter(evidence.blocks(data())))
    passes, foreign = evidence.collect(block), other.collect(block)
    with pytest.raises(InputError, match="collected by another evidence"):
        evidence.backward_kept(passes, foreign)
    with torch.no_grad():
        model.get_parameter("0.bias").add_(0.1)
    with pytest.raises(InputError, match="weights, .* have changed since"):
        evidence.backward_kept(passes)
    with pytest.raises(InputError, match=r"got list\. Pass a list of results as \*passes"):
        evidence.estimate_kept([passes])  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="There is no pass"):
        evidence.backward_kept()
    with pytest.raises(InputError, match="Pass results of collect to estimate_kept"):
        evidence.estimate(passes)
    assert all(p.grad is None for p in evidence.hyperparameters().values())
