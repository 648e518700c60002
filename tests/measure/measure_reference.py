"""Hashes of what a change of structure must not change: `measure_reference.py [REPOSITORY] > now.json`.

Runs the commands of a repository (default: this one) on generated data and prints, as JSON, a hash of each result: the
losses, gradient norms and scores of runs at each ZeRO stage, precision and objective, their checkpoints' tensors, the
bytes of shards, and the scores of probes. Run it before and after, on the same machine (kernels differ between
processors), and compare the two files:

    python tests/measure/measure_reference.py ../before > before.json
    python tests/measure/measure_reference.py > now.json
    diff before.json now.json

Only commands and files are used, so the two repositories may differ inside. A minute on two idle cores.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import numpy as np
from PIL import Image
from ranks import ROOT, settings
from tiny import make_dataset

# The metrics that follow from the settings alone: no time, no memory.
_EXACT = re.compile(r"loss|lr|grad_norm|epoch|skipped_steps|loss_spikes|val_(loss|top1|top5|\w+shot|\w+nn|\w*accuracy)")
_MASKED = ("model.representation=false", "model.name=ViT-Ti/4")
_AUGMENTED = (
    "augment.randaugment_layers=2",
    "augment.color_jitter=0.4",
    "augment.erase=0.5",
    "augment.mixup=0.8",
    "augment.cutmix=1",
)
# Name -> (ranks, overrides). Together they contain each ZeRO stage, precision, objective, crop, distortion and
# optimizer.
RUNS = {
    "stage0_fp32": (2, ("engine.zero_stage=0", "optimizer.ema_decay=0.9")),
    "stage1_bf16": (2, ("engine.precision=bf16", "train.loss=sigmoid", "optimizer.ema_decay=0.9")),
    "stage2_bf16": (2, ("engine.precision=bf16", "engine.zero_stage=2", "model.dropout=0.1", "model.drop_path=0.1")),
    "stage3_bf16": (2, ("engine.precision=bf16", "engine.zero_stage=3", *_AUGMENTED)),
    "stage3_fp32": (2, ("engine.zero_stage=3", "optimizer.ema_decay=0.9", "engine.activation_checkpointing=true")),
    "sgd_one_rank": (
        1,
        ("optimizer.name=sgd", "optimizer.weight_decay=0", "augment.crop=resize_crop", "train.label_smoothing=0.1"),
    ),
    "small_crop": (
        1,
        (
            "augment.crop=resize_small_crop",
            "augment.resize_filter=antialias",
            "model.pool=map",
            "schedule.decay=cosine",
        ),
    ),
    "masked_mean_color": (2, ("train.loss=masked_mean_color", *_MASKED, "engine.zero_stage=3")),
    "masked_small_patch": (1, ("train.loss=masked_small_patch", *_MASKED)),
    "masked_pixels": (2, ("train.loss=masked_pixels", *_MASKED, "engine.precision=bf16", "optimizer.ema_decay=0.9")),
    "probed": (1, ("probe.every=3 steps", "probe.neighbours=3")),
}


def main(repository: str = "") -> None:
    root = Path(repository or ROOT).resolve()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        found = {}
        data = make_dataset(base / "data", {"train": 150, "val": 37}, size=24)
        for name, (world_size, more) in RUNS.items():
            print(name, file=sys.stderr, flush=True)
            torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}")
            call(root, *torchrun, "launch/pretrain.py", *settings(data, base / "runs", name, *more))
            found |= {f"{name} {what}": value for what, value in run_hashes(base / "runs" / name).items()}
        call(
            root,
            "launch/finetune.py",
            *settings(
                data,
                base / "runs",
                "tuned",
                f"init.weights={base}/runs/masked_pixels",
                "model.image_size=24",
                # What weights determine, in place of the sizes that `settings` gives.
                *(f"model.{name}=null" for name in ("name", "width", "depth", "mlp_width", "num_heads")),
            ),
        )
        found |= {f"tuned {what}": value for what, value in run_hashes(base / "runs" / "tuned").items()}
        call(
            root,
            "launch/evaluate.py",
            f"weights={base}/runs/stage0_fp32",
            f"data={data}",
            f"out={base}/scores",
            "neighbours=3",
        )
        found["evaluate"] = digest(scores(base / "scores"))
        found |= shard_hashes(root, base)
    json.dump(found, sys.stdout, indent=1)
    print()


def call(root: Path, *command: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, *command], env=env, cwd=root, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")


def run_hashes(run: Path) -> dict[str, str]:
    """Hashes of a run's metrics (but times and memory), and of the tensor files of its newest checkpoint."""
    metrics = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        kept = {name: value for name, value in record["metrics"].items() if _EXACT.fullmatch(name)}
        metrics.append((record["step"], sorted(kept.items())))
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    # A file of a rank is named by rank and save, as rank-0001.a48efa7e.bin.
    tensors = {
        file.name.partition(".")[0]: sha256(tensor_bytes(file)) for file in newest.iterdir() if file.suffix != ".json"
    }
    return {"metrics": digest(metrics), "tensors": digest(tensors)}


def tensor_bytes(file: Path) -> bytes:
    """The content of a file; of a .safetensors file, what follows its header, which also holds notes."""
    content = file.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :] if file.suffix == ".safetensors" else content


def scores(folder: Path) -> dict[str, object]:
    """What an evaluation found, without its speed and paths."""
    found = json.loads((folder / "scores.json").read_text())
    # Of four classes there is no top-5.
    return {name: found[name] for name in ("top1", "loss", "per_class", "fewshot", "knn")}


def shard_hashes(root: Path, base: Path) -> dict[str, str]:
    """Hashes of the tars and of the sample table of a data set made from a folder of images."""
    rng = np.random.default_rng(0)
    for i in range(24):
        file = base / "photos" / f"class{i % 3}" / f"{i}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40 + i, 50, 3), np.uint8)).save(file, quality=90)
    call(
        root, "launch/shard.py", f"source={base}/photos", f"out={base}/sharded", "val_share=0.2", "samples_per_shard=8"
    )
    tars = {file.name: sha256(file.read_bytes()) for file in sorted((base / "sharded").glob("*.tar"))}
    return {"shards": digest(tars), "samples": sha256((base / "sharded" / "samples.parquet").read_bytes())}


def digest(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode())


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


if __name__ == "__main__":
    assert shutil.which("g++"), "DeepSpeed compiles its CPU operators with g++"
    main(*sys.argv[1:])
