"""Command: score weights on VTAB-1k's tasks by a protocol, as Ray tasks. See `pipeline/transfer/vtab.py`.

Score weights on VTAB-1k: on each of 19 tasks, adapt them to 1,000 training images and test them, by a published protocol.

If the protocol tries several settings, they are chosen on train800 and val200; then the model is trained on all 1,000 images
and tested, once per seed. Each combination of task, setting and seed is a cell: one Ray task, on CPUs or a share of a GPU.

  Prepare the tasks first (docs/vtab.md), then use one of the protocols in configs/vtab/:
      python launch/vtab_prepare.py originals=/data/originals out=datasets/vtab
      python launch/vtab.py --config configs/vtab/vit_paper.yaml weights=runs/vit_l16
      python launch/vtab.py --config configs/vtab/lightweight.yaml weights=ViT-B_16.npz out=runs/vtab_b16 'tasks=[dtd,pets]'
  List the cells and their cost:
      python launch/vtab.py --config configs/vtab/vit_paper.yaml weights=runs/vit_l16 --plan
  Minutes instead of hours, by ridge regression (or method=knn) on features:
      python launch/vtab.py --config configs/vtab/vit_paper.yaml weights=runs/vit_l16 method=linear
  On a Ray cluster whose nodes share a file system (absolute paths), four cells on each GPU:
      ray job submit --working-dir . -- python launch/vtab.py --config configs/vtab/vit_paper.yaml \\
          weights=/data/runs/vit_l16 data=/data/vtab out=/data/runs/vit_l16/vtab gpu_share=0.25 threads=4 precision=bf16

After an interruption, run the same command again: finished cells are kept, and the results are the same. A cell that fails
is retried, then reported; the others continue, and the exit code is 2.
The result folder holds results.json, with protocol, weights and data and their checksums, and one file per cell. The sweep
is sent to MLflow (mlflow=URI; mlflow=none sends nothing) as a run, with a run below it for each cell.
"""

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process.start import guard

guard(__name__)

from pipeline.process.outputs import hold
from pipeline.settings.command import main
from pipeline.settings.commands.transfer import VtabConfig


def vtab(config: VtabConfig) -> None:
    from pipeline.monitor.mlflow.weights import with_local_weights
    from pipeline.ray_tasks import shared_path  # Late: --help and mistakes in the settings need no torch.
    from pipeline.transfer.track.sweep_page import tracking_uri
    from pipeline.transfer.vtab import output, run

    config = with_local_weights(config)
    paths = [
        ("weights", config.weights),
        ("data", config.data),
        *(("pretrained_on", path) for path in config.pretrained_on),
    ]
    for name, path in paths:
        # hf://NAME is in Hugging Face's cache of each node.
        if path and not path.startswith("hf://"):
            shared_path(name, path)
    folder = Path(str(shared_path("out", str(output(config)))))
    if not config.plan:
        hold(folder)
    run(config, folder, partial(on_ray, config), "" if config.plan else tracking_uri(config))


def on_ray(config: VtabConfig, *arguments: Any) -> Iterable[tuple[int, Any]]:
    """A `RunJobs` on the Ray cluster if there is one, else on this machine. Connects only when there are cells to run."""
    from pipeline import ray_tasks

    ray_tasks.connect()
    fitting, num_gpus = ray_tasks.capacity(config.threads, config.gpu_share)
    limit = config.num_tasks or fitting
    return ray_tasks.run_tasks(*arguments, limit=limit, num_cpus=config.threads, num_gpus=num_gpus)


if __name__ == "__main__":
    main(VtabConfig, vtab, __doc__)
