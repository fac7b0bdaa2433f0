"""Prints how far a warm ``backward`` travels through the package, for `test_call_path.py`.

In a process of its own, in which nothing checks shapes and no other call has been made before.
"""

import json
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import evigrad
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

PACKAGE = str(Path(evigrad.__file__).parent)
# Parts of the function that they stand in, of which newer versions of Python make no calls.
INSIDE = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<lambda>")
# Operations that wait for the device, because the host needs their results.
READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select")
# Plans are made and checked in passes 1, 2, 4, 8 and 16.
WARM_UP = 20


class CallPath:
    """The functions of the package that are called inside, and how deep their frames lie."""

    def __init__(self) -> None:
        self.functions: dict[CodeType, None] = {}  # in the order of their first calls
        self.depth = self._frames = 0

    def __enter__(self) -> "CallPath":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_counted = code.co_filename.startswith(PACKAGE) and code.co_name not in INSIDE
        if event == "call" and is_counted:
            self.functions[code] = None
            self._frames += 1
            self.depth = max(self.depth, self._frames)
        elif event == "return" and is_counted:
            self._frames -= 1

    def counts(self) -> tuple[int, int, int]:
        """Functions, files, frames."""
        return len(self.functions), len({code.co_filename for code in self.functions}), self.depth

    def names(self) -> list[tuple[str, str]]:
        """File, and name of a class or function in it, in the order of the first calls."""
        return [
            (str(Path(code.co_filename).relative_to(PACKAGE)), name)
            for code in self.functions
            for name in code.co_qualname.split(".")
        ]


class HostReads(TorchDispatchMode):
    """How often the host reads tensors inside, except by ``tolist``, which is not dispatched."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket.__name__ in READS
        return func(*args, **(kwargs or {}))


class Lists(TorchFunctionMode):
    """How often the host reads a whole tensor by ``tolist``."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.Tensor.tolist
        return func(*args, **(kwargs or {}))


def path_of(estimator: str) -> tuple[CallPath, int]:
    """Of the plainest network, of which the precisions of its layers are learned."""
    torch.manual_seed(0)
    x, y = torch.randn(300, 8), torch.randint(4, (300,))
    evidence = evigrad.Evidence(
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        Categorical(),
        GaussianPrior("layerwise", 5.0),
        estimator=estimator,
        num_data=len(x),
        generator=0,
    )
    x, y = x[:100], y[:100]
    for _ in range(WARM_UP):
        evidence.backward(x, y)
    with CallPath() as path:
        evidence.backward(x, y)
    with HostReads() as reads, Lists() as lists:
        evidence.backward(x, y)
    return path, reads.count + lists.count


if __name__ == "__main__":
    torch.set_num_threads(1)
    paths = {name: path_of(name) for name in sys.argv[1:]}
    print(
        json.dumps(
            {
                name: {"counts": (*path.counts(), reads), "names": path.names()}
                for name, (path, reads) in paths.items()
            }
        )
    )
