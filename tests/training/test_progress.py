from evigrad.training.progress import PlainProgress, RichProgress, make_progress, summary


def test_the_summary_shows_what_is_known():
    row = {
        "epoch": 3.0,
        "loss": 0.51234,
        "log_evidence": -1.2345,
        "precision/a": 0.5,
        "precision/b": 20.0,
        "test_log_likelihood": None,
    }
    assert summary(row) == "loss 0.5123  log evidence -1.234  precision 0.5..20"
    assert summary({"loss": 1.0, "precision/a": 2.0}) == "loss 1.0000  precision 2"


def test_plain_progress_writes_about_ten_lines_and_remembers(capsys):
    progress = PlainProgress("MAP", 100)
    for epoch in range(1, 101):
        evidence = -1.5 if epoch == 5 else None
        progress.update({"epoch": epoch, "loss": 1.0 / epoch, "log_evidence": evidence})
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert "log evidence" not in lines[0]
    assert lines[-1].startswith("MAP: epoch 100/100  loss 0.0100")
    assert lines[-1].endswith("log evidence -1.500")


def test_without_a_terminal_progress_is_plain(capsys):
    progress = make_progress("MAP", 2)
    assert isinstance(progress, PlainProgress)
    progress.update({"epoch": 1, "loss": 0.5})
    captured = capsys.readouterr()
    assert captured.err == "MAP: epoch 1/2  loss 0.5000\n"
    assert captured.out == ""


def test_the_bar_in_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = make_progress("ntk-100-1", 2)
    try:
        assert isinstance(progress, RichProgress)
        progress.update({"epoch": 2, "loss": 0.25, "log_evidence": -1.0})
        assert "loss 0.2500" in progress._progress.tasks[0].fields["values"]
        assert progress._progress.tasks[0].completed == 2
    finally:
        progress.close()


def test_no_rich_no_bar(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert isinstance(make_progress("MAP", 2), PlainProgress)
