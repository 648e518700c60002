"""Command: restart a run until it is finished, `launch/supervise.py [setting=value ...] -- deepspeed launch/pretrain.py
...`.

Start a run by `deepspeed`, and restart it after a crash or preemption until it is finished. (torchrun --max-restarts
does so by itself.)

  python launch/supervise.py -- deepspeed --hostfile hosts launch/pretrain.py --config FILE
  python launch/supervise.py restarts=3 -- deepspeed --num_gpus 8 launch/finetune.py --config FILE name=try

Exit codes: 0 finished, 75 stopped (start it again to resume), 2 the run refused its settings or diverged, 1 gave up.
The run's folder has a log of the supervisor in supervise.log.
"""

import sys
from functools import partial

from _repository import command

from pipeline.cluster.supervise import supervise
from pipeline.settings.commands.operate import SuperviseConfig

if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    launcher = sys.argv[split + 1 :]
    del sys.argv[split:]
    command.main(SuperviseConfig, partial(supervise, launcher), __doc__, starts_launcher=True)
