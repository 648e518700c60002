"""Command: which samples were in a step of a run, and when is a sample seen? See `pipeline/lifecycle/samples.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.lifecycle.samples import run
from pipeline.settings.operate import SamplesConfig

if __name__ == "__main__":
    main(
        SamplesConfig,
        run,
        """
        Say which samples a run sees when. Worked out from the order, so it needs no record, and holds for steps to come.

          python launch/samples.py run=runs/vit_l16 step=100000
          python launch/samples.py run=runs/vit_l16 step=100000 ranks=64 rank=17 csv=batch.csv sheet=batch.png
          python launch/samples.py run=runs/vit_l16 sample=n02084071/n02084071_1365
          python launch/samples.py run=configs/pretrain/vit_l16_imagenet21k.yaml step=1

        step counts from 1, as log lines do; epoch, place and rank count from 0. row is the sample's in the manifest.
        Data or excluded samples other than the run was trained on are refused.
        """,
    )
