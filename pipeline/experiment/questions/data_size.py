"""How much data is enough, and which model wins with little? (ViT paper, Figures 3 and 4)"""

from collections.abc import Iterator
from dataclasses import replace

from pipeline.base.errors import UserError
from pipeline.base.page import Block
from pipeline.experiment import points
from pipeline.experiment.study import Cells, cells, refuse
from pipeline.experiment.table import StudyResults
from pipeline.settings.commands.study import StudyConfig


def specs(config: StudyConfig) -> Cells:
    refuse(config, "weights", "lengths")
    if len(config.data_sizes) < 2:
        raise UserError(
            f"question = data_size compares data sizes, and data_sizes has {len(config.data_sizes)}: give at least two."
        )
    return cells(config)


def answer(results: StudyResults) -> Iterator[Block]:
    return points.answer(replace(results, counts_images=True))
