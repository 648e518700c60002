"""What all bits and bands are worth: the same small model on images as they are, and on 8-bit and RGB copies of them.

    python tests/measure/measure_bits.py land example_data runs/bits
    python tests/measure/measure_bits.py scenes worldview runs/bits

The first reads that folder of the repository sentinel-hub/eo-learn, the second tiles ms1_00.tif, ... of three scenes,
four bands. Tiles of one block of a scene are a group, and share no pixel with others. Seed s scores the groups of which
the number is s modulo 3, and trains on the others. Prints top-1 after training with labels, and the accuracy of 20
nearest neighbours after MAE, with 95 % intervals over three seeds.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data_tools.sharding import shard
from pipeline.settings.commands.data import ShardConfig

_T95 = 4.303  # Student's t of two degrees of freedom
_Tile = tuple[str, int, np.ndarray]
_RUN = """model.name=ViT-Ti/3 model.image_size=12 model.width=96 model.depth=4 model.mlp_width=192 model.num_heads=3
    model.pool=gap model.representation=false augment.crop=resize_crop augment.flip_vertical=true augment.turns=true
    augment.eval_crop=resize data.threads=1 data.streams=4 train.global_batch=64 train.micro_batch=64
    optimizer.name=adam optimizer.lr=1e-3 optimizer.weight_decay=0.05 optimizer.clip=1 schedule.decay=cosine
    schedule.warmup=10% engine.precision=fp32 evaluate.every=100% checkpoint.every=100% track.enabled=false
    track.figures=false"""
_OBJECTIVES = {
    "val_top1": "train.loss=softmax",
    "val_20nn": (
        """train.loss=mae model.positions=sincos2d_mae objective.decoder_width=64 objective.decoder_depth=1
    objective.decoder_heads=4 probe.every=100% probe.neighbours=20 probe.shots=0"""
    ),
}


def land(folder: Path) -> Iterator[_Tile]:
    """Sentinel-2's 13 bands of one place on five days; the class is the land cover in the centre of a tile of 12 px."""
    scenes = np.load(folder / "REFERENCE_SCENES.npy")[..., [3, 2, 1, 0, *range(4, 13)]]  # red, green and blue first
    cover = np.load(folder / "TestEOPatch" / "mask_timeless" / "LULC.npy")[..., 0]
    digital = np.rint(scenes * 10_000).astype(np.uint16)
    for row, column in (place for place in np.ndindex(100, 100) if place[0] % 20 < 9 and place[1] % 20 < 9):
        name = {2: "forest", 3: "grass", 4: "shrub"}.get(int(cover[row + 6, column + 6]))
        if name and (name != "forest" or (row + column) % 4 == 0):  # most of it is forest
            group = row // 20 * 5 + column // 20
            yield from ((name, group, scene[row : row + 12, column : column + 12]) for scene in digital)


def scenes(folder: Path) -> Iterator[_Tile]:
    """WorldView's four bands; the class is the scene that a tile of 12 px is from."""
    for number, path in enumerate(sorted(folder.glob("ms*_*.tif"))):
        image = tifffile.imread(path)[..., [2, 1, 0, 3]]
        for row, column in np.ndindex(5, 5):
            tile = image[row * 12 : row * 12 + 12, column * 12 : column * 12 + 12]
            if tile.any(axis=2).all():  # not beyond the edge of the scene
                yield path.stem.partition("_")[0], number, tile


def write_arms(tiles: Sequence[_Tile], seed: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """Shard the tiles as they are and as copies; yields the name and the data set of each."""
    training = np.concatenate([tile.reshape(-1, tile.shape[-1]) for _, group, tile in tiles if group % 3 != seed])
    low, high = np.percentile(training, [0.1, 99.9], axis=0)

    def stretched(tile: np.ndarray) -> np.ndarray:
        return np.rint(np.clip((tile - low) / (high - low), 0, 1) * 255).astype(np.uint8)

    arms: dict[str, tuple[Callable[[np.ndarray], np.ndarray], dict[str, Any]]] = {
        "all bands, 16 bits": (lambda tile: tile, {}),
        "all bands, 8 bits by percentiles": (stretched, {}),
        "RGB, 8 bits by percentiles": (lambda tile: stretched(tile)[..., :3], {"values": ["full"]}),
        "RGB, to_rgb8": (lambda tile: tile, {"to_rgb8": True}),
        "RGB, to_rgb8 and percentiles": (lambda tile: tile, {"to_rgb8": True, "values": ["percentiles"]}),
    }
    for name, (convert, settings) in arms.items():
        arm = folder / name.replace(",", "").replace(" ", "_")
        for number, (label, group, tile) in enumerate(tiles):
            path = arm / "raw" / ("val" if group % 3 == seed else "train") / label / f"{group}_{number}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            image = convert(tile)
            photometric = "rgb" if image.shape[-1] == 3 else "minisblack"
            tifffile.imwrite(path, image, photometric=photometric, planarconfig="contig")
        splits = {"train": "train", "val": "val"}
        raw, out = f"{arm}/raw", f"{arm}/set"
        shard.run(ShardConfig(source=raw, out=out, splits=splits, group_pattern="([0-9]+)_", **settings))
        yield name, Path(out)


def train(data: Path, metric: str, seed: int, steps: str) -> float:
    """Train, and return the score in %."""
    run = data.parent / metric
    own = [f"name={run.name}", f"out={run.parent}", f"data.path={data}", f"seed={seed}", f"train.length={steps} steps"]
    settings = [*own, *_RUN.split(), *_OBJECTIVES[metric].split()]
    subprocess.run([sys.executable, "launch/pretrain.py", *settings], check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return 100 * [line["metrics"][metric] for line in lines if metric in line["metrics"]][-1]


def main(kind: str, source: str, out: str, steps: str = "300") -> None:
    tiles = list({"land": land, "scenes": scenes}[kind](Path(source)))
    scores: dict[str, dict[str, list[float]]] = {metric: {} for metric in _OBJECTIVES}
    for seed in range(3):
        for arm, data in write_arms(tiles, seed, Path(out).resolve() / kind / str(seed)):
            for metric, found in scores.items():
                found.setdefault(arm, []).append(train(data, metric, seed, steps))
                print(seed, arm, metric, f"{found[arm][-1]:.1f}", flush=True)
    for metric, found in scores.items():
        for arm, values in found.items():
            gains = np.subtract(values, found["all bands, 16 bits"])
            said = (f"{np.mean(x):.1f} ± {_T95 * np.std(x, ddof=1) / 3**0.5:.1f}" for x in (values, gains))
            print(f"{metric} | {arm} | " + " | ".join(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
