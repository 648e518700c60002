"""One data set, and one set of VTAB tasks, that many tests read."""

from pathlib import Path

import pytest
import raw_images
import vtab_originals
from vtab_originals import Truth

from data_tools.sharding import shard
from data_tools.vtab import prepare
from pipeline.data.dataset.manifest import Dataset


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


@pytest.fixture(scope="session")
def vtab_tasks(tmp_path_factory: pytest.TempPathFactory, ray_cluster: int) -> tuple[Path, Truth]:
    """originals/, and out/ with all 19 tasks of VTAB made of the originals; tests must not change them."""
    folder = tmp_path_factory.mktemp("vtab")
    truth = vtab_originals.write_originals(folder / "originals")
    with vtab_originals.small_splits():
        prepare.run(vtab_originals.settings(folder / "out", originals=str(folder / "originals")))
    return folder, truth
