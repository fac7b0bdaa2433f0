"""An evidence on a device that is not the CPU but computes on it, where mixed devices are errors.

The device is PyTorch's open backend, PrivateUse1, and is compiled by the test. A process can have
only one such backend, so the evaluations run in a process of their own.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

SOURCE = Path(__file__).with_name("second_device.cpp")
N, OUTPUTS = 100, 3
ESTIMATORS = ("ntk-100-1", "kfac-100-1", "ntk-100-rows-anchored")


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, OUTPUTS))
    convolution = nn.Conv2d(2, 3, 3, padding=1)
    head = nn.Linear(3 * 9, OUTPUTS)
    convolutional = nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), head)
    return {
        "linear": (linear.double(), torch.randn(N, 4, generator=generator).double()),
        "convolutional": (
            convolutional.double(),
            torch.randn(N, 2, 6, 6, generator=generator).double(),
        ),
    }


def numbers(device: str) -> dict[str, list[float]]:
    """Return estimates, gradients and predictions of all networks and estimators."""
    results: dict[str, list[float]] = {}
    for name, (model, inputs) in networks().items():
        x, y = inputs.to(device), (torch.arange(N) % OUTPUTS).to(device)
        for estimator in ESTIMATORS:
            settings: dict[str, Any] = {"num_data": N, "generator": 0}
            prior = GaussianPrior("layerwise")
            evidence = Evidence(
                model.to(device), Categorical(), prior, estimator=estimator, **settings
            )
            (block,) = evidence.blocks((x, y)).take(1)
            estimate, values = evidence.estimate(block), list[Tensor]()
            evidence.backward(block)
            for parameter in evidence.hyperparameters().values():
                assert parameter.grad is not None
                assert parameter.grad.device == x.device
                values.append(parameter.grad)
            structure = estimator.partition("-")[0]
            prediction = evidence.posterior((x, y), structure=structure)(x[:5])
            assert prediction.mean.device == x.device
            values += [prediction.mean, prediction.variance]
            flat = [v for value in values for v in value.detach().cpu().flatten().tolist()]
            results[f"{name}, {estimator}"] = [estimate.log_evidence, estimate.log_det, *flat]
    return results


def compile_device(folder: str) -> None:
    from torch.utils import cpp_extension

    os.environ["MAX_JOBS"] = "1"
    utils: Any = torch.utils
    utils.rename_privateuse1_backend("host")
    functions = {"is_available": True, "is_initialized": True, "_is_in_bad_fork": False}
    module: Any = ModuleType("host")
    for name, value in (functions | {"device_count": 1, "current_device": 0}).items():
        setattr(module, name, lambda value=value: value)
    module._lazy_init = module.manual_seed_all = lambda *_: None
    torch._register_device_module("host", module)
    cpp_extension.load(
        "second_device",
        [str(SOURCE)],
        extra_cflags=["-O0", "-g0"],
        build_directory=folder,
        is_python_module=False,
    )


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("c++") is None or shutil.which("ninja") is None, reason="no C++ compiler or ninja"
)
def test_a_second_device_computes_the_numbers_of_the_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    on_device, expected = json.loads(done.stdout.splitlines()[-1]), numbers("cpu")
    assert on_device.keys() == expected.keys()
    for key, values in expected.items():
        assert len(values) > 30 and all(map(math.isfinite, values))
        assert on_device[key] == pytest.approx(values, rel=1e-9, abs=1e-12), key


if __name__ == "__main__":
    compile_device(sys.argv[1])
    # Operations on tensors of two devices are errors, or the test would show nothing.
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(torch.ones(2, device="host"), torch.ones(2))
    print(json.dumps(numbers("host")))
