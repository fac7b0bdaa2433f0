import pytest
import torch
from core.curvature.fakes import Root, make_fake, make_structure, random, weights_of
from torch import nn

from evigrad import Evidence
from evigrad.core.curvature import (
    BlockDiagonal,
    BlockKernel,
)
from evigrad.core.names import STRUCTURES
from evigrad.core.protocols import LOG_DETS, Purpose
from evigrad.errors import MemoryBudgetError
from evigrad.likelihoods import Gaussian
from evigrad.network import MatrixUse
from evigrad.passes import memory
from evigrad.passes.memory import available_bytes, check_memory
from evigrad.priors import GaussianPrior

GIB = 2**30


def bytes_of(structure, num_rows, purpose=Purpose.VALUE, is_whole=False):
    return structure.cost(num_rows, purpose, is_whole=is_whole).total


def structures(weights, **settings):
    return {
        name: make_structure(name, weights, frozenset({"w"}), **settings) for name in STRUCTURES
    }


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_prediction_covers_the_statistic_and_is_of_its_order(name):
    shapes = {"w": (20, 10), "b": (20,)}
    fake = make_fake(6, 3, shapes)
    plan = ()  # no factors in the fake: kfac has its dense blocks
    structure = make_structure(name, weights_of(fake), plan)
    statistic = structure.collect(None, fake, Root(random(6, 2, 3)))
    held = sum(tensor.numel() * tensor.element_size() for tensor in statistic.tensors())
    assert held <= bytes_of(structure, 12) <= 10 * held


def test_predictions_by_hand():
    weights = {"w": torch.zeros(300, 200), "b": torch.zeros(300)}
    kinds = structures(weights)
    p = 60_300
    assert bytes_of(kinds["full"], 10) == 4 * 5 * p**2
    assert bytes_of(kinds["diag"], 10) == 4 * 5 * p
    assert bytes_of(kinds["blockdiag"], 10) == 4 * (3 * (60_000**2 + 300**2) + 2 * 60_000**2)
    # rows, two Grams, five more squares
    assert bytes_of(kinds["ntk"], 50) == 4 * (50 * p + 7 * 50**2)
    # rows of the largest parameter
    assert bytes_of(kinds["ntk"], 50, is_whole=True) == 4 * (50 * 60_000 + 7 * 50**2)
    kronecker = 3 * (300**2 + 200**2) + 3 * 60_000
    assert bytes_of(kinds["kfac"], 10) == 4 * (kronecker + 5 * 300**2)
    assert bytes_of(kinds["kfac"], 10) == bytes_of(kinds["kfac"], 10_000)
    double = structures(weights, gram_dtype=torch.float64)
    assert bytes_of(double["full"], 10) == 2 * bytes_of(kinds["full"], 10)


def test_predictions_of_blocks_by_their_rows() -> None:
    weights = {"w": torch.zeros(300, 200), "b": torch.zeros(300)}
    p = 60_300
    kernel = make_structure("blockdiag", weights, num_rows=50)
    assert isinstance(kernel, BlockKernel)
    # A Gram for each tensor, five squares at work, and three that autograd holds of another block.
    assert bytes_of(kernel, 50) == 4 * (50 * p + 10 * 50**2)
    whole = make_structure("full", weights, num_rows=50)
    ntk = make_structure("ntk", weights)
    for purpose in Purpose:
        for is_whole in (False, True):
            costs = [form.cost(50, purpose, is_whole=is_whole) for form in (whole, ntk)]
            assert costs[0] == costs[1]
            dropped = costs[0].drops_rows and is_whole
            assert costs[0].drops_rows == (purpose in LOG_DETS)
            grams = 2 if purpose in LOG_DETS else 0
            assert costs[0].total == 4 * (50 * (60_000 if dropped else p) + (5 + grams) * 50**2)


@pytest.mark.parametrize("name", ["full", "blockdiag"])
def test_a_prediction_covers_rows_and_grams(name: str) -> None:
    fake = make_fake(6, 3, {"w": (20, 10), "b": (20,)})
    structure = make_structure(name, weights_of(fake), num_rows=12)
    assert isinstance(structure, BlockKernel)
    scale = random(6, 2, seed=1).exp().requires_grad_()
    statistic = structure.collect(None, fake, Root(random(6, 2, 3), scale))
    held = sum(t.numel() * t.element_size() for t in statistic.tensors())
    precisions = {n: torch.ones((), dtype=torch.float64, requires_grad=True) for n in fake.jacobian}
    sizes: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        structure.log_det(statistic, precisions)
    assert held + sum(sizes.values()) <= bytes_of(structure, 12)


# ------------------------------------------------------------------ H or the Grams of the rows


@pytest.mark.parametrize("name", ["full", "blockdiag"])
@pytest.mark.parametrize("tall", [1, 40])
def test_the_form_with_fewer_multiplications_and_no_more_memory(name: str, tall: int) -> None:
    weights = {"w": torch.zeros(30, tall), "b": torch.zeros(30)}
    sizes = [30 * tall, 30] if name == "blockdiag" else [30 * tall + 30]
    kinds = {}
    for rows in (1, 5, 20, 30, 50, 100, 500, 1200, 2000):
        structure = make_structure(name, weights, num_rows=rows)
        kinds[rows] = isinstance(structure, BlockKernel)
        assert isinstance(structure, BlockKernel | BlockDiagonal)
        dense = make_structure(name, weights)
        assert isinstance(dense, BlockDiagonal)
        by_rows = sum(2 * rows**2 * n + rows**3 / 3 for n in sizes)
        by_h = sum(2 * rows * n**2 + n**3 / 3 for n in sizes)
        if kinds[rows]:
            assert by_rows < by_h
            assert bytes_of(structure, rows) <= bytes_of(dense, rows)
        else:
            kernel = BlockKernel(dense, weights, {n: n for n in weights})
            assert by_rows >= by_h or bytes_of(kernel, rows) > bytes_of(dense, rows)
        # Rows whose products have a closed form, and where they are kept, have no part in it.
        other = make_structure(
            name, weights, num_rows=rows, contracted={"w": MatrixUse(1, tall, 30).numbers}
        )
        assert type(other) is type(structure)
    assert kinds[1] and not kinds[2000]
    assert kinds[500] == (tall == 40)


def test_grams_that_are_too_large_to_keep_are_not_predicted():
    weights = {str(i): torch.zeros(2) for i in range(10)}
    structure = make_structure("ntk", weights)
    assert bytes_of(structure, 20_000) == 4 * (20_000 * 20 + 5 * 20_000**2)


@pytest.mark.parametrize(
    ("name", "cheaper"),
    [
        ("full", "'blockdiag'"),
        ("ntk", "a smaller subset"),
        ("blockdiag", "parameter_partition"),
        ("kfac", "'diag'"),
        ("diag", "micro_batch"),
    ],
)
def test_the_error_has_the_number_what_is_free_and_the_cheaper_choice(name, cheaper, monkeypatch):
    weights = {"w": torch.zeros(3000, 1000)}
    structure = make_structure(name, weights, frozenset({"w"}))
    needed = bytes_of(structure, 4000)
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: needed - 1)
    with pytest.raises(MemoryBudgetError, match=cheaper) as caught:
        check_memory(structure, 4000, torch.device("cpu"), needed)
    assert f"{needed / GIB:.3g} GiB" in str(caught.value)
    assert repr(name) in str(caught.value)
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: needed)
    check_memory(structure, 4000, torch.device("cpu"), needed)


@pytest.mark.parametrize(("num_outputs", "shape"), [(1000, ()), (999, ()), (1000, (2,))])
def test_many_outputs_without_positions_get_a_hint(num_outputs, shape, monkeypatch):
    model, likelihood = nn.Linear(2, num_outputs), Gaussian()
    x, y = torch.zeros(4, *shape, 2), torch.zeros(4, *shape, num_outputs)
    num_data = y[..., 0].numel()
    evidence = Evidence(model, likelihood, GaussianPrior(), estimator="ntk-2-1", num_data=num_data)
    block = next(iter(evidence.blocks((x, y))))
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: 1)
    with pytest.raises(MemoryBudgetError, match="'ntk' with 2 rows needs about") as caught:
        evidence.estimate(block)
    hint = (
        "If outputs belong to positions (pixels, words), return the shape (m, …, C). Then only"
        " drawn positions go through the last layer."
    )
    assert str(caught.value).endswith(hint) == (num_outputs == 1000 and not shape)


def test_what_is_kept_is_given_back_before_anything_is_refused(monkeypatch):
    structure = make_structure("full", {"w": torch.zeros(10)})
    needed = bytes_of(structure, 1)
    free = [needed]

    def give_back():
        free[0] += 1

    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: free[0])
    monkeypatch.setattr(memory, "give_back", give_back)
    cpu = torch.device("cpu")
    check_memory(structure, 1, cpu, needed)
    assert free == [needed]
    free[0] = needed - 1
    check_memory(structure, 1, cpu, needed)
    assert free == [needed]
    free[0] = needed - 2
    with pytest.raises(MemoryBudgetError):
        check_memory(structure, 1, cpu, needed)


def test_nothing_is_refused_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(memory, "SMALL_BYTES", 0)
    monkeypatch.setattr(memory, "_free_bytes", lambda device: None)
    structure = make_structure("full", {"w": torch.zeros(10_000)})
    check_memory(structure, 1, torch.device("cpu"), bytes_of(structure, 1))


def test_available_bytes_here():
    free = available_bytes(torch.device("cpu"))
    assert free is None or 0 < free < 2**50


def test_the_memory_that_the_system_reports(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    assert available_bytes(torch.device("cpu")) == 5000 * 1024


def test_other_devices_do_not_tell():
    assert available_bytes(torch.device("meta")) is None
