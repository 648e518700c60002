"""Command: report one run on one page. See `pipeline/review/report.py`.

Report one run on one self-contained HTML page: where it came from; the plan beside what was measured;
scores with 95 % intervals; curves; warnings; settings that differ from the defaults; data, code and environment; where
the weights are. Also a grid (launch/finetune_grid.py) or a sweep (launch/vtab.py). From the folder, also one
that `mlflow artifacts download` made.

  python launch/report.py runs/vit_b16

Writes report.html (reads well on a desktop, on a phone and printed), report.md and its pictures.
"""

from _repository import command

from pipeline.settings.commands.reports import RunReportConfig

if __name__ == "__main__":
    command.main(RunReportConfig, "pipeline.review.report", __doc__, subject="run")
