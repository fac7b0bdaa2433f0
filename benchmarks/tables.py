"""Compare the defaults of ``fit`` with early stopping on tabular data.

Every row trains the same network with two hidden layers of 64, from the same initial weights on the
same split. Features and target are standardized by the training data.

* ``early stopping``: a plain loop with Adam at a constant rate, which learns the noise with the
  weights. It keeps the best weights on 10 % held-out data.
* ``map-noise``: MAP by ``fit``, with noise learned on the training loss and other defaults.
* ``fit``: ``fit`` with its defaults, with precisions and noise learned from the evidence.

The data sets are UCI's, with one split per seed, and scikit-learn's, with a test set of 10 %. Test
data are only evaluated. The script stores every finished run and resumes where it was stopped.

    python benchmarks/tables.py --data-dir DIR --results docs/results --pages docs/results.md
"""

import copy
import math
import time
from typing import Any

import torch
from learning import Result, Results, make_parser, parse
from measure import show, summaries, with_error
from sklearn.datasets import load_diabetes, make_friedman1
from torch import Tensor, nn

import evigrad
from evigrad.data import load
from evigrad.models import make_model
from evigrad.training.settings import grouped

UCI = ("yacht", "boston", "energy", "wine_red", "power", "naval")
MADE = ("friedman1, 1030 x 8", "friedman1, 8192 x 10", "diabetes")
METHODS = ("early stopping", "map-noise", "fit")
LABELS = {"map-noise": "MAP, learned noise", "fit": "evigrad"}
KEYS = ("log_likelihood", "rmse", "seconds")
COLUMNS = ("row", "seed", *KEYS, "num_data", "num_features", "epochs", "threads")
# Settings of early stopping, fixed before the first run.
LR, BATCH, HELD_OUT, PATIENCE, MOST_EPOCHS = 1e-2, 64, 0.1, 20, 1000

Pair = tuple[Tensor, Tensor]


def read_table(name: str, seed: int, data_dir: str | None) -> tuple[Pair, Pair]:
    """Return standardized training and test data of a seed."""
    if name in UCI:
        data = load(f"uci/{name}", data_dir, seed=seed)
        return data.train, data.test
    if name == "diabetes":
        x, y = load_diabetes(return_X_y=True)
    else:
        rows, features = (int(n) for n in name.removeprefix("friedman1, ").split(" x "))
        x, y = make_friedman1(rows, features, noise=1.0, random_state=0)
    both = torch.cat([torch.as_tensor(x), torch.as_tensor(y)[:, None]], dim=1)
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
    test, train = both[order].tensor_split([len(both) // 10])
    test, train = (((d - train.mean(0)) / train.std(0)).float() for d in (test, train))
    return (train[:, :-1], train[:, -1:]), (test[:, :-1], test[:, -1:])


def stop_early(model: nn.Module, train: Pair, test: Pair, seed: int) -> Result:
    """Train with learned noise, and return the best network on held-out data."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(train[0]), generator=generator)
    held, used = order.tensor_split([max(1, int(HELD_OUT * len(order)))])
    log_noise = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([*model.parameters(), log_noise], lr=LR)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        error = (model(x) - y) * (-log_noise).exp()
        return (0.5 * error.square() + log_noise + 0.5 * math.log(2 * math.pi)).mean()

    best, since, epoch, kept = math.inf, 0, 0, {}
    start = time.perf_counter()
    while since < PATIENCE and epoch < MOST_EPOCHS:
        for batch in used[torch.randperm(len(used), generator=generator)].split(BATCH):
            optimizer.zero_grad()
            loss_of(train[0][batch], train[1][batch]).backward()
            optimizer.step()
        with torch.no_grad():
            value = float(loss_of(train[0][held], train[1][held]))
        epoch, since = epoch + 1, since + 1
        if value < best:
            best, since = value, 0
            kept = copy.deepcopy((model.state_dict(), log_noise.detach()))
    seconds = time.perf_counter() - start
    model.load_state_dict(kept[0])
    with torch.no_grad():
        log_noise.copy_(kept[1])
        squared = (model(test[0]) - test[1]).square().mean()
        value = -float(loss_of(*test))
    rmse = math.sqrt(float(squared))
    return {"log_likelihood": value, "rmse": rmse, "seconds": seconds, "epochs": epoch}


def run_row(name: str, method: str, seed: int, data_dir: str | None) -> Result:
    """Return one method on one split."""
    train, test = read_table(name, seed, data_dir)
    model = make_model("mlp", train[0].shape[1:], 1, seed)
    size = {"num_data": len(train[0]), "num_features": train[0].shape[1]}
    if method == "early stopping":
        return size | stop_early(model, train, test, seed)
    options: dict[str, Any] = {"start_decay": 0.01}
    if method == "map-noise":
        options = {"estimator": None, "noise_on_loss": True}
    result = evigrad.fit(
        model,
        train,
        test=test,
        likelihood="gaussian",
        seed=seed,
        progress=False,
        **grouped(options),
    )
    return size | {
        "log_likelihood": result.test_metrics["log_likelihood"],
        "rmse": math.sqrt(result.test_metrics["squared_error"]),
        "seconds": result.seconds,
        "epochs": len(result.history),
    }


def table_of(runs: list[Result]) -> str:
    """Return means of the seeds as Markdown."""
    lines = [
        "| data set | examples × features | method | test log likelihood | RMSE | seconds"
        " | time, × early stopping | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in (*UCI, *MADE):
        rows = summaries(runs, [f"{name}: {method}" for method in METHODS], KEYS)
        for row in rows:
            first = next(run for run in runs if run["row"] == row["row"])
            cells = [
                name.replace(" x ", " × "),
                f"{first['num_data']:,} × {first['num_features']}",
                LABELS.get(method := row["row"].rpartition(": ")[2], method),
                with_error(row["log_likelihood"], row["log_likelihood_error"], 3),
                with_error(row["rmse"], row["rmse_error"], 3),
                f"{row['seconds']:.1f}",
                f"{row['seconds'] / rows[0]['seconds']:.1f}",
                str(row["seeds"]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run what is missing, then print the table and insert it into the pages."""
    parser = make_parser(__doc__)
    parser.add_argument("--tables", nargs="+", choices=(*UCI, *MADE), default=[*UCI, *MADE])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    options = parse(parser, arguments)
    results = Results(options.results / "tables.csv", COLUMNS)
    for seed in options.seeds:
        for name in options.tables:
            for method in options.methods:
                row = f"{name}: {method}"
                if not results.has(row, seed):
                    columns = run_row(name, method, seed, options.data_dir)
                    results.add({"row": row, "seed": seed, "threads": options.threads} | columns)
    show("tables", table_of(results.read()), options.pages)


if __name__ == "__main__":
    main()
