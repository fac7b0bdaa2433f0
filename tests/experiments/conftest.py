import pytest

for package in ("jsonargparse", "rich", "yaml", "sklearn", "matplotlib"):
    pytest.importorskip(package)
