"""Compare weight decays and lengths of the burn-in of classifiers with few and many data.

``images`` are the sets and schedules of ``large_images.py``, and ``tables`` those of
``large_tables.py``. In ``noisy``, 40 % of all labels are drawn at random: rows with ten normal
inputs and four classes of a random network (two hidden layers of 50, the default schedule of
``fit``), and MNIST. The script prints one line per training, and trains again on every call.

    python benchmarks/starts.py --images cifar10-10000 --noisy table-320 --data-dir DIR
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import large_images
import large_tables
import torch
from learning import make_parser, parse
from rivals import Fitted, Pair, metrics
from torch import Generator, Tensor, nn

import evigrad
from evigrad import Optimization, Schedule
from evigrad.data import load
from evigrad.models import make_model

STARTS, SHARES = (1e-2, 1e-3), (0.1, 1 / 3)
NOISE, INPUTS, CLASSES, TEST_ROWS = 0.4, 10, 4, 5000


def noisy(labels: Tensor, classes: int, generator: Generator) -> Tensor:
    """Return the labels, of which a share is drawn at random."""
    is_drawn = torch.rand(len(labels), generator=generator) < NOISE
    return torch.where(is_drawn, torch.randint(classes, labels.shape, generator=generator), labels)


def rows(size: int, seed: int) -> tuple[Pair, Pair]:
    """Return training and test rows of a random network."""
    generator = torch.Generator().manual_seed(1000 + seed)
    first = torch.randn(INPUTS, 32, generator=generator) * 1.5 / INPUTS**0.5
    last = torch.randn(32, CLASSES, generator=generator) * 3 / 32**0.5

    def draw(size: int) -> Pair:
        x = torch.randn(size, INPUTS, generator=generator)
        return x, noisy((torch.tanh(x @ first) @ last).argmax(-1), CLASSES, generator)

    return draw(size), draw(TEST_ROWS)


def digits(size: int, seed: int, data_dir: str | None) -> tuple[Pair, Pair]:
    """Return training and test images of MNIST with noisy labels."""
    generator = torch.Generator().manual_seed(seed)
    data = load("mnist", data_dir, subset=size, seed=seed)
    (x, y), (x_test, y_test) = data.train, data.test
    return (x, noisy(y, 10, generator)), (x_test, noisy(y_test, 10, generator))


def on_noisy(name: str, seed: int, data_dir: str | None) -> Iterator[tuple[str, float]]:
    """Yield each start with its test log likelihood on a noisy set."""
    kind, size = name.split("-")
    for start in STARTS:
        schedule = Schedule(batch_size=100, eval_every=0)
        if kind == "table":
            train, test = rows(int(size), seed)
            torch.manual_seed(seed)
            hidden = nn.Linear(INPUTS, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU()
            model: nn.Module = nn.Sequential(*hidden, nn.Linear(50, CLASSES))
        else:
            train, test = digits(int(size), seed, data_dir)
            model = make_model("mininet", train[0].shape[1:], 10, seed)
            schedule = replace(schedule, epochs=large_images.EPOCHS[int(size)])
        optimization = Optimization(start_decay=start)
        result = evigrad.fit(
            model, train, schedule=schedule, optimization=optimization, seed=seed, progress=False
        )
        yield (
            f"{start:g}",
            metrics(Fitted(result.model).outputs(test[0]), test[1])["log_likelihood"],
        )


def on_images(name: str, seed: int, data_dir: str | None) -> Iterator[tuple[str, float]]:
    """Yield each start and burn-in with its test log likelihood on images."""
    data, (kind, size) = large_images.read(name, seed, data_dir), large_images.SETS[name]
    network, settings = large_images.NETWORKS[kind]
    epochs = large_images.EPOCHS[size]
    for start in STARTS:
        for share in SHARES:
            result = evigrad.fit(
                make_model(network, data.input_shape, data.num_outputs, seed, **settings),
                data.train,
                schedule=Schedule(
                    epochs=epochs, burn_in=max(1, int(share * epochs)), batch_size=100, eval_every=0
                ),
                optimization=Optimization(start_decay=start),
                seed=seed,
                progress=False,
            )
            scores = metrics(Fitted(result.model).outputs(data.test[0]), data.test[1])
            yield f"{start:g}, burn-in {share:.2f}", scores["log_likelihood"]


def on_tables(name: str, seed: int) -> Iterator[tuple[str, float]]:
    """Yield each start and burn-in with its test log likelihood on a large table."""
    task = large_tables.task_of(name, seed)
    assert task.schedule is not None and task.schedule.epochs is not None
    for start in STARTS:
        for share in SHARES:
            burn_in = max(1, int(share * task.schedule.epochs))
            fitted, _ = large_tables.run_learned(
                task,
                schedule=replace(task.schedule, burn_in=burn_in),
                optimization=Optimization(start_decay=start),
            )
            scores = large_tables.judged(task, [fitted])
            yield f"{start:g}, burn-in {share:.2f}", scores["log_likelihood"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the test log likelihood of each training."""
    parser = make_parser(__doc__)
    parser.add_argument("--noisy", nargs="*", default=[])
    parser.add_argument("--images", nargs="*", choices=large_images.SETS, default=[])
    parser.add_argument("--tables", nargs="*", choices=large_tables.EPOCHS, default=[])
    options = parse(parser, arguments)
    for seed in options.seeds:
        for name in options.noisy:
            for label, value in on_noisy(name, seed, options.data_dir):
                print(name, seed, label, round(value, 4), flush=True)
        for name in options.images:
            for label, value in on_images(name, seed, options.data_dir):
                print(name, seed, label, round(value, 4), flush=True)
        for name in options.tables:
            for label, value in on_tables(name, seed):
                print(name, seed, label, round(value, 4), flush=True)


if __name__ == "__main__":
    main()
