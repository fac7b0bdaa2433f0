"""How many examples a property is tried on."""

from hypothesis import settings

_USUAL = 10  # of the profile of `make test`


def examples(count: int) -> settings:
    """Settings for so many examples, and more in `make check-long`."""
    return settings(max_examples=count * settings().max_examples // _USUAL)
