"""Command: compare two or more runs. See `pipeline/evaluate/compare.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.settings.reports import CompareConfig


def compare(config: CompareConfig) -> None:
    from pipeline.evaluate.compare import run  # Late: --help needs no torch.

    run(config)


if __name__ == "__main__":
    main(
        CompareConfig,
        compare,
        """
        Compare runs, such as a ViT and a ResNet with the same settings: accuracy; precision, recall and F1 of each class; loss
        curves in one figure; and the settings that differ.

          deepspeed launch/pretrain.py --config mine.yaml name=vit model.name=ViT-S/16
          deepspeed launch/pretrain.py --config mine.yaml name=resnet model.name=BiT-R50x1 model.representation=false
          python launch/compare.py runs=[runs/vit,runs/resnet]

        Writes report.md, report.html (self-contained), losses.png and per_class.csv.
        """,
    )
