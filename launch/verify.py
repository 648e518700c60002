"""Command: check every byte of a data set against its manifest. See `data_tools/check/verify.py`.

Check every byte of a data set against its manifest, and report what is damaged.

Checked for every shard: its size and SHA-256. For every image: the position of its bytes, its checksum and its label.
(Images are decoded when they are sharded or indexed.)

      python launch/verify.py data=datasets/photos
      ray job submit --working-dir . -- python launch/verify.py data=/data/imagenet21k_shards

Writes report.json and damage.csv into out, and lists damaged images in exclude/damaged.parquet of the data set, so that
training excludes them. Intact images of a damaged tar are still used, unless the tar has another size and lost no
image: training refuses it until it is copied again.

Exit code: 0 when nothing is damaged, 1 when something is, 2 when nothing could be checked (a mistake in the command, no
data set, no list of its shards).
"""

import sys

from _repository import command

from pipeline.settings.commands.data import VerifyConfig


def verify(config: VerifyConfig) -> None:
    from data_tools.check.verify import run  # Late: --help and mistakes in the settings need no OpenCV.

    if not run(config)["is_whole"]:
        sys.exit(1)


if __name__ == "__main__":
    command.main(VerifyConfig, verify, __doc__)
