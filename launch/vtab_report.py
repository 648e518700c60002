"""Command: sweeps over VTAB-1k -> a table beside the paper's. See `pipeline/transfer/report.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.settings.reports import VtabReportConfig


def report(config: VtabReportConfig) -> None:
    from pipeline.transfer.report import run  # Late: --help needs no Matplotlib.

    run(config)


if __name__ == "__main__":
    main(
        VtabReportConfig,
        report,
        """
        The report of a sweep of launch/vtab.py: accuracy on VTAB-1k's 19 tasks with 95 % intervals, the means of its three
        groups and of all, beside the ViT paper's and those of other sweeps.

          python launch/vtab_report.py sweeps=runs/vit_b16/vtab/vit_paper-finetune
          python launch/vtab_report.py sweeps=[runs/a/vtab/vit_paper-finetune,runs/b/vtab/vit_paper-finetune] names=[new,old]

        Writes report.md, report.html (one file), scores.csv, tasks.png and means.png. A mean over a group of which a task has
        no score is not shown; the task is named.
        """,
    )
