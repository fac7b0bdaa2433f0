"""Private: how data become blocks, the subsets of the index set that one estimate uses.

``sources`` read data sets, ``partitions`` divide the index set and draw blocks from it;
``anchors`` choose the rows that every block is conditioned on.
"""

from evigrad.core.block import Block

__all__ = ["Block"]
