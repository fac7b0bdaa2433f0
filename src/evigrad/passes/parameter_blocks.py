"""Partition the parameters into the blocks of a ``blockdiag`` estimator."""

from collections.abc import Mapping, Sequence

from evigrad.errors import ConfigurationError, nearest
from evigrad.priors import assign, checked_groups

# "tensor", "module", or named or unnamed groups of name prefixes or patterns.
ParameterPartition = str | Mapping[str, Sequence[str]] | Sequence[Sequence[str]]

# torch.nn.utils.parametrize stores the original tensors of ``layer.weight`` under this name.
PARAMETRIZATIONS = ".parametrizations."


def partition_names(names: Sequence[str], partition: ParameterPartition) -> dict[str, list[str]]:
    """Return the parameter names of each block. Raise an error for missing or repeated names."""
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
            f"parameter_partition must be 'tensor', 'module', or groups of parameter names, got"
            f" {partition!r}.{nearest(partition, ['tensor', 'module'])}"
        )
    if not isinstance(partition, Mapping | Sequence):
        raise ConfigurationError(
            "parameter_partition must be 'tensor', 'module', or groups of parameter names, got"
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
