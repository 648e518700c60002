"""One Ray for the session, and one data set that many tests read."""

import os
from pathlib import Path

import pytest
import raw_images
from faulty_s3 import S3

from data_tools import cluster, shard
from pipeline.data.manifest import Dataset


@pytest.fixture(scope="session")
def ray_cluster(s3_server: S3) -> int:
    """CPUs of a cluster on this machine; it ends with this process. Its workers know the way to the S3 server."""
    # Ray kills workers when the machine's memory runs low, whoever uses it; here that may be anyone.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112
    return cluster.connect(num_cpus=2)


@pytest.fixture(scope="session")
def pictures() -> dict[str, bytes]:
    return raw_images.pictures()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory, pictures: dict[str, bytes]) -> Path:
    return raw_images.write_folder(pictures, tmp_path_factory.mktemp("source") / "raw")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int, source: Path) -> Dataset:
    """The pictures as a data set with a held-out split; tests must not change it."""
    out = tmp_path_factory.mktemp("dataset") / "out"
    return shard.run(raw_images.settings(source, out, val_share=0.25))
