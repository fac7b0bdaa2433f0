"""What every test runs under: shapes checked at run time, one thread, deterministic examples."""

import os
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import settings

# Before anything imports evigrad, so that every annotated shape in it is checked when called.
jaxtyping.install_import_hook("evigrad", "beartype.beartype")

torch.set_num_threads(1)

# The same examples in every run, and no deadline: a slow machine is not a wrong result.
settings.register_profile(
    "evigrad", derandomize=True, deadline=None, max_examples=25, print_blob=True
)
settings.load_profile("evigrad")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder with the real data sets; the test is skipped where there is none."""
    named = os.environ.get("EVIGRAD_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data here: EVIGRAD_DATA is not set to a folder, and no {folder}")
    return folder


@pytest.fixture
def by_h() -> Iterator[None]:
    """``full`` and ``blockdiag`` from H whatever is cheaper: another computation than ``ntk``."""
    from evigrad.curvature import block_kernel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_kernel, "is_cheaper", lambda *_: False)
        yield
