"""Command: how fast data is read and written, beside others. See `data_tools/bench/`."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.command import main
from pipeline.data_config import BenchConfig


def bench(config: BenchConfig) -> None:
    # Late: --help needs no torch.
    from data_tools.bench import augment, loaders, shards

    if config.what == "augment":
        augment.run(config)
        return
    with tempfile.TemporaryDirectory(dir=config.folder or None) as folder:
        (loaders if config.what == "data" else shards).run(config, Path(folder))


if __name__ == "__main__":
    main(
        BenchConfig,
        bench,
        """
        Measure the data loader (data) or sharding (shard) side by side with others, in turns, on the same images; or
        what augmentation costs (augment).

          python launch/bench.py data source=photos
          python launch/bench.py shard source=imagenet_samples.tar images=2000 rounds=5
          python launch/bench.py augment source=photos images=200 rounds=9

        source is a folder or a tar of JPEGs, repeated to `images`. Each line says what comes out, the decoder and the
        filter: compare like with like. Other loaders are measured where they are installed (pip install '.[bench]').
        On a busy machine look at the images per CPU second.
        """,
        subject="what",
    )
