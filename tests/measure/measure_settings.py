"""Bits that a restart changes with any settings: `OMP_NUM_THREADS=1 python tests/measure/measure_settings.py [RUNS]
[SEED]`.

Draws settings at random: objective, model, augmentation, optimizer, engine and more together, as no other test combines
them. Settings that do not fit must be refused in one line, with exit code 2 and before there is a run folder. All
others train a tiny model for six steps on one or two ranks, again from a checkpoint of one of these steps, as a kill
leaves it, and from there on the other number of ranks. The second run is compared with the first, bit for bit, as in
`measure_kills.py`; the third must end. A line for each; ends with 1 if one was wrong.
"""

import random
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from forked import Forge
from measure_kills import compare
from ranks import STEPS, settings
from tiny import make_dataset

from pipeline.base.words import counted

_LOSSES = ("softmax", "softmax", "sigmoid", "mae", "dino", "dino", "lejepa", "masked_mean_color", "masked_pixels")
_OF_LOSS = {
    "mae": ("objective.decoder_width=16", "objective.decoder_depth=1", "objective.decoder_heads=2"),
    "dino": ("objective.local_size=8", "objective.hidden=16", "objective.prototypes=8", "objective.bottleneck=8"),
    "lejepa": ("objective.local_size=8", "objective.hidden=16", "objective.width=16"),
}
# Probability that one of them is set, and the choices.
_MAYBE: tuple[tuple[float, tuple[str, ...]], ...] = (
    (
        0.15,
        ("model.positions=sincos2d", "model.positions=none", "model.positions=relative", "model.positions=learned2d"),
    ),
    (0.1, ("model.positions_at=blocks", "model.positions_at=shared")),
    (0.2, ("model.pool=gap", "model.pool=map", "model.pool=mean", "model.pool=both")),
    (0.3, ("model.dropout=0.1",)),
    (0.3, ("model.drop_path=0.3",)),
    (0.15, ("model.registers=2",)),
    (0.2, ("model.layer_scale=0.5",)),
    (0.2, ("model.swiglu=true",)),
    (0.2, ("model.rope_base=100 model.rope_shift=0.1 model.rope_rescale=2", "model.rope_base=100")),
    (0.1, ("model.qkv_bias=qv", "model.qkv_bias=none")),
    (0.1, ("model.qk_norm=true",)),
    (0.1, ("model.embedding_norm=true",)),
    (0.1, ("model.gelu=erf",)),
    (0.1, ("model.small_stem=[16,32] model.name=ViT-Ti/2",)),
    (0.1, ("model.name=R+Ti/16", "model.name=Axial-ViT-Ti/8")),
    (0.2, ("data.limit=70%", "data.limit=101")),
    (0.15, ("data.balance=0.5", "data.balance=0")),
    (0.15, ("data.dev_share=0.1",)),
    (0.15, ("data.processes=2",)),
    (0.2, ("data.prefetch=1",)),
    (0.2, ("MIX", "LATER")),
    (0.25, ("augment.mixup=0.5", "augment.cutmix=1", "augment.erase=0.5")),
    (0.1, ("augment.randaugment_layers=2",)),
    (0.1, ("augment.crop=random_resized",)),
    (0.25, ("train.micro_batch=12", "train.micro_batch=24", "train.micro_batch=3")),
    (
        0.3,
        (
            "WEIGHTS",
            "WEIGHTS train.freeze=1_block",
            "WEIGHTS train.freeze=backbone",
            "WEIGHTS train.freeze=backbone train.lora_rank=4",
        ),
    ),
    (0.4, ("optimizer.name=sgd", "optimizer.name=muon", "optimizer.name=muon")),
    (0.2, ("optimizer.weight_decay_end=0.5",)),
    (0.25, ("optimizer.layer_decay=0.6",)),
    (0.3, ("optimizer.ema_decay=0.8",)),
    (0.15, ("optimizer.clip=0",)),
    (0.3, ("engine.activation_checkpointing=true",)),
    (0.15, ("engine.offload=true",)),
    (0.15, ("engine.fused=true",)),
    (0.3, ("schedule.decay=constant", "schedule.decay=linear")),
    (0.15, ("health.on_spike=rollback",)),
    (0.2, ("probe.every=3_steps",)),
    (0.2, ("evaluate.every=2_steps", "evaluate.every=100%")),
    (0.3, ("objective.local_views=0", "objective.local_views=3")),
    (0.2, ("objective.centring=sinkhorn",)),
    (
        0.3,
        (
            "objective.ibot_weight=1 objective.ibot_head=separate",
            "objective.ibot_weight=1",
            "objective.koleo_weight=0.1",
        ),
    ),
)


def draw_settings(draw: random.Random, sources: dict[str, list[str]]) -> list[str]:
    """Settings of a run beside those of `ranks.settings`. Many of them do not fit together. sources: what words in
    capitals stand for.
    """
    loss, stage = draw.choice(_LOSSES), draw.choice([0, 1, 1, 2, 3])
    precision = draw.choice(["fp32", "fp32", "bf16", "fp16"]) if stage else "fp32"
    found = [
        f"train.loss={loss}",
        f"seed={draw.randrange(1000)}",
        f"engine.zero_stage={stage}",
        f"engine.precision={precision}",
    ]
    found += [*_OF_LOSS.get(loss, ()), f"model.representation={str(loss in ('softmax', 'sigmoid')).lower()}"]
    for probability, choices in _MAYBE:
        chosen = draw.choice(choices)
        # Nothing is drawn of another objective's settings.
        foreign = "objective." in chosen and (loss != "dino" and (loss != "lejepa" or "local_views" not in chosen))
        if draw.random() >= probability or foreign:
            continue
        if "WEIGHTS" in chosen:  # They determine the model.
            found = [setting for setting in found if not setting.startswith("model.")]
        for setting in chosen.split():
            found += sources.get(setting, [setting.replace("_steps", " steps").replace("1_block", "1 block")])
    return [*found, "train.micro_batch=24"] if loss == "lejepa" else found


def main(runs: str = "100", seed: str = "0") -> int:
    draw, wrong, fitting = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as folder, Forge(Path(folder)) as forge:
        out = Path(folder)
        data = make_dataset(out / "data", {"train": 150, "val": 37})
        other = make_dataset(out / "other", {"train": 80, "val": 20})
        forge.start(1, settings(data, out, "base")).finish()
        sources = {
            "MIX": [f"data.mix=[{{path: {other}, weight: 0.5}}]"],
            "LATER": [f"data.mix=[{{path: {other}, weight: 1, from_step: 3}}]"],
            "WEIGHTS": [
                f"init.weights={out / 'base'}",
                *(f"model.{n}=null" for n in ("name", "width", "depth", "mlp_width", "num_heads")),
            ],
        }
        for number in range(int(runs)):
            more, ranks, step = draw_settings(draw, sources), draw.choice([1, 2, 2]), draw.randrange(1, STEPS)
            lines, said = measure(forge, data, out / f"run{number}", more, ranks, step)
            fitting += not said
            on = counted(ranks, "rank")
            said = said or f"{on}, again from step {step}: {counted(len(lines), 'difference')}"
            print(f"{number}: {said}", flush=True)
            if lines:
                wrong += 1
                print(*(more, *lines[:9]), sep="\n    ", flush=True)
    print(f"{fitting} of {runs} runs had settings that fit; {wrong} were wrong")
    return int(wrong > 0)


def measure(forge: Forge, data: Path, run: Path, more: list[str], ranks: int, step: int) -> tuple[list[str], str]:
    """(what is wrong, how the settings were refused) of a run."""

    def start(of: Path, on: int) -> tuple[list[int], str]:
        given = settings(
            data, run.parent, of.name, "checkpoint.every=1 steps", "checkpoint.keep=9", "data.max_bad_share=1", *more
        )
        started = forge.start(on, given)
        return started.wait(), started.said()

    codes, said = start(run, ranks)
    if any(codes):
        refused = set(codes) == {2} and "Traceback" not in said and not run.exists()
        last = said.strip().splitlines()[-1] if said.strip() else ""
        return [] if refused else [f"exit codes {codes}, a run folder: {run.exists()}", said[-2000:]], last
    again, elsewhere = run.with_name(f"{run.name}-again"), run.with_name(f"{run.name}-elsewhere")
    for copy in (again, elsewhere):
        shutil.copytree(run, copy)
        for later in range(step + 1, STEPS + 1):
            shutil.rmtree(copy / "checkpoints" / f"step-{later:08d}")
    codes, said = start(again, ranks)
    wrong = [f"again: exit codes {codes}", said[-2000:]] if any(codes) else compare(run, again, STEPS)
    codes, said = start(elsewhere, 3 - ranks)
    if any(codes) and "train.loss = lejepa compares all samples" not in said:
        wrong += [f"on {3 - ranks} ranks: exit codes {codes}", said[-2000:]]
    for folder in (run, again, elsewhere):
        shutil.rmtree(folder)
    return wrong, ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
