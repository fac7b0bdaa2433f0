"""Compare criteria for pruning: accuracy and log likelihood against the channels removed.

The sets are ``mnist`` (10,000 digits, MiniNet) and ``cifar10`` (10,000 images, a Fixup ResNet with
one block per stage and 8, 16, 32 and 64 channels), each with 10,000 test images. Each seed draws
the training images and trains two networks by ``fit``, from the same initial weights:

* ``unit precisions``: ``kfac-400-1`` learns one prior precision per unit, shared with its bias. On
  CIFAR-10, the log-determinant has the weight 0.3.
* ``weight decay``: weight decay 5e-4.

Torch-Pruning removes the channels of lowest importance in the whole network (global pruning, one
step) and keeps at least one channel in each group of layers. The criteria are:

* ``magnitude``: Torch-Pruning's default, squared weights of each channel and of the weights that
  read it, as a mean over layers, relative to the mean of the group.
* ``norm``: squared weights and bias of each channel.
* ``damage``: the posterior damage of ``evigrad.pruning``, summed over each channel. A random tenth
  of the training data determines the curvature.
* ``damage, all data``: the same, from the curvature of all training data.
* ``effective``: the effective number of parameters of each channel, from a tenth of the data.

All pruned networks are trained again for two epochs with weight decay 5e-4 and one learning rate.
``removed`` is the share of channels removed, of those that Torch-Pruning can remove. ``weights`` is
the share of weights left. Rows ``weights`` remove single weights with ``torch.nn.utils.prune``.

Equal accuracy is one percentage point below the network trained with weight decay, without pruning.
Between two sparsities, the accuracy is interpolated. ``seconds`` are the process time of a training
(empty if it was resumed) or of a curvature. ``kfac, all data`` is one gradient of the evidence by
Kronecker factors of all data, as in each of SpaM's rounds (first seed only).

CIFAR-10 has only the damage of both networks, and the magnitude with weight decay.

The script stores every finished case and resumes where it was stopped. Trained networks are in
``--runs``.

    python benchmarks/pruning.py --sets mnist --data-dir DIR --results docs/results \
        --pages benchmarks/README.md
"""

import argparse
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
import torch_pruning as tp
from learning import Result, Results, make_parser, parse
from measure import Clock, show, spans
from rivals import USUAL, fixed_prior, log_likelihood
from torch import Tensor, nn
from torch.nn.utils import prune

import evigrad
from evigrad import Laplace, Memory, Schedule
from evigrad.data import DataSet, load
from evigrad.models import make_model
from evigrad.models.residual import Block, ResNet
from evigrad.plots.style import LIGHT, add_legend, decorate, new_figure, save
from evigrad.priors import GaussianPrior
from evigrad.pruning import UnitImportance, importances

NUM_DATA, SHARE = 10_000, 0.1
SETS = {
    "mnist": Schedule(epochs=40, every=2, eval_every=0),
    "cifar10": Schedule(epochs=30, every=2, eval_every=0),
}
TITLES = {"mnist": "MiniNet, 10,000 MNIST digits", "cifar10": "ResNet, 10,000 CIFAR-10 images"}
# The weight of the log-determinant. On CIFAR-10, the network of the first seed has a test accuracy
# of 55.0 % with the weight 1, 59.2 % with 0.3, and 59.6 % with weight decay.
LOG_DET_WEIGHTS = {"mnist": 1.0, "cifar10": 0.3}
CHANNELS = 8
ESTIMATOR = "kfac-400-1"
UNITS, DECAY = "unit precisions", "weight decay"
RATIOS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
WEIGHT_RATIOS = (0.5, 0.8, 0.9, 0.95, 0.98)
BATCH, EPOCHS, LR = 100, 2, 1e-3
MICRO_BATCH = 250
POINT = 0.01  # of accuracy
COLUMNS = ("row", "seed", "set", "case", "ratio", "removed", "weights", "accuracy")
COLUMNS = (*COLUMNS, "log_likelihood", "seconds", "rounds")
ALL_KFAC = "kfac, all data"
# Network and criterion of each row.
CASES = {
    f"damage, {UNITS}": (UNITS, "damage"),
    f"damage, all data, {UNITS}": (UNITS, "damage, all data"),
    f"effective, {UNITS}": (UNITS, "effective"),
    f"magnitude, {UNITS}": (UNITS, "magnitude"),
    f"damage, {DECAY}": (DECAY, "damage"),
    f"norm, {DECAY}": (DECAY, "norm"),
    f"magnitude, {DECAY}": (DECAY, "magnitude"),
}
WEIGHT_CASES = {f"weights: {case}": CASES[case] for case in (f"damage, {UNITS}",)} | {
    f"weights: magnitude, {UNITS}": (UNITS, "norm"),
    f"weights: magnitude, {DECAY}": (DECAY, "norm"),
}
CIFAR_CASES = (f"damage, {UNITS}", f"damage, {DECAY}", f"magnitude, {DECAY}")
SHOWN = 2  # position of the ratio with accuracy and log likelihood in the table
SHOWN_CASES = [case for case in CASES if "all data" not in case]
SHOWN_METRICS = (("accuracy", 100, "accuracy, %"), ("log_likelihood", 1, "log likelihood"))
FIGURE = "images/pruning.png"

Scores = Mapping[str, Tensor]


def unit_prior(model: nn.Module) -> GaussianPrior:
    """Return a prior with one precision per unit, and one for each of Fixup's scalars."""
    groups: dict[str, dict[str, int]] = {}
    for name, _ in model.named_parameters():
        groups.setdefault(name.rpartition(".")[0], {})[name] = 0
    return GaussianPrior(groups)


def make_network(name: str, data: DataSet, seed: int) -> nn.Module:
    """Return the network of a set with the initial weights of a seed."""
    if name == "mnist":
        return make_model("mininet", data.input_shape, data.num_outputs, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        counts = (1, 1, 1, 1)
        return ResNet(Block, counts, data.input_shape[0], data.num_outputs, CHANNELS, CHANNELS)


def judged(model: nn.Module, data: DataSet) -> Result:
    """Return accuracy and log likelihood on the test set."""
    x, y = data.test
    model.eval()
    with torch.no_grad():
        f = torch.cat([model(part) for part in x.split(1000)])
    accuracy = float((f.argmax(1) == y).double().mean())
    return {"accuracy": accuracy, "log_likelihood": log_likelihood(f, y, None)}


def retrain(model: nn.Module, data: DataSet, seed: int) -> None:
    """Train a pruned network for a few epochs, with a cosine of the learning rate."""
    x, y = data.train
    generator = torch.Generator().manual_seed(seed)
    steps = EPOCHS * (len(x) // BATCH)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(x), generator=generator)
        for batch in order[: len(x) // BATCH * BATCH].split(BATCH):
            squares = torch.stack([w.square().sum() for w in model.parameters()]).sum()
            loss = F.cross_entropy(model(x[batch]), y[batch]) + 0.5 * USUAL * squares
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def num_weights(model: nn.Module) -> int:
    """Return the number of weights, without those that are removed by a mask."""
    total = sum(w.numel() for w in model.parameters())
    return total - sum(int((mask == 0).sum()) for mask in model.buffers())


def keeping_one(importance: Callable[[Any], Any], group: Any) -> Tensor | None:
    """Return the importance of a group, whose best unit is never removed.

    Torch-Pruning would otherwise not prune a group at all that is to lose all of its units.
    """
    scores = importance(group)
    return None if scores is None else scores.index_fill(0, scores.argmax(), math.inf)


def without_channels(
    model: nn.Module, scores: Scores | None, ratio: float, x: Tensor
) -> tuple[nn.Module, float]:
    """Return a copy without some channels, and their share. None is Torch-Pruning's default."""
    model = copy.deepcopy(model).train()
    default = tp.importance.GroupMagnitudeImportance()
    importance = default if scores is None else UnitImportance(model, scores)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Fixup's scalars have no channels
        pruner = tp.BasePruner(
            model,
            x[:2],
            importance=partial(keeping_one, importance),
            global_pruning=True,
            pruning_ratio=ratio,
            ignored_layers=[model.get_submodule("output")],
        )
        removed = 0
        for group in pruner.step(interactive=True):
            removed += len(group[0].idxs)
            group.prune()
    return model, removed / pruner.initial_total_channels


def without_weights(model: nn.Module, scores: Scores, ratio: float) -> nn.Module:
    """Return a copy with masks that remove a share of the weights, except biases."""
    model = copy.deepcopy(model)
    layers = {
        f"{name}.weight": (module, "weight")
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    }
    prune.global_unstructured(
        list(layers.values()),
        pruning_method=prune.L1Unstructured,
        importance_scores={layer: scores[name] for name, layer in layers.items()},
        amount=ratio,
    )
    return model


class Networks:
    """The trained networks of a set and seed, with the scores of their criteria."""

    def __init__(self, name: str, seed: int, data: DataSet, runs: Path, add: Any) -> None:
        self.data, self._add, self._scores = data, add, dict[tuple[str, str], Scores | None]()
        self.fitted = dict[str, evigrad.training.FitResult]()
        for kind in (UNITS, DECAY):
            model, folder = make_network(name, data, seed), runs / f"{name}-{seed}-{kind[:4]}"
            is_new, learns = not folder.exists(), kind == UNITS
            prior = unit_prior(model) if learns else fixed_prior(USUAL, len(data.train[0]))
            schedule = SETS[name] if learns else replace(SETS[name], every=None)
            with Clock() as clock:
                fitted = evigrad.fit(
                    model,
                    data.train,
                    estimator=ESTIMATOR if learns else None,
                    prior=prior,
                    laplace=Laplace(log_det_weight=LOG_DET_WEIGHTS[name] if learns else 1.0),
                    schedule=schedule,
                    seed=seed,
                    run_dir=folder,
                    resume=True,
                    progress=False,
                )
            self.fitted[kind] = fitted
            rounds = sum(row.get("log_evidence") is not None for row in fitted.history)
            seconds = clock.seconds if is_new else None
            add(kind, judged(fitted.model, data) | {"seconds": seconds, "rounds": rounds})

    def scores(self, kind: str, criterion: str) -> Scores | None:
        """Return the scores of a network's weights, or None for Torch-Pruning's default."""
        if (kind, criterion) not in self._scores:
            self._scores[kind, criterion] = self._computed(kind, criterion)
        return self._scores[kind, criterion]

    def _computed(self, kind: str, criterion: str) -> Scores | None:
        fitted, (x, y) = self.fitted[kind], self.data.train
        if criterion == "magnitude":
            return None
        if criterion == "norm":
            return {n: w.detach().square() for n, w in fitted.model.named_parameters()}
        evidence, name = fitted.evidence, "posterior-damage"
        if not criterion.endswith("all data"):
            chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
            chosen = chosen[: int(SHARE * len(x))]
            share = len(chosen) / len(x)
            x, y = x[chosen], y[chosen]
            evidence = evidence.with_estimator("diag-N-C", num_data=len(x), temperature=share)
        if criterion == "effective":
            name = "effective-parameters"
        with Clock() as clock:
            scores = importances(evidence, (x, y), criterion=name)
        self._add(f"curvature: {criterion}, {kind}", {"seconds": clock.seconds})
        return scores

    def time_all_data(self) -> None:
        """Measure a gradient of the evidence by Kronecker factors of all data."""
        memory = Memory(micro_batch=MICRO_BATCH)
        evidence = self.fitted[UNITS].evidence.with_estimator("kfac-N-C", memory=memory)
        with Clock() as clock:
            evidence.backward(*self.data.train)
        self._add(ALL_KFAC, {"seconds": clock.seconds})


def cases_of(name: str) -> Iterator[tuple[str, float]]:
    """Yield the cases of a set with their ratios."""
    for case in CASES:
        if name == "mnist" or case in CIFAR_CASES:
            yield from ((case, ratio) for ratio in RATIOS)
    if name == "mnist":
        yield from ((case, ratio) for case in WEIGHT_CASES for ratio in WEIGHT_RATIOS)


def run_set(name: str, seed: int, options: argparse.Namespace, results: Results) -> None:
    """Run the missing cases of a set and seed."""

    def add(case: str, columns: Result, ratio: float | None = None) -> None:
        row = f"{name}: {case}" + ("" if ratio is None else f", {ratio}")
        common = {"row": row, "seed": seed, "set": name, "case": case, "ratio": ratio}
        results.add(dict.fromkeys(COLUMNS) | columns | common)

    missing = [c for c in cases_of(name) if not results.has(f"{name}: {c[0]}, {c[1]}", seed)]
    if not missing:
        return
    data = load(name, options.data_dir, subset=NUM_DATA, seed=seed)
    networks = Networks(name, seed, data, options.runs, add)
    if seed == 0 and not results.has(f"{name}: {ALL_KFAC}", seed):
        networks.time_all_data()
    for case, ratio in missing:
        kind, criterion = (CASES | WEIGHT_CASES)[case]
        whole, scores = networks.fitted[kind].model, networks.scores(kind, criterion)
        if case in CASES:
            model, removed = without_channels(whole, scores, ratio, data.train[0])
        else:
            assert scores is not None
            model, removed = without_weights(whole, scores, ratio), ratio
        retrain(model, data, seed)
        columns = judged(model, data) | {"removed": removed}
        columns["weights"] = num_weights(model) / num_weights(whole)
        add(case, columns, ratio)


def at_accuracy(runs: Sequence[Result], whole: float, least: float, key: str) -> float:
    """Return ``key`` where the accuracy first falls below ``least``, interpolated."""
    points = [(0.0 if key == "removed" else 1.0, whole)]
    points += [(run[key], run["accuracy"]) for run in sorted(runs, key=lambda run: run["ratio"])]
    for (value, high), (next_value, low) in zip(points, points[1:], strict=False):
        if low < least:
            share = 0.0 if high <= least else (high - least) / (high - low)
            return value + share * (next_value - value)
    return points[-1][0]


def with_range(values: Sequence[float], digits: int) -> str:
    """Return the mean and the range of values."""
    mean = f"{fmean(values):.{digits}f}"
    return (
        mean if len(values) < 2 else f"{mean} ({min(values):.{digits}f}–{max(values):.{digits}f})"
    )


def complete(runs: list[Result], name: str, case: str) -> dict[int, list[Result]]:
    """Return the runs of a case by seed, in the order of the ratios, for complete seeds."""
    ratios = RATIOS if case in CASES else WEIGHT_RATIOS
    by_seed: dict[int, list[Result]] = {}
    for run in sorted(runs, key=lambda run: (run["seed"], run["ratio"] or 0)):
        if (run["set"], run["case"]) == (name, case):
            by_seed.setdefault(run["seed"], []).append(run)
    return {seed: of_seed for seed, of_seed in by_seed.items() if len(of_seed) == len(ratios)}


def table_of(runs: list[Result]) -> str:
    """Return a table of what is removed at equal accuracy."""
    heads = ("removed, %", "weights left, %", "accuracy, %", "log likelihood")
    lines = [f"| set: criterion, network | {' | '.join(heads)} | seeds |", "|---" * 6 + "|"]
    whole = {(run["row"], run["seed"]): run["accuracy"] for run in runs}
    for name in SETS:
        for case, (kind, _) in (CASES | WEIGHT_CASES).items():
            by_seed = complete(runs, name, case)
            rows = list[Sequence[float]]()
            for seed, of_seed in by_seed.items():
                least, start = (
                    whole[f"{name}: {DECAY}", seed] - POINT,
                    whole[f"{name}: {kind}", seed],
                )
                removed, left = (
                    at_accuracy(of_seed, start, least, k) for k in ("removed", "weights")
                )
                shown = of_seed[SHOWN]
                accuracy, likelihood = 100 * shown["accuracy"], shown["log_likelihood"]
                rows.append((100 * removed, 100 * left, accuracy, likelihood))
            if rows:
                columns = zip(*rows, strict=True)
                cells = [with_range(c, d) for c, d in zip(columns, (0, 0, 1, 3), strict=True)]
                lines.append(f"| {name}: {case} | {' | '.join(cells)} | {spans(by_seed)} |")
    return "\n".join(lines)


def costs_of(runs: list[Result]) -> str:
    """Return a table of process times, relative to the training with weight decay."""
    lines = [
        "| set: work | time, × training with weight decay | rounds | seeds |",
        "|---|---|---|---|",
    ]
    timed = {(run["row"], run["seed"]): run for run in runs if run["seconds"] is not None}
    for row in dict.fromkeys(row for row, _ in timed):
        base = f"{row.partition(':')[0]}: {DECAY}"
        seeds = [s for r, s in timed if r == row and (base, s) in timed]
        ratios = [timed[row, s]["seconds"] / timed[base, s]["seconds"] for s in seeds]
        if ratios:
            rounds = timed[row, seeds[0]]["rounds"] or ""
            lines.append(f"| {row} | {with_range(ratios, 2)} | {rounds} | {spans(seeds)} |")
    return "\n".join(lines)


def draw(runs: list[Result], path: Path) -> None:
    """Draw accuracy and log likelihood against the channels removed, with ranges of seeds."""
    names = [name for name in SETS if any(complete(runs, name, case) for case in CASES)]
    figure = new_figure(9.6, 3.6 * len(names))
    legend = list[tuple[str, str, Any]]()
    for row, name in enumerate(names):
        for column, (key, factor, label) in enumerate(SHOWN_METRICS):
            axes = figure.add_subplot(len(names), 2, 2 * row + column + 1)
            decorate(axes, TITLES[name], "channels removed, %", f"test {label}")
            for case, color in zip(SHOWN_CASES, LIGHT.lines, strict=False):
                by_ratio = list(zip(*complete(runs, name, case).values(), strict=True))
                if not by_ratio:
                    continue
                x = [100 * fmean(run["removed"] for run in of_ratio) for of_ratio in by_ratio]
                values = [[factor * run[key] for run in of_ratio] for of_ratio in by_ratio]
                axes.plot(
                    x,
                    list(map(fmean, values)),
                    color=color,
                    linewidth=1.6,
                    marker="o",
                    markersize=3,
                )
                axes.fill_between(
                    x,
                    list(map(min, values)),
                    list(map(max, values)),
                    color=color,
                    alpha=0.15,
                    linewidth=0,
                )
                if (case, color, "-") not in legend:
                    legend.append((case, color, "-"))
    add_legend(figure, legend)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, print the tables, insert them into the pages, and draw the figure."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="*", choices=list(SETS), default=list(SETS))
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/pruning"), help="folder of the trained networks"
    )
    options = parse(parser, arguments)
    results = Results(options.results / "pruning.csv", COLUMNS)
    for name in options.sets:
        for seed in options.seeds:
            run_set(name, seed, options, results)
    runs = results.read()
    picture = f"![Accuracy and log likelihood against the channels removed](../docs/{FIGURE})"
    show("pruning", f"{table_of(runs)}\n\n{picture}", options.pages)
    show("pruning cost", costs_of(runs), options.pages)
    draw(runs, options.results.parent / FIGURE)


if __name__ == "__main__":
    main()
