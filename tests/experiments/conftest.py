import pytest

for package in ("jsonargparse", "rich", "yaml", "sklearn", "matplotlib", "signac", "submitit"):
    pytest.importorskip(package)
