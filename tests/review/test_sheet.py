"""The picture of a step: every view that the objective wants of its images."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny import make_dataset

from pipeline import objectives
from pipeline.base import gallery
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.views import Views, train_views
from pipeline.objectives.classification import Classification
from pipeline.review import samples
from pipeline.settings import schema
from pipeline.settings.commands.operate import SamplesConfig
from pipeline.settings.run import AugmentConfig, RunConfig

GIVEN = ["name=x", "model.name=ViT-S/16", "model.image_size=16", "train.length=1 steps", "data.path=x"]
GROUPS = (Views(2, 24, AugmentConfig()), Views(3, (10, 12), AugmentConfig(area_max=0.2)))


def test_views_stand_below_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = schema.load(RunConfig, None, GIVEN)
    split = open_dataset(make_dataset(tmp_path / "data", {"train": 30})).split("train")
    rows, epochs = np.arange(7), np.full(7, 2)
    monkeypatch.setattr(Classification, "views", classmethod(lambda cls, config: GROUPS))
    drawn, draw = [], gallery.gallery
    monkeypatch.setattr(gallery, "gallery", lambda tiles, title: drawn.extend(tiles) or draw(tiles, title))
    samples._draw(config, split, rows, epochs, tmp_path / "sheet.png")
    with Loader(split, train_views(GROUPS, config.seed), 1, 1, 0.0) as loader:
        large, small = next(loader.batches([(rows, epochs)])).views
    for tiles, view in zip(drawn, [*large.numpy(), *small.numpy()], strict=True):
        assert all(np.array_equal(tile.pixels, pixels) for tile, pixels in zip(tiles, view, strict=True))


def test_a_checkpoint_has_the_settings_of_its_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two large views and a small one, which are eight of 96 pixels by default."""
    more = ["train.loss=dino", "augment.crop=inception", "objective={local_views: 1, local_size: 8}"]
    data = make_dataset(tmp_path / "data", {"train": 30})
    given = ["name=x", "model.name=ViT-Ti/8", "model.image_size=16", "train.length=2 steps", "train.global_batch=9"]
    config = schema.load(RunConfig, None, [*given, f"data.path={data}", "data.eval_split=", "data.streams=1", *more])
    split = open_dataset(data)
    identity = {**objectives.flat_settings(config), "fingerprint": split.fingerprint}
    (tmp_path / "state.json").write_text(json.dumps({"format": 1, "step": 1, "identity": identity}))
    sheet = tmp_path / "sheet.png"
    drawn, draw = [], gallery.gallery
    monkeypatch.setattr(gallery, "gallery", lambda tiles, title: drawn.extend(tiles) or draw(tiles, title))
    samples.run(schema.load(SamplesConfig, None, [f"run={tmp_path}", "step=1", f"sheet={sheet}"]))
    assert [tiles[0].pixels.shape[0] for tiles in drawn] == [16, 16, 8, 16, 16, 8]
