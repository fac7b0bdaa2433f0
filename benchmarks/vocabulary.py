"""Measure how a hyperparameter step of a language model scales with its vocabulary.

A causal transformer of two layers reads sequences of 128 words. Its last layer is linear, with its
own weights or the weights of the embedding. A step is the gradient of an estimate on 64 rows of 64
positions, including drawing and loading its block. Each ratio is to the smallest vocabulary in the
same run, in turns. For comparison, a training step (forward and backward of the loss) on 64
sequences must score every word at every position.

    python benchmarks/vocabulary.py --out benchmarks/vocabulary.csv
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine, paired, write_csv
from torch import Tensor, nn

from evigrad import Evidence
from evigrad.likelihoods import Categorical
from evigrad.priors import GaussianPrior

WORDS = (100, 1_000, 10_000, 50_000)
LENGTH, WIDTH, LAYERS, SEQUENCES = 128, 128, 2, 256
ESTIMATORS = ("ntk-64-1", "kfac-64-1")
# A training step scores LENGTH · WORDS words for each sequence.
TRAINED, MOST_TRAINED = 64, 10_000


class LanguageModel(nn.Module):
    """A pre-norm causal transformer."""

    def __init__(self, words: int, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", 1e-5, True, True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        h = self.words(ids) + self.places(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        for layer in self.layers:
            h = layer(h, src_mask=mask, is_causal=True)
        return self.head(self.norm(h))


def step(evidence: Evidence, data: tuple[Tensor, Tensor]) -> Callable[[], object]:
    """Take a step on the hyperparameters, including drawing and loading its block."""
    blocks = iter(evidence.blocks(data))
    return lambda: evidence.backward(next(blocks))


def training_step(evidence: Evidence, data: tuple[Tensor, Tensor]) -> Callable[[], object]:
    """Run forward and backward of the loss."""
    x, y = (part[:TRAINED] for part in data)
    return lambda: evidence.map_loss(x, y).backward()


def measured(estimator: str, tied: bool, repeats: int) -> list[dict[str, Any]]:
    works: dict[str, Callable[[], object]] = {}
    # Kronecker factors of the output layer grow with the square of the vocabulary.
    vocabularies = [w for w in WORDS if w <= MOST_TRAINED or tied or estimator != ESTIMATORS[1]]
    for words in vocabularies:
        torch.manual_seed(0)
        model = LanguageModel(words, tied)
        ids = torch.randint(words, (SEQUENCES, LENGTH + 1))
        data = ids[:, :-1], ids[:, 1:].contiguous()
        prior = GaussianPrior("layerwise", precision=10.0)
        evidence = Evidence(
            model,
            Categorical(),
            prior,
            estimator=estimator,
            num_data=SEQUENCES * LENGTH,
            generator=0,
        )
        works[f"step {words}"] = step(evidence, data)
        if words <= MOST_TRAINED and estimator == ESTIMATORS[0]:
            works[f"training {words}"] = training_step(evidence, data)
    times = paired(works, repeats)
    first = times[f"step {WORDS[0]}"]
    return [
        {
            "estimator": estimator,
            "tied": tied,
            "words": words,
            "ratio": times[f"step {words}"] / first,
            "seconds": times[f"step {words}"],
            "training": times.get(f"training {words}", ""),
            "machine": machine(),
        }
        for words in vocabularies
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for tied in (False, True):
        for estimator in ESTIMATORS:
            for row in measured(estimator, tied, arguments.repeats):
                print(row, flush=True)
                rows.append(row)
    if arguments.out is not None:
        write_csv(arguments.out, rows)


if __name__ == "__main__":
    main()
