"""Command: report VTAB-1k sweeps in a table beside the paper's. See `pipeline/experiment/vtab_report.py`.

Report a sweep of launch/vtab.py: accuracy on VTAB-1k's 19 tasks with 95 % intervals, and the means of its three groups
and of all tasks, beside those of the ViT paper and of other sweeps.

  python launch/vtab_report.py sweeps=runs/vit_b16/vtab/vit_paper-finetune
  python launch/vtab_report.py sweeps=[runs/a/vtab/vit_paper-finetune,runs/b/vtab/vit_paper-finetune] names=[new,old]

Writes report.md, report.html (self-contained), scores.csv, tasks.png and means.png. The mean of a group is left out if
a task has no score, and the task is named.
"""

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

from pipeline.process.start import guard

guard(__name__)

from pipeline.settings.command import main
from pipeline.settings.commands.reports import VtabReportConfig

if __name__ == "__main__":
    main(VtabReportConfig, "pipeline.experiment.vtab_report", __doc__)
