"""Command: measure how fast one GPU trains. See `data_tools/bench/gpu/`.

Measure how fast one GPU trains, and which settings are the fastest that keep the loss and repeat bit for bit: eager and
compiled, fused optimizer, deterministic kernels, batch sizes; the engine, from real shards. Takes at most `seconds`; results
are written as they are measured.

  python launch/bench.py gpu json=gpu.json
  python launch/bench.py gpu models=[ViT-H/14@224] only=[product,step] seconds=200
  python launch/bench.py gpu device=cpu
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.process.start import guard

guard(__name__)

from pipeline.settings.command import main
from pipeline.settings.commands.bench import GpuBenchConfig
from pipeline.settings.commands.operate import TrainBenchConfig
from pipeline.settings.run import DataConfig


def bench_train(config: TrainBenchConfig) -> None:
    """Look at the data, if there are any, before torch is imported."""
    if config.data:
        from pipeline.data.dataset.manifest import open_dataset
        from pipeline.data.mixture.run_data import run_splits

        run_splits(open_dataset(config.data), DataConfig(path=config.data), seed=0)
    from data_tools.bench import training_step

    training_step.run(config)


if __name__ == "__main__" and sys.argv[1:2] == ["train"]:
    del sys.argv[1]
    main(
        TrainBenchConfig,
        bench_train,
        """
        Measure the pipeline's training step and a plain PyTorch loop with the same model, batch and optimizer, alternately.

          python launch/bench.py train
          python launch/bench.py train model=ViT-L/16 batch=64 precision=bf16 steps=20
          python launch/bench.py train model=ViT-L/16 batch=64 precision=bf16 steps=50 data=/data/imagenet21k decoders=14

        The last is a short run on real data, with a checkpoint each round. On a busy machine, many short rounds give a more
        reliable median than a few long ones.
        """,
    )
elif __name__ == "__main__":
    if sys.argv[1:2] == ["gpu"]:
        del sys.argv[1]
    main(GpuBenchConfig, "data_tools.bench.gpu.gpu_bench", __doc__)
