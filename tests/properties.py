"""How many examples a property is tried on."""

from hypothesis import settings

_USUAL = 10


def examples(count: int) -> settings:
    """Settings for so many examples; half of them in `make test`, ten times in the long run."""
    return settings(max_examples=count * settings().max_examples // _USUAL)
