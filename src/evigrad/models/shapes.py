"""What the networks for images check of their input's shape."""

from collections.abc import Sequence

from evigrad.errors import ConfigurationError


def image_shape(model: str, input_shape: Sequence[int], smallest: int) -> tuple[int, int, int]:
    """Channels, height and width of an image.

    Args:
        model: Name of the network, for the message.
        input_shape: Shape of one input.
        smallest: Height and width that the network needs.

    Returns:
        (channels, height, width).

    Raises:
        ConfigurationError: If the input is no image or too small.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ConfigurationError(
            f"'{model}' takes images (channels, height, width) of at least {smallest}x{smallest}, "
            f"not inputs of shape {tuple(input_shape)}; 'mlp' takes any shape"
        )
    channels, height, width = input_shape
    return channels, height, width
