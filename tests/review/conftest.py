"""An MLflow store for the tests of this folder."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database, made once: MLflow takes many seconds to create the tables."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def out(empty_database: Path, tmp_path: Path) -> Path:
    """A folder of runs with an empty store in it."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return tmp_path
