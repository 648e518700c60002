"""The data of a mixture: settings, labels brought together, rows through all sets, and what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny import make_dataset, rename_classes, train_view

from pipeline import objectives
from pipeline.architecture.objectives import Labels
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import ROWS, SAMPLES_FILE, SHARDS_FILE, Shard, open_dataset, write_dataset
from pipeline.data.dataset.split import BadBudget
from pipeline.data.loading.decode import decode
from pipeline.data.loading.loader import Loader, normalise
from pipeline.data.loading.order import SampleOrder
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import Views, read_by, train_views
from pipeline.data.mixture.order import train_order
from pipeline.data.mixture.phases import mixture_of
from pipeline.data.mixture.run_data import RunData, open_run_data
from pipeline.data.mixture.split import MixedSplit
from pipeline.evaluate.probes.probe import open_run_probe
from pipeline.settings import schema
from pipeline.settings.run import AugmentConfig, DataConfig, MixedSet, RunConfig


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    make_dataset(folder / "a", {"train": 90, "val": 10})
    make_dataset(folder / "b", {"train": 50, "extra": 20}, seed=1)
    make_dataset(folder / "bare", {"train": 30}, seed=2, labelled=False)
    shutil.copytree(folder / "a", folder / "copy")
    shutil.copytree(folder / "b", folder / "renamed")
    rename_classes(folder / "renamed", ["other", "class0", "class2", "class3"])
    return folder


def config(sets: Path, mix: str, *more: str) -> RunConfig:
    mix = mix.replace("path: ", f"path: {sets}/")
    own = [
        "name=mixed",
        f"data.path={sets / 'a'}",
        f"data.mix=[{mix}]",
        "model.name=ViT-Ti/16",
        "data.streams=4",
        "data.window=8",
    ]
    return schema.load(
        RunConfig, None, [*own, "train.length=3 epochs", "train.global_batch=20", "optimizer.lr=0.1", *more]
    )


def opened(sets: Path, mix: str, *more: str, labels: Labels = "learned") -> RunData:
    of_run = config(sets, mix, *more)
    return open_run_data(of_run.data, 0, labels)


def test_rows_labels_and_images_are_those_of_each_set(sets: Path) -> None:
    data = opened(sets, "{path: b, weight: 0.25, limit: 40}, {path: b, weight: 0.25, split: extra}")
    split = data.split
    assert isinstance(split, MixedSplit)
    assert len(split) == 90 + 40 + 20
    assert data.epoch_samples == 135  # Two thirds of the samples are of the 90.
    assert "an epoch is one of a: 135 samples of the mixture" in split.notes()
    rows = np.arange(len(split))
    assert split.keys(rows) == [key for part in split.parts for key in part.keys(np.arange(len(part)))]
    order = train_order(
        split, config(sets, "{path: b, weight: 0.25, limit: 40}, {path: b, weight: 0.25, split: extra}").data, 0, 20
    )
    assert not isinstance(order, SampleOrder)
    with Loader(split, train_view(AugmentConfig(), 0, 8), 2, 1, max_bad_share=0.0) as loader:
        batch = next(loader.batches([order.slice(0)]))
    counts = np.bincount(split.set_of(batch.rows), minlength=3)
    assert counts.tolist() in ([13, 4, 3], [13, 3, 4], [14, 3, 3])
    for i, row in enumerate(batch.rows.tolist()):
        part, own = split.part_of(row)
        assert batch.labels[i].tolist() == part.labels_of(own).tolist()
        assert batch.valid[i]


def test_classes_are_joined_by_name(sets: Path) -> None:
    a = open_dataset(sets / "a")
    data = opened(sets, "{path: renamed, weight: 1}")
    assert data.dataset.classes == [*a.classes, "other"]
    part = data.split.parts[1]
    row = next(row for row in range(len(part)) if part.labels_of(row)[0] == 1)
    assert data.split.labels_of(90 + row).tolist() == [0]
    row = next(row for row in range(len(part)) if part.labels_of(row)[0] == 0)
    assert data.split.labels_of(90 + row).tolist() == [len(a.classes)]
    assert data.own.classes == a.classes


def test_a_balance_is_within_each_set(sets: Path) -> None:
    of_run = config(sets, "{path: b, weight: 1}", "data.balance=0")
    split = open_run_data(of_run.data, 0, "learned").split
    order = train_order(split, of_run.data, 0, 20)
    assert order.is_balanced
    rows, _ = order.rows(np.arange(200))
    labels = np.array([split.labels_of(row)[0] for row in rows.tolist()])
    for first, epoch in ((0, 90), (90, 50)):
        of_epoch = labels[(rows >= first) & (rows < first + epoch)][:epoch]
        assert np.ptp(np.bincount(of_epoch)) <= 2  # Each within one of its share.


def test_where_labels_are_only_scored_those_of_other_sets_are_not_read(sets: Path) -> None:
    """Any images may be learned from: classes of their own kept a set of others from being used."""
    of_images = opened(sets, "{path: renamed, weight: 1}", labels="scored")
    assert of_images.dataset.classes == open_dataset(sets / "a").classes
    assert of_images.split.labels_of(100).tolist() == []
    assert not [note for note in of_images.split.notes() if "classes" in note]


def test_further_splits_are_evaluated_under_their_names(sets: Path) -> None:
    more = "data.eval_also=extra, train"
    alone = opened(sets, "", f"data.path={sets / 'b'}", "data.eval_split=extra", "data.eval_also=train")
    assert {name: split.name for name, split in alone.evaluated.items()} == {"extra": "extra", "train": "train"}
    mixed = config(sets, "{path: a, weight: 1}", f"data.path={sets / 'b'}", "data.dev_share=0.1", more)
    data = open_run_data(mixed.data, 0, "learned")
    evaluated = {name: len(split) for name, split in data.evaluated.items()}
    assert evaluated == {"dev": 5, "extra": 20, "train": 50}
    assert list(evaluated) == mixed.data.evaluated
    assert {f"{name}_top1" for name in evaluated} < objectives.metrics(mixed)["scores"].keys()
    assert opened(sets, "", "data.eval_also=val").evaluated.keys() == {"val"}
    with pytest.raises(UserError, match=r"/a has no split 'test'\. It has: train, val"):
        opened(sets, "", "data.eval_also=test")


def test_a_split_that_is_evaluated_and_trained_on_is_known(sets: Path) -> None:
    """In a mixture, it was another set of data.mix whose scores passed for those of held-out images."""
    held_out = opened(sets, "{path: b, weight: 1}", "data.dev_share=0.1")
    assert held_out.not_held_out(held_out.trained_on("r")) == {}
    mixed = opened(sets, "{path: a, split: val, weight: 1}", f"data.path={sets / 'copy'}", "data.limit=50%")
    assert mixed.not_held_out(mixed.trained_on("r")) == {"val": "r"}
    alone = opened(sets, "", "data.eval_split=train")
    assert alone.not_held_out(alone.trained_on("r")) == {"train": "r"}
    # A probe reads no label of them, but its features were learnt from them.
    probed = open_dataset(sets / "b")
    settings = config(sets, "", "probe.every=1 epochs", f"probe.data={probed.path}", "probe.split=extra")
    for mix, runs in (("{path: b, weight: 1}", {}), ("{path: b, split: extra, weight: 1}", {"b": "r"})):
        data = opened(sets, mix, labels="unread")
        run_probe = open_run_probe(settings, data.own, data.split.parts[0], {"b": probed}, data.split.pixels)
        assert run_probe.trained_by(data.trained_on("r")) == runs


def test_each_set_has_its_own_budget_of_unreadable_images(sets: Path) -> None:
    split = opened(sets, "{path: b, weight: 1}").split
    budget = BadBudget(0.03)  # 2 of 90, 1 of 50.
    assert not budget.excess_of_any_set({0: "cut", 1: "cut", 90: "cut"}, split)
    assert "2 samples of 50 cannot be read" in budget.excess_of_any_set({0: "cut", 90: "cut", 91: "cut"}, split)


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        ("{path: b, weight: 1e-7}", "a weight is below 7.6e-06 of the sum"),
        (
            "{path: a, weight: 1}",
            r"data.mix\[0\]: .*/a, split 'train'",
        ),
        ("{path: b, weight: 1}, {path: b, weight: 2}", r"data.mix\[1\]: .*/b, split 'train'"),
        ("{path: bare, weight: 1}", "bare has no labels, and .*/a has"),
        (
            "{path: b, weight: 1}, {path: b, weight: 2, limit: 9, from_step: 4}",
            r"data.mix\[1\].limit",
        ),
        (
            "{path: b, weight: 0, from_step: 4}, {path: a, weight: 0, from_step: 4}",
            "the weights of all data sets are 0 from step 4",
        ),
    ],
)
def test_a_mixture_that_cannot_be_used_is_refused(sets: Path, mix: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        opened(sets, mix)


def read_all(split: MixedSplit, model: Pixels) -> dict[int, np.ndarray]:
    """Row -> what a model reads of it, float32 (C, H, W)."""
    pixels, read_as = read_by(model, split)
    writer = train_views((Views(1, 16, AugmentConfig(crop="none", flip=False)),), 0, pixels, read_as)
    rows = np.arange(len(split))
    with Loader(split, writer, 2, 1, max_bad_share=0.0) as loader:
        (batch,) = loader.batches([(rows, 0 * rows)])
    return dict(
        zip(rows.tolist(), normalise(batch.images, torch.device("cpu"), torch.float32, pixels).numpy(), strict=True)
    )


def test_sets_of_other_channels_or_types_are_each_read_by_their_own_range(sets: Path) -> None:
    """Against the arrays in float64; a channel that a set does not have is exactly 0."""
    bands = Pixels(
        ("nir", "green", "blue"),
        "uint16",
        (9.0, 99.0, 0.0),
        (999.0, 60_000.0, 9e3),
        (0.2, 0.3, 0.4),
        (0.1, 0.2, 0.3),
        500.0,
    )
    maps = Pixels(("blue", "height"), "float32", (-2.0, -99.0), (2.0, 99.0), (0.6, 0.7), (0.3, 0.2))
    make_dataset(sets / "bands", {"train": 30}, pixels=bands)
    make_dataset(sets / "maps", {"train": 30}, pixels=maps)
    data = opened(sets, "{path: bands, weight: 1}, {path: maps, weight: 1}")
    split, model = data.split, data.split.pixels
    assert isinstance(split, MixedSplit)
    assert (model.channels, model.batch_type) == ((*RGB8.channels, "nir", "height"), "float32")
    assert (model.mean, model.std) == ((0.5, 0.5, 0.5, 0.2, 0.7), (0.5, 0.5, 0.5, 0.1, 0.2))
    assert data.dataset.pixels == model
    for word in ("bands has no red", "maps has no red, green, nir", "a has no nir, height"):
        assert any(word in note for note in split.notes())
    assert (
        Pixels(**{name: tuple(value) if isinstance(value, list) else value for name, value in model.to_dict().items()})
        == model
    )
    assert read_all(split, model).keys() == set(range(150))
    for row, found in read_all(split, model).items():
        part, own = split.part_of(row)
        of_set, image = part.pixels, decode(ShardReader(part).read(own), pixels=part.pixels).astype(np.float64)
        share = ((image - of_set.low) / np.subtract(of_set.high, of_set.low)).clip(0, 1)
        share[image == (of_set.nodata or -1)] = 0
        for place, channel in enumerate(model.channels):
            if channel not in of_set.channels:
                assert not found[place].any()
                continue
            expected = (share[..., of_set.channels.index(channel)] - model.mean[place]) / model.std[place]
            assert np.abs(found[place] - expected).max() < 1e-5
    for one in (bands, maps, RGB8):
        assert model.reading(one, "", "").low == one.low
    with pytest.raises(UserError, match=r"height.*\(depth\)"):
        model.reading(replace(RGB8, channels=("depth",), low=(0,), high=(1,), mean=(0.5,), std=(1,)), "weights", "data")


def test_sets_of_the_same_channels_and_type_are_read_by_the_first_range_and_their_own_nodata(sets: Path) -> None:
    make_dataset(sets / "dark", {"train": 30}, pixels=Pixels(high=(90.0, 80.0, 70.0)))
    make_dataset(sets / "holes", {"train": 30}, pixels=Pixels(nodata=200.0))
    data = opened(sets, "{path: dark, weight: 1}, {path: holes, weight: 1}")
    assert [note.endswith("a") for note in data.notes() if "range" in note] == [True]
    split = data.split
    assert split.pixels == RGB8
    for row, found in read_all(split, split.pixels).items():
        part, own = split.part_of(row)
        image = decode(ShardReader(part).read(own)).astype(np.float32)
        image[image == (part.pixels.nodata or -1)] = 0
        assert np.array_equal(found, (image / np.float32(127.5) - 1).transpose(2, 0, 1))


@pytest.mark.parametrize(("num_images", "has"), [(0, "no images"), (10, "images, but no labels")])
def test_a_split_that_nothing_can_be_scored_on_is_refused(tmp_path: Path, num_images: int, has: str) -> None:
    """One without images ended in a traceback; one without labels had a top-1 of 0 % and, by softmax, a loss of 0."""
    train, bare = make_dataset(tmp_path / "a", {"train": 90}), make_dataset(tmp_path / "b", {"val": 10}, labelled=False)
    shutil.copy(bare / "val-000000.tar", train)
    tables = [pq.read_table(path / SAMPLES_FILE).select(ROWS.names) for path in (train, bare)]
    shards = [Shard(**row) for path in (train, bare) for row in pq.read_table(path / SHARDS_FILE).to_pylist()]
    write_dataset(
        train,
        [*shards[:-1], replace(shards[-1], samples=num_images)],
        [*(tables[0].slice(start, 40) for start in (0, 40, 80)), tables[1].slice(0, num_images)],
        open_dataset(train).classes,
        {},
        {},
    )
    settings = schema.load(DataConfig, None, [f"path={train}"])
    if num_images:  # They can be for an objective that learns without labels.
        assert open_run_data(settings, 0, "unread").evaluation is not None
    with pytest.raises(
        UserError, match=f"a: split 'val' has {has}, so nothing can be scored on it. Name another split.$"
    ):
        open_run_data(settings, 0, "learned")
    trained = replace(settings, train_split="val", eval_split="train")
    if num_images:
        with pytest.raises(UserError, match=r"no training image has a label \(split 'val' of .*a\)"):
            open_run_data(trained, 0, "partly")


def test_phases_are_the_weights_from_each_step_on(sets: Path) -> None:
    of_run = config(
        sets, "{path: b, weight: 1}, {path: bare, weight: 3, from_step: 9}, {path: b, weight: 0, from_step: 9}"
    )
    mixture = mixture_of(of_run.data)
    assert [entry.path.rpartition("/")[2] for entry in mixture.sets] == ["a", "b", "bare"]
    assert [(start, *of.counts.tolist()) for start, of in mixture.phases] == [(0, 1, 1, 0), (9, 1, 0, 3)]


def test_targets_are_chosen_by_name_in_every_set(tmp_path: Path) -> None:
    """One that a set lacks is missing there."""
    own = make_dataset(tmp_path / "own", {"train": 60, "val": 9}, labelled=False, targets=["red", "blue"])
    other = make_dataset(tmp_path / "other", {"train": 60}, seed=1, labelled=False, targets=["blue", "age"])

    def opened(targets: list[str], *mix: MixedSet, labels: Labels = "targets", path: Path = own) -> RunData:
        return open_run_data(DataConfig(path=str(path), targets=targets, mix=list(mix)), 0, labels)

    assert opened([]).targets == ["red", "blue"]
    both = opened(["blue", "red"], MixedSet(path=str(other), weight=1))
    first, second = (open_dataset(path).split("train").target_values for path in (own, other))
    values = both.split.target_values
    assert np.array_equal(values[:60], first[:, ::-1], equal_nan=True)
    assert np.array_equal(values[60:, 0], second[:, 0], equal_nan=True)
    assert np.isnan(values[60:, 1]).all()
    assert np.array_equal(both.split.targets_of(61), values[61], equal_nan=True)
    assert both.evaluation is not None
    assert both.evaluation.num_targets == 2
    # Without what learns them, batches have none.
    assert opened([], labels="unread").split.num_targets == 0
    with pytest.raises(UserError, match=r"data\.targets.*age"):
        opened(["age"])
    with pytest.raises(UserError, match=r"train\.loss=regression"):
        opened([], labels="learned")
    with pytest.raises(UserError, match="target_columns"):
        opened([], path=make_dataset(tmp_path / "none", {"train": 30, "val": 9}))
