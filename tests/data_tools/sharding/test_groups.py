"""Images that belong together, such as those of a patient, are held out together."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_images import jpeg, settings, write_folder

from data_tools.sharding import index, shard
from data_tools.sharding.selection import apply_rules, describe_groups, groups_of, hold_out, with_groups
from data_tools.sources import Listing, list_source
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import INFO, Dataset, open_dataset
from pipeline.data.mixture import run_data
from pipeline.settings import schema
from pipeline.settings.commands.data import IndexConfig

NUM_PATIENTS, SHARE = 24, 0.25
PATTERN = "patient[0-9]+"


def names() -> list[str]:
    """Patient p has 1 + p % 4 images, in two classes."""
    return [
        f"{('benign', 'malignant')[image % 2]}/patient{patient:02d}_{image}.jpg"
        for patient in range(NUM_PATIENTS)
        for image in range(1 + patient % 4)
    ]


def patient(key: str) -> str:
    return key.split("/")[1].split("_")[0]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder({name: jpeg(i) for i, name in enumerate(names())}, tmp_path_factory.mktemp("photos") / "raw")


def listed(source: Path, **others: object) -> Listing:
    config = settings(source, source.parent / "unused", **others)
    config.check()
    listing = with_groups(list_source(source, config, source.parent / "staging"), config.group_pattern)
    return hold_out(listing, config)


def refused(source: Path, **others: object) -> str:
    with pytest.raises(UserError) as error:
        listed(source, **others)
    return str(error.value)


def of_splits(listing: Listing) -> dict[str, set[str]]:
    return {split: set(groups.to_pylist()) for split, groups in groups_of(listing).items()}


def test_val_share_holds_out_whole_groups(photos: Path) -> None:
    listing = listed(photos, val_share=SHARE, group_pattern=PATTERN)
    groups = of_splits(listing)
    assert groups["train"] | groups["val"] == {f"patient{p:02d}" for p in range(NUM_PATIENTS)}
    assert not groups["train"] & groups["val"]
    assert 2 <= len(groups["val"]) <= 12
    assert listing.table["group"].to_pylist() == [patient(key) for key in listing.table["key"].to_pylist()]
    alone = listed(photos, val_share=SHARE)
    assert not alone.has_groups
    assert groups_of(alone) == {}
    assert describe_groups({}) == []
    val = np.array(alone.table["key"].to_pylist())[alone.table["split"].to_numpy() == 1]
    train = np.array(alone.table["key"].to_pylist())[alone.table["split"].to_numpy() == 0]
    assert set(map(patient, val)) & set(map(patient, train))  # Which is why there are groups.


def test_a_group_never_changes_split_when_images_are_added(photos: Path, tmp_path: Path) -> None:
    more = {name.replace("_0", "_9"): jpeg(99) for name in names()[::2]}
    source = write_folder({name: jpeg(i) for i, name in enumerate(names())} | more, tmp_path / "raw")
    before = of_splits(listed(photos, val_share=SHARE, group_pattern=PATTERN))
    assert of_splits(listed(source, val_share=SHARE, group_pattern=PATTERN)) == before


def test_the_first_parentheses_are_the_group(photos: Path) -> None:
    assert of_splits(listed(photos, group_pattern="patient([0-9])([0-9])")) == {"train": {"0", "1", "2"}}


def test_a_list_names_the_group_of_each_image(photos: Path, tmp_path: Path) -> None:
    keys = names()
    columns = {
        "path": [str(photos / key) for key in keys],
        "label": [key.split("/")[0] for key in keys],
        "lesion": [int(patient(key).removeprefix("patient")) for key in keys],
    }
    path = tmp_path / "list.parquet"
    pq.write_table(pa.table(columns), path)
    listing = listed(path, val_share=SHARE, group_column="lesion")
    groups = of_splits(listing)
    assert groups["train"] | groups["val"] == {str(p) for p in range(NUM_PATIENTS)}
    assert not groups["train"] & groups["val"]
    unlabelled = listed(path, val_share=SHARE, group_column="lesion", label_column="")
    assert of_splits(unlabelled) == groups
    assert not unlabelled.is_labelled
    assert (
        listing.digest() != listed(path, val_share=SHARE).digest()
    )  # So that `out` is not gone on with, of other groups.
    assert "has no column 'leison' (group_column)" in refused(path, group_column="leison")


def test_parquet_of_images_names_the_group_of_each(tmp_path: Path) -> None:
    keys = names()
    table = {"image": [jpeg(i) for i in range(len(keys))], "label": [0] * len(keys), "of": list(map(patient, keys))}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    listing = listed(tmp_path, group_column="of", val_share=SHARE)
    rows = [int(key.rpartition("/")[2]) for key in listing.table["key"].to_pylist()]
    assert listing.table["group"].to_pylist() == [patient(keys[row]) for row in rows]
    assert not set.intersection(*of_splits(listing).values())
    for missing in (None, "nan"):
        pq.write_table(pa.table(table | {"of": [missing, *map(patient, keys[1:])]}), tmp_path / "a.parquet")
        assert "a.parquet, row 0: its group is missing" in refused(tmp_path, group_column="of")


def test_what_is_no_group_is_refused(photos: Path, tmp_path: Path) -> None:
    assert "finds no group in the key 'benign/patient00_0'" in refused(photos, group_pattern="patient1")
    with pytest.raises(UserError, match="group_pattern = "):
        schema.load(IndexConfig, None, ["source=a", "group_pattern=(patient"])
    for other in ({"group_column": "p", "layout": "list"}, {"holdout_per_class": 1}):
        assert "group_pattern" in refused(photos, group_pattern=PATTERN, **other)
    ruled = settings(photos, tmp_path / "out", group_pattern=PATTERN, class_list=str(tmp_path / "classes.txt"))
    (tmp_path / "classes.txt").write_text("benign\n")
    other = write_folder({"other/x.jpg": jpeg(1), "benign/patient07_1.jpg": jpeg(2)}, tmp_path / "other")
    listing = with_groups(apply_rules(list_source(other, ruled, tmp_path / "staging"), ruled), PATTERN)
    assert listing.table["group"].to_pylist() == ["patient07"]


@pytest.mark.ray
def test_the_data_set_keeps_its_groups(
    ray_cluster: int, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the manifest, for data.dev_share, and if the tars are indexed in place."""
    config = settings(photos, tmp_path / "out", val_share=SHARE, group_pattern=PATTERN, samples_per_shard=7)
    dataset = shard.run(config)
    assert "groups of train: " in capsys.readouterr().out
    check(dataset)
    shard.run(config)  # Nothing to do, and nothing to complain of.
    with pytest.raises(UserError, match="was made with group_pattern = "):
        shard.run(settings(photos, tmp_path / "out", val_share=SHARE, samples_per_shard=7))

    (tmp_path / "out" / INFO).unlink()
    (tmp_path / "out" / "samples.parquet").unlink()
    splits = {"train": "train-", "val": "val-"}
    with pytest.raises(UserError, match="group_pattern = 'person' finds no group in the key '"):
        index.run(IndexConfig(source=str(tmp_path / "out"), splits=splits, group_pattern="person"))
    check(index.run(IndexConfig(source=str(tmp_path / "out"), splits=splits, group_pattern=PATTERN)))


def test_dev_share_takes_groups_of_nearly_the_share(tmp_path: Path) -> None:
    """One of 41 of 81 images was held out with 8 as the share, or 75 of 81 with 36."""
    groups = np.repeat(np.arange(11), [41, *[4] * 10])
    for count, seed in ((8, 0), (8, 1), (8, 2), (36, 3), (60, 4)):
        chosen = run_data._in_groups(groups, count, seed)
        assert abs(chosen.sum() - count) <= 5
        assert all(len(set(chosen[groups == group])) == 1 for group in range(11))
        fewer = groups != 0  # What is excluded changes the number of groups, not their order.
        assert len(set(run_data._in_groups(groups[fewer], 8, seed)[groups[fewer] == 3])) == 1


@pytest.mark.parametrize(("sizes", "count"), [((5,), 4), ((5, 5), 8), ((10, 10, 10), 26), ((1, 1, 98), 60)])
def test_dev_share_leaves_something_to_train_on(sizes: tuple[int, ...], count: int) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    for seed in range(20):
        assert not run_data._in_groups(groups, count, seed).all()


def check(dataset: Dataset) -> None:
    train = open_dataset(dataset.path).split("train")
    keys = train.keys(np.arange(len(train)))
    groups = train.groups
    assert [groups[i] == groups[0] for i in range(len(keys))] == [patient(key) == patient(keys[0]) for key in keys]
    assert len(np.unique(groups)) == len(set(map(patient, keys)))
    drawn = set()
    for seed in range(3):
        rest, dev = run_data.hold_out(train, SHARE, seed)
        of_rest, of_dev = (set(map(patient, split.keys(np.arange(len(split))))) for split in (rest, dev))
        assert not of_rest & of_dev
        assert abs(len(dev) - SHARE * len(train)) <= 2
        drawn.add(frozenset(of_dev))
    assert len(drawn) > 1
    # The same set, in a mixture for a second time with another limit, has no other images of these groups.
    rest = run_data._without(train.only(np.arange(3, len(train))), dev.only(np.arange(len(dev) - 1)))
    assert not of_dev - {patient(dev.keys([len(dev) - 1])[0])} & set(map(patient, rest.keys(np.arange(len(rest)))))
