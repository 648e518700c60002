"""Command: write the features of images or their patches. See `pipeline/evaluate/features.py`.

Write the features of images as Parquet: the vector that the head reads, or would read, of any weights, with a head or
without; with tokens=patches those of each patch, as a .npy for each image. Images are files, folders
or a data set, preprocessed exactly as for launch/evaluate.py. Runs in one process, on a GPU or a CPU.

  python launch/features.py weights=runs/photos data=datasets/photos split=train out=train.parquet
  python launch/features.py weights=facebook/dinov2-base source=holiday out=holiday.parquet image_size=224
  python launch/features.py weights=facebook/dinov2-base source=holiday tokens=patches out=patches

The table has one row per image: key, label (the true class if known, with its readable name if it has one, as
launch/predict.py writes it), vector (float32), problem. The same images, weights and settings give the same bytes on
the same machine. An unreadable image has no vector, and the reason in problem. More of them than max_bad_share, and
than 10, are an error; with many, set max_bad_share=1. To read the table:

  table = pyarrow.parquet.read_table("train.parquet")
  vectors = numpy.stack(table["vector"].drop_null().to_numpy())           # (images, features)

Of patches, features are float16 (rows, columns, features), and images that cannot be read are left out.

See docs/explain.md.
"""

from _repository import command

from pipeline.settings.commands.weights import FeaturesConfig

if __name__ == "__main__":
    command.main(FeaturesConfig, "pipeline.evaluate.features", __doc__)
