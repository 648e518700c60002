"""VTAB-1k scores published in the ViT paper (arXiv 2010.11929, version 2), which a report shows beside ours
(published.yaml).
"""

from dataclasses import dataclass

from pipeline.settings.yaml_reader import read_table


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
