"""Command: shard raw images into a data set. See `data_tools/sharding/shard.py`.

Shard raw images into a data set: tars that WebDataset can read, and a manifest for random access.

source has one of these layouts; layout=auto detects it:
  folder         class folders: cat/1.jpg, dog/2.jpg
  archive        a .tar, .tar.gz, .tgz or .zip of class folders
  images         images without labels, in any folders and archives (only if named: layout=images)
  list           CSV or Parquet of paths and labels
  parquet        files with a column of images (Hugging Face)
  webdataset     existing WebDataset shards, to shuffle and shard again
  imagenet21k    <wnid>.tar files, in a folder or one big tar
  imagenet1k     ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar
  cifar          CIFAR-10 or -100, python or binary
Only compressed tars and images in Parquet are unpacked, for a while, to <out>/.staging. Image bytes are copied
unchanged, unless resize_short is set (CIFAR's pixels become PNGs).

  On all cores of this machine:
      python launch/shard.py source=photos out=datasets/photos val_share=0.1
      python launch/shard.py --config configs/data/cifar10.yaml source=cifar-10-python.tar.gz
  On a Ray cluster whose nodes share a file system (absolute paths: the job runs in a copy of this folder):
      ray job submit --working-dir . -- python launch/shard.py --config configs/data/imagenet21k.yaml
  From a bucket into a bucket (s3:// or gs://; nodes need not share a file system, docs/buckets.md):
      ray job submit --working-dir . -- python launch/shard.py \\
          source=s3://raw/imagenet21k out=s3://shards/imagenet21k layout=imagenet21k
  From a source with splits, such as train/cat/1.jpg and test/cat/2.jpg:
      python launch/shard.py source=pets.zip out=datasets/pets splits.train=train splits.test=test
  ImageNet-21K-P: classes with more than 500 images, 50 of each held out:
      python launch/shard.py source=winter21 out=datasets/in21k_p min_images=500 holdout_per_class=50

After an interruption, run the same command again: it continues with the missing shards, and the result is identical to
the byte. On a finished data set, it checks every shard and writes damaged or missing ones again.
Unreadable images are skipped and listed in skipped.csv; above a share of max_bad_share the job stops.
"""

from _repository import command

from pipeline.settings.commands.data import ShardConfig

if __name__ == "__main__":
    command.main(ShardConfig, "data_tools.sharding.shard", __doc__)
