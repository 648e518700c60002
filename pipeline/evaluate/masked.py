"""Scores of masked patch prediction on a split, exact on any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pipeline.data.dataset.manifest import Split
from pipeline.data.loading.loader import Batch
from pipeline.distributed import Ranks
from pipeline.evaluate.classify import each_sample
from pipeline.lifecycle.stop import Stop
from pipeline.objectives.masked_patches import Masking
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig


@dataclass(frozen=True)
class MaskedScores:
    """Means over the readable samples. color_accuracy: share of colours predicted right; None where pixels are predicted."""

    loss: float
    color_accuracy: float | None
    num_samples: int
    num_unreadable: int

    def __str__(self) -> str:
        right = "" if self.color_accuracy is None else f"{self.color_accuracy:.2%} of the colours right, "
        bad = f", {self.num_unreadable} unreadable" if self.num_unreadable else ""
        return f"masked patches: {right}loss {self.loss:.4f} on {self.num_samples:,} images{bad}"


def score_masked(
    forward: Callable[..., Tensor],
    masking: Masking,
    split: Split,
    image_size: ImageSize | int,
    augment: AugmentConfig,
    batch: int,
    threads: int,
    ranks: Ranks,
    stop: Stop | None = None,
) -> MaskedScores:
    """Predict the corrupted patches of every image, corrupted alike at each evaluation. The same on every rank.

    forward: (uint8 (B, H, W, 3), sources, corrupted) -> predictions, as MaskedViT's. Raises Stopped as `each_sample`.
    """
    device = ranks.device

    def columns(loaded: Batch) -> list[Tensor]:
        sources, corrupted = masking.inputs(loaded, device)
        targets = masking.targets(loaded.images.to(device), corrupted)
        predictions = forward(loaded.images, sources, corrupted)
        found = [masking.losses(predictions, targets)]
        if not masking.predicts_pixels:
            found.append(masking.color_accuracy(predictions, targets))
        return [column.double() for column in found]

    values, readable, _ = each_sample(columns, split, image_size, augment, batch, threads, ranks, stop=stop)
    num_readable = int(readable.sum())
    loss, *right = [float(column[readable].mean()) if num_readable else float("nan") for column in values]
    return MaskedScores(loss, right[0] if right else None, len(split), len(split) - num_readable)
