"""Standardise values by their mean and deviation, and undo it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scaling:
    """Subtracts a mean and divides by a deviation, column by column.

    Networks and priors are made for inputs and targets of about unit scale. ``Scaling.of(y)`` has
    the statistics of the training targets. Calling it standardises these and others, and ``undo``
    brings predictions back into their units. A log likelihood of standardised targets is larger
    than that of the targets themselves by the sum of log ``std``.

    Attributes:
        mean: Subtracted first, of the shape of one datum.
        std: Divides the rest; 1 for a column that is constant.
    """

    mean: Float[Tensor, "..."]
    std: Float[Tensor, "..."]

    @classmethod
    def of(cls, values: Float[Tensor, "n ..."]) -> "Scaling":
        """The scaling that gives these values mean 0 and deviation 1.

        Args:
            values: The training data, one in each row.

        Returns:
            Their statistics, computed in float64.
        """
        exact = values.double()
        std = exact.std(dim=0, correction=0)
        # Compared exactly: rounding gives a constant column a tiny deviation that is not zero.
        std = torch.where((exact == exact[:1]).all(dim=0), 1.0, std)
        return cls(exact.mean(dim=0).to(values), std.to(values))

    def __call__(self, values: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Standardise values.

        Args:
            values: Any data, one in each row.

        Returns:
            The standardised values, of the same shape.
        """
        return (values - self.mean.to(values)) / self.std.to(values)

    def undo(self, values: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Bring standardised values back into their own units.

        Args:
            values: In units of the deviation, as a network's outputs.

        Returns:
            The values in their units, of the same shape.
        """
        return values * self.std.to(values) + self.mean.to(values)
