import pytest
import torch
from curvature.fakes import Plan, Root, make_fake, random, weights_of

from evigrad.curvature import STRUCTURES, available_bytes, check_memory, make_structure, memory
from evigrad.curvature.kernel_rows import SLAB_BYTES
from evigrad.errors import MemoryBudgetError

GIB = 2**30


def structures(weights, **settings):
    return {
        name: make_structure(name, weights, Plan(frozenset({"w"})), **settings)
        for name in STRUCTURES
    }


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_prediction_covers_the_statistic_and_is_of_its_order(name):
    shapes = {"w": (20, 10), "b": (20,)}
    fake = make_fake(6, 3, shapes)
    plan = Plan()  # no factors in the fake: kfac has its dense blocks
    structure = make_structure(name, weights_of(fake), plan)
    statistic = structure.accumulate(None, fake, Root(random(6, 2, 3)))
    held = sum(tensor.numel() * tensor.element_size() for tensor in statistic.tensors())
    assert held <= structure.predicted_bytes(12) <= 10 * held


def test_predictions_by_hand():
    weights = {"w": torch.zeros(300, 200), "b": torch.zeros(300)}
    made = structures(weights)
    p = 60_300
    assert made["full"].predicted_bytes(10) == 4 * 5 * p**2
    assert made["diag"].predicted_bytes(10) == 4 * 5 * p
    assert made["blockdiag"].predicted_bytes(10) == 4 * (3 * (60_000**2 + 300**2) + 2 * 60_000**2)
    # rows, two slabs of the largest parameter's columns, two Grams, five more squares
    assert made["ntk"].predicted_bytes(50) == 4 * (50 * (p + 2 * 60_000) + 7 * 50**2)
    assert made["ntk"].predicted_bytes(500) == 4 * (500 * p + 7 * 500**2) + 2 * SLAB_BYTES
    kronecker = 3 * (300**2 + 200**2) + 3 * 60_000
    assert made["kfac"].predicted_bytes(10) == 4 * (kronecker + 5 * 300**2)
    assert made["kfac"].predicted_bytes(10) == made["kfac"].predicted_bytes(10_000)
    double = structures(weights, gram_dtype=torch.float64)
    assert double["full"].predicted_bytes(10) == 2 * made["full"].predicted_bytes(10)


def test_grams_that_are_too_large_to_keep_are_not_predicted():
    weights = {str(i): torch.zeros(2) for i in range(10)}
    structure = make_structure("ntk", weights, Plan())
    assert structure.predicted_bytes(20_000) == 4 * (20_000 * 24 + 5 * 20_000**2)


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
    structure = make_structure(name, weights, Plan(frozenset({"w"})))
    needed = structure.predicted_bytes(4000)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    with pytest.raises(MemoryBudgetError, match=cheaper) as caught:
        check_memory(structure, 4000, torch.device("cpu"))
    assert f"{needed / GIB:.3g} GiB" in str(caught.value)
    assert repr(name) in str(caught.value)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed)
    check_memory(structure, 4000, torch.device("cpu"))


def test_nothing_is_refused_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    structure = make_structure("full", {"w": torch.zeros(10_000)}, Plan())
    check_memory(structure, 1, torch.device("cpu"))


def test_available_bytes_here():
    free = available_bytes(torch.device("cpu"))
    assert free is None or 0 < free < 2**50


def test_the_smaller_of_machine_and_container(tmp_path, monkeypatch):
    meminfo, limit, used = (tmp_path / name for name in ("meminfo", "max", "current"))
    for name, path in (("MEMINFO", meminfo), ("CGROUP_LIMIT", limit), ("CGROUP_USED", used)):
        monkeypatch.setattr(memory, name, path)
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  5000 kB\n")
    assert available_bytes(torch.device("cpu")) == 5000 * 1024
    limit.write_text("max\n")
    used.write_text("1000\n")
    assert available_bytes(torch.device("cpu")) == 5000 * 1024
    limit.write_text("4000\n")
    assert available_bytes(torch.device("cpu")) == 3000


def test_other_devices_do_not_tell():
    assert available_bytes(torch.device("meta")) is None
