"""Groups of weights given by the user: names, modules or wildcards, each weight in one group."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from evigrad.errors import ConfigurationError, listed, nearest


def matches(pattern: str, name: str) -> bool:
    """Return whether a name, a module above it or a wildcard stands for a parameter.

    ``conv1`` does not stand for ``conv10.weight``.
    """
    above = pattern if pattern.endswith(".") else f"{pattern}."
    return name == pattern or name.startswith(above) or fnmatchcase(name, pattern)


def checked_groups(groups: Mapping[str, Sequence[str]], what: str) -> dict[str, list[str]]:
    """Return the list of patterns of each group; ``what`` says in errors whose groups they are.

    Raises:
        ConfigurationError: If there is no group, or one without a pattern.
    """
    taken = {
        name: [patterns] if isinstance(patterns, str) else list(patterns)
        for name, patterns in groups.items()
    }
    empty = [name for name, patterns in taken.items() if not patterns]
    if empty or not taken:
        raise ConfigurationError(
            f"Groups of {what} need names of weights; without any: {listed(empty) or 'all'}."
        )
    return taken


def assign(names: Sequence[str], groups: Mapping[str, Sequence[str]], what: str) -> dict[str, str]:
    """Return the group of each weight, in the order of the weights.

    ``what`` says in errors whose groups they are.

    Raises:
        ConfigurationError: If a pattern fits no weight, or a weight is in no group or in several;
            the text names all of them.
    """
    owners = {
        name: [g for g, patterns in groups.items() if any(matches(p, name) for p in patterns)]
        for name in names
    }
    known = [*names, *sorted({name.rpartition(".")[0] for name in names})]
    problems = [
        f"'{pattern}' names no weight.{nearest(pattern, known)}"
        for patterns in groups.values()
        for pattern in patterns
        if not any(matches(pattern, name) for name in names)
    ]
    if missing := [name for name, found in owners.items() if not found]:
        problems.append(f"In no group: {listed(missing)}.")
    problems += [
        f"'{name}' is in several: {', '.join(found)}."
        for name, found in owners.items()
        if len(found) > 1
    ]
    if problems:
        raise ConfigurationError(
            f"Each weight must be in one group of {what}. " + " ".join(problems)
        )
    return {name: found[0] for name, found in owners.items()}
