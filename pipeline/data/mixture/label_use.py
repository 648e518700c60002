"""What a run that learns labels should know of those of its training split: samples that have none, and a single class."""

import numpy as np

from pipeline.architecture.objectives import OBJECTIVES
from pipeline.base.json_record import quoted
from pipeline.base.words import counted
from pipeline.data.dataset.split import Split
from pipeline.data.mixture.run_data import RunData
from pipeline.data.mixture.split import MixedSplit

# Values of train.loss of which `label_notes` counts the samples with or without a label.
_COUNTED = ("softmax", "pseudo_labels")
# Samples of which labels are read at a time: first so many, then up to the other number.
_FIRST, _MOST = 1024, 2**20


def data_notes(data: RunData, loss: str) -> list[str]:
    """Lines to print about the data of a run with this `train.loss`: how they were opened, then `label_notes`."""
    return data.notes(labels=loss not in _COUNTED) + label_notes(data, loss)


def label_notes(data: RunData, loss: str) -> list[str]:
    """Lines about labels that a run with this `train.loss` learns little from; often none.

    Reads a few labels where there are several classes, and counts the labels of each sample only where there may be none.
    """
    if OBJECTIVES[loss].labels not in ("learned", "partly"):
        return []
    split, lines, bare = data.split, list[str](), data.split.num_unlabelled
    if loss == "pseudo_labels":
        have = len(split) - bare
        lines.append(
            f"{have:,} of {counted(len(split), 'sample')} {'has' if have == 1 else 'have'} a label"
            if bare
            else "all samples have a label: nothing gets a pseudo-label. Add images without one (data.mix)"
        )
    elif bare and loss == "softmax":
        lines.append(f"train.loss = softmax learns nothing from {bare:,} of {counted(len(split), 'sample')}: no label")
    classes = _some_classes(split)
    # Sigmoids learn whether an image has the label.
    if len(classes) == 1 < data.dataset.num_classes and (loss != "sigmoid" or not bare):
        name = quoted(data.dataset.classes[classes.pop()])
        of = counted(data.dataset.num_classes, "class")
        lines.append(f"of {of}, all labels to train on are {name}: there is nothing to learn")
    return lines


def _some_classes(split: Split) -> set[int]:
    """Classes of the labels of a split, all if it has fewer than two."""
    label_maps = split.label_maps if isinstance(split, MixedSplit) else (None,)
    found: set[int] = set()
    for part, label_map in zip(split.parts, label_maps, strict=True):
        start, size, index = 0, _FIRST, part.index
        while start < len(part) and len(found) < 2:
            rows = part.manifest_rows(np.arange(start, min(start + size, len(part))))
            first, end = index.label_starts[rows], index.label_starts[rows + 1]
            has_any = end > first
            # A sample with several labels has different ones, so its first and last one do.
            labels = np.unique(np.concatenate([index.labels[first[has_any]], index.labels[end[has_any] - 1]]))
            found.update((labels if label_map is None else label_map[labels]).tolist())
            start, size = start + size, min(2 * size, _MOST)
    return found
