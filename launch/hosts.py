"""Command: check every host of a hostfile before a run starts. See `pipeline/cluster/host_check.py`.

Check over ssh that every host of a hostfile is ready for a run, and write .deepspeed_env.

  python launch/hosts.py hostfile=hosts run=configs/pretrain/vit_l16_imagenet21k.yaml

Checked are the versions of Python, torch, DeepSpeed and this code, the data's path, the output folder (shared,
writable), and GPUs against slots. Exit code 2 if a host fails.
.deepspeed_env passes the environment variables named in launch.env (credentials, NCCL settings) to every host:
DeepSpeed's launcher reads it from its working folder. Set ssh options as for pdsh: PDSH_SSH_ARGS_APPEND.
"""

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

from pipeline.settings.command import main
from pipeline.settings.commands.operate import HostsConfig

if __name__ == "__main__":
    main(HostsConfig, "pipeline.cluster.host_check", __doc__)
