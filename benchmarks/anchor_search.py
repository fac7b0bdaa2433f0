"""Test variants of the anchored bound: which of them make it tighter or its draws more alike?

The networks come from ``tightness.py``: MiniNet on 1,000 MNIST digits. The script computes the Gram
matrix of all 10,000 rows once, with the share of each parameter tensor. Every variant is then
linear algebra on parts of it. Each draw has k rows. The variants change

* the anchors. The library chooses them greedily by the kernel of the last layer. Alternatives are
  the whole kernel, scores, ``k-centre`` on the inputs, random or partly random anchors, and other
  numbers of anchors.
* the blocks. The library groups the rows with the largest scores by their correlation given the
  anchors, in the kernel of the last layer. Alternatives group all rows, by that kernel or by the
  whole one, stratify within columns of the root, or draw uniformly.
* the number of blocks per draw.
* the use of earlier draws: as probabilities of the columns, as a control variate of the value (as
  in the library), or of the gradient too.

The bound is the exact mean over the blocks of partitions, divided by the exact log-determinant. The
deviations refer to single draws. The deviation of the gradient with respect to the logarithms of
the precisions is √(trace of the covariance), divided by its norm.

    python benchmarks/anchor_search.py --data-dir DIR --seeds 0 1 2
    python benchmarks/anchor_search.py --table
"""

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from anchor_choice import grams
from measure import insert, machine, means, measured_on, write_csv
from tightness import evidence_at, study_parser, trained
from torch import Tensor

from evigrad import Evidence
from evigrad.blocks.anchors.choice import MOST_CANDIDATES, Centres, pivots
from evigrad.blocks.anchors.partition import (
    AnchoredPartition,
    Groups,
    Scores,
    conditional,
    form_groups,
    grouped,
)
from evigrad.blocks.anchors.stream import FLOOR, EntropyPredictor, probabilities
from evigrad.blocks.sources import as_source
from evigrad.data import DataSet, load

ROWS = (100, 200, 400)
PARTITIONS, DRAWS, WARM_UP = 3, 100, 20


@dataclass(frozen=True)
class Idea:
    """How a draw spends its k rows.

    Attributes:
        anchors: Choice of the anchors.
        among: Number of candidates of a greedy choice, as a multiple of the anchors. 0 for all
            rows. Half of the candidates have the largest scores, and the others are random.
        share: Fraction of the rows that are anchors.
        at_random: Fraction of the anchors that are random.
        blocks: Partition of the other rows.
        several: Number of blocks per draw, which share the rows that are not anchors.
        chances: ``predicted`` from earlier draws, or ``uniform``.
        floor: Fraction of the draws that are always uniform.
        control: Use of earlier draws as a control variate: ``value``, ``gradient`` for both, or
            nothing.
    """

    anchors: str = "last layer"
    among: float = 4.0
    share: float = 0.9
    at_random: float = 0.0
    blocks: str = "grouped"
    several: int = 1
    chances: str = "predicted"
    floor: float = FLOOR
    control: str = "value"


NOW = Idea()
BEFORE = Idea(anchors="score", share=0.75, blocks="stratified", floor=0.1, control="")
IDEAS: dict[str, Idea] = {
    "as it is": NOW,
    "as it was: by score, 75 %": BEFORE,
    "anchors: greedy, all": replace(NOW, anchors="all"),
    "anchors: by score": replace(NOW, anchors="score"),
    "anchors: k-centre": replace(NOW, anchors="k-centre"),
    "anchors: random": replace(NOW, anchors="random"),
    "20 % of the anchors random": replace(NOW, at_random=0.2),
    "among all rows": replace(NOW, among=0.0),
    "75 % of the rows anchors": replace(NOW, share=0.75),
    "95 % of the rows anchors": replace(NOW, share=0.95),
    "blocks: uniform": replace(NOW, blocks="uniform"),
    "blocks: stratified": replace(NOW, blocks="stratified"),
    "blocks: all grouped, last layer": replace(NOW, blocks="last layer"),
    "blocks: all grouped, all": replace(NOW, blocks="all"),
    "two blocks": replace(NOW, several=2),
    "four blocks": replace(NOW, several=4),
    "no control variate": replace(NOW, control=""),
    "control variate of the gradient too": replace(NOW, control="gradient"),
    "floor of 10 %": replace(NOW, floor=0.1),
    "drawn uniformly": replace(NOW, chances="uniform"),
}


class Problem:
    """A trained network as the Gram matrix of all its rows, by parameter tensor."""

    def __init__(self, evidence: Evidence, data: DataSet, shares: dict[str, Tensor]) -> None:
        with torch.no_grad():
            f = evidence.model(data.train[0])
        likelihood = evidence.likelihood
        head, _ = likelihood.row_scores(likelihood.condensed(f, "eigen"), "eigen")
        self.scores = Scores(head, torch.zeros(len(head)), 0)
        num_data, columns = head.shape
        # Columns that are zero for certain have no scores.
        kept = torch.arange(num_data * f.shape[1]).reshape(num_data, -1)[:, :columns].flatten()
        last = list(shares)[-1].rpartition(".")[0]
        self.rows = kept
        self.shares = [gram[kept][:, kept] for gram in shares.values()]
        self.kernels = {
            "last layer": sum(
                gram for name, gram in zip(shares, self.shares, strict=True)
                if name.startswith(f"{last}.")
            ),
            "all": sum(gram.double() for gram in self.shares),
        }  # fmt: skip
        self.exact = entropy(self.kernels["all"])
        self._centres, self._source = Centres(), as_source(data.train)
        self._greedy: dict[tuple[str, int, int], Tensor] = {}
        self._grouped: dict[tuple[Any, ...], tuple[list[Tensor], Tensor]] = {}

    def anchors(self, idea: Idea, count: int, generator: torch.Generator) -> Tensor:
        """Return the anchors, as rows n K + d."""
        among = min(round(idea.among * count), max(2 * count, MOST_CANDIDATES))
        ranked = self._ranked(idea.anchors, count, among, generator)
        drawn = int(idea.at_random * count)
        chosen = ranked[: count - drawn]
        others = torch.ones(self.scores.head.numel(), dtype=torch.bool)
        others[chosen] = False
        unchosen = others.nonzero().squeeze(1)
        extra = unchosen[torch.randperm(len(unchosen), generator=generator)[:drawn]]
        return torch.cat([chosen, extra]).sort().values

    def _ranked(self, how: str, count: int, among: int, generator: torch.Generator) -> Tensor:
        num_data, columns = self.scores.head.shape
        if how == "score":
            return self.scores.head.flatten().argsort(descending=True, stable=True)
        if how == "random":
            return torch.randperm(num_data * columns, generator=generator)
        if how == "k-centre":
            first = self._centres.first(self._source, count)
            assert first is not None
            return first * columns
        key = (how, count, among)
        if key not in self._greedy:
            best = self.scores.head.flatten().argsort(descending=True)
            if among:
                others = best[among // 2 :]
                mixed = torch.randperm(len(others), generator=generator)[: among - among // 2]
                best = torch.cat([best[: among // 2], others[mixed]])
            kernel = self.kernels[how].double()[best][:, best]
            self._greedy[key] = best[pivots(kernel, count)]
        return self._greedy[key]

    def blocks(
        self, idea: Idea, anchors: Tensor, size: int, generator: torch.Generator
    ) -> tuple[list[Tensor], list[int], Tensor]:
        """Return blocks of the other rows, their columns, and estimates of their values."""
        num_rows = size + len(anchors)
        groups = Groups()
        if idea.blocks == "grouped":

            def last_layer_kernel(rows: Tensor) -> Tensor:
                return self.kernels["last layer"][rows][:, rows]

            groups = form_groups(self.scores.head, anchors, num_rows, last_layer_kernel, generator)
        partition = AnchoredPartition.draw(anchors, self.scores, num_rows, generator, groups)
        if idea.blocks in ("grouped", "stratified"):
            return partition.parts, list(partition.keys), partition.guesses
        if idea.blocks == "uniform":
            others = torch.cat(partition.parts)
            parts = list(others[torch.randperm(len(others), generator=generator)].split(size))
        else:
            key = (idea.blocks, size, *anchors.tolist())
            if key not in self._grouped:
                others = torch.cat(partition.parts)
                both = torch.cat([anchors, others])
                left = conditional(self.kernels[idea.blocks][both][:, both], len(anchors))
                assert left is not None
                positions, entropies = grouped(left, size)
                self._grouped[key] = [others[part] for part in positions], entropies
            parts, guesses = self._grouped[key]
            return parts, [0] * len(parts), guesses
        flat = self.scores.head.flatten().double()
        unit = flat[anchors].min()
        guesses = [(flat[part] / unit).log1p().sum() for part in parts]
        return parts, [0] * len(parts), torch.stack(guesses)

    def entropy(self, rows: Tensor) -> float:
        """Return ℓ of some rows."""
        return entropy(self.kernels["all"][rows[:, None], rows])

    def gradient(self, rows: Tensor) -> Tensor:
        """Return the negative gradient of ℓ in the logarithms of the precisions."""
        matrix = self.kernels["all"][rows[:, None], rows]
        inverse = torch.linalg.inv(matrix + torch.eye(len(rows), dtype=matrix.dtype))
        return torch.stack([(inverse * g[rows[:, None], rows]).sum() for g in self.shares])


def entropy(matrix: Tensor) -> float:
    """Return the log-determinant of 1 + matrix."""
    factor = torch.linalg.cholesky(matrix.double() + torch.eye(len(matrix), dtype=torch.float64))
    return float(2 * factor.diagonal().log().sum())


def measured(problem: Problem, idea: Idea, k: int, seed: int) -> dict[str, float]:
    """Return the bound, the deviation of a draw, and the deviation of its gradient."""
    generator = torch.Generator().manual_seed(seed)
    count = int(idea.share * k)
    size = max(1, (k - count) // idea.several)
    bounds = []
    for _ in range(PARTITIONS):
        anchors = problem.anchors(idea, count, generator)
        parts, _, _ = problem.blocks(idea, anchors, size, generator)
        of_anchors = problem.entropy(anchors)
        increases = [problem.entropy(torch.cat([anchors, part])) - of_anchors for part in parts]
        bounds.append((of_anchors + sum(increases)) / problem.exact)
    predictor, seen = EntropyPredictor(), Gradients()
    values, gradients = [], []
    for draw in range(WARM_UP + DRAWS):
        if draw % 10 == 0:  # a round of training
            anchors = problem.anchors(idea, count, generator)
            parts, keys, guesses = problem.blocks(idea, anchors, size, generator)
            of_anchors, slope = problem.entropy(anchors), problem.gradient(anchors)
        expected = predictor.expected(keys, guesses)
        even = torch.ones(len(parts), dtype=torch.float64)
        chances = probabilities(expected if idea.chances == "predicted" else even, floor=idea.floor)
        base = expected if idea.control else expected * 0
        slopes = expected[:, None] * slope * 0
        if idea.control == "gradient":
            slopes = seen.expected(keys, expected)
        value, gradient = of_anchors + float(base.sum()), slope + slopes.sum(0)
        for number in torch.multinomial(
            chances, idea.several, replacement=True, generator=generator
        ).tolist():
            both, weight = (
                torch.cat([anchors, parts[number]]),
                idea.several * float(chances[number]),
            )
            increase, turned = problem.entropy(both) - of_anchors, problem.gradient(both) - slope
            value += (increase - float(base[number])) / weight
            gradient = gradient + (turned - slopes[number]) / weight
            predictor.observe(keys[number], float(expected[number]), increase)
            seen.observe(keys[number], increase, turned)
        if draw >= WARM_UP:
            values.append(value / problem.exact)
            gradients.append(gradient)
    stacked = torch.stack(gradients)
    return {
        "bound": statistics.mean(bounds),
        "deviation": statistics.stdev(values),
        "gradient": float(stacked.var(0).sum().sqrt() / stacked.mean(0).norm()),
    }


class Gradients:
    """The expected gradient per nat, from earlier blocks of the same column."""

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}

    def expected(self, keys: list[int], expected: Tensor) -> Tensor:
        """Return (blocks, tensors), in proportion to the expected values."""
        if not self._known:
            return expected[:, None] * 0
        mean = torch.stack([*self._known.values()]).mean(0)
        return torch.stack(
            [e * self._known.get(key, mean) for key, e in zip(keys, expected, strict=True)]
        )

    def observe(self, key: int, value: float, gradient: Tensor) -> None:
        """Move half of the way to a new observation."""
        if value > 0:
            one = gradient / value
            self._known[key] = 0.5 * (self._known.get(key, one) + one)


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """Return a line per variant: bound ± deviation of a draw (deviation of its gradient)."""
    sizes = list(dict.fromkeys(row["rows"] for row in rows))
    lines = [
        f"| variant | {' | '.join(f'{k} rows' for k in sizes)} |",
        "|---" * (1 + len(sizes)) + "|",
    ]
    for idea in dict.fromkeys(row["idea"] for row in rows):
        cells = [
            f"{row['bound']:.3f} ± {row['deviation']:.2f} ({row['gradient']:.2f})"
            for row in rows
            if row["idea"] == idea
        ]
        lines.append(f"| {idea.replace('centre', 'center')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, and write the table."""
    parser = study_parser(__doc__, "anchor_search", ROWS)
    parser.add_argument("--stage", type=int, default=None, help="epochs trained; default: all")
    parser.add_argument("--networks", type=Path, default=Path("results/tightness"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for folder in (options.networks, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    for seed in [] if options.table else options.seeds:
        kept = {k: options.results / f"case-{seed}-{k}.json" for k in options.rows}
        if all(path.exists() for path in kept.values()):
            continue
        data = load("mnist", data_dir=options.data_dir, subset=options.num_data, seed=seed)
        files = trained(data, seed, options.epochs, options.networks)
        stage = max(files) if options.stage is None else options.stage
        evidence = evidence_at(files[stage], data, seed, "ntk-400-rows-anchored")
        problem = Problem(evidence, data, grams(evidence, data))
        for k in options.rows:
            rows_of_case = []
            for name, idea in IDEAS.items():
                rows_of_case.append(
                    {"seed": seed, "rows": k, "idea": name, **measured(problem, idea, k, seed)}
                )
                print(rows_of_case[-1], flush=True)
            kept[k].write_text(json.dumps(rows_of_case, indent=1))
    results = [
        row for path in sorted(options.results.glob("case-*.json"))
        for row in json.loads(path.read_text())
    ]  # fmt: skip
    if not results:
        parser.error(f"there are no results in {options.results}")
    results.sort(key=lambda row: (row["rows"], list(IDEAS).index(row["idea"])))
    rows = means(results, ("idea", "rows"), ("bound", "deviation", "gradient"))
    write_csv(options.tables / "anchor_search.csv", rows)
    text = f"{as_markdown(rows)}\n\n{measured_on([machine()])}"
    print(text)
    if options.page.exists():
        insert(options.page, "anchor_search", text)


if __name__ == "__main__":
    main()
