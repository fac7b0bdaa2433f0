"""Micro-batches by a budget of memory, and what happens where memory does not suffice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peak_bytes import PeakBytes
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from evigrad import Evidence, Memory
from evigrad.errors import ConfigurationError, EvigradWarning, MemoryBudgetError, is_out_of_memory
from evigrad.inputs import as_inputs
from evigrad.likelihoods import Categorical
from evigrad.passes.intake import resolve
from evigrad.passes.memory import PEAK_FACTOR, MicroBatches, run_if_it_fits
from evigrad.priors import GaussianPrior

M = 12
LABELS = torch.arange(M) % 3

SEEN: list[int] = []  # sizes of the batches that the network was given


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(20))
        self.body = nn.Sequential(nn.Linear(6, 20), nn.Tanh())
        self.head = nn.Linear(20, 3)
        self.limit = 10**9

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(len(x))
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("no more memory")
        return self.head(self.body(x) * self.gate.exp())


def build(estimator: str = f"ntk-{M}-1", **settings: Any) -> tuple[Evidence, Net, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net().double()
        x = torch.randn(M, 6, dtype=torch.float64)
    evidence = Evidence(
        model,
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=estimator,
        num_data=2 * M,
        hyperparameters=["gate"],
        generator=0,
        **settings,
    )
    evidence.describe(x)
    SEEN.clear()
    return evidence, model, x, LABELS


def gradients(evidence: Evidence, x: Tensor, y: Tensor) -> list[Tensor]:
    evidence.backward(x, y)
    collected = []
    for p in evidence.hyperparameters().values():
        assert p.grad is not None
        collected.append(p.grad)
    return collected


def sizes_of(evidence: Evidence) -> dict[str, int]:
    """By the kind of pass."""
    chosen = evidence.state_dict()["micro_batches"]
    return {words.split()[0]: size for words, size in chosen.items()}


@pytest.mark.parametrize("estimator", [f"ntk-{M}-1", f"kfac-{M}-1"])
def test_a_small_budget_gives_small_micro_batches_and_the_same_result(estimator: str) -> None:
    evidence, _, x, y = build(estimator)
    expected = gradients(evidence, x, y)
    sizes = {}
    for budget in (1, 20_000, 2**30):
        evidence, _, x, y = build(
            estimator, memory=Memory(micro_batch="auto", memory_budget=budget)
        )
        got = gradients(evidence, x, y)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
        sizes[budget] = sizes_of(evidence)
    assert sizes[1] == {"first": 1, "second": 1}
    assert 1 < sizes[20_000]["second"] < M
    assert min(sizes[2**30].values()) >= M


@pytest.mark.parametrize("structure", ["ntk", "kfac"])
def test_examples_without_rows_in_the_last_micro_batch(structure: str) -> None:
    """The first micro-batch has all rows, but others follow that are collected too."""
    whole, model, x, y = build(f"{structure}-2-rows")
    parts = whole.with_estimator(f"{structure}-2-rows", memory=Memory(micro_batch=M // 2))
    at_first = 0
    for seed in range(8):
        kept = [
            e.collect(x, y, wrt="prior") for e in (whole, parts) if e.generator.manual_seed(seed)
        ]
        columns = kept[0].block.columns
        assert columns is not None
        at_first += int((columns[M // 2 :] < 0).all())
        one, other = (e.estimate_kept(k).log_det for e, k in zip((whole, parts), kept, strict=True))
        assert other == pytest.approx(one, rel=1e-12)
    assert at_first


def test_without_a_budget_it_takes_what_is_free() -> None:
    evidence, _, x, y = build(memory=Memory(micro_batch="auto"))
    gradients(evidence, x, y)
    assert sizes_of(evidence)["second"] > M


def test_out_of_memory_halves_and_goes_on() -> None:
    evidence, _, x, y = build()
    expected = gradients(evidence, x, y)
    evidence, model, x, y = build(memory=Memory(micro_batch="auto"))
    model.limit = 5
    got = gradients(evidence, x, y)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert sizes_of(evidence) == {"first": 3, "second": 3}
    SEEN.clear()
    evidence.backward(x, y)
    assert max(SEEN) == 3  # it remembers


@pytest.mark.each(1)
@pytest.mark.parametrize("estimator", [f"ntk-{M}-1", f"kfac-{M}-1", f"ntk-{M}-2-mc"])
@pytest.mark.parametrize("place", ["collect", "inner", "grad"])
def test_out_of_memory_in_the_middle_of_a_micro_batch(
    estimator: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what failed is counted twice."""
    evidence, _, x, y = build(estimator)
    expected = gradients(evidence, x, y)
    evidence, _, x, y = build(estimator, memory=Memory(micro_batch="auto"))
    calls = [0]
    structure = evidence.problem.curvature(evidence.problem.network.plan(x))
    holder, name = (torch.autograd, "grad") if place == "grad" else (type(structure), place)
    real = getattr(holder, name)

    def failing(*arguments: Any, **settings: Any) -> Any:
        output = real(*arguments, **settings)
        calls[0] += 1
        if calls[0] in (1, 3):
            raise torch.OutOfMemoryError("no memory left")
        return output

    monkeypatch.setattr(holder, name, failing)
    got = gradients(evidence, x, y)
    assert calls[0] > 3
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_a_single_datum_that_does_not_fit_is_refused_and_nothing_changes() -> None:
    evidence, model, x, y = build(memory=Memory(micro_batch="auto"))
    state = evidence.generator.get_state()
    model.limit = 0
    with pytest.raises(MemoryBudgetError, match="single example"):
        evidence.backward(x, y)
    assert all(p.grad is None for p in evidence.hyperparameters().values())
    assert torch.equal(state, evidence.generator.get_state())


def test_a_given_size_that_does_not_fit_is_halved_with_a_word() -> None:
    evidence, model, x, y = build(memory=Memory(micro_batch=4))
    expected = gradients(evidence, x, y)
    evidence, model, x, y = build(memory=Memory(micro_batch=4))
    model.limit = 3
    with pytest.warns(
        EvigradWarning, match="over 4 examples did not fit into memory. Later passes take 2"
    ):
        halved = gradients(evidence, x, y)
    torch.testing.assert_close(halved, expected)


def test_chosen_sizes_are_kept() -> None:
    evidence, _, x, y = build(memory=Memory(micro_batch="auto", memory_budget=20_000))
    gradients(evidence, x, y)
    other, _, _, _ = build(memory=Memory(micro_batch="auto", memory_budget=1))
    other.load_state_dict(evidence.state_dict())
    other.backward(x, y)
    assert other.state_dict()["micro_batches"] == evidence.state_dict()["micro_batches"]


def test_settings_that_do_not_exist() -> None:
    for settings in [
        {"memory": Memory(micro_batch=0)},
        {"memory": Memory(memory_budget=0, micro_batch="auto")},
        {"memory": Memory(memory_budget=10**9)},
        {"memory": Memory(memory_budget=10**9, micro_batch=4)},
        {"memory": Memory(rows_dtype=torch.float16)},
        {"memory": Memory(autocast=torch.float16)},
        {"memory": Memory(rows_device="nowhere")},
        {"estimator": "kfac-N-1", "memory": Memory(rows_dtype=torch.bfloat16)},
        {"memory": Memory(rows_dtype=torch.int32)},
        {"memory": Memory(autocast=torch.int8)},
    ]:
        with pytest.raises(ConfigurationError):
            build(**settings)


def test_what_counts_as_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    cpu = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"
    assert is_out_of_memory(RuntimeError(cpu))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert run_if_it_fits(lambda: None)
    with pytest.raises(ZeroDivisionError):
        run_if_it_fits(lambda: 1 // 0)


def test_limits_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, other = torch.device("cpu"), torch.device("cuda")
    assert MicroBatches("auto").limit(10.0, other) is None  # halved if necessary
    monkeypatch.setattr("evigrad.passes.memory.available_bytes", lambda device: 1000)
    assert MicroBatches("auto").limit(10.0, cpu) == 23
    monkeypatch.setattr("evigrad.passes.memory.CPU_PASS_BYTES", 200)
    assert MicroBatches("auto").limit(10.0, cpu) == 6
    monkeypatch.setattr("evigrad.passes.memory.available_bytes", lambda device: None)
    assert MicroBatches("auto").limit(10.0, cpu) == 6
    for device in (cpu, other):
        assert MicroBatches("auto", 400).limit(10.0, device) == 13
        assert MicroBatches("auto", 400).limit(1e9, device) == 1
        assert MicroBatches("auto", 400, example_bytes=2).limit(10.0, device) == 66


def test_an_accelerator_starts_with_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MicroBatches, "limit", lambda *_: None)
    evidence, model, x, y = build(f"kfac-{M}-1", memory=Memory(micro_batch="auto"))
    evidence.estimate(x, y)
    assert max(SEEN) == M and not sizes_of(evidence)
    model.limit = 7
    evidence.estimate(x, y)
    assert sizes_of(evidence) == {"first": 6}


def test_a_pass_takes_no_more_than_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget an automatic pass filled what is free."""
    monkeypatch.setattr("evigrad.passes.memory.CPU_PASS_BYTES", 1)
    evidence, _, x, y = build(f"kfac-{M}-1", memory=Memory(micro_batch="auto"))
    evidence.estimate(x, y)
    assert set(evidence.state_dict()["micro_batches"].values()) == {1}


def test_sizes_found_in_what_failed_are_forgotten() -> None:
    problem = build(memory=Memory(micro_batch="auto"))[0].problem
    problem.sizes.chosen = {"first": 8}
    with pytest.raises(ZeroDivisionError), problem.restored_on_error():
        problem.sizes.halve("first", 8)
        assert 1 // 0
    assert problem.sizes.chosen == {"first": 8}


class Convolutional(nn.Module):
    """Two layers of which activations are much larger than weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).sin()).sin().mean((2, 3)))


@pytest.mark.parametrize("structure", ["kfac", "diag", "blockdiag", "ntk"])
def test_the_gradients_of_all_outputs_count(structure: str) -> None:
    """They are ten times as large as the activations."""
    x, y = torch.rand(6, 1, 16, 16), torch.arange(6)
    evidence = Evidence(
        Convolutional(),
        Categorical(),
        GaussianPrior("layerwise"),
        estimator=f"{structure}-6-C",
        num_data=6,
    )
    sweep, inputs = resolve(evidence.problem, x, y), as_inputs(x)
    gradients = 10 * (4 + 4) * 16**2 * 4  # those in the outputs of both layers
    assert gradients < sweep._example_bytes(inputs) < 4 * gradients
    with PeakBytes() as held:
        evidence.estimate(x, y)
    assert held.most < 6 * PEAK_FACTOR * sweep._example_bytes(inputs)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,io->no", x, self.weight)


AUTOMATIC = Memory(micro_batch="auto", memory_budget=20_000)

GENERIC: dict[str, Callable[[], nn.Module]] = {
    "a matrix product": Product,
    "a transposed convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.ConvTranspose1d(2, 2, 1), nn.Flatten()
    ),
    "weight_norm": lambda: weight_norm(nn.Linear(6, 6)),
}


@pytest.mark.parametrize("name", GENERIC)
def test_generic_parameters_beside_a_hyperparameter_of_the_model(name: str) -> None:
    """Their rows come out of function transforms."""
    outcomes = []
    for memory in (None, AUTOMATIC):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Net()
            model.body = nn.Sequential(GENERIC[name](), nn.Tanh(), nn.Linear(6, 20))
            x = torch.randn(M, 6, dtype=torch.float64)
        evidence = Evidence(
            model.double(),
            Categorical(),
            GaussianPrior("layerwise"),
            estimator=f"ntk-{M}-C",
            num_data=M,
            hyperparameters=["gate"],
            generator=0,
            memory=memory,
        )
        assert "generic: vmap" in {report.rows for report in evidence.describe(x)}
        outcomes.append((evidence.estimate(x, LABELS), gradients(evidence, x, LABELS)))
        if memory is not None:
            assert 1 <= sizes_of(evidence)["second"] < M
    assert outcomes[0][0].log_evidence == pytest.approx(outcomes[1][0].log_evidence, rel=1e-12)
    torch.testing.assert_close(outcomes[1][1], outcomes[0][1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("memory", [None, AUTOMATIC])
def test_passes_of_automatic_size_leave_no_traces(memory: Memory | None) -> None:
    """In evaluation mode, with random states of their own, and without traces."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
        model.body = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Dropout())
        x = torch.randn(M, 6, dtype=torch.float64)
    model.double().train()
    with pytest.warns(EvigradWarning, match="normalization"):
        evidence = Evidence(
            model,
            Categorical(),
            GaussianPrior(),
            estimator=f"ntk-{M}-1",
            num_data=M,
            hyperparameters=["gate"],
            memory=memory,
        )
    random_state, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    evidence.backward(x, LABELS)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(module.training for module in model.modules())
