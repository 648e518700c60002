"""Command: leave samples out of training and evaluation, by a CSV. See `data_tools/check/exclude.py`.

Add the samples of a CSV to a list of excluded samples of a data set, exclude/NAME.parquet: shards are not rewritten.

  python launch/exclude.py data=datasets/photos samples=runs/photos/page/mistakes/mistakes.csv

mistakes.csv lists the worst mistakes of a run or of launch/evaluate.py, among which wrong labels are found: look at
the pictures beside it, and delete the lines whose label is right before this command. Any other CSV with the columns
split and key will do. All lists are applied by default (data.exclude, exclude); remove the file of a list to undo it.

See docs/data_format.md.
"""

from _repository import command

from pipeline.settings.commands.data import ExcludeConfig

if __name__ == "__main__":
    command.main(ExcludeConfig, "data_tools.check.exclude", __doc__)
