"""Scores equal scikit-learn's, whatever the number of ranks; every image counts once, unreadable ones as wrong."""

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor

from pipeline.base.errors import OneRankError, UserError
from pipeline.data.dataset.manifest import Split
from pipeline.data.dataset.split import BadBudget
from pipeline.evaluate.classify import Predictions, label_table, outcomes, per_class, predict, score
from pipeline.evaluate.split_reader import SplitReader
from pipeline.process.distributed import Ranks
from pipeline.settings.run import AugmentConfig

K = 7
SIZE = 8
WHOLE = AugmentConfig(eval_crop="resize")


class Board:
    """Objects that simulated ranks, which are threads, exchange."""

    def __init__(self, world_size: int) -> None:
        self.values: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=300)


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    board: Board

    def gather(self, value: Any) -> list[Any]:
        self.board.values[self.rank] = value
        self.board.barrier.wait()
        return list(self.board.values)


def predict_on(
    world_size: int, split: Split, table: np.ndarray, loss_kind: str = "softmax", batch: int = 4, bad_share: float = 0.1
) -> list[Predictions]:
    """What each rank returns or raises when the model's logits of sample `row` are table[row]."""
    board = Board(world_size)
    results: list[Any] = [None] * world_size

    def forward(images: Tensor) -> Tensor:
        rows = images[:, 0, 0, 0].long() + 256 * images[:, 0, 0, 1].long()
        return torch.from_numpy(table)[rows]

    def work(rank: int) -> None:
        ranks = ThreadRanks(rank, rank, world_size, torch.device("cpu"), board)
        reader = SplitReader(split, SIZE, WHOLE, batch, 1, ranks, budget=BadBudget(bad_share))
        try:
            results[rank] = predict(forward, reader, loss_kind)
        except UserError as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def random_case(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(labels (n,), logits (n, K)) with an accuracy of about one half."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, K - 1, n)  # The last class has no samples.
    logits = rng.normal(size=(n, K)) + 1.5 * np.eye(K)[labels]
    return labels, logits.astype(np.float32)


def share_right(labels: np.ndarray, logits: np.ndarray, k: int) -> float:
    return metrics.top_k_accuracy_score(labels, logits, k=k, labels=range(K), normalize=False)


@pytest.mark.parametrize("loss_kind", ["softmax", "sigmoid"])
def test_scores_equal_scikit_learns(make_dataset, loss_kind: str) -> None:
    n, bad = 300, [0, 17, 299]
    labels, logits = random_case(n)
    split = make_dataset({"val": [[int(c)] for c in labels]}, list("abcdefg"), {"val": bad}).split("val")
    (predictions,) = predict_on(1, split, logits, loss_kind, batch=32)
    scores = score(predictions, split, K)

    ok = np.setdiff1d(np.arange(n), bad)
    assert scores.top1 == share_right(labels[ok], logits[ok], 1) / n
    assert scores.top5 == share_right(labels[ok], logits[ok], 5) / n
    assert scores.top1 < scores.top5 < 1
    wide = logits[ok].astype(np.float64)
    if loss_kind == "softmax":
        shares = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
        loss = metrics.log_loss(labels[ok], shares, labels=range(K))
    else:
        shares = 1 / (1 + np.exp(-wide))
        hot = np.eye(K)[labels[ok]]
        loss = sum(metrics.log_loss(hot[:, c], shares[:, c], labels=[0, 1]) for c in range(K))
    assert scores.loss == pytest.approx(loss, rel=1e-6)
    best = np.take_along_axis(shares, predictions.top[ok], axis=1)
    np.testing.assert_allclose(predictions.probabilities[ok], best, rtol=1e-5)
    np.testing.assert_allclose(best[:, 0], shares.max(1))
    assert (scores.num_samples, scores.num_unreadable) == (n, 3)
    assert sorted(predictions.problems) == bad
    assert "3 unreadable (counted as wrong; the loss is that of the other 297)" in str(scores)


def test_what_is_no_number_is_wrong(make_dataset) -> None:
    """It was some class: a model that had diverged could have the best top-1 of a run, as of a split of which most are
    of that class.
    """
    labels, logits = np.arange(K).repeat(3), np.full((3 * K, K), np.nan, np.float32)
    logits[::3] = 5 * np.eye(K)
    split = make_dataset({"val": [[int(c)] for c in labels]}, list("abcdefg")).split("val")
    for loss_kind in ("softmax", "sigmoid"):
        (predictions,) = predict_on(1, split, logits, loss_kind)
        scores = score(predictions, split, K, loss_kind)
        assert (scores.top1, scores.top5, math.isnan(scores.loss)) == (1 / 3, 1 / 3, True)
        true, predicted = outcomes(predictions, split)
        assert (true == labels).all()
        assert predicted.reshape(K, 3).tolist() == [[c, -1, -1] for c in range(K)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 5, 23])
def test_every_number_of_ranks_gives_the_same(make_dataset, world_size: int, n: int) -> None:
    labels, logits = random_case(n, seed=n)
    bad = [n - 1] if n > 1 else []  # The row that short ranks repeat.
    split = make_dataset({"val": [[int(c)] for c in labels]}, list("abcdefg"), {"val": bad}).split("val")
    ok = np.setdiff1d(np.arange(n), bad)
    for predictions in predict_on(world_size, split, logits):
        assert np.array_equal(predictions.top[ok], np.argsort(-logits[ok], axis=1)[:, :5])
        assert np.array_equal(np.flatnonzero(~predictions.readable), bad)
        assert list(predictions.problems) == bad
        scores = score(predictions, split, K)
        assert scores.top1 == share_right(labels[ok], logits[ok], 1) / n if n > 1 else scores.top1 in (0, 1)
        assert scores.num_samples == n


def test_too_many_unreadable_images_are_no_score_on_any_rank(make_dataset) -> None:
    """Each rank alone is within the budget of 2 of 23; together they are not."""
    labels, logits = random_case(23)
    split = make_dataset({"val": [[int(c)] for c in labels]}, list("abcdefg"), {"val": [0, 9, 20]}).split("val")
    for error in predict_on(3, split, logits, bad_share=0.1):
        assert not error.on_one_rank
        assert "data.max_bad_share = 0.1 allows (2); the first is val0: " in str(error)
    (error,) = predict_on(1, split, logits, bad_share=0.1)
    assert isinstance(error, OneRankError)  # It says so before the end.
    assert all(isinstance(found, Predictions) for found in predict_on(3, split, logits, bad_share=0.14))


def test_classes_equal_scikit_learns() -> None:
    labels, logits = random_case(400)
    predicted = logits.argmax(1)
    predicted[:5] = -1  # Unreadable: lowers the recall of its class, and no precision.
    report = per_class(labels, predicted, K)
    expected = metrics.precision_recall_fscore_support(labels, predicted, labels=range(K), zero_division=0)
    for ours, theirs in zip((report.precision, report.recall, report.f1, report.support), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert report.support[K - 1] == 0
    present = range(K - 1)
    for name, function in (
        ("precision", metrics.precision_score),
        ("recall", metrics.recall_score),
        ("f1", metrics.f1_score),
    ):
        assert report.macro()[f"macro_{name}"] == pytest.approx(
            function(labels, predicted, labels=present, average="macro")
        )
    # Recall weighted by support is top-1, with unreadable images counted as wrong.
    assert np.average(report.recall, weights=report.support) == pytest.approx((labels == predicted).mean())


def test_any_of_several_labels_is_right(make_dataset) -> None:
    labels = [[1, 4], [2], [0, 3, 5], [], [1, 2], [6]]
    split = make_dataset({"val": labels}, list("abcdefg"), {"val": [4]}).split("val")
    assert label_table(split).tolist() == [[1, 4, -1], [2, -1, -1], [0, 3, 5], [-1] * 3, [1, 2, -1], [6, -1, -1]]
    # First guess: the second label; wrong; wrong, but the second guess is the third label; no label; right, but
    # unreadable; right.
    top = np.array([[4, 0], [1, 0], [2, 5], [0, 1], [2, 1], [6, 0]])
    readable = np.array([True, True, True, True, False, True])
    predictions = Predictions(top, np.ones(top.shape, np.float32), np.arange(6.0), readable, {4: "cut"}, np.ones(6))
    scores = score(predictions, split, 7)
    assert (scores.top1, scores.top5) == (2 / 6, 3 / 6)
    assert scores.loss == (0 + 1 + 2 + 5) / 4
    assert score(predictions, split, 7, "sigmoid").loss == (0 + 1 + 2 + 3 + 5) / 5
    true, predicted = outcomes(predictions, split)
    assert true.tolist() == [4, 2, 0, -1, 1, 6]
    assert predicted.tolist() == [4, 1, 2, 0, -1, 6]
    report = per_class(true, predicted, 7)
    assert report.support.tolist() == [1, 1, 1, 0, 1, 0, 1]
    assert report.precision.tolist() == [0, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize(("num_classes", "top5"), [(4, None), (5, None), (6, 1.0)])
def test_top5_of_five_classes_or_fewer_is_left_out(make_dataset, num_classes: int, top5: float | None) -> None:
    """It was 100 % of four classes, whatever the model."""
    split = make_dataset({"val": [[0], [1], [2]]}, list("abcdef")[:num_classes]).split("val")
    (predictions,) = predict_on(1, split, np.eye(3, num_classes, dtype=np.float32))
    scores = score(predictions, split, num_classes)
    assert (scores.top1, scores.top5) == (1.0, top5)
    assert ("top5" in scores.to_dict()) == ("top-5" in str(scores)) == (top5 is not None)


def test_labels_of_a_second_split(make_dataset) -> None:
    """The label offsets of a later split start at an offset within the file."""
    dataset = make_dataset({"train": [[0, 1], [2]], "val": [[3], [4, 5]]}, list("abcdefg"))
    assert label_table(dataset.split("val")).tolist() == [[3, -1], [4, 5]]
