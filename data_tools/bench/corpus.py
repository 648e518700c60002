"""Images for benchmarks: the JPEGs of a folder or tar, repeated to a given number; generated JPEGs; batches of noise, also of an objective."""

import tarfile
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
import torch

from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.data.loading.loader import Batch
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import RunConfig

# Of models and noise; the files of `write_raw` have fewer.
NUM_CLASSES = 1000
_CLASSES_OF_FILES = 10
_ENDINGS = (".jpg", ".jpeg")


def write_raw(source: Path, folder: Path, images: int) -> list[tuple[Path, int]]:
    """Write `images` files folder/<class>/<number>.jpg, repeating those of the source; returns (path, class) of each.

    Raises UserError as `read_raw` does.
    """
    written = []
    for number, data in enumerate(read_raw(source, images)):
        label = number % _CLASSES_OF_FILES
        path = folder / f"class{label}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        written.append((path, label))
    return written


def write_generated(folder: Path, images: int) -> None:
    """Write `images` JPEGs of blurred noise into a folder, each with as many pixels as ImageNet's, and about as many bytes."""
    folder.mkdir(parents=True)
    for number in range(images):
        rng = np.random.default_rng(number)
        coarse = rng.integers(0, 256, (375 // 6, 500 // 6, 3), np.uint8)
        pixels = cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC)
        (folder / f"{number:04d}.jpg").write_bytes(simplejpeg.encode_jpeg(pixels, quality=90))


def objective_run(loss: str, model: str, image_size: int, batch: int) -> RunConfig:
    """A run of a hundred steps with the defaults, which for each objective are those of its recipe for ImageNet-1k."""
    return schema.load(RunConfig, None, [
        "name=bench", "data.path=none", "data.streams=1", "train.length=100 steps", "schedule.warmup=0 steps", f"train.loss={loss}",
        f"train.global_batch={batch}", f"train.micro_batch={batch}", f"model.name={model}", f"model.image_size={image_size}",
        "model.representation=false", "augment.crop=random_resized",
    ])  # fmt: skip


def noise_of(run: RunConfig, batch: int) -> Batch:
    """A batch of noise with the views that a run's objective wants."""
    views = objectives.kind(run.train.loss).views(run)
    return noise_views([(group.count, *ImageSize.parse(group.size)) for group in views], batch)


def noise_batch(size: int, image_size: int) -> Batch:
    """A batch of noise: the time of a step does not depend on the images."""
    return noise_views([(1, image_size, image_size)], size)


def noise_views(
    shapes: Sequence[tuple[int, int, int]], size: int, num_classes: int = NUM_CLASSES, seed: int = 0
) -> Batch:
    """The same with groups of views; shapes: (number, height, width) of each."""
    rng = np.random.default_rng(seed)
    views = [torch.from_numpy(rng.integers(0, 256, (count, size, *side, 3), np.uint8)) for count, *side in shapes]
    labels = torch.from_numpy(rng.integers(0, num_classes, (size, 1)))
    return Batch(tuple(views), labels, torch.ones(size, dtype=torch.bool), np.arange(size), np.zeros(size, np.int64))


def read_raw(source: Path, images: int) -> list[bytes]:
    """Read `images` JPEG files, repeating those of the source. Raises UserError if it is missing or has none."""
    if not source.exists():
        raise UserError(f"source = {source}: no such file or folder. Give a folder or a tar of JPEGs.")
    files = list(islice(_jpegs(source), images))
    if not files:
        raise UserError(f"source = {source} holds no .jpg or .jpeg files.")
    return list(islice(cycle(files), images))


def _jpegs(source: Path) -> Iterator[bytes]:
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.suffix.lower() in _ENDINGS:
                yield path.read_bytes()
        return
    try:
        with tarfile.open(source) as tar:
            for member in tar:
                if member.isfile() and member.name.lower().endswith(_ENDINGS):
                    content = tar.extractfile(member)
                    assert content is not None
                    yield content.read()
    except (tarfile.TarError, EOFError):  # The second: of a compressed tar that is cut short.
        raise UserError(f"source = {source} is neither a folder nor an intact tar.") from None
