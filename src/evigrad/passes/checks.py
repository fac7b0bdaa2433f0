"""Check user input and raise errors that explain how to fix it."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from evigrad.core.algebra import is_finite
from evigrad.core.block import Block
from evigrad.core.partition import Partition
from evigrad.errors import ConfigurationError, InputError, NotFiniteError, nearest
from evigrad.inputs import Inputs, Tree, as_inputs, check_integers, each_once, tensors_of


def check_inputs(x: object, device: torch.device) -> Inputs:
    """Return the inputs. Raise an error if they are empty, not finite or on another device."""
    if not isinstance(x, Inputs | Mapping | tuple | list):
        raise not_data(x)
    inputs = as_inputs(x)
    for part in tensors_of(each_once(inputs)):
        if part.ndim == 0 or len(part) == 0:
            raise InputError("The inputs are empty. Pass at least one example along dimension 0.")
        if part.device != device:
            raise InputError(
                f"Inputs are on {part.device}, but the weights are on {device}. Move the inputs"
                f" with .to('{device}')."
            )
        if part.is_floating_point() and not is_finite(part):
            raise InputError(
                "Inputs contain NaN or infinite values. Impute these values, or omit the"
                " examples that contain them."
            )
    check_integers(inputs)
    if isinstance(inputs, Tree):
        _check_masks(inputs)
    return inputs


def _check_masks(inputs: Tree) -> None:
    """Raise an error if a tokenizer's mask hides all tokens of an example."""
    for name, mask in inputs.named():
        # Masks with other names, or of real numbers that are added, may use zeros differently.
        if "attention_mask" in name and not mask.is_floating_point():
            empty = ~mask.flatten(1).any(1)
            if empty.any():
                raise InputError(
                    f"{name} of the inputs is zero everywhere for {int(empty.sum())} of"
                    f" {len(empty)} examples. The first of these examples is at index"
                    f" {int(empty.int().argmax())}. Omit these examples, or keep at least one token"
                    " in each example."
                )


def not_data(x: object) -> InputError:
    """Return an error about an object that does not contain data."""
    return InputError(
        f"Inputs must be a tensor, or a dictionary or tuple of tensors, got {type(x).__name__}."
        " Call estimate(x, y), or pass a block from blocks(data). If the estimator's name has N,"
        " you can also pass an iterable of batches (x, y). Pass results of collect to"
        " estimate_kept or backward_kept."
    )


def check_choice(what: str, value: object, choices: Sequence[str]) -> None:
    """Raise an error if the value is not one of the choices."""
    if value not in choices:
        raise ConfigurationError(
            f"{what} must be one of {', '.join(choices)}, got '{value}'."
            f"{nearest(str(value), choices)}"
        )


def check_positive(what: str, value: object) -> None:
    """Raise an error if the value is not a positive finite number."""
    if not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise ConfigurationError(f"{what} must be a positive number, got {value}.")


def check_type(what: str, value: object, kind: type, hint: str) -> None:
    """Raise an error if the value is not of type ``kind``. ``hint`` describes valid values."""
    if not isinstance(value, kind):
        raise ConfigurationError(f"{what} must be {hint}, got {value!r}.")


def check_count(what: str, value: object) -> None:
    """Raise an error if the value is not a positive integer."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{what} must be a positive integer, got {value!r}.")


def as_device(what: str, device: torch.device | str | None) -> torch.device | None:
    """Return the device with its index. Raise an error if this machine has no such device."""
    if device is None:
        return None
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"{what} '{device}' does not exist on this machine. Use 'cpu', or omit {what}."
        ) from error


def check_gradients(names: Iterable[str], gradients: Iterable[Tensor]) -> None:
    """Raise an error if a gradient is not finite."""
    for name, gradient in zip(names, gradients, strict=True):
        if not is_finite(gradient):
            raise NotFiniteError(
                f"The gradient for {name} is not finite. If weights or hyperparameters have"
                " diverged, lower their learning rates. Otherwise, use a wider data type for"
                " rows_dtype and gram_dtype, and omit autocast."
            )


def as_generator(generator: torch.Generator | int | None) -> torch.Generator:
    """Return a CPU generator, created from a seed if necessary.

    If ``generator`` is None, the seed is PyTorch's initial seed.

    Raises:
        ConfigurationError: If ``generator`` is not a CPU generator or an integer.
    """
    if isinstance(generator, torch.Generator):
        if generator.device.type != "cpu":
            raise ConfigurationError(
                f"generator must be on the CPU, got {generator.device}. Use torch.Generator()."
            )
        return generator
    seed = torch.initial_seed() if generator is None else generator
    if not isinstance(seed, int):
        raise ConfigurationError(
            f"generator must be a CPU generator or an integer seed, got {generator!r}."
        )
    return torch.Generator().manual_seed(seed)


def as_pair(batch: object) -> tuple[Inputs, Tensor]:
    """Return the batch as a pair of inputs and targets."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InputError(
            f"A batch must be a pair (inputs, targets), got {type(batch).__name__}. Pass batches"
            " such as (x, y)."
        )
    x, y = batch
    return as_inputs(x), y


def check_block(block: Block, partition: Partition) -> None:
    """Raise an error if a block's tensors differ in length, or if a column does not exist."""
    columns, size = block.columns, len(block.indices)
    lengths = {size, len(block.likelihood_weights)}
    lengths |= {len(tensor) for tensor in (block.inputs, columns) if tensor is not None}
    if len(lengths) > 1:
        raise InputError(
            f"The block's tensors have different lengths: {sorted(lengths)}."
            " Use a block from evidence.blocks(data)."
        )
    if columns is None or partition.spec.curvature != "ggn":
        return
    columns, last = columns.long(), partition.num_outputs - 1
    if not torch.equal(columns, columns.clamp(-1, last)):
        raise InputError(
            f"The block's columns must be 0 to {last}, or -1 for padding. Use a block from"
            " evidence.blocks(data)."
        )


def check_state(
    state: Mapping[str, Any], current_state: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> None:
    """Raise an error if a state does not match this evidence. The evidence is not changed."""
    later = {"micro_batches", "preparation", "anchors"}
    if missing := current_state.keys() - state.keys() - later:
        raise ConfigurationError(
            f"The state lacks {', '.join(sorted(missing))}. Load the result of state_dict()."
        )
    if state["estimator"] != current_state["estimator"]:
        raise ConfigurationError(
            f"The state is for the estimator {state['estimator']}, but this evidence uses"
            f" {current_state['estimator']}. Create the evidence with the estimator of the state."
        )
    for key, module in modules.items():
        try:
            copy.deepcopy(module).load_state_dict(state[key])
        except RuntimeError as error:
            raise ConfigurationError(
                f"The saved state does not match the {key} of this evidence. Create the evidence"
                f" with the {key} of the saved state. PyTorch reports: {error}"
            ) from error
