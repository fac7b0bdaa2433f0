"""Weights that are trained elsewhere, in shards, beside the whole ones that the passes take."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from evigrad.distributed import Ranks, num_processes, sharding_of, shards
from evigrad.engine.kept import checksums
from evigrad.errors import ConfigurationError, listed
from evigrad.inputs import bare_names, named_parameters

_FSDP1 = (
    "FSDP1 (FullyShardedDataParallel) is not supported: shard by fully_shard of"
    " torch.distributed.fsdp, or train by DistributedDataParallel."
)


def check_whole(model: nn.Module) -> None:
    """Refuse a model that is wrapped for training on several processes.

    Raises:
        ConfigurationError: If it is.
    """
    if isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            "Give the model inside of DistributedDataParallel, model.module: estimates have"
            " passes of their own, whose gradients it must not average."
        )
    kind = sharding_of(model)
    if kind == "FSDP1":
        raise ConfigurationError(_FSDP1)
    if kind is not None:
        raise ConfigurationError(
            f"The model's parameters are shards ({kind}), and estimates need whole ones. Give"
            " Evidence the model as it was before; in your own loop train a copy of it in shards,"
            " copy.deepcopy(model), whose weights evidence.take_weights(copy) takes up. fit trains"
            " whole weights only."
        )


def counterparts(
    model: nn.Module, trained: nn.Module, shared: Mapping[str, nn.Parameter], ranks: Ranks
) -> dict[str, nn.Parameter]:
    """The parameters of a module that is trained in the place of a model, by the model's names.

    Args:
        model: The model of the evidence.
        trained: A copy of it, maybe sharded.
        shared: Parameters that both have to have in common.
        ranks: Over all of which the copy is sharded.

    Returns:
        A parameter of the copy for each of the model, those of FSDP2 in shards.

    Raises:
        ConfigurationError: If the module is no such copy.
    """
    check_whole(model)
    if sharding_of(trained) == "FSDP1":
        raise ConfigurationError(_FSDP1)
    named = shards(trained)
    bare = bare_names(trained, named)
    found = {bare[name]: parameter for name, parameter in named.items()}
    own = named_parameters(model)
    _check_names("parameters", own, found)
    theirs = {name: found[name] for name in own}
    for name, parameter in theirs.items():
        if parameter.shape != own[name].shape:
            raise ConfigurationError(
                f"'{name}' is {tuple(own[name].shape)} in the model of the evidence and"
                f" {tuple(parameter.shape)} in the module that is trained: train a copy of that"
                " model."
            )
        processes = num_processes(parameter)
        if processes not in (None, ranks.count):
            raise ConfigurationError(
                f"'{name}' is sharded over {processes} processes, and the evidence works on"
                f" {ranks.count}: give it the same ones, as Evidence(..., process_group=mesh) or"
                " torch.distributed.group.WORLD."
            )
    copied = [name for name, parameter in shared.items() if theirs[name] is not parameter]
    if copied:
        own_module = copied[0].rpartition(".")[0] or copied[0]
        raise ConfigurationError(
            f"The evidence learns {listed(copied)}, of which the module that is trained has a copy."
            f" Give the copied network the model's own '{own_module}' before it is sharded, and"
            " leave its parameters whole: fully_shard(copy, ignored_params=set(…))."
        )
    return theirs


def take_up(
    model: nn.Module, trained: nn.Module, shared: Mapping[str, nn.Parameter], ranks: Ranks
) -> None:
    """Copy the weights of a sharded module into a model, whole, and the buffers of rank 0.

    Args:
        model: As for ``counterparts``, and so are the others. Its parameters and buffers are
            written in place.
        trained: The module, which stays as it is.
        shared: Parameters that both have in common.
        ranks: All of them make this call.

    Raises:
        ConfigurationError: If it is another module, or the ranks then have other weights.
    """
    with ranks.together():
        theirs = counterparts(model, trained, shared, ranks)
        found, buffers = _named_buffers(trained), _named_buffers(model)
        _check_names("buffers", buffers, found)
    with torch.no_grad():
        for name, parameter in named_parameters(model).items():
            if theirs[name] is not parameter:
                parameter.copy_(ranks.whole(theirs[name]))
        for name, buffer in buffers.items():
            if found[name] is not buffer:
                buffer.copy_(found[name])
    ranks.share(list(buffers.values()))
    with ranks.together() as alike:
        weights = [parameter.detach() for parameter in model.parameters()]
        alike["weights"] = checksums(weights, weights[0].device)


def _named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers by their names without those of wrappers."""
    named = dict(module.named_buffers())
    bare = bare_names(module, named)
    return {bare[name]: buffer for name, buffer in named.items()}


def _check_names(what: str, own: Iterable[str], theirs: Iterable[str]) -> None:
    own, theirs = dict.fromkeys(own), dict.fromkeys(theirs)
    missing = [name for name in own if name not in theirs]
    more = [name for name in theirs if name not in own]
    if missing or more:
        raise ConfigurationError(
            f"The module that is trained has other {what} than the model of the evidence (missing:"
            f" {listed(missing) or 'none'}; more: {listed(more) or 'none'}): train a copy of that"
            " model, copy.deepcopy(model)."
        )
