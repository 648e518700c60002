"""Launcher: run a training command as Ray actors, one per GPU of a Ray cluster. See `ray_tasks.run_ranks`."""

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from _repository import command

from pipeline.base.errors import Stopped, UserError
from pipeline.cluster import ray_tasks
from pipeline.cluster.status_files import RESUME
from pipeline.process.installed import python_arguments
from pipeline.process.launcher import forget_launcher
from pipeline.process.outputs import try_outputs
from pipeline.settings.run import RunConfig

ABOUT = """
Run a training command on a Ray cluster: one rank per GPU, or on CPUs if the cluster has no GPUs.

  ray job submit --working-dir . -- python launch/ray_run.py launch/pretrain.py \\
      --config configs/pretrain/vit_l16_imagenet21k.yaml out=/shared/runs data.path=/shared/imagenet21k

`ray job stop` ends it like a signal under any other launcher: a checkpoint is committed, and the exit code (75)
means that the same command resumes the run. Set RAY_JOB_STOP_WAIT_TIME_S=30, so that Ray waits for the commit.
"""


def run(ranks: int, cpus_per_rank: int, words: list[str]) -> int:
    if Path(words[0]).stem not in ("pretrain", "finetune"):
        raise UserError(
            f"{words[0]} trains no ranks: give launch/pretrain.py or launch/finetune.py and its settings, without a"
            " launcher before it."
        )
    settings = command.read_settings(RunConfig, words[1:])
    mixed = [("data.mix", entry.path) for entry in settings.data.mix]
    for name, path in (("out", settings.out), ("data.path", settings.data.path), *mixed):
        ray_tasks.shared_path(name, path)
    try_outputs(settings)
    if settings.objective:  # Before the ranks wait for GPUs: they would find a mistake in it only when they have them.
        from pipeline import objectives  # Late: imports torch.

        objectives.check(settings)
    ray_tasks.connect()
    heard: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):  # After connect(): Ray installs its own handlers.
        signal.signal(number, lambda number, frame: heard.append(number))
    words = [*python_arguments(words[0]), *words[1:]]
    say = partial(print, flush=True)
    try:
        return ray_tasks.run_ranks(words, ranks, cpus_per_rank, say, lambda: bool(heard))
    except Stopped:
        say("stopped before the ranks ran: the same command starts them (exit code 75)")
        return RESUME


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="number of ranks (default: as many as fit)")
    parser.add_argument(
        "--cpus-per-rank", type=int, default=1, help="CPUs of each rank on a cluster without GPUs (default: 1)"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="launch/pretrain.py or launch/finetune.py, and its settings"
    )
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("give a command: launch/pretrain.py --config FILE")
    if arguments.ranks < 0 or arguments.cpus_per_rank < 1:
        parser.error("--ranks must not be negative, and --cpus-per-rank must be at least 1")
    forget_launcher()
    with command.mistakes_in_one_line():
        sys.exit(run(arguments.ranks, arguments.cpus_per_rank, arguments.command))
