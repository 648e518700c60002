"""Command: estimate steps, memory and time of a run before it starts. See `pipeline/estimate/forecast.py`.

Estimate a run: steps, memory per rank at each ZeRO stage, hours, checkpoints, data reading.
Takes seconds on a CPU. It refuses what training would refuse.

  python launch/plan.py --config configs/pretrain/vit_l16_imagenet21k.yaml --cluster 8x8xH100-80GB
  python launch/plan.py --config FILE --cluster 8x8xH100-80GB samples=14.2e6 classes=21841
  python launch/plan.py --config FILE --cluster 8x8xA100-40GB network=aws-p4d     # or network=400, in Gb/s per node
  python launch/plan.py --config FILE --cluster 8x8xH100-80GB measured=1000       # images/s that one GPU was measured at
  python launch/plan.py --config FILE --cluster 1x4xA100-40GB train.micro_batch=32 json=plan.json

With --cluster, it recommends ZeRO stage, micro-batch and activation checkpointing, with reasons, as settings to paste.

The time of a step is predicted from arithmetic, memory traffic and communication: docs/plan.md says how, and what was
checked. Networks: dgx-b300, dgx-b200, dgx-h100, dgx-a100, aws-p5, aws-p4d, gcp-a3-ultra, gcp-a3-mega, gcp-a3-high, gcp-a2,
100gbe, 25gbe; without network=... the usual one of the GPU.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process.start import guard

guard(__name__)

from pipeline.settings.command import main
from pipeline.settings.commands.operate import PlanConfig

if __name__ == "__main__":
    main(PlanConfig, "pipeline.estimate.forecast_text", __doc__)
