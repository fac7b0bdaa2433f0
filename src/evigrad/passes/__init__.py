"""Private: compute the estimate for a block, and the gradient of this estimate.

``intake`` checks the user's data and turns them into a block. ``sweep`` takes the block through the
network in micro-batches, whose sizes ``memory`` chooses. A sweep follows the plan that the
``problem`` has for the shape of the block's inputs. ``evaluation`` computes the estimate, and
repeats the computation in float64 if necessary. ``kept`` stores passes for later steps.
"""
