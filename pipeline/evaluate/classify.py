"""Classification scores of a split, exact on any number of ranks. Shapes: B batch, K classes, n samples."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline import objective
from pipeline.config import AugmentConfig
from pipeline.data.loader import Loader, eval_requests, eval_view
from pipeline.data.manifest import Split
from pipeline.distributed import Ranks

_TOP = 5


@dataclass(frozen=True)
class Predictions:
    """Of every sample of a split, in row order.

    top: int64 (n, 5 or K), the most likely classes, best first. probability: float32 (n,), of the first.
    loss: float64 (n,). readable: bool (n,), False where the image could not be decoded (it counts as wrong).
    """

    top: np.ndarray
    probability: np.ndarray
    loss: np.ndarray
    readable: np.ndarray


@dataclass(frozen=True)
class Scores:
    """top1, top5: shares in [0, 1] of all n samples. loss: mean over the readable ones."""

    top1: float
    top5: float
    loss: float
    num_samples: int
    num_unreadable: int

    def __str__(self) -> str:
        bad = f", {self.num_unreadable} unreadable (counted as wrong)" if self.num_unreadable else ""
        return f"top-1 {self.top1:.2%}, top-5 {self.top5:.2%}, loss {self.loss:.4f} on {self.num_samples:,} images{bad}"


def predict(
    forward: Callable[[Tensor], Tensor],
    split: Split,
    image_size: int,
    augment: AugmentConfig,
    loss_kind: str,
    batch: int,
    threads: int,
    ranks: Ranks,
    progress: Callable[[int], object] = lambda count: None,
) -> Predictions:
    """Run `forward` (uint8 (B, S, S, 3) -> float32 logits (B, K)) over the whole split. The same on every rank.

    progress is told of each batch's size. Any number of unreadable images is let pass: they are counted, as errors.
    """
    parts = []
    with Loader(split, eval_view(augment), image_size, threads, prefetch=2, max_bad_share=1.0) as loader:
        for loaded in loader.batches(eval_requests(len(split), batch, ranks.rank, ranks.world_size)):
            logits = forward(loaded.images)
            losses = objective.losses(logits, loaded.labels.to(logits.device), loss_kind)
            top = logits.topk(min(_TOP, logits.shape[1]), dim=1).indices
            # The model's own output function: sigmoid probabilities do not sum to one.
            probability = logits.softmax(1) if loss_kind == "softmax" else logits.sigmoid()
            best = probability.gather(1, top[:, :1])[:, 0]
            parts.append([loaded.rows, *(t.cpu().numpy() for t in (top, best.float(), losses.double())), loaded.valid.numpy()])
            progress(len(loaded.rows))
    gathered = [part for rank_parts in ranks.gather(parts) for part in rank_parts]
    rows, *columns = (np.concatenate(column) for column in zip(*gathered, strict=True))
    # The last ranks repeat samples to make as many batches as the others; one of each row stays.
    unique, first = np.unique(rows, return_index=True)
    assert np.array_equal(unique, np.arange(len(split))), "every sample is predicted"
    top, probability, loss, readable = (column[first] for column in columns)
    return Predictions(top, probability, loss, readable)


def score(predictions: Predictions, split: Split) -> Scores:
    """Accuracy and loss. With several labels to a sample, a prediction is right when it is any of them."""
    rows = np.arange(len(split))
    n = len(rows)
    hits = np.zeros(predictions.top.shape, dtype=bool)
    for row in rows:
        hits[row] = np.isin(predictions.top[row], split.labels_of(row))
    hits &= predictions.readable[:, None]
    readable = int(predictions.readable.sum())
    loss = float(predictions.loss[predictions.readable].mean()) if readable else float("nan")
    return Scores(float(hits[:, 0].sum()) / n, float(hits.any(1).sum()) / n, loss, n, n - readable)


def confusion(predictions: Predictions, split: Split, num_classes: int) -> np.ndarray:
    """int64 (K, K): samples of true class (row) predicted as class (column).

    A sample of several labels counts under the predicted one if that is right, else under its first; unreadable ones
    are left out.
    """
    table = np.zeros((num_classes, num_classes), dtype=np.int64)
    for row in np.flatnonzero(predictions.readable):
        labels = split.labels_of(row)
        predicted = predictions.top[row, 0]
        table[predicted if predicted in labels else labels[0], predicted] += 1
    return table


@dataclass(frozen=True)
class ClassReport:
    """float64 (K,) each; a class without predictions has precision 0, without samples recall 0 (as scikit-learn)."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    support: np.ndarray


def per_class(table: np.ndarray) -> ClassReport:
    """Precision, recall and F1 of each class from a confusion table, int64 (K, K), true class in rows."""
    right = np.diag(table).astype(np.float64)
    precision = _share(right, table.sum(0))
    recall = _share(right, table.sum(1))
    f1 = _share(2 * precision * recall, precision + recall)
    return ClassReport(precision, recall, f1, table.sum(1))


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


@torch.no_grad()
def extract(
    features: Callable[[Tensor], Tensor], split: Split, rows: np.ndarray, image_size: int, augment: AugmentConfig,
    batch: int, threads: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Features float32 (n, D) and first labels int64 (n,) of the readable samples among `rows`, in order."""
    found, labels = [], []
    requests = ((rows[i : i + batch], np.zeros(batch, dtype=np.int64)) for i in range(0, len(rows), batch))
    with Loader(split, eval_view(augment), image_size, threads, prefetch=2, max_bad_share=1.0) as loader:
        for loaded in loader.batches(requests):
            found.append(features(loaded.images).float().cpu().numpy()[loaded.valid.numpy()])
            labels.append(loaded.labels[:, 0].numpy()[loaded.valid.numpy()])
    return np.concatenate(found), np.concatenate(labels)
