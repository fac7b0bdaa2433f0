"""Networks by name: small networks, residual networks with Fixup, and sequence models."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from evigrad.errors import ConfigurationError, nearest
from evigrad.invariances import AffineInvariance, Averaged
from evigrad.models.choices import Choices
from evigrad.models.feedforward import cnn, digitsnet, lenet, mininet, mlp
from evigrad.models.residual import fixup_scalars, resnet18, resnet50, wide_resnet, wrn16_4
from evigrad.models.sequences import Recurrent, Transformer
from evigrad.network.modes import seeded

__all__ = ["MODELS", "Choices", "fixup_scalars", "make_model", "make_network"]

# Each takes (input_shape, num_outputs = C) and its settings, and maps inputs (m, *input_shape) to
# outputs (m, C).
MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "digitsnet": digitsnet,
    "mininet": mininet,
    "lenet": lenet,
    "cnn": cnn,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "wrn16-4": wrn16_4,
    "wide_resnet": wide_resnet,
    "transformer": Transformer,
    "gru": Recurrent,
}


def make_model(
    name: str,
    input_shape: Sequence[int],
    num_outputs: int,
    seed: int | None = None,
    **settings: Any,
) -> nn.Module:
    """Return a network with random initial weights, on the CPU.

    Args:
        name: Name of the network, a key of `MODELS`.
        input_shape: Shape of one input.
        num_outputs: Number of outputs C.
        seed: Seed of the initial weights. With a seed, the global random state is not touched.
            Default: None, which draws from the global state, like PyTorch.
        **settings: Settings of the network, such as ``hidden=[100]`` for ``mlp``.

    Returns:
        A module that maps inputs (m, *input_shape) to outputs (m, C).

    Raises:
        ConfigurationError: If the name or a setting is unknown, or the network does not support the
            shapes.

    Examples:
        >>> from evigrad.models import make_model
        >>> sum(p.numel() for p in make_model("digitsnet", (1, 8, 8), 10).parameters())
        6090

    See also: docs/command_line.md.
    """
    if name not in MODELS:
        raise ConfigurationError(
            f"Unknown network '{name}'.{nearest(name, MODELS)} Use one of {', '.join(MODELS)}."
        )
    setting_names = list(inspect.signature(MODELS[name]).parameters)[2:]
    for setting in settings:
        if setting not in setting_names:
            raise ConfigurationError(
                f"'{name}' has no setting '{setting}'.{nearest(setting, setting_names)} "
                + (f"It has {', '.join(setting_names)}." if setting_names else "It has none.")
            )
    if not input_shape or min(input_shape) < 1 or num_outputs < 1:
        raise ConfigurationError(
            f"All sizes must be at least 1, got input_shape={tuple(input_shape)} and"
            f" num_outputs={num_outputs}."
        )
    # On the CPU, so that a seed gives the same weights for every device.
    cpu = torch.device("cpu")
    with cpu, nullcontext() if seed is None else seeded(seed, cpu):
        return MODELS[name](input_shape, num_outputs, **settings)


def make_network(record: Mapping[str, Any], seed: int = 0) -> nn.Module:
    """Return the network of a run, on the CPU, from the record in the run's configuration.

    In the record, ``model`` contains the arguments of ``make_model``. ``invariance`` is None, or
    contains ``num_samples``, ``average`` and ``transform``. Here ``transform`` contains the
    arguments of ``AffineInvariance``. Convolutions use the channels-last memory format, which is
    faster (docs/scale.md).
    """
    # Not in make_model, because FSDP2 needs contiguous weights.
    model: Any = make_model(**record["model"], seed=seed)
    model = model.to(memory_format=torch.channels_last)  # missing in the types of ``to``
    averaged = record["invariance"]
    if averaged is None:
        return model
    with torch.device("cpu"):
        transform = AffineInvariance(**averaged["transform"])
    return Averaged(model, transform, averaged["num_samples"], averaged["average"])
