"""Command: mark pre-training images that are copies of test images, or of one another. See `data_tools/dedup/dedup.py`.

Mark images of a data set that are near copies of test images, or of one another, so that training excludes them.

Copies are found after JPEG re-compression, resizing, crops of up to 10 % of a side, mirroring, and small changes of
brightness and colour. No shard is rewritten: copies are listed in exclude/test_copies.parquet in the data set's folder.
There, dedup/report.json has their number, and dedup/pairs.png shows the pairs, least certain first: check them.

  On all cores of this machine:
      python launch/dedup.py data=datasets/photos against=[datasets/pets,datasets/flowers]
  Against one split, which may be of the same data set:
      python launch/dedup.py data=datasets/cifar10 against=datasets/cifar10:test
  Near copies of one another: the largest of those that are alike is kept, and the others are marked
  (exclude/near_copies.parquet, dedup/near_copies.json, dedup/near_copies.png):
      python launch/dedup.py data=datasets/photos within_split=true
  On a Ray cluster whose nodes share a file system (absolute paths):
      ray job submit --working-dir . -- python launch/dedup.py data=/data/imagenet21k against=[/data/imagenet:val]

After an interruption, run the same command again. Shards are read once, also for other test images (dedup/thumbnails
keeps 1 KB per image), and searched once (dedup/search), also for another max_distance, except within a split. The data
sets in against are only read.
"""

from _repository import command

from pipeline.settings.commands.data import DedupConfig

if __name__ == "__main__":
    command.main(DedupConfig, "data_tools.dedup.dedup", __doc__)
