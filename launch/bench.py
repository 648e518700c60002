"""Command: how fast data is read and written, and a step is made, beside others. See `data_tools/bench/`, `data_tools/bench/training_step.py`."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process import guard

guard(__name__)

from pipeline.command import main
from pipeline.settings.data import BenchConfig
from pipeline.settings.operate import TrainBenchConfig
from pipeline.settings.run import DataConfig


def bench(config: BenchConfig) -> None:
    # Late: --help needs no torch.
    from data_tools.bench import augment, loaders, shards

    if config.what == "augment":
        augment.run(config)
        return
    with tempfile.TemporaryDirectory(dir=config.folder or None) as folder:
        (loaders if config.what == "data" else shards).run(config, Path(folder))


def bench_train(config: TrainBenchConfig) -> None:
    if config.data:
        from pipeline.data.dataset.manifest import open_dataset
        from pipeline.data.dataset.subset import run_splits

        run_splits(open_dataset(config.data), DataConfig(path=config.data), seed=0)
    from data_tools.bench.training_step import run  # Late: imports DeepSpeed.

    run(config)


if __name__ == "__main__" and sys.argv[1:2] == ["train"]:
    del sys.argv[1]
    main(
        TrainBenchConfig,
        bench_train,
        """
        Measure the pipeline's training step beside the same model, batch and optimizer in a bare PyTorch loop, in turns.

          python launch/bench.py train
          python launch/bench.py train model=ViT-L/16 batch=64 precision=bf16 steps=20
          python launch/bench.py train model=ViT-L/16 batch=64 precision=bf16 steps=50 data=/data/imagenet21k decoders=14

        The last is a short run on real data, with a checkpoint each round. On a busy machine the median of many short
        rounds says more than few long ones.
        """,
    )
elif __name__ == "__main__":
    main(
        BenchConfig,
        bench,
        """
        Measure the data loader (data) or sharding (shard) side by side with others, in turns, on the same images; or
        what augmentation costs (augment). `bench.py train --help` is about the training step.

          python launch/bench.py data source=photos
          python launch/bench.py shard source=imagenet_samples.tar images=2000 rounds=5
          python launch/bench.py augment source=photos images=200 rounds=9

        source is a folder or a tar of JPEGs, repeated to `images`. Each line says what comes out, the decoder and the
        filter: compare like with like. Other loaders are measured where they are installed (pip install '.[bench]').
        On a busy machine look at the images per CPU second.
        """,
        subject="what",
    )
