"""What has to be the same for a run to go on, and what says so where it is not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training.interrupted import dying_at_call, killed, state_of
from training.small_runs import RECORDED, net, train

from evigrad.errors import ConfigurationError, EvigradWarning
from evigrad.evidence import Evidence
from evigrad.training import FitResult, RunDirectory, fit
from evigrad.training.history import unpacked_history
from evigrad.training.settings import grouped


@pytest.fixture
def begun(blobs, tmp_path) -> Path:
    """A run that died in its third epoch."""
    with dying_at_call(Evidence, "map_loss", 8):
        assert killed(lambda: train("ntk", blobs, tmp_path / "run"))
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.5}, "has lr=0.02, not 0.5. To resume it"),
        ({"epochs": 6, "seed": 1}, r"has (epochs=5, not 6; seed=0, not 1|seed=0.*epochs=5)"),
        ({"estimator": "ntk-10-1"}, "estimator=ntk-20-1, not ntk-10-1"),
        ({"test": None}, "was started with test data"),
    ],
)
def test_other_settings_are_refused_by_name(changes, words, blobs, begun):
    before = contents(begun)
    options = {"test": blobs[1], **RECORDED, **changes}
    with pytest.raises(ConfigurationError, match=words):
        fit(net(changes.get("seed", 0)), blobs[0], run_dir=begun, resume=True, **grouped(options))
    assert contents(begun) == before


def test_other_data_are_refused(blobs, begun):
    (x, y), test = blobs
    before = contents(begun)
    moved = x.clone()
    moved[7, 2] += 1e-6
    others = {
        "a value": (moved, y),
        "the order": (x.flip(0), y.flip(0)),
        "a target": (x, (y + 1) % 3),
    }
    for data in others.values():
        with pytest.raises(
            ConfigurationError,
            match="training data differ from the data of the run in .* in values",
        ):
            fit(net(), data, test=test, run_dir=begun, resume=True, **grouped(RECORDED))
    with pytest.raises(
        ConfigurationError, match="test data differ from the data of the run in .* in values"
    ):
        fit(
            net(),
            (x, y),
            test=(test[0] + 1, test[1]),
            run_dir=begun,
            resume=True,
            **grouped(RECORDED),
        )
    assert contents(begun) == before


def test_other_networks_are_refused(blobs, begun):
    frozen = net()
    frozen[0].bias.requires_grad_(False)
    others = {
        r"0.weight is float32 \(9, 4\), not float32 \(8, 4\)": nn.Sequential(
            nn.Linear(4, 9), nn.Tanh(), nn.Identity(), nn.Linear(9, 3)
        ),
        "it lacks 3.bias": nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 3, bias=False)
        ),
        "it also has 4.weight": nn.Sequential(*net(), nn.Linear(3, 3)),
        "it lacks the weight 0.bias": frozen,
        "layers or activations differ": nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(), nn.Identity(), nn.Linear(8, 3)
        ),
    }
    before = contents(begun)
    for words, other in others.items():
        with pytest.raises(ConfigurationError, match=words):
            fit(other, blobs[0], test=blobs[1], run_dir=begun, resume=True, **grouped(RECORDED))
    assert contents(begun) == before


def test_functions_and_objects_among_the_settings_are_recognised(blobs, tmp_path):
    def run(make: Any, **changes: Any) -> FitResult:
        recorded = {name: value for name, value in RECORDED.items() if name != "lr"}
        settings = {**recorded, "optimizer": make, "run_dir": tmp_path / "run", **changes}
        return fit(net(), blobs[0], **grouped(settings))

    def adagrad() -> Any:
        return lambda weights: torch.optim.Adagrad(weights.values(), lr=0.1)

    with dying_at_call(Evidence, "map_loss", 8):
        assert killed(lambda: run(adagrad()))
    run(adagrad(), resume=True)  # another function at another address
    with pytest.raises(ConfigurationError, match="optimizer="):
        run("sgd", resume=True)


def change(folder: Path, **entries: Any) -> None:
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    RunDirectory(folder, resume=True).write_checkpoint({**state, **entries})


def test_checkpoints_that_cannot_be_read(blobs, begun):
    change(begun, format=1)
    with pytest.raises(ConfigurationError, match="must have format 4, got 1"):
        train("ntk", blobs, begun, resume=True)
    (begun / "checkpoint_before.pt").unlink()
    (begun / "checkpoint.pt").write_bytes(b"PK damaged")
    with pytest.raises(ConfigurationError, match="checkpoint.pt cannot be read"):
        train("ntk", blobs, begun, resume=True)


def test_a_checkpoint_that_will_be_of_no_use_is_warned_of_at_once(blobs, tmp_path):
    class Own(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"a path": Path("x")}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.warns(EvigradWarning, match="This run cannot be resumed: its checkpoints hold"):
        result = fit(Own(4, 3), blobs[0], run_dir=tmp_path / "run", **grouped(RECORDED))
    assert len(result.history) == 5


def test_another_machine_is_warned_of(blobs, begun):
    machine = {"torch": "2.0.0", "device": "cpu", "threads": 1}
    change(begun, machine=machine)
    words = f"which rounds differently \\(PyTorch 2.0.0 then, {torch.__version__} now"
    with pytest.warns(EvigradWarning, match=words.replace("+", "\\+")):
        train("ntk", blobs, begun, resume=True)


def test_the_number_of_threads_is_used_again(blobs, begun):
    threads: list[int] = []
    change(begun, machine={**state_of(begun)["machine"], "threads": 2})
    before = torch.get_num_threads()
    see = [lambda row: threads.append(torch.get_num_threads())]
    train("ntk", blobs, begun, resume=True, callbacks=see)
    assert threads == [2, 2, 2]
    assert torch.get_num_threads() == before == 1
    assert state_of(begun)["machine"]["threads"] == 2


def test_two_writers_are_one_too_many(blobs, tmp_path):
    folder = tmp_path / "run"

    def intrude(row: Any) -> None:
        with pytest.raises(ConfigurationError, match="Another process or run is writing to"):
            train("ntk", blobs, folder, resume=True)

    train("ntk", blobs, folder, callbacks=[intrude])
    directory = RunDirectory(folder, resume=True)
    with directory.locked(), directory.locked():
        intrude(None)
    train("ntk", blobs, folder, resume=True)


def test_a_history_has_names_that_can_be_written() -> None:
    with pytest.raises(ConfigurationError, match="must contain numbers"):
        unpacked_history({"columns": ["\ud800"], "rows": [[1.0]]})
