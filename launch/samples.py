"""Command: list the samples of a training step. See `pipeline/review/samples.py`.

List the samples of a training step. This is computed from the sample order, so it needs no log and works for future
steps.

  python launch/samples.py run=runs/vit_l16 step=100000
  python launch/samples.py run=runs/vit_l16 step=100000 csv=batch.csv sheet=batch.png
  python launch/samples.py run=configs/pretrain/vit_l16_imagenet21k.yaml step=1

step counts from 1, as in log lines; epoch and place count from 0. row is the sample's row in the manifest.
The command fails if the data or the excluded samples differ from those of the run.
"""

from _repository import command

from pipeline.settings.commands.operate import SamplesConfig

if __name__ == "__main__":
    command.main(SamplesConfig, "pipeline.review.samples", __doc__)
