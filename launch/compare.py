"""Command: compare any number of runs. See `pipeline/review/compare.py`.

Compare any number of runs, also of different data, models and kinds: what can be compared and what not; curves against
steps, images seen and FLOPs; which differences are more than noise; VTAB-1k sweeps task by
task; settings, data and code that differ. Runs are read from their folders; those of another machine from what
`mlflow artifacts download` made of them.

  python launch/compare.py runs=[runs/vit,runs/resnet]

Writes report.md, report.html (self-contained), figures (.png), runs.parquet and pairs.csv.
"""

from _repository import command

from pipeline.settings.commands.reports import CompareConfig

if __name__ == "__main__":
    command.main(CompareConfig, "pipeline.review.compare", __doc__)
