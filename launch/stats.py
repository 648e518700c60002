"""Command: statistics and figures of a data set. See `data_tools/check/stats.py`.

Compute and draw statistics of a data set: images per class, image sizes, aspect ratios, bytes, formats, labels per
image, and a sheet of samples. Reads only the manifest and the bytes of these samples.
With values=..., measures the range of the values of the training images and records it (docs/images.md).

      python launch/stats.py data=datasets/photos
      python launch/stats.py data=datasets/photos sheet=0 mlflow=http://mlflow:5000
      python launch/stats.py data=datasets/xrays values=percentiles values_images=0

Writes stats.json, classes.csv, histograms.png and contact_sheet.png into out.
"""

from _repository import command

from pipeline.settings.commands.data import StatsConfig

if __name__ == "__main__":
    command.main(StatsConfig, "data_tools.check.stats", __doc__)
