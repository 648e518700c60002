"""Command: images -> their most likely classes. See `pipeline/evaluate/predict.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.settings.weights import PredictConfig


def predict(config: PredictConfig) -> None:
    from pipeline.evaluate.predict import run  # Late: --help and mistakes in the settings need no torch.

    run(config)


if __name__ == "__main__":
    main(
        PredictConfig,
        predict,
        """
        Say what weights take images for: the most likely classes of each, with probabilities, from files, folders, tars
        or a data set. Images are prepared exactly as for launch/evaluate.py. Runs in one process, on a GPU or a CPU.

          python launch/predict.py weights=runs/photos images=holiday
          python launch/predict.py weights=ViT-B_16.npz class_names=imagenet.txt 'images=[cat.jpg,dog.jpg]' top=3
          python launch/predict.py weights=runs/photos images=datasets/photos split=test out=predictions.parquet

        The table has a row for each image and class: image, label (where the true class is known), rank, class,
        class_number, probability. An image that cannot be read has one row, with the reason under problem.
        """,
    )
