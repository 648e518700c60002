"""Scores that the ViT paper (arXiv 2010.11929, version 2) published for the questions of a study: published.yaml, shown beside ours.

The paper gives its Figures 3, 4 and 8 as curves without numbers, so nothing of those is here.
"""

import re
from dataclasses import dataclass

from pipeline.settings.yaml_reader import read_table

SOURCE = "ViT paper (arXiv 2010.11929v2)"
TABLE_6 = f"{SOURCE}, Table 6: pre-trained on JFT-300M, then fine-tuned"
TABLE_8 = (
    f"{SOURCE}, Table 8: ViT-B/16, 5-shot linear accuracy on ImageNet, one number for each variant without an interval"
)
DATA_SETS = ("ImageNet", "ImageNet ReaL", "CIFAR-10", "CIFAR-100", "Oxford-IIIT Pets", "Oxford Flowers-102")
_NAMES = ("imagenet", "imagenet_real", "cifar10", "cifar100", "pets", "flowers")


@dataclass(frozen=True)
class Run:
    """A row of Table 6. scores: top-1 accuracy in per cent after fine-tuning, in the order of DATA_SETS. exaflops: of pre-training."""

    family: str
    model: str
    epochs: int
    scores: tuple[float, ...]
    exaflops: float


@dataclass(frozen=True)
class Positions:
    """A cell of Table 8. names: what a variant may be called in a study, in small letters and digits only. score: a share."""

    title: str
    names: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class _PaperTables:
    runs: tuple[Run, ...]
    positions: tuple[Positions, ...]


_TABLES = read_table(__file__, _PaperTables)
RUNS, POSITIONS = _TABLES.runs, _TABLES.positions


def data_set_of(score: str) -> int | None:
    """The column of Table 6 (index in DATA_SETS) that a study's score is comparable with; None if there is none.

    Comparable is accuracy after fine-tuning on the same data set: finetune:imagenet, finetune:cifar10_384px and the like.
    """
    kind, _, name = score.partition(":")
    if kind != "finetune":
        return None
    words = re.split(r"[^a-z0-9]+", name.lower())
    aliases = {"imagenet1k": "imagenet", "ilsvrc2012": "imagenet", "flowers102": "flowers"}
    found = [aliases.get(word, word) for word in words]
    if "imagenet" in found and "real" in found:
        return _NAMES.index("imagenet_real")
    columns = {word for word in found if word in _NAMES}
    return _NAMES.index(columns.pop()) if len(columns) == 1 else None


def positions_of(model: str) -> Positions | None:
    """The variant of Table 8 that a model's name says."""
    name = re.sub(r"[^a-z0-9]", "", model.lower())
    return next((row for row in POSITIONS if name in row.names), None)
