"""Small experiments, of seconds each."""

from pathlib import Path
from typing import Any

from experiments.definition import Experiment, make_experiment
from experiments.kinds import Bounds
from experiments.trainings import Place

TRAINING: dict[str, Any] = {
    "data": "digits",
    "subset": 40,
    "test_subset": 20,
    "model": "mlp",
    "estimator": "ntk-20-1",
    "epochs": 3,
    "batch_size": 20,
    "burn_in": 1,
    "every": 1,
    "steps": 1,
}
GRID = {"start": 0.1, "stop": 10.0, "count": 3, "log": True}
BOUNDS: dict[str, Any] = {
    "kind": "bounds",
    "title": "Bounds",
    "seeds": [0],
    "training": TRAINING,
    "panels": {"prior": {"axis": "precision", "hyperparameter": "precision", "grid": GRID}},
    "curves": {"ntk-10-C": "m = 10", "ntk-N-C": "full"},
    "orderings": [["ntk-N-C", "ntk-10-C"]],
}


def place_in(folder: Path) -> Place:
    return Place(folder, device="cpu", threads=1)


def bounds(**changes: Any) -> Experiment:
    experiment = make_experiment("small", BOUNDS | changes)
    assert isinstance(experiment, Bounds)
    return experiment
