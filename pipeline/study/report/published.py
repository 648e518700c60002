"""Scores that the ViT paper (arXiv 2010.11929, version 2) published for the questions of a study, which a report shows beside ours.

The paper gives its Figures 3, 4 and 8 as curves without numbers, so nothing of those is here.
"""

import re
from dataclasses import dataclass

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


_VIT, _RESNET, _HYBRID = "ViT", "ResNet (BiT)", "hybrid"
RUNS = (
    Run(_VIT, "ViT-B/32", 7, (80.73, 86.27, 98.61, 90.49, 93.40, 99.27), 55),
    Run(_VIT, "ViT-B/16", 7, (84.15, 88.85, 99.00, 91.87, 95.80, 99.56), 224),
    Run(_VIT, "ViT-L/32", 7, (84.37, 88.28, 99.19, 92.52, 95.83, 99.45), 196),
    Run(_VIT, "ViT-L/16", 7, (86.30, 89.43, 99.38, 93.46, 96.81, 99.66), 783),
    Run(_VIT, "ViT-L/16", 14, (87.12, 89.99, 99.38, 94.04, 97.11, 99.56), 1567),
    Run(_VIT, "ViT-H/14", 14, (88.08, 90.36, 99.50, 94.71, 97.11, 99.71), 4262),
    Run(_RESNET, "ResNet50x1", 7, (77.54, 84.56, 97.67, 86.07, 91.11, 94.26), 50),
    Run(_RESNET, "ResNet50x2", 7, (82.12, 87.94, 98.29, 89.20, 93.43, 97.02), 199),
    Run(_RESNET, "ResNet101x1", 7, (80.67, 87.07, 98.48, 89.17, 94.08, 95.95), 96),
    Run(_RESNET, "ResNet152x1", 7, (81.88, 87.96, 98.82, 90.22, 94.17, 96.94), 141),
    Run(_RESNET, "ResNet152x2", 7, (84.97, 89.69, 99.06, 92.05, 95.37, 98.62), 563),
    Run(_RESNET, "ResNet152x2", 14, (85.56, 89.89, 99.24, 91.92, 95.75, 98.75), 1126),
    Run(_RESNET, "ResNet200x3", 14, (87.22, 90.15, 99.34, 93.53, 96.32, 99.04), 3306),
    Run(_HYBRID, "R50x1+ViT-B/32", 7, (84.90, 89.15, 99.01, 92.24, 95.75, 99.46), 106),
    Run(_HYBRID, "R50x1+ViT-B/16", 7, (85.58, 89.65, 99.14, 92.63, 96.65, 99.40), 274),
    Run(_HYBRID, "R50x1+ViT-L/32", 7, (85.68, 89.04, 99.24, 92.93, 96.97, 99.43), 246),
    Run(_HYBRID, "R50x1+ViT-L/16", 7, (86.60, 89.72, 99.18, 93.64, 97.03, 99.40), 859),
    Run(_HYBRID, "R50x1+ViT-L/16", 14, (87.12, 89.76, 99.31, 93.89, 97.36, 99.11), 1668),
)


@dataclass(frozen=True)
class Positions:
    """A cell of Table 8. names: what a variant may be called in a study, in small letters and digits only. score: a share."""

    title: str
    names: tuple[str, ...]
    score: float


POSITIONS = (
    Positions("1-D learned", ("learned", "learned1d", "1d", "1dlearned"), 0.64206),
    Positions("1-D learned, in every layer", ("learned1devery", "1devery", "everylayer", "learned1deverylayer"), 0.63964),
    Positions("1-D learned, in every layer, shared", ("learned1dshared", "1dshared", "learned1deverylayershared", "shared"), 0.64292),
    Positions("2-D learned", ("learned2d", "2d", "2dlearned"), 0.64001),
    Positions("2-D learned, in every layer", ("learned2devery", "2devery", "learned2deverylayer"), 0.64046),
    Positions("2-D learned, in every layer, shared", ("learned2dshared", "2dshared", "learned2deverylayershared"), 0.64022),
    Positions("relative", ("relative", "relative1d", "1drelative"), 0.64032),
    Positions("none", ("none", "nopositions", "nopos"), 0.61382),
)  # fmt: skip


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
