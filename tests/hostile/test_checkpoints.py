"""Checkpoints of which any byte or any entry may be wrong."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile.cases import errors_of_ours, hostile, mutated, values
from hypothesis import strategies as st
from training.small_runs import net

import evigrad
from evigrad import Schedule
from evigrad.training import RunDirectory

_GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 4, generator=_GENERATOR), torch.arange(12) % 3


def train(folder: Path, **options: Any) -> Any:
    schedule = Schedule(
        epochs=4, batch_size=6, burn_in=1, every=1, steps=1, eval_every=0, checkpoint_every=1
    )
    return evigrad.fit(
        net(),
        (X, Y),
        estimator="ntk-4-1",
        schedule=schedule,
        run_dir=folder,
        progress=False,
        **options,
    )


class _Stop(BaseException):
    pass


@pytest.fixture(scope="module", autouse=True)
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended in the third of four epochs: it has checkpoints of two."""

    def stop(row: Any) -> None:
        if row["epoch"] == 3:
            raise _Stop

    folder = tmp_path_factory.mktemp("begun") / "run"
    with pytest.raises(_Stop):
        train(folder, callbacks=[stop])
    RUN["folder"], RUN["state"] = folder, RunDirectory(folder, resume=True).read_checkpoint()
    RUN["before"] = torch.load(folder / "checkpoint_before.pt", weights_only=True)
    return folder


RUN: dict[str, Any] = {}


def paths_of(state: Any) -> list[tuple[Any, ...]]:
    """The way to every entry of nested dictionaries and lists."""
    parts = state.items() if isinstance(state, dict) else enumerate(state)
    paths: list[tuple[Any, ...]] = []
    for key, part in parts if isinstance(state, dict | list | tuple) else ():
        paths.append((key,))
        if isinstance(part, dict | list | tuple):
            paths += [(key, *deeper) for deeper in paths_of(part)]
    return paths


def put(state: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A copy of the state with another entry at a path, or without it."""
    key, *deeper = path
    changed = dict(state) if isinstance(state, dict) else list(state)
    if deeper:
        changed[key] = put(state[key], tuple(deeper), change)
    elif change is _LEFT_OUT:
        del changed[key]
    else:
        changed[key] = change(state[key]) if callable(change) else change
    return changed


def entries_of(old: Any) -> int:
    """How long a list or a tensor is; 0 for what has no length."""
    if isinstance(old, torch.Tensor) and not old.dim():
        return 0
    return len(old) if isinstance(old, list | torch.Tensor) else 0


_LEFT_OUT = object()
_CHANGES = st.one_of(
    st.just(_LEFT_OUT),
    values().map(lambda value: lambda old: copy.deepcopy(value)),
    st.sampled_from(
        [
            lambda old: torch.tensor(float("nan")),
            lambda old: torch.zeros(2, 3, dtype=torch.int64),
            lambda old: old * float("nan") if torch.is_tensor(old) else None,
            lambda old: old[:-1] if entries_of(old) else {},
            lambda old: old.double() if torch.is_tensor(old) else str(old),
            lambda old: [old],
        ]
    ),
)


def written(folder: Path, state: Any = None, content: bytes | None = None) -> Path:
    """The run with another checkpoint, and none before it."""
    path = folder / "run"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(RUN["folder"], path)
    (path / "checkpoint_before.pt").unlink()
    if content is None:
        (path / "checkpoint.pt").unlink()
        RunDirectory(path, resume=True).write_checkpoint(state)
    else:
        (path / "checkpoint.pt").write_bytes(content)
    return path


# Known when the run is over.
_BYTES = st.deferred(lambda: mutated((RUN["folder"] / "checkpoint.pt").read_bytes()))


@hostile(_BYTES, 20, 8_000)
def test_bytes(tmp_path: Path, content: bytes) -> None:
    """The state that was written, or an error; beside an older one: one of both, never a third."""
    path = written(tmp_path, content=content)
    with errors_of_ours():
        state = RunDirectory(path, resume=True).read_checkpoint()
        assert str(state) == str(RUN["state"])
    shutil.copy(RUN["folder"] / "checkpoint_before.pt", path)
    with errors_of_ours():
        state = RunDirectory(path, resume=True).read_checkpoint()
        assert state is not None
        assert str(state) in (str(RUN["state"]), str(RUN["before"])) or state["format"] != 4


@hostile(st.tuples(st.integers(0, 10**6), _CHANGES), 15, 4_000, 0.1)
def test_entries(tmp_path: Path, case: tuple[int, Any]) -> None:
    """Sealed by a digest that fits: what was changed on purpose is refused by name, or harmless."""
    number, change = case
    paths = paths_of(RUN["state"])
    path = written(tmp_path, put(RUN["state"], paths[number % len(paths)], change))
    with errors_of_ours():
        evigrad.load(path, net())
    with errors_of_ours():
        result = train(path, resume=True)
        assert all(weight.isfinite().all() for weight in result.model.parameters())
