"""What once went wrong in silence, or could."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from likelihood_zoo import LIKELIHOODS, targets
from passes.test_two_pass import M, assert_twins, batches_of, convolutional, evidence_of
from torch import Tensor, nn
from zoo import CASES, OUTPUTS

from benchmarks.one_graph import OneGraph
from evigrad import Evidence, Memory, Schedule
from evigrad.core.curvature.rows import slabs
from evigrad.core.names import STRUCTURES
from evigrad.errors import ConfigurationError, EvigradError, InputError
from evigrad.fast.storage import by_columns
from evigrad.invariances import AdditiveNoise, AffineInvariance, Averaged
from evigrad.likelihoods import Categorical, Gaussian, Likelihood
from evigrad.network.written_out import WRITTEN_OUT
from evigrad.priors import GaussianPrior
from evigrad.training import fit


def images(m: int = M) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(m, 1, 7, 7, generator=generator, dtype=torch.float64)


def small() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, OUTPUTS)).double()


def make(model: nn.Module, likelihood: Likelihood, estimator: str, **settings: Any) -> Evidence:
    return settings.pop("kind", Evidence)(
        model,
        likelihood,
        GaussianPrior("layerwise"),
        estimator=estimator,
        num_data=settings.pop("num_data", 2 * M),
        generator=0,
        **settings,
    )


@pytest.mark.filterwarnings("ignore:The training loss would learn")
def test_the_mode_of_a_model_that_draws_does_not_matter() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.averaged = Averaged(convolutional(), AffineInvariance(), num_samples=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.averaged(x) * (3.0 if self.training else 1.0)

    values = []
    for mode in (True, False):
        model = Root().double().train(mode)
        evidence = make(model, Categorical(), "ntk-7-1")
        values.append(evidence.estimate(images(), targets(Categorical(), M)).log_evidence)
        assert model.training == mode
    assert values[0] == values[1]


@pytest.mark.parametrize("change", ["flip", "turn", "swap"])
def test_batches_whose_images_change_are_refused(change: str) -> None:
    class Loader:
        def __init__(self) -> None:
            self.reads = 0

        def __iter__(self) -> Any:
            self.reads += 1
            for x, y in batches_of(images(6), targets(Categorical(), 6)):
                if self.reads < 4:  # the first data, a check of these, and the first pass
                    yield x, y
                elif change == "flip":
                    yield x.flip(-1), y
                else:
                    yield (x.mT if change == "turn" else x.flip(0)), y

    model = Averaged(convolutional(), AffineInvariance(), num_samples=2).double()
    evidence = evidence_of(model, Categorical(), "ntk-N-1", num_data=6)
    with pytest.raises(InputError, match="read again"):
        evidence.backward(Loader())


def test_a_gradient_that_is_not_finite_is_an_error() -> None:
    model, x = CASES["linear"].build(M)
    evidence = evidence_of(model, Categorical(), "ntk-7-1")
    gate = evidence.hyperparameters()["model.gate"]
    gate.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(EvigradError, match=r"The gradient for model\.gate is not finite"):
        evidence.backward(x, targets(Categorical(), M))
    assert all(p.grad is None for p in evidence.hyperparameters().values())


def test_kept_passes_see_statistics_and_fixed_noise_change() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, OUTPUTS)).double()
    x = torch.randn(M, 3, dtype=torch.float64)
    likelihood = Gaussian(0.5, learnable=False)
    y = targets(likelihood, M)
    with pytest.warns(Warning, match="normalization"):
        evidence = make(model, likelihood, "ntk-7-1")
    passes = evidence.collect(x, y)
    evidence.estimate_kept(passes)
    model.train()(x)
    with pytest.raises(InputError, match="buffer"):
        evidence.estimate_kept(passes)
    passes = evidence.collect(x, y)
    with torch.no_grad():
        next(likelihood.parameters()).mul_(2.0)
    with pytest.raises(InputError, match="fixed noise"):
        evidence.estimate_kept(passes)


EDITS: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda w: w.mul_(1.0 + 1e-7),
    "other sign": lambda w: w.neg_(),
    "one entry": lambda w: w[-1:].add_(1e-6),
    "reversed": lambda w: w.copy_(w.flip(0)),
}


@pytest.mark.each(1)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("held", ["0.weight", "3.weight", "1.running_mean"])
def test_kept_passes_notice_every_write_in_place(held: str, edit: str) -> None:
    layers = (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 350), nn.Linear(350, OUTPUTS))
    model = nn.Sequential(*layers).double()
    tensor = model.state_dict(keep_vars=True)[held]
    tensor.data.copy_(torch.linspace(0.3, 1.0, tensor.numel()).reshape(tensor.shape))
    x = torch.randn(M, 3, dtype=torch.float64)
    with pytest.warns(Warning, match="normalization"):
        evidence = make(model, Gaussian(), "ntk-7-1")
    passes = evidence.collect(x, targets(Gaussian(), M))
    evidence.backward_kept(passes)
    with torch.no_grad():
        EDITS[edit](tensor)
    with pytest.raises(InputError, match="Call collect"):
        evidence.backward_kept(passes)


def doubled(*gradients: Any) -> Any:
    return tuple(None if g is None else 2 * g for g in gradients[-1])


HOOKS: dict[str, Callable[[nn.Sequential], Any]] = {
    "full": lambda model: model[0].register_full_backward_hook(doubled),
    "full, of the model": lambda model: model.register_full_backward_hook(doubled),
    "pre": lambda model: model[0].register_full_backward_pre_hook(doubled),
    "legacy": lambda model: model[0].register_backward_hook(doubled),
    "global": lambda _: nn.modules.module.register_module_full_backward_hook(doubled),
    "global pre": lambda _: nn.modules.module.register_module_full_backward_pre_hook(doubled),
}


@pytest.mark.each(1)
@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.filterwarnings("ignore:The training loss would learn")
def test_backward_hooks_of_modules_are_refused(kind: str, averaged: bool) -> None:
    network = small()
    model = Averaged(network, AdditiveNoise((3,)), num_samples=2) if averaged else network
    evidence = make(model, Gaussian(), "ntk-7-1")
    x, y = torch.randn(M, 3, dtype=torch.float64), targets(Gaussian(), M)
    expected, state = evidence.estimate(x, y), evidence.generator.get_state()
    handle = HOOKS[kind](network)
    try:
        with pytest.raises(ConfigurationError, match=r"hook on (all modules|'[\w.]+') may"):
            evidence.backward(x, y)
    finally:
        handle.remove()
    assert torch.equal(evidence.generator.get_state(), state)
    with network[0].register_forward_hook(lambda module, inputs, output: output):
        evidence.generator.manual_seed(0)
        assert evidence.estimate(x, y).log_det == pytest.approx(expected.log_det)


@pytest.mark.each(1)
@pytest.mark.parametrize(
    "structure", [name for name in STRUCTURES if not STRUCTURES[name].keeps_rows]
)
@pytest.mark.parametrize("noise", [0.6, [0.5, 1.0, 2.0]])
def test_a_learned_noise_keeps_no_rows(structure: str, noise: Any) -> None:
    """One noise is a scale of all; noises that differ take two passes, as a network's would."""
    model, x = small(), torch.randn(M, 3, dtype=torch.float64)
    y = targets(Gaussian(), M)
    held = []
    gradients = []
    for kind in (Evidence, OneGraph):
        evidence = make(
            model, Gaussian(noise), f"{structure}-7-2", kind=kind, memory=Memory(micro_batch=1)
        )
        sizes: list[int] = []

        def count(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        evidence.describe(x)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            evidence.backward(x, y)
        held.append(sum(sizes))
        gradients.append([p.grad for p in evidence.hyperparameters().values()])
    for mine, twin in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-9, atol=1e-12)
    if isinstance(noise, float):
        assert held[0] < held[1]


def test_one_pass_serves_all_weights_without_a_closed_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(WRITTEN_OUT, torch.lstm)

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(2, 3, 2, batch_first=True), nn.Linear(3, OUTPUTS)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.head(self.lstm(x)[0][:, -1])

    model = Counting().double()
    x = torch.randn(M, 4, 2, dtype=torch.float64)
    evidence = make(model, Categorical(), "ntk-7-1")
    y = targets(Categorical(), M)
    for _ in range(2):  # with the checks of the first passes
        evidence.estimate(x, y)
    model.calls = 0
    evidence.estimate(x, y)
    assert model.calls <= M + 1


class Branching(nn.Module):
    """A wide layer that some data pass twice."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.gate = nn.Parameter(torch.zeros(30))
            self.wide, self.head = nn.Linear(30, 30), nn.Linear(30, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.wide(x * self.gate.exp()))
        if float(x.detach().sum()) > 5.0 * x.numel():
            h = torch.tanh(self.wide(h))
        return self.head(h)


@pytest.mark.each(1)
@pytest.mark.parametrize("structure", ["ntk", "full"])
@pytest.mark.parametrize("size", [None, 1, 3])
def test_contraction_gives_way_to_rows_where_uses_depend_on_the_data(
    structure: str, size: int | None
) -> None:
    """Micro-batches with products of a weight and others with its rows add up."""
    few = torch.rand(M, 30, dtype=torch.float64)
    x = few + 10.0 if size is None else torch.cat([few[:3], few[3:] + 10.0])
    y, gradients = targets(Categorical(), M), []
    estimator = f"{structure}-7-1"
    for kind in (Evidence, OneGraph):
        evidence = evidence_of(
            Branching().double(),
            Categorical(),
            estimator,
            kind=kind,
            memory=Memory(micro_batch=size),
        )
        words = {report.name: report.curvature for report in evidence.describe(few)}
        assert ("contracted" in words["wide.weight"]) == (kind is Evidence)
        evidence.backward(x, y)
        gradients.append([p.grad for p in evidence.hyperparameters().values()])
    for mine, twin in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-9, atol=1e-12)


class Deep(nn.Module):
    """A convolution of many channels at few positions."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Conv2d(1, 12, 3, stride=3)
            self.wide = nn.Conv2d(12, 60, 3, padding=1)
            self.head = nn.Linear(60, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.wide(torch.tanh(self.first(x))))
        return self.head(h.mean((2, 3)))


@pytest.mark.parametrize(
    ("estimator", "samples"),
    [("ntk-7-1", 2), ("ntk-7-2", 1), ("ntk-7-C", 1), ("ntk-7-1-ef", 2), ("ntk-7-2-mc", 1)],
)
def test_convolutions_without_rows(estimator: str, samples: int) -> None:
    model = Averaged(Deep(), AffineInvariance(), num_samples=samples).double()
    x = images()[:, :, :6, :6].contiguous()
    evidence = evidence_of(model, Categorical(), estimator)
    words = {report.name: report.curvature for report in evidence.describe(x)}
    assert "contracted" in words["model.wide.weight"]
    assert_twins(model, Categorical(), x, estimator, (3,))


def test_rows_of_another_device_lie_by_columns() -> None:
    """What pinned memory holds: every slab of columns is one piece of it."""
    rows = torch.randn(5, 12, dtype=torch.float64)
    kept = by_columns(rows, torch.empty(0), pinned=False)
    assert torch.equal(kept, rows) and kept.mT.is_contiguous()
    for columns, slab in slabs((kept,), torch.empty(0, dtype=torch.float64)):
        assert torch.equal(slab, rows[:, columns])
        assert slab.mT.is_contiguous()


def test_rounds_on_all_data_draw_transforms_anew() -> None:
    x, y = images(6).float(), torch.arange(6) % OUTPUTS
    model = Averaged(convolutional().float(), AffineInvariance(0.5, learn=False), num_samples=1)
    result = fit(
        model,
        (x, y),
        estimator="kfac-N-C",
        schedule=Schedule(epochs=1, burn_in=1, every=1, steps=3),
        progress=False,
    )
    error = result.history[-1]["log_evidence_sem"]
    assert isinstance(error, float) and error > 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_two_pass_gradients_of_precisions_alone_equal_the_twin(name: str) -> None:
    """What is summarised and condensed, against what is not."""
    model, x = small(), torch.randn(M, 3, dtype=torch.float64)
    y = targets(LIKELIHOODS[name](OUTPUTS), M)
    for estimator in ("ntk-7-1", "ntk-7-C", "kfac-7-1", "kfac-7-C", "diag-7-2"):
        gradients = []
        for settings in ({}, {"memory": Memory(micro_batch=3)}, {"kind": OneGraph}):
            evidence = make(model, LIKELIHOODS[name](OUTPUTS), estimator, **settings)
            evidence.backward(x, y)
            gradients.append([p.grad for p in evidence.hyperparameters().values()])
        for other in gradients[1:]:
            for a, b in zip(gradients[0], other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
