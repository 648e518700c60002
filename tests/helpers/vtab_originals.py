"""The 16 source data sets of VTAB-1k, tiny, in the byte layouts that their authors publish, and as TFDS prepares them.

Written from the layouts, with other code than the readers'. A `Truth` says what must come out: for every task, and
every sample of every pool, the label, and the image.
"""

import gzip
import hashlib
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
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
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
    # What TFDS keeps beside image and label, by data set and (pool, key).
    features: dict[str, dict[tuple[str, str], dict[str, object]]] = field(default_factory=lambda: defaultdict(dict))

    def add(
        self, dataset: str, pool: str, key: str, image: bytes | np.ndarray, labels: dict[str, int], **features: object
    ) -> None:
        self.images[dataset][pool, key] = image
        self.features[dataset][pool, key] = features
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
            truth.add(
                "caltech101",
                pool,
                key,
                files[key],
                {"caltech101": label},
                **{"image/file_name": key.partition("/")[2].encode(), "label": label},
            )
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
    # The official 30 of each class, as a prepared copy would name them.
    (root / "train.txt").write_text("".join(f"{key}\n" for key in truth.labels["caltech101"]["train"]))


def cifar100(root: Path, truth: Truth) -> None:
    files = {"cifar-100-binary/fine_label_names.txt": "".join(f"fine{n}\n" for n in range(100)).encode()}
    files["cifar-100-binary/coarse_label_names.txt"] = b"a\nb\n"
    for pool, count in (("train", 120), ("test", 15)):
        records = b""
        for number in range(count):
            image, label = pixels(number, 32, 3), (number * 37) % 100
            records += bytes([number % 20, label]) + image.transpose(2, 0, 1).tobytes()
            identity = {"id": f"{pool}_{number:05d}".encode(), "label": label}
            truth.add("cifar100", pool, str(number), image, {"cifar100": label}, **identity)
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
            data, label = files[f"dtd/images/{key}"], number % 3
            truth.add("dtd", pool, key, data, {"dtd": label}, file_name=key.encode(), label=label)
    write_tar(files, root / "dtd-r1.0.1.tar.gz")  # Plain, in spite of its name.


def flowers102(root: Path, truth: Truth) -> None:
    count = 110
    numbers = np.random.default_rng(0).permutation(count) + 1
    labels = np.arange(count) * 17 % 102 + 1  # Of image 1, 2, ...; from 1.
    sets = {"train": numbers[:50], "validation": numbers[50:80], "test": numbers[80:]}
    for pool, ids in sets.items():
        for number in ids.tolist():
            key, label = f"image_{number:05d}.jpg", int(labels[number - 1]) - 1
            truth.add("flowers102", pool, key, jpeg(number), {"flowers102": label}, file_name=key.encode(), label=label)
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
            truth.add("pets", pool, key, data, {"pets": label}, file_name=key.encode(), label=label)
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
            truth.add("sun397", pool, key, data, {"sun397": label}, file_name=key.encode(), label=label)
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
            label = int(digits[number]) % 10
            truth.add("svhn", pool, str(number), images[..., number], {"svhn": label}, label=label)


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
            label = int(tumour[number].item())
            key = f"{part}_{number}"
            truth.add(
                "patch_camelyon", pool, key, images[number], {"patch_camelyon": label}, id=key.encode(), label=label
            )


def _class_folders(
    root: Path, truth: Truth, dataset: str, top: str, names: list[str], pattern: str
) -> dict[str, bytes]:
    files = {}
    for label, name in enumerate(names):
        for number in range(1, 41):
            file = pattern.format(name=name, number=number)
            data = files[f"{top}/{name}/{file}"] = jpeg(5000 + 100 * label + number)
            truth.add(dataset, "train", f"{name}_{file}", data, {dataset: label}, filename=file.encode(), label=label)
    return files


def eurosat(root: Path, truth: Truth) -> None:
    names = ["AnnualCrop", "Forest", "SeaLake"]
    write_zip(_class_folders(root, truth, "eurosat", "2750", names, "{name}_{number}.jpg"), root / "EuroSAT.zip")


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
            truth.add("retinopathy", pool, key, data, {"retinopathy": label}, name=key.encode(), label=label)
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
            coordinates = [value for thing in objects for value in thing["pixel_coords"]]
            truth.add(
                "clevr",
                pool,
                name,
                data,
                {"clevr_count": len(objects) - 3, "clevr_distance": distance},
                file_name=name.encode(),
                **{"objects/color": [4] * len(objects), "objects/pixel_coords": [float(v) for v in coordinates]},
            )
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
            features = {"filename": key.encode(), "label": label}
            records[number % 2].append(example({"image": data, **features}))
            truth.add("dmlab", pool, key, data, {"dmlab": label}, **features)
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
        features = {
            "image/file_name": key.encode(),
            "objects/type": [kinds.index(kind) for kind, _ in objects],
            "objects/location": [value for _, z in objects for value in (-7.1, 1.5, z)],
        }
        truth.add("kitti", pool, key, data, {"kitti_distance": label}, **features)
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
        features = {"label_orientation": int(latents[number, 3]), "label_x_position": int(latents[number, 4])}
        truth.add("dsprites", "train", str(number), images[number] * np.uint8(255), labels, **features)


def dsprites_as_npz(root: Path) -> None:
    """The same, in the other of its two formats."""
    hdf5 = next(root.glob("*.hdf5"))
    with h5py.File(hdf5) as file:
        arrays = {"imgs": file["imgs"][()], "latents_classes": file["latents/classes"][()]}
    hdf5.unlink()
    np.savez_compressed(hdf5.with_suffix(".npz"), **arrays)


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
            elevation, azimuth = number % 9, number % 18
            labels = {"smallnorb_azimuth": azimuth, "smallnorb_elevation": elevation}
            features = {"label_azimuth": azimuth, "label_elevation": elevation}
            truth.add("smallnorb", pool, str(number), images[number, 0], labels, **features)


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


# ------------------------------------------------------------------------------------------- as TFDS prepares them
TFDS = {
    "caltech101": ("caltech101/3.0.1", ["accordion", "background_google", "faces_easy", "motorbikes", "zebra"]),
    "cifar100": ("cifar100/3.0.2", []),
    "dtd": ("dtd/3.0.1", ["banded", "blotchy", "zigzagged"]),
    "flowers102": ("oxford_flowers102/2.1.1", []),
    "pets": ("oxford_iiit_pet/3.2.0", []),
    "sun397": ("sun397/tfds/4.0.0", []),
    "svhn": ("svhn_cropped/3.0.0", []),
    "patch_camelyon": ("patch_camelyon/2.0.0", []),
    "eurosat": ("eurosat/rgb/2.0.0", ["AnnualCrop", "Forest", "SeaLake"]),
    "resisc45": ("resisc45/3.0.0", []),
    "retinopathy": ("diabetic_retinopathy_detection/btgraham-300/3.0.0", []),
    "clevr": ("clevr/3.1.0", []),
    "dmlab": ("dmlab/2.0.1", []),
    "kitti": ("kitti/3.2.0", []),
    "dsprites": ("dsprites/2.0.0", []),
    "smallnorb": ("smallnorb/2.0.0", []),
}


def write_tfds(root: Path, truth: Truth) -> None:
    """Every data set of `truth`, each pool in the order of the hash, in two files."""
    for dataset, (place, names) in TFDS.items():
        folder = root / place
        folder.mkdir(parents=True)
        builder = place.partition("/")[0]
        pools = dict.fromkeys(pool for pool, _ in truth.images[dataset])
        splits = []
        for pool in pools:
            keys = [key for of, key in truth.images[dataset] if of == pool]
            keys.sort(key=lambda key: int(hashlib.md5(pool.encode() + key.encode()).hexdigest(), 16))
            cut = len(keys) // 3
            for shard, part in enumerate((keys[:cut], keys[cut:])):
                # Its builder writes dSprites' pixels as they are published, 0 and 1.
                white = 255 if dataset == "dsprites" else 1
                content = [
                    example(
                        {
                            "image": _encoded(truth.images[dataset][pool, key], white),
                            **truth.features[dataset][pool, key],
                        }
                    )
                    for key in part
                ]
                (folder / f"{builder}-{pool}.tfrecord-{shard:05d}-of-00002").write_bytes(tfrecord(content))
            splits.append({"name": pool, "shardLengths": [str(cut), str(len(keys) - cut)], "numBytes": "1"})
        (folder / "dataset_info.json").write_text(json.dumps({"name": builder, "splits": splits}))
        if names:
            (folder / "label.labels.txt").write_text("".join(f"{name}\n" for name in names))


def _encoded(image: bytes | np.ndarray, white: int) -> bytes:
    return image if isinstance(image, bytes) else encoded(Image.fromarray(image // np.uint8(white)), "PNG")


def tfrecord(contents: list[bytes]) -> bytes:
    file = b""
    for content in contents:
        length = struct.pack("<Q", len(content))
        file += length + struct.pack("<I", _masked_crc(length)) + content + struct.pack("<I", _masked_crc(content))
    return file


def _masked_crc(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _example_class() -> type:
    """tf.train.Example, from its definition (tensorflow/core/example/{example,feature}.proto)."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> descriptor_pb2.DescriptorProto:
        made = file.message_type.add(name=name)
        for called, number, kind, label, of in fields:
            made.field.add(name=called, number=number, type=kind, label=label, type_name=of or None)
        return made

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    message("BytesList", ("value", 1, field.TYPE_BYTES, many, ""))
    message("FloatList", ("value", 1, field.TYPE_FLOAT, many, ""))
    message("Int64List", ("value", 1, field.TYPE_INT64, many, ""))
    feature = message(
        "Feature",
        *(
            (f"{kind}_list", n, field.TYPE_MESSAGE, one, f".tf.{kind.capitalize()}List")
            for n, kind in enumerate(("bytes", "float", "int64"), 1)
        ),
    )
    feature.oneof_decl.add(name="kind")
    for part in feature.field:
        part.oneof_index = 0
    features = message("Features", ("feature", 1, field.TYPE_MESSAGE, many, ".tf.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=one)
    entry.field.add(name="value", number=2, type=field.TYPE_MESSAGE, label=one, type_name=".tf.Feature")
    message("Example", ("features", 1, field.TYPE_MESSAGE, one, ".tf.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


_EXAMPLE = _example_class()


def example(features: dict[str, object]) -> bytes:
    """A serialized tf.train.Example, by Google's own library."""
    made = _EXAMPLE()
    for name, value in features.items():
        values = value if isinstance(value, list) else [value]
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(values[0]) if values else int]
        getattr(made.features.feature[name], kind).value.extend(values)
    return made.SerializeToString()
