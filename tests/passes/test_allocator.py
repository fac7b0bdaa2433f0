"""Freed memory that is kept while it is wanted, and not afterwards."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from evigrad import cli
from evigrad.passes import allocator
from evigrad.passes.allocator import kept_memory

# What a process has to do with memory depends on all that it did before: a fresh one tells.
SCRIPT = """
import json, resource, threading, torch
from evigrad import Schedule, fit  # with all that it needs, whose small objects fill holes
from evigrad.passes.allocator import give_back, kept_memory

def pages():
    # Those that the system has to supply for a large tensor, made and freed again and again: the
    # fewest, and the most but for three times, as a small object in the way costs a second place.
    found = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(50 * 2**20)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found), sorted(found)[4]

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

def train():
    data = torch.randn(20, 3), torch.randint(2, (20,))
    found = []
    fit(
        torch.nn.Linear(3, 2), data, likelihood="categorical", estimator="ntk-5-1",
        schedule=Schedule(epochs=2, burn_in=1, every=1, steps=1),
        progress=False, callbacks=[lambda _: found.append(pages())],
    )
    return [most for _, most in found]

def beside():
    with kept_memory():
        pass

seen = {"usual": pages()[0]}
at_first = resident()
with kept_memory():
    seen["kept"] = pages()[1]
    seen["held"] = resident() - at_first
    give_back()
    seen["given back"] = resident() - at_first
    other = threading.Thread(target=beside)
    other.start()
    other.join()
    try:
        with kept_memory():
            raise ValueError
    except ValueError:
        seen["within"] = pages()[1]
seen["at last"] = resident() - at_first
seen["training"] = train()
seen["after training"] = resident() - at_first
print(json.dumps(seen))
"""
SIZE = 4 * 50 * 2**20
PAGES = SIZE // 4096
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# PyTorch for other processors has other allocators, and huge pages are faults of another number.
needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc"
    or platform.machine() != "x86_64"
    or "LD_PRELOAD" in os.environ
    or (HUGE_PAGES.exists() and "[always]" in HUGE_PAGES.read_text()),
    reason="needs tensors of glibc's allocator, and pages of 4 KiB",
)


def seen_by_a_process(**settings):
    kept = {k: v for k, v in os.environ.items() if k not in allocator.ENVIRONMENT}
    run = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env=kept | settings)
    return json.loads(done.stdout)


@needs_glibc
def test_the_next_tensor_gets_the_pages_of_the_last_one():
    seen = seen_by_a_process()
    assert seen["usual"] > 0.9 * PAGES
    # An inner block, or one of another thread, ends nothing.
    assert max(seen["kept"], seen["within"], *seen["training"]) < 0.01 * PAGES
    assert seen["held"] > 0.9 * SIZE
    assert max(seen["given back"], seen["at last"], seen["after training"]) < 0.6 * SIZE


@needs_glibc
def test_settings_of_the_environment_are_left_alone():
    seen = seen_by_a_process(MALLOC_MMAP_MAX_="65536")
    assert min(seen["usual"], seen["kept"], *seen["training"]) > 0.9 * PAGES


@pytest.fixture
def options_set(monkeypatch):
    calls = []
    monkeypatch.setattr(allocator, "_glibc", lambda: "glibc")
    monkeypatch.setattr(allocator, "_set", lambda _, options: calls.append(options))
    monkeypatch.setattr(allocator, "give_back", lambda: calls.append("given back"))
    for name in allocator.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.mark.parametrize("name", allocator.ENVIRONMENT)
def test_every_one_of_these_settings(name, options_set, monkeypatch):
    monkeypatch.setenv(name, "glibc.malloc.tcache_count=1" if name == "GLIBC_TUNABLES" else "1")
    with kept_memory():
        pass
    assert not options_set


def test_other_tunables_do_not_matter(options_set, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.nns=4")
    with kept_memory():
        pass
    assert options_set == [allocator._KEEPING, allocator._USUAL, "given back"]


def test_another_c_library_is_left_alone(options_set, monkeypatch):
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    with kept_memory():
        pass
    assert not options_set


def test_a_command_keeps_memory(options_set, capsys):
    seen = []

    def run(*_):
        seen.append(list(options_set))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli.module_of("doctor"), "run", run)
        assert cli.run(["doctor"]) == 0
    assert seen == [[allocator._KEEPING]] and options_set[-1] == "given back"


def test_a_training_of_many_keeps_memory(options_set, tmp_path):
    trainings = pytest.importorskip("experiments.trainings")

    def work(config, place):
        assert options_set == [allocator._KEEPING]
        return {"value": 1.0}

    config = {"estimator": "ntk-10-1", "seed": 0}
    assert trainings.each_done(work, [config], trainings.Place(tmp_path)) == [{"value": 1.0}]
    assert options_set[-1] == "given back"
