"""One seed for a run, and from it a stream of its own for every use and epoch.

Each stream is seeded from (seed, use, epoch) by a hash, so that no stream depends on how much
another has consumed: evaluating more often, or continuing from a later epoch, changes no draw.
The global random state is restored after every use.
"""

from typing import Literal

import numpy as np
import torch

Use = Literal["shuffle", "model", "evidence", "evaluation", "bracket", "data"]

# The number of a use is part of the seed: numbers must never change or be used again.
_USES: dict[Use, int] = {
    "shuffle": 0,
    "model": 1,
    "evidence": 2,
    "evaluation": 3,
    "bracket": 4,
    "data": 6,
}


def derived_seed(seed: int, use: Use, epoch: int = 0) -> int:
    """Return the seed, below 2^63, of one stream of a run.

    Args:
        seed: The run's seed.
        use: What the stream is for: the order of the training data (``shuffle``), what the
            model draws while its weights train (``model``, as dropout), the blocks of the
            evidence (``evidence``), what the model draws on test data (``evaluation``), the
            bounds on the evidence (``bracket``), or what the items of a data set draw (``data``).
        epoch: The epoch, where the stream starts anew in each.
    """
    sequence = np.random.SeedSequence([seed, _USES[use], epoch])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def stream(seed: int, use: Use, epoch: int = 0) -> torch.Generator:
    """A CPU generator at the start of a stream, with the arguments of ``derived_seed``."""
    return torch.Generator().manual_seed(derived_seed(seed, use, epoch))
