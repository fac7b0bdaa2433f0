"""Private: compute an estimate and its gradient for a block.

``intake`` checks the user's data and turns them into a block. ``sweep`` takes the block through the
network in micro-batches (``memory``), following the ``problem``'s plan for inputs of this shape.
``evaluation`` runs Algorithm 1 and repeats it in float64 if necessary. Passes may be ``kept``.
"""
