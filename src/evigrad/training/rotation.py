"""Rotate the ranks of a product U V, which no prior with equal precisions tells apart.

With an orthogonal matrix M, the factors U M (o, r) and Mᵀ V (r, i) have the same product as U and
V. Ranks with equal precisions can therefore share all directions of the data, and no precision
rises. Along the eigenvectors of UᵀU + V Vᵀ, the ranks of balanced factors are singular directions
of U V. Ranks that the data do not need then become small.

The largest eigenvalue goes to the rank with the smallest precision. This rotation has the smallest
Σ_j δ_j (‖u_j‖² + ‖v_j‖²) of all rotations, so the log prior never falls.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from evigrad.evidence import Evidence
from evigrad.inputs import Inputs
from evigrad.measure.metrics import probe_outputs

# The largest change of an output by rounding, in roundings of the largest output.
_ROUNDINGS = 1000.0


class RankRotation:
    """Rotations of the ranks of each group of the prior with two matrices.

    The ranks are along axis 0 of one matrix, and along axis 1 of the other. The first rotation
    compares the outputs of the network. If they change, as with a nonlinearity between the two
    matrices, it is undone, and the group is not rotated again.

    Args:
        evidence: The evidence of the network.
        optimizer: Optimizer of the weights, whose state is rotated with them.
        probe: Inputs for the comparison.
    """

    def __init__(self, evidence: Evidence, optimizer: Optimizer, probe: Inputs) -> None:
        self.evidence, self.optimizer, self.probe = evidence, optimizer, probe
        self.pairs = evidence.prior.factor_pairs()
        self._verified = set[tuple[str, str]]()

    @torch.no_grad()
    def rotate(self) -> None:
        """Rotate all pairs."""
        model, weights, prior = self.evidence.model, self.evidence.weights(), self.evidence.prior
        for pair in list(self.pairs):
            left, right = (weights[name] for name in pair)
            rotation = best_rotation(left, right, prior.precisions()[pair[0]].flatten())
            self.evidence.ranks.share([rotation])
            before = left.clone(), right.clone()
            outputs = None if pair in self._verified else probe_outputs(model, self.probe)
            left.copy_(left @ rotation.to(left))
            right.copy_(rotation.to(right).mT @ right)
            if outputs is not None:
                change = (probe_outputs(model, self.probe) - outputs).abs().max()
                rounding = _ROUNDINGS * torch.finfo(outputs.dtype).eps * outputs.abs().max()
                if not bool(change <= rounding):
                    left.copy_(before[0])
                    right.copy_(before[1])
                    self.pairs.remove(pair)
                    continue
                self._verified.add(pair)
            _rotate_state(self.optimizer.state.get(left, {}), rotation, left=True)
            _rotate_state(self.optimizer.state.get(right, {}), rotation, left=False)


def best_rotation(left: Tensor, right: Tensor, precision: Tensor) -> Tensor:
    """Return the orthogonal M (r, r) with the smallest Σ_j δ_j (‖(U M)_j‖² + ‖(Mᵀ V)_j‖²).

    Args:
        left: U, (o, r).
        right: V, (r, i).
        precision: The precisions δ, (r,).
    """
    left, right = left.double(), right.double()
    vectors = torch.linalg.eigh(left.mT @ left + right @ right.mT).eigenvectors
    rotation = torch.empty_like(vectors)
    rotation[:, precision.argsort(stable=True)] = vectors.flip(1)
    # Each rank keeps its sign as far as possible.
    return rotation * torch.where(rotation.diagonal() < 0, -1.0, 1.0).to(rotation)


def _rotate_state(state: dict[str, object], rotation: Tensor, left: bool) -> None:
    """Rotate the moments of a weight in place. Second moments are rotated as if independent."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.ndim == 2:
            matrix = rotation.to(value)
            matrix = matrix.square() if name.endswith("sq") else matrix
            value.copy_(value @ matrix if left else matrix.mT @ value)
