"""Any valid settings: drawn at random from a seed, they load, plan, round-trip through config.yaml, train two steps,
and resume to the same bits.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from forked import Forge
from ranks import settings

from pipeline import objectives
from pipeline.base.errors import UserError
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.estimate.plan import make_plan
from pipeline.settings import schema
from pipeline.settings.run import RunConfig

NUM_SETTINGS = 24
LOSSES = {
    "softmax": [],
    "sigmoid": [],
    "mae": ["objective.decoder_width=16", "objective.decoder_depth=1", "objective.decoder_heads=2"],
    "masked_pixels": ["model.representation=false", "model.pool=gap"],
    "dino": ["prototypes=8", "hidden=16", "bottleneck=8", "local_views=1", "local_size=8"],
    "lejepa": ["local_views=1", "local_size=8", "hidden=16", "width=6", "directions=12"],
    "simclr": ["hidden=16", "width=6"],
}
VALUES: dict[str, list[Any]] = {
    "model.pool": ["token", "gap", "map", "mean", "both"],
    "model.pool_norm": ["true", "false"],
    "model.representation": ["true", "false"],
    "model.positions": ["learned", "learned2d", "sincos2d", "relative", "none"],
    "model.registers": [0, 2],
    "model.dropout": [0, 0.2],
    "model.drop_path": [0, 0.3],
    "model.layer_scale": ["null", 1e-4],
    "model.rope_base": ["null", 100],
    "model.qkv_bias": ["qkv", "qv", "none"],
    "model.qk_norm": ["true", "false"],
    "model.swiglu": ["true", "false"],
    "model.image_size": ["16", "16x24", "24"],
    "data.dev_share": [0, 0.2],
    "data.limit": ["100%", "60", "40%"],
    "data.streams": [1, 4, 12],
    "data.window": [1, 16, 1000],
    "data.balance": [1, 0.5, 0],
    "data.threads": [1, 3],
    "augment.crop": ["inception", "random_resized", "resize_crop", "resize_small_crop", "none"],
    "augment.flip": ["true", "false"],
    "augment.flip_vertical": ["true", "false"],
    "augment.resize_filter": ["linear", "antialias", "bilinear", "bicubic"],
    "augment.color_jitter": [0, 0.4],
    "augment.channel_brightness": [0, 0.3],
    "augment.blur": [0, 0.5],
    "augment.grey": [0, 0.5],
    "augment.randaugment_layers": [0, 2],
    "augment.noise": [0, 0.2],
    "augment.erase": [0, 0.5],
    "augment.drop_channels": [0, 0.3],
    "augment.mixup": [0, 0.8],
    "augment.cutmix": [0, 1],
    "augment.eval_crop": ["center", "resize", "resize_center"],
    "train.global_batch": [24, 12],
    "train.micro_batch": [24, 6, 2],
    "train.label_smoothing": [0, 0.1],
    "optimizer.name": ["adam", "sgd", "muon"],
    "optimizer.weight_decay": [0, 0.1],
    "optimizer.weight_decay_end": ["null", 0.2],
    "optimizer.layer_decay": [1, 0.7],
    "optimizer.clip": [0, 1],
    "optimizer.ema_decay": [0, 0.9],
    "optimizer.lr_batch": [0, 256],
    "schedule.decay": ["linear", "cosine", "constant"],
    "schedule.warmup": ["0 steps", "1 steps", "50%"],
    "engine.zero_stage": [0, 1, 2, 3],
    "engine.precision": ["fp32", "bf16"],
    "engine.activation_checkpointing": ["true", "false"],
    "evaluate.every": ["1 steps", "100%"],
    "probe.every": ["0 steps", "1 steps"],
    "probe.neighbours": [0, 5],
    "health.on_spike": ["warn", "rollback"],
}


def drawn(generator: random.Random) -> list[str]:
    """Overrides: an objective and a value for some of the settings, valid or not."""
    loss = generator.choice(list(LOSSES))
    own = [text if "." in text else f"objective.{text}" for text in LOSSES[loss]]
    names = generator.sample(list(VALUES), 12)
    return [f"train.loss={loss}", *own, *(f"{name}={generator.choice(VALUES[name])}" for name in names)]


def load(overrides: list[str]) -> RunConfig | None:
    """Settings that load and plan; None if they are refused."""
    try:
        config = schema.load(RunConfig, None, overrides)
        make_plan(config, 60, 1)
        objectives.new_backbone(config, 4)
    except UserError:
        return None
    return config


def train_each(runs: list[list[str]]) -> None:
    """In a rank: each run from its start, then again from its first of two checkpoints. Prints the runs that the data
    or the model refused.
    """
    from pipeline.train.start import run_training

    for overrides in runs:
        config = schema.load(RunConfig, None, overrides)
        run = Path(config.out) / config.name
        try:
            run_training(config)
        except UserError as error:
            print("refused", config.name, error, flush=True)
            continue
        newest = run / "checkpoints" / "step-00000002"
        shutil.move(newest, f"{run}-whole")
        (run / "checkpoints" / "latest").write_text("step-00000001")
        run_training(schema.load(RunConfig, run / "config.yaml"))


def test_any_valid_settings_train_and_resume(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    generator, runs, num_drawn = random.Random(3), list[list[str]](), 0
    while len(runs) < NUM_SETTINGS:
        num_drawn += 1
        often = ["train.length=2 steps", "checkpoint.every=1 steps", "checkpoint.keep=9", "schedule.warmup=0 steps"]
        overrides = settings(dataset, tmp_path, f"run{len(runs)}", *often, *drawn(generator))
        if (config := load(overrides)) is None:
            continue
        file = tmp_path / "settings.json"
        file.write_text(json.dumps(schema.to_dict(config)))  # YAML, too.
        assert schema.load(RunConfig, file) == config
        runs.append(overrides)
    assert num_drawn < 10 * len(runs), "nearly all are refused: draw fewer settings"
    said = forge.start_work(1, "test_any_settings:train_each", runs).finish()
    refused = {line.split()[1] for line in said.splitlines() if line.startswith("refused")}
    assert len(refused) < len(runs) / 4, said
    for number in range(len(runs)):
        if (name := f"run{number}") not in refused:
            assert_same(tmp_path / f"{name}-whole", tmp_path / name / "checkpoints" / "step-00000002", runs[number])


def assert_same(whole: Path, resumed: Path, overrides: list[str]) -> None:
    """Two checkpoints hold the same bytes."""
    assert ShardedTensors.open(whole).states == ShardedTensors.open(resumed).states, overrides
    for pattern in ("rank-*.bin", "*.safetensors"):
        for file, other in zip(sorted(whole.glob(pattern)), sorted(resumed.glob(pattern)), strict=True):
            assert file.read_bytes() == other.read_bytes(), (file.name, overrides)
