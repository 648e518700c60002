"""What goes wrong around a run: broken images, full disks, files that do not fit. Nothing is lost, and one line says it."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ranks import finish, metrics, settings, start

from pipeline import model as models
from pipeline import schema, train
from pipeline.config import RunConfig
from pipeline.data.manifest import open_dataset
from pipeline.errors import UserError


def load(overrides: list[str]) -> RunConfig:
    return schema.load(RunConfig, None, overrides)


def spoil(dataset: Path, rows: list[int]) -> None:
    """Overwrite the image bytes of training samples, as a bad disk would."""
    split = open_dataset(dataset).split("train")
    for row in rows:
        with open(split.shard_paths[int(split.shard_of(np.array(row)))], "r+b") as file:
            file.seek(int(split.offsets[row]))
            file.write(b"\0" * int(split.sizes[row]))


def test_a_few_bad_images_are_counted_and_named_and_too_many_stop_the_run(dataset: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(dataset, broken)
    spoil(broken, [3, 77])
    outputs = finish(
        start(1, [settings(broken, tmp_path, "patient", "train.length=2 epochs", "data.max_bad_share=0.02")])
    )
    assert metrics(tmp_path / "patient", "bad_samples")[12] == 2
    assert "left out train00003" in outputs[0]
    assert "left out train00077" in outputs[0]

    process = start(1, [settings(broken, tmp_path, "strict", "train.length=2 epochs", "data.max_bad_share=0.001")])[0]
    output = process.communicate(timeout=280)[0]
    assert process.returncode == 2, output
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "data.max_bad_share = 0.001" in errors[0]
    assert "Traceback" not in output


def test_weights_of_another_class_count_are_refused(dataset: Path, tmp_path: Path) -> None:
    models.save(models.create("ViT-mu/8", 16, 7), tmp_path / "seven.pt")
    config = load([*fine_tuning(dataset, tmp_path, tmp_path / "seven.pt"), "init.new_head=false"])
    with pytest.raises(UserError, match=r"seven.pt has 7 classes, .* has 4.*init.new_head=true"):
        train._initial_model(config, open_dataset(dataset), None)


def test_a_new_head_is_zero_and_positions_fit_the_new_size(dataset: Path, tmp_path: Path) -> None:
    models.save(models.create("ViT-mu/8", 16, 7, representation=True), tmp_path / "seven.pt")
    config = load([*fine_tuning(dataset, tmp_path, tmp_path / "seven.pt"), "model.image_size=32"])
    model = train._initial_model(config, open_dataset(dataset), None)
    assert model.config.num_classes == 4
    assert not model.config.representation
    assert model.positions.shape[1] == 1 + 16
    assert float(model.head.weight.abs().max()) == 0


def fine_tuning(dataset: Path, out: Path, weights: Path) -> list[str]:
    kept = [s for s in settings(dataset, out, "tuned") if not s.startswith(("model.name", "model.width", "model.depth",
                                                                             "model.mlp_width", "model.num_heads"))]  # fmt: skip
    return [*kept, f"init.weights={weights}", "optimizer.name=sgd", "optimizer.weight_decay=0"]


def test_a_full_disk_leaves_the_last_checkpoint_and_one_line(dataset: Path, tmp_path: Path) -> None:
    """A real small file system; needs root to mount it."""
    out = tmp_path / "small"
    out.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(out)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        more = ["train.length=8 steps", "checkpoint.every=1 steps", "checkpoint.keep=8", "evaluate.every=8 steps"]
        process = start(1, [settings(dataset, out, "full", *more)])[0]
        output = process.communicate(timeout=280)[0]
        assert process.returncode == 2, output
        errors = [line for line in output.splitlines() if line.startswith("error")]
        assert len(errors) == 1, output
        assert "no space left" in errors[0].lower()
        assert "Traceback" not in output
        names = sorted(path.name for path in (out / "full" / "checkpoints").iterdir())
        assert names[0] == "latest"
        assert all(name.startswith("step-") for name in names[1:]), "nothing half-written stays"
        assert models.load(out / "full").config.num_classes == 4
    finally:
        subprocess.run(["umount", str(out)], check=True)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_stale_lock_of_a_dead_build_does_not_hang_the_start(tmp_path: Path, dataset: Path, num_ranks: int) -> None:
    """A process that dies while torch compiles leaves a lock file, for which every later start would wait for ever."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory("deepspeed_shm_comm", verbose=False)) / "lock"
    lock.touch()
    finish(
        start(num_ranks, [settings(dataset, tmp_path, "unlocked", "train.length=1 steps", "schedule.warmup=0 steps")])
    )
    assert not lock.exists()
