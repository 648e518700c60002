"""The plan of shards: which samples each holds, in the file from which tasks read them."""

from pathlib import Path

import numpy as np
import pytest
from raw_images import jpeg, write_folder

from data_tools.sharding import plan
from data_tools.sharding.plan import make_plan, read_images
from data_tools.sharding.selection import apply_rules, hash_keys, with_groups
from data_tools.sources import Listing, list_source, spill
from data_tools.sources import listing as listing_module
from data_tools.sources.split_files import PARTS
from pipeline.settings.commands.data import ShardConfig

PER_SHARD = 7


@pytest.fixture
def config(tmp_path: Path) -> ShardConfig:
    images = {f"{split}/{name}/{i}.jpg": jpeg(0) for split in ("train", "val") for name in "ab" for i in range(25)}
    images["train/few/0.jpg"] = jpeg(0)
    source = write_folder(images, tmp_path / "raw")
    (tmp_path / "out" / PARTS).mkdir(parents=True)
    splits = {"train": "train", "val": "val"}
    found = {"group_pattern": "([0-9])$", "min_images": 2}
    return ShardConfig(
        source=str(source), out=str(tmp_path / "out"), splits=splits, samples_per_shard=PER_SHARD, **found
    )


def listed(config: ShardConfig, staging: Path) -> Listing:
    """The listing with all that is changed in parts: classes, groups."""
    chosen = apply_rules(list_source(Path(config.source), config, staging), config)
    return with_groups(chosen, config.group_pattern)


def by_sorting(listing: Listing, config: ShardConfig) -> list[tuple[str, list]]:
    """(name, samples) of each shard, by one sort of all rows in memory."""
    mix, of_split = hash_keys(listing.table["key"].to_pylist(), f"{config.seed}:"), listing.table["split"].to_numpy()
    shards = []
    for number, split in enumerate(listing.splits):
        rows = np.flatnonzero(of_split == number)
        rows = rows[np.argsort(mix[rows], kind="stable")]
        for shard, first in enumerate(range(0, len(rows), PER_SHARD)):
            shards.append((f"{split}-{shard:06d}.tar", listing.images(rows[first : first + PER_SHARD])))
    return shards


@pytest.mark.parametrize("rows_in_memory", [1000, 16, 1])
def test_parts_on_disk_give_the_listing_and_the_order_of_one_sort(
    rows_in_memory: int, config: ShardConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = listed(config, tmp_path / "staging")
    monkeypatch.setattr(spill, "ROWS_IN_MEMORY", rows_in_memory)
    monkeypatch.setattr(listing_module, "_BATCH", rows_in_memory)
    num_files = len(list(Path("/proc/self/fd").iterdir()))
    listing = listed(config, tmp_path / "staging")
    assert len(list(Path("/proc/self/fd").iterdir())) < num_files + 5, "one for each part of the listing"
    assert len(listing) == 100
    assert listing.table.equals(in_memory.table)
    out = Path(config.out)
    shards = make_plan(listing, config, out)
    found = [(shard.name, read_images(out, number, listing.root)) for number, shard in enumerate(shards)]
    assert found == by_sorting(in_memory, config)
    assert [shard.samples for shard in shards] == [len(images) for _, images in found]
    assert [path.name for path in (out / PARTS).iterdir()] == [plan.PLANNED]
