"""Predicts the classes of images, or numbers, by an .onnx file; `pipeline/evaluate/export.py` writes this beside each.

    python <NAME>_predict.py photo.jpg folder            # by <NAME>.onnx, beside this script

    from NAME_predict import Predictor
    Predictor("NAME.onnx").predict("photo.jpg")          # [("cat", 0.93), ("dog", 0.05), ...], or [("age", 54.2)]

Needs onnxruntime, numpy, Pillow and opencv-python-headless. The .onnx file says how its images are resized, cropped and
scaled, and names the classes. Reads what Pillow opens, of 8 bits a value.

Shapes: H, W height and width of an image; C its 3 channels.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageOps

SUFFIXES = ".jpg .jpeg .jfif .png .webp .gif .bmp .tif .tiff .heic .heif .hif .avif .ppm .pgm .pbm .pnm .jp2 .j2k .jpx"
# Longer images lose their ends before they are resized to cover a square.
MAX_ASPECT = 16
Size = tuple[int, int]  # (height, width)


class Predictor:
    """The model of an .onnx file, with its preprocessing, and its classes or the names of its numbers."""

    def __init__(self, file: str | Path) -> None:
        import onnxruntime

        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        known = json.loads(self.session.get_modelmeta().custom_metadata_map["vit-weights"])
        model, extra = known["model"], known["extra"]
        names = extra.get("class_names") or extra.get("classes")
        self.classes: list[str] = names or [f"class {number}" for number in range(model["num_classes"])]
        self.numbers: list[str] = extra.get("targets", []) if extra.get("loss") == "regression" else []
        self.is_sigmoid = extra.get("loss") == "sigmoid"  # Each class has a probability of its own.
        self.preprocess = EvaluationView(model, extra.get("preprocessing", {}))

    def predict(self, image: str | Path | Image.Image, top: int = 5) -> list[tuple[str, float]]:
        """The most likely classes with their probabilities; of a model of numbers, all of them, each in its own unit.

        Raises an error of any type for unreadable images.
        """
        (logits,) = self.session.run(None, {"images": self.preprocess(image)[None]})[0].astype(np.float64)
        if self.numbers:
            return list(zip(self.numbers, logits.tolist(), strict=True))
        found = np.exp(-np.logaddexp(0, -logits) if self.is_sigmoid else logits - np.logaddexp.reduce(logits))
        ranked = np.argsort(-found, kind="stable")[:top]
        return [(self.classes[number], float(found[number])) for number in ranked]


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
        usual = {"low": 0.0, "high": 255.0, "mean": 0.5, "std": 0.5} | self.pixels
        low, high, mean, std = (np.array(usual[name]) for name in ("low", "high", "mean", "std"))
        divisor, offset = (high - low) * std, (low / (high - low) + mean) / std
        clipped = self.resized(read_rgb(image)).clip(low, high).astype(np.float32)
        values = clipped / divisor.astype(np.float32) - offset.astype(np.float32)
        return np.ascontiguousarray(values.transpose(2, 0, 1))

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
        sides = np.array(image.shape[:2])
        top, left = np.maximum(0, sides - MAX_ASPECT * sides.min()) // 2
        image = image[top : sides[0] - top, left : sides[1] - left]
        scale = (self.frame / (sides := np.array(image.shape[:2]))).max()
        height, width = np.maximum(self.frame, np.rint(sides * scale).astype(int)).tolist()
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
    """uint8 (H, W, C) -> uint8 (height, width, C), as the evaluation of the model; bit for bit by linear and bilinear.

    name: linear: the mean of areas if both sides become smaller, else bilinear; antialias, bicubic: Pillow's filters.
    """
    if name in ("antialias", "bicubic"):
        kernel = Image.Resampling.BILINEAR if name == "antialias" else Image.Resampling.BICUBIC
        return np.asarray(Image.fromarray(image).resize(size[::-1], kernel))
    is_smaller = image.shape[0] > size[0] and image.shape[1] > size[1]
    method = cv2.INTER_AREA if name == "linear" and is_smaller else cv2.INTER_LINEAR
    return cv2.resize(image, size[::-1], interpolation=method)


def files_of(places: list[Path]) -> Iterator[Path]:
    """The files, and of folders all images in them."""
    for place in places:
        # Names with a dot in front are hidden, as macOS's ._photo.jpg.
        inside = (file for file in place.rglob("[!.]*") if file.suffix.lower() in SUFFIXES.split())
        yield from sorted(inside) if place.is_dir() else [place]


def main() -> None:
    script = Path(__file__)
    parser = argparse.ArgumentParser(description="Print the most likely classes of images, or numbers.")
    parser.add_argument("images", nargs="+", type=Path, help="image files, and folders of these")
    predictor = Predictor(script.with_name(f"{script.stem.removesuffix('_predict')}.onnx"))
    num_unreadable = 0
    for file in files_of(parser.parse_args().images):
        try:
            form = ".5g" if predictor.numbers else ".1%"
            said = ", ".join(f"{name} {value:{form}}" for name, value in predictor.predict(file))
        except Exception as error:  # Pillow raises any type.
            num_unreadable += 1
            said = f"cannot be read: {error}"
        print(f"{file}  {said}")
    if num_unreadable:
        sys.exit(f"images that cannot be read: {num_unreadable}")


if __name__ == "__main__":
    main()
