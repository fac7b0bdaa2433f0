"""The core of the method: estimator names, blocks, roots, curvatures and Algorithm 1."""
