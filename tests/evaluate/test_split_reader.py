"""What an objective with several views is scored on: its own views, the same at each evaluation and on any number of
ranks.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_dataset

from pipeline.data.dataset.manifest import Split, open_dataset
from pipeline.data.loading.loader import Loader, eval_requests
from pipeline.data.loading.views import Views, eval_view, train_views
from pipeline.evaluate.split_reader import SplitReader
from pipeline.process.distributed import Ranks
from pipeline.settings.run import AugmentConfig

AUGMENT, SIZE, SEED, COUNT = AugmentConfig(color_jitter=0.4), 16, 5, 30
SEVERAL = (Views(1, SIZE, AUGMENT), Views(2, 12, AUGMENT))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    path: Path = tmp_path_factory.mktemp("split_reader") / "data"
    return open_dataset(make_dataset(path, {"val": COUNT})).split("val")


def read(split: Split, views: tuple[Views, ...], batch: int = 7, world_size: int = 1) -> dict[int, list[np.ndarray]]:
    """Row -> each of its views."""
    found = {}
    for rank in range(world_size):
        ranks = Ranks(rank, 0, world_size, torch.device("cpu"))
        reader = SplitReader(split, SIZE, AUGMENT, batch, 2, ranks, views=views, seed=SEED)
        with reader.open(eval_requests(COUNT, batch, rank, world_size), COUNT) as (batches, _):
            for loaded in batches:
                for i, row in enumerate(loaded.rows.tolist()):
                    found[row] = [view[i].numpy().copy() for group in loaded.views for view in group]
    assert sorted(found) == list(range(COUNT))
    return found


@pytest.mark.parametrize(("batch", "world_size"), [(7, 1), (30, 1), (4, 2), (7, 3)])
def test_several_views_are_drawn_as_in_epoch_0(split: Split, batch: int, world_size: int) -> None:
    with Loader(split, train_views(SEVERAL, SEED), 1, 1, 0.0) as loader:
        (expected,) = loader.batches([(np.arange(COUNT), np.zeros(COUNT, np.int64))])
    for row, views in read(split, SEVERAL, batch, world_size).items():
        for found, of_all in zip(views, [view for group in expected.views for view in group], strict=True):
            assert np.array_equal(found, of_all[row].numpy())


@pytest.mark.parametrize("views", [(), (Views(1, SIZE, AUGMENT),)], ids=["none", "one"])
def test_one_view_is_the_evaluation_view(split: Split, views: tuple[Views, ...]) -> None:
    with Loader(split, eval_view(AUGMENT, SIZE), 1, 1, 0.0) as loader:
        (expected,) = loader.batches([(np.arange(COUNT), np.zeros(COUNT, np.int64))])
    for row, (found,) in read(split, views).items():
        assert np.array_equal(found, expected.images[row].numpy())
