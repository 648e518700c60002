"""Files of every format that is read, mutated from a seed: each is read, skipped and counted, or refused in one line.

No Ray: a source is listed, and its images are read and inspected, as a sharding task does. A failure is repeated by
its name and number, from which the mutation follows.
"""

import gzip
import json
import shutil
import signal
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import vtab_originals
from model_parts import official, randomised
from raw_images import encoded, jpeg, noise, write_class_tars, write_folder, write_tar, write_zip
from saving import CONFIG, save_all, tensors
from test_layouts import cifar10, hugging_face, imagenet1k, python2_batch, python3_batch, table
from test_manifest_faults import content_after_a_restart, make

from data_tools.sharding.write_shard import ShardingJob, _read_image
from data_tools.sources import Listing, Reader, list_source
from data_tools.vtab import prepare
from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.checkpoint.store import Checkpoints
from pipeline.data.dataset import exclusion
from pipeline.data.dataset.manifest import CHUNKS_FILE, INFO, SAMPLES_FILE, SHARDS_FILE, open_dataset
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.model.files import write_safetensors
from pipeline.process.console import Console
from pipeline.process.distributed import Ranks
from pipeline.review import samples
from pipeline.settings.commands.data import ShardConfig
from pipeline.train import setup

SECONDS_EACH = 30
SEED = 14
IS_DIGIT = np.array([chr(byte).isdigit() for byte in range(256)])
# What fields and numbers are replaced by.
TOKENS = [b"", b"-1", b"0", b"9" * 20, b"\0", b"\xff\xfe", b"..", b"/", b"\n", b"nan", b"{}", b"null"]


@dataclass(frozen=True)
class Format:
    """A format whose files are mutated.

    make: writes intact files into an empty folder and returns what is read. read: its result says how it was read; it
    raises UserError. files: those that are mutated. count: of mutations. is_right: whether the second result is right
    for a mutation of what gave the first. refused: least and largest share of mutations that are refused.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    files: str = "**/*"
    count: int = 15
    is_right: Callable[[Any, Any], bool] = lambda whole, found: True
    refused: tuple[float, float] = (0, 1)


def same(whole: object, found: object) -> bool:
    return found == whole


# ---------------------------------------------------------------------- sources
FILES = {
    f"{name}/{i}.{ext}": encoded(noise(10 * c + i), kind)
    for c, name in enumerate(("cat", "dog"))
    for i, (ext, kind) in enumerate((("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP")))
}
LONG_NAMES = {name.replace("/", f"{'ö' * 60}/"): data for name, data in FILES.items()}
LABELLED = {
    name: data for i in range(3) for name, data in ((f"{i}.jpg", jpeg(i)), (f"{i}.json", b'{"labels": [%d]}' % i))
}


def _imagenet1k(at: Path) -> Path:
    source = imagenet1k(at)
    (source / "val.txt").write_text("".join(f"ILSVRC2012_val_{i:08d}.JPEG n0{1 + i % 2}\n" for i in (1, 2, 3)))
    return source


def _parquet_list(path: Path) -> Path:
    pq.write_table(pa.table({"path": list(FILES), "label": [[name[:3]] for name in FILES]}), path)
    return path


def as_sharded(listing: Listing) -> str:
    """Read the first images as a task does. Raises what a task would raise."""
    images = listing.images(np.arange(min(len(listing), 10)))
    job = ShardingJob(str(listing.source), "", "", "", images, ShardConfig(source="", out=""), None, listing.convert)
    with Reader() as reader:
        is_whole = not any(isinstance(_read_image(reader, image, job), str) for image in images)
    return "whole" if is_whole and not listing.skipped else "skipped"


def read_source(source: Path, **settings: str) -> str:
    if "val_labels" in settings:
        settings["val_labels"] = str(source / settings["val_labels"])
    config = ShardConfig(source=str(source), out="unused", **settings)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as staging:
        return as_sharded(list_source(source, config, Path(staging)))


def source(make: Callable[[Path], Path], **settings: str) -> Format:
    return Format(make, partial(read_source, **settings))


SOURCES = {
    "tar": source(lambda at: write_tar(FILES, at / "a.tar")),
    "pax tar": source(lambda at: write_tar(LONG_NAMES, at / "a.tar", format=tarfile.PAX_FORMAT)),
    "gnu tar": source(lambda at: write_tar(LONG_NAMES, at / "a.tar")),
    "tar.gz": source(lambda at: write_tar(FILES, at / "a.tar.gz", "w:gz")),
    "tar.bz2": source(lambda at: write_tar(FILES, at / "a.tar.bz2", "w:bz2")),
    "tar.xz": source(lambda at: write_tar(FILES, at / "a.tar.xz", "w:xz")),
    "zip": source(lambda at: write_zip(FILES, at / "a.zip")),
    "images": source(lambda at: write_zip(FILES, write_folder(FILES, at / "raw") / "m.zip").parent, layout="images"),
    "class tars": source(lambda at: write_class_tars(FILES, at / "tars")),
    "imagenet1k": source(lambda at: _imagenet1k(at / "raw"), val_labels="val.txt"),
    "cifar, python 2": source(lambda at: write_folder(cifar10(at, python2_batch), at / "c")),
    "cifar, python 3": source(lambda at: write_folder(cifar10(at, python3_batch), at / "c")),
    "parquet": source(lambda at: hugging_face(at / "a.parquet", pa.array([2, 0, 0, 1, 2]), ["a", "b", "c"])),
    "parquet, text": source(lambda at: hugging_face(at / "a.parquet", pa.array(list("abcab")))),
    "csv": source(lambda at: table(write_folder(FILES, at / "l") / "l.csv", [(name, name[:3]) for name in FILES])),
    "list": source(lambda at: _parquet_list(write_folder(FILES, at / "l") / "l.parquet")),
    "webdataset": source(lambda at: write_tar(LABELLED, at / "a.tar")),
}


# ---------------------------------------------------------------------- VTAB-1k
@cache
def vtab_files() -> tempfile.TemporaryDirectory[str]:
    """A folder of every source data set."""
    folder = tempfile.TemporaryDirectory()
    vtab_originals.write_originals(Path(folder.name))
    return folder


def copy_vtab(name: str, at: Path) -> Path:
    return Path(shutil.copytree(Path(vtab_files().name) / name, at / "source"))


def read_vtab(name: str, source: Path) -> str:
    task = next(task for task in TASKS if task.dataset == name)
    config = ShardConfig(source=str(source), out="unused", splits=dict.fromkeys(prepare.SPLITS, ""))
    with vtab_originals.small_splits(), tempfile.TemporaryDirectory() as staging:
        return as_sharded(prepare._list(task, False, source, config, Path(staging)))


VTAB = {
    name: Format(partial(copy_vtab, name), partial(read_vtab, name))
    for name in sorted({task.dataset for task in TASKS})
}


# ---------------------------------------------------------------------- a data set's own files
def with_excluded(at: Path) -> Path:
    dataset = make(at / "data", 60)
    rows = {"split": ["train"] * 3, "row": [1, 2, 5], "key": ["class/1", "class/2", "class/5"], "reason": ["x"] * 3}
    exclusion.write_list(dataset, "bad", pa.table(rows, exclusion.EXCLUDED))
    return dataset.path


MANIFEST = {
    name: Format(lambda at: make(at / "data", 60).path, content_after_a_restart, f"data/{files}", 100, same, refused)
    for name, files, refused in (
        ("samples", SAMPLES_FILE, (1, 1)),
        ("chunks", CHUNKS_FILE, (1, 1)),
        ("shards", SHARDS_FILE, (1, 1)),
        ("info", INFO, (0, 1)),
        ("index", "index/train-*/*", (0, 0)),  # Made again, to the byte.
    )
}
MANIFEST["excluded samples"] = Format(
    with_excluded, lambda path: open_dataset(path).split("train").excluded_rows.tolist(), "data/exclude/*", 100, same
)


# ---------------------------------------------------------------------- weights
CLASSES = list("abcde")
VIEW = {"image_size": 8, "eval_crop": "center", "eval_resize": 9, "resize_filter": "antialias"}


def write_weights(form: str, at: Path) -> Path:
    model = randomised(models.create("ViT-mu/4", 8, len(CLASSES), gelu="erf"), 0.1)
    extra = {"classes": CLASSES, "preprocessing": VIEW, "loss": "softmax"}
    if form == "ours.safetensors":
        models.save(model, at / form, extra)
    elif form == "official.npz":
        np.savez(at / form, **official(model))
    elif form == "timm.pth":
        torch.save(models.to_timm(models.create("ViT-Ti/16", 16, 2), None, {})[0], at / form)
    else:
        to_form = models.to_timm if form == "timm" else models.to_huggingface
        weights, *described = to_form(model, CLASSES, VIEW)
        write_safetensors(weights, at / "model.safetensors")
        for name, content in zip(("config.json", "preprocessor_config.json"), described, strict=False):
            (at / name).write_text(json.dumps(content))
        return at
    return at / form


def read_weights(path: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in models.read_weights(path)[1].items()}


WEIGHTS = {
    form: Format(partial(write_weights, form), read_weights, files, count, *is_right)
    for form, files, count, is_right in (
        ("ours.safetensors", "*", 100, ()),
        # A zip has checksums of its own.
        ("official.npz", "*", 60, (same, (0.2, 1))),
        ("timm.pth", "*", 10, (same, (0.2, 1))),
        ("timm", "*.json", 60, ()),
        ("huggingface", "*.json", 60, ()),
    )
}


# ---------------------------------------------------------------------- checkpoints
def two_checkpoints(at: Path) -> Path:
    for step in (10, 20):
        save_all(at / "run/checkpoints", step, identity={"seed": 0}, model=CONFIG.to_dict(), losses=[1.5])
    Checkpoints(at / "run/checkpoints").keep_if_best("step-00000010", "val_loss", 1.0)
    return at / "run"


def read_checkpoints(run: Path) -> tuple[str, set[str]]:
    """The checkpoint that a resume goes on from, and damaged ones."""
    facts = {"seed": 0, "excluded": "none", "evaluation_excluded": "none"}
    checkpoints, alone = Checkpoints(run / "checkpoints"), Ranks(0, 0, 1, torch.device("cpu"))
    found, damaged = setup.find_checkpoint_on_all_ranks(checkpoints, facts, 99, alone, Console(run / "log", True))
    assert found is not None
    newest = samples._newest_state(run)
    assert newest.step in (10, 20)
    # Readers of weights, which check less, end with a UserError, or with what was saved.
    for place in (run, checkpoints.folder / "step-00000020"):
        try:
            _, state, extra = models.read_weights(place)[:3]
        except UserError as error:
            check_line(error)
            continue
        expected = tensors(extra["step"])["weights"]
        assert all(np.array_equal(state[name].numpy(), array) for name, array in expected.items())
    return found.name, damaged


CHECKPOINTS = {
    name: Format(
        two_checkpoints,
        read_checkpoints,
        f"**/step-00000020/{name}",
        40,
        # A resume never goes on from it, whatever was changed.
        lambda whole, found: found == ("step-00000010", {"step-00000020"}),
        (0, 0),
    )
    for name in ("checksums.json", "index.json", "state.json", "model.safetensors", "rank-*.bin")
}

FORMATS = {"sources": SOURCES, "vtab": VTAB, "manifest": MANIFEST, "weights": WEIGHTS, "checkpoints": CHECKPOINTS}


# ---------------------------------------------------------------------- mutations
def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """A few changes of one kind."""
    changed = bytearray(data)
    kind = rng.integers(7)
    for _ in range(int(rng.integers(1, 5))):
        if not changed:
            break
        # Formats keep what matters at their beginning and end.
        at = int(rng.integers(min(len(changed), 2000) if rng.random() < 0.5 else len(changed)))
        at = len(changed) - 1 - at if rng.random() < 0.3 else at
        size = int(rng.integers(1, 64))
        if kind == 0:
            changed[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            changed[at : at + size] = rng.bytes(size)
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            del changed[at : at + size]
        elif kind == 4:
            changed[at:at] = rng.bytes(size)
        elif kind == 5:
            changed[at : at + 4] = int(rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1])).to_bytes(4, "little")
        else:
            numbers = np.flatnonzero(IS_DIGIT[np.frombuffer(bytes(changed), np.uint8)])
            at = int(rng.choice(numbers)) if len(numbers) else at
            changed[at : at + 1] = TOKENS[int(rng.integers(len(TOKENS)))]
    return bytes(changed)


def with_checksums(data: bytes) -> bytes:
    """A tar whose headers have right checksums again, so that a reader goes on to what else they say."""
    changed = bytearray(data)
    for start in range(0, len(changed) - 511, 512):
        block = changed[start : start + 512]
        if block[257:262] == b"ustar":
            total = sum(block[:148]) + 8 * 32 + sum(block[156:])
            changed[start + 148 : start + 156] = b"%06o\0 " % total
    return bytes(changed)


def damage(path: Path, rng: np.random.Generator) -> None:
    """Mutate a file; of a compressed one, mostly what is in it."""
    data = path.read_bytes()
    is_packed = data[:2] == b"\x1f\x8b" and rng.random() < 0.7
    changed = mutate(gzip.decompress(data) if is_packed else data, rng)
    if ".tar" in path.name or path.suffix == ".tgz":
        changed = with_checksums(changed) if is_packed or rng.random() < 0.7 else changed
    path.write_bytes(gzip.compress(changed, 1) if is_packed else changed)


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """seconds: of processor time, so that a busy machine makes no difference."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt(f"not done after {seconds} s")  # No reader catches it.

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check_line(error: UserError) -> None:
    assert "\n" not in str(error)
    assert len(str(error)) < 2000


def mutation_of(form: Format, root: Path, place: Path, rng: np.random.Generator, expected: object) -> str:
    """Mutate a file below root, and read place; what became of it."""
    files = sorted(path for path in root.glob(form.files) if path.is_file() and path.stat().st_size)
    tables = [path for path in files if path.suffix not in (".jpg", ".JPEG", ".jpeg", ".png", ".webp")] or files
    chosen = tables if rng.random() < 0.9 else files
    file = chosen[int(rng.integers(len(chosen)))]
    before = file.read_bytes()
    while file.read_bytes() == before:
        damage(file, rng)
    try:
        with in_time(SECONDS_EACH):
            found = form.read(place)
    except UserError as error:
        check_line(error)
        return "refused"
    assert form.is_right(expected, found), found
    return found if isinstance(found, str) else "read"


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_a_mutated_file_is_read_or_skipped_or_refused(kind: str, tmp_path: Path) -> None:
    failed, outcomes = [], Counter[str]()
    for name, form in FORMATS[kind].items():
        whole, root = tmp_path / name / "whole", tmp_path / name / "mutated"
        whole.mkdir(parents=True)
        place = root / form.make(whole).relative_to(whole)
        shutil.copytree(whole, root)
        expected, found = form.read(place), Counter[str]()
        for number in range(form.count):
            shutil.rmtree(root)
            shutil.copytree(whole, root)
            # Seeded by name, so that another format changes no mutation of the others.
            rng = np.random.default_rng([SEED, zlib.crc32(f"{kind} {name}".encode()), number])
            try:
                found[mutation_of(form, root, place, rng, expected)] += 1
            except (Exception, KeyboardInterrupt) as error:
                failed.append(f"{name} {number}: {error!r}")
        least, most = form.refused
        assert failed or least <= found["refused"] / form.count <= most, (name, found)
        outcomes += found
        shutil.rmtree(tmp_path / name)
    assert not failed, "\n".join(failed)
    # Each outcome occurs.
    assert len(outcomes) == {"sources": 3, "vtab": 3, "checkpoints": 1}.get(kind, 2), outcomes
