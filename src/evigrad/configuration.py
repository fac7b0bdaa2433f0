"""Configurations: names with plain values in YAML, which build nothing and call nothing."""

from evigrad.errors import ConfigurationError, require

# Longer texts are no configuration. (What few lines with anchors stand for may fill any memory.)
LONGEST = 1_000_000
# A mapping of names, and lists of plain values in it.
DEEPEST = 2


def check_plain(text: str) -> None:
    """Refuse YAML that is more than unique names with plain values and lists of these."""
    yaml = require("yaml", "Reading a configuration", extra="cli")
    if len(text) > LONGEST:
        raise ConfigurationError(
            f"it has {len(text):,} characters, and at most {LONGEST:,} are read"
        )
    depth = 0
    try:
        # Events and not values: nothing is built yet, and nothing is called at all.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = f"line {event.start_mark.line + 1}"
            if getattr(event, "anchor", None) is not None:
                raise ConfigurationError(
                    f"{line} has an anchor or an alias, '{event.anchor}', which is not read: write"
                    " the value"
                )
            if getattr(event, "tag", None) is not None:
                raise ConfigurationError(
                    f"{line} has a tag, '{event.tag}', which is not read: write a plain value"
                )
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ConfigurationError(
                    f"{line} has a value inside of a value's value: give plain ones"
                )
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigurationError(" ".join(str(error).split())) from error
    names = [key.value for key, _ in root.value] if isinstance(root, yaml.MappingNode) else []
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"'{name}' is given twice")
