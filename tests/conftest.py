"""A tiny data set, shared by the tests that train; servers that have S3's and Google's API."""

import gc
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import fake_gcs
import faulty_s3
import pytest
from forked import Forge
from tiny import make_dataset

import launch  # noqa: F401  (puts its folder on the path, for commands that run in this process)
from pipeline.cluster import ray_tasks
from pipeline.process import waits

# The fixtures that make a test one of a row of its own (the Makefile's), by the name of its marker.
ROWS = {"hosts": {"can_have_hosts"}, "ray": {"ray_cluster", "own_ray"}, "ranks": {"forge"}}

# A shell without job control (the Makefile's) starts what runs in the background with SIGINT ignored, and so would be
# all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Without credentials, AWS's library asks the metadata service of a cloud, and waits 14 s for it where there is none.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database, made once: MLflow takes seconds to create the tables."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def out(database: Path, tmp_path: Path) -> Path:
    """A folder of runs with a database in it."""
    shutil.copy(database, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 training and 37 validation samples of 4 classes, 16 px."""
    return make_dataset(tmp_path_factory.mktemp("data") / "tiny", {"train": 150, "val": 37})


@pytest.fixture
def notice_after_600(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that puts forward the clock of waits, which are said after 600 s of it: never because a machine is
    slow.
    """
    ahead = [0.0]

    def forward(seconds: float) -> None:
        ahead[0] += seconds

    monkeypatch.setattr(waits, "NOTICE_SECONDS", 600.0)
    monkeypatch.setattr(waits, "_AGAIN_SECONDS", 1e6)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=lambda seconds: time.sleep(0.002))
    monkeypatch.setattr(waits, "time", clock)
    monkeypatch.setattr(waits, "_board", waits._Board())
    return forward


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with Forge(tmp_path_factory.mktemp("forge")) as forge:
        yield forge


@pytest.fixture(scope="session")
def s3_server() -> Iterator[faulty_s3.S3]:
    with faulty_s3.running() as server:
        yield server


@pytest.fixture
def s3(
    s3_server: faulty_s3.S3,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[faulty_s3.S3, str]]:
    """A server without faults, and the URL of an empty bucket of the test's own. Indexes are not kept at home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    bucket = "b" + hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:20]
    s3_server.reset()
    s3_server.bucket(bucket)
    yield s3_server, f"s3://{bucket}"
    s3_server.reset()


@pytest.fixture(scope="session")
def gcs() -> Iterator[str]:
    """The end of a gs:// URL that leads to a server of Google's API, where there is a bucket `models`."""
    with fake_gcs.running("models") as options:
        yield options


@pytest.fixture(scope="session")
def ray_cluster(s3_server: faulty_s3.S3) -> int:
    """CPUs of a Ray cluster on this machine, which ends with this process. Its workers reach the S3 server."""
    # Ray kills workers when the machine's memory runs low, whichever process uses it.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112
    return ray_tasks.connect(num_cpus=2)


@pytest.fixture
def own_ray() -> None:
    """Requested by tests that start a Ray of their own, in another process. See pytest_collection_modifyitems."""


@pytest.fixture(autouse=True)
def _no_ray_without_the_fixture() -> Iterator[None]:
    """Fails a test that starts Ray and is not marked so: it would run beside tests that need both cores."""
    before = _ray_is_running()
    yield
    assert before or not _ray_is_running(), "this test starts Ray, so it must request ray_cluster"


def _ray_is_running() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those that are about them, which are then selected alone (`make gpu`).

    Garbage is collected less often: each collection looks at all that tests and MLflow keep, 5 % of the processor time.
    """
    gc.set_threshold(50_000)
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a line to $TEST_RESULTS as each test ends: what a time limit cuts off loses only the rest."""
    if (path := os.environ.get("TEST_RESULTS")) and (report.when == "call" or report.outcome != "passed"):
        reason = str(report.longrepr)[-2000:] if report.longrepr else ""
        line = {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
        }
        with open(path, "a") as file:
            print(json.dumps({**line, "reason": reason}), file=file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start hosts, Ray or ranks, by the fixtures that do so (the Makefile runs them separately)."""
    for item in items:
        for row, fixtures in ROWS.items():
            if fixtures & set(getattr(item, "fixturenames", ())):
                item.add_marker(row)
                break
    # A worker without a file waits for the other: the last ones have to be short.
    if "PYTEST_XDIST_WORKER" in os.environ:
        num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (-num_slow[item.path], item.path))
