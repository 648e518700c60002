"""Command: what a run will take, before it is queued. See `pipeline/estimate/forecast.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.settings.operate import PlanConfig


def plan(config: PlanConfig) -> None:
    from pipeline.estimate.forecast import run  # Late: --help and mistakes in the settings need no torch.

    run(config)


if __name__ == "__main__":
    main(
        PlanConfig,
        plan,
        """
        Say what a run will take: steps, memory of a rank at each ZeRO stage, checkpoints, readers, hours and cost.
        On a CPU, in seconds. What it refuses, training refuses.

          python launch/plan.py --config configs/pretrain/vit_l16_imagenet21k.yaml --cluster 8x8xH100-80GB
          python launch/plan.py --config FILE --cluster 8x8xH100-80GB samples=14.2e6 classes=21841 price=2.5 mfu=0.5
          python launch/plan.py --config FILE --cluster 1x4xA100-40GB train.micro_batch=32 json=plan.json

        --cluster chooses ZeRO stage, micro-batch and activation checkpointing, and says why, as settings to paste.
        """,
        flag="cluster",
    )
