"""Figures of a run's last evaluation: confusion matrix, the worst classes, and a sheet of predictions."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from pipeline.data.dataset.split import Split
from pipeline.data.loading.loader import Loader, eval_view
from pipeline.errors import UserError
from pipeline.evaluate.classify import per_class
from pipeline.evaluate.probes.features import requests
from pipeline.evaluate.render import draw_confusion, shorten
from pipeline.explain import galleries
from pipeline.explain.figures import png as gallery_png
from pipeline.page import png
from pipeline.settings.run import RunConfig

_NUM_WORST = 25
_NUM_IMAGES = 32
_THREADS = 1


@dataclass(frozen=True)
class LastPredictions:
    """Content of predictions.npz: of the first images of the evaluated split. All (n,).

    rows: int64, in the split. true, predicted: int64, -1 for no label, and for an unreadable image. probability: float32.
    """

    rows: np.ndarray
    true: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray


def read_predictions(file: Path) -> LastPredictions:
    """Raises FileNotFoundError, and UserError for a damaged file."""
    try:
        with np.load(file, allow_pickle=False) as content:
            arrays = [np.asarray(content[name]) for name in ("rows", "true", "predicted", "probability")]
    except FileNotFoundError:
        raise
    except Exception as error:  # A damaged zip can raise nearly anything.
        raise UserError(f"{file} is damaged ({' '.join(str(error).split())[:100]}).") from None
    if any(array.ndim != 1 or len(array) != len(arrays[0]) for array in arrays):
        raise UserError(f"{file} is damaged: its arrays have different lengths.")
    return LastPredictions(*arrays)


def draw_worst(found: LastPredictions, names: list[str]) -> bytes | None:
    """PNG of the classes with the lowest recall; None if no class has an image."""
    of_class = per_class(found.true, found.predicted, len(names))
    tested = np.flatnonzero(of_class.support)
    if not len(tested):
        return None
    worst = tested[np.argsort(of_class.recall[tested], kind="stable")[:_NUM_WORST]]
    figure = Figure(figsize=(9, 1.2 + 0.27 * len(worst)), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(worst))
    axes.barh(places, 100 * of_class.recall[worst], color="#0072B2", height=0.7)
    labels = [f"{shorten(names[c], 40)} ({of_class.support[c]:,})" for c in worst.tolist()]
    axes.set_yticks(places, labels, fontsize=8, parse_math=False)
    for place, c in zip(places, worst.tolist(), strict=True):
        axes.text(
            100 * of_class.recall[c] + 1, float(place), f"{100 * of_class.recall[c]:.0f} %", va="center", fontsize=8
        )
    axes.invert_yaxis()
    axes.set_xlim(0, 108)
    axes.set_xlabel("recall, %")
    which = (
        "All classes"
        if len(worst) == len(tested)
        else f"The {len(worst)} classes of {len(tested):,} with the lowest recall"
    )
    axes.set_title(f"{which} (number of images)", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    return png(figure)


def draw_matrix(found: LastPredictions, names: list[str]) -> bytes:
    """PNG of the confusion matrix."""
    return draw_confusion(found.true, found.predicted, names)


def draw_sheet(found: LastPredictions, names: list[str], split: Split, config: RunConfig) -> bytes | None:
    """PNG of images as the model sees them, with true and predicted class: confident mistakes first, then right ones.

    None if no image has both.
    """
    known = np.flatnonzero((found.true >= 0) & (found.predicted >= 0))
    if not len(known):
        return None
    right = found.true[known] == found.predicted[known]
    chosen = known[galleries.order_by_mistake(right, found.probability[known], _NUM_IMAGES)]
    pixels = _read(split, found.rows[chosen], config)
    kept = np.array([i for i, row in enumerate(found.rows[chosen].tolist()) if row in pixels], np.int64)
    if not len(kept):
        return None
    chosen = chosen[kept]
    note = (
        f"True class, then prediction: {int((~right).sum()):,} of {len(known):,} are wrong. The most confident mistakes first, "
        "then right predictions, the least confident first."
    )
    figure = galleries.draw_predictions(
        np.stack([pixels[row] for row in found.rows[chosen].tolist()]), [names[c] for c in found.true[chosen].tolist()],
        [names[c] for c in found.predicted[chosen].tolist()], found.probability[chosen], note,
    )  # fmt: skip
    return gallery_png(figure)


def _read(split: Split, rows: np.ndarray, config: RunConfig) -> dict[int, np.ndarray]:
    """Row -> pixels, uint8 (H, W, 3), of the images that can be read, in the evaluation's view."""
    found = {}
    view = eval_view(config.augment)
    with Loader(split, view, config.model.image_size, _THREADS, prefetch=2, max_bad_share=1.0) as loader:
        for batch in loader.batches(requests(rows, 16)):
            for row, valid, pixels in zip(batch.rows.tolist(), batch.valid.tolist(), batch.images.numpy(), strict=True):
                if valid:
                    found[row] = pixels
    return found
