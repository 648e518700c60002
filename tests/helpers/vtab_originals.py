"""The 16 source data sets of VTAB-1k, tiny, in the byte layouts that their authors publish.

Written from the layouts, with other code than the readers'. A `Truth` says what must come out: for every task, and
every sample of every pool, the label, and the image.
"""

import gzip
import io
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
import simplejpeg
from google_crc32c import value as crc32c
from PIL import Image
from raw_images import encoded, write_folder, write_tar, write_zip

from data_tools.vtab import split
from pipeline.settings.commands.data import VtabPrepareConfig

# Samples are enough for splits of these sizes: the tests make the real ones, 800 and 200, smaller.
NUM_TRAIN, NUM_VAL = 20, 5


@contextmanager
def small_splits() -> Iterator[None]:
    """A fortieth of 800 and 200 images: the 16 originals can be small then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "NUM_TRAIN", NUM_TRAIN)
        patch.setattr(split, "NUM_VAL", NUM_VAL)
        yield


def settings(out: Path, **others: object) -> VtabPrepareConfig:
    return VtabPrepareConfig(out=str(out), published=False, num_tasks=2, **others)  # type: ignore[arg-type]


@dataclass
class Truth:
    """labels: task -> pool -> key -> label. images: data set -> (pool, key) -> file as it is, or pixels."""

    labels: dict[str, dict[str, dict[str, int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(dict)))
    images: dict[str, dict[tuple[str, str], bytes | np.ndarray]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, dataset: str, pool: str, key: str, image: bytes | np.ndarray, labels: dict[str, int]) -> None:
        self.images[dataset][pool, key] = image
        for task, label in labels.items():
            self.labels[task][pool][key] = label


def jpeg(number: int) -> bytes:
    """A JPEG of its own for each number."""
    pixels = np.full((8, 8, 3), [[number % 251, number // 251 % 251, 100]], np.uint8)
    pixels[:4, :4] = number * 7 % 256
    return simplejpeg.encode_jpeg(pixels, quality=90)


def turned(jpeg: bytes) -> bytes:
    """The JPEG with EXIF that says: turn by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    segment = exif.tobytes()
    return jpeg[:2] + b"\xff\xe1" + (2 + len(segment)).to_bytes(2, "big") + segment + jpeg[2:]


def pixels(number: int, side: int, channels: int) -> np.ndarray:
    shape = (side, side, channels) if channels > 1 else (side, side)
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def caltech101(root: Path, truth: Truth) -> None:
    # Folders in the case that they have there; 30 images of each class are to train on, the other is a test image.
    names = ["BACKGROUND_Google", "Faces_easy", "accordion", "zebra", "Motorbikes"]
    files: dict[str, bytes] = {}
    for number, name in enumerate(names):
        label = sorted(names, key=str.lower).index(name)
        for image in range(1, 37):
            key = f"{name}/image_{image:04d}.jpg"
            files[key] = jpeg(100 * number + image)
            pool = "train" if image <= 30 else "test"
            truth.add("caltech101", pool, key, files[key], {"caltech101": label})
    tar = io.BytesIO()
    inner = root / "inner.tar.gz"
    write_tar(
        {f"101_ObjectCategories/{key}": data for key, data in files.items()} | {"101_ObjectCategories/._x": b"?"},
        inner,
        "w:gz",
    )
    tar.write(inner.read_bytes())
    inner.unlink()
    write_zip(
        {
            "caltech-101/101_ObjectCategories.tar.gz": tar.getvalue(),
            "__MACOSX/caltech-101/._101_ObjectCategories.tar.gz": b"resource fork",
            "caltech-101/Annotations.tar": b"not read",
        },
        root / "caltech-101.zip",
    )
    # The official 30 of each class.
    (root / "train.txt").write_text("".join(f"{key}\n" for key in truth.labels["caltech101"]["train"]))


def cifar100(root: Path, truth: Truth) -> None:
    files = {"cifar-100-binary/fine_label_names.txt": "".join(f"fine{n}\n" for n in range(100)).encode()}
    files["cifar-100-binary/coarse_label_names.txt"] = b"a\nb\n"
    for pool, count in (("train", 120), ("test", 15)):
        records = b""
        for number in range(count):
            image, label = pixels(number, 32, 3), (number * 37) % 100
            records += bytes([number % 20, label]) + image.transpose(2, 0, 1).tobytes()
            truth.add("cifar100", pool, str(number), image, {"cifar100": label})
        files[f"cifar-100-binary/{pool}.bin"] = records
    write_tar(files, root / "cifar-100-binary.tar.gz", "w:gz")


def dtd(root: Path, truth: Truth) -> None:
    files: dict[str, bytes] = {}
    classes = ["banded", "blotchy", "zigzagged"]
    for pool, part, count in (("train", "train1", 60), ("validation", "val1", 30), ("test", "test1", 12)):
        keys = [f"{classes[n % 3]}/{classes[n % 3]}_{part}{n:04d}.jpg" for n in range(count)]
        files[f"dtd/labels/{part}.txt"] = "".join(f"{key}\n" for key in keys).encode()
        for number, key in enumerate(keys):
            files[f"dtd/images/{key}"] = jpeg(1000 + number)
            truth.add("dtd", pool, key, files[f"dtd/images/{key}"], {"dtd": number % 3})
    write_tar(files, root / "dtd-r1.0.1.tar.gz")  # Plain, in spite of its name.


def flowers102(root: Path, truth: Truth) -> None:
    count = 110
    numbers = np.random.default_rng(0).permutation(count) + 1
    labels = np.arange(count) * 17 % 102 + 1  # Of image 1, 2, ...; from 1.
    sets = {"train": numbers[:50], "validation": numbers[50:80], "test": numbers[80:]}
    for pool, ids in sets.items():
        for number in ids.tolist():
            key, label = f"image_{number:05d}.jpg", int(labels[number - 1]) - 1
            truth.add("flowers102", pool, key, jpeg(number), {"flowers102": label})
    write_tar({f"jpg/image_{n:05d}.jpg": jpeg(n) for n in range(1, count + 1)}, root / "102flowers.tgz", "w:gz")
    scipy.io.savemat(root / "imagelabels.mat", {"labels": labels[None].astype(np.uint8)}, do_compression=True)
    parts = {"trnid": sets["train"], "valid": sets["validation"], "tstid": sets["test"]}
    scipy.io.savemat(root / "setid.mat", {name: ids[None].astype(np.uint16) for name, ids in parts.items()})


def pets(root: Path, truth: Truth) -> None:
    breeds = ["Abyssinian", "american_pit_bull_terrier", "yorkshire_terrier"]
    annotations, images = {}, {}
    for pool, part, count in (("train", "trainval", 75), ("test", "test", 12)):
        lines = []
        for number in range(count):
            name, label = f"{breeds[number % 3]}_{number + (500 if pool == 'test' else 0)}", number % 3
            lines.append(f"{name} {label + 1} 1 1\n")
            images[f"images/{name}.jpg"] = turned(jpeg(2000 + number))
            key = f"{name}.jpg"
            data = images[f"images/{name}.jpg"]
            truth.add("pets", pool, key, data, {"pets": label})
        annotations[f"annotations/{part}.txt"] = "".join(lines).encode()
        annotations[f"annotations/._{part}.txt"] = b"resource fork"
    annotations["annotations/list.txt"] = b"#Image CLASS-ID SPECIES BREED ID\n"
    images["images/Abyssinian_100.mat"] = b"stray"
    write_tar(images, root / "images.tar.gz", "w:gz")
    write_tar(annotations, root / "annotations.tar.gz", "w:gz")


def sun397(root: Path, truth: Truth) -> None:
    classes = ["/a/abbey", "/c/car_interior/backseat", "/z/zoo"]
    files: dict[str, bytes] = {}
    lists: dict[str, list[str]] = {}
    for pool, part, count in (("train", "tr", 50), ("validation", "va", 20), ("test", "te", 10)):
        lists[part] = []
        for number in range(count):
            # Of four classes: the third has only the image that nobody can read.
            key, label = f"{classes[number % 3]}/sun_{part}{number:04d}.jpg", (0, 1, 3)[number % 3]
            # Some files called .jpg are something else; some are larger than 120,000 pixels.
            side = 400 if number == 1 else 8
            image = Image.fromarray(np.full((side, side, 3), number, np.uint8))
            data = encoded(image, ("JPEG", "PNG", "BMP", "GIF")[number % 4])
            files[f"SUN397{key}"] = data
            lists[part].append(key)
            truth.add("sun397", pool, key, data, {"sun397": label})
    lists["tr"].append("/t/track/outdoor/sun_aophkoiosslinihb.jpg")
    files["SUN397/t/track/outdoor/sun_aophkoiosslinihb.jpg"] = b"no image"
    for part, keys in lists.items():
        (root / f"sun397_tfds_{part}.txt").write_text("\n".join(keys) + "\n")
    write_tar(files, root / "SUN397.tar.gz", "w:gz")


def svhn(root: Path, truth: Truth) -> None:
    for pool, count in (("train", 120), ("test", 15)):
        digits = np.arange(count) % 10 + 1  # 10 stands for 0.
        images = np.stack([pixels(3000 + number, 32, 3) for number in range(count)], axis=-1)
        scipy.io.savemat(
            root / f"{pool}_32x32.mat", {"X": images, "y": digits[:, None].astype(np.uint8)}, do_compression=True
        )
        for number in range(count):
            truth.add("svhn", pool, str(number), images[..., number], {"svhn": int(digits[number]) % 10})


def patch_camelyon(root: Path, truth: Truth) -> None:
    for pool, part, count in (("train", "train", 60), ("validation", "valid", 30), ("test", "test", 12)):
        images = np.stack([pixels(4000 + number, 96, 3) for number in range(count)])
        tumour = (np.arange(count) * 3 // 2 % 2).astype(np.uint8).reshape(-1, 1, 1, 1)
        for letter, array in (("x", images), ("y", tumour)):
            content = io.BytesIO()
            with h5py.File(content, "w") as file:
                file.create_dataset(letter, data=array, chunks=(8, *array.shape[1:]) if letter == "x" else None)
            name = f"camelyonpatch_level_2_split_{part}_{letter}.h5.gz"
            (root / name).write_bytes(gzip.compress(content.getvalue(), 1))
        for number in range(count):
            labels = {"patch_camelyon": int(tumour[number].item())}
            truth.add("patch_camelyon", pool, f"{part}_{number}", images[number], labels)


def _class_folders(
    root: Path, truth: Truth, dataset: str, top: str, names: list[str], pattern: str
) -> dict[str, bytes]:
    files = {}
    for label, name in enumerate(names):
        for number in range(1, 41):
            file = pattern.format(name=name, number=number)
            data = files[f"{top}/{name}/{file}"] = jpeg(5000 + 100 * label + number)
            truth.add(dataset, "train", f"{name}_{file}", data, {dataset: label})
    return files


def eurosat(root: Path, truth: Truth) -> None:
    names = ["AnnualCrop", "Forest", "SeaLake"]
    write_zip(
        _class_folders(root, truth, "eurosat", "EuroSAT_RGB", names, "{name}_{number}.jpg"), root / "EuroSAT_RGB.zip"
    )


def resisc45(root: Path, truth: Truth) -> None:
    names = ["airplane", "baseball_diamond", "wetland"]
    write_folder(_class_folders(root, truth, "resisc45", "NWPU-RESISC45", names, "{name}_{number:03d}.jpg"), root)


def retinopathy(root: Path, truth: Truth) -> None:
    rows: dict[str, list[str]] = {"train": [], "test": []}
    # An eye: a disc on black.
    y, x = np.mgrid[:52, :54]
    eye = (((y - 26) ** 2 + (x - 27) ** 2 < 25**2)[..., None] * [200, 80, 40]).astype(np.uint8)
    for pool, part, count in (("train", "train", 25), ("validation", "test", 8), ("test", "test", 4)):
        for number in range(count):
            key, label = f"{number}_{'left' if pool == 'validation' else 'right'}", number % 5
            data = simplejpeg.encode_jpeg(np.maximum(eye, number), quality=90)
            (root / part).mkdir(exist_ok=True)
            (root / part / f"{key}.jpeg").write_bytes(data)
            usage = {"validation": ",Public", "test": ",Private"}.get(pool, "")
            rows[part].append(f"{key},{label}{usage}")
            truth.add("retinopathy", pool, key, data, {"retinopathy": label})
    (root / "trainLabels.csv").write_text("\r\n".join(["image,level", *rows["train"]]) + "\r\n")
    (root / "retinopathy_solution.csv").write_text("\n".join(["image,level,Usage", *rows["test"]]) + "\n")


def clevr(root: Path, truth: Truth) -> None:
    files = {}
    for pool, part, count in (("train", "train", 120), ("validation", "val", 12)):
        scenes = []
        for number in range(count):
            name = f"CLEVR_{part}_{number:06d}.png"
            depths = np.random.default_rng(number).uniform(7, 16, 3 + number % 8).round(6)
            nearest = float(depths.min())
            # The bins as the protocol writes them: (0, 8], (8, 8.5], ...
            bins = [(0, 8), (8, 8.5), (8.5, 9), (9, 9.5), (9.5, 10), (10, 100)]
            distance = next(label for label, (low, high) in enumerate(bins) if low < nearest <= high)
            objects = [
                {"color": "red", "shape": "cube", "pixel_coords": [12, 30, depth], "3d_coords": [0.0, 1.0, 2.0]}
                for depth in depths.tolist()
            ]
            scenes.append({"image_index": number, "objects": objects, "image_filename": name, "split": part})
            data = files[f"CLEVR_v1.0/images/{part}/{name}"] = encoded(
                Image.fromarray(pixels(number, 8, 4)[:6], "RGBA"), "PNG"
            )
            truth.add("clevr", pool, name, data, {"clevr_count": len(objects) - 3, "clevr_distance": distance})
        about = {"info": {"split": part, "version": "1.0"}, "scenes": scenes}
        files[f"CLEVR_v1.0/scenes/CLEVR_{part}_scenes.json"] = json.dumps(about).encode()
    files["CLEVR_v1.0/images/test/CLEVR_test_000000.png"] = b"not read"
    write_zip(files, root / "CLEVR_v1.0.zip")


def dmlab(root: Path, truth: Truth) -> None:
    files = {}
    for pool, count in (("train", 60), ("validation", 30), ("test", 12)):
        records: list[list[bytes]] = [[], []]
        for number in range(count):
            key, label, data = f"{pool}_frame{number}", number % 6, jpeg(6000 + number)
            records[number % 2].append(example({"image": data, "filename": key.encode(), "label": label}))
            truth.add("dmlab", pool, key, data, {"dmlab": label})
        for shard, of_shard in enumerate(records):
            files[f"dmlab-{pool}.tfrecord-{shard:05d}-of-00002"] = tfrecord(of_shard)
    write_tar(files, root / "dmlab.tar.gz", "w:gz")


def kitti(root: Path, truth: Truth) -> None:
    num_videos, frames = 20, 9
    order = np.random.default_rng(5).permutation(num_videos * frames)
    videos = [f"2011_09_{26 + v // 10}_drive_{v:04d}_sync" for v in range(num_videos)]
    mapping = [f"2011_09_26 {videos[line // frames]} {line % frames:010d}" for line in range(len(order))]
    # np.random's own functions, with its global state, as TFDS calls them.
    before = np.random.get_state()
    np.random.seed(123)
    test = set(np.random.choice(sorted(videos), 2, replace=False))
    validation = set(np.random.choice(sorted(set(videos) - test), 2, replace=False))
    np.random.set_state(before)
    images, annotations = {}, {}
    kinds = ["Car", "Van", "Truck", "Pedestrian", "Person_sitting", "Cyclist", "Tram", "Misc"]
    for number, line in enumerate(order.tolist()):
        key = f"{number:06d}.png"
        video = videos[line // frames]
        pool = "test" if video in test else "validation" if video in validation else "train"
        rng = np.random.default_rng(number)
        # The nearest thing may be no vehicle, and one image of four has none; z is the 14th value.
        objects = [(kinds[rng.integers(3, 8)], 5.0)]
        if number % 4:
            objects += [(kinds[rng.integers(3)], float(z)) for z in rng.uniform(-2, 60, rng.integers(1, 3)).round(2)]
        nearest = min([z for kind, z in objects if kind in kinds[:3]], default=None)
        label = 3 if nearest is None else 0 if nearest <= 8 else 1 if nearest <= 20 else 2
        lines = [f"{kind} 0.00 0 -1.57 1.00 2.00 3.00 4.00 1.5 1.6 3.2 -7.10 1.50 {z:.2f} -1.59" for kind, z in objects]
        lines.append("DontCare -1 -1 -10 503.89 169.71 590.61 190.13 -1 -1 -1 -1000 -1000 -1000 -10")
        data = images[f"training/image_2/{key}"] = encoded(Image.fromarray(pixels(number, 8, 3)[:4]), "PNG")
        annotations[f"training/label_2/{number:06d}.txt"] = ("\n".join(lines) + "\n").encode()
        truth.add("kitti", pool, key, data, {"kitti_distance": label})
    images["testing/image_2/000000.png"] = b"not read"
    write_zip(images, root / "data_object_image_2.zip")
    write_zip(annotations, root / "data_object_label_2.zip")
    devkit = {
        "readme.txt": b"",
        "mapping/train_rand.txt": ",".join(str(line + 1) for line in order.tolist()).encode(),
        "mapping/train_mapping.txt": ("\n".join(mapping) + "\n").encode(),
    }
    write_zip(devkit, root / "devkit_object.zip")


def dsprites(root: Path, truth: Truth) -> None:
    count = 120
    images = np.stack([pixels(7000 + number, 64, 1) % 2 for number in range(count)])
    latents = np.stack([np.random.default_rng(n).integers(0, [1, 3, 6, 40, 32, 32]) for n in range(count)])
    latents[:40, 3], latents[:32, 4] = np.arange(40), np.arange(32)
    stem = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64"
    with h5py.File(root / f"{stem}.hdf5", "w") as file:
        # As the original, in chunks of few pixels of many images.
        file.create_dataset("imgs", data=images, chunks=(50, 16, 16), compression="gzip")
        file.create_dataset("latents/classes", data=latents)
        file.create_dataset("latents/values", data=latents.astype(np.float64))
    # The protocol's bins of orientations, alternately three and two.
    bins = np.repeat(np.arange(16), [3, 2] * 8)
    for number in range(count):
        labels = {
            "dsprites_location": int(latents[number, 4]) // 2,
            "dsprites_orientation": int(bins[latents[number, 3]]),
        }
        truth.add("dsprites", "train", str(number), images[number] * np.uint8(255), labels)


def smallnorb(root: Path, truth: Truth) -> None:
    for pool, stem, count in (
        ("train", "smallnorb-5x46789x9x18x6x2x96x96-training", 50),
        ("test", "smallnorb-5x01235x9x18x6x2x96x96-testing", 40),
    ):
        images = np.stack([np.stack([pixels(8000 + n, 96, 1), pixels(9000 + n, 96, 1)]) for n in range(count)])
        info = np.stack([np.array([n % 10, n % 9, n % 18 * 2, n % 6]) for n in range(count)]).astype("<i4")
        category = (np.arange(count) % 5).astype("<i4")
        for part, array, magic in (
            ("dat", images, 0x1E3D4C55),
            ("info", info, 0x1E3D4C54),
            ("cat", category, 0x1E3D4C54),
        ):
            # At least three dimensions are written, however many there are.
            dims = [*array.shape, 1, 1][: max(array.ndim, 3)]
            header = struct.pack(f"<2i{len(dims)}i", magic, array.ndim, *dims)
            (root / f"{stem}-{part}.mat.gz").write_bytes(gzip.compress(header + array.tobytes(), 1))
        for number in range(count):
            labels = {"smallnorb_azimuth": number % 18, "smallnorb_elevation": number % 9}
            truth.add("smallnorb", pool, str(number), images[number, 0], labels)


WRITERS: dict[str, Callable[[Path, Truth], None]] = {
    writer.__name__: writer
    for writer in (
        caltech101,
        cifar100,
        dtd,
        flowers102,
        pets,
        sun397,
        svhn,
        patch_camelyon,
        eurosat,
        resisc45,
        retinopathy,
        clevr,
        dmlab,
        kitti,
        dsprites,
        smallnorb,
    )
}


def write_originals(root: Path) -> Truth:
    truth = Truth()
    for name, writer in WRITERS.items():
        (root / name).mkdir(parents=True)
        writer(root / name, truth)
    return truth


def tfrecord(contents: list[bytes]) -> bytes:
    file = b""
    for content in contents:
        length = struct.pack("<Q", len(content))
        file += length + struct.pack("<I", _masked_crc(length)) + content + struct.pack("<I", _masked_crc(content))
    return file


def _masked_crc(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def example(features: dict[str, bytes | int]) -> bytes:
    """A serialized tf.train.Example (tensorflow/core/example/{example,feature}.proto)."""
    entries = b""
    for name, value in features.items():
        # Field 1 of a Feature is its list of bytes, field 3 that of integers.
        of_list = _field(1, _field(1, value)) if isinstance(value, bytes) else _field(3, _field(1, _varint(value)))
        entries += _field(1, _field(1, name.encode()) + _field(2, of_list))
    return _field(1, entries)


def _field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes, text, a message or packed integers."""
    return bytes([8 * number + 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([128 | number & 127]) + _varint(number >> 7)
