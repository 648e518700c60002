"""What are pre-trained weights worth when few labels are known?"""

from collections.abc import Iterator
from dataclasses import replace

from pipeline.base.errors import UserError
from pipeline.base.page import Block, PngImage
from pipeline.experiment.points import differences, draw_scores, points_of, table
from pipeline.experiment.study import Cells, cells, refuse
from pipeline.experiment.table import StudyResults
from pipeline.settings.commands.study import StudyConfig


def specs(config: StudyConfig) -> Cells:
    refuse(config, "lengths")
    if len(config.models) < 2 or not config.has_weights:
        raise UserError(
            "question = labels compares weights with the first model: give at least two models, one of them with"
            " weights=..."
        )
    return cells(config)


def answer(results: StudyResults) -> Iterator[Block]:
    results = replace(results, counts_images=True)
    if found := differences(results):
        yield table(found, results, "variant", "the first model")
    if picture := draw_scores(points_of(results), [], results):
        yield PngImage("score.png", "Scores by number of labelled images", picture)
