"""Command: ask every host of a hostfile whether it is fit, before a run starts on them. See `pipeline/lifecycle/host_check.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.lifecycle import host_check
from pipeline.settings.operate import HostsConfig

if __name__ == "__main__":
    main(
        HostsConfig,
        host_check.run,
        """
        Ask every host of a hostfile, over ssh, whether it is fit for a run, and write .deepspeed_env for it.

          python launch/hosts.py hostfile=hosts run=configs/pretrain/vit_l16_imagenet21k.yaml

        Compared: versions of Python, torch, DeepSpeed and this code, the data's path, the output folder (shared,
        writable, free space), clocks, GPUs against slots, and the bandwidth from here. Exits with 2 if any host is unfit.
        .deepspeed_env carries the variables that launch.env names (credentials, NCCL settings) to every host: DeepSpeed's
        launcher reads it in the folder where it is started. ssh options are those of pdsh: PDSH_SSH_ARGS_APPEND.
        """,
    )
