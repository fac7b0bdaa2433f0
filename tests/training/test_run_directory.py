import json

import pytest
import torch

from evigrad.errors import ConfigurationError, InputError
from evigrad.training import RunDirectory, read_metrics


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious").write_text("kept")
    (tmp_path / "a-2").write_text("a file in the way")
    assert RunDirectory(tmp_path / "a").path == tmp_path / "a-3"
    assert (tmp_path / "a" / "precious").read_text() == "kept"
    # The third one is empty still, and serves.
    assert RunDirectory(tmp_path / "a").path == tmp_path / "a-3"


def test_parents_are_made(tmp_path):
    assert RunDirectory(tmp_path / "x" / "y" / "z").path.is_dir()


def test_a_place_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be made"):
        RunDirectory(tmp_path / "file" / "below")


def test_metrics_are_on_the_disk_before_the_file_is_closed(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    file = directory.open_metrics(["epoch", "loss"])
    file.write({"epoch": 1, "loss": None})
    file.write({"epoch": 2, "loss": 0.123456789})
    assert read_metrics(directory.metrics) == [
        {"epoch": 1, "loss": None},
        {"epoch": 2, "loss": pytest.approx(0.123457)},
    ]
    file.close()


def test_reading_what_is_no_table_of_metrics(tmp_path):
    with pytest.raises(InputError, match="There is no file"):
        read_metrics(tmp_path / "metrics.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,x\n")
    with pytest.raises(InputError, match="not a table of metrics"):
        read_metrics(tmp_path / "other.csv")


def test_a_checkpoint_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "run")
    directory.write_checkpoint({"epoch": 1})

    def fail(state, file):
        file.write(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        directory.write_checkpoint({"epoch": 2})
    monkeypatch.undo()
    assert torch.load(directory.checkpoint)["epoch"] == 1


def test_json(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.write_json("config.json", {"device": torch.device("cpu"), "lr": 0.1})
    assert json.loads((directory.path / "config.json").read_text()) == {"device": "cpu", "lr": 0.1}
