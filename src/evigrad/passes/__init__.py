"""Private: from a block to an estimate and its gradient.

``intake`` makes a block of what a user gives, checked, and ``passes`` goes through its data in
micro-batches (``memory``) by the ``problem``'s plan for inputs of this shape. ``two_passes`` makes
the statistic of a first pass, which may be ``kept``, and pulls the cotangent back in a second one;
``cotangents`` are what the likelihood gives to both. ``evaluation`` makes the estimate.
"""
