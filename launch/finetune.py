"""Command: fine-tune a Vision Transformer, `deepspeed launch/finetune.py --config FILE init.weights=RUN [setting=value
...]`.

Fine-tune pre-trained weights on another data set, usually at a higher resolution: the head is replaced by a
zero-initialised one, and positions are resampled to the new patch grid. The same command starts, resumes and
finishes a run.

  deepspeed launch/finetune.py --config configs/finetune/imagenet_384px.yaml init.weights=runs/vit_l16
  deepspeed launch/finetune.py --config configs/finetune/cifar10_48px.yaml
  deepspeed launch/finetune.py --config configs/finetune/imagenet_384px.yaml init.weights=ViT-B_16.npz
  deepspeed launch/finetune.py --config configs/finetune/own_images.yaml data.path=photos train.freeze=backbone

The weights determine the architecture: leave model.name and model sizes unset.
"""

import sys
from os.path import dirname

sys.path.insert(0, dirname(dirname(__file__)))

from pipeline.base.errors import UserError
from pipeline.settings.command import main
from pipeline.settings.run import RunConfig


def finetune(config: RunConfig) -> None:
    if config.init.weights is None:
        raise UserError(
            "init.weights is not set: fine-tuning starts from a run folder, a checkpoint, our .pt or an official .npz. "
            "Set init.weights=runs/NAME; launch/pretrain.py trains a new model."
        )
    from data_tools.sharding.shard_once import shard_once
    from pipeline.train.start import (  # Late, so that a mistake in the settings is reported without pyarrow.
        refuse_missing_weights,
        run_training,
    )

    shard_once(config.data.path, lambda: refuse_missing_weights(config))
    run_training(config, draw="pipeline.review.draw")


if __name__ == "__main__":
    main(RunConfig, finetune, __doc__, by_launcher=True)
