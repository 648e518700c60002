"""Command: weights -> scores on VTAB-1k's tasks by a protocol, as a Ray job. See `pipeline/transfer/vtab.py`."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.settings.transfer import VtabConfig

ABOUT = """
Score weights on VTAB-1k: 19 tasks of 1,000 training images, each adapted to and tested by one published protocol.

Settings are chosen on train800 and val200 where the protocol tries several; then it is trained on all 1,000, and tested
once for each seed. Each task, setting and seed is a cell: one Ray task, on CPUs or a share of a GPU.

  First the tasks (docs/vtab.md), then one of the protocols in configs/vtab/:
      python launch/vtab_prepare.py originals=/data/originals out=datasets/vtab
      python launch/vtab.py --config configs/vtab/vit_paper.yaml weights=runs/vit_l16
      python launch/vtab.py --config configs/vtab/lightweight.yaml weights=ViT-B_16.npz out=runs/vtab_b16 'tasks=[dtd,pets]'
  What will it take?
      python launch/vtab.py --config configs/vtab/vit_paper.yaml weights=runs/vit_l16 --plan
  Cheap, minutes instead of hours: ridge regression or nearest neighbours on features
      python launch/vtab.py --config configs/vtab/vit_paper.yaml weights=runs/vit_l16 method=linear
  On a Ray cluster whose nodes share a file system (absolute paths), four cells on each GPU:
      ray job submit --working-dir . -- python launch/vtab.py --config configs/vtab/vit_paper.yaml \\
          weights=/data/runs/vit_l16 data=/data/vtab out=/data/runs/vit_l16/vtab gpu_share=0.25 threads=4 precision=bf16

Killed? Run the same command again: cells that are done are not run again, and the results are the same. A cell that fails is
tried again, then reported; the others go on, and the exit code is 2.
The folder of results holds results.json, which says protocol, weights and data with their checksums, and a file for each cell.
"""


def vtab(config: VtabConfig) -> None:
    from data_tools.driver import only_driver
    from pipeline.ray_tasks import shared_path  # Late, as the rest: --help and mistakes in the settings need no torch.
    from pipeline.transfer.vtab import output, run

    for name in ("weights", "data", "pretrained_on"):
        if getattr(config, name):
            shared_path(name, getattr(config, name))
    folder = Path(str(shared_path("out", str(output(config)))))
    with nullcontext() if config.plan else only_driver(folder):
        run(config, folder, partial(on_ray, config))


def on_ray(
    config: VtabConfig,
    function: Callable[[Any], dict[str, Any]],
    jobs: Sequence[Any],
    on_retry: Callable[[str], None],
    on_failure: Callable[[int, str], None],
) -> Iterable[tuple[int, dict[str, Any]]]:
    """Run the cells on the cluster that there is, else on this machine."""
    from pipeline import ray_tasks

    ray_tasks.connect()
    fitting, num_gpus = ray_tasks.capacity(config.threads, config.gpu_share)
    limit = config.num_tasks or fitting
    return ray_tasks.run_tasks(function, jobs, limit, on_retry, on_failure, config.threads, num_gpus)


if __name__ == "__main__":
    main(VtabConfig, vtab, ABOUT, flag="plan")
