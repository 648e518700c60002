"""The objectives by name, and the facts of each that plans and data sets need before torch is imported.

All else is in their classes, in `pipeline/objectives/`.
"""

from typing import Literal, NamedTuple

# What an objective does with labels. "partly": it learns those that there are, and some sets may have none. "scored": only held-out images
# need some.
Labels = Literal["learned", "partly", "scored", "unread"]


class Facts(NamedTuple):
    """of_whole_batch: its loss is a property of all samples of a step, which is then one micro-batch of each rank."""

    place: str  # file and class in pipeline/objectives/
    labels: Labels = "unread"
    of_whole_batch: bool = False


# Value of train.loss -> its facts.
OBJECTIVES = {
    "softmax": Facts("classification:Classification", "learned"),
    "sigmoid": Facts("classification:Classification", "learned"),
    "dino": Facts("dino:Dino"),
    "lejepa": Facts("lejepa:Lejepa", of_whole_batch=True),
    "mae": Facts("mae:Mae"),
    "masked_mean_color": Facts("masked_patches:MaskedPatches"),
    "masked_small_patch": Facts("masked_patches:MaskedPatches"),
    "masked_pixels": Facts("masked_patches:MaskedPatches"),
    "distill": Facts("distill:Distill"),
    "distill_classes": Facts("distill_classes:DistillClasses", "scored"),
    "pseudo_labels": Facts("pseudo_labels:PseudoLabels", "partly"),
}
# For messages: those that read no labels.
NEED_NO_LABELS = " | ".join(loss for loss, facts in OBJECTIVES.items() if facts.labels == "unread")
