"""What a run does when a number, an allocation or a file fails: nothing goes wrong in silence."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from training.interrupted import Killed, assert_same, assert_same_runs, killed, state_of
from training.small_runs import SMALL, net, train, without_estimator

from evigrad import evidence
from evigrad.core.curvature import linalg
from evigrad.errors import (
    EvigradError,
    EvigradWarning,
    MemoryBudgetError,
    NotFiniteError,
    NotPositiveDefiniteError,
)
from evigrad.evidence import Evidence
from evigrad.likelihoods import Categorical
from evigrad.measure import metrics
from evigrad.passes.sweep import MicroBatchSweep
from evigrad.training import RunDirectory, fit, read_metrics
from evigrad.training.settings import grouped

# The words of PyTorch's allocators.
ALLOCATORS = {
    "GPU": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 TB"),
}


def at_call(
    owner: Any, name: str, failing: Callable[[int], bool], fault: Callable[..., Any]
) -> AbstractContextManager[object]:
    """Give the result of some calls, counted from 1, to ``fault``."""
    method, calls = getattr(owner, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = method(*args, **kwargs)
        return fault(result) if failing(calls) else result

    return patch.object(owner, name, counted)


def once(call: int) -> Callable[[int], bool]:
    return lambda number: number == call


def always(call: int) -> Callable[[int], bool]:
    return lambda number: number >= call


def refusing(error: Exception) -> Callable[..., Any]:
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise error

    return refuse


def spoil(loss: Tensor) -> Tensor:
    return loss * float("nan")


def spoil_gradient(loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient * float("inf"))
    return loss


def spoil_estimates(estimates_and_gradients: Any) -> Any:
    estimates, gradients = estimates_and_gradients
    return estimates, [None if g is None else g * float("nan") for g in gradients]


def counts(result: Any) -> dict[str, list[Any]]:
    return {n: [row[n] for row in result.history] for n in ("skipped_batches", "skipped_steps")}


# ------------------------------------------------------------ numbers that are not finite


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", [spoil_gradient, spoil])
def test_a_batch_without_a_finite_loss_or_gradient_is_skipped_and_counted(fault, blobs, tmp_path):
    """The weights are those of an epoch that never had this batch."""
    with (
        at_call(Evidence, "map_loss", once(4), fault),
        pytest.warns(EvigradWarning, match="Epoch 2: in 1 of 3 batches the loss or its gradient"),
    ):
        result = train("map", blobs, tmp_path / "run")
    assert counts(result)["skipped_batches"] == [0, 1, 0, 0, 0]
    assert all(w.isfinite().all() for w in result.model.parameters())
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert [row["skipped_batches"] for row in rows] == [0, 1, 0, 0, 0]

    def skip(optimizer: Any, *arguments: Any) -> Any:
        nonlocal taken
        taken += 1
        return None if taken == 4 else step(optimizer, *arguments)

    step, taken = torch.optim.Adam.step, 0
    with patch.object(torch.optim.Adam, "step", skip):
        twin = train("map", blobs, tmp_path / "twin")
    assert_same(result.model.state_dict(), twin.model.state_dict())


def test_the_mean_loss_is_that_of_the_batches_that_count(blobs, tmp_path):
    losses: list[float] = []

    def second_is_bad(loss: Tensor) -> Tensor:
        losses.append(loss.item())
        return spoil(loss) if len(losses) == 2 else loss

    with (
        at_call(Evidence, "map_loss", always(1), second_is_bad),
        pytest.warns(EvigradWarning, match="Epoch 1"),
    ):
        trained = train("map", blobs, tmp_path / "run", epochs=1, batch_size=30)
    assert [row["loss"] for row in trained.history] == losses[:1]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("changes", [{}, {"batch_size": 60}])
def test_more_than_a_tenth_of_the_batches_ends_training(changes, blobs, tmp_path):
    words = r"diverged in epoch 2 of 5: in \d of \d batches.*Lower lr.*The metrics up to epoch 1"
    first = 2 if changes else 4
    with (
        at_call(Evidence, "map_loss", always(first), spoil),
        pytest.raises(EvigradError, match=words),
    ):
        train("map", blobs, tmp_path / "run", **changes)
    saved = state_of(tmp_path / "run")  # that of before
    assert all(weight.isfinite().all() for weight in saved["model"].values())


@pytest.mark.filterwarnings("ignore:The model has normalization")
def test_running_statistics_that_took_up_a_bad_batch_end_training(blobs, tmp_path):
    class Overflow(nn.BatchNorm1d):
        calls = 0

        def forward(self, input: Tensor) -> Tensor:
            self.calls += self.training
            return super().forward(input * float("inf") if self.calls == 4 else input)

    model = nn.Sequential(nn.Linear(4, 8), Overflow(8), nn.Linear(8, 3))
    with pytest.raises(EvigradError, match=r"epoch 2 of 5: the buffer 1.running_"):
        fit(model, blobs[0], run_dir=tmp_path / "run", **grouped(without_estimator(SMALL)))


def test_infinite_buffers_that_are_meant_to_be_so_are_none_of_our_business(blobs):
    model = net()
    model.register_buffer("mask", torch.tensor([0.0, -float("inf")]))
    fit(model, blobs[0], **grouped(without_estimator(SMALL)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("update", ["adam", "fixed_point"])
def test_an_estimate_that_is_not_finite_ends_its_round_and_is_counted(update, blobs, tmp_path):
    """Precisions stay those of the step before; the next round learns again."""
    with (
        at_call(evidence, "estimates_and_gradients", once(2), spoil_estimates),
        pytest.warns(EvigradWarning, match="skipped 2 of 3 hyperparameter steps"),
    ):
        result = train("ntk", blobs, tmp_path / "run", steps=3, prior_update=update)
    skipped_steps = counts(result)["skipped_steps"]
    assert (sum(skipped_steps), result.history[-1]["hyper_steps"]) == (2, 4)
    assert all(value.isfinite().all() for value in result.evidence.prior.precisions().values())


def test_a_round_without_any_step_is_skipped_and_a_second_one_ends_training(blobs, tmp_path):
    fails = always(1)
    with (
        at_call(evidence, "estimates_and_gradients", fails, spoil_estimates),
        pytest.warns(EvigradWarning, match="3 of 3 hyperparameter steps"),
        pytest.raises(NotFiniteError, match=r"epoch 3 failed: The gradient for prior.log_pr"),
    ):
        train("ntk", blobs, tmp_path / "run", steps=3, burn_in=2, every=1)
    assert state_of(tmp_path / "run")["idle"] == 1


def test_a_round_that_failed_is_remembered_by_the_run_that_goes_on(blobs, tmp_path):
    def fault() -> AbstractContextManager[object]:
        return at_call(evidence, "estimates_and_gradients", once(1), spoil_estimates)

    options: dict[str, Any] = {"steps": 3, "burn_in": 2, "every": 1}
    with fault(), pytest.warns(EvigradWarning, match="3 of 3"):
        train("ntk", blobs, tmp_path / "whole", **options)

    def stop(row: Any) -> None:
        if row["epoch"] == 3:
            raise Killed

    with fault(), pytest.warns(EvigradWarning, match="3 of 3"):
        assert killed(lambda: train("ntk", blobs, tmp_path / "cut", callbacks=[stop], **options))
    train("ntk", blobs, tmp_path / "cut", resume=True, **options)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")


def test_a_run_from_before_there_were_counts_goes_on(blobs, tmp_path):
    train("map", blobs, tmp_path / "run")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    columns = state["history"]["columns"]
    for name in ("skipped_batches", "skipped_steps"):
        index = columns.index(name)
        columns.pop(index)
        for row in state["history"]["rows"]:
            row.pop(index)
    RunDirectory(tmp_path / "run", resume=True).write_checkpoint(state)
    again = train("map", blobs, tmp_path / "run", resume=True)
    assert counts(again) == {"skipped_batches": [0] * 5, "skipped_steps": [0] * 5}


# ------------------------------------------------------------ factorisations


def no_factor(factorized: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    factor, info = factorized
    return factor, torch.ones_like(info)


def test_a_cholesky_that_fails_is_repeated_in_float64_then_with_jitter_and_a_word():
    matrix = torch.eye(3) * 1e-3
    expected = linalg.log_det_identity_plus(matrix)
    with at_call(torch.linalg, "cholesky_ex", once(1), no_factor):
        assert torch.allclose(linalg.log_det_identity_plus(matrix), expected, rtol=1e-3)
    words = r"was added to its diagonal.*may be too large by up to about"
    with (
        at_call(torch.linalg, "cholesky_ex", lambda call: call < 3, no_factor),
        pytest.warns(EvigradWarning, match=words),
    ):
        assert torch.allclose(linalg.log_det_identity_plus(matrix), expected, rtol=1e-3)
    with (
        at_call(torch.linalg, "cholesky_ex", always(1), no_factor),
        pytest.raises(NotPositiveDefiniteError, match="precisions are positive"),
    ):
        linalg.log_det_identity_plus(matrix)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", ["ntk", "anchored", "prior blocks", "kfac, full batch"])
def test_a_cholesky_that_keeps_failing_ends_training_with_a_message(case, blobs, tmp_path):
    eigenvalues = patch.object(
        linalg, "_eigen", refusing(NotPositiveDefiniteError("no eigenvalues"))
    )
    with (
        at_call(torch.linalg, "cholesky_ex", always(1), no_factor),
        eigenvalues,
        pytest.warns(EvigradWarning, match="hyperparameter steps"),
        pytest.raises(NotPositiveDefiniteError, match=r"Hyperparameter step after epoch \d"),
    ):
        train(case, blobs, tmp_path / "run", burn_in=2, every=1)


# ------------------------------------------------------------ memory


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("allocator", "micro_batch"), [("GPU", None), ("CPU", 20), ("CPU", "auto")]
)
def test_a_pass_that_does_not_fit_is_halved_and_says_so(allocator, micro_batch, blobs, tmp_path):
    options: dict[str, Any] = {"epochs": 2}
    expected = train("ntk", blobs, tmp_path / "whole", **options)
    error = ALLOCATORS[allocator]
    with at_call(MicroBatchSweep, "linearize", once(2), refusing(error)):
        if micro_batch == "auto":
            halved = train("ntk", blobs, tmp_path / "run", micro_batch=micro_batch, **options)
        else:
            with pytest.warns(
                EvigradWarning,
                match="over 20 examples did not fit .* take 10",
            ):
                halved = train("ntk", blobs, tmp_path / "run", micro_batch=micro_batch, **options)
    assert 10 in halved.evidence.state_dict()["micro_batches"].values() or micro_batch == "auto"
    last, expected_last = halved.history[-1], expected.history[-1]
    for name in ("loss", "log_evidence", "precision/0.weight"):
        assert last[name] == pytest.approx(expected_last[name], rel=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_memory_that_never_suffices_ends_training_with_what_is_cheaper(allocator, blobs, tmp_path):
    error = ALLOCATORS[allocator]
    single = "A pass over a single example does not fit"
    cases = [
        ("a training step on 20 examples. Use a smaller batch_size", Evidence, "map_loss"),
        ("an estimate by ntk-20-1. Use fewer rows in a block", torch.linalg, "cholesky_ex"),
        (single, MicroBatchSweep, "linearize"),
        (single, metrics, "flattened"),
    ]
    for number, (words, owner, name) in enumerate(cases):
        with (
            at_call(owner, name, always(2), refusing(error)),
            pytest.raises(MemoryBudgetError, match=words),
            pytest.warns(EvigradWarning) if name == "linearize" else patch.dict({}),
        ):
            train("ntk", blobs, tmp_path / str(number))


def test_an_evaluation_that_does_not_fit_takes_half_of_the_data(blobs, make_net):
    likelihood, sizes = Categorical(), list[int]()

    def narrow(model: nn.Module, x: Any, **options: Any) -> Tensor:
        sizes.append(len(x))
        if len(x) > 16:
            raise ALLOCATORS["CPU"]
        return outputs(model, x, **options)

    outputs = metrics.model_outputs
    expected = metrics.evaluate(make_net(), likelihood, blobs[0])
    with patch.object(metrics, "model_outputs", narrow):
        split_metrics = metrics.evaluate(make_net(), likelihood, blobs[0])
    assert split_metrics == pytest.approx(expected, rel=1e-6)
    assert sizes == [60, 30, 15, 15, 15, 15]


# ------------------------------------------------------------ files


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["ntk", "anchored"])
def test_a_damaged_checkpoint_costs_its_epochs_and_changes_no_result(case, blobs, tmp_path):
    train(case, blobs, tmp_path / "whole")

    def stop(row: Any) -> None:
        if row["epoch"] == 4:
            raise Killed

    assert killed(lambda: train(case, blobs, tmp_path / "cut", callbacks=[stop]))
    file = tmp_path / "cut" / "checkpoint.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.warns(
        EvigradWarning, match="previous checkpoint, after epoch 2, and repeats the epochs since"
    ):
        again = train(case, blobs, tmp_path / "cut", resume=True)
    assert_same_runs(tmp_path / "cut", tmp_path / "whole")
    assert [row["epoch"] for row in again.history] == [1, 2, 3, 4, 5]
    assert not (tmp_path / "cut" / "checkpoint_before.pt").exists()
