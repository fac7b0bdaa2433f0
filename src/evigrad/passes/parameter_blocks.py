"""The partition of the parameters into the blocks of ``blockdiag``."""

from collections.abc import Mapping, Sequence

from evigrad.errors import ConfigurationError, nearest
from evigrad.priors import assign, checked_groups

# "tensor", "module", or groups of name prefixes or patterns, with or without names of their own.
ParameterPartition = str | Mapping[str, Sequence[str]] | Sequence[Sequence[str]]

# torch.nn.utils.parametrize keeps the tensors behind ``layer.weight`` under this name.
PARAMETRIZATIONS = ".parametrizations."


def partition_names(names: Sequence[str], partition: ParameterPartition) -> dict[str, list[str]]:
    """The names in each block, in the parameters' order; refuses one that is missing or double."""
    if isinstance(partition, str):
        if partition == "tensor":
            return {name: [name] for name in names}
        if partition == "module":
            blocks: dict[str, list[str]] = {}
            for name in names:
                owner = name.split(PARAMETRIZATIONS)[0] if PARAMETRIZATIONS in name else None
                blocks.setdefault(owner or name.rpartition(".")[0], []).append(name)
            return blocks
        raise ConfigurationError(
            f"parameter_partition={partition!r} is unknown: take 'tensor', 'module', or groups of"
            f" parameter names.{nearest(partition, ['tensor', 'module'])}"
        )
    if not isinstance(partition, Mapping | Sequence):
        raise ConfigurationError(
            "parameter_partition is 'tensor', 'module', or groups of parameter names, not"
            f" {partition!r}."
        )
    if not isinstance(partition, Mapping):
        partition = {str(index): group for index, group in enumerate(partition)}
    what = "parameter_partition"
    block_of = assign(names, checked_groups(partition, what), what)
    grouped: dict[str, list[str]] = {}
    for name, block in block_of.items():
        grouped.setdefault(block, []).append(name)
    return grouped
