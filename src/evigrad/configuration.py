"""Check that YAML configurations contain only plain values, so that they cannot run code."""

from evigrad.errors import ConfigurationError, require

# Longer texts are not configurations. (A few lines with anchors can expand to fill any memory.)
LONGEST = 1_000_000
# A mapping of groups, mappings of names in it, and lists of plain values in them.
DEEPEST = 3


def check_plain(text: str) -> None:
    """Raise ConfigurationError if a YAML text has tags, anchors, deep nesting or repeated names."""
    yaml = require("yaml", "Reading a configuration", extra="cli")
    if len(text) > LONGEST:
        raise ConfigurationError(
            f"the YAML text must have at most {LONGEST:,} characters, got {len(text):,}: shorten"
            " the text"
        )
    depth = 0
    try:
        # Events and not values, so that nothing is built or called.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = f"line {event.start_mark.line + 1}"
            if getattr(event, "anchor", None) is not None:
                raise ConfigurationError(
                    f"{line} has an anchor or an alias, '{event.anchor}', which is not supported:"
                    " write out the value"
                )
            if getattr(event, "tag", None) is not None:
                raise ConfigurationError(
                    f"{line} has a tag, '{event.tag}', which is not supported: write a plain value"
                )
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ConfigurationError(
                    f"{line} has values that are nested too deeply: use plain values or lists of"
                    " plain values"
                )
        nodes = [yaml.compose(text, Loader=yaml.SafeLoader)]
    except yaml.YAMLError as error:
        raise ConfigurationError(" ".join(str(error).split())) from error
    for node in nodes:
        if not isinstance(node, yaml.MappingNode):
            continue
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"'{name}' is set twice: remove one of the lines")
        nodes += [value for _, value in node.value]
