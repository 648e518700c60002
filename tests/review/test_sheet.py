"""The contact sheet of a step: every view that the objective wants of an image, side by side."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import make_dataset

from pipeline import objectives
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


def test_views_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = schema.load(RunConfig, None, GIVEN)
    split = open_dataset(make_dataset(tmp_path / "data", {"train": 30})).split("train")
    rows, epochs = np.arange(7), np.full(7, 2)
    monkeypatch.setattr(Classification, "views", classmethod(lambda cls, config: GROUPS))
    samples._draw(config, split, rows, epochs, tmp_path / "sheet.png")
    pixels = np.asarray(Image.open(tmp_path / "sheet.png"))
    # 7 images of 5 views: 2 strips of 24 + 24 + 12 + 12 + 12 columns in each of 4 rows.
    assert pixels.shape == (4 * 24, 2 * 84, 3)
    with Loader(split, train_views(GROUPS, config.seed), 1, 1, 0.0) as loader:
        large, small = next(loader.batches([(rows, epochs)])).views
    for i in range(7):
        strip = pixels[24 * (i // 2) : 24 * (i // 2 + 1), 84 * (i % 2) : 84 * (i % 2 + 1)]
        assert np.array_equal(strip[:, :48], np.concatenate(list(large[:, i].numpy()), axis=1))
        assert np.array_equal(strip[:10, 48:], np.concatenate(list(small[:, i].numpy()), axis=1))
        assert not strip[10:, 48:].any()
    assert not pixels[3 * 24 :, 84:].any()


def test_large_views_are_drawn_small_in_one_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = schema.load(RunConfig, None, GIVEN)
    split = open_dataset(make_dataset(tmp_path / "data", {"train": 30})).split("train")
    groups = (Views(1, 192, AugmentConfig()), Views(1, 64, AugmentConfig()))
    monkeypatch.setattr(Classification, "views", classmethod(lambda cls, config: groups))
    samples._draw(config, split, np.arange(1), np.zeros(1, np.int64), tmp_path / "sheet.png")
    assert Image.open(tmp_path / "sheet.png").size == (96 + 32, 96)


def test_a_checkpoint_has_the_settings_of_its_objective(tmp_path: Path) -> None:
    """Two images beside each other, of two large views and a small one, which are eight of 96 pixels by default."""
    more = ["train.loss=dino", "augment.crop=inception", "objective={local_views: 1, local_size: 8}"]
    data = make_dataset(tmp_path / "data", {"train": 30})
    given = ["name=x", "model.name=ViT-Ti/8", "model.image_size=16", "train.length=2 steps", "train.global_batch=9"]
    config = schema.load(RunConfig, None, [*given, f"data.path={data}", "data.eval_split=", "data.streams=1", *more])
    split = open_dataset(data)
    identity = {**objectives.flat_settings(config), "fingerprint": split.fingerprint}
    (tmp_path / "state.json").write_text(json.dumps({"format": 1, "step": 1, "identity": identity}))
    sheet = tmp_path / "sheet.png"
    samples.run(schema.load(SamplesConfig, None, [f"run={tmp_path}", "step=1", f"sheet={sheet}"]))
    assert Image.open(sheet).size == (80, 80)
