"""The method of the paper: estimator names, blocks, roots, curvatures and Algorithm 1."""
