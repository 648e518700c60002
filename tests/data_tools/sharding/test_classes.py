"""Class rules: chosen, ordered, large enough, held out; and readable names."""

from pathlib import Path

import numpy as np
import pytest
from raw_images import jpeg, settings, write_folder, write_tar

from data_tools.sharding.selection import apply_rules, hold_out, odd_classes, readable_names, refuse_untrained
from data_tools.sources import Listing, list_source
from data_tools.sources.listing import label_pairs
from pipeline.base.errors import UserError

SIZES = {"ant": 1, "bee": 3, "cat": 5, "dog": 6}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {f"{name}/{name}_{i}.jpg": b"x" for name, count in SIZES.items() for i in range(count)}
    return write_folder(files, tmp_path_factory.mktemp("zoo") / "raw")


def ruled(source: Path, **others: object) -> Listing:
    config = settings(source, source.parent / "unused", **others)
    listing = apply_rules(list_source(source, config, source.parent / "staging"), config)
    refuse_untrained(listing, config)
    return hold_out(listing, config)


def counts(listing: Listing, split: str = "train") -> dict[str, int]:
    rows, labels = label_pairs(listing.table)
    in_split = listing.table["split"].to_numpy()[rows] == listing.splits.index(split)
    return dict(
        zip(listing.classes, np.bincount(labels[in_split], minlength=len(listing.classes)).tolist(), strict=True)
    )


def text(at: Path, content: str) -> str:
    (at / "file.txt").write_text(content)
    return str(at / "file.txt")


def refused(source: Path, **others: object) -> str:
    with pytest.raises(UserError) as error:
        ruled(source, **others)
    return str(error.value)


def test_classes_with_more_than_so_many_images_stay(zoo: Path) -> None:
    listing = ruled(zoo, min_images=3)
    assert counts(listing) == {"cat": 5, "dog": 6}
    assert "min_images = 6" in refused(zoo, min_images=6)


def test_the_21k_p_selection_holds_out_the_first_of_each_class(zoo: Path) -> None:
    listing = ruled(zoo, min_images=3, holdout_per_class=2)
    assert counts(listing) == {"cat": 3, "dog": 4}
    assert counts(listing, "val") == {"cat": 2, "dog": 2}
    val = listing.table["split"].to_numpy() == listing.splits.index("val")
    keys = np.array(listing.table["key"].to_pylist(), object)[val]
    assert keys.tolist() == ["cat/cat_0", "cat/cat_1", "dog/dog_0", "dog/dog_1"]
    assert "min_images=3" in refused(zoo, holdout_per_class=3)


def test_an_image_of_two_classes_is_held_out_once(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{i}.jpg,a;b\n" for i in range(4)) + "4.jpg,b\n")
    listing = ruled(tmp_path / "list.csv", holdout_per_class=2)
    assert counts(listing, "val") == {"a": 2, "b": 2}
    assert counts(listing) == {"a": 2, "b": 3}
    assert listing.table["labels"].to_pylist() == [[0, 1]] * 4 + [[1]]


def test_only_the_classes_of_the_list_in_its_order(zoo: Path, tmp_path: Path) -> None:
    listing = ruled(zoo, class_list=text(tmp_path, "dog\n\n bee \n"))
    assert listing.classes == ["dog", "bee"]
    assert counts(listing) == {"dog": 6, "bee": 3}
    assert "'dgo'" in refused(zoo, class_list=text(tmp_path, "dgo"))


def test_a_sample_without_a_label_loses_none(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,label\n1.jpg,cat;dog\n2.jpg,ant\n3.jpg,\n")
    assert ruled(tmp_path / "list.csv", class_list=text(tmp_path, "cat")).table["labels"].to_pylist() == [[0], []]


def test_classes_with_few_images_are_named(zoo: Path) -> None:
    assert odd_classes(ruled(zoo)) == ["1 class with at most one image in train: ant"]


def test_readable_names(tmp_path: Path) -> None:
    path = text(tmp_path, "n02 tench, Tinca tinca\nn01\tgold fish\n")
    assert readable_names(["n01", "n02", "n03"], path) == ["gold fish", "tench, Tinca tinca", "n03"]
    assert readable_names(["n01"], "") is None
    with pytest.raises(UserError, match="synset_names"):
        readable_names(["n09"], path)


def test_names_and_rules_are_in_the_data_set(ray_cluster: int, tmp_path: Path) -> None:
    from data_tools.sharding import shard

    files = {f"n0{c}/n0{c}_{i}.jpg": jpeg(10 * c + i) for c in (1, 2, 3) for i in range(4 - c)}
    source = write_folder(files, tmp_path / "raw")
    others = {"min_images": 1, "holdout_per_class": 1, "synset_names": text(tmp_path, "n01 cat\nn02 dog\n")}
    dataset = shard.run(settings(source, tmp_path / "out", **others))
    assert (dataset.classes, dataset.class_names) == (["n01", "n02"], ["cat", "dog"])
    assert dataset.info["samples"] == {"train": 3, "val": 2}
    assert dataset.info["settings"]["min_images"] == 1
    for changed in ({"min_images": 0, "holdout_per_class": 0}, {"holdout_per_class": 2, "min_images": 2}):
        with pytest.raises(UserError, match="was made with holdout_per_class = 1, not"):
            shard.run(settings(source, tmp_path / "out", **{**others, **changed}))


def test_classes_that_training_does_not_have_are_refused_in_every_layout(tmp_path: Path) -> None:
    """Validation images in a folder `images` would be 10,000 images of a new class; labels from 1 are off by one."""
    files = {"train/cat/1.jpg": b"x", "train/dog/1.jpg": b"x", "val/images/1.jpg": b"x", "val/cat/2.jpg": b"x"}
    splits = {"train": "train", "val": "val"}
    said = "'train' has no image of 1 of the 2 classes of 'val', such as"
    for source in (write_folder(files, tmp_path / "raw"), write_tar(files, tmp_path / "raw.tar")):
        assert f"{said} 'images'" in refused(source, splits=splits)
    (tmp_path / "train.csv").write_text("path,label\na.jpg,0\nb.jpg,1\n")
    (tmp_path / "val.csv").write_text("path,label\nc.jpg,1\nd.jpg,2\n")
    lists = {"train": "train.csv", "val": "val.csv"}
    assert f"{said} '2'" in refused(tmp_path, layout="list", splits=lists)
    # Whoever chooses classes says that they are meant; a split of its own is nobody's evaluation.
    names = text(tmp_path, "cat\ndog\nimages\n")
    assert ruled(tmp_path / "raw", splits=splits, class_list=names).classes == ["cat", "dog", "images"]
    assert ruled(tmp_path / "raw", splits={"val": "val"}).classes == ["cat", "images"]
