"""Predictions, features and scores of a split, of classification or as an objective defines them, exact on any number
of ranks.

Shapes: B batch, K classes, M labels, D features, n samples.

A prediction is correct if it is any of the sample's labels. An unreadable image counts as wrong, and so do
non-finite logits.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.base.errors import UserError
from pipeline.base.words import counted
from pipeline.data.dataset.manifest import Split
from pipeline.data.loading.loader import Batch, Loader, eval_requests
from pipeline.data.loading.values import to_rgb
from pipeline.data.loading.views import ViewWriter
from pipeline.evaluate.intervals import effective_number
from pipeline.evaluate.split_reader import SplitReader
from pipeline.objectives import classification


@dataclass(frozen=True)
class Predictions:
    """Predictions for all samples of a split, in row order.

    top: int64 (n, T), the T most likely classes, best first. probabilities: float32 (n, T), of these classes.
    loss: float64 (n,). readable: bool (n,), False where the image could not be decoded. problems: row -> reason.
    of_label: float32 (n,), the probability of the label, of several the largest; 0 without one.
    of_classes: float32 (n, K), the probabilities of all classes, where they were asked for.
    """

    top: np.ndarray
    probabilities: np.ndarray
    loss: np.ndarray
    readable: np.ndarray
    problems: dict[int, str]
    of_label: np.ndarray
    of_classes: np.ndarray | None = None

    @property
    def computed(self) -> np.ndarray:
        """bool (n,), False for unreadable images and non-finite logits, whose most likely class is arbitrary."""
        return self.readable & np.isfinite(self.loss)


@dataclass(frozen=True)
class ClassificationScores:
    """top1, top5: accuracies in [0, 1] over all n samples. loss: mean over the readable samples, and of softmax over
    those with a label.

    top5: None for too few classes (`classification.has_top5`). top1_effective_images, top5_...: of
    `effective_number`; None for data without groups. map: the mean average precision of several labels, with the
    ends of its interval.
    """

    top1: float
    top5: float | None
    loss: float
    num_samples: int
    num_unreadable: int
    top1_effective_images: float | None = None
    top5_effective_images: float | None = None
    map: float | None = None
    map_low: float | None = None
    map_high: float | None = None

    def to_dict(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        bad = ""
        if self.num_unreadable:
            readable = self.num_samples - self.num_unreadable
            bad = f", {self.num_unreadable:,} unreadable (counted as wrong; the loss is that of the other {readable:,})"
        top5 = "" if self.top5 is None else f", top-5 {self.top5:.2%}"
        asked = "" if self.map is None else f"mAP {self.map:.2%}, "
        return f"{asked}top-1 {self.top1:.2%}{top5}, loss {self.loss:.4f} on {counted(self.num_samples, 'image')}{bad}"


def predict(
    forward: Callable[[Tensor], Tensor],
    reader: SplitReader,
    loss_kind: str,
    num_top: int = classification.TOP,
    keeps_all: bool = False,
) -> Predictions:
    """Run `forward` (uint8 (B, H, W, 3) -> float32 logits (B, K)) over the whole split; see `each_sample`.

    num_top: number of most likely classes to keep, at most K. keeps_all: also the probabilities of all classes.
    """

    def columns(loaded: Batch) -> list[Tensor]:
        logits = forward(loaded.images)
        labels, probabilities = loaded.labels.to(logits.device), probabilities_of(logits, loss_kind).float()
        losses = classification.losses(logits, labels, loss_kind)
        top = logits.topk(min(num_top, logits.shape[1]), dim=1).indices
        of_label = (probabilities * classification.targets(labels, logits.shape[1])).amax(1)
        return [top, probabilities.gather(1, top), losses.double(), of_label, *([probabilities] if keeps_all else [])]

    (top, probabilities, loss, of_label, *of_classes), readable, problems = each_sample(columns, reader)
    return Predictions(top, probabilities, loss, readable, problems, of_label, *of_classes)


@torch.no_grad()
def each_sample(
    columns: Callable[[Batch], list[Tensor]], reader: SplitReader, rows: np.ndarray | None = None
) -> tuple[list[np.ndarray], np.ndarray, dict[int, str]]:
    """Compute `columns`, tensors (B, ...) of a batch, for the samples `rows`, int64 (n,), n > 0, of the split; None is
    all.

    Collective. Returns on every rank the values in the order of the rows, and readable and problems as in
    `Predictions`. With rows, ranks take turns at batches that do not depend on their number, so that values are equal
    bit for bit on any number of ranks. Raises UserError when more images are unreadable than the reader's budget
    allows, and Stopped on all ranks when they agree to stop.
    """
    parts, ranks = [], reader.ranks
    share = reader.batch, ranks.rank, ranks.world_size
    asked = eval_requests(len(reader.split), *share) if rows is None else requests(rows, *share)
    rows = np.arange(len(reader.split)) if rows is None else rows
    with reader.open(asked, len(rows)) as (batches, problems):
        for loaded in batches:
            parts.append([loaded.rows, loaded.valid.numpy(), *(column.cpu().numpy() for column in columns(loaded))])
    gathered = ranks.gather((parts, problems))
    problems = reader.problems_of_all((bad for _, bad in gathered), len(rows))
    of_all_ranks = [part for rank_parts, _ in gathered for part in rank_parts]
    seen, *found = (np.concatenate(column) for column in zip(*of_all_ranks, strict=True))
    # The last ranks repeat samples to have as many batches as the others; keep one of each row.
    unique, first = np.unique(seen, return_index=True)
    places = np.searchsorted(unique, rows)
    assert np.array_equal(unique[places], rows), "every sample is computed"
    readable, *values = (column[first[places]] for column in found)
    return values, readable, problems


def requests(
    rows: np.ndarray, batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (rows, zeros) for a Loader: every world_size-th batch, beginning with number `rank`.

    All ranks get the same number of batches, because a forward pass is collective at ZeRO stage 3: ranks without a
    batch left repeat the last one.
    """
    last = -(-len(rows) // batch) - 1
    for first in range(0, last + 1, world_size):
        start = min(first + rank, last) * batch
        part = rows[start : start + batch]
        yield part, np.zeros(len(part), dtype=np.int64)


@dataclass(frozen=True)
class Features:
    """Features of n images. values: float32 (n, D). readable: bool (n,), False where values are invalid. problems: row
    -> reason.
    """

    values: np.ndarray
    readable: np.ndarray
    problems: dict[int, str]

    @property
    def usable(self) -> np.ndarray:
        """bool (n,), False for unreadable images and non-finite features."""
        return self.readable & np.isfinite(self.values).all(1)


def extract(features: Callable[[Tensor], Tensor], reader: SplitReader, rows: np.ndarray) -> Features:
    """Run `features` (images (B, H, W, C) -> (B, D)) over the samples `rows`; see `each_sample`."""
    (values,), readable, problems = each_sample(lambda batch: [features(batch.images).float()], reader, rows)
    return Features(values, readable, problems)


def read_shown(
    split: Split, view: ViewWriter, rows: np.ndarray, batch: int = 16, threads: int = 1
) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """(those of the rows that can be read, in their order; what a model sees of them, uint8 (n, H, W, 3); row -> reason
    of the others).
    """
    kept, pixels = [], []
    with Loader(split, view, threads) as loader:
        for loaded in loader.batches(requests(rows, batch)):
            kept.append(loaded.rows[loaded.valid.numpy()])
            pixels.append(loaded.images[loaded.valid])
    return np.concatenate(kept), to_rgb(torch.cat(pixels).numpy(), view.pixels), loader.bad


def probabilities_of(logits: Tensor, loss_kind: str) -> Tensor:
    """(B, K) -> (B, K) by the output function of the loss; sigmoid probabilities do not sum to one."""
    return logits.softmax(1) if loss_kind == "softmax" else logits.sigmoid()


def score(predictions: Predictions, split: Split, num_classes: int, loss_kind: str = "softmax") -> ClassificationScores:
    """Accuracy and loss of the predictions. num_classes: K."""
    n, labels = len(split), label_table(split)
    hits = is_any(predictions.top, labels) & predictions.computed[:, None]
    readable = int(predictions.readable.sum())
    # Without a label, a softmax has nothing to predict, and its loss is 0, as if it were certain and right.
    losses = predictions.loss[predictions.readable & ((labels[:, 0] >= 0) | (loss_kind != "softmax"))]
    loss = float(losses.mean()) if len(losses) else float("nan")
    top1, top5 = hits[:, 0], hits.any(1)
    effective = [
        None if split.groups is None else effective_number(*in_groups(of, split.groups)) for of in (top1, top5)
    ]
    scores = ClassificationScores(float(top1.sum()) / n, None, loss, n, n - readable, effective[0])
    if classification.has_top5(num_classes):
        return replace(scores, top5=float(top5.sum()) / n, top5_effective_images=effective[1])
    return scores


def in_groups(values: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sums of the values, number of samples) of each group, float64 and int64 (G,). values: (n,). groups: int64 (n,),
    of `Split.groups`.
    """
    return np.bincount(groups, weights=values), np.bincount(groups)


def label_table(split: Split) -> np.ndarray:
    """int64 (n, M), -1 where a sample has fewer than M labels (M is at least 1)."""
    table = np.full((len(split), max(1, split.max_labels)), -1, dtype=np.int64)
    present = np.arange(table.shape[1]) < split.label_counts[:, None]
    table[present] = split.label_values
    return table


def label_map(classes: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """int32, the number of each of `classes` among `names`, which has them all. Raises UserError if it has one of them
    twice.
    """
    count = Counter(names)
    if shared := next((name for name in classes if count[name] > 1), None):
        raise UserError(
            f"several classes of the weights have the name {shared!r}, so classes cannot be matched by name. If those"
            " of the data have the same order: match_classes=false."
        )
    number = {name: place for place, name in enumerate(names)}
    return np.array([number[name] for name in classes], np.int32)


def is_any(predicted: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """bool (n, T): whether each predicted class, (n, T), not negative, is one of the sample's labels, (n, M)."""
    hits = np.zeros(predicted.shape, dtype=bool)
    for column in labels.T:
        hits |= predicted == column[:, None]
    return hits


def outcomes(predictions: Predictions, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """(true, predicted) class of each sample, int64 (n,) each; predicted is -1 where none is computed.

    For a sample with several labels, the true class is the predicted one if that is correct, else its first label; -1
    for a sample without labels.
    """
    labels = label_table(split)
    best = predictions.top[:, :1]
    right = is_any(best, labels)[:, 0] & predictions.computed
    return np.where(right, best[:, 0], labels[:, 0]), np.where(predictions.computed, best[:, 0], -1)


class ClassReport(NamedTuple):
    """float64 (K,) each; support: int64 (K,), samples per class.

    As in scikit-learn, a class without predictions has precision 0, one without samples recall 0. Unreadable images
    count in the support and lower the recall, so the recall weighted by support is the top-1 accuracy.
    """

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    support: np.ndarray

    @classmethod
    def of(cls, right: np.ndarray, guessed: np.ndarray, support: np.ndarray) -> "ClassReport":
        """Counts (K,) of right predictions, of predictions, and of samples of each class."""
        precision, recall = _share(right, guessed), _share(right, support)
        return cls(precision, recall, _share(2 * precision * recall, precision + recall), support)

    def macro(self) -> dict[str, float]:
        """Unweighted means over the classes with samples: macro_precision, macro_recall, macro_f1."""
        means = zip(("precision", "recall", "f1"), self, strict=False)
        return {f"macro_{name}": float(column[self.support > 0].mean()) for name, column in means}


def per_class(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> ClassReport:
    """Precision, recall and F1 per class, from `outcomes`; samples without labels are ignored."""
    predicted, true = predicted[true >= 0], true[true >= 0]
    right, guessed, support = (
        np.bincount(classes, minlength=num_classes)
        for classes in (true[true == predicted], predicted[predicted >= 0], true)
    )
    return ClassReport.of(right, guessed, support)


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


@dataclass(frozen=True)
class Means:
    """Scores that an objective defines. values: means over the readable samples, by name."""

    values: dict[str, float]
    num_samples: int
    num_unreadable: int

    def to_dict(self) -> dict[str, float]:
        return {**self.values, "num_samples": self.num_samples, "num_unreadable": self.num_unreadable}

    def __str__(self) -> str:
        bad = f", {self.num_unreadable:,} unreadable (not scored)" if self.num_unreadable else ""
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.values.items())
        return f"{values} on {counted(self.num_samples, 'image')}{bad}"


def means(measure: Callable[[Batch], dict[str, Tensor]], reader: SplitReader) -> Means:
    """Measure the whole split; see `each_sample`. measure: batch -> values of its images, (B,) by name."""
    names: list[str] = []

    def columns(batch: Batch) -> list[Tensor]:
        found = measure(batch)
        names[:] = found
        return [column.double() for column in found.values()]

    values, readable, _ = each_sample(columns, reader)
    num_samples, num_readable = len(reader.split), int(readable.sum())
    found = [float(column[readable].mean()) if num_readable else float("nan") for column in values]
    return Means(dict(zip(names, found, strict=True)), num_samples, num_samples - num_readable)
