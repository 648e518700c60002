"""VTAB-1k scores published in the ViT paper (arXiv 2010.11929, version 2), which a report shows beside ours."""

from dataclasses import dataclass

SOURCE = "ViT paper (arXiv 2010.11929v2), Table 9; mean and deviation over 3 runs: Table 2"
# For the ResNet the paper gives only the mean.
RESNET = "BiT-L (R152x4, JFT) 76.29 ± 1.70"
PROTOCOL = "2,500 steps of 512, lr 0.01, 384 px (B.1.1)"


@dataclass(frozen=True)
class Published:
    """A column of Table 9. tasks: per cent, in the order of the table and of vtab_tasks.TASKS. mean: of all 19, from Table 9.

    mean_of_runs, deviation: over 3 runs, from the VTAB row of Table 2.
    """

    name: str
    tasks: tuple[float, ...]
    mean: float
    mean_of_runs: float
    deviation: float


PAPER: tuple[Published, ...] = (
    Published(
        "ViT-H/14, JFT (paper)",
        (95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9,
         83.3, 96.7, 91.4, 76.6,
         91.7, 63.8, 53.1, 79.4, 63.3, 84.5, 33.2, 51.2),
        77.6, 77.63, 0.23,
    ),
    Published(
        "ViT-L/16, JFT (paper)",
        (95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4,
         83.6, 96.5, 89.7, 77.1,
         86.4, 63.1, 49.7, 74.5, 60.5, 82.2, 36.2, 51.1),
        76.3, 76.28, 0.46,
    ),
    Published(
        "ViT-L/16, ImageNet-21k (paper)",
        (90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9,
         82.5, 95.6, 85.2, 75.3,
         70.3, 56.1, 41.9, 74.7, 64.9, 79.9, 30.5, 41.7),
        72.7, 72.72, 0.21,
    ),
)  # fmt: skip
