"""Rows of training, written for other tools and read back by their own readers."""

import io
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import evigrad
from evigrad.errors import EvigradError
from evigrad.trackers import MLflow, TensorBoard, Tracker, WandB, numbers

Rows = list[dict[str, int | float | None]]
# What the tools have of a name: (count, value) of each row that has the name.
Points = dict[str, list[tuple[int, float]]]


def train(tracker: Tracker) -> Rows:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 3)
    with tracker:
        result = evigrad.fit(
            net,
            (x, x[:, :3].argmax(1)),
            estimator="ntk-20-1",
            schedule=evigrad.Schedule(epochs=4, burn_in=2, every=2, steps=1),
            callbacks=[tracker],
            progress=False,
        )
    return result.history


def points(rows: Rows) -> Points:
    """What a reader should find."""
    by_name: Points = {}
    for row in rows:
        for name, value in numbers(row).items():
            by_name.setdefault(name, []).append((int(row["epoch"] or 0), value))
    return by_name


def assert_same(tracked: Points, rows: Rows) -> None:
    written = points(rows)
    assert {"loss", "log_evidence", "precision/weight"} <= set(written) == set(tracked)
    for name, pairs in written.items():
        assert [count for count, _ in tracked[name]] == [count for count, _ in pairs]
        # TensorBoard has single precision.
        assert [v for _, v in tracked[name]] == pytest.approx([v for _, v in pairs], rel=1e-6)


def test_tensorboard_has_the_history(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    rows = train(TensorBoard(tmp_path))
    reader: Any = import_module("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(tmp_path)).Reload()
    assert_same(
        {
            n: [(e.step, e.value) for e in accumulator.Scalars(n)]
            for n in accumulator.Tags()["scalars"]
        },
        rows,
    )


def logged(folder: Path) -> Iterator[Any]:
    """The records of the one offline run in a folder, by the messages of Weights & Biases.

    Its file is a header and a log in the format of LevelDB: blocks of 32 KiB with pieces of
    records, each after a checksum, its length and its kind (1 is a whole record, 2 to 4 are the
    first, a middle and the last piece of one).
    """
    # A run that is finished may still be on its way to the disk until the service has stopped.
    import_module("wandb").teardown()
    messages: Any = import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    file, record = io.BytesIO(path.read_bytes()), b""
    assert file.read(7)[:4] == b":W&B"
    while left := 32768 - file.tell() % 32768:
        header = file.read(min(left, 7))
        if len(header) < 7:
            if not header:
                return
            continue
        kind = header[6]
        record += file.read(int.from_bytes(header[4:6], "little"))
        if kind in (1, 4):
            yield messages.Record.FromString(record)
            record = b""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("wandb")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("WANDB_SILENT", "true")
    return tmp_path


def test_weights_and_biases_has_the_history(offline: Path) -> None:
    rows = train(WandB(offline, project="digits", config={"width": 3}))
    tracked: Points = {}
    config: dict[str, str] = {}
    codes: list[int] = []
    for record in logged(offline):
        config |= {item.key: item.value_json for item in record.run.config.update}
        items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                tracked.setdefault(name, []).append((record.history.step.num, json.loads(value)))
        codes += [record.exit.exit_code] if record.HasField("exit") else []
    assert_same(tracked, rows)
    assert config["width"] == "3"
    assert codes == [0]


def test_weights_and_biases_have_a_failed_run_after_an_error(offline: Path) -> None:
    with pytest.raises(ZeroDivisionError), WandB(offline):
        _ = 1 / 0
    assert [r.exit.exit_code for r in logged(offline) if r.HasField("exit")] == [1]


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    # The store of files, which needs no database, has to be asked for since MLflow 3.13.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "elsewhere").as_uri())
    return pytest.importorskip("mlflow")


def test_mlflow_has_the_history(tmp_path: Path, mlflow: Any) -> None:
    rows = train(MLflow(tmp_path, experiment="digits", name="linear"))
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    tracked = {
        n: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, n)]
        for n in run.data.metrics
    }
    assert_same(tracked, rows)
    assert (run.info.run_name, run.info.status) == ("linear", "FINISHED")


def test_mlflow_leaves_the_scripts_own_run_alone(tmp_path: Path, mlflow: Any) -> None:
    with mlflow.start_run() as active:
        mlflow.log_param("width", 3)
        with pytest.raises(ZeroDivisionError), MLflow() as tracker:
            tracker({"step": 7, "loss": 0.5})
            _ = 1 / 0
        assert mlflow.active_run().info.run_id == active.info.run_id
    runs = {run.info.status: run for run in mlflow.search_runs(output_format="list")}
    assert runs["FINISHED"].data.metrics == {}
    assert runs["FAILED"].data.metrics == {"loss": 0.5}


def test_mlflow_takes_more_numbers_than_fit_one_request(tmp_path: Path, mlflow: Any) -> None:
    with MLflow(tmp_path) as tracker:
        tracker({"epoch": 1} | {f"precision/{n}": n for n in range(1001)})
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert len(run.data.metrics) == 1001


def test_numbers_leave_out_what_was_not_computed() -> None:
    row = {"epoch": 3, "loss": 0.5, "log_evidence": None, "hyper_steps": 2}
    assert numbers(row) == {"loss": 0.5, "hyper_steps": 2.0}


@pytest.mark.parametrize("tracker", [TensorBoard, WandB, MLflow])
def test_without_the_package_the_error_says_what_to_install(
    tracker: type[TensorBoard | WandB | MLflow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("evigrad.errors.import_module", absent)
    with pytest.raises(EvigradError, match=rf"evigrad\[{tracker.__name__.lower()}\]"):
        tracker(tmp_path)
