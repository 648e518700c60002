"""Command: estimate steps and memory of a run before it starts. See `pipeline/estimate/forecast.py`.

Estimate a run: steps, memory per rank at each ZeRO stage, checkpoints, and hours from a measured speed.
Takes seconds on a CPU. It refuses what training would refuse.

  python launch/plan.py --config configs/pretrain/vit_l16_imagenet21k.yaml cluster=8x8xH100-80GB
  python launch/plan.py --config FILE cluster=8x8xH100-80GB samples=14.2e6 classes=21841
  python launch/plan.py --config FILE cluster=8x8xH100-80GB measured=1000  # images/s of one GPU, measured
  python launch/plan.py --config FILE cluster=1x4xA100-40GB train.micro_batch=32

With cluster=..., it recommends ZeRO stage, micro-batch and activation checkpointing as settings to paste, and refuses a
run that does not fit the GPU's memory. See docs/plan.md.
"""

from _repository import command

from pipeline.settings.commands.operate import PlanConfig

if __name__ == "__main__":
    command.main(PlanConfig, "pipeline.estimate.forecast", __doc__)
