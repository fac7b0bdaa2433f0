"""Threads: what belongs to the process is changed by one of them at a time, and put back."""

import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence, Schedule, fit
from evigrad.likelihoods import Categorical
from evigrad.network.modes import evaluation_mode
from evigrad.priors import GaussianPrior

N, SIZE, OUTPUTS = 12, 6, 3
LABELS = torch.arange(N) % OUTPUTS


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.RNN(3, 2, batch_first=True)
        self.head = nn.Linear(2, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.unflatten(1, (2, 3)))[0][:, -1])


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(SIZE, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, OUTPUTS))


def data() -> Tensor:
    return torch.randn(N, SIZE, generator=torch.Generator().manual_seed(1))


def made(network: Callable[[], nn.Module]) -> Evidence:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Evidence(
            model,
            Categorical(),
            GaussianPrior(),
            estimator=f"ntk-{N}-1",
            num_data=N,
            generator=0,
        )


def estimates(evidence: Evidence, count: int) -> list[float]:
    evidence.generator.manual_seed(0)
    other = evidence.with_estimator(f"ntk-{N}-C")
    return [
        estimator.estimate(data(), LABELS).log_det
        for _ in range(count)
        for estimator in (evidence, other)
    ]


def initial() -> nn.Module:
    """Made before threads begin: its initialisation draws from the global generator, unguarded."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dropout()


def trained(model: nn.Module, epochs: int) -> list[Tensor]:
    fit(
        model,
        (data(), LABELS),
        estimator=None,
        schedule=Schedule(epochs=epochs, batch_size=3),
        seed=0,
    )
    return [p.detach().clone() for p in model.parameters()]


def of_the_process() -> list[Any]:
    return [
        torch.get_rng_state().tolist(),
        str(np.random.get_state()),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        list(warnings.filters),
    ]


@pytest.fixture(autouse=True)
def often_switched() -> Iterator[None]:
    """Threads that interrupt each other twenty times as often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(interval / 20)
    yield
    sys.setswitchinterval(interval)


def at_once(*tasks: Callable[[], Any]) -> list[Any]:
    barrier = Barrier(len(tasks))

    def started(task: Callable[[], Any]) -> Any:
        barrier.wait()
        return task()

    with ThreadPoolExecutor(len(tasks)) as pool:
        return [future.result() for future in [pool.submit(started, task) for task in tasks]]


def test_estimates_in_threads_are_those_of_one_and_leave_no_trace() -> None:
    count, evidences = 5, [made(network) for network in (Recurrent, dropout, dropout)]
    expected, before = [estimates(evidence, count) for evidence in evidences], of_the_process()
    in_threads = at_once(*(lambda e=evidence: estimates(e, count) for evidence in evidences))
    assert of_the_process() == before
    for of_one, sequential in zip(in_threads, expected, strict=True):
        assert of_one == pytest.approx(sequential, rel=1e-6)


def test_training_with_dropout_beside_estimates() -> None:
    expected, before = trained(initial(), 10), of_the_process()
    evidences, model = [made(dropout), made(dropout)], initial()
    weights, *_ = at_once(
        lambda: trained(model, 10), *(lambda e=evidence: estimates(e, 10) for evidence in evidences)
    )
    assert of_the_process() == before
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_estimates_leave_the_random_states_alone_unless_the_model_draws() -> None:
    """Another thread may draw in the meantime, for a training loop of its own."""
    states = []

    class Watching(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            states.append(torch.get_rng_state())
            return super().forward(input)

    class Drawing(Watching):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 0 * torch.rand(())

    for network, is_left in ((Watching, True), (Drawing, False)):
        evidence = made(lambda network=network: network(SIZE, OUTPUTS))
        evidence.describe(data())
        states.clear()
        evidence.backward(data(), LABELS)
        now = torch.get_rng_state()
        assert all(torch.equal(state, now) == is_left for state in states)


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand])
def test_it_is_seen_who_draws(draw: Callable[[int], Any]) -> None:
    with evaluation_mode(nn.Identity(), torch.Generator()) as has_drawn:
        assert not has_drawn()
        draw(1)
        assert has_drawn()
