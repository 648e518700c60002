"""Tracking URIs of SQLite databases, in folders of any name."""

import os
import shutil
from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from pipeline.monitor.mlflow.connection import connect, experiment_id, sqlite_file, sqlite_uri
from pipeline.monitor.tracking import default_uri


@pytest.mark.parametrize("name", ["runs", "a b%20c", "a?b", "a#b", "ä;x=1&y", "100%", "%3F?"])
def test_each_folder_has_its_own_database(tmp_path: Path, database: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    shutil.copy(database, tmp_path / name / "mlflow.db")
    uri = default_uri(tmp_path / name)
    experiment_id(connect(uri), "here", None)
    assert sqlite_file(uri) == tmp_path / name / "mlflow.db"
    assert b"here" in (tmp_path / name / "mlflow.db").read_bytes()
    assert name in os.listdir(tmp_path)  # Of a percent sign MLflow also makes an empty folder whose name has %25.


def test_other_uris() -> None:
    assert (
        sqlite_uri(Path("/data/vit runs/mlflow.db")) == "sqlite:////data/vit runs/mlflow.db"
    )  # As earlier versions wrote.
    assert sqlite_file("http://127.0.0.1:5000") is None
    assert sqlite_file("postgresql://user:password@host/db") is None
    assert sqlite_file("sqlite:///runs/mlflow.db?timeout=9") == Path("runs/mlflow.db")
    with pytest.raises(UserError, match="in memory"):
        sqlite_file("sqlite+pysqlite://")
