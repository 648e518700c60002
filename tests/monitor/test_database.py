"""The SQLite database of a store: whole or absent, whatever happens to the processes that create it."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from pipeline.monitor.mlflow.connection import connect

FORK = multiprocessing.get_context("fork")  # A process that has imported MLflow.


def open_store(path: Path) -> None:
    connect(f"sqlite:///{path}").search_experiments()


@pytest.mark.slow
def test_a_process_killed_while_it_creates_the_database_leaves_a_whole_one_or_none(
    tmp_path: Path, database: Path
) -> None:
    begin = time.perf_counter()
    open_store(tmp_path / "first.db")
    seconds, path = time.perf_counter() - begin, tmp_path / "runs" / "mlflow.db"
    for moment in (0.3, 0.6, 0.9):
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
