import pytest

for package in ("jsonargparse", "rich", "yaml", "sklearn", "matplotlib"):
    pytest.importorskip(package)


@pytest.fixture(autouse=True)
def few_repetitions(monkeypatch):
    """Measure every time by as few calls as possible: no test looks at how long they take."""
    monkeypatch.setattr("evigrad.measure.judging.SECONDS", 0.01)
