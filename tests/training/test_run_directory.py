import errno
import io
import json
from pathlib import Path

import pytest
import torch

from evigrad.errors import ConfigurationError, EvigradWarning, InputError
from evigrad.training import RunDirectory, read_metrics
from evigrad.training.history import MetricsFile


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
    with pytest.raises(ConfigurationError, match="Cannot create the run folder"):
        RunDirectory(tmp_path / "file" / "below")


def test_metrics_are_on_the_disk_before_the_file_is_closed(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    file = MetricsFile(directory.metrics, ["epoch", "loss"])
    file.write({"epoch": 1, "loss": None})
    file.write({"epoch": 2, "loss": 0.123456789})
    assert read_metrics(directory.metrics) == [
        {"epoch": 1, "loss": None},
        {"epoch": 2, "loss": pytest.approx(0.123457)},
    ]
    file.close()


def test_reading_what_is_no_table_of_metrics(tmp_path):
    with pytest.raises(InputError, match="which does not exist"):
        read_metrics(tmp_path / "metrics.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,x\n")
    with pytest.raises(
        InputError, match="must be the metrics.csv of a run, got .*other.csv: could not convert"
    ):
        read_metrics(tmp_path / "other.csv")


def test_a_checkpoint_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "run")
    directory.write_checkpoint({"epoch": 1})

    def fail(state, file):
        file.write(b"half a file")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(ConfigurationError, match=r"Cannot write .*checkpoint.pt: No space left"):
        directory.write_checkpoint({"epoch": 2})
    monkeypatch.undo()
    assert torch.load(directory.checkpoint)["epoch"] == 1


# Places in a file: one in so many, and all of them.
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.long)])
def test_no_bit_of_a_checkpoint_flips_unseen(tmp_path, step):
    directory = RunDirectory(tmp_path / "run")
    state = {"epoch": 1, "history": [1.5, None, "x"], "weights": {"w": torch.arange(5.0)}}
    directory.write_checkpoint(state)
    content = directory.checkpoint.read_bytes()
    for place in range(0, len(content), step):  # of data, headers, padding and digest
        broken = bytearray(content)
        broken[place] ^= 1 << place % 8
        directory.checkpoint.write_bytes(broken)
        with pytest.raises(ConfigurationError, match="cannot be read"):
            directory.read_checkpoint()


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.long)])
def test_a_checkpoint_that_was_cut_at_any_length_gives_way_to_the_one_before(tmp_path, step):
    directory = RunDirectory(tmp_path / "run")
    directory.write_checkpoint({"epoch": 1})
    directory.write_checkpoint({"epoch": 2, "weights": torch.arange(3.0)})
    content = directory.checkpoint.read_bytes()
    for length in range(0, len(content), step):
        directory.checkpoint.write_bytes(content[:length])
        with pytest.warns(
            EvigradWarning, match=r"resumes from the previous checkpoint, after epoch 1"
        ):
            assert directory.read_checkpoint() == {"epoch": 1}
    # What is damaged does not push out the one that can be read.
    directory.write_checkpoint({"epoch": 3})
    assert directory.read_checkpoint() == {"epoch": 3}
    directory.checkpoint.unlink()
    assert directory.read_checkpoint() == {"epoch": 1}
    for path in (directory.checkpoint, directory.checkpoint_before):
        path.write_bytes(b"no archive")
    words = r"checkpoint\.pt cannot be read.*checkpoint_before\.pt cannot.* Start a new run"
    with pytest.raises(ConfigurationError, match=words):
        directory.read_checkpoint()


def test_a_checkpoint_without_a_digest_is_one_of_an_older_version(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    torch.save({"epoch": 1, "format": 3}, directory.checkpoint)
    assert directory.read_checkpoint() == {"epoch": 1, "format": 3}
    torch.save({"epoch": 1, "format": 4}, directory.checkpoint)
    with pytest.raises(ConfigurationError, match=r"the file is damaged \(its digest is missing\)"):
        directory.read_checkpoint()
    directory.checkpoint.write_bytes(b"no archive")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        directory.read_checkpoint()


@pytest.mark.parametrize("after", [0, 700, 2000])
def test_a_disk_that_fills_leaves_the_checkpoint_before(tmp_path, monkeypatch, after):
    directory = RunDirectory(tmp_path / "run")
    directory.write_checkpoint({"epoch": 1})

    class Filling(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > after:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda self, mode="r": Filling(self, mode))
        with pytest.raises(ConfigurationError, match=r"Cannot write .*checkpoint.pt: No space"):
            directory.write_checkpoint({"epoch": 2, "weights": torch.ones(500)})
    assert directory.read_checkpoint() == {"epoch": 1}
    assert [path.name for path in directory.path.iterdir()] == ["checkpoint.pt"]


def test_what_a_crash_leaves_is_no_run_and_in_nobodys_way(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml.partial").write_text("epo")
    assert RunDirectory(folder).path == folder
    assert RunDirectory(folder, resume=True).path == folder
    (folder / "config.yaml").write_text("epochs: 4\n")
    assert RunDirectory(folder, resume=True).path == folder
    assert RunDirectory(folder).path == tmp_path / "run-2"


def test_only_runs_are_gone_on_with(tmp_path):
    assert RunDirectory(tmp_path / "new", resume=True).path.is_dir()
    (tmp_path / "letter.txt").write_text("Dear")
    with pytest.raises(ConfigurationError, match="holds no run to resume: it has no config"):
        RunDirectory(tmp_path, resume=True)
    with pytest.raises(ConfigurationError, match="holds no run"):
        RunDirectory(tmp_path / "letter.txt", resume=True)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "run")
    directory.write_json("results.json", {"a": 1})

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigurationError, match="disk full"):
        directory.write_json("results.json", {"a": 2})
    monkeypatch.undo()
    assert json.loads((directory.path / "results.json").read_text()) == {"a": 1}
    assert [p.name for p in directory.path.iterdir()] == ["results.json"]


def test_known_rows_come_first_and_a_file_that_has_them_stays(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    rows = [{"epoch": 1, "loss": 0.5}, {"epoch": 2, "loss": None}]
    directory.metrics.write_text("epoch,loss\n1,0.5\n2,\n3,0.1\n4,0.")  # of epochs to come
    MetricsFile(directory.metrics, ["epoch", "loss"], rows).close()
    before = directory.metrics.stat()
    file = MetricsFile(directory.metrics, ["epoch", "loss"], rows)
    assert directory.metrics.stat().st_ino == before.st_ino
    file.write({"epoch": 3, "loss": 0.25})
    file.close()
    assert read_metrics(directory.metrics) == [*rows, {"epoch": 3, "loss": 0.25}]


def test_json(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.write_json("config.json", {"device": torch.device("cpu"), "lr": 0.1})
    assert json.loads((directory.path / "config.json").read_text()) == {"device": "cpu", "lr": 0.1}
