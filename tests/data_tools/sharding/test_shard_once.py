"""A run that names a folder of images as its data set: they are sharded once, beside the folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from polling import until
from ranks import ROOT
from ranks import settings as run_settings
from raw_images import contents, jpeg, settings, write_folder

from data_tools.sharding import shard
from data_tools.sharding.shard_once import settings_for, shard_once
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import INFO, open_dataset, shards_beside
from pipeline.process import waits

_ONE_IMAGE = jpeg(1)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["cat/1", "dog/1", "dog/2", ".git/x/1"], ["val_share=0.1"]),
        (["1", "2", "cat/1"], ["layout=images"]),
        (["cat/1", "cat/2"], ["layout=images"]),  # One class is none.
        (["2020/01/1", "2020/02/1", "2021/01/1"], ["layout=images"]),
        (["train/cat/1", "train/dog/1", "valid/cat/1"], ["splits.train=train", "splits.val=valid"]),
        (["train/cat/1", "train/dog/1", "test/cat/1"], ["splits.test=test", "splits.train=train", "val_share=0.1"]),
        (["train/1", "test/1"], ["layout=images", "splits.test=test", "splits.train=train"]),
    ],
)
def test_a_folder_says_by_itself_how_it_is_sharded(names: list[str], expected: list[str], tmp_path: Path) -> None:
    write_folder({f"{name}.jpg": _ONE_IMAGE for name in names}, tmp_path / "photos")
    assert settings_for(tmp_path / "photos") == expected
    assert not waits._board.work, "a run would go on saying how many images are listed"


def test_the_data_set_is_beside_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shards_beside(Path("a/my photos/")) == Path("a/my photos_shards")
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path / "photos")
    assert shards_beside(Path(".")) == tmp_path / "photos_shards"


def start(photos: Path, rank: int) -> subprocess.Popen[str]:
    code = (
        "from data_tools.sharding.shard_once import *; "
        f"shard_once({str(photos)!r}); assert open_dataset({str(photos)!r}).info['samples']"
    )
    environment = {**os.environ, "RANK": str(rank), "RAY_ADDRESS": "127.0.0.1:1"}  # Not that of a cluster of ranks.
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_ranks_shard_a_folder_once_and_later_name_what_changed(
    ray_cluster: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {f"{name}/{i}.jpg": jpeg(i) for name in ("cat", "dog") for i in range(30)}
    photos = write_folder({**files, "dog/broken.jpg": b"x"}, tmp_path / "my photos")
    ranks = [start(photos, rank) for rank in (1, 0)]
    said = [process.communicate(timeout=500)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert said[0] == ""
    out = tmp_path / "my photos_shards"
    assert str(out / "skipped.csv") in said[1]
    by_command = shard.run(settings(photos, tmp_path / "by_command", samples_per_shard=4096, val_share=0.1))
    before = contents(out)
    assert before == contents(by_command.path)
    capfd.readouterr()

    shard_once(str(photos))
    assert capfd.readouterr().out == ""
    assert open_dataset(photos).path == out  # As evaluate.py and others open it.
    (photos / "cat/new.jpg").write_bytes(jpeg(99))
    (photos / "dog/3.jpg").unlink()
    shard_once(str(photos))
    note = capfd.readouterr().out
    assert all(name in note for name in ("cat/new", "dog/3", str(out)))
    assert contents(out) == before


def test_a_run_killed_while_it_shards_is_started_again(own_ray: None, tmp_path: Path) -> None:
    files = {f"{name}/{i}.jpg": jpeg(100 * at + i) for at, name in enumerate(("cat", "dog")) for i in range(30)}
    photos = write_folder(files, tmp_path / "photos")
    out = tmp_path / "photos_shards"
    run = run_settings(photos, tmp_path / "runs", "run")
    command = [sys.executable, str(ROOT / "launch" / "pretrain.py"), *run]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
        until(lambda: (out / ".parts" / "plan.json").exists() or first.poll() is not None)
        first.send_signal(signal.SIGKILL)
    assert not (out / INFO).exists()
    again = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert again.returncode == 0, again.stdout + again.stderr
    assert sum(open_dataset(out).info["samples"].values()) == 60
    assert not (out / ".parts").exists()


def test_images_that_cannot_be_sharded_stop_the_run(tmp_path: Path) -> None:
    """A class folder is empty. Nothing is left."""
    photos = write_folder({"cat/1.jpg": _ONE_IMAGE, "dog/1.jpg": _ONE_IMAGE}, tmp_path / "raw")
    (photos / "elk").mkdir()
    (weights := tmp_path / "weights.npz").touch()  # Not read before the images.
    run = [word for word in run_settings(photos, tmp_path / "runs", "run") if not word.startswith("model.")]
    script = [sys.executable, str(ROOT / "launch" / "finetune.py"), *run, f"init.weights={weights}"]
    refused = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "elk" in refused.stderr
    assert "data.path" in refused.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"raw", "weights.npz"}


def test_a_folder_that_was_not_sharded_is_refused_with_the_command(tmp_path: Path) -> None:
    photos = write_folder({"cat/1.jpg": _ONE_IMAGE}, tmp_path / "my photos")
    with pytest.raises(UserError, match=r"'source=.*/my photos' 'out=.*/my photos_shards'"):
        open_dataset(photos)


def test_the_figures_of_a_run_are_no_images_to_train_on(tmp_path: Path) -> None:
    figures = write_folder({"page/1.jpg": _ONE_IMAGE}, tmp_path / "runs" / "a")
    (figures / "status.json").touch()
    shard_once(str(figures))
    assert os.listdir(tmp_path) == ["runs"]
    assert os.listdir(tmp_path / "runs") == ["a"]
