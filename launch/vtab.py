"""Command: score weights on VTAB-1k's tasks by a protocol, as Ray tasks. See `pipeline/experiment/vtab.py`.

Score weights on VTAB-1k: on each of 19 tasks, adapt them to 1,000 training images and test them, by a published
protocol.

If the protocol tries several settings, they are chosen on train800 and val200; then the model is trained on all 1,000
images and tested, once per seed. Each combination of task, setting and seed is a cell: one Ray task, on CPUs or a share
of a GPU.

  Prepare the tasks first (docs/vtab.md), then use one of the protocols in configs/vtab/:
      python launch/vtab_prepare.py originals=/data/originals out=datasets/vtab
      python launch/vtab.py --config configs/vtab/vit_paper.yaml weights=runs/vit_l16
      python launch/vtab.py --config configs/vtab/lightweight.yaml weights=ViT-B_16.npz \\
          out=runs/vtab_b16 'tasks=[dtd,pets]'
  List the cells and their cost:
      python launch/vtab.py --config configs/vtab/vit_paper.yaml weights=runs/vit_l16 plan=true
  Minutes instead of hours, by ridge regression on features:
      python launch/vtab.py --config configs/vtab/vit_paper.yaml weights=runs/vit_l16 method=linear
  On a Ray cluster whose nodes share a file system (absolute paths), four cells on each GPU:
      ray job submit --working-dir . -- python launch/vtab.py --config configs/vtab/vit_paper.yaml \\
          weights=/data/runs/vit_l16 data=/data/vtab out=/data/runs/vit_l16/vtab gpu_share=0.25 threads=4 precision=bf16

After an interruption, run the same command again: finished cells are kept, and the results are the same. A cell that
fails is retried, then reported; the others continue, and the exit code is 2.
The result folder holds results.json, with protocol, weights and data and their checksums, and one file per cell. The
sweep is sent to MLflow (mlflow=URI; mlflow=none sends nothing) as one run.
"""

from _repository import command

from pipeline.settings.commands.transfer import VtabConfig

if __name__ == "__main__":
    command.main(VtabConfig, "pipeline.experiment.vtab", __doc__)
