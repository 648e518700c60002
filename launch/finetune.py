"""Command: fine-tune a Vision Transformer, `deepspeed launch/finetune.py --config FILE init.weights=RUN [setting=value ...]`.

Fine-tune pre-trained weights on another data set, usually at a higher resolution: the head is replaced by a
zero-initialised one, and positions are resampled to the new patch grid. The same command starts, resumes and
finishes a run.

  deepspeed launch/finetune.py --config configs/finetune/imagenet_384px.yaml init.weights=runs/vit_l16
  deepspeed launch/finetune.py --config configs/finetune/cifar10_48px.yaml
  deepspeed launch/finetune.py --config configs/finetune/imagenet_384px.yaml init.weights=ViT-B_16.npz
  deepspeed launch/finetune.py --config configs/finetune/own_images.yaml train.freeze=backbone

The weights determine the architecture: leave model.name and model sizes unset.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process.start import guard

guard(__name__)

from pipeline.settings.command import main
from pipeline.settings.run import RunConfig
from pipeline.transfer.finetune import run


def finetune(config: RunConfig) -> None:
    run(config, draw="pipeline.review.draw")


if __name__ == "__main__":
    main(RunConfig, finetune, __doc__)
