r"""Compare predictions of classifiers: MAP, Laplace, variational, and calibrated on held-out data.

The sets are the images of ``rivals.py`` and the tables of ``sklearn_tables.py``
(random 80/20 splits). Each seed trains one network by ``fit`` with its defaults. The images
have the networks of ``rivals.py``, and the tables have two hidden layers of 50. All rows predict
with this network, except:

* ``temperature scaling``: trained on 90 % of the data. The rest chooses the scale of the logits.
* ``ensemble of 3``: mean probabilities of three networks from different initial weights.

``MAP`` is the plug-in prediction. ``laplace, STRUCTURE`` and ``variational, STRUCTURE`` are
posteriors, with 1,000 samples of the outputs. ``variational mean, STRUCTURE`` predicts with the
mean weights. ``laplace-torch`` is its default posterior (last layer, Kronecker factors), with the
prior precision of its marginal likelihood and its default prediction (generalized linear, probit).

For images, ``auroc`` tells how well the entropy of the prediction separates test images from the
same images turned by 90 degrees: 0.5 is chance, 1 is perfect.

``seconds`` are the process time until the first prediction of a posterior, or of all trainings of a
row. The rule was fixed before the first run: a posterior becomes the default of classifiers if its
log likelihood is level with ``MAP`` within one standard error of the differences on every set, and
ahead by more than one on half of them. The script stores every finished run and resumes where it
was stopped.

    python benchmarks/classifiers.py --sets digits breast_cancer wine --results docs/results
    python benchmarks/classifiers.py --sets mnist --data-dir DIR --results docs/results \
        --pages benchmarks/README.md
"""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from learning import Result, Results, make_parser, parse
from measure import Clock, mean_and_error, show, spans, with_error
from rivals import (
    HIDDEN,
    IMAGES,
    MEMBERS,
    OTHER_MEMBER,
    Task,
    best_scale,
    make_task,
    metrics,
    train,
)
from sklearn.metrics import roc_auc_score
from sklearn_tables import CLASSES
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from evigrad.data import DataSet
from evigrad.data.dataset import Scaling, stratified_split

TABLES = ("breast_cancer", "wine", "chile", "mortgages", "deaths")
SETS, STRUCTURES = (*TABLES, *IMAGES), ("last-layer", "kfac")
HELD_OUT, TEST, SAMPLES = 0.1, 0.2, 1000
KEYS = ("log_likelihood", "accuracy", "ece")
COLUMNS = ("row", "seed", *KEYS, "auroc", "seconds", "bound", "steps")


def task_of(name: str, seed: int, data_dir: str | None) -> Task:
    """Return the split of a seed with its network."""
    if name not in TABLES:
        return make_task(name, seed, data_dir)
    features, targets = CLASSES[name]()
    names, numbers = np.unique(targets, return_inverse=True)
    x, y = torch.from_numpy(features).float(), torch.from_numpy(numbers)
    first, last = map(torch.from_numpy, stratified_split(numbers, TEST, seed))
    scaling = Scaling.of(x[first])
    train_part, test_part = ((scaling(x[part]), y[part]) for part in (first, last))
    classes, shape = tuple(map(str, names)), tuple(x.shape[1:])
    kind, mean, std = "categorical", scaling.mean, scaling.std
    data = DataSet(name, train_part, test_part, len(classes), shape, kind, classes, mean, std)
    return Task(data, "mlp", seed, {"hidden": HIDDEN})


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


def rows_of(task: Task) -> Iterator[tuple[str, Result, Tensor]]:
    """Yield name, columns and log probabilities (or logits) of each row.

    Test images are followed by the same images, turned by 90 degrees.
    """
    data, (x, _) = task.data, task.data.test
    x = torch.cat([x, x.rot90(1, (2, 3))]) if x.ndim == 4 else x
    with Clock() as clock:
        fitted = train(task)
    yield "MAP", {"seconds": clock.seconds}, fitted.outputs(x)
    assert fitted.evidence is not None
    for structure in STRUCTURES:
        for inference in ("laplace", "variational"):
            with Clock() as of_posterior:
                posterior = fitted.evidence.posterior(
                    data.train, structure=structure, inference=inference
                )
                posterior(x[:1])
            columns: Result = {"seconds": of_posterior.seconds}
            if inference == "variational":
                columns |= {"bound": posterior.bound, "steps": len(posterior.bounds) - 1}
            prediction = posterior(x, num_samples=SAMPLES)
            yield f"{inference}, {structure}", columns, prediction.probabilities.log()
        yield f"variational mean, {structure}", columns, prediction.outputs
    with Clock() as of_rival:
        log_probs = of_laplace_torch(fitted.model, data.train, x)
    yield "laplace-torch", {"seconds": of_rival.seconds}, log_probs
    with Clock() as of_scaled:
        part, (held_x, held_y) = data.split_validation(HELD_OUT, task.seed)
        smaller = train(task, part)
        scale = best_scale(smaller.outputs(held_x), held_y)
    yield "temperature scaling", {"seconds": of_scaled.seconds}, scale * smaller.outputs(x)
    with Clock() as of_others:
        others = [train(task, seed=task.seed + OTHER_MEMBER * i) for i in range(1, MEMBERS)]
    seconds = {"seconds": clock.seconds + of_others.seconds}
    members = torch.stack([n.outputs(x).double().softmax(1) for n in (fitted, *others)])
    yield f"ensemble of {MEMBERS}", seconds, members.mean(0).log()


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
    options = parse(parser, arguments)
    results = Results(options.results / "classifiers.csv", COLUMNS)
    for name in options.sets:
        for seed in options.seeds:
            if results.has(f"{name}: ensemble of {MEMBERS}", seed):  # the last row
                continue
            task = task_of(name, seed, options.data_dir)
            y = task.data.test[1]
            for row, columns, log_probs in rows_of(task):
                judged = metrics(log_probs[: len(y)], y)
                run = {key: judged[key] for key in KEYS} | columns
                run["auroc"] = auroc(log_probs, len(y))
                run |= {"accuracy": 100 * judged["accuracy"], "row": f"{name}: {row}", "seed": seed}
                results.add(dict.fromkeys(COLUMNS) | run)
    show("classifiers", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
