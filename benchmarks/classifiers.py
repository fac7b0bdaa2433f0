r"""Compare predictions of classifiers: MAP, Laplace, variational, and calibrated on held-out data.

The sets are the images of ``rivals.py``, the tables of ``sklearn_tables.py`` (random 80/20 splits),
the fine-tuning of ``transfer.py`` (one precision per tensor, around the pretrained weights) and the
lines of text of ``examples/text.py``. Each seed trains one network by ``fit`` with its defaults, or
with the schedule of the other script. The tables have networks with two hidden layers of 50. All
rows predict with this network, except:

* ``temperature scaling``: trained on 90 % of the data. The rest chooses the scale of the logits.
* ``calibrated``: the posterior of this network, with two scales that the rest chooses
  (``Posterior.calibrate``).
* ``ensemble of 3``: mean probabilities of three networks from different initial weights.

``MAP`` is the plug-in prediction. ``laplace, STRUCTURE`` and ``variational, STRUCTURE`` are
posteriors, with 1,000 samples of the outputs. ``variational mean, STRUCTURE`` predicts with the
mean weights. ``laplace-torch`` is its default posterior (last layer, Kronecker factors), with the
prior precision of its marginal likelihood and its default prediction (generalized linear, probit).

For images, ``auroc`` tells how well the entropy of the prediction separates test images from the
same images turned by 90 degrees: 0.5 is chance, 1 is perfect. In fine-tuning, it separates
them from test images of the classes of the pretraining. Fine-tuning and ``cifar10-10000`` use the
first 1,000 images of both kinds.

``seconds`` are the process time until the first prediction of a posterior, or of all trainings of a
row. The rule was fixed before the first run: a posterior becomes the default of classifiers if its
log likelihood is level with ``MAP`` within one standard error of the differences on every set, and
ahead by more than one on half of them. The script stores every finished run and resumes where it
was stopped.

    python benchmarks/classifiers.py --sets digits breast_cancer wine --results docs/results
    python benchmarks/classifiers.py --sets mnist --data-dir DIR --results docs/results \
        --pages benchmarks/README.md

``text`` needs ``export PYTHONPATH=.``.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transfer
from learning import Result, Results, make_parser, parse
from measure import Clock, mean_and_error, show, spans, with_error
from rivals import (
    HIDDEN,
    IMAGES,
    MEMBERS,
    OTHER_MEMBER,
    Fitted,
    Pair,
    Task,
    best_scale,
    make_task,
    metrics,
    train,
)
from sklearn.metrics import roc_auc_score
from sklearn_tables import CLASSES
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transfer import Transfer

from evigrad import Schedule
from evigrad.data import DataSet
from evigrad.data.dataset import Scaling, stratified_split
from evigrad.training.plan import planned

TABLES = ("breast_cancer", "wine", "chile", "mortgages", "deaths")
FINE_TUNING = {f"fine-tuning-{size}": size for size in transfer.SIZES}
SETS, STRUCTURES = (*TABLES, *IMAGES, *FINE_TUNING, "text"), ("last-layer", "kfac")
HELD_OUT, TEST, SAMPLES = 0.1, 0.2, 1000
# Of the test images and of the others, the first images for large networks.
SLOW, MOST_IMAGES = (*FINE_TUNING, "cifar10-10000"), 1000
KEYS = ("log_likelihood", "accuracy", "ece")
COLUMNS = ("row", "seed", *KEYS, "auroc", "seconds", "bound", "steps")


@dataclass(frozen=True)
class Text(Task):
    """Lines of code and words as characters, for the transformer of ``examples/text.py``."""

    def network(self, seed: int | None = None) -> nn.Module:
        """Return the network with the initial weights of a seed."""
        from examples.text import Reader

        class Characters(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.reader = Reader()

            def forward(self, ids: Tensor) -> Tensor:
                return self.reader(ids, ids > 0)

        torch.manual_seed(self.seed if seed is None else seed)
        return Characters()


def text_task(seed: int) -> Text:
    """Return 600 lines of five modules, and 600 test lines of four others."""
    from examples.text import KINDS, LENGTH, TEST, TRAIN, snippets

    def part(modules: Sequence[ModuleType], seed: int) -> tuple[Tensor, Tensor]:
        inputs, labels = snippets(modules, 300, seed)
        return inputs["ids"], labels

    zero, one = torch.zeros(()), torch.ones(())
    parts = part(TRAIN, seed), part(TEST, seed + 1)
    data = DataSet("text", *parts, len(KINDS), (LENGTH,), "categorical", KINDS, zero, one)
    return Text(data, "", seed, {}, Schedule(epochs=60, batch_size=50, eval_every=0))


def task_of(name: str, seed: int, data_dir: str | None, backbone: Path) -> tuple[Task, Tensor]:
    """Return the split of a seed with its network, and inputs unlike the training data."""
    if name == "text":
        task = text_task(seed)
        return task, task.data.test[0][:0]
    if name in FINE_TUNING:
        data = transfer.read(data_dir)
        old, new = (transfer.of_classes(data, old) for old in (True, False))
        weights = transfer.pretrained(old, backbone)
        return transfer.make_task(new, FINE_TUNING[name], seed, weights), old.test[0]
    if name in IMAGES:
        task = make_task(name, seed, data_dir)
        return task, task.data.test[0].rot90(1, (2, 3))
    features, targets = CLASSES[name]()
    names, numbers = np.unique(targets, return_inverse=True)
    x, y = torch.from_numpy(features).float(), torch.from_numpy(numbers)
    first, last = map(torch.from_numpy, stratified_split(numbers, TEST, seed))
    scaling = Scaling.of(x[first])
    train_part, test_part = ((scaling(x[part]), y[part]) for part in (first, last))
    classes, shape = tuple(map(str, names)), tuple(x.shape[1:])
    kind, mean, std = "categorical", scaling.mean, scaling.std
    data = DataSet(name, train_part, test_part, len(classes), shape, kind, classes, mean, std)
    return Task(data, "mlp", seed, {"hidden": HIDDEN}), x[:0]


def fitted_by(task: Task, part: Pair | None = None, seed: int | None = None) -> Fitted:
    """Return a training by ``fit``, with precisions around the pretrained weights if any."""
    options: dict[str, Any] = {}
    if isinstance(task, Transfer):
        schedule = replace(planned(task.schedule), prior_blocks=1)
        options = {"prior": transfer.learned_prior("layerwise"), "schedule": schedule}
    return train(task, part, seed=seed, **options)


def of_laplace_torch(
    model: torch.nn.Module, train_data: tuple[Tensor, Tensor], x: Tensor
) -> Tensor:
    """Return the log probabilities of laplace-torch's default posterior."""
    import laplace  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior: Any = laplace.Laplace(model, "classification")
        posterior.fit(DataLoader(TensorDataset(*train_data), batch_size=256))
        posterior.optimize_prior_precision()
        return torch.cat([posterior(part) for part in x.split(1000)]).log()


Predictions = Iterator[tuple[str, Result, Tensor]]  # name, columns, and log probabilities or logits


class Rows:
    """The rows of a task, with predictions for ``x``."""

    def __init__(self, task: Task, x: Tensor) -> None:
        self.task, self.x = task, x

    @cached_property
    def trained(self) -> tuple[Fitted, float]:
        """Return a training on all data and its process time."""
        with Clock() as clock:
            fitted = fitted_by(self.task)
        return fitted, clock.seconds

    def of_posteriors(self) -> Predictions:
        """Yield the MAP prediction and all posteriors."""
        (fitted, seconds), x, train_data = self.trained, self.x, self.task.data.train
        yield "MAP", {"seconds": seconds}, fitted.outputs(x)
        assert fitted.evidence is not None
        for structure in STRUCTURES:
            for inference in ("laplace", "variational"):
                with Clock() as clock:
                    posterior = fitted.evidence.posterior(
                        train_data, structure=structure, inference=inference
                    )
                    posterior(x[:1])
                columns: Result = {"seconds": clock.seconds}
                if inference == "variational":
                    columns |= {"bound": posterior.bound, "steps": len(posterior.bounds) - 1}
                prediction = posterior(x, num_samples=SAMPLES)
                yield f"{inference}, {structure}", columns, prediction.probabilities.log()
            yield f"variational mean, {structure}", columns, prediction.outputs
        with Clock() as clock:
            log_probs = of_laplace_torch(fitted.model, train_data, x)
        yield "laplace-torch", {"seconds": clock.seconds}, log_probs

    def of_held_out_data(self) -> Predictions:
        """Yield the predictions that 10 % of the data calibrate."""
        with Clock() as clock:
            part, held_out = self.task.data.split_validation(HELD_OUT, self.task.seed)
            fitted = fitted_by(self.task, part)
            scale = best_scale(fitted.outputs(held_out[0]), held_out[1])
        yield "temperature scaling", {"seconds": clock.seconds}, scale * fitted.outputs(self.x)
        assert fitted.evidence is not None
        for inference in ("laplace", "variational"):
            with Clock() as of_posterior:
                posterior = fitted.evidence.posterior(
                    part, structure="last-layer", inference=inference
                ).calibrate(*held_out)
            seconds = {"seconds": clock.seconds + of_posterior.seconds}
            log_probs = posterior(self.x, num_samples=SAMPLES).probabilities.log()
            yield f"calibrated {inference}, last-layer", seconds, log_probs

    def of_ensemble(self) -> Predictions:
        """Yield the mean probabilities of several networks."""
        (fitted, seconds), seed = self.trained, self.task.seed
        with Clock() as clock:
            seeds = [seed + OTHER_MEMBER * i for i in range(1, MEMBERS)]
            others = [fitted_by(self.task, seed=seed) for seed in seeds]
        members = torch.stack([n.outputs(self.x).double().softmax(1) for n in (fitted, *others)])
        yield f"ensemble of {MEMBERS}", {"seconds": seconds + clock.seconds}, members.mean(0).log()


# The last row of each training.
LAST_ROWS = {
    "laplace-torch": Rows.of_posteriors,
    "calibrated variational, last-layer": Rows.of_held_out_data,
    f"ensemble of {MEMBERS}": Rows.of_ensemble,
}


def auroc(log_probs: Tensor, num_test: int) -> float | None:
    """Return how well the entropy separates the first ``num_test`` inputs from the others."""
    if len(log_probs) == num_test:
        return None
    entropy = torch.distributions.Categorical(logits=log_probs.double()).entropy()
    is_other = torch.arange(len(entropy)) >= num_test
    return float(roc_auc_score(is_other.numpy(), entropy.numpy()))


def table_of(runs: list[Result]) -> str:
    """Return a table of the means over the seeds, with paired differences from MAP."""
    heads = ("log likelihood", "gain over MAP", "accuracy, %", "calibration error", "AUROC")
    lines = [f"| set: prediction | {' | '.join(heads)} | seconds | seeds |", "|---" * 8 + "|"]
    for row in dict.fromkeys(run["row"] for run in runs):
        of_row = {run["seed"]: run for run in runs if run["row"] == row}
        name = row.partition(":")[0]
        base = {run["seed"]: run for run in runs if run["row"] == f"{name}: MAP"}
        values = [[run[key] for run in of_row.values()] for key in KEYS]
        values.insert(1, [of_row[s][KEYS[0]] - base[s][KEYS[0]] for s in of_row if s in base])
        digits = (3, 3, 1, 3)
        cells = [with_error(*mean_and_error(v), d) for v, d in zip(values, digits, strict=True)]
        areas = [run["auroc"] for run in of_row.values() if run["auroc"] is not None]
        cells.append(with_error(*mean_and_error(areas), 3) if areas else "")
        cells.append(f"{mean_and_error([run['seconds'] for run in of_row.values()])[0]:.3g}")
        lines.append(f"| {row} | {' | '.join(cells)} | {spans(of_row)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--backbone", type=Path, default=Path("results/transfer.pt"))
    options = parse(parser, arguments)
    results = Results(options.results / "classifiers.csv", COLUMNS)
    for name in options.sets:
        for seed in options.seeds:
            missing = [last for last in LAST_ROWS if not results.has(f"{name}: {last}", seed)]
            if not missing:
                continue
            task, others = task_of(name, seed, options.data_dir, options.backbone)
            most = MOST_IMAGES if name in SLOW else None
            x, y = (part[:most] for part in task.data.test)
            rows = Rows(task, torch.cat([x, others[:most]]))
            for row, columns, log_probs in chain(*(LAST_ROWS[last](rows) for last in missing)):
                judged = metrics(log_probs[: len(y)], y)
                run = {key: judged[key] for key in KEYS} | columns
                run["auroc"] = auroc(log_probs, len(y))
                run |= {"accuracy": 100 * judged["accuracy"], "row": f"{name}: {row}", "seed": seed}
                results.add(dict.fromkeys(COLUMNS) | run)
    show("classifiers", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
