"""Images of 1, 4 and 6 channels of any type, trained on, resumed and scored: in each objective, and from weights of
8-bit RGB.
"""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import Forge
from ranks import STEPS, metrics, settings
from tiny import make_dataset

from pipeline import model as models
from pipeline.architecture.pixels import RGB8, Pixels
from pipeline.data.dataset.manifest import open_dataset
from pipeline.data.loading.shard_reader import ShardReader

pytestmark = pytest.mark.ranks

ALL = {
    "ct": Pixels(("ct",), "int16", (-1000.0,), (1500.0,), (0.4,), (0.3,), nodata=-2000.0),
    "grey": Pixels(("grey",), "uint8", (0.0,), (255.0,), (0.45,), (0.25,)),
    "bands": Pixels(
        ("red", "green", "blue", "nir"),
        "uint16",
        (100.0, 90.0, 80.0, 0.0),
        (9000.0, 9100.0, 9200.0, 20000.0),
        (0.4, 0.4, 0.4, 0.3),
        (0.2, 0.2, 0.2, 0.25),
    ),
    "maps": Pixels(tuple("abcdef"), "float32", (-0.5,) * 6, (1.5,) * 6, (0.5,) * 6, (0.3,) * 6),
    "rgb": RGB8,
}
ANY = (
    "augment.flip_vertical=true",
    "augment.turns=true",
    "augment.noise=0.1",
    "augment.channel_brightness=0.3",
    "augment.channel_contrast=0.3",
    "augment.erase=0.5",
    "augment.blur=0.5",
)
PLAIN = ("augment.eval_crop=resize", "schedule.decay=constant")
SHORT = ("train.length=2 steps", "schedule.warmup=0 steps")
SMALL_DECODER = ("objective.decoder_width=32", "objective.decoder_depth=1", "objective.decoder_heads=2")
UNSET = [f"model.{name}=null" for name in ("name", "width", "depth", "mlp_width", "num_heads")]
OBJECTIVES = {
    "mae": (
        "train.loss=mae",
        "model.name=ViT-Ti/4",
        *SMALL_DECODER,
        "probe.every=2 steps",
        "probe.neighbours=3",
        "probe.shots=0",
    ),
    "lejepa": ("train.loss=lejepa", "objective.local_views=0", "train.micro_batch=24"),
    "dino": ("train.loss=dino", "objective.local_views=0", "objective.solarise=[0,0,0]"),
    "masked_pixels": ("train.loss=masked_pixels", "model.name=ViT-Ti/4", "model.representation=false"),
}


@pytest.fixture(scope="module")
def runs(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a data set and a whole and a resumed run of each of `ALL`, and for "bands" a run of each
    objective.
    """
    out = tmp_path_factory.mktemp("channels")
    starts = []
    for name, pixels in ALL.items():
        data = make_dataset(out / "data" / name, {"train": 96, "val": 30}, pixels=pixels)
        for run, lives in (("whole", [STEPS]), ("cut", [3, STEPS])):
            of_run = settings(data, out, f"{name}-{run}", *PLAIN, *ANY)
            starts += [[*of_run, f"train.length={steps} steps"] for steps in lives]
    bands = out / "data" / "bands"
    starts += [settings(bands, out, f"bands-{name}", *more, *SHORT) for name, more in OBJECTIVES.items()]
    taught = ("train.loss=distill", f"objective.teacher={out / 'rgb-whole'}")
    starts.append(settings(bands, out, "bands-distill", *taught, *SHORT))
    starts.append(settings(bands, out, "bands-tuned", f"init.weights={out / 'rgb-whole'}", *UNSET, *SHORT))
    forge.start(1, *starts).finish()
    return out


@pytest.mark.parametrize("name", list(ALL))
def test_a_run_resumes_bit_for_bit(runs: Path, name: str) -> None:
    whole, cut = runs / f"{name}-whole", runs / f"{name}-cut"
    assert len(metrics(whole)) == STEPS
    assert metrics(whole) == metrics(cut)
    a, b = models.read_weights(whole), models.read_weights(cut)
    assert all(torch.equal(a.state[key], b.state[key]) for key in a.state)
    assert a.config.pixels == ALL[name]
    saved = json.loads((whole / "run.json").read_text())["facts"]["model"]
    assert ("pixels" in saved) == (name != "rgb")


@pytest.mark.parametrize("name", list(ALL)[:-1])
def test_held_out_images_are_scored_as_numpy_reads_them(runs: Path, name: str) -> None:
    pixels, split = ALL[name], open_dataset(runs / "data" / name).split("val")
    model = models.load(runs / f"{name}-whole").eval()
    low, high, mean, std = map(np.array, (pixels.low, pixels.high, pixels.mean, pixels.std))
    losses, right = [], []
    for row in range(len(split)):
        array = np.load(io.BytesIO(ShardReader(split).read(row))).astype(np.float64)
        read = (((array - low) / (high - low)).clip(0, 1) - mean) / std
        with torch.no_grad():
            logits = model(torch.from_numpy(read.transpose(2, 0, 1)[None]).float())
        label = int(split.labels_of(row)[0])
        losses.append(float(torch.nn.functional.cross_entropy(logits, torch.tensor([label]))))
        right.append(int(logits.argmax()) == label)
    assert metrics(runs / f"{name}-whole", "val_loss")[STEPS] == pytest.approx(np.mean(losses), rel=1e-4)
    assert metrics(runs / f"{name}-whole", "val_top1")[STEPS] == pytest.approx(np.mean(right))


@pytest.mark.parametrize("name", [*OBJECTIVES, "distill", "tuned"])
def test_every_objective_learns_from_four_channels(runs: Path, name: str) -> None:
    losses = metrics(runs / f"bands-{name}")
    assert len(losses) == 2
    assert np.isfinite(list(losses.values())).all()
    weights = models.read_weights(runs / f"bands-{name}")
    assert weights.config.pixels == ALL["bands"]
    assert weights.state["patch_embedding.weight"].shape[1] == 4
    if name == "mae":
        assert weights.added["decoder_pred.weight"].shape[0] == 4 * 4 * 4
        assert metrics(runs / "bands-mae", "val_3nn")


REFUSED = {
    "colours": ("data/bands", ["augment.color_jitter=0.4"], r"augment\.color_jitter.*nir"),
    "solarised": ("data/bands", ["train.loss=dino", "objective.local_views=0"], r"objective\.solarise.*nir"),
    "mean_color": (
        "data/bands",
        ["train.loss=masked_mean_color", "model.name=ViT-Ti/4", "model.representation=false"],
        "nir",
    ),
    "imagenet": (
        "data/bands",
        ["train.loss=mae", "model.name=ViT-Ti/4", *SMALL_DECODER, "objective.pixels=imagenet"],
        r"objective\.pixels.*nir",
    ),
    "other weights": ("data/ct", ["init.weights=RUNS/bands-whole", *UNSET], r"nir.*\(ct\)"),
    "probe": ("data/bands", ["probe.every=3 steps", "probe.data=RUNS/data/ct"], r"nir.*\(ct\)"),
    "teacher": ("data/ct", ["train.loss=distill", "objective.teacher=RUNS/bands-whole"], r"\(ct\).*nir"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_does_not_fit_the_channels_is_refused_by_name(forge: Forge, runs: Path, name: str, tmp_path: Path) -> None:
    data, more, said = REFUSED[name]
    overrides = [given.replace("RUNS", str(runs)) for given in more]
    start = forge.start(1, settings(runs / data, tmp_path, "refused", *overrides))
    assert start.wait() == [2]
    assert len([line for line in start.said().splitlines() if line.startswith("error")]) == 1
    assert re.search(said, start.said())
