"""What does a part of the model contribute? (ViT paper, Tables 7 and 8, Figure 8)"""

from collections.abc import Iterator

from pipeline.base.errors import UserError
from pipeline.base.page import Block
from pipeline.experiment.points import differences, table
from pipeline.experiment.study import Cells, cells, refuse
from pipeline.experiment.table import StudyResults
from pipeline.settings.commands.study import StudyConfig


def specs(config: StudyConfig) -> Cells:
    refuse(config, "weights", "lengths", "data_sizes")
    if len(config.models) < 2:
        raise UserError("question = ablation compares models with the first one: give at least two.")
    return cells(config)


def answer(results: StudyResults) -> Iterator[Block]:
    if found := differences(results):
        yield table(found, results, "variant", "the first model")
