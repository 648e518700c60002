"""A cell trains like a plain PyTorch loop, deterministically, and is scored as the protocol says."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import NUM_CLASSES, make_dataset, train_view
from tiny_vtab import job_of

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.loading.decode import decode
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.order import SampleOrder
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import remembering_train_view
from pipeline.evaluate.probes import fewshot
from pipeline.experiment.vtab import settings_of
from pipeline.experiment.vtab_cell import VtabCell, finetune, reader, run_cell, train_model, view_of
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig

CPU = torch.device("cpu")
SIDE = 16
TASK = TASKS[2]
SPLITS = {"train800": 32, "val200": 16, "train800val200": 48, "test": 40}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The data set tasks/dtd, with weights.pt beside tasks/; tests must not change them."""
    folder = tmp_path_factory.mktemp("cell")
    models.save(models.create("ViT-mu/4", SIDE, 7, seed=3), folder / "weights.pt")
    return open_dataset(make_dataset(folder / "tasks" / TASK.name, SPLITS, per_shard=20))


def config(data: Dataset, *overrides: str) -> VtabConfig:
    folder = Path(str(data.path)).parents[1]
    given = [
        f"weights={folder / 'weights.pt'}",
        f"data={folder / 'tasks'}",
        "protocol.name=test",
        f"protocol.image_size={SIDE}",
        "protocol.batch=20",
        "protocol.length=[5 steps]",
        "protocol.lr=[0.3]",
        "protocol.schedule.decay=cosine",
        "protocol.schedule.warmup=2 steps",
        "protocol.augment.crop=none",
        "protocol.augment.flip=false",
        "protocol.augment.eval_crop=resize",
        "protocol.clip=1",
        "micro_batch=8",
        "threads=1",
        *overrides,
    ]
    return schema.load(VtabConfig, None, given)


def cell_of(data: Dataset, config: VtabConfig, stage: str = "final", seed: int = 0) -> VtabCell:
    return VtabCell(TASK, stage, settings_of(config.protocol)[0], seed, data.fingerprint)  # type: ignore[arg-type]


def trained(data: Dataset, settings: VtabConfig, seed: int = 0, dropout: float = 0.0) -> dict[str, torch.Tensor]:
    model = models.load(settings.weights, image_size=SIDE, num_classes=NUM_CLASSES, new_head=True, dropout=dropout)
    train_model(model, data.split("train800", "none"), cell_of(data, settings, seed=seed), settings, CPU)
    return model.state_dict()


@pytest.mark.parametrize(("optimizer", "weight_decay"), [("sgd", 0.0), ("adam", 0.3)])
def test_a_cell_trains_as_a_plain_loop(data: Dataset, optimizer: str, weight_decay: float) -> None:
    """The reference uses whole batches instead of micro-batches, and learning rates computed by hand."""
    rate = {"sgd": 0.3, "adam": 0.01}[optimizer]
    settings = config(
        data, f"protocol.optimizer={optimizer}", f"protocol.lr=[{rate}]", f"protocol.weight_decay=[{weight_decay}]"
    )
    split = data.split("train800", "none")
    read = ShardReader(split)
    pixels = np.stack([decode(read.read(row)) for row in range(len(split))]).transpose(0, 3, 1, 2)
    images, labels = torch.from_numpy(pixels / 127.5 - 1).float(), torch.from_numpy(split.label_values.astype(np.int64))
    model = models.load(settings.weights, image_size=SIDE, num_classes=NUM_CLASSES, new_head=True)
    assert not model.head.weight.any()
    kernels = [p for name, p in model.named_parameters() if p.ndim > 1 and name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or not name.endswith("weight")]
    groups = [{"params": kernels, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    plain = torch.optim.SGD(groups, momentum=0.9) if optimizer == "sgd" else torch.optim.AdamW(groups)
    order = SampleOrder(split.shard_sizes, 0, 20, 1, len(split))
    rates = [0.0, rate / 2, rate, rate * (1 + np.cos(np.pi / 3)) / 2, rate * (1 + np.cos(2 * np.pi / 3)) / 2]
    for step, lr in enumerate(rates):
        rows = order.slice(step)[0]
        for group in plain.param_groups:
            group["lr"] = float(lr)
        plain.zero_grad()
        torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step()
    found = trained(data, settings)
    for name, tensor in model.state_dict().items():
        if optimizer == "adam" and name.endswith("qkv.bias"):
            continue  # A key's bias has no gradient but rounding errors, and Adam makes them large.
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    assert found["head.weight"].any()


def test_dropout_acts_in_training(data: Dataset) -> None:
    """Loaded weights are in evaluation mode, where it does nothing."""
    with_it, without = (trained(data, config(data, "protocol.lr=[0.3]"), dropout=rate) for rate in (0.5, 0.0))
    assert not torch.equal(with_it["head.weight"], without["head.weight"])


def test_the_same_cell_gives_the_same_bits_and_another_seed_others(data: Dataset) -> None:
    settings = config(data, "protocol.augment.crop=inception", "protocol.augment.flip=true", "protocol.dropout=0.2")
    first, again, other = (trained(data, settings, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    outcomes = [run_cell(job_of(cell_of(data, settings, seed=7), settings)) for _ in range(2)]
    assert [{**outcome, "seconds": 0} for outcome in outcomes] == [{**outcomes[0], "seconds": 0}] * 2
    assert (outcomes[0]["steps"], outcomes[0]["num_images"], outcomes[0]["device"]) == (5, SPLITS["test"], "cpu")


@pytest.mark.parametrize("resize_filter", ["linear", "antialias", "bilinear"])
@pytest.mark.parametrize("crop", ["none", "resize_crop", "resize_small_crop", "inception"])
def test_images_that_are_kept_make_the_same_views(data: Dataset, crop: str, resize_filter: str) -> None:
    augment = config(
        data,
        f"protocol.augment.crop={crop}",
        f"protocol.augment.resize_filter={resize_filter}",
        "protocol.augment.flip=true",
        "protocol.augment.color_jitter=0.3",
    ).protocol.augment
    split, kept = data.split("train800", "none"), {}
    rows = np.arange(len(split))
    requests = [(rows, np.full(len(rows), epoch)) for epoch in range(3)]
    for side in (12, 20):
        kept = {}
        views = (train_view(augment, 5, side), remembering_train_view(augment, 5, side, kept))
        batches = []
        for view in views:
            with Loader(split, view, threads=2, prefetch=1, max_bad_share=0.0) as loader:
                batches.append([batch.images.clone() for batch in loader.batches(requests)])
        assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))
        assert sorted(kept) == rows.tolist()
        assert not torch.equal(batches[0][0], batches[0][1]) or crop == "none"


def test_mirror_and_crop_stay_away_where_they_would_change_the_question(data: Dataset) -> None:
    protocol = config(
        data,
        "protocol.image_size=384",
        "protocol.small_image_size=128",
        "protocol.small_resize_to=160",
        "protocol.augment.crop=resize_crop",
        "protocol.augment.flip=true",
    ).protocol
    views = {task.name: view_of(protocol, task) for task in TASKS}
    # BiT paper, appendix F.
    assert {name for name, (_, view) in views.items() if not view.flip} == {
        "dsprites_location",
        "dsprites_orientation",
        "smallnorb_azimuth",
    }
    assert {name for name, (_, view) in views.items() if view.crop == "none"} == {
        "clevr_count",
        "clevr_distance",
        "dmlab",
        "kitti_distance",
        "dsprites_location",
    }
    assert {name for name, (size, _) in views.items() if size == 128} == {
        "cifar100",
        "svhn",
        "eurosat",
        "dsprites_location",
        "dsprites_orientation",
    }
    assert views["cifar100"][1].resize_to == 160
    assert views["dtd"] == (384, protocol.augment)
    # The same part of a test image at both sizes: 384 of 438 pixels, 128 of 146.
    cropped = replace(protocol, augment=replace(protocol.augment, eval_crop="center", eval_resize=438))
    found = [view_of(cropped, task)[1].eval_resize for task in TASKS if task.name in ("cifar100", "dtd")]
    assert found == [146, 438]
    still = view_of(replace(protocol, augment=replace(protocol.augment, flip=False, crop="none")), TASK)[1]
    assert (still.flip, still.crop) == (False, "none")


def test_pixels_are_normalised_as_the_protocol_says(data: Dataset) -> None:
    images = torch.tensor([[[[0, 128, 255]]]], dtype=torch.uint8)
    model = models.create("ViT-mu/4", 16, 0)
    assert reader(config(data).protocol, model, CPU)(images).flatten().tolist() == pytest.approx(
        [-1, 128 / 127.5 - 1, 1], abs=1e-6
    )
    found = reader(config(data, "protocol.pixels=imagenet").protocol, model, CPU)(images).flatten().tolist()
    assert found == pytest.approx([-0.485 / 0.229, (128 / 255 - 0.456) / 0.224, (1 - 0.406) / 0.225], abs=1e-5)


@pytest.mark.slow
def test_a_search_learns_from_800_and_is_scored_on_200(data: Dataset) -> None:
    settings = config(data, "protocol.length=[50 epochs]", "protocol.lr=[0.1]", "protocol.batch=16", "micro_batch=16")
    search, final = (run_cell(job_of(cell_of(data, settings, stage), settings)) for stage in ("search", "final"))
    assert (search["num_images"], search["steps"]) == (SPLITS["val200"], 100)
    assert (final["num_images"], final["steps"]) == (SPLITS["test"], 150)
    assert min(search["accuracy"], final["accuracy"]) > 0.9  # Four colours.


@pytest.mark.parametrize(
    ("more", "step"),
    # In the second, the training's own losses are finite: the first step has a rate of 0, the second is the last.
    [([], 5), (["protocol.length=[2 steps]", "protocol.schedule.warmup=1 steps"], 2)],
)
def test_a_setting_that_diverges_is_not_chosen_and_no_score(data: Dataset, more: list[str], step: int) -> None:
    settings = config(data, "protocol.lr=[1e30]", "protocol.weight_decay=[1e20]", "protocol.clip=0", *more)
    outcome = run_cell(job_of(cell_of(data, settings, "search"), settings))
    assert (outcome["accuracy"], outcome["diverged"]) == (0.0, step)
    assert "loss" not in outcome, "results are JSON, which has no NaN"
    with pytest.raises(UserError, match=rf"dtd diverged by step {step} with lr 1e\+30"):
        run_cell(job_of(cell_of(data, settings), settings))


def test_a_probe_chooses_on_200_and_learns_from_all(data: Dataset) -> None:
    settings = config(data, "method=linear", "protocol.l2=[1e9, 64]")
    outcome = run_cell(job_of(VtabCell(TASK, "probe", None, 0, data.fingerprint), settings))
    model = models.load(settings.weights, num_classes=0).eval()
    values, labels = {}, {}
    for name in SPLITS:
        split = data.split(name, "none")
        read = ShardReader(split)
        pixels = np.stack([decode(read.read(row)) for row in range(len(split))]).transpose(0, 3, 1, 2)
        with torch.no_grad():
            values[name] = model.features(torch.from_numpy(pixels / 127.5 - 1).float()).double().numpy()
        labels[name] = split.label_values

    def accuracy(l2: float, *train: str, tested: str) -> float:
        x, y = (np.concatenate([part[name] for name in train]) for part in (values, labels))
        found = fewshot.fit(x, y, NUM_CLASSES)(values[tested], l2).argmax(1)
        return float((found == labels[tested]).mean())

    on_val = {l2: accuracy(l2, "train800", tested="val200") for l2 in settings.protocol.l2}
    best = max(sorted(on_val), key=lambda l2: on_val[l2])
    assert (outcome["l2"], outcome["val_accuracy"]) == (best, pytest.approx(on_val[best]))
    expected = accuracy(best, "train800", "val200", tested="test")
    assert (outcome["accuracy"], outcome["steps"]) == (pytest.approx(expected), None)


def test_data_or_weights_that_changed_and_images_that_cannot_be_read_are_refused(data: Dataset, tmp_path: Path) -> None:
    settings = config(data)
    with pytest.raises(UserError, match=r"dtd has changed: it was 0{16}, and is "):
        run_cell(job_of(replace(cell_of(data, settings), fingerprint="0" * 16), settings))
    # Weights that are written anew while a sweep runs, or that are others on this host: their scores were taken for
    # those of the first.
    shutil.copy(settings.weights, tmp_path / "copied.pt")
    settings = replace(settings, weights=str(tmp_path / "copied.pt"))
    job = job_of(cell_of(data, settings, "search"), settings)
    run_cell(job)
    models.save(models.create("ViT-mu/4", SIDE, 7, seed=4), tmp_path / "copied.pt")
    with pytest.raises(UserError, match=r"copied\.pt has changed, or is another file on this host: its SHA-256 was "):
        run_cell(job)
    broken = open_dataset(make_dataset(tmp_path / TASK.name, SPLITS))
    split = broken.split("test", "none")
    with open(split.shard_paths[0], "r+b") as file:
        file.seek(split.place_of(3)[0])
        file.write(b"no image")
    with pytest.raises(UserError, match=r"1 sample of 40 cannot be read; the first is test00003: .*vtab_prepare"):
        finetune(cell_of(broken, settings), replace(settings, data=str(tmp_path)), broken, CPU)
