"""Which model is best for a compute budget, and what would a larger budget give? (ViT paper, Figure 5)"""

from collections.abc import Iterator

from pipeline.base.errors import UserError
from pipeline.base.page import Block
from pipeline.experiment import points
from pipeline.experiment.study import Cells, cells, refuse
from pipeline.experiment.table import StudyResults
from pipeline.settings.commands.study import StudyConfig


def specs(config: StudyConfig) -> Cells:
    refuse(config, "weights", "data_sizes")
    if config.num_lengths * len(config.models) < 2:
        raise UserError("question = scaling compares compute: give at least two models, lengths or budgets.")
    return cells(config)


def answer(results: StudyResults) -> Iterator[Block]:
    return points.answer(results)
