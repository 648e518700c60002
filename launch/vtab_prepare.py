"""Command: VTAB-1k's 19 tasks from the original files, and the proof of their splits. See `data_tools/vtab/`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.process import guard

guard(__name__)

from data_tools.vtab.prepare import run
from pipeline.command import main
from pipeline.settings.data import VtabPrepareConfig

ABOUT = """
Make VTAB-1k's 19 tasks, as many as there are files for: a data set each, with the splits train800, val200,
train800val200 (both, to train on at the end) and test (all of it). No TensorFlow is needed.

originals is a folder of folders, one for each of 16 source data sets, with the files as their authors publish them,
packed: caltech101 cifar100 dtd flowers102 pets sun397 svhn patch_camelyon eurosat resisc45 retinopathy clevr dmlab kitti
dsprites smallnorb. docs/vtab.md lists the files; what is missing is named with its URL.

      python launch/vtab_prepare.py originals=/data/originals out=datasets/vtab
  Some tasks only; those whose files are not there from copies that tensorflow_datasets has prepared:
      python launch/vtab_prepare.py originals=/data/originals tfds=~/tensorflow_datasets out=datasets/vtab \\
          tasks=[pets,clevr_count]
  From the lists that users of PyTorch pass around (splits are taken on trust):
      python launch/vtab_prepare.py lists=vtab-1k out=datasets/vtab
  Are these the official splits? Computed again from the keys, and compared; exit code 2 if not:
      python launch/vtab_prepare.py --prove out=datasets/vtab
  On a Ray cluster whose nodes share a file system (absolute paths):
      ray job submit --working-dir . -- python launch/vtab_prepare.py originals=/data/originals out=/data/vtab

Killed? Run the same command again.
"""

if __name__ == "__main__":
    main(VtabPrepareConfig, run, ABOUT, flag="prove")
