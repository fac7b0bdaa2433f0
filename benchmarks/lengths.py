"""Time batches of different lengths, relative to equal lengths.

A transformer encoder classifies padded sequences of words with masks. A `DataLoader` pads its
blocks to their longest sequence. Each block therefore has a different length, for which there may
be no plan yet. In turns, the script compares them with blocks whose sequences have the mean length,
so that both have equally many words. Times refer to a step on the hyperparameters, of 64 rows,
over many blocks.

    python benchmarks/lengths.py --out benchmarks/lengths.csv
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine, write_csv
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

WORDS, WIDTH, LAYERS, CLASSES, ROWS = 1000, 128, 2, 4, 64
# Maximum lengths of the blocks, evenly distributed.
SHORTEST, LONGEST = 17, 80
BLOCKS = 32
ESTIMATORS = ("ntk-64-1", "kfac-64-1")


class Encoder(nn.Module):
    """Scores of classes from words, by the mean over positions without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            h = layer(h, src_key_padding_mask=~mask)
        return self.out((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def blocks(lengths: list[int]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return one block of data for each maximum length."""
    data_blocks = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(WORDS, (ROWS, length), generator=generator)
        ends = torch.randint(length // 2, length + 1, (ROWS,), generator=generator)
        ends[0] = length
        mask = torch.arange(length) < ends[:, None]
        y = torch.randint(CLASSES, (ROWS,), generator=generator)
        data_blocks.append(({"ids": ids * mask, "mask": mask}, y))
    return data_blocks


def measured(estimator: str, repeats: int) -> dict[str, Any]:
    drawn = torch.randperm(LONGEST - SHORTEST + 1, generator=torch.Generator().manual_seed(0))[
        :BLOCKS
    ]
    lengths = (drawn + SHORTEST).tolist()
    mean = round(statistics.fmean(lengths))
    blocks_by_kind = {"different": blocks(lengths), "equal": blocks([mean] * BLOCKS)}
    evidences = {}
    for kind in blocks_by_kind:
        torch.manual_seed(0)
        prior = GaussianPrior("layerwise", precision=10.0)
        evidences[kind] = Evidence(
            Encoder(), Categorical(), prior, estimator=estimator, num_data=10_000, generator=0
        )
    times: dict[str, list[float]] = {kind: [] for kind in blocks_by_kind}
    for repeat in range(repeats + 1):
        for kind, data in blocks_by_kind.items():
            start = time.perf_counter()
            for x, y in data:
                evidences[kind].backward(x, y)
            if repeat:  # the first round makes the first plan
                times[kind].append(time.perf_counter() - start)
    medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    return {
        "estimator": estimator,
        "ratio": medians["different"] / medians["equal"],
        "different": medians["different"] / BLOCKS,
        "equal": medians["equal"] / BLOCKS,
        "mean length": mean,
        "shapes": len(set(lengths)),
        "machine": machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for estimator in ESTIMATORS:
        rows.append(measured(estimator, arguments.repeats))
        print(rows[-1], flush=True)
    if arguments.out is not None:
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
