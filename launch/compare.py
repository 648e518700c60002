"""Command: two or more runs side by side. See `pipeline/evaluate/compare.py`."""

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
        Runs side by side, as a ViT and a ResNet of one config: accuracy, precision, recall and F1 of each class, their losses in
        one figure, and what differs in their settings.

          deepspeed launch/pretrain.py --config mine.yaml name=vit model.name=ViT-S/16
          deepspeed launch/pretrain.py --config mine.yaml name=resnet model.name=BiT-R50x1 model.representation=false
          python launch/compare.py runs=[runs/vit,runs/resnet]

        Writes report.md, report.html (one file), losses.png and per_class.csv.
        """,
    )
