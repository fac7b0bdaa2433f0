"""Records in the checkpoint of a run, and checks that a checkpoint matches the current run."""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.errors import (
    ConfigurationError,
    EvigradError,
    EvigradWarning,
    is_out_of_memory,
    listed,
)
from evigrad.evidence import Evidence
from evigrad.inputs import Inputs, bare_names, tensors_of, with_bare_names
from evigrad.measure.metrics import probe_outputs
from evigrad.training.settings import current_record, plain

CHECKPOINT_FORMAT = 4
# Settings that change no result. All other settings must be the same when a run is resumed.
FREE_SETTINGS = ("checkpoint_every",)
# Settings that may differ between ranks, because each has its own memory.
OF_A_RANK = (*FREE_SETTINGS, "micro_batch", "memory_budget", "rows_device")

# Number of examples whose outputs are compared with the saved ones, and the relative difference
# that rounding on another machine may cause.
PROBED = 2
_SAME_OUTPUTS = 1e-2
# An error lists at most this many names.
_NAMED = 4


def network_state(model: nn.Module, probe: Inputs) -> dict[str, Any]:
    """Return all parameters and buffers of a network, and its outputs for a few inputs."""
    state = model.state_dict()
    buffers = {name: b for name, b in model.named_buffers() if name not in state}
    return {
        # Saved with its outputs, because a data set may return other items the next time.
        "probe": [part.cpu() for part in tensors_of(probe)],
        "outputs": probe_outputs(model, probe).cpu(),
        "model": with_bare_names(model, state),
        "buffers": with_bare_names(model, buffers),
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Return what affects the last digits of results: PyTorch version, device and CPU threads."""
    return {
        "torch": str(torch.__version__),
        "device": device.type,
        "threads": torch.get_num_threads(),
    }


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Use ``count`` CPU threads within the context. Their number affects how sums are rounded."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fitting(what: str) -> Iterator[None]:
    """Convert errors from loading a saved state, called ``what``, to ConfigurationError."""
    try:
        yield
    # Entries may be missing, or of any type: anybody can write the file of a state.
    except Exception as error:
        if isinstance(error, EvigradError) or is_out_of_memory(error):
            raise
        words = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigurationError(
            f"{what} does not match this run or is damaged ({words.rstrip('.')}). Start a new run"
            " in another folder."
        ) from error


def load_optimizer(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, groups: bool = False
) -> None:
    """Load an optimizer's state and learning rates, or with ``groups`` all its saved options."""
    if groups:  # a custom optimizer, whose state can be anything
        optimizer.load_state_dict(dict(saved))
        return
    # Take a step with a twin to learn which state such an optimizer keeps.
    sample = nn.Parameter(torch.zeros((), device="cpu"))
    sample.grad = torch.zeros((), device="cpu")
    twin = type(optimizer)([sample], **optimizer.defaults)
    twin.step()
    kinds = {name: type(value) for name, value in twin.state[sample].items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in saved["state"].items():
        wrong = [
            name
            for name, value in state.items()
            if isinstance(value, Tensor)
            and value.shape != parameters[index].shape
            and not (value.ndim == 0 and bool(0 <= value < math.inf))
        ]
        if wrong or {name: type(value) for name, value in state.items()} != kinds:
            raise ConfigurationError(
                f"The saved optimizer state of parameter {index} contains"
                f" {listed(list(map(str, state)))}, which does not match the optimizer or the"
                " parameter. Use the same optimizer as at the start of the run."
            )
    param_groups = optimizer.state_dict()["param_groups"]
    rates = [group["lr"] for group in saved["param_groups"]]
    for group, rate in zip(param_groups, rates, strict=True):
        if not isinstance(rate, float) or not 0 <= rate < math.inf:
            raise ConfigurationError(
                f"The saved learning rate must be a non-negative number, got {rate!r}."
                " Start a new run in another folder."
            )
        group["lr"] = rate
    optimizer.load_state_dict({"state": saved["state"], "param_groups": param_groups})


def check_format(state: Mapping[str, Any], where: object) -> None:
    """Raise ConfigurationError unless the checkpoint in ``where`` has the current format."""
    if state.get("format") != CHECKPOINT_FORMAT:
        raise ConfigurationError(
            f"The checkpoint in {where} must have format {CHECKPOINT_FORMAT}, got"
            f" {state.get('format')}. Start a new run in another folder, or resume this run with"
            " the version of evigrad that started it."
        )


def check_settings(saved: Mapping[str, Any], settings: Mapping[str, Any], where: object) -> None:
    """Raise ConfigurationError if settings differ from the saved ones, and name these settings."""
    saved = current_record(saved)
    names = [name for name in saved if name in settings and name not in FREE_SETTINGS]
    differing = [n for n in names if _comparable(saved[n]) != _comparable(settings[n])]
    if differing:
        words = _listed([f"{n}={saved[n]}, not {settings[n]}" for n in differing])
        raise ConfigurationError(
            f"The run in {where} has {words}. To resume it, use the same settings. To use"
            " different settings, start a new run in another folder."
        )


def shared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that all ranks must share, as values that can be compared."""
    return {n: _comparable(value) for n, value in settings.items() if n not in OF_A_RANK}


def check_data(
    saved: Mapping[str, str | None], fingerprints: Mapping[str, str | None], where: object
) -> None:
    """Raise ConfigurationError if the training or test data differ from the saved run's data."""
    for part, words in (("train", "training"), ("test", "test")):
        if (saved[part] is None) != (fingerprints[part] is None):
            raise ConfigurationError(
                f"The run in {where} was started {'without' if saved[part] is None else 'with'}"
                f" {words} data. Resume it in the same way."
            )
        if saved[part] != fingerprints[part]:
            raise ConfigurationError(
                f"The {words} data differ from the data of the run in {where} in values, types or"
                " order. Use the same data, or start a new run in another folder."
            )


def check_network(state: Mapping[str, Any], evidence: Evidence, where: object) -> None:
    """Raise ConfigurationError if names, shapes, types or roles of parameters have changed."""
    model = evidence.model
    saved = with_bare_names(model, {key: state[key] for key in ("model", "learned")})
    present = with_bare_names(model, model.state_dict())
    differences = _differences(_layout(saved["model"]), _layout(present))
    learned = {"weights": evidence.weights(), "hyperparameters": evidence.hyperparameters()}
    for kind, names in learned.items() if not differences else ():
        word = f"the {kind.removesuffix('s')} "
        differences += _differences(
            dict.fromkeys([word + name for name in saved["learned"][kind]], ""),
            dict.fromkeys([word + name for name in names], ""),
        )
    if differences:
        raise ConfigurationError(
            f"The network differs from the network saved in {where}: {_listed(differences)}. Use"
            " the same network, or start a new run in another folder."
        )


def load_network(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load weights, hyperparameters and all buffers, even those that ``state_dict`` omits."""
    saved: Mapping[str, Any] = state["model"]
    names = bare_names(model, model.state_dict())
    if saved.keys() != names.keys():  # the model is wrapped, for example by torch.compile
        in_model = {bare: name for name, bare in names.items()}
        saved = {in_model.get(name, name): value for name, value in saved.items()}
    model.load_state_dict(saved)
    named = dict(model.named_buffers())
    bare = bare_names(model, named)
    buffers = named | {bare[name]: buffer for name, buffer in named.items()}
    with torch.no_grad():
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)


def check_outputs(
    saved: Tensor, outputs: Tensor, here: Mapping[str, Any], there: Mapping[str, Any], where: object
) -> None:
    """Check that ``outputs`` match the ``saved`` ones, and warn if the machine has changed."""
    same = saved.shape == outputs.shape and saved.dtype == outputs.dtype
    if not same or not (outputs - saved).norm() <= _SAME_OUTPUTS * saved.norm():
        raise ConfigurationError(
            f"The network has the same parameters as the network of the run in {where}, but"
            " different outputs, because layers or activations differ. Use the same network, or"
            " start a new run in another folder."
        )
    changed = [
        f"{words} {there[name]} then, {here[name]} now"
        for name, words in (("torch", "PyTorch"), ("device", "on"))
        if there[name] != here[name]
    ]
    if not changed and not torch.equal(saved, outputs):
        changed = ["the processor"]
    if changed:
        warnings.warn(
            f"Resumed the run in {where} on another machine, which rounds differently"
            f" ({'; '.join(changed)}). The last digits of the results will"
            " differ.",
            EvigradWarning,
            stacklevel=2,
        )


def _layout(state: Mapping[str, Any]) -> dict[str, str]:
    """Return the type and shape of each tensor of a model, by name."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else "kept"
        for name, value in state.items()
    }


def _differences(saved: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Describe the names that ``present`` lacks, adds, or has with a different value."""
    missing = [f"it lacks {name}" for name in saved if name not in present]
    extra = [f"it also has {name}" for name in present if name not in saved]
    other = [
        f"{name} is {present[name]}, not {saved[name]}"
        for name in saved
        if name in present and saved[name] != present[name]
    ]
    return missing + extra + other


def _listed(differences: Sequence[str]) -> str:
    return "; ".join(differences[:_NAMED]) + ("; …" if len(differences) > _NAMED else "")


def _comparable(value: Any) -> Any:
    """Return a setting without the memory addresses in the ``repr`` of functions and objects."""
    return json.loads(re.sub(r" at 0x[0-9a-fA-F]+", "", json.dumps(plain(value))))
