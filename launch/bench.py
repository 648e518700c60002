"""Command: measure how fast one GPU trains. See `data_tools/bench/`.

Measure how fast one GPU trains, and which settings are the fastest that keep the loss and repeat bit for bit: eager and
compiled, fused optimizer, deterministic kernels, batch sizes; the engine, from real shards. Takes at most `seconds`;
results are written as they are measured.

  python launch/bench.py gpu json=gpu.json
  python launch/bench.py gpu models=[ViT-H/14@224] only=[product,step] seconds=200
  python launch/bench.py gpu device=cpu
"""

import sys

from _repository import command

from pipeline.settings.commands.bench import GpuBenchConfig

if __name__ == "__main__":
    if sys.argv[1:2] == ["gpu"]:
        del sys.argv[1]
    command.main(GpuBenchConfig, "data_tools.bench.gpu_bench", __doc__)
