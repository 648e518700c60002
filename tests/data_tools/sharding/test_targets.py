"""Numbers to predict: from lists and Parquet into shards, the manifest and a split."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_images import jpeg, settings, write_folder

from data_tools.sharding import shard
from data_tools.sharding.kinds import join_channels
from data_tools.sharding.selection import describe_targets
from data_tools.sources import Listing, list_source
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import SAMPLES_FILE, open_dataset

# The name of each image, its age and dose, as text of a CSV.
ROWS = [("a.jpg", "31", "0.5"), ("b.jpg", "", "1e-3"), ("c.jpg", "44.25", "NA"), ("d.jpg", "-2", "7")]
AGES, DOSES = [31, np.nan, 44.25, -2], [0.5, 1e-3, np.nan, 7]


def write_list(folder: Path, rows: list[tuple[str, ...]] = ROWS, header: str = "path,age,dose") -> Path:
    write_folder({name: jpeg(number) for number, (name, *_) in enumerate(rows)}, folder)
    (folder / "list.csv").write_text("\n".join([header, *map(",".join, rows)]) + "\n")
    return folder / "list.csv"


def listed(source: Path, **others: object) -> Listing:
    config = settings(source, source.parent / "unused", **others)
    config.check()
    return list_source(source, config, source.parent / "staging")


def values(listing: Listing) -> dict[str, list[float | None]]:
    return dict(zip(listing.table["key"].to_pylist(), listing.table["targets"].to_pylist(), strict=True))


def test_numbers_of_a_list_reach_the_split(ray_cluster: int, tmp_path: Path) -> None:
    source = write_list(tmp_path / "raw", [(*row, "x") for row in ROWS], "path,age,dose,label")
    given = {"target_columns": ["dose", "age"], "samples_per_shard": 3}
    dataset = shard.run(settings(source, tmp_path / "out", **given))
    assert (dataset.targets, dataset.classes) == (["dose", "age"], ["x"])
    split = dataset.split("train")
    order = [ord(key) - ord("a") for key in split.keys(range(4))]
    expected = np.array([DOSES, AGES], np.float32).T[order]
    assert np.array_equal(split.target_values, expected, equal_nan=True)
    assert np.array_equal(split.targets_of(1), expected[1], equal_nan=True)
    assert np.array_equal(split.only(np.array([0, 2])).target_values, expected[[0, 2]], equal_nan=True)
    chosen = split.with_targets(["age", "height"], dataset.targets)
    assert np.array_equal(chosen.target_values[:, 0], expected[:, 1], equal_nan=True)
    assert np.isnan(chosen.target_values[:, 1]).all()
    # In the manifest a missing value is null, in a shard as well.
    column = pq.read_table(tmp_path / "out" / SAMPLES_FILE)["targets"]
    assert column.type == pa.list_(pa.float32(), 2)
    assert sum(None in row for row in column.to_pylist()) == 2
    with tarfile.open(tmp_path / "out/train-000000.tar") as tar:
        member = next(name for name in tar.getnames() if name.endswith(".json"))
        stored = json.loads(tar.extractfile(member).read())  # type: ignore[union-attr]
    number = ord(member[0]) - ord("a")
    wanted = [None if np.isnan(of[number]) else of[number] for of in (DOSES, AGES)]
    assert list(stored["targets"].values()) == wanted
    # Other values are another data set, and not the resumed one.
    source.write_text(source.read_text().replace("44.25", "45"))
    with pytest.raises(UserError, match="numbers"):
        shard.run(settings(source, tmp_path / "out", **given))
    again = shard.run(settings(source, tmp_path / "other", **given))
    assert again.fingerprint != dataset.fingerprint == open_dataset(tmp_path / "out").fingerprint


def test_numbers_of_parquet(tmp_path: Path) -> None:
    images = [jpeg(number) for number in range(3)]
    table = {"image": images, "age": pa.array([1, None, 3], pa.int16()), "dose": [0.5, float("nan"), None]}
    (tmp_path / "raw").mkdir()
    pq.write_table(pa.table(table), tmp_path / "raw/train.parquet")
    found = listed(tmp_path / "raw", layout="parquet", target_columns=["age", "dose"])
    assert list(values(found).values()) == [[1, 0.5], [None, None], [3, None]]
    pq.write_table(pa.table({**table, "age": [[1], [2], [3]]}), tmp_path / "raw/train.parquet")
    with pytest.raises(UserError, match="age"):
        listed(tmp_path / "raw", layout="parquet", target_columns=["age"])


@pytest.mark.parametrize("text", ["old", "3;4", "1_0", "inf", "1e99", "0x1F", '"3,5"'])
def test_what_is_not_a_number_is_named_with_its_row_and_column(text: str, tmp_path: Path) -> None:
    source = write_list(tmp_path / "raw", [*ROWS, ("e.jpg", "1", text)])
    with pytest.raises(UserError, match=r"list\.csv, row 5.*'dose'"):
        listed(source, target_columns=["age", "dose"])


def test_a_column_of_numbers_named_label_makes_no_classes(tmp_path: Path) -> None:
    found = listed(write_list(tmp_path / "raw", header="path,label,dose"), target_columns=["label"])
    assert not found.is_labelled
    assert found.classes == []
    assert values(found)["c"] == [44.25]


def test_a_column_without_any_number_is_refused(tmp_path: Path) -> None:
    source = write_list(tmp_path / "raw", [(name, "", dose) for name, _, dose in ROWS])
    with pytest.raises(UserError, match="age"):
        list(describe_targets(listed(source, target_columns=["age", "dose"])))


def test_numbers_stay_with_a_sample_of_several_files(tmp_path: Path) -> None:
    """Each has a row, and they must agree."""
    source = write_folder({name: jpeg(0) for name in ("a_1.jpg", "a_2.jpg")}, tmp_path / "raw") / "list.csv"
    for other in ("0.5", "0.7", ""):
        source.write_text(f"path,dose\na_1.jpg,0.5\na_2.jpg,{other}\n")
        pattern = "(?P<sample>.*)_(?P<channel>.*)"
        config = settings(source, tmp_path / "out", channel_pattern=pattern, target_columns=["dose"])
        listing = list_source(source, config, tmp_path / "staging")
        if other == "0.5":
            found = join_channels(listing, config)
            assert values(found) == {"a": [0.5]}
            assert [image.targets for image in found.images(np.arange(1))] == [[0.5]]
        else:
            with pytest.raises(UserError, match="'a'"):
                join_channels(listing, config)
