"""Command: run many pre-trainings that answer one question, and report what follows. See `pipeline/study/running/driver.py`.

Ask the ViT paper's questions of your own images: how much data is enough (Figures 3 and 4), which model is best for a compute
budget and what would a larger one give (Figure 5), what does a part of the model contribute (Table 8, Figure 8)? And what
are weights that were pre-trained without labels worth, when few labels are known?

Each combination of model, data size, length and seed is a cell: an ordinary pre-training run, in a folder of its own, then
its scores. The report has figures, fitted power laws with their uncertainty, and predictions where the fits support them.

  Four ready studies, each in full size and in one for a CPU (docs/studies.md has their results on CIFAR-10):
      python launch/study.py --config configs/study/data_size_cpu.yaml --plan
      python launch/study.py --config configs/study/data_size_cpu.yaml
      python launch/study.py --config configs/study/scaling.yaml 'settings=[data.path=datasets/photos]' score=top1 tflops=300 --plan
  On this machine's GPUs, on a Ray cluster with 8 GPUs a cell, or as a SLURM array:
      python launch/study.py --config FILE launcher="deepspeed --num_gpus 8" gpus=8
      ray job submit --working-dir . -- python launch/study.py --config FILE on=ray gpus=8 out=/shared/runs
      python launch/study.py --config FILE gpus=8 slurm=study.sbatch

Cells run cheapest first. After any interruption, run the same command again: finished cells are kept, others continue from
their checkpoints. A cell that fails or diverges is reported, and the others continue; the exit code is then 2 for failures.
"""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process.start import guard

guard(__name__)

from pipeline.base.errors import UserError
from pipeline.process.outputs import hold
from pipeline.settings.command import main
from pipeline.settings.commands.study import StudyConfig

if TYPE_CHECKING:
    from pipeline.ray_tasks import RunJobs
    from pipeline.study.running.cells import Study
    from pipeline.study.running.study_page import StudyPage


def study(config: StudyConfig) -> None:
    from pipeline.ray_tasks import run_here, shared_path  # Late: --help and mistakes in the settings need no torch.
    from pipeline.study.running.cells import run_for_all
    from pipeline.study.running.driver import run

    folder = Path(str(shared_path("out", config.out))) / config.name
    shared_path("data.path", run_for_all(config).data.path)
    if config.plan or config.cell:
        run(config, at_a_time=config.num_tasks or 1 if config.on == "ray" else 1)
        return
    on_cluster = config.on == "ray" and not (config.slurm or config.report)
    if not config.slurm:
        hold(folder)
    run_jobs, at_a_time = on_ray(config) if on_cluster else (run_here, 1)
    run(config, run_jobs, at_a_time, in_mlflow)


def in_mlflow(study: "Study") -> "StudyPage | None":
    """The page of a study in MLflow; None if it is not sent."""
    from pipeline.study.running.study_page import StudyPage
    from pipeline.transfer.track.parent_page import uri_of_runs

    uri = uri_of_runs(study.config.mlflow, study.cells[0].run.config.track, study.config.out)
    return StudyPage(study, uri) if uri else None


def on_ray(config: StudyConfig) -> tuple["RunJobs", int]:
    """Returns (what runs cells on the Ray cluster, or on this machine if there is none; how many at a time)."""
    from pipeline import ray_tasks

    ray_tasks.connect()
    fitting, num_gpus = ray_tasks.capacity(config.threads, config.gpus)
    if config.gpus and not num_gpus:
        raise UserError(f"gpus = {config.gpus}, but this Ray cluster has no GPU. Use gpus=0 to train on CPUs.")
    limit = config.num_tasks or fitting

    return partial(ray_tasks.run_tasks, limit=limit, num_cpus=config.threads, num_gpus=num_gpus), limit


if __name__ == "__main__":
    main(StudyConfig, study, __doc__)
