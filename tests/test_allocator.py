"""Freed memory that is kept while it is wanted, and not afterwards."""

import ctypes
import json
import os
import resource
import subprocess
import sys

import pytest
import torch

from evigrad import allocator
from evigrad.allocator import held_bytes, kept_memory
from evigrad.curvature import available_bytes, memory

# What a process has to do with memory depends on all that it did before: a fresh one tells.
SCRIPT = """
import json, resource, torch, evigrad
from evigrad.allocator import held_bytes, kept_memory

def pages():
    # Those that the system has to supply for a large tensor, made and freed again and again.
    found = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(50 * 2**20)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found[1:])

def train():
    data = torch.randn(20, 3), torch.randint(2, (20,))
    found = []
    evigrad.fit(
        torch.nn.Linear(3, 2), data, likelihood="categorical", estimator="ntk-5-1", epochs=2,
        burn_in=1, every=1, steps=1, progress=False, callbacks=[lambda _: found.append(pages())],
    )
    return found

seen = {"usual": pages(), "held at first": held_bytes()}
with kept_memory():
    seen["kept"] = pages()
    seen["held"] = held_bytes()
    in_use = torch.ones(50 * 2**20)
    seen["held in use"] = held_bytes()
    del in_use
    try:
        with kept_memory():
            raise ValueError
    except ValueError:
        seen["within"] = pages()
seen["held at last"] = held_bytes()
seen["training"] = train()
seen["held after training"] = held_bytes()
print(json.dumps(seen))
"""
SIZE = 4 * 50 * 2**20
PAGES = SIZE // resource.getpagesize()

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or newer"
)


def seen_by_a_process(**settings):
    kept = {k: v for k, v in os.environ.items() if k not in allocator.OWN_SETTINGS}
    run = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=kept | settings)
    return json.loads(done.stdout)


@needs_glibc
def test_the_next_tensor_gets_the_pages_of_the_last_one():
    seen = seen_by_a_process()
    assert seen["usual"] > 0.9 * PAGES
    assert seen["kept"] < 0.01 * PAGES
    assert seen["within"] < 0.01 * PAGES  # an inner block ends nothing
    assert max(seen["training"]) < 0.01 * PAGES
    # What is kept is known, and given back in the end.
    assert seen["held"] - seen["held at first"] > 0.9 * SIZE
    assert seen["held in use"] < seen["held"] - 0.9 * SIZE
    assert seen["held at last"] < 0.1 * SIZE
    assert seen["held after training"] < 0.1 * SIZE


@needs_glibc
def test_settings_of_the_environment_are_left_alone():
    seen = seen_by_a_process(MALLOC_MMAP_MAX_="65536")
    assert min(seen["usual"], seen["kept"], *seen["training"]) > 0.9 * PAGES


@pytest.mark.parametrize("name", allocator.OWN_SETTINGS)
def test_every_one_of_these_settings(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr(allocator, "_glibc", lambda: pytest.fail("looked for the allocator"))
    with kept_memory():
        pass


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    monkeypatch.setattr(allocator, "_set", lambda *_: pytest.fail("set an option"))
    with kept_memory():
        pass
    assert held_bytes() == 0


def test_what_the_allocator_holds_is_free(monkeypatch):
    monkeypatch.setattr(memory, "_system_bytes", lambda: 1000)
    monkeypatch.setattr(memory, "_cgroup_bytes", lambda: None)
    monkeypatch.setattr(memory, "held_bytes", lambda: 30)
    assert available_bytes(torch.device("cpu")) == 1030
    monkeypatch.setattr(memory, "_system_bytes", lambda: None)
    assert available_bytes(torch.device("cpu")) is None
