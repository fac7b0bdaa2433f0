"""TF32 is off during evaluations on a GPU. The settings are global, so they exist on a CPU too."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from evigrad import Evidence
from evigrad.core.curvature import linalg
from evigrad.likelihoods import Categorical
from evigrad.network import modes
from evigrad.priors import GaussianPrior

BACKENDS: Any = torch.backends
READS: dict[str, Callable[[], Any]] = {
    "older": torch.get_float32_matmul_precision,
    "older, cuda": lambda: BACKENDS.cuda.matmul.allow_tf32,
    "older, cudnn": lambda: BACKENDS.cudnn.allow_tf32,
    "products": lambda: BACKENDS.cuda.matmul.fp32_precision,
    "products of the CPU": lambda: BACKENDS.mkldnn.matmul.fp32_precision,
    "convolutions": lambda: BACKENDS.cudnn.conv.fp32_precision,
    "recurrent layers": lambda: BACKENDS.cudnn.rnn.fp32_precision,
}
# How users choose the precision of products, in both of PyTorch's interfaces.
CHOICES: dict[str, Callable[[], None]] = {
    "default": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allowed": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "newer": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with modes.without_tf32():
        yield


def state() -> dict[str, Any]:
    values = {}
    for name, read in READS.items():
        try:
            values[name] = read()
        except RuntimeError:  # of an older setting that contradicts a newer one
            values[name] = "contradiction"
    return values


@pytest.mark.parametrize("choice", CHOICES)
def test_settings_are_restored(choice: str) -> None:
    CHOICES[choice]()
    before = state()
    with modes.without_tf32():
        inside = state()
        with modes.without_tf32():
            pass
        assert state() == inside
    assert set(inside.values()) == {"highest", False, "ieee"}
    assert state() == before


def test_evaluations_are_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of the network, and the factorization after them, if the device had TF32."""
    monkeypatch.setattr(modes, "TF32_DEVICE", "cpu")
    torch.set_float32_matmul_precision("high")
    before, precisions = state(), list[Any]()

    def note(*_: Any) -> None:
        precisions.append(BACKENDS.cuda.matmul.fp32_precision)

    factor = linalg.factor_identity_plus
    monkeypatch.setattr(linalg, "factor_identity_plus", lambda s: (note(), factor(s))[1])
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(note)
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    prior = GaussianPrior("layerwise")
    evidence = Evidence(model, Categorical(), prior, estimator="ntk-6-1", num_data=6, generator=0)
    evidence.backward(x, y)
    evidence.posterior((x, y), structure="kfac")(x)
    assert len(precisions) > 5 and set(precisions) == {"ieee"}
    assert state() == before
