"""Predicts the classes of images by an .onnx file; `pipeline/evaluate/export.py` writes this file beside each.

    python <NAME>_predict.py photo.jpg folder            # by <NAME>.onnx, beside this script

    from NAME_predict import Classifier
    Classifier("NAME.onnx").predict("photo.jpg")         # [("cat", 0.93), ("dog", 0.05), ...]

Needs onnxruntime, numpy and Pillow. The .onnx file says how its images are resized, cropped and scaled, and names the
classes. Reads what Pillow opens, of 8 bits a value.

Shapes: H, W height and width of an image; C its 3 channels.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

SUFFIXES = ".jpg .jpeg .jfif .png .webp .gif .bmp .tif .tiff .heic .heif .hif .avif .ppm .pgm .pbm .pnm .jp2 .j2k .jpx"
# Longer images lose their ends before they are resized to cover a square.
MAX_ASPECT = 16
Size = tuple[int, int]  # (height, width)


class Classifier:
    """The model of an .onnx file, with its classes and its preprocessing."""

    def __init__(self, file: str | Path) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        known = json.loads(self.session.get_modelmeta().custom_metadata_map["vit-weights"])
        extra, numbers = known["extra"], [f"class {number}" for number in range(known["model"]["num_classes"])]
        self.classes: list[str] = extra.get("class_names") or extra.get("classes") or numbers
        self.is_sigmoid = extra.get("loss") == "sigmoid"  # Each class has a probability of its own.
        self.preprocess = EvaluationView(known["model"], extra.get("preprocessing", {}))

    def predict(self, image: str | Path | Image.Image, top: int = 5) -> list[tuple[str, float]]:
        """The most likely classes with their probabilities. Raises an error of any type for unreadable images."""
        (logits,) = self.session.run(None, {"images": self.preprocess(image)[None]})[0].astype(np.float64)
        if self.is_sigmoid:
            found = 1 / (1 + np.exp(-logits))
        else:
            powers = np.exp(logits - logits.max())
            found = powers / powers.sum()
        return [(self.classes[number], float(found[number])) for number in np.argsort(-found, kind="stable")[:top]]


class EvaluationView:
    """How the model reads images. model: its configuration. view: how images are resized and cropped."""

    def __init__(self, model: dict[str, Any], view: dict[str, Any]) -> None:
        self.pixels: dict[str, Any] = model.get("pixels", {})
        height, width = self.size = tuple(model["image_size"])
        short = min(height, width)
        self.crop = view.get("eval_crop", "center")
        self.filter = view.get("resize_filter", "linear")
        side = round(view.get("eval_resize", 0) * short / view.get("image_size", short)) or round(short * 8 / 7)
        self.frame = round(height * side / short), round(width * side / short)  # What the crop is cut from.

    def __call__(self, image: str | Path | Image.Image) -> np.ndarray:
        """float32 (C, height, width), the model's input."""
        if not isinstance(image, Image.Image):
            with Image.open(image) as opened:
                return self(opened)
        values = self.resized(read_rgb(image)).transpose(2, 0, 1)
        low, high, mean, std = (
            np.reshape(self.pixels.get(name, [usual] * 3), (3, 1, 1))
            for name, usual in (("low", 0.0), ("high", 255.0), ("mean", 0.5), ("std", 0.5))
        )
        divisor, offset = (high - low) * std, (low / (high - low) + mean) / std
        clipped = values.clip(low, high).astype(np.float32)
        return np.ascontiguousarray(clipped / divisor.astype(np.float32) - offset.astype(np.float32))

    def resized(self, image: np.ndarray) -> np.ndarray:
        """uint8 (H, W, C) -> the part that the model sees, uint8 (height, width, C)."""
        height, width = self.size
        if self.crop != "resize":
            image = resize(image, self.frame, self.filter) if self.crop == "resize_center" else self.covering(image)
            top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
            image = image[top : top + height, left : left + width]
        return resize(image, self.size, self.filter)

    def covering(self, image: np.ndarray) -> np.ndarray:
        """The image in its own aspect, so small that it just covers `frame`."""
        longest = MAX_ASPECT * min(image.shape[:2])
        top, left = (max(0, side - longest) // 2 for side in image.shape[:2])
        image = image[top : image.shape[0] - top, left : image.shape[1] - left]
        scale = max(frame / side for frame, side in zip(self.frame, image.shape, strict=False))
        height, width = (max(frame, round(side * scale)) for frame, side in zip(self.frame, image.shape, strict=False))
        is_enlarged_by_opencv = scale >= 1 and self.filter == "antialias"
        return resize(image, (height, width), "bilinear" if is_enlarged_by_opencv else self.filter)


def read_rgb(image: Image.Image) -> np.ndarray:
    """uint8 (H, W, C), upright by its EXIF tag. Raises ValueError for more than 8 bits, of which Pillow drops some."""
    # Of 16-bit colours, Pillow's mode is RGB; only how they are stored tells.
    if image.mode.startswith(("I", "F")) or any(";16" in str(tile[3]) for tile in getattr(image, "tile", ())):
        raise ValueError(f"{image.format} with more than 8 bits a value, where 8-bit gray or RGB is needed")
    image.load()  # Before the tag is read: it turns a TIFF itself, and removes the tag.
    return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def resize(image: np.ndarray, size: Size, name: str) -> np.ndarray:
    """uint8 (H, W, C) -> uint8 (height, width, C), to the last bit as the evaluation of the model.

    name: linear: OpenCV's INTER_AREA if both sides become smaller, else its INTER_LINEAR; bilinear: INTER_LINEAR;
    antialias, bicubic: torch's filters of these names, which are nearly Pillow's.
    """
    if image.shape[:2] == size:
        return image
    if name in ("antialias", "bicubic"):
        return by_kernel(image, size, name)
    if name == "linear" and image.shape[0] > size[0] and image.shape[1] > size[1]:
        return by_area(image, size)
    return by_interpolation(image, size)


def by_kernel(image: np.ndarray, size: Size, name: str) -> np.ndarray:
    """A triangle, or Keys' bicubic kernel, which widens where the image becomes smaller; weights are integers."""
    for axis, shape in ((1, (-1, 1)), (0, (-1, 1, 1))):
        old, new = image.shape[axis], size[axis]
        if old == new:
            continue
        scale, half = old / new, 1 if name == "antialias" else 2
        center, support = (np.arange(new) + 0.5) * scale, half * max(scale, 1)
        first = (center - support + 0.5).astype(int).clip(0)
        last = (center + support + 0.5).astype(int).clip(None, old)
        places = first + np.arange((last - first).max())[:, None]
        x = np.abs((places - center + 0.5) / max(scale, 1))
        weights = (
            1 - x
            if name == "antialias"
            else np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, ((2.5 - x / 2) * x - 4) * x + 2)
        )
        weights[(x >= half) | (places >= last)] = 0
        weights /= weights.sum(0)
        bits = next(bits for bits in range(22) if int(0.5 + weights.max() * 2 ** (bits + 1)) >= 2**15)
        rounded = np.trunc(weights * 2**bits + np.copysign(0.5, weights)).astype(np.int32)
        parts = zip(places.clip(0, old - 1), rounded, strict=True)
        total = sum(np.take(image, place, axis) * weight.reshape(shape) for place, weight in parts)
        image = (total + 2 ** (bits - 1) >> bits).clip(0, 255).astype(np.uint8)
    return image


def by_area(image: np.ndarray, size: Size) -> np.ndarray:
    """Each pixel is the mean of the area that it covers."""
    if not (image.shape[0] % size[0] or image.shape[1] % size[1]):
        times = image.shape[0] // size[0], image.shape[1] // size[1]
        sums = image.reshape(size[0], times[0], size[1], times[1], 3).sum((1, 3), dtype=np.int64)
        values = sums.astype(np.float32) * np.float32(1 / (times[0] * times[1]))
        # OpenCV rounds 0.5 up where both sides are halved, else to even.
        return (np.floor(values + 0.5) if times == (2, 2) else np.rint(values)).astype(np.uint8)
    values = image.astype(np.float32)
    for axis, shape in ((1, (-1, 1)), (0, (-1, 1, 1))):
        parts = zip(*covered(image.shape[axis], size[axis]), strict=True)
        values = sum(np.take(values, places, axis) * shares.reshape(shape) for places, shares in parts)
    return np.rint(values).clip(0, 255).astype(np.uint8)


def covered(old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Places (k, new) of the old pixels that each new one covers, and their shares, float32 of the same shape."""
    scale = 1 / (new / old)
    begin = np.arange(new) * scale
    end = begin + scale
    places = np.floor(begin) + np.arange(int(np.ceil(scale)) + 1)[:, None]
    overlaps = np.minimum(end, places + 1) - np.maximum(begin, places)
    overlaps[overlaps <= 1e-3] = 0
    return places.clip(0, old - 1).astype(int), (overlaps / np.minimum(scale, old - begin)).astype(np.float32)


def by_interpolation(image: np.ndarray, size: Size) -> np.ndarray:
    """Bilinear interpolation between the four nearest pixels, in OpenCV's integers."""
    rows, share = nearest(image.shape[0], size[0])
    columns, part = nearest(image.shape[1], size[1])
    part = np.where((columns < 0) | (columns >= image.shape[1] - 1), np.float32(0), part)
    weights = [np.rint(one * 2048).astype(np.int64) for one in (1 - part, part)]
    left, right = (image[:, (columns + more).clip(0, image.shape[1] - 1)].astype(np.int64) for more in (0, 1))
    between = (left * weights[0][:, None] + right * weights[1][:, None]) >> 4
    weights = [np.rint(one * 2048).astype(np.int64)[:, None, None] for one in (1 - share, share)]
    above, below = (between[(rows + more).clip(0, image.shape[0] - 1)] for more in (0, 1))
    return (((weights[0] * above >> 16) + (weights[1] * below >> 16) + 2) >> 2).clip(0, 255).astype(np.uint8)


def nearest(old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """For each new pixel the old one before it, and how far it is on the way to the next, float32."""
    at = ((np.arange(new) + 0.5) * (1 / (new / old)) - 0.5).astype(np.float32)
    return np.floor(at).astype(int), at - np.floor(at)


def files_of(places: list[Path]) -> Iterator[Path]:
    """The files, and of folders all images in them."""
    for place in places:
        if not place.is_dir():
            yield place
            continue
        files = (file for file in place.rglob("*") if file.suffix.lower() in SUFFIXES.split())
        yield from sorted(file for file in files if not file.name.startswith("."))  # As macOS's ._photo.jpg does.


def main() -> None:
    script = Path(__file__)
    model = script.with_name(f"{script.stem.removesuffix('_predict')}.onnx")
    parser = argparse.ArgumentParser(description="Print the most likely classes of images.")
    parser.add_argument("images", nargs="+", type=Path, help="image files, and folders of these")
    parser.add_argument("--model", type=Path, default=model, metavar="FILE", help=f"default: {model}")
    parser.add_argument("--top", type=int, default=5, metavar="NUMBER", help="classes of each image, default 5")
    given = parser.parse_args()
    if not given.model.is_file():
        parser.error(f"{given.model} is missing. Name the .onnx file: --model FILE")
    classifier, num_unreadable = Classifier(given.model), 0
    for file in files_of(given.images):
        try:
            found = classifier.predict(file, given.top)
            print(f"{file}  " + ", ".join(f"{name} {probability:.1%}" for name, probability in found))
        except Exception as error:  # Pillow raises any type.
            num_unreadable += 1
            print(f"{file}  cannot be read: {error}")
    if num_unreadable:
        sys.exit(f"images that cannot be read: {num_unreadable}")


if __name__ == "__main__":
    main()
