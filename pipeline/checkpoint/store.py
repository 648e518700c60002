"""Checkpoints on disk or in an object store: complete or invisible.

    checkpoints/step-00001000/rank-0003.5f3a91c2.bin   rank 3's part, fp32 (pipeline/checkpoint/sharded_tensors.py)
    checkpoints/step-00001000/index.json               which ranges of which tensors lie in which file
    checkpoints/step-00001000/model.safetensors        the model alone, fp32 (pipeline.model.load reads it)
    checkpoints/step-00001000/state.json               format, step, settings, fingerprint of the data
    checkpoints/step-00001000/checksums.json           size and checksum of every file above; written last
    checkpoints/latest                                 the name of the newest, replaced atomically
    checkpoints/kept.json                              checkpoints exempt from retention, and why

On a file system, files are written to a hidden folder and flushed; then the folder is renamed, and `latest` is
replaced. An object store has no rename: there, a checkpoint exists once its checksums.json does. File names contain a
token of their save, so that a writer that outlives its run cannot change the files of another save.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from pipeline.base import json_record
from pipeline.base.errors import UserError, is_outage
from pipeline.base.files import remove_unfinished, sync_folder, write_text
from pipeline.base.trained_on import TrainedSet
from pipeline.checkpoint.sharded_tensors import Ranges, ShardedTensors
from pipeline.data.storage.atomic import replacing
from pipeline.data.storage.bucket import AnyPath, BucketPath, remove_tree, to_path
from pipeline.data.storage.retry import Retry
from pipeline.process.committed import CHECKSUMS, LATEST, NAME, Checksum, read_checksums

if TYPE_CHECKING:  # The writer process starts in 0.2 s without it.
    from pipeline.settings.run import RunConfig

FORMAT = 1
MODEL = "model.safetensors"
# Interval of a writer's heartbeat in its status file; without one for SILENCE_SECONDS it is considered dead.
BEAT_SECONDS = 2.0
SILENCE_SECONDS = 3 * BEAT_SECONDS
_WRITING, _REMOVING = ".writing-", ".removing-"
_KEPT = "kept.json"


@dataclass(frozen=True)
class Kept:
    """Content of kept.json. always: names of checkpoints never removed. best: name of the best one by `metric`, and its
    value.
    """

    always: list[str]
    best: str | None
    metric: str | None
    value: float | None


@dataclass(frozen=True)
class Counters:
    """The engine's counters. loss_scale: state of the fp16 loss scaler, by name."""

    optimizer_steps: int | None
    global_steps: int
    skipped_steps: int
    loss_scale: dict[str, Any] | None = None


@dataclass(frozen=True)
class Counts:
    """Counts since a run's first start, over all ranks. unreadable: (row of the training split, reason), by row."""

    loss_spikes: int = 0
    storage_retries: int = 0
    unreadable: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class State:
    """Content of state.json that a resumed run needs.

    losses: recent ones. left_out: (step, number of batches skipped before it) of each rollback. trained_on: what the
    weights were trained on, as in their metadata.
    """

    step: int
    identity: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    engine: Counters = Counters(None, 0, 0)
    losses: list[float] = field(default_factory=list)
    left_out: list[tuple[int, int]] = field(default_factory=list)
    counts: Counts = Counts()
    trained_on: list[TrainedSet] = field(default_factory=list)


@dataclass(frozen=True)
class WrittenPart:
    """A rank's finished file. ranges: (name, start, length) within each state. constants: of tensors without states."""

    file: str
    ranges: Ranges
    checksum: Checksum
    constants: Ranges = field(default_factory=list)


@dataclass(frozen=True)
class WriterStatus:
    """Progress of a writer. beat: heartbeat while it works. part: set when done. error: one line. crash: the error
    is not a user's mistake.
    """

    beat: int | None = None
    part: WrittenPart | None = None
    error: str | None = None
    crash: bool = False


class Checkpoints:
    """The checkpoints of one run, in a local folder or an object store. Only one process at a time may change them."""

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder

    # ---------------------------------------------------------------- writing
    def begin(self, step: int, token: str) -> AnyPath:
        """Return the folder to write a save to: a new hidden one, or in an object store the final one."""
        if isinstance(self.folder, BucketPath):
            return self.folder / step_name(step)
        path = self.folder / f"{_WRITING}{step_name(step)}.{token}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, path: AnyPath, checksums: dict[str, Checksum]) -> AnyPath:
        """Commit the flushed files in `path` as a checkpoint and make `latest` name it. checksums: of every file."""
        known = {name: {key: value for key, value in asdict(c).items() if value != ""} for name, c in checksums.items()}
        write_atomically(path / CHECKSUMS, json.dumps(known, indent=1))
        for file in path.iterdir():
            if file.name not in checksums and file.name != CHECKSUMS:  # Left by a failed save.
                file.unlink(missing_ok=True)
        if isinstance(path, BucketPath):
            final: AnyPath = path
        else:
            assert isinstance(self.folder, Path)
            final = self.folder / path.name.removeprefix(_WRITING).partition(".")[0]
            sync_folder(path)
            if final.exists():  # The same step, damaged: otherwise the run would have resumed from it.
                self.remove(final)
            os.rename(path, final)
            sync_folder(self.folder)
        self.point_at(final)
        return final

    def point_at(self, newest: AnyPath) -> None:
        """Write the name of a checkpoint to `latest`, as the writer of a killed run may do at the same time."""
        with replacing(self.folder / LATEST) as file:
            file.write(newest.name.encode())

    def committed_by(self, step: int, token: str) -> AnyPath | None:
        """Return the committed checkpoint of `step` if the save with this token wrote it, else None."""
        path = self.folder / step_name(step)
        return path if any(name.endswith(f".{token}.bin") for name in read_checksums(path) or {}) else None

    def prune(self, newest: AnyPath, keep: int, damaged: set[str]) -> None:
        """Remove checkpoints up to `newest`, except the `keep` newest and those in kept.json.

        damaged: names of checkpoints that are removed and do not count.
        """
        kept = self.kept()
        older = [path for path in self.candidates() if step_of(path) <= step_of(newest)]
        complete = [path.name for path in older if path.name not in damaged]
        stay = {*complete[:keep], *kept.always, kept.best} - damaged
        for path in older:
            if path.name not in stay:
                self.remove(path)

    def kept(self) -> Kept:
        """Read kept.json. Raises UserError if it is damaged, because the checkpoints it names would be removed."""
        file = self.folder / _KEPT
        try:
            return json_record.parse(file.read_bytes(), Kept, str(file))
        except FileNotFoundError:
            return Kept([], None, None, None)

    def keep_always(self, name: str) -> None:
        """Exempt this checkpoint from retention."""
        kept = self.kept()
        if name not in kept.always:
            self._keep(replace(kept, always=[*kept.always, name]))

    def keep_if_best(self, name: str, metric: str, value: float, lower_is_better: bool = False) -> bool:
        """Exempt this checkpoint while it is the best by `metric`. Returns whether it is."""
        kept, sign = self.kept(), -1 if lower_is_better else 1
        worse = kept.metric == metric and kept.value is not None and sign * value <= sign * kept.value
        if worse or math.isnan(value):
            return False
        self._keep(replace(kept, best=name, metric=metric, value=value))
        return True

    def _keep(self, kept: Kept) -> None:
        write_atomically(self.folder / _KEPT, json.dumps(asdict(kept), indent=1))

    def remove(self, path: AnyPath) -> None:
        """Remove a checkpoint atomically: hide it first, then delete its files."""
        if isinstance(path, BucketPath):
            (path / CHECKSUMS).unlink(missing_ok=True)
            remove_tree(path)
            return
        hidden = path.with_name(f"{_REMOVING}{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)  # Leftovers are hidden, and removed at the next start.

    def discard(self, path: AnyPath) -> None:
        """Remove the files of a failed save."""
        if isinstance(path, BucketPath):
            self.remove(path)  # It may just have been committed.
        else:
            shutil.rmtree(path, ignore_errors=True)

    def remove_after(self, step: int) -> None:
        """Remove all checkpoints after `step`."""
        for path in self.candidates():
            if step_of(path) > step:
                self.remove(path)

    # ---------------------------------------------------------------- reading
    def candidates(self) -> list[AnyPath]:
        """Committed checkpoints, newest first."""
        found = [path for path in _inside(self.folder) if NAME.fullmatch(path.name)]
        if isinstance(self.folder, BucketPath):
            found = [path for path in found if (path / CHECKSUMS).exists()]
        return sorted(found, key=step_of, reverse=True)

    # ---------------------------------------------------------------- leftovers of an earlier process
    def unfinished(self) -> list[AnyPath]:
        """Folders of saves that are not committed: still in progress, or interrupted."""
        if isinstance(self.folder, BucketPath):
            found = [path for path in _inside(self.folder) if NAME.fullmatch(path.name)]
            return [path for path in found if not (path / CHECKSUMS).exists()]
        return [path for path in _inside(self.folder) if path.name.startswith((_WRITING, _REMOVING))]

    def clean_up(self, say: Callable[[str], None], silence: float = SILENCE_SECONDS) -> None:
        """Wait for writers that outlived their run, then remove unfinished saves.

        silence: seconds between looks without progress; an outage, in which a look lasts longer, does not count.
        """
        seen, silent, said = self._progress(), 0.0, False
        pause = min(0.2, silence / 4)
        while seen and silent < silence:
            time.sleep(pause)
            silent += pause
            now = self._progress()
            if now != seen:
                if now and not said:
                    say(f"{self.folder}: a checkpoint is still being written by the previous run: waiting for it")
                    said = True
                seen, silent = now, 0.0
        for path in self.unfinished():
            self.discard(path)
        if isinstance(self.folder, Path):
            remove_unfinished(self.folder, [LATEST])

    def _progress(self) -> dict[str, list[bytes]]:
        """Contents of the writers' status files, by unfinished save."""
        found: dict[str, list[bytes]] = {}
        for path in self.unfinished():
            if not path.name.startswith(_REMOVING):
                with contextlib.suppress(OSError):  # It may be committed or removed meanwhile.
                    found[str(path)] = sorted(file.read_bytes() for file in path.glob("status-*.json"))
        return found


def checkpoint_folder(config: "RunConfig") -> AnyPath:
    """Return the folder of a run's checkpoints."""
    if config.checkpoint.folder:
        folder = (
            to_path(config.checkpoint.folder, Retry(60 * config.data.retry_minutes, "data.retry_minutes")) / config.name
        )
    else:
        folder = Path(config.out) / config.name / "checkpoints"
    return folder.absolute() if isinstance(folder, Path) else folder


def write_status(path: AnyPath, rank: int, token: str, status: WriterStatus) -> None:
    """Publish the progress of this rank's writer to rank 0's writer and to a run that starts meanwhile."""
    write_atomically(path / _status_name(rank, token), json.dumps(asdict(status)), durable=False)


def read_status(path: AnyPath, rank: int, token: str) -> WriterStatus:
    """Read a writer's progress; an empty status if the file is missing, unreadable, or stale, as its writer replaces
    it.
    """
    file = path / _status_name(rank, token)
    try:
        return json_record.parse(file.read_bytes(), WriterStatus, str(file))
    except (OSError, UserError) as error:
        if not isinstance(error, FileNotFoundError | UserError) and not is_outage(error):
            raise
        return WriterStatus()


def _status_name(rank: int, token: str) -> str:
    return f"status-{rank:04d}.{token}.json"


def verify(path: AnyPath, share: int = 0, shares: int = 1) -> str | None:
    """Compare a committed checkpoint with its checksums. Returns the first problem, or None.

    share, shares: check only every n-th file, so that the ranks together check all. A file on a disk that goes on
    failing is a problem.
    """
    name = CHECKSUMS
    try:
        if (expected := Retry().read_file(str(path / CHECKSUMS), partial(read_checksums, path))) is None:
            return f"{CHECKSUMS} is missing or unreadable"
        needed = {"state.json"}
        if share == 0:
            with contextlib.suppress(OSError, UserError):  # Its checksum reports that it is damaged.
                needed |= ShardedTensors.open(path).index.files.keys()
        if missing := needed - expected.keys():
            return f"{min(missing)} has no checksum"
        for name, known in sorted(expected.items())[share::shares]:
            kind = xxhash.xxh3_128 if known.xxh128 else hashlib.sha256
            if Retry().read_file(str(path / name), partial(checksum, path / name, kind)) != known:
                return f"{name} does not match its checksum"
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def read_state(path: AnyPath) -> State:
    """Read state.json. Raises UserError if it is missing, damaged, of another step than its folder, or has another
    format.
    """
    file = path / "state.json"
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{file} is missing: {path} is not a checkpoint.") from None
    found = json_record.parse(content, _CheckpointFormat, str(file)).format
    if found != FORMAT:
        raise UserError(
            f"{path} has format {found}, and this version continues format {FORMAT}. Use the version of the pipeline"
            f" that wrote it, or start a run with init.weights={path}."
        )
    state = json_record.parse(content, State, str(file))
    if NAME.fullmatch(path.name) and state.step != step_of(path):
        raise UserError(f"{file}: step = {state.step:,}, in a folder of another step. Use another checkpoint.")
    return state


@dataclass(frozen=True)
class _CheckpointFormat:
    format: int = 0


def checksum(file: AnyPath, kind: Callable[[], Any] = hashlib.sha256) -> Checksum:
    """Return size and checksum of a file. kind: hashlib.sha256 or xxhash.xxh3_128."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, kind).hexdigest()  # type: ignore[arg-type]
        size = stream.tell()
    return Checksum(size, digest) if kind is hashlib.sha256 else Checksum(size, xxh128=digest)


def write_atomically(path: AnyPath, text: str, durable: bool = True) -> None:
    """Replace a small file atomically."""
    if isinstance(path, BucketPath):
        with path.replacing() as stream:
            stream.write(text.encode())
    else:
        write_text(path, text, durable)


def _inside(folder: AnyPath) -> list[AnyPath]:
    return list(folder.iterdir()) if isinstance(folder, BucketPath) or folder.is_dir() else []


def step_name(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(path: AnyPath) -> int:
    """Step number in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))
