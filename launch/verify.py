"""Command: is a data set on disk what its manifest says? See `data_tools/check/verify.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.settings.data import VerifyConfig


def verify(config: VerifyConfig) -> None:
    from data_tools.check.verify import run  # Late: --help and mistakes in the settings need no OpenCV.

    if not run(config)["is_whole"]:
        sys.exit(1)


ABOUT = """
Read a data set again, to the last byte, and say what is wrong with it.

Of every shard: size, sha256, each header of the tar. Of every image: that its bytes are where the manifest says, its
sha256, key and label, and that it can be decoded (or of a share of them, decode_share).

      python launch/verify.py data=datasets/photos
      python launch/verify.py data=datasets/photos decode_share=0.01
      ray job submit --working-dir . -- python launch/verify.py data=/data/imagenet21k_shards

Writes report.json and damage.csv into out, and the images that cannot be trusted into exclude/damaged.parquet of the
data set, which training leaves out. An image that is whole stays in, however broken the tar around it is.

Exit code: 0 when everything is whole, 1 when something is damaged, 2 when nothing could be checked (a mistake in the
command, no data set, no list of its shards).
"""

if __name__ == "__main__":
    main(VerifyConfig, verify, ABOUT)
