"""Command: prepare VTAB-1k's 19 tasks from the original files, or prove their splits. See `data_tools/vtab/`.

Prepare VTAB-1k's 19 tasks, as many as have their files: one data set per task, with the splits train800, val200,
train800val200 (both) and test. TensorFlow is not needed.

originals contains one folder per source data set (16 of them), with the original archives as published: caltech101
cifar100 dtd flowers102 pets sun397 svhn patch_camelyon eurosat resisc45 retinopathy clevr dmlab kitti dsprites
smallnorb. docs/vtab.md lists the files; missing files are reported with their URL.

      python launch/vtab_prepare.py originals=/data/originals out=datasets/vtab
  Some tasks only:
      python launch/vtab_prepare.py originals=/data/originals out=datasets/vtab tasks=[pets,clevr_count]
  Prove that the splits are the official ones, by computing them again from the keys; exit code 2 if not:
      python launch/vtab_prepare.py prove=true out=datasets/vtab
  On a Ray cluster whose nodes share a file system (absolute paths):
      ray job submit --working-dir . -- python launch/vtab_prepare.py originals=/data/originals out=/data/vtab

After an interruption, run the same command again.
"""

from _repository import command

from pipeline.settings.commands.data import VtabPrepareConfig

if __name__ == "__main__":
    command.main(VtabPrepareConfig, "data_tools.vtab.prepare", __doc__)
