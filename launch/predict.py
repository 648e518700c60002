"""Command: predict the most likely classes of images, or numbers. See `pipeline/evaluate/predict.py`.

Predict the most likely classes of images, with probabilities, from files, folders or a data set. Images are
preprocessed exactly as for launch/evaluate.py. Runs in one process, on a GPU or a CPU.

  python launch/predict.py weights=runs/photos source=holiday
  python launch/predict.py weights=ViT-B_16.npz class_names=imagenet.txt 'source=[cat.jpg,dog.jpg]' top=3
  python launch/predict.py weights=runs/photos data=datasets/photos split=test out=predictions.parquet

The table has one row per image and class: image, label (the true class, if known), rank, class, class_number,
probability. Of weights that predict numbers, it has one
row per image, with a column for each number. An unreadable image has one row, with the reason in column problem. More
of them than max_bad_share, and than 10, are an error; with many, set max_bad_share=1.
"""

from _repository import command

from pipeline.settings.commands.weights import PredictConfig

if __name__ == "__main__":
    command.main(PredictConfig, "pipeline.evaluate.predict", __doc__)
