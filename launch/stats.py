"""Command: statistics and figures of a data set. See `data_tools/check/stats.py`.

Compute and draw statistics of a data set: images per class, image sizes, aspect ratios, bytes, formats, labels per image,
how well each shard is shuffled, and a sheet of samples. Reads only the manifest and the bytes of these samples.

      python launch/stats.py data=datasets/photos
      python launch/stats.py data=datasets/photos sheet=0 mlflow=http://mlflow:5000

Writes stats.json, classes.csv, shards.csv, histograms.png and contact_sheet.png into out.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.process.start import guard

guard(__name__)

from pipeline.settings.command import main
from pipeline.settings.commands.data import StatsConfig


def stats(config: StatsConfig) -> None:
    from data_tools.check import stats  # Late: --help and mistakes in the settings need no Matplotlib.

    found = stats.run(config)
    if config.mlflow:
        from pipeline.monitor.run_page import DatasetFacts, RunFacts
        from pipeline.monitor.tracking import send_report

        folder, name, digest = stats.folder(config), found["name"], found["fingerprint"]
        assert isinstance(folder, Path), "run() refuses others"
        files = [folder / name for name in stats.files(config)]
        tags = {"data": digest, "data_fingerprint": digest, "dataset": name}
        datasets = tuple(
            DatasetFacts(name, found["data"], digest, split, of["samples"], found["num_classes"], "statistics")
            for split, of in found["splits"].items()
        )
        facts = RunFacts(f"stats {name}", "data", tags=tags, datasets=datasets)
        send_report(config.mlflow, folder, facts, stats.metrics(found), files, config.experiment)


if __name__ == "__main__":
    main(StatsConfig, stats, __doc__)
