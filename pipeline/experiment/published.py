"""VTAB-1k scores published in the ViT paper (arXiv 2010.11929, version 2), which a report shows beside ours
(published.yaml).
"""

from dataclasses import dataclass

from pipeline.settings.yaml_reader import read_table

SOURCE = "ViT paper (arXiv 2010.11929v2), Table 9; mean and deviation over 3 runs: Table 2"
# For the ResNet the paper gives only the mean.
RESNET = "BiT-L (R152x4, JFT) 76.29 ± 1.70"
PROTOCOL = "2,500 steps of 512, lr 0.01, 384 px (B.1.1)"


@dataclass(frozen=True)
class Published:
    """A column of Table 9. tasks: per cent, in the order of the table and of vtab_tasks.TASKS. mean: of all 19, from
    Table 9.

    mean_of_runs, deviation: over 3 runs, from the VTAB row of Table 2.
    """

    name: str
    tasks: tuple[float, ...]
    mean: float
    mean_of_runs: float
    deviation: float


PAPER = read_table(__file__, tuple[Published, ...])
