"""The cases of `record_numbers.py`: families of cases by name."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from recorded_measures import Case
from recorded_networks import LIKELIHOODS, NETWORKS, PRIORS

EXACT = 1e-12

STRUCTURES = ("ntk", "full", "blockdiag", "kfac", "diag")
ROOTS = ("subblock", "fisher", "eigen")
ENDINGS = (
    *("1", "1-ef", "1-mc", "1-iid", "1-grouped", "1-grouped-ef", "1-grouped-mc"),
    *("2", "2-mc", "2-iid", "2-grouped", "2-grouped-mc", "C", "C-grouped"),
)
# Every name of the grammar with subsets of 3 and of all data, but for anchored ones and Hessians.
NAMES = [
    f"{structure}-{ending}"
    for structure in STRUCTURES
    for ending in (*("-".join(parts) for parts in product(("3", "N"), ENDINGS)), "3-rows")
]
# One name for every structure and every manner of drawing.
FEW = (
    *("ntk-3-1", "ntk-3-C", "ntk-4-rows", "ntk-N-C", "ntk-3-1-grouped", "full-3-C", "full-N-1"),
    *("blockdiag-3-1", "blockdiag-N-C", "kfac-3-1", "kfac-N-C", "kfac-3-1-ef", "kfac-4-rows"),
    *("diag-3-C", "diag-N-1", "diag-3-2-iid", "ntk-3-2-mc"),
)
FEWEST = ("ntk-3-1", "ntk-N-C", "blockdiag-3-C", "kfac-3-1", "kfac-N-C", "diag-N-C")


def crossed(names: Iterable[str] = NAMES, **axes: Iterable[Any]) -> Iterator[Case]:
    """Return cases of all names with all combinations of fields of ``Case``."""
    for name, *values in product(names, *axes.values()):
        yield Case(estimator=name, **dict(zip(axes, values, strict=True)))


def options(**values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return all combinations of values by name."""
    return [dict(zip(values, choice, strict=True)) for choice in product(*values.values())]


def posteriors() -> Iterator[Case]:
    structures = [*options(structure=("kfac", "last-layer", "diag", "full", "ntk"))]
    structures.append({"structure": "ntk", "rows": 9})
    anywhere = partial(crossed, ("ntk-3-1",), measure=("posterior",), details=structures)
    yield from anywhere(likelihood=LIKELIHOODS)
    yield from anywhere(network=("attentive", "averaged-gated", "tagger", "pixels", "mapping"))
    yield from anywhere(prior=("diagonal", "groups", "initial"), memory=[{"micro_batch": 3}])
    yield from anywhere(network=("perceptron", "wide-convolutions"))


ANCHORED = ("ntk-6-rows-anchored", "ntk-40-rows-anchored")


def anchored_cases(**details: Any) -> Iterator[Case]:
    anywhere = partial(crossed, ANCHORED, measure=("anchored",), details=[details])
    yield from anywhere(options=[{}, {"root": "fisher"}])
    yield from anywhere(options=options(
        anchoring=[
            {"choice": choice, "share": 0.5, "refresh": 1}
            for choice in ("auto", "greedy", "score", "k-centre", "random")
        ]
    ))  # fmt: skip
    yield from anywhere(network=("attentive", "averaged-gated", "tagger", "pixels", "perceptron"))
    yield from anywhere(
        likelihood=("gaussian", "gaussians", "bernoulli", "poisson", "weighted", "many-classes")
    )
    yield from anywhere(prior=("scalar", "diagonal"), memory=[{"micro_batch": 2}])
    likelihoods = ("categorical", "gaussian")
    yield from crossed(FEWEST, measure=("bracket",), likelihood=likelihoods, details=[details])


def trainings() -> Iterator[Case]:
    fits = partial(crossed, measure=("fit",))
    yield from fits(
        ("ntk-6-rows-anchored", "ntk-3-1", "kfac-N-C", "diag-N-C"),
        network=("gated", "convolutional", "perceptron"),
        likelihood=("categorical", "gaussian"),
    )
    adam = {"optimization": {"prior_update": "adam", "optimizer": "sgd", "lr": 0.05}}
    yield from fits(("ntk-6-rows-anchored", "ntk-3-C"), options=[adam], prior=("scalar", "groups"))
    yield from fits(("ntk-6-rows-anchored", "kfac-3-1"), details=[{"prior_blocks": 2}],
                    options=[{"hyperparameters": []}])  # fmt: skip
    yield from fits(("ntk-3-1",), details=[{"hyper_every": 2, "hyper_steps": 1}])
    yield from fits(
        ("ntk-6-rows-anchored", "kfac-3-C"),
        network=("tagger", "mapping", "transformer", "normalized"),
    )
    yield from fits(("ntk-6-rows-anchored", "kfac-3-C"), prior=("initial", "hyperprior"))
    yield from crossed(("ntk-N-C", "ntk-6-rows-anchored"), measure=("tune",))
    yield from crossed(("kfac-N-C", "ntk-6-rows-anchored"), measure=("learner",))


def low_precision() -> Iterator[Case]:
    single = partial(crossed, dtype=("float32",))
    yield from single(FEW, network=("gated", "attentive", "convolutional"))
    yield from single(FEW, memory=[{"gram_dtype": "float64"}])
    yield from single(FEWEST, network=("perceptron", "wide-convolutions", "tagger", "mapping"))
    yield from single(FEWEST, network=("gated", "convolutional"), prior=("weak",))
    yield from single(ANCHORED[:1], measure=("anchored",))
    yield from single(("ntk-3-1",), measure=("posterior",), details=options(
        structure=("kfac", "last-layer", "diag", "full", "ntk")
    ))  # fmt: skip
    yield from crossed(FEWEST, memory=[{"gram_dtype": "float32"}])


def stored_rows() -> Iterator[Case]:
    names = [name for name in FEW if name.startswith("ntk")]
    stores = options(rows_dtype=("float32", "bfloat16"), rows_device=(None, "cpu"))
    networks = ("gated", "convolutional", "perceptron", "tagger")
    yield from crossed(names, memory=stores, network=networks)
    yield from crossed(names, memory=[{"rows_dtype": "bfloat16", "micro_batch": 2}])


@dataclass(frozen=True)
class Family:
    """Cases that are recorded and compared together.

    ``tolerance`` is the largest difference, relative to the largest number of a list.
    """

    cases: Callable[[], Iterable[Case]]
    tolerance: float = EXACT


THREE = ("gated", "attentive", "convolutional")
LAYERS = (
    *("perceptron", "lstm", "gru", "rnn", "cells", "words", "twice", "functional"),
    *("normalized", "convolutions", "wide-convolutions", "scaled-convolutions", "transformer"),
)
POSITIONS, TREES = ("tagger", "pixels"), ("mapping", "tuple", "named-tuple", "nested")
BLOCKS = {"a": ["first.weight"], "b": ["first.bias", "last"]}
AUTOMATIC = {"micro_batch": "auto", "memory_budget": 4000}

FAMILIES = {
    "names": Family(crossed),
    "networks": Family(partial(crossed, network=THREE[1:])),
    "likelihoods": Family(partial(crossed, likelihood=("gaussian", "gaussians", "bernoulli"))),
    "priors": Family(partial(crossed, prior=("scalar", "diagonal", "groups"))),
    "roots": Family(partial(crossed, options=options(root=ROOTS))),
    "micro-batches": Family(partial(crossed, network=THREE, memory=[{"micro_batch": 2}])),
    "automatic": Family(partial(crossed, FEW, network=THREE[:2], memory=[AUTOMATIC])),
    "more-likelihoods": Family(
        partial(crossed, FEW, likelihood=list(LIKELIHOODS)[4:], options=options(root=ROOTS))
    ),
    "more-priors": Family(partial(crossed, FEW, prior=list(PRIORS)[4:])),
    "layers": Family(partial(crossed, FEW, network=LAYERS)),
    "positions": Family(
        partial(crossed, FEW, network=POSITIONS, likelihood=("categorical", "gaussian"))
    ),
    "trees": Family(partial(crossed, FEWEST, network=TREES)),
    "averaged": Family(
        partial(crossed, FEW, network=("averaged-gated", "averaged-scaled"),
                memory=[{}, {"micro_batch": 3}])
    ),
    "sharing": Family(
        partial(crossed, [name for name in NAMES if name.startswith("kfac-3")],
                network=("attentive", "convolutional", "tagger", "scaled-convolutions"),
                options=options(sharing=("expand", "reduce")))
    ),
    "partitions": Family(
        partial(crossed, ("blockdiag-3-1", "blockdiag-3-C", "blockdiag-N-C"),
                network=("gated", "averaged-gated", "perceptron"),
                options=options(parameter_partition=("tensor", "module")))
    ),
    "partition-groups": Family(
        partial(crossed, ("blockdiag-3-1", "blockdiag-N-C"),
                options=options(parameter_partition=[BLOCKS]))
    ),
    "subsets": Family(
        partial(crossed, [name for name in FEW if "grouped" not in name], measure=("subsets",))
    ),
    # A float32 has a unit of 6e-8, and a sum in another order moves a result by a few of them.
    "float32": Family(low_precision, tolerance=1e-6),
    # The rows are rounded and all else is float64: no sum in another order reaches the rounding.
    "rows-dtype": Family(stored_rows, tolerance=1e-6),
    # Passes in bfloat16, with a unit of 4e-3.
    "autocast": Family(
        partial(crossed, FEWEST, network=("gated", "perceptron"), dtype=("float32",),
                memory=[{"autocast": "bfloat16"}]),
        tolerance=1e-2,
    ),
    "map-loss": Family(
        partial(crossed, ("ntk-6-rows-anchored",), measure=("map_loss",), prior=PRIORS,
                network=("gated",), likelihood=("categorical", "gaussian"))
    ),
    "map-loss-networks": Family(
        partial(crossed, ("kfac-3-1",), measure=("map_loss",), network=NETWORKS)
    ),
    "kept-steps": Family(
        partial(crossed, FEW, measure=("kept",), prior=("scalar", "layerwise"),
                likelihood=("categorical", "gaussian", "gaussians"))
    ),
    "forms-of-data": Family(
        partial(crossed, ("ntk-3-C", "ntk-4-rows", "kfac-N-C", ANCHORED[0]),
                measure=("forms_of_data",), likelihood=("categorical", "gaussian"))
    ),
    "many-data": Family(
        partial(crossed, ("ntk-3-1-iid", "ntk-4-rows", "kfac-3-1", "diag-3-2", ANCHORED[0]),
                measure=("many_data",), likelihood=("categorical", "many-classes"),
                details=options(count=(70_000, 9_000_000)))
    ),
    "posteriors": Family(posteriors),
    "training": Family(trainings),
    "ranks": Family(lambda: [Case(measure="two_ranks")]),
    "anchored": Family(anchored_cases),
    # Changes once, when the control variate of anchored draws goes: see ``anchored``.
    "anchored-values": Family(partial(anchored_cases, values=True)),
    # Goes with the modifier.
}  # fmt: skip
