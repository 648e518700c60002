"""Raw images in every layout."""

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from pipeline.settings.commands.data import ShardConfig


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(seed: int, width: int = 20, height: int = 16, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 4), np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def jpeg(seed: int, **size: int) -> bytes:
    return encoded(noise(seed, **size), "JPEG", quality=90)


def pictures() -> dict[str, bytes]:
    """Name inside the source -> bytes: three classes, and one of each kind of image that is fine but rare."""
    files = {
        f"{name}/{i:02d}.jpg": jpeg(100 * c + i) for c, name in enumerate(("cat", "dog", "elk")) for i in range(12)
    }
    bits = Image.fromarray(np.arange(320).reshape(16, 20) % 3 == 0)
    files |= {
        "cat/grey.JPEG": encoded(noise(1, mode="L"), "JPEG"),
        "cat/cmyk.jpg": encoded(noise(2, mode="CMYK"), "JPEG"),
        "cat/one_pixel.jpg": jpeg(3, width=1, height=1),
        "dog/bits.png": encoded(bits, "PNG"),
        "dog/animated.gif": encoded(noise(4), "GIF", save_all=True, append_images=[noise(5), noise(6)]),
        "dog/photo.webp": encoded(noise(7), "WEBP"),
        "elk/really_a.png.jpg": encoded(noise(8), "PNG"),
        "elk/" + "long" * 40 + "ö.jpg": jpeg(9),
    }
    return files


def write_folder(files: dict[str, bytes], folder: Path) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def write_tar(
    files: dict[str, bytes] | list[tuple[str, bytes]], path: Path, mode: str = "w", format: int = tarfile.GNU_FORMAT
) -> Path:
    with tarfile.open(path, mode, format=format) as tar:
        for name, data in files.items() if isinstance(files, dict) else files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_zip(files: dict[str, bytes], path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for number, (name, data) in enumerate(files.items()):
            member = zipfile.ZipInfo(name)
            # An extra field, as zips made on most machines have (its bytes lie between the name and the data).
            member.extra = b"\xfe\xca\x04\x00more"
            archive.writestr(member, data, zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED)
    return path


def write_class_tars(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name in {name.split("/")[0] for name in files}:
        inner = {file.split("/")[1]: data for file, data in files.items() if file.startswith(f"{name}/")}
        write_tar(inner, folder / f"{name}.tar")
    return folder


LAYOUTS: dict[str, Callable[[dict[str, bytes], Path], Path]] = {
    "folder": lambda files, at: write_folder(files, at / "raw"),
    "tar": lambda files, at: write_tar(files, at / "raw.tar"),
    "pax tar": lambda files, at: write_tar(files, at / "raw_pax.tar", format=tarfile.PAX_FORMAT),
    "tar.gz": lambda files, at: write_tar(files, at / "raw.tgz", "w:gz"),
    "zip": lambda files, at: write_zip(files, at / "raw.zip"),
    "folder of tars": lambda files, at: write_class_tars(files, at / "tars"),
    "tar of tars": lambda files, at: write_tar(
        {path.name: path.read_bytes() for path in write_class_tars(files, at / "inner").iterdir()}, at / "big.tar"
    ),
}


def settings(source: Path, out: Path | str, **others: object) -> ShardConfig:
    config = ShardConfig(source=str(source), out=str(out), **{"samples_per_shard": 8, **others})
    config.check()
    return config


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a data set."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
