"""The SQLite database of a store: whole or absent, whatever happens to the processes that create it."""

import multiprocessing
import os
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from pipeline.base.files import create
from pipeline.monitor.mlflow.store import MlflowStore

FORK = multiprocessing.get_context("fork")  # A process that has imported MLflow.


def open_store(path: Path) -> None:
    MlflowStore(f"sqlite:///{path}").client.search_experiments()


@pytest.fixture(scope="module", autouse=True)
def seconds(database: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """In which a database is created, once MLflow is imported and has made one."""
    begin = time.perf_counter()
    open_store(tmp_path_factory.mktemp("first") / "mlflow.db")
    return time.perf_counter() - begin


@pytest.mark.slow
def test_a_process_killed_while_it_creates_the_database_leaves_a_whole_one_or_none(
    tmp_path: Path, seconds: float
) -> None:
    path = tmp_path / "runs" / "mlflow.db"
    for moment in (0.1, 0.3, 0.5, 0.7, 0.9):
        process = FORK.Process(target=open_store, args=(path,))
        process.start()
        time.sleep(seconds * moment)
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        if path.exists() or moment == 0.9:
            open_store(path)
            assert path.stat().st_size > 500_000
            path.unlink()


def test_processes_that_begin_together_make_one_database(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    processes = [FORK.Process(target=create, args=(path, bytes([i]) * 100_000)) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    content = path.read_bytes()
    assert content == content[:1] * 100_000
    assert not create(path, b"late")
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["mlflow.db"]


def test_runs_that_begin_together_on_no_database_share_one(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    processes = [FORK.Process(target=_experiment, args=(path, f"experiment {i}")) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 2
    names = {found.name for found in MlflowStore(f"sqlite:///{path}").client.search_experiments()}
    assert names >= {f"experiment {i}" for i in range(2)}


def _experiment(path: Path, name: str) -> None:
    MlflowStore(f"sqlite:///{path}").experiment_id(name, None)


def test_a_database_that_mlflow_left_half_made_is_named(tmp_path: Path) -> None:
    from mlflow.store.db.utils import InitialBase
    from sqlalchemy import create_engine

    path = tmp_path / "mlflow.db"
    InitialBase.metadata.create_all(create_engine(f"sqlite:///{path}"))
    with sqlite3.connect(path) as database:  # As a process leaves it that was killed in the middle of a migration.
        database.execute("CREATE TABLE _alembic_tmp_experiment_tags (key VARCHAR(250) NOT NULL)")
    with pytest.raises(UserError, match=r"left half made .* remove the file"):
        open_store(path)


def test_an_error_of_the_database_is_no_traceback_in_the_log(
    database: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLflow logged one at each try: forty lines every half minute, as long as a disk was full."""
    shutil.copy(database, path := tmp_path / "mlflow.db")
    store = MlflowStore(f"sqlite:///{path}")
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE runs")
    with pytest.raises(Exception, match="no such table"):
        store.client.get_run("1" * 32)
    assert not capfd.readouterr().err
