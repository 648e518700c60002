"""Command: mark pre-training images that are copies of test images. See `data_tools/dedup/dedup.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.process import guard

guard(__name__)

from data_tools.dedup.dedup import run
from pipeline.command import main
from pipeline.settings.data import DedupConfig

ABOUT = """
Mark images of a data set that are copies of test images, so that training leaves them out.

Found are copies after JPEG re-compression, resizing, crops of up to 10 % of a side, mirroring, and small changes of
brightness and colour. No shard is rewritten: the marks are the list exclude/test_copies.parquet in the data set's
folder. dedup/report.json there says how many, and dedup/pairs.png shows the pairs, least certain first: look at it.

  On this machine, all its cores:
      python launch/dedup.py data=datasets/photos against=[datasets/pets,datasets/flowers]
  Against one split, here of the same data set:
      python launch/dedup.py data=datasets/cifar10 against=datasets/cifar10:test
  On a Ray cluster whose nodes share a file system (absolute paths):
      ray job submit --working-dir . -- python launch/dedup.py data=/data/imagenet21k against=[/data/imagenet:val]

Killed? Run the same command again: shards that were read already are not read again (dedup/thumbnails holds what is
needed of them, 1 KB for each image), also against other test images, and those that were searched are not searched again
(dedup/search), also for another max_distance. The evaluation sets are only read.
"""

if __name__ == "__main__":
    main(DedupConfig, run, ABOUT)
