"""Private: divide the examples and outputs into blocks, the subsets that one estimate uses."""

from evigrad.core.block import Block

__all__ = ["Block"]
