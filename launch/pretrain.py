"""Command: pre-train a Vision Transformer, `deepspeed launch/pretrain.py --config FILE [setting=value ...]`.

Pre-train a Vision Transformer. The same command starts, resumes and finishes a run.

  deepspeed --hostfile hosts launch/pretrain.py --config configs/pretrain/vit_l16_imagenet21k.yaml
  deepspeed --num_gpus 8     launch/pretrain.py --config configs/pretrain/vit_l16_imagenet21k.yaml seed=1
  torchrun --nproc_per_node 2 launch/pretrain.py --config configs/pretrain/cifar10_small.yaml
  python launch/pretrain.py --config configs/pretrain/cifar10_small.yaml train.length="2 epochs" name=try

With train.loss=NAME, --help also lists the settings of what is learned.
"""

from collections.abc import Sequence

from _repository import command

from pipeline.settings.run import RunConfig


def pretrain(config: RunConfig) -> None:
    from data_tools.sharding.shard_once import shard_once
    from pipeline.train.start import (  # Late: --help and mistakes in the settings need no pyarrow.
        refuse_missing_weights,
        run_training,
    )

    shard_once(config.data.path, lambda: refuse_missing_weights(config))
    run_training(config, draw="pipeline.review.draw")


def settings_of_the_objective(arguments: Sequence[str]) -> str:
    if not any(argument.startswith("train.loss=") for argument in arguments):
        return ""
    from pipeline.objectives import settings_help  # Late: imports torch.

    return settings_help(arguments)


if __name__ == "__main__":
    command.main(RunConfig, pretrain, __doc__, more_help=settings_of_the_objective, by_launcher=True)
