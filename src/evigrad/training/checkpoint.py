"""What a checkpoint says about the run that it belongs to, and whether that is this run."""

import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.errors import ConfigurationError, EvigradWarning
from evigrad.evidence import Evidence
from evigrad.training.metrics import Row

CHECKPOINT_FORMAT = 3
# Settings that change no result. All others must be those of the run.
FREE_SETTINGS = ("checkpoint_every",)

# Data that are digested at once: a GPU's pass through the host's memory.
_DIGESTED = 4096
# Data on which the network's outputs are compared with those that it had when it was saved, and
# how much other machines' rounding may change them in relation.
PROBED = 2
_SAME_OUTPUTS = 1e-2
# More names than this do not fit a sentence.
_NAMED = 4


def digest(data: tuple[Tensor, Tensor]) -> str:
    """A fingerprint of data: other values, types, shapes or another order have another one.

    Args:
        data: Inputs and targets.

    Returns:
        Hexadecimal digits.
    """
    found = hashlib.blake2b(digest_size=16)
    for tensor in data:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        for part in tensor.detach().split(_DIGESTED):
            # Byte by byte, as NumPy has no bfloat16.
            found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def machine(device: torch.device) -> dict[str, Any]:
    """What the last digits of results depend on besides settings and data.

    Args:
        device: Where the model is.

    Returns:
        Version of PyTorch, kind of device, CPU threads.
    """
    return {
        "torch": str(torch.__version__),
        "device": device.type,
        "threads": torch.get_num_threads(),
    }


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Compute with a number of CPU threads: sums are cut into parts by it.

    Args:
        count: How many.
    """
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def packed_history(history: Sequence[Row]) -> dict[str, list[Any]]:
    """The rows of a history, which all have the same columns, with each column named once.

    Args:
        history: As in ``FitResult``.

    Returns:
        Columns and rows.
    """
    columns = list(history[0]) if history else []
    return {"columns": columns, "rows": [[row[name] for name in columns] for row in history]}


def unpacked_history(packed: Mapping[str, list[Any]]) -> list[Row]:
    """The history of a checkpoint.

    Args:
        packed: By ``packed_history``.

    Returns:
        One row for each epoch.
    """
    return [dict(zip(packed["columns"], row, strict=True)) for row in packed["rows"]]


def check_format(state: Mapping[str, Any], where: object) -> None:
    """Refuse what another version wrote.

    Args:
        state: Of a checkpoint.
        where: The run's folder, for the words of an error.

    Raises:
        ConfigurationError: If the format is another.
    """
    if state.get("format") != CHECKPOINT_FORMAT:
        raise ConfigurationError(
            f"The checkpoint in {where} has format {state.get('format')}; this version of evigrad"
            f" reads {CHECKPOINT_FORMAT}. Start the run anew in another folder, or go on with the"
            " version that began it."
        )


def check_settings(saved: Mapping[str, Any], own: Mapping[str, Any], where: object) -> None:
    """Refuse settings that are not those of the run.

    Args:
        saved: The run's, as a record.
        own: Those that were asked for.
        where: The run's folder, for the words of an error.

    Raises:
        ConfigurationError: If one differs; the text names it.
    """
    names = [name for name in saved if name in own and name not in FREE_SETTINGS]
    differing = [n for n in names if _comparable(saved[n]) != _comparable(own[n])]
    if differing:
        words = _listed([f"{n}={saved[n]}, not {own[n]}" for n in differing])
        raise ConfigurationError(
            f"The run in {where} has {words}. To go on with it give the same settings; for others"
            " start a new run in another folder."
        )


def check_data(
    saved: Mapping[str, str | None], own: Mapping[str, str | None], where: object
) -> None:
    """Refuse data that are not those of the run.

    Args:
        saved: The fingerprint of each part of the run's, or None where it has none.
        own: The same of the data at hand.
        where: The run's folder, for the words of an error.

    Raises:
        ConfigurationError: If a part differs; the text says which.
    """
    for part, words in (("train", "training"), ("test", "test")):
        if saved[part] == own[part]:
            continue
        if saved[part] is None or own[part] is None:
            raise ConfigurationError(
                f"The run in {where} was started {'without' if saved[part] is None else 'with'}"
                f" {words} data; go on with it in the same way."
            )
        raise ConfigurationError(
            f"The {words} data are not those of the run in {where}: values, types or their order"
            " differ. Give the same data, or start a new run in another folder."
        )


def check_network(state: Mapping[str, Any], evidence: Evidence, where: object) -> None:
    """Refuse a network whose parameters have other names, shapes or types, or another use.

    Args:
        state: Of a checkpoint.
        evidence: Of the network at hand.
        where: The run's folder, for the words of an error.

    Raises:
        ConfigurationError: If it is another one; the text says what differs.
    """
    found = _differences(_layout(state["model"]), _layout(evidence.model.state_dict()))
    own = {"weights": evidence.weights(), "hyperparameters": evidence.hyperparameters()}
    for kind, names in own.items() if not found else ():
        word = f"the {kind.removesuffix('s')} "
        found += _differences(
            dict.fromkeys([word + name for name in state["learned"][kind]], ""),
            dict.fromkeys([word + name for name in names], ""),
        )
    if found:
        raise ConfigurationError(
            f"The network is not that of the run in {where}: {_listed(found)}. Give the same"
            " network, or start a new run in another folder."
        )


def load_network(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Take up weights, hyperparameters and buffers, those that no ``state_dict`` holds too.

    Args:
        model: Of the architecture of the checkpoint.
        state: Of a checkpoint.
    """
    model.load_state_dict(state["model"])
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in state["buffers"].items():
            buffers[name].copy_(value)


def check_outputs(
    saved: Tensor, own: Tensor, here: Mapping[str, Any], there: Mapping[str, Any], where: object
) -> None:
    """Refuse a network that computes something else; warn where the machine may round otherwise.

    Args:
        saved: Outputs of the network for a few data when it was saved.
        own: The same now that its parameters are loaded.
        here: This machine.
        there: The machine of the checkpoint.
        where: The run's folder, for the words of an error.

    Raises:
        ConfigurationError: If the outputs differ by more than rounding.
    """
    same = saved.shape == own.shape and saved.dtype == own.dtype
    if not same or not (own - saved).norm() <= _SAME_OUTPUTS * saved.norm():
        raise ConfigurationError(
            f"The network computes something else than that of the run in {where}, with the same"
            " parameters: its layers or activations differ. Give the same network, or start a new"
            " run in another folder."
        )
    changed = [
        f"{words} {there[name]} then, {here[name]} now"
        for name, words in (("torch", "PyTorch"), ("device", "on"))
        if there[name] != here[name]
    ]
    if not changed and not torch.equal(saved, own):
        changed = ["the processor"]
    if changed:
        warnings.warn(
            f"The run in {where} goes on, but its results will not be the same to the last digit"
            f" as on the machine where it began: another one rounds otherwise"
            f" ({'; '.join(changed)}).",
            EvigradWarning,
            stacklevel=2,
        )


def _layout(state: Mapping[str, Any]) -> dict[str, str]:
    """Name → type and shape of what a model keeps."""
    return {
        name: f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else "kept"
        for name, value in state.items()
    }


def _differences(saved: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """In words, what the second lacks, has beside and has otherwise."""
    missing = [f"it lacks {name}" for name in saved if name not in own]
    beside = [f"it has {name} beside" for name in own if name not in saved]
    other = [
        f"{name} is {own[name]}, not {saved[name]}"
        for name in saved
        if name in own and saved[name] != own[name]
    ]
    return missing + beside + other


def _listed(found: Sequence[str]) -> str:
    return "; ".join(found[:_NAMED]) + ("; …" if len(found) > _NAMED else "")


def _comparable(value: Any) -> Any:
    """A recorded setting without the addresses that functions and objects have in a process."""
    if isinstance(value, str):
        return re.sub(r" at 0x[0-9a-fA-F]+", "", value)
    if isinstance(value, Mapping):
        return {name: _comparable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(part) for part in value]
    return value
