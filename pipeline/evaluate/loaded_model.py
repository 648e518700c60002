"""Loads weights for evaluation, prediction and explanation: a model with its device and preprocessing.

Shapes: B batch, H, W image height and width, D features, K classes.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline import model as models
from pipeline.architecture.pixels import Pixels
from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.base.words import counted, printable
from pipeline.data.dataset.split import BadBudget, Split
from pipeline.data.images.stored import describe_left_out
from pipeline.data.loading.loader import normalise
from pipeline.data.loading.single_image import trained_view
from pipeline.data.loading.views import eval_view, read_by
from pipeline.evaluate.classify import Features, Predictions, read_shown
from pipeline.evaluate.regression import TargetPredictions
from pipeline.evaluate.split_reader import SplitReader
from pipeline.model import Model, VisionTransformer
from pipeline.model.files import FILES
from pipeline.model.published import SUFFIXES
from pipeline.model.weights import TARGETS
from pipeline.process.committed import NAME as CHECKPOINT
from pipeline.process.distributed import Ranks, use_exact_arithmetic
from pipeline.process.outputs import Holds, try_output
from pipeline.process.waits import Work
from pipeline.settings.commands.weights import TrainedLoss, WeightsConfig
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig

_NUM_TOLD = 20  # unreadable images


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device, in evaluation mode.

    view: the preprocessing of images. loss_kind: softmax, sigmoid or regression. extra: metadata of the weights file.
    """

    model: Model
    device: torch.device
    dtype: torch.dtype
    image_size: ImageSize
    view: AugmentConfig
    loss_kind: str
    extra: dict[str, Any]

    @contextmanager
    def reading(self, split: Split, config: WeightsConfig) -> Iterator[SplitReader]:
        """A reader of the split with the preprocessing of these weights, for this process alone."""
        for note in self.pixels.filled_notes(split.pixels, f"split {split.name!r}"):
            print(f"note: {note}")
        alone = Ranks(0, 0, 1, self.device)
        remedy = "Check the images, or raise max_bad_share."
        budget = BadBudget(config.max_bad_share, "max_bad_share", remedy, config.least_bad)
        reader = SplitReader(
            split, self.image_size, self.view, config.batch, config.threads, alone, budget=budget, pixels=self.pixels
        )
        yield reader
        for line in describe_left_out(Counter(what for unread in reader.left_out.values() for what in unread)):
            print(line)

    @property
    def target_names(self) -> list[str]:
        """Names of the numbers that the head predicts, each in its own unit; [] for a head of classes."""
        return self.extra.get(TARGETS, []) if self.loss_kind == "regression" else []

    @property
    def made_by(self) -> dict[str, Any]:
        """run and step that the weights are of, None where they are not known."""
        return {name: self.extra.get(name) for name in ("run", "step")}

    @property
    def pixels(self) -> Pixels:
        """What the values of its images mean."""
        return self.model.config.pixels

    @property
    def vit(self) -> VisionTransformer:
        """The model, after `refuse_without_patches`."""
        assert isinstance(self.model, VisionTransformer)
        return self.model

    def images(self, pixels: Tensor) -> Tensor:
        """Images (B, H, W, C) of a batch -> (B, C, H, W), the model's input."""
        return normalise(pixels, self.device, self.dtype, self.pixels)

    def features(self, pixels: Tensor) -> Tensor:
        """images (B, H, W, C) -> (B, D), the head's input."""
        return self.model.features(self.images(pixels))

    def patch_features(self, pixels: Tensor) -> Tensor:
        """images (B, H, W, C) -> float32 (B, rows, columns, D), as of `VisionTransformer.patch_features`."""
        return self.vit.patch_features(self.images(pixels)).float()

    def shown(self, config: WeightsConfig, split: Split, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows that can be read, and what the model sees of them, uint8 (n, H, W, 3).

        The others are printed. Raises UserError for none.
        """
        view = eval_view(self.view, self.image_size, *read_by(self.pixels, split))
        kept, images, problems = read_shown(split, view, rows, config.batch, config.threads)
        print_unreadable(problems, split, "left out")
        refuse_none_readable(f"split {split.name!r} that were chosen", problems, split, len(rows))
        return kept, images

    def logits(self, pixels: Tensor) -> Tensor:
        """images (B, H, W, C) -> float32 (B, K), the logits of classes, or numbers."""
        return self.outputs(self.features(pixels))

    def outputs(self, features: Tensor) -> Tensor:
        """`features` (B, D) -> float32 (B, K), as of `logits`."""
        return self.model.head(features.float() if self.loss_kind == "regression" else features).float()


def load_model(config: WeightsConfig, loss: TrainedLoss = "auto", content: models.Weights | None = None) -> LoadedModel:
    """Load `config.weights`. loss: what they were trained with. content: of these weights, if it was read.

    Raises UserError for weights that cannot be read, or not so.
    """
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise UserError("device = cuda, but torch sees no GPU here. Use device=cpu.")
    device = torch.device("cuda" if available and config.device != "cpu" else "cpu")
    use_exact_arithmetic(device)
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    # Read once: a run in training changes its `latest`, and the metadata must belong to these weights.
    if content is None:
        with Work(f"reading {config.weights}"):
            content = models.read_weights(config.weights, say=print)
    extra = content.extra
    if note := models.checkpoint_note(extra):
        print(note)
    image_size = ImageSize.parse(config.image_size or content.config.image_size)
    view = evaluation_view(config, image_size, extra.get("preprocessing", {}))
    loss_kind = extra.get("loss", "softmax") if loss == "auto" else loss
    model = models.load(config.weights, image_size, content=content, say=print)
    head = copy.deepcopy(model.head) if loss_kind == "regression" else None
    model = model.to(device, dtype)
    if head is not None:  # In 16 bits, a year 1990 would be 1984 or 1992.
        model.head = head.to(device)
    return LoadedModel(model, device, dtype, image_size, view, loss_kind, extra)


def evaluation_view(config: WeightsConfig, image_size: ImageSize | int, trained: dict[str, Any]) -> AugmentConfig:
    """The preprocessing: from `config`, else from the metadata of the weights (`trained`), else the default."""
    names = ("eval_crop", "eval_resize", "resize_filter")
    asked = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return trained_view(trained, ImageSize.parse(image_size), config.weights, asked)


def check_outputs(
    weights: str,
    where: str,
    seen: Predictions | TargetPredictions | Features,
    split: Split,
    rows: np.ndarray | None = None,
) -> None:
    """Raise UserError if no image is readable, or the outputs for some image are not finite.

    weights, where: names of the weights and the images for the message. rows: int64, those of the split that were read;
    None is all.
    """
    rows = np.arange(len(split)) if rows is None else rows
    refuse_none_readable(where, seen.problems, split, len(rows))
    values = seen.loss if isinstance(seen, Predictions) else seen.values.sum(1)
    refuse_not_finite(weights, split, rows, rows[seen.readable & ~np.isfinite(values)])


def refuse_not_finite(weights: str, split: Split, rows: np.ndarray, broken: np.ndarray) -> None:
    """Raise UserError if some outputs are not finite. rows: int64, those that were computed. broken: those of them."""
    if len(broken):
        raise UserError(
            f"{weights} gives NaN or infinity for {len(broken):,} of {counted(len(rows), 'image')}, the first"
            f" {split.keys(broken[:1])[0]}. Use precision=fp32, or an earlier checkpoint."
        )


def refuse_without_patches(weights: str, model: Model) -> None:
    """Raise UserError for a ResNet. weights: its name for the message."""
    if not isinstance(model, VisionTransformer):
        raise UserError(f"weights = {weights}: a ResNet has no patch tokens. Use a ViT, or a hybrid.")


def refuse_none_readable(where: str, problems: dict[int, str], split: Split, num_images: int) -> None:
    """Raise UserError if no image is readable. problems: row -> reason."""
    if len(problems) == num_images:
        row = min(problems)
        raise UserError(
            f"none of the {counted(num_images, 'image')} of {where} can be read; the first is {split.keys([row])[0]}: "
            f"{problems[row]}. Check the files."
        )


def print_unreadable(problems: dict[int, str], split: Split, what: str) -> None:
    """Print the first images that cannot be read. problems: row -> reason. what: becomes of them."""
    rows = sorted(problems)[:_NUM_TOLD]
    for row, key in zip(rows, split.keys(rows), strict=True):
        print(printable(f"{what}: {key} cannot be read ({problems[row]})"))
    if len(problems) > _NUM_TOLD:
        print(f"{what}: {len(problems) - _NUM_TOLD:,} more")


def output_folder(out: str, weights: str, kind: str, name: str = "", *, holds: Holds) -> Path:
    """`out`, else <run>/<kind>/<name>; <run>/<kind>/<step>-<name> for a checkpoint in a run; or
    runs/<kind>/<weights>-<name>.

    holds: what the folder is for. Raises UserError when it cannot be
    written, holds results of another kind, or is runs/<kind>/<weights>-<name> with results of other weights of this
    name.
    """
    path = _named(weights)
    parent = path.absolute().parent
    own = path.resolve().stem if path.suffix in SUFFIXES else path.resolve().name
    label = f"{own}-{name}" if name else own
    if out:
        folder = Path(out)
    elif (path / "checkpoints").is_dir() or (path / "status.json").is_file():
        folder = path / kind / name
    elif parent.name == "checkpoints":
        folder = parent.parent / kind / label
    else:
        # In checkpoint.folder, the folder of a run's checkpoints has its name.
        folder = Path("runs") / kind / (f"{parent.name}-{label}" if CHECKPOINT.fullmatch(path.name) else label)
        if (earlier := _results_in(folder)) and _named(earlier).resolve() != path.resolve():
            raise UserError(f"{folder} holds results of {earlier}. Set out=FOLDER for those of {weights}.")
    try_output("out", folder, holds=holds)
    return folder


def _named(weights: str) -> Path:
    """The path of weights, without an uninformative file name."""
    path = Path(weights)
    return path.parent if path.name in FILES else path


@dataclass(frozen=True)
class _Results:
    weights: str


def _results_in(folder: Path) -> str | None:
    """The weights that the results in a folder are of; None if there are none."""
    files = ("scores.json", "explain.json", "segmentation.json")
    found = filter(None, (json_record.read_or_none(folder / file, _Results) for file in files))
    return next((results.weights for results in found), None)
