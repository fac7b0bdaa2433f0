import pytest
import torch

pytest.importorskip("jsonargparse")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from html_pages import Page
from run_folders import make_rows, write_run

from evigrad.cli import main
from evigrad.cli.setup import set_up
from evigrad.errors import ConfigurationError
from evigrad.invariances import Averaged
from evigrad.report.images import examples_of, find_transform, rebuild
from evigrad.report.runs import read_runs

OPTIONS = (
    "--data digits:rotated90 --subset 60 --model digitsnet --estimator ntk-20-1 --epochs 2"
    " --burn-in 1 --every 1 --steps 2 --invariance rotation=0.5,scale_x --samples 2 --seed 3"
    " --evaluate-with ntk-20-1 --no-progress --device cpu --no-figures --compare-map"
).split()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "run"
    assert main(["train", *OPTIONS, "--run-dir", str(folder)]) == 0
    return folder


def test_a_real_run(run_dir, capsys):
    assert main(["report", str(run_dir)]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.split("Report: ")[1].replace("\n", "") == str(run_dir / "report.html")
    page = Page(run_dir / "report.html")
    assert {file.stem for file in (run_dir / "figures").iterdir()} == {
        *("loss", "log_likelihood", "accuracy", "log_evidence", "prior_precision"),
        *("range-rotation", "range-scale", "augmentation"),
    }
    assert len(page.images) == len(page.dark) == 8
    assert "no images can be shown" not in page.text
    assert page.cell("invariance") == "rotation=0.5, scale_x: 2 samples, logits averaged"
    assert page.cell("network", 2) == "digitsnet"
    assert page.tables[0][0] == ["metric", "MAP", "ntk-20-1"]
    # One estimator judged both, and it has its own row.
    assert page.cell("log evidence by ntk-20-1 (nats per example)", 1).startswith("−")


def test_the_network_is_the_one_of_the_checkpoint(run_dir):
    threads = torch.get_num_threads()
    data, model = rebuild(read_runs([run_dir])[-1])
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)["model"]
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], atol=0, rtol=0)
    assert isinstance(model, Averaged)
    transform = find_transform(data, model)
    assert transform is model.invariance
    row = read_runs([run_dir])[-1].history[-1]
    rotation = model.invariance.named_ranges()["rotation"]
    assert rotation == pytest.approx(row["range/rotation"], rel=1e-5)
    assert rotation != 0.5  # it was learned
    assert torch.get_num_threads() == threads


def test_raw_pixels_stay_raw(tmp_path):
    run = tmp_path / "run"
    options = ["--data", "digits:rotated90", "--subset", "60", "--pixels", "raw", "--epochs", "1"]
    options += ["--invariance", "rotation", "--samples", "2", "--estimator", "none"]
    assert main(["train", *options, "--no-figures", "--run-dir", str(run)]) == 0
    data, model = rebuild(read_runs([run])[-1])
    assert data.train[0].min() == 0 and data.train[0].max() == 1
    assert isinstance(model, Averaged) and not model.invariance.fill.any()


def test_images_look_as_they_did_and_are_of_different_classes(run_dir):
    data, _ = rebuild(read_runs([run_dir])[-1])
    images, names = examples_of(data, 12)
    assert names == [*"0123456789", "0", "1"]
    pixels = images * data.std + data.mean
    plain = set_up("digits:rotated90", subset=60, seed=3, device="cpu").data
    torch.testing.assert_close(
        pixels[0], plain.test[0][plain.test[1] == 0][0] * data.std + data.mean
    )
    assert -1e-5 < float(pixels.min()) < 0.01
    assert 0.99 < float(pixels.max()) < 1 + 1e-5
    assert len(examples_of(data, 10**6)[0]) == len(data.test[0])


def test_no_examples_and_no_data(run_dir, tmp_path, monkeypatch):
    image = (run_dir / "figures" / "loss.png").read_bytes()
    monkeypatch.setattr("evigrad.report.write._png", lambda make, palette: image)
    assert main(["report", str(run_dir), "--examples", "0"]) == 0
    text = Page(run_dir / "report.html").text
    assert "Inputs under the augmentation" not in text
    assert main(["report", str(run_dir), "--data-dir", str(tmp_path / "gone")]) == 0
    text = Page(run_dir / "report.html").text
    assert "ntk-20-1: no images can be shown. The data folder" in text
    assert "does not exist" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data": "no_such_set"}, "Unknown data set 'no_such_set'"),
        ({"model": "mlp"}, "Cannot read .*config.json"),
        ({"invariance": "rotation"}, "checkpoint.pt"),
    ],
)
def test_what_cannot_be_rebuilt_is_said(run_dir, tmp_path, options, words):
    rows = make_rows(ranges={"rotation": 1.0})
    options = {"data": "digits", "model": "digitsnet"} | options
    run = write_run(tmp_path / "run", rows, options=options)
    (run / "checkpoint.pt").write_bytes((run_dir / "checkpoint.pt").read_bytes())
    if options.get("invariance"):
        (run / "checkpoint.pt").write_bytes(b"half a file")
    (record,) = read_runs([run])
    with pytest.raises(ConfigurationError, match=words):
        rebuild(record)


def test_before_the_first_checkpoint(tmp_path):
    (record,) = read_runs([write_run(tmp_path / "run", options={"data": "digits"})])
    with pytest.raises(ConfigurationError, match="with a checkpoint, got"):
        rebuild(record)


def test_a_network_without_a_transform_has_no_grid(tmp_path):
    setup = set_up("digits", subset=30, model="mlp", device="cpu")
    assert find_transform(setup.data, setup.make_model()) is None


def test_what_is_wrong_is_said_in_one_line(tmp_path, capsys):
    for arguments, words in (
        ([], "A report needs the folder of a run, got none. Use evigrad report RUN."),
        ([str(tmp_path / "gone")], "needs the folder of a run, got"),
        (["run", "--exampels", "3"], "Did you mean '--examples'?"),
        (["run", "--examples", "few"], "--examples: must be a whole number, got 'few'."),
    ):
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert words in error


def test_the_help_says_what_it_does(capsys):
    assert main(["report", "--help"]) == 0
    text = capsys.readouterr().out
    assert "usage: evigrad report RUN [RUN ...] [options]" in text
    assert "--data-dir DIR" in text
    assert "--examples N" in text
    assert main(["--help"]) == 0
    assert "report Write an HTML page" in " ".join(capsys.readouterr().out.split())
