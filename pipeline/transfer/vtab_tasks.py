"""VTAB-1k's 19 tasks as data (arXiv 1910.04867; its public code, google-research/task_adaptation, @ d7630d3)."""

from dataclasses import dataclass
from typing import Literal

Group = Literal["natural", "specialized", "structured"]
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")


@dataclass(frozen=True)
class Task:
    """name: of the task's folder. title: as in the ViT paper's Table 9. dataset: name of the source data set.

    num_classes: size of the head; some classes may have no image among the 1,000 (325 of Sun397's 397 have). num_test: images
    of the test split, all of which are scored. flip, crop: whether training images may be flipped or randomly cropped without
    a change of the label (BiT paper, appendix F; the same in the ViT paper's protocol). small: images have fewer than
    96 x 96 pixels, for which BiT's rule uses a lower resolution.
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


# In the order of the ViT paper's Table 9.
TASKS: tuple[Task, ...] = (
    Task("caltech101", "Caltech101", "natural", "caltech101", 102, 6084),
    Task("cifar100", "CIFAR-100", "natural", "cifar100", 100, 10_000, small=True),
    Task("dtd", "DTD", "natural", "dtd", 47, 1880),
    Task("flowers102", "Flowers102", "natural", "flowers102", 102, 6149),
    Task("pets", "Pets", "natural", "pets", 37, 3669),
    Task("sun397", "Sun397", "natural", "sun397", 397, 21_750),
    Task("svhn", "SVHN", "natural", "svhn", 10, 26_032, small=True),
    Task("patch_camelyon", "Camelyon", "specialized", "patch_camelyon", 2, 32_768),
    Task("eurosat", "EuroSAT", "specialized", "eurosat", 10, 5400, small=True),
    Task("resisc45", "Resisc45", "specialized", "resisc45", 45, 6300),
    Task("retinopathy", "Retinopathy", "specialized", "retinopathy", 5, 42_670),
    Task("clevr_count", "Clevr-Count", "structured", "clevr", 8, 15_000, crop=False),
    Task("clevr_distance", "Clevr-Dist", "structured", "clevr", 6, 15_000, crop=False),
    Task("dmlab", "DMLab", "structured", "dmlab", 6, 22_735, crop=False),
    Task("dsprites_location", "dSpr-Loc", "structured", "dsprites", 16, 73_728, flip=False, crop=False, small=True),
    Task("dsprites_orientation", "dSpr-Ori", "structured", "dsprites", 16, 73_728, flip=False, small=True),
    Task("kitti_distance", "KITTI-Dist", "structured", "kitti", 4, 711, crop=False),
    Task("smallnorb_azimuth", "sNORB-Azim", "structured", "smallnorb", 18, 12_150, flip=False),
    Task("smallnorb_elevation", "sNORB-Elev", "structured", "smallnorb", 9, 12_150),
)
