"""Other loaders, configured as in their documentation, with the same three functions from bytes to a view.

Each `read_*` yields the size of each batch, and imports its library itself, so that only its own line is missing if it is
not installed. The random crop is torchvision's RandomResizedCrop (area 5-100 %, aspect 3/4-4/3), followed by a flip. DALI
has its own decoder and resizer, with the same crop.
"""

import io
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import simplejpeg
import torch
from PIL import Image

from pipeline.data.loading.augment import ANTIALIAS, resize

# (bytes of a JPEG, side) -> the view.
View = Callable[[bytes, int], Any]

_MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
_DEVIATION = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
_SHUFFLED = 1000


def crop(height: int, width: int, least: float = 0.05, most: float = 1.0) -> tuple[int, int, int, int]:
    """Returns a random (top, left, height, width), by the rule of RandomResizedCrop."""
    for _ in range(10):
        area = height * width * random.uniform(least, most)
        aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    return 0, 0, height, width


def _cropped(data: bytes) -> np.ndarray:
    pixels = simplejpeg.decode_jpeg(data)
    top, left, height, width = crop(*pixels.shape[:2])
    return pixels[top : top + height, left : left + width]


def linear(data: bytes, side: int) -> np.ndarray:
    """uint8 (S, S, 3): simplejpeg, OpenCV's bilinear."""
    view = cv2.resize(_cropped(data), (side, side), interpolation=cv2.INTER_LINEAR)
    return cv2.flip(view, 1) if random.random() < 0.5 else view


def antialias(data: bytes, side: int) -> np.ndarray:
    """uint8 (S, S, 3): simplejpeg, the same antialias filter as ours."""
    view = resize(_cropped(data), (side, side), ANTIALIAS)
    return cv2.flip(view, 1) if random.random() < 0.5 else view


def pillow_float(data: bytes, side: int) -> torch.Tensor:
    """float32 (3, S, S), normalised: the Pillow and torch calls of torchvision's usual training transforms."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    top, left, height, width = crop(image.height, image.width)
    image = image.crop((left, top, left + width, top + height)).resize((side, side), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
    return pixels.sub_(_MEAN).div_(_DEVIATION)


class _Files(torch.utils.data.Dataset):
    """Like torchvision's ImageFolder, with a given view."""

    def __init__(self, files: Sequence[tuple[Path, int]], view: View, side: int) -> None:
        self.files, self.view, self.side = files, view, side

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        path, label = self.files[i]
        return self.view(path.read_bytes(), self.side), label


def read_files(files: Sequence[tuple[Path, int]], view: View, side: int, batch: int, workers: int) -> Iterator[int]:
    """A map-style dataset over files, in torch's DataLoader."""
    dataset = _Files(files, view, side)
    for _, labels in torch.utils.data.DataLoader(dataset, batch, shuffle=True, num_workers=workers):
        yield len(labels)


def read_webdataset(shards: Sequence[str], view: View, side: int, batch: int, workers: int) -> Iterator[int]:
    """WebDataset with shuffled shards and a shuffle buffer, batches made in the workers."""
    import webdataset

    dataset = webdataset.WebDataset(list(shards), shardshuffle=len(shards), seed=0).shuffle(_SHUFFLED)
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(lambda data: view(data, side), int).batched(batch)
    for _, labels in webdataset.WebLoader(dataset, batch_size=None, num_workers=workers):
        yield len(labels)


def _with_views(base: Any, view: View, side: int) -> Any:
    """A class of data sets, whose samples are bytes, with the view in their place."""

    class Samples(base):
        def __getitem__(self, index: Any) -> tuple[Any, int]:
            sample = super().__getitem__(index)
            return view(sample["image"], side), sample["label"]

    return Samples


def write_litdata(files: Sequence[tuple[Path, int]], folder: Path) -> None:
    """LitData's chunks of the encoded images."""
    import litdata

    litdata.optimize(_litdata_sample, list(files), str(folder), chunk_bytes="64MB", num_workers=1, verbose=False)


def _litdata_sample(file: tuple[Path, int]) -> dict[str, Any]:
    return {"image": file[0].read_bytes(), "label": file[1]}


def read_litdata(folder: Path, view: View, side: int, batch: int, workers: int) -> Iterator[int]:
    """LitData's StreamingDataset and StreamingDataLoader."""
    import litdata

    dataset = _with_views(litdata.StreamingDataset, view, side)(str(folder), shuffle=True)
    for _, labels in litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=workers):
        yield len(labels)


def write_mosaic(files: Sequence[tuple[Path, int]], folder: Path, hashes: Sequence[str] = ()) -> None:
    """MosaicML streaming's MDS shards of the encoded images. hashes: algorithms of the shards' checksums."""
    import streaming

    columns = {"image": "bytes", "label": "int"}
    with streaming.MDSWriter(out=str(folder), columns=columns, hashes=list(hashes)) as writer:
        for path, label in files:
            writer.write({"image": path.read_bytes(), "label": label})


def read_mosaic(folder: Path, view: View, side: int, batch: int, workers: int) -> Iterator[int]:
    """MosaicML's StreamingDataset in torch's DataLoader."""
    import streaming

    samples = _with_views(streaming.StreamingDataset, view, side)
    dataset = samples(local=str(folder), shuffle=True, batch_size=batch)
    for _, labels in torch.utils.data.DataLoader(dataset, batch_size=batch, num_workers=workers):
        yield len(labels)


def read_grain(files: Sequence[tuple[Path, int]], view: View, side: int, batch: int, workers: int) -> Iterator[int]:
    """Grain's MapDataset, shuffled, one batch per thread."""
    import grain

    def load(file: tuple[Path, int]) -> tuple[np.ndarray, int]:
        return np.asarray(view(file[0].read_bytes(), side)), file[1]

    dataset = grain.MapDataset.source(files).shuffle(seed=0).map(load).batch(batch)
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2 * workers)
    for _, labels in dataset.to_iter_dataset(options):
        yield len(labels)


def read_dali(files: Sequence[tuple[Path, int]], antialias: bool, side: int, batch: int, workers: int) -> Iterator[int]:
    """DALI on the CPU, with its own decoder (which decodes only the crop), resizer and random numbers."""
    from nvidia import dali
    from nvidia.dali import fn

    @dali.pipeline_def(batch_size=batch, num_threads=workers, device_id=None, prefetch_queue_depth=4)
    def pipeline() -> tuple[Any, Any]:
        paths, labels = [str(path) for path, _ in files], [label for _, label in files]
        data, label = fn.readers.file(files=paths, labels=labels, random_shuffle=True, name="files")
        area, aspect = [0.05, 1.0], [3 / 4, 4 / 3]
        image = fn.decoders.image_random_crop(data, random_area=area, random_aspect_ratio=aspect)
        image = fn.resize(image, size=[side, side], interp_type=dali.types.INTERP_LINEAR, antialias=antialias)
        return fn.flip(image, horizontal=fn.random.coin_flip()), label

    built = pipeline()
    built.build()
    for _ in range(len(files) // batch):
        _, labels = built.run()
        yield len(labels)


def read_spdl(files: Sequence[tuple[Path, int]], view: View, side: int, batch: int, workers: int) -> Iterator[int]:
    """SPDL's pipeline of threads, one batch per thread (its fastest configuration)."""
    from spdl.pipeline import PipelineBuilder

    shuffled = random.Random(0).sample(files, len(files))

    def make(part: Sequence[tuple[Path, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        images = np.empty((len(part), side, side, 3), np.uint8)
        for i, (path, _) in enumerate(part):
            images[i] = view(path.read_bytes(), side)
        return torch.from_numpy(images), torch.tensor([label for _, label in part])

    parts = [shuffled[i : i + batch] for i in range(0, len(shuffled), batch)]
    pipeline = PipelineBuilder().add_source(parts).pipe(make, concurrency=workers).add_sink(4)
    with (built := pipeline.build(num_threads=workers)).auto_stop():
        for _, labels in built:
            yield len(labels)
