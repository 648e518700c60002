"""Scores of masked patch prediction on a split, exact on any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pipeline.data.loading.loader import Batch
from pipeline.evaluate.classify import each_sample
from pipeline.evaluate.split_reader import SplitReader
from pipeline.objectives.masked_patches import Masking
from pipeline.words import counted


@dataclass(frozen=True)
class MaskedScores:
    """Means over the readable samples. color_accuracy: share of correctly predicted colours; None if pixels are predicted."""

    loss: float
    color_accuracy: float | None
    num_samples: int
    num_unreadable: int

    def __str__(self) -> str:
        right = "" if self.color_accuracy is None else f"{self.color_accuracy:.2%} of the colours right, "
        bad = f", {self.num_unreadable:,} unreadable (not scored)" if self.num_unreadable else ""
        return f"masked patches: {right}loss {self.loss:.4f} on {counted(self.num_samples, 'image')}{bad}"


def score_masked(forward: Callable[..., Tensor], masking: Masking, reader: SplitReader) -> MaskedScores:
    """Score the predictions of corrupted patches on the whole split; see `each_sample`. All evaluations corrupt the same patches.

    forward: (uint8 (B, H, W, 3), sources, corrupted) -> predictions, as MaskedViT.
    """
    device, num_samples = reader.ranks.device, len(reader.split)

    def columns(loaded: Batch) -> list[Tensor]:
        sources, corrupted = masking.inputs(loaded, device)
        targets = masking.targets(loaded.images.to(device), corrupted)
        predictions = forward(loaded.images, sources, corrupted)
        found = [masking.losses(predictions, targets)]
        if not masking.predicts_pixels:
            found.append(masking.color_accuracy(predictions, targets))
        return [column.double() for column in found]

    values, readable, _ = each_sample(columns, reader)
    num_readable = int(readable.sum())
    loss, *right = [float(column[readable].mean()) if num_readable else float("nan") for column in values]
    return MaskedScores(loss, right[0] if right else None, num_samples, num_samples - num_readable)
