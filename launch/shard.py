"""Command: raw images -> a data set of shards. See `data_tools/sharding/shard.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.process import guard

guard(__name__)

from data_tools.sharding.shard import run
from pipeline.command import main
from pipeline.settings.data import ShardConfig

ABOUT = """
Turn raw images into a data set: tars that webdataset reads, and a manifest that makes them addressable.

source is one of these layouts; layout=auto tells them apart:
  folder       class folders: cat/1.jpg, dog/2.jpg            archive      a .tar, .tar.gz, .tgz or .zip of class folders
  flat         one folder of n01440764_tench.JPEG             tiny_imagenet  Tiny-ImageNet, its folder or zip
  imagenet21k  <wnid>.tar files, in a folder or one big tar   imagenet1k   ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar
  cifar        CIFAR-10 or -100, python or binary             parquet      files with a column of images (Hugging Face)
  list         CSV or Parquet of paths and labels             webdataset   shards of others, to be mixed and cut anew
Archives are read where they are. Image bytes are copied.

  On this machine, all its cores:
      python launch/shard.py source=photos out=datasets/photos val_share=0.1
      python launch/shard.py --config configs/data/cifar10.yaml source=cifar10.tar.gz
  On a Ray cluster whose nodes share a file system (absolute paths: the job runs in a copy of this folder):
      ray job submit --working-dir . -- python launch/shard.py --config configs/data/imagenet21k.yaml
  From a bucket into a bucket (s3:// or gs://; nodes need not share a file system, docs/data.md):
      ray job submit --working-dir . -- python launch/shard.py source=s3://raw/imagenet21k out=s3://shards/imagenet21k \
          layout=imagenet21k
  Source that has its own splits, train/cat/1.jpg and test/cat/2.jpg:
      python launch/shard.py source=pets.zip out=datasets/pets splits.train=train splits.test=test
  ImageNet-21K-P: classes of more than 500 images, 50 of each held out:
      python launch/shard.py source=winter21 out=datasets/in21k_p min_images=500 holdout_per_class=50

Killed? Run the same command again: it goes on with the shards that are missing, and the result is the same to the byte.
On a finished data set it checks every shard, and makes damaged or missing ones again.
Files that are no readable images are skipped and named in skipped.csv; too many of them (max_bad_share) stop the job.
"""

if __name__ == "__main__":
    main(ShardConfig, run, ABOUT)
