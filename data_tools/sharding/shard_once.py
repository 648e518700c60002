"""Shards a folder of images that a run names as its data set: once, into a data set beside it.

`shard_once` runs on every rank, before the run itself. Rank 0 starts launch/shard.py, whose Ray is not wanted in a
rank, and the others wait. After a kill, the next start continues, as launch/shard.py does.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data_tools.sharding.source_table import SOURCE_TABLE, difference
from data_tools.sources.layouts import folder
from data_tools.sources.listing import Collector
from data_tools.sources.split_files import PARTS
from pipeline.base.errors import CrashError, OneRankError, UserError
from pipeline.base.json_record import read_or_none
from pipeline.base.progress import PROGRESS_FILE
from pipeline.base.words import command_line
from pipeline.data.dataset.manifest import INFO, open_dataset, shards_beside
from pipeline.data.loading.decode import is_visible_image
from pipeline.data.storage.bucket import name_inside, walk_files
from pipeline.process.outputs import kind_of
from pipeline.process.start import dying_with_parent, rank
from pipeline.settings.commands.data import ShardConfig

_COMMAND = Path(__file__).resolve().parents[2] / "launch" / "shard.py"
_VAL_SHARE = 0.1
# What makes a process join a cluster. Its CPUs may be those that the ranks hold.
_OF_A_CLUSTER = ("RAY_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR")
# Settings by which the keys of samples are not those of their files.
_OTHER_KEYS = {"channel_pattern", "pages"}
_POLL_SECONDS = 0.5
# progress.json changes every 10 seconds.
_MOST_SECONDS_WITHOUT_PROGRESS = 600.0


def shard_once(path: str, check: Callable[[], object] = lambda: None) -> None:
    """Make the data set beside a folder of images, unless it is finished; no-op for any other path.

    A finished one is used as it is; what changed in the folder since is said. check: called before the images are
    sharded, which may take hours. Raises UserError if they cannot be.
    """
    images = Path(path)
    if "://" in path or (images / INFO).exists():
        return
    out = shards_beside(images)
    if _is_finished(out):
        if rank() == 0:
            _say_changes(images, out)
    elif _holds_images(images):
        check()
        if rank() == 0:
            _shard(images, out)
        else:
            _wait_for(out)


def settings_for(images: Path) -> list[str]:
    """The settings of launch/shard.py for a folder of images: splits if its folders are called so, layout=images unless
    most images are in class folders, and with labels a held-out share, which evaluation needs.
    """
    found = _walked(images, "folder", {"train": ""})
    if splits := {name: inner for inner, name in found.like_splits("train").items()}:
        found = _walked(images, "folder", splits)
    is_labelled = any(map(found.has_class_folders, found.splits))
    return [
        *([] if is_labelled else ["layout=images"]),
        *(f"splits.{name}={inner}" for name, inner in splits.items()),
        *([f"val_share={_VAL_SHARE}"] if is_labelled and "train" in found.splits and "val" not in splits else []),
    ]


def _walked(images: Path, layout: str, splits: dict[str, str]) -> Collector:
    """What a folder holds, by the layout folder or images."""
    is_labelled = layout == "folder"
    archives = None if is_labelled else dict[str, str]()
    found = Collector(images, splits, by_folders=is_labelled, is_labelled=is_labelled, archives=archives)
    folder.walk(images, ShardConfig(source="", out=""), images, found)
    return found


def _is_finished(out: Path) -> bool:
    return (out / INFO).exists() and not (out / PARTS).exists()


def _holds_images(images: Path) -> bool:
    if not images.is_dir() or kind_of(images) == "run":
        return False  # Its figures are no images to train on.
    return any(is_visible_image(name_inside(path, images) or "") for path, *_ in walk_files(images))


def _shard(images: Path, out: Path) -> None:
    settings = [f"source={images}", f"out={out}", *settings_for(images)]
    command = command_line("shard", *settings)
    print(f"data.path = {images} is a folder of images, which is sharded once into {out}: {command}", flush=True)
    code = subprocess.run(
        [sys.executable, str(_COMMAND), *settings],
        env={name: value for name, value in os.environ.items() if name not in _OF_A_CLUSTER},
        preexec_fn=dying_with_parent(signal.SIGTERM),
    ).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code:
        text = (
            f"data.path = {images}: its images were not sharded, for the reason above. If you change the images, remove"
            f" {out} and start again; to change settings, run first: {command} setting=value"
        )
        raise UserError(text) if code == 2 else CrashError(text)


def _wait_for(out: Path) -> None:
    """Wait for rank 0, which may be on another host, as long as it makes progress."""
    seen, since = None, time.monotonic()
    while not _is_finished(out):
        time.sleep(_POLL_SECONDS)
        if (progress := read_or_none(out / PROGRESS_FILE, dict)) != seen:
            seen, since = progress, time.monotonic()
        if time.monotonic() - since > _MOST_SECONDS_WITHOUT_PROGRESS:
            raise OneRankError(
                f"data.path: waited {_MOST_SECONDS_WITHOUT_PROGRESS / 60:.0f} minutes for rank 0 to shard its images"
                f" into {out}, and saw no progress there. All hosts must share this folder."
            )


def _say_changes(images: Path, out: Path) -> None:
    """Print which images came and went since `out` was made of them."""
    info = open_dataset(out).info
    made = info["source"]
    if not images.is_dir() or made.get("layout") not in ("folder", "images") or _OTHER_KEYS & info["settings"].keys():
        return
    found = _walked(images, made["layout"], made["splits"])
    if found.archives:  # Their members would have to be listed, and compressed ones unpacked.
        return
    try:
        listing = found.finish()
        changes = difference(out / SOURCE_TABLE, listing) if listing.digest() != made["sha256"] else ""
    except UserError as error:  # Such as an empty class folder.
        changes = str(error)
    if changes:
        print(
            f"note: {images} holds other images than {out}, which is used as it is, was made of: {changes}. To use"
            f" those of today, remove {out}, and start a run of another name.",
            flush=True,
        )
