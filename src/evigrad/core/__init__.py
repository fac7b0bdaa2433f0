"""The paper and its bounds: names, blocks, roots, curvature and Algorithm 1, and no mechanics."""
