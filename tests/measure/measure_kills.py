"""Bits that kills change: `OMP_NUM_THREADS=1 python tests/measure/measure_kills.py [KILLS] [OBJECTIVES] [STAGES]
[PRECISIONS] [SEED]`.

For each objective, ZeRO stage and precision two ranks train a tiny model on generated images, once in one life and
again while SIGKILL hits random ranks at random moments, some of them before the first step of a life. A run that was
killed is compared with the first: all metrics of all steps but the times, and each tensor and count of the last
checkpoint: weights and the objective's state in them, such as a centre; moments; the mean of the weights, which is the
teacher. Ends with 1 if a bit differs.
OBJECTIVES, STAGES, PRECISIONS: names and numbers between commas. An objective that continues weights has a name such as
dino-lora.
"""

import random
import signal
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import psutil
import torch
from distillation import SETTINGS
from forked import Forge, ForkedRun
from polling import until
from ranks import settings
from tiny import NUM_CLASSES, make_dataset

from pipeline.architecture.objectives import OBJECTIVES
from pipeline.checkpoint.sharded_tensors import ShardedTensors
from pipeline.checkpoint.store import read_state
from pipeline.model import build, configure, save
from pipeline.monitor.metrics_file import METRICS_FILE, by_name, read_metrics

_STEPS = 60
_LEJEPA = ("objective.local_views=2", "objective.local_size=8", "objective.hidden=32", "objective.width=16")
_CONTINUED = (
    "init.weights={out}/weights.pt",
    *(f"model.{name}=null" for name in ("name", "width", "depth", "mlp_width", "num_heads")),
    "model.representation=true",
    "train.heads_first=20%",
)
_LORA = (*_CONTINUED, "train.freeze=backbone", "train.lora_rank=4")
_OBJECTIVES = {
    "mae": (
        "objective.decoder_width=16",
        "objective.decoder_depth=1",
        "objective.decoder_heads=2",
        "model.name=ViT-Ti/4",
    ),
    "dino": ("model.width=160", *SETTINGS),
    "lejepa": _LEJEPA,
    "simclr": ("objective.hidden=32", "objective.width=16"),
    "dino-lora": (*SETTINGS, *_LORA, "objective.gram_weight=1"),
    "dino-blocks": (*SETTINGS, *_CONTINUED, "train.freeze=all but 1 block"),
    "lejepa-lora": (*_LEJEPA, *_LORA),
    "distill": ("model.name=ViT-Ti/4", "objective.teacher={out}/teacher.pt"),
    "distill_classes": ("augment.mixup=0.5", "objective.teacher={out}/teacher.pt"),
    "pseudo_labels": (
        "augment.mixup=0.5",
        "objective.threshold=0.26",
        "objective.momentum=0.9",
        "data.limit=30",
        "data.mix=[{{path: {out}/dataFalse, weight: 5}}]",
    ),
}
_OF_ALL = (
    "train.micro_batch=12",
    f"train.length={_STEPS} steps",
    "checkpoint.every=2 steps",
    "evaluate.every=20 steps",
    "augment.crop=random_resized",
    "model.representation=false",
    "model.dropout=0.1",
    "optimizer.lr=0.001",
)
# Metrics that measure time, memory and the machine.
_MEASURED = ("time_", "checkpoint_", "images_per_second", "mfu", "data_wait", "peak_memory_gib")
_SECONDS = 4.0  # within which a rank is killed, after the start of a life or after its first step


def main(
    kills: str = "20",
    objectives: str = ",".join(_OBJECTIVES),
    stages: str = "0,1,2,3",
    precisions: str = "fp32,bf16",
    seed: str = "0",
) -> int:
    different = 0
    with tempfile.TemporaryDirectory() as folder, Forge(Path(folder)) as forge:
        data = {
            labelled: make_dataset(Path(folder) / f"data{labelled}", {"train": 150, "val": 37}, labelled=labelled)
            for labelled in (False, True)
        }
        teacher = build(configure("ViT-mu/8", 16, NUM_CLASSES, width=48))
        torch.nn.init.normal_(teacher.head.weight, generator=torch.Generator().manual_seed(0))  # A new head is zero.
        save(teacher, Path(folder) / "teacher.pt")
        save(
            build(configure("ViT-Ti/8", 16, NUM_CLASSES, depth=2, width=160, num_heads=2)), Path(folder) / "weights.pt"
        )
        for case in product(objectives.split(","), map(int, stages.split(",")), precisions.split(",")):
            if case[1:] == (0, "bf16"):  # The settings refuse it.
                continue
            different += measure(
                forge,
                data[OBJECTIVES[case[0].partition("-")[0]].labels != "unread"],
                Path(folder),
                *case,
                int(kills),
                random.Random(f"{seed} {case}"),
            )
    return int(different > 0)


def measure(
    forge: Forge, data: Path, out: Path, objective: str, stage: int, precision: str, kills: int, draw: random.Random
) -> int:
    """Print a line about one objective at one stage in one precision; returns the number of differences."""
    given = (
        *_OF_ALL,
        f"train.loss={objective.partition('-')[0]}",
        f"engine.zero_stage={stage}",
        *(text.format(out=out) for text in _OBJECTIVES[objective]),
        f"engine.precision={precision}",
    )
    whole, begin = out / f"{objective}-{stage}-{precision}", time.monotonic()
    forge.start(2, settings(data, out, whole.name, *given)).finish()
    done = in_start = runs = 0
    differences: list[str] = []
    while done < kills:
        runs += 1
        run = out / f"{whole.name}-{runs}"
        killed = True
        while killed:
            ranks = forge.start(2, settings(data, out, run.name, *given))
            killed = done < kills and kill(ranks, draw)
            if killed:
                done, in_start = done + 1, in_start + (not has_trained(ranks))
            else:
                ranks.finish()
        differences += [f"{run.name}: {found}" for found in compare(whole, run)]
    print(
        f"{objective} at stage {stage} in {precision}: {done} kills in {runs} runs, {in_start} of them before the first"
        f" step of a life, {time.monotonic() - begin:.0f} s; {len(differences)} differences",
        *differences[:9],
        sep="\n    ",
        flush=True,
    )
    return len(differences)


def kill(ranks: ForkedRun, draw: random.Random) -> bool:
    """SIGKILL rank 0, 1 or both at a random moment; returns whether the run had not ended. What is left ends, or is
    killed after 2 s.
    """
    if draw.random() < 0.75:
        until(lambda: has_trained(ranks) or not all(map(is_alive, ranks.pids)))
    time.sleep(_SECONDS * draw.random())
    victims = draw.choice([(0,), (1,), (0, 1)])
    if not all(is_alive(ranks.pids[rank]) for rank in victims):
        return False
    for rank in victims:
        ranks.send(rank, signal.SIGKILL)
    codes = ranks.wait(2)
    assert -signal.SIGKILL in codes or not any(codes), codes
    return any(codes)  # Else it was just ending.


def has_trained(ranks: ForkedRun) -> bool:
    return f"/{_STEPS}" in ranks.said()


def is_alive(pid: int) -> bool:
    return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # The forge reaps them later.


def compare(whole: Path, run: Path) -> list[str]:
    """What differs between two finished runs, a line each."""
    logged = [by_name(read_metrics(folder / METRICS_FILE)[0]) for folder in (whole, run)]
    expected, found = ({name: steps for name, steps in of.items() if not name.startswith(_MEASURED)} for of in logged)
    assert {"loss", "grad_norm"} < expected.keys()
    lines = [f"metric {name}" for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
    last = [folder / "checkpoints" / f"step-{_STEPS:08d}" for folder in (whole, run)]
    (state, other_state), (one, other) = map(read_state, last), map(ShardedTensors.open, last)
    lines += [name for name in ("losses", "engine", "counts") if getattr(state, name) != getattr(other_state, name)]
    assert one.states == other.states
    for name in one.states:
        tensors, others = one.full_tensors(name), other.full_tensors(name)
        assert tensors.keys() == others.keys()
        lines += [f"{name} of {key}" for key, tensor in tensors.items() if tensor.tobytes() != others[key].tobytes()]
    return lines


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
