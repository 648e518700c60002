"""Command: a manifest for webdataset shards that are there already. See `data_tools/sharding/index.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.process import guard

guard(__name__)

from data_tools.sharding.index import run
from pipeline.command import main
from pipeline.settings.data import IndexConfig

ABOUT = """
Give webdataset shards that someone else wrote a manifest, so that they train as a data set. Nothing is copied or changed.

source is a folder of tars (or one tar) of <key>.jpg with <key>.cls (a number) or <key>.json ({"labels": [3, 7]}).

  The manifest beside the tars, in the same folder:
      python launch/index.py source=/data/shards splits.train=train- splits.val=val- label_names=classes.txt
  In a folder of its own (the tars must stay where they are, on a disk or in a bucket):
      python launch/index.py source=/data/shards out=datasets/theirs
      python launch/index.py source=s3://theirs/shards out=datasets/theirs

Every tar is read once. Killed? Run the same command again: it goes on with the tars that are missing. On a finished
manifest it checks that every tar is still the one it was. To mix, resize, merge or hold out samples, shard the tars anew:
launch/shard.py layout=webdataset.
"""

if __name__ == "__main__":
    main(IndexConfig, run, ABOUT)
