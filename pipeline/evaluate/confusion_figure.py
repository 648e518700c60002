"""The confusion matrix as a picture."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from pipeline.evaluate.classify import confusion
from pipeline.page import png

_MAX_DRAWN, _MOST_CONFUSED = 50, 30
_MAX_ANNOTATED = 20
_MAX_NAME = 24


def draw_confusion(true: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> bytes:
    """A PNG: each cell the share of its true class, in rows, predicted as the column's; numbers for up to 20 classes.

    true, predicted: int64 (n,), from `outcomes`; unreadable images and samples without labels are left out. names: of
    all K classes. Of more than 50 classes the 30 that are most confused are drawn.
    """
    seen = (true >= 0) & (predicted >= 0)
    true, predicted = true[seen], predicted[seen]
    drawn, title = np.arange(len(names)), f"{len(true):,} images; colour: share of the true class"
    if len(names) > _MAX_DRAWN:
        drawn = most_confused_classes(true, predicted, len(names))
        title = f"The {len(drawn)} most confused of {len(names):,} classes; rows do not sum to 100 %"
    counts = confusion(true, predicted, drawn)
    totals = np.bincount(true, minlength=len(names))[drawn]
    return _draw(counts, counts / np.maximum(totals, 1)[:, None], [names[c] for c in drawn.tolist()], title)


def most_confused_classes(true: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """int64 (30,), ascending: the classes of the most frequent mistakes, then the first ones, until there are 30."""
    pairs, counts = np.unique(np.stack([true, predicted])[:, true != predicted], axis=1, return_counts=True)
    most_first = pairs[:, np.argsort(-counts, kind="stable")].T.ravel()
    candidates = np.concatenate([most_first, np.arange(num_classes)])
    first_places = np.sort(np.unique(candidates, return_index=True)[1])
    return np.sort(candidates[first_places[:_MOST_CONFUSED]])


def _draw(counts: np.ndarray, shares: np.ndarray, names: Sequence[str], title: str) -> bytes:
    annotated = len(names) <= _MAX_ANNOTATED
    side = max(4.0, (0.55 if annotated else 0.26) * len(names) + 2.0)
    figure = Figure(figsize=(side + 0.8, side), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    # The square root of the share: a mistake in fifty should be seen beside a diagonal near one.
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    bar = figure.colorbar(image, ax=axes, shrink=0.8, ticks=[0, 0.01, 0.05, 0.25, 0.5, 1])
    bar.ax.set_yticklabels(["0", "1 %", "5 %", "25 %", "50 %", "100 %"])
    short = [shorten(name) for name in names]
    # A "$" in a name is no formula.
    axes.set_xticks(range(len(names)), short, rotation=90, parse_math=False)
    axes.set_yticks(range(len(names)), short, parse_math=False)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title(title)
    axes.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    if annotated:
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if shares[row, column] > 0.3 else "black"
            axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", color=colour, fontsize=8)
    return png(figure)


def shorten(name: str, most: int = _MAX_NAME) -> str:
    """At most so many characters, without its middle: long names differ at either end."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"
