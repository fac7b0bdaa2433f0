"""Private: divide the examples and outputs into blocks. Each estimate uses one block."""

from evigrad.core.block import Block

__all__ = ["Block"]
