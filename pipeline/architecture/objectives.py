"""The objectives by name, and the facts of each that plans and data sets need before torch is imported.

All else is in their classes, in `pipeline/objectives/`.
"""

from typing import Literal, NamedTuple

# What an objective does with labels. "partly": it learns those that there are, and some sets may have none. "scored":
# only held-out images need some. "targets": it learns numbers (`Dataset.targets`) and reads no labels.
Labels = Literal["learned", "partly", "scored", "targets", "unread"]


class ObjectiveFacts(NamedTuple):
    """of_whole_batch: its loss is a property of all samples of a step, which is then one micro-batch of each rank."""

    place: str  # file and class in pipeline/objectives/
    labels: Labels = "unread"
    of_whole_batch: bool = False


# Value of train.loss -> its facts.
OBJECTIVES = {
    "softmax": ObjectiveFacts("classification:Classification", "learned"),
    "sigmoid": ObjectiveFacts("classification:Classification", "learned"),
    "regression": ObjectiveFacts("regression:Regression", "targets"),
    "dino": ObjectiveFacts("dino:Dino"),
    "lejepa": ObjectiveFacts("lejepa:Lejepa", of_whole_batch=True),
    "simclr": ObjectiveFacts("simclr:Simclr", of_whole_batch=True),
    "mae": ObjectiveFacts("mae:Mae"),
    "masked_mean_color": ObjectiveFacts("masked_patches:MaskedPatches"),
    "masked_small_patch": ObjectiveFacts("masked_patches:MaskedPatches"),
    "masked_pixels": ObjectiveFacts("masked_patches:MaskedPatches"),
    "distill": ObjectiveFacts("distill:Distill"),
    "distill_classes": ObjectiveFacts("distill:DistillClasses", "scored"),
    "pseudo_labels": ObjectiveFacts("pseudo_labels:PseudoLabels", "partly"),
}
# For messages: those that read no labels.
NEED_NO_LABELS = " | ".join(loss for loss, facts in OBJECTIVES.items() if facts.labels == "unread")
