"""Command: index existing WebDataset shards in place. See `data_tools/sharding/index.py`.

Index existing WebDataset shards in place: write a manifest, so that they can be used as a data set. Tars are neither
copied nor changed.

source is a folder of tars (or one tar) of <key>.jpg with <key>.cls (a number) or <key>.json ({"labels": [3, 7]}), or of
images without labels.

  With the manifest in the folder of the tars:
      python launch/index.py source=/data/shards splits.train=train- splits.val=val- label_names=classes.txt
  With the manifest in another folder (the tars must stay where they are, on a disk or in a bucket):
      python launch/index.py source=/data/shards out=datasets/theirs
      python launch/index.py source=s3://theirs/shards out=datasets/theirs

Every tar is read once. After an interruption, run the same command again: it continues with the remaining tars. On a
finished manifest, it checks that no tar has changed. To shuffle, resize, merge or hold out samples, shard the tars
again: launch/shard.py layout=webdataset.
"""

from _repository import command

from pipeline.settings.commands.data import IndexConfig

if __name__ == "__main__":
    command.main(IndexConfig, "data_tools.sharding.index", __doc__)
