"""Layouts that know their samples: every image, class and split of real files of each kind; one line for what is
wrong.
"""

import csv
import json
import pickle
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from raw_images import jpeg, write_folder, write_tar
from scipy.io import savemat

from data_tools.sources import Listing, Reader, list_source
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import ROWS, Shard, write_dataset
from pipeline.data.loading.decode import decode
from pipeline.settings.commands.data import ShardConfig

Sample = tuple[str, tuple[str, ...], bytes]


def listed(source: Path, **settings: object) -> Listing:
    config = ShardConfig(source=str(source), out="unused", **settings)
    config.check()
    return list_source(source, config, source.parent / "staging")


def samples(listing: Listing) -> dict[str, Sample]:
    """Key -> split, names of the classes, bytes."""
    splits = [listing.splits[split] for split in listing.table["split"].to_pylist()]
    found = {}
    with Reader() as reader:
        for image, split in zip(listing.images(np.arange(len(listing))), splits, strict=True):
            labels = tuple(listing.classes[label] for label in image.labels)
            found[image.key] = (split, labels, reader.read(*image.files[0]))
    assert len(found) == len(listing)
    return found


def refused(source: Path, **settings: object) -> str:
    with pytest.raises(UserError) as error:
        listed(source, **settings)
    return str(error.value)


# --- CIFAR ------------------------------------------------------------------------------------------------------------

NAMES = ["plane", "car", "bird"]
PIXELS = np.random.default_rng(0).integers(0, 256, (9, 3072), np.uint8)
LABELS = [2, 0, 1, 1, 2, 0, 2, 1, 0]


def python2_batch(labels: list[int], pixels: np.ndarray) -> bytes:
    """What cPickle of Python 2 and NumPy 1 write: byte strings (BINSTRING, T) for text and for the array's elements."""

    def text(content: bytes) -> bytes:
        return b"T" + len(content).to_bytes(4, "little") + content

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR(" + number(3) + text(b"|")
    dtype += b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(pixels.shape[0]) + number(pixels.shape[1]) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"tR("
    array += number(1) + shape + dtype + b"\x89" + text(pixels.tobytes()) + b"tb"
    entries = text(b"data") + array + text(b"labels") + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + entries + b"u."


def python3_batch(labels: list[int], pixels: np.ndarray) -> bytes:
    return pickle.dumps({"data": pixels, "labels": labels}, protocol=5)


def cifar10(at: Path, make: Callable[[list[int], np.ndarray], bytes]) -> dict[str, bytes]:
    return {
        "data_batch_1": make(LABELS[:4], PIXELS[:4]),
        "data_batch_2": make(LABELS[4:6], PIXELS[4:6]),
        "test_batch": make(LABELS[6:], PIXELS[6:]),
        "readme.html": b"...",
        "batches.meta": pickle.dumps({b"label_names": NAMES}, protocol=2),
    }


@pytest.mark.parametrize("batch", [python2_batch, python3_batch])
@pytest.mark.parametrize("form", ["folder", "tar.gz"])
def test_cifar10(batch: Callable[[list[int], np.ndarray], bytes], form: str, tmp_path: Path) -> None:
    files = cifar10(tmp_path, batch)
    inside = {f"cifar-10/{name}": data for name, data in files.items()}
    source = (
        write_folder(files, tmp_path / "raw") if form == "folder" else write_tar(inside, tmp_path / "c.tar.gz", "w:gz")
    )
    listing = listed(source)
    assert listing.classes == NAMES
    found = samples(listing)
    places = [("data_batch_1", i) for i in range(4)] + [("data_batch_2", i) for i in range(2)]
    places += [("test_batch", i) for i in range(3)]
    for (batch, number), label, pixels in zip(places, LABELS, PIXELS, strict=True):
        split, names, data = found[f"{NAMES[label]}/{batch}_{number:05d}"]
        assert (split, names) == ("test" if batch == "test_batch" else "train", (NAMES[label],))
        assert np.array_equal(decode(data), pixels.reshape(3, 32, 32).transpose(1, 2, 0))


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    batch = pickle.dumps({"data": PIXELS, "fine_labels": LABELS, "coarse_labels": [9] * 9}, protocol=4)
    meta = pickle.dumps({"fine_label_names": NAMES, "coarse_label_names": ["x"]})
    by_python = listed(write_folder({"train": batch, "test": batch, "meta": meta}, tmp_path / "python"))
    assert by_python.classes == NAMES
    assert samples(by_python)["bird/train_00000"][:2] == ("train", ("bird",))


class _Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('obeyed')",))


def test_a_pickle_that_asks_for_more_than_an_array_is_not_obeyed(tmp_path: Path) -> None:
    files = cifar10(tmp_path, python2_batch)
    files["data_batch_1"] = pickle.dumps({"data": _Evil(), "labels": [0]})
    assert "it calls builtins.exec, which is not allowed" in refused(write_folder(files, tmp_path / "raw"))


# --- ImageNet-1k ------------------------------------------------------------------------------------------------------

VAL = {f"ILSVRC2012_val_{number:08d}": wnid for number, wnid in ((1, "n02"), (2, "n01"), (3, "n02"))}


def imagenet1k(at: Path) -> Path:
    at.mkdir()
    inner = {}
    for wnid, seed in (("n01", 1), ("n02", 2)):
        files = {f"{wnid}_{number}.JPEG": jpeg(10 * seed + number) for number in (7, 12)}
        inner[f"{wnid}.tar"] = write_tar(files, at / "x.tar").read_bytes()
    (at / "x.tar").unlink()
    write_tar(inner, at / "ILSVRC2012_img_train.tar")
    write_tar({f"{stem}.JPEG": jpeg(i) for i, stem in enumerate(VAL)}, at / "ILSVRC2012_img_val.tar")
    return at


def _ground_truth(at: Path) -> Path:
    # As in the development kit: numbers in the order of the images, which are not in the order of the wnids.
    kinds = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("words", "O")]
    savemat(at / "meta.mat", {"synsets": np.array([(1, "n02", "b"), (2, "n01", "a"), (3, "n09", "c")], kinds)})
    (at / "ground_truth.txt").write_text("1\n2\n1\n")
    return at / "ground_truth.txt"


def _text(text: str) -> Callable[[Path], Path]:
    def make(at: Path) -> Path:
        (at / "labels.txt").write_text(text)
        return at / "labels.txt"

    return make


VAL_LABELS = {
    "development kit": _ground_truth,
    "map": _text("".join(f"{stem}.JPEG {wnid}\n" for stem, wnid in VAL.items())),
    "kaggle": _text("ImageId,PredictionString\n" + "".join(f"{s},{w} 85 1 499 272 \n" for s, w in VAL.items())),
    "column": _text("".join(f"{wnid}\n" for wnid in VAL.values())),
}


@pytest.mark.parametrize("form", VAL_LABELS)
def test_imagenet1k(form: str, tmp_path: Path) -> None:
    found = samples(listed(imagenet1k(tmp_path / "raw"), val_labels=str(VAL_LABELS[form](tmp_path))))
    val = {f"{wnid}/{stem}": ("val", (wnid,), jpeg(i)) for i, (stem, wnid) in enumerate(VAL.items())}
    train = {f"n0{c}/n0{c}_{n}": ("train", (f"n0{c}",), jpeg(10 * c + n)) for c in (1, 2) for n in (7, 12)}
    assert found == train | val


def test_imagenet1k_with_the_labels_of_real(tmp_path: Path) -> None:
    """Several labels, or none: such an image does not count. Classes are all that there are, in their order."""
    source, real, names = imagenet1k(tmp_path / "raw"), tmp_path / "real.json", tmp_path / "wnids.txt"
    names.write_text("n01\nn02\nn03\n")
    real.write_text("[[2, 0], [], [1]]\n")
    flat = {"splits": {"val": "ILSVRC2012_img_val.tar"}, "val_labels": str(real), "layout": "imagenet1k"}
    listing = listed(source, label_names=str(names), **flat)
    first, _, third = VAL
    # Sorted by class number, as every list of labels is.
    assert samples(listing) == {
        f"n03/{first}": ("val", ("n01", "n03"), jpeg(0)),
        f"n02/{third}": ("val", ("n02",), jpeg(2)),
    }
    assert listing.classes == ["n01", "n02", "n03"]
    assert any("left out 1 of 3 images" in note for note in listing.notes)
    assert "label_names=FILE names the wnids" in refused(source, **flat)


def test_bad_imagenet1k(tmp_path: Path) -> None:
    source = imagenet1k(tmp_path / "raw")
    assert "holds images without classes: val_labels=FILE" in refused(source)
    few = _text("ILSVRC2012_val_00000001 n02\n")(tmp_path)
    assert "names no class for 2 of 3 images, such as ILSVRC2012_val_00000002" in refused(source, val_labels=str(few))
    (tmp_path / "labels.txt").write_text("".join(f"{stem}.JPEG {number}\n" for number, stem in enumerate(VAL)))
    names = tmp_path / "wnids.txt"
    for text, said in (
        ("n01\nn02\n", "ILSVRC2012_val_00000003: label 2 is out of range"),
        ("n01\nn09\nn08\n", "lacks 'n02', a class of the train tar"),
    ):
        names.write_text(text)
        assert said in refused(source, val_labels=str(few), label_names=str(names))
    # Whoever chooses classes may do with fewer in the train tar.
    names.write_text("n01\nn02\nn09\n")
    listing = listed(source, val_labels=str(few), label_names=str(names), class_list=str(names))
    assert listing.classes == ["n01", "n02", "n09"]
    (source / "ILSVRC2012_img_val.tar").unlink()
    assert listed(source, layout="imagenet1k", splits={"train": "ILSVRC2012_img_train.tar"}).splits == ["train"]


def test_images_are_not_held_out_where_the_layout_has_a_val_split_itself(tmp_path: Path) -> None:
    """There were two splits 'val', whose shards had the same names."""
    source = imagenet1k(tmp_path / "raw")
    for name, value in (("val_share", 0.5), ("holdout_per_class", 1)):
        assert name in refused(source, **{name: value})
    train = {"train": "ILSVRC2012_img_train.tar"}
    assert listed(source, layout="imagenet1k", splits=train, val_share=0.5).splits == ["train"]


# --- Parquet ----------------------------------------------------------------------------------------------------------

IMAGES = [jpeg(i) for i in range(5)]


def hugging_face(path: Path, labels: pa.Array, names: list[str] | None = None, column: str = "image") -> Path:
    rows = [{"bytes": data, "path": f"{i}.jpg"} for i, data in enumerate(IMAGES)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({column: pa.array(rows, kind), "label": labels})
    if names:
        is_list = pa.types.is_list(labels.type)
        one = {"names": names, "_type": "ClassLabel"}
        features = {"image": {"_type": "Image"}, "label": {"feature": one, "_type": "Sequence"} if is_list else one}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)
    return path


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (pa.array([2, 0, 0, 1, 2]), NAMES, [("bird",), ("plane",), ("plane",), ("car",), ("bird",)]),
        (pa.array([10, 2, 0, 2, 2]), None, [("10",), ("2",), ("0",), ("2",), ("2",)]),
        (pa.array(["b", "a", "a", "b", "a"]), None, [("b",), ("a",), ("a",), ("b",), ("a",)]),
        (pa.array([[2, 0], [0], [], [1], [1, 1]]), NAMES, [("plane", "bird"), ("plane",), (), ("car",), ("car",)]),
    ],
)
def test_parquet(labels: pa.Array, names: list[str] | None, expected: list, tmp_path: Path) -> None:
    listing = listed(hugging_face(tmp_path / "data/train-0.parquet", labels, names))
    found = samples(listing)
    assert [found[f"train-0/{row:06d}"] for row in range(5)] == [
        ("train", names, data) for names, data in zip(expected, IMAGES, strict=True)
    ]
    if names or pa.types.is_integer(labels.type):
        assert listing.classes == (names or [str(number) for number in range(11)])


def test_a_table_of_images_and_of_the_paths_that_they_had(tmp_path: Path) -> None:
    """Alone it was a list, none of whose files is there; in a folder it was read."""
    path = hugging_face(tmp_path / "raw/a.parquet", pa.array(list("ababa")))
    images = pq.read_table(path).append_column("path", pa.array([f"old/{row}.jpg" for row in range(5)]))
    pq.write_table(images, path)
    assert samples(listed(path)) == samples(listed(path.parent))
    assert not any("'split'" in note for note in listed(path).notes)
    pq.write_table(images.append_column("split", pa.array(["train", "val"] * 2 + ["val"])), path)
    assert any("'split'" in note for note in listed(path).notes), "its images of val would be trained on without a word"


def test_parquet_splits_and_bare_binary(tmp_path: Path) -> None:
    hugging_face(tmp_path / "raw/data/train-0.parquet", pa.array(list("ababa")))
    pq.write_table(pa.table({"image": IMAGES, "label": list("aabbb")}), tmp_path / "raw/data/validation-0.parquet")
    said = refused(tmp_path / "raw")
    assert "look like several splits. If they are, say so: splits.train=data/train splits.val=data/val" in said
    listing = listed(tmp_path / "raw", splits={"train": "data/train", "val": "data/val"})
    found = samples(listing)
    assert found["data/validation-0/000001"] == ("val", ("a",), IMAGES[1])
    assert len(found) == 10
    # The second time nothing is unpacked: a whole file is taken as it is.
    staged = {path: path.stat().st_mtime_ns for path in (tmp_path / "staging").iterdir()}
    assert listed(tmp_path / "raw", splits=dict(zip(listing.splits, ("data/train", "data/val"), strict=True)))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "staging").iterdir()} == staged


def test_bad_parquet(tmp_path: Path) -> None:
    path = hugging_face(tmp_path / "a.parquet", pa.array([2, 0, 0, 3, 2]), NAMES)
    assert "row 3: label 3 is out of range" in refused(path)
    images = pa.array([{"bytes": IMAGES[0], "path": "0.jpg"}, None, {"bytes": None, "path": "cat/2.jpg"}])
    pq.write_table(pa.table({"image": images[:2], "label": ["a", "b"]}), path)
    assert listed(path).table["size"].to_pylist() == [len(IMAGES[0]), 0]
    pq.write_table(pa.table({"image": images, "label": ["a", "b", "c"]}), path)
    assert "row 2: 'image' names a file (cat/2.jpg) instead of holding it" in refused(path)


def test_text_and_bytes_in_views_and_dictionaries(tmp_path: Path) -> None:
    write_folder({f"{i}.jpg": data for i, data in enumerate(IMAGES)}, tmp_path)
    images, paths, views = pa.array(IMAGES, pa.binary_view()), [f"{i}.jpg" for i in range(5)], pa.string_view()
    for column in (pa.array(paths, views), pa.array(paths).dictionary_encode()):
        pq.write_table(pa.table({"path": column, "label": list("abaab")}), tmp_path / "list.parquet")
        assert [data for *_, data in samples(listed(tmp_path / "list.parquet")).values()] == IMAGES
    pq.write_table(pa.table({"image": images, "label": list("abaab")}), tmp_path / "images.parquet")
    assert [data for *_, data in samples(listed(tmp_path / "images.parquet")).values()] == IMAGES


@pytest.mark.parametrize("others", [["car", "plane", "bird"], NAMES[:2], None])
def test_parquet_files_whose_numbers_are_other_classes_are_refused(others: list[str] | None, tmp_path: Path) -> None:
    """The names of the first file would mislabel the images of the second."""
    folder = hugging_face(tmp_path / "raw/a.parquet", pa.array([2, 0, 0, 1, 2]), NAMES).parent
    hugging_face(folder / "b.parquet", pa.array([0, 1, 0, 1, 0]), others)
    assert "b.parquet, by its metadata `huggingface`" in refused(folder)
    assert "label_names=FILE" in refused(folder, splits={"train": "a", "val": "b"})
    names = _text("\n".join(NAMES))(tmp_path)
    assert samples(listed(folder, label_names=str(names)))["b/000001"][1] == ("car",)


# --- Lists ------------------------------------------------------------------------------------------------------------

FILES = {"cat/1.jpg": jpeg(1), "dog/2.jpg": jpeg(2), "3.png": jpeg(3)}


def table(path: Path, rows: list[tuple[str, object]], header: tuple[str, str] = ("path", "label")) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_list(ending: str, tmp_path: Path) -> None:
    write_folder(FILES, tmp_path)
    rows = [("cat/1.jpg", "cat; pet"), ("./dog/2.jpg", "dog"), (str(tmp_path / "3.png"), "")]
    if ending == "parquet":
        labels = [["cat", "pet"], ["dog"], []]
        pq.write_table(pa.table({"path": [path for path, _ in rows], "label": labels}), tmp_path / "list.parquet")
    else:
        table(tmp_path / f"list.{ending}", rows)
    listing = listed(tmp_path / f"list.{ending}")
    assert samples(listing) == {
        "cat/1": ("train", ("cat", "pet"), FILES["cat/1.jpg"]),
        "dog/2": ("train", ("dog",), FILES["dog/2.jpg"]),
        str(tmp_path / "3").removeprefix("/").replace(".", "_"): ("train", (), FILES["3.png"]),
    }
    assert listing.notes == ["1 of 3 images without a label, of which no class is learnt"]


def test_lists_of_splits_and_numbers(tmp_path: Path) -> None:
    write_folder(FILES, tmp_path / "raw/lists")
    table(tmp_path / "raw/lists/a.csv", [("cat/1.jpg", 10), ("dog/2.jpg", 2)])
    table(tmp_path / "raw/lists/b.csv", [("3.png", 0)])
    listing = listed(tmp_path / "raw", layout="list", splits={"train": "lists/a.csv", "test": "lists/b.csv"})
    found = samples(listing)
    assert found["cat/1"] == ("train", ("10",), FILES["cat/1.jpg"])
    assert found["3"] == ("test", ("0",), FILES["3.png"])
    assert listing.classes == [str(number) for number in range(11)]
    # Left out without a word, the empty line shifted the names after it.
    assert "line 2 " in refused(tmp_path / "raw/lists/b.csv", label_names=str(_text("plane\n\ncar\n")(tmp_path)))
    assert listed(tmp_path / "raw/lists/b.csv", label_names=str(_text("plane\ncar\n\n")(tmp_path))).classes == NAMES[:2]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_column_of_splits(ending: str, tmp_path: Path) -> None:
    def split_list(values: list[str], name: str = "split") -> Path:
        columns = {"path": [f"{row}.jpg" for row in range(5)], "label": list("abaab"), name: values}
        path = tmp_path / f"list.{ending}"
        pq.write_table(pa.table(columns), path) if ending == "parquet" else pacsv.write_csv(pa.table(columns), path)
        return path

    def splits_of(listing: Listing) -> dict[str, str]:
        of_keys = zip(listing.table["key"].to_pylist(), listing.table["split"].to_pylist(), strict=True)
        return {key: listing.splits[split] for key, split in of_keys}

    path = split_list(["train", "val", "train", "test", "nan"])
    listing = listed(path)
    assert splits_of(listing) == {"0": "train", "1": "val", "2": "train", "3": "test"}
    assert any("left out 1 row" in note for note in listing.notes)
    chosen = listed(path, splits={"train": "train", "dev": "val"})
    assert splits_of(chosen) == {"0": "train", "1": "dev", "2": "train"}
    assert set(splits_of(listed(path, split_column="")).values()) == {"train"}
    assert listed(path, label_column="split").splits == ["train"]
    assert splits_of(listed(split_list(["0"] * 2 + ["1"] * 3, "fold"), split_column="fold"))["4"] == "1"


@pytest.mark.parametrize(
    ("labels", "expected", "num_classes"),
    [
        (["2", " ", "10; 07"], [("2",), (), ("7", "10")], 11),
        (["02", "", "10;07"], [("02",), (), ("07", "10")], 3),
        (["2.0", "nan", "10.0;1"], [("2",), (), ("1", "10")], 11),
        (["none", "<NA>", "dog"], [("none",), (), ("dog",)], 2),
    ],
    ids=["blank", "codes", "of pandas", "a class called none"],
)
def test_numbers_in_the_text_of_a_list(labels: list[str], expected: list, num_classes: int, tmp_path: Path) -> None:
    listing = listed(table(tmp_path / "list.csv", [(f"{row}.jpg", label) for row, label in enumerate(labels)]))
    found = [tuple(listing.classes[label] for label in row) for row in listing.table["labels"].to_pylist()]
    assert found == expected
    assert len(listing.classes) == num_classes
    assert listing.classes == sorted(listing.classes, key=lambda name: int(name) if name.isdecimal() else 99)


def test_a_list_whose_labels_are_not_filled_in_is_refused(tmp_path: Path) -> None:
    """launch/choose.py writes such a list; it became a data set without labels, and training said so an hour later."""
    write_folder(FILES, tmp_path)
    path = table(tmp_path / "choice.csv", [(name, "") for name in FILES])
    assert f"{path}: " in (said := refused(path))
    assert "label_column=" in said
    assert not listed(path, label_column="").is_labelled


def test_bad_list(tmp_path: Path) -> None:
    path = table(tmp_path / "list.csv", [("gone.jpg", "cat")])
    # A missing file is the job's to find, count and name.
    assert listed(path).table["size"].to_pylist() == [0]
    table(path, [("a.jpg", "cat"), ("a.png", "cat")])
    assert "a.jpg and a.png have the same key, 'a'" in refused(path)
    assert "splits.train = " in refused(tmp_path, layout="list", splits={"train": "nowhere.csv"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "path,label\n1.jpg,cat\nhttps://a.org/2.jpg,dog\n",
            "https://a.org/2.jpg: https:// is not supported",
        ),
        (
            'path,label\n1.jpg,"cat\n2.jpg,dog\n',
            "row 1: 'cat\\n2.jpg,dog\\n' has a line break",
        ),
        ("path;label\n1.jpg;cat\n", "It has: path;label."),
        ("1.jpg,cat\n2.jpg,dog\n", "It has: 1.jpg, cat."),
        ("path,label\n1.jpg,caf\xe9\n", "UTF-8"),
    ],
    ids=["URL", "quote", "semicolons", "no header", "latin-1"],
)
def test_slips_in_a_list(text: str, said: str, tmp_path: Path) -> None:
    (path := tmp_path / "list.csv").write_text(text, encoding="latin-1")
    assert said in refused(path)


# --- webdataset -------------------------------------------------------------------------------------------------------

SHARD = {
    "a/1.jpg": jpeg(1),
    "a/1.cls": b"3\n",
    "a/2.x.json": b"[]",
    "a/2.PNG": jpeg(2),
    "a/2.json": b'{"labels": [0, 10]}',
    "v1.5/3.jpeg": jpeg(3),
    "v1.5/3.json": b'{"label": 4, "caption": "x"}',
    "note.txt": b"no image",
}


def test_webdataset(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    write_tar(SHARD, tmp_path / "raw/train-0.tar")
    write_tar({"9.jpg": jpeg(9), "9.cls": b"1", "8.jpg": jpeg(8)}, tmp_path / "raw/val-0.tar")
    assert "say so: splits.train=train splits.val=val" in refused(tmp_path / "raw")
    listing = listed(tmp_path / "raw", splits={"train": "train", "val": "val"})
    assert samples(listing) == {
        "a/1": ("train", ("3",), jpeg(1)),
        "a/2": ("train", ("0", "10"), jpeg(2)),
        "v1_5/3": ("train", ("4",), jpeg(3)),
        "9": ("val", ("1",), jpeg(9)),
    }
    assert listing.classes == [str(number) for number in range(11)]
    assert listing.skipped == [("", "val-0.tar: 8.jpg", "no .cls and no .json")]


def test_tars_of_data_sets_have_the_classes_of_these(tmp_path: Path) -> None:
    """Label 0 of two data sets is one class only if both say so; a tar alone has the classes of the data set beside it,
    too.
    """
    for name, classes in (("cars", ["audi", "bmw"]), ("pets", ["cat", "dog"]), ("more_pets", ["cat", "dog"])):
        (tmp_path / "raw" / name).mkdir(parents=True)
        write_tar({f"{name}.jpg": jpeg(1), f"{name}.cls": b"1"}, tmp_path / "raw" / name / f"{name}.tar")
        write_dataset(
            tmp_path / "raw" / name, [Shard("x.tar", "train", 0, 0, "")], [ROWS.empty_table()], classes, {}, {}
        )
    said = f"The tars in {tmp_path}/raw/more_pets: its classes are cat, dog, but audi, bmw in {tmp_path}/raw/cars"
    assert said in refused(tmp_path / "raw", layout="webdataset")
    shutil.rmtree(tmp_path / "raw/cars")
    listing = listed(tmp_path / "raw", layout="webdataset")
    assert (listing.classes, len(listing)) == (["cat", "dog"], 2)
    pets = listed(tmp_path / "raw/pets/pets.tar", layout="webdataset")
    assert pets.classes == ["cat", "dog"]


def test_bad_webdataset(tmp_path: Path) -> None:
    names = _text("\n".join(NAMES))(tmp_path)
    path = write_tar(SHARD, tmp_path / "a.tar")
    assert "a.tar: a/1.jpg: label 3 is out of range" in refused(path, label_names=str(names))
    path.write_bytes(path.read_bytes().rstrip(b"\0")[:-200])
    assert "a.tar is damaged" in refused(path)
    (tmp_path / "raw").mkdir()
    packed = write_tar(SHARD, tmp_path / "raw/a.tar.gz", "w:gz")
    assert "raw: a.tar.gz " in refused(packed.parent, layout="webdataset")


def test_auto_tells_class_tars_from_shards(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    with tarfile.open(write_tar({"1.jpg": jpeg(1)}, tmp_path / "raw/n01.tar")):
        write_tar({"2.jpg": jpeg(2)}, tmp_path / "raw/n02.tar")
    assert listed(tmp_path / "raw").classes == ["n01", "n02"]
