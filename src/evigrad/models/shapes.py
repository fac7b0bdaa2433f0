"""The check of an image's shape."""

from collections.abc import Sequence

from evigrad.errors import ConfigurationError


def image_shape(model: str, input_shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """(channels, height, width); ConfigurationError if no image, or below ``smallest``."""
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ConfigurationError(
            f"'{model}' takes images (channels, height, width) of at least {smallest}x{smallest}, "
            f"not inputs of shape {tuple(input_shape)}; 'mlp' takes any shape"
        )
    channels, height, width = input_shape
    return channels, height, width
