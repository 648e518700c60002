"""An MLflow store for the tests of this folder."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def out(database: Path, tmp_path: Path) -> Path:
    """A folder of runs with an empty store in it."""
    shutil.copy(database, tmp_path / "mlflow.db")
    return tmp_path
