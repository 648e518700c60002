"""VTAB-1k's 19 tasks (vtab_tasks.yaml; arXiv 1910.04867; its public code, google-research/task_adaptation, @
d7630d3).
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.settings.yaml_reader import read_table

Group = Literal["natural", "specialized", "structured"]
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")


@dataclass(frozen=True)
class Task:
    """name: of the task's folder. title: as in the ViT paper's Table 9. dataset: name of the source data set.

    num_classes: size of the head; some classes may have no image among the 1,000 (325 of Sun397's 397 have). num_test:
    images of the test split, all of which are scored. flip, crop: whether training images may be flipped or randomly
    cropped without a change of the label (BiT paper, appendix F; the same in the ViT paper's protocol). small: images
    have fewer than 96 x 96 pixels, for which BiT's rule uses a lower resolution.
    """

    name: str
    title: str
    group: Group
    dataset: str
    num_classes: int
    num_test: int
    flip: bool = True
    crop: bool = True
    small: bool = False


TASKS = read_table(__file__, tuple[Task, ...])
