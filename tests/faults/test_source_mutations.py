"""Source files of every format that is read, mutated at random: each is read, skipped and counted, or refused in one line.

No Ray: a source is listed, and its images are read and inspected, as a sharding task does. The mutations follow from a seed,
so a failure is repeated by `mutation_of(number)`.
"""

import gzip
import shutil
import signal
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import vtab_originals
from raw_images import encoded, jpeg, noise, write_class_tars, write_folder, write_tar, write_zip
from test_layouts import TINY, binary_batch, cifar10, hugging_face, imagenet1k, python2_batch, python3_batch, table

from data_tools.sharding.write_shard import ShardingJob, _read_image
from data_tools.sources import Listing, Reader, list_source
from data_tools.vtab import prepare
from data_tools.vtab.origin import Origin
from pipeline.base.errors import UserError
from pipeline.settings.commands.data import ShardConfig
from pipeline.transfer.vtab_tasks import TASKS

NUM_MUTATIONS = 600
SECONDS_EACH = 30
SEED = 14

FILES = {
    f"{name}/{i}.{ext}": encoded(noise(10 * c + i), kind)
    for c, name in enumerate(("cat", "dog"))
    for i, (ext, kind) in enumerate((("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP")))
}
LABELLED = {
    name: data for i in range(3) for name, data in ((f"{i}.jpg", jpeg(i)), (f"{i}.json", b'{"labels": [%d]}' % i))
}
IS_DIGIT = np.array([chr(byte).isdigit() for byte in range(256)])
# What fields and numbers are replaced by.
TOKENS = [
    b"",
    b"-1",
    b"0",
    b"99999999999999999999",
    b"\0",
    b"\xff\xfe",
    b"..",
    b"/",
    b"\n",
    b"nan",
    b"{}",
    b"null",
]


def _imagenet1k(at: Path) -> Path:
    source = imagenet1k(at)
    (source / "val.txt").write_text("".join(f"ILSVRC2012_val_{i:08d}.JPEG n0{1 + i % 2}\n" for i in (1, 2, 3)))
    return source


# Name -> (makes the source at a path, settings).
SOURCES: dict[str, tuple[Callable[[Path], Path], dict[str, object]]] = {
    "tar": (lambda at: write_tar(FILES, at / "a.tar"), {}),
    "pax tar": (
        lambda at: write_tar({f"{'ö' * 60}/{n}": d for n, d in FILES.items()}, at / "a.tar", format=tarfile.PAX_FORMAT), {}
    ),
    "gnu tar": (lambda at: write_tar({f"{'ö' * 60}/{n}": d for n, d in FILES.items()}, at / "a.tar"), {}),
    "tar.gz": (lambda at: write_tar(FILES, at / "a.tar.gz", "w:gz"), {}),
    "tar.bz2": (lambda at: write_tar(FILES, at / "a.tar.bz2", "w:bz2"), {}),
    "tar.xz": (lambda at: write_tar(FILES, at / "a.tar.xz", "w:xz"), {}),
    "zip": (lambda at: write_zip(FILES, at / "a.zip"), {}),
    "images": (lambda at: write_zip(FILES, write_folder(FILES, at / "raw") / "more.zip").parent, {"layout": "images"}),
    "class tars": (lambda at: write_class_tars(FILES, at / "tars"), {}),
    "tiny": (lambda at: write_zip({f"t/{name}": data for name, data in TINY.items()}, at / "t.zip"), {}),
    "tiny folder": (lambda at: write_folder(TINY, at / "t"), {}),
    "imagenet1k": (lambda at: _imagenet1k(at / "raw"), {"val_labels": "val.txt"}),
    "cifar, python 2": (lambda at: write_folder(cifar10(at, python2_batch), at / "c"), {}),
    "cifar, python 3": (lambda at: write_folder(cifar10(at, python3_batch), at / "c"), {}),
    "cifar, binary": (lambda at: write_folder(cifar10(at, binary_batch, ".bin"), at / "c"), {}),
    "parquet": (lambda at: hugging_face(at / "a.parquet", pa.array([2, 0, 0, 1, 2]), ["a", "b", "c"]), {}),
    "parquet, text": (lambda at: hugging_face(at / "a.parquet", pa.array(list("abcab"))), {}),
    "csv": (lambda at: table(write_folder(FILES, at / "l") / "l.csv", [(name, name[:3]) for name in FILES]), {}),
    "list": (lambda at: _parquet_list(write_folder(FILES, at / "l") / "l.parquet"), {}),
    "webdataset": (lambda at: write_tar(LABELLED, at / "a.tar"), {}),
}  # fmt: skip
# One task for each source data set of VTAB-1k.
TASK_OF = {task.dataset: task for task in reversed(TASKS)}


def _parquet_list(path: Path) -> Path:
    pq.write_table(pa.table({"path": list(FILES), "label": [[name[:3]] for name in FILES]}), path)
    return path


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """A few changes of one kind."""
    changed = bytearray(data)
    kind = rng.integers(7)
    for _ in range(int(rng.integers(1, 5))):
        if not changed:
            break
        # Formats keep what matters at their beginning and end.
        at = int(min(rng.integers(len(changed)), rng.integers(len(changed))))
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
    """Mutate a file; of a compressed one, half the time what is in it."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b" and rng.random() < 0.7:
        data = mutate(gzip.decompress(data), rng)
        path.write_bytes(
            gzip.compress(with_checksums(data) if ".tar" in path.name or path.suffix == ".tgz" else data, 1)
        )
        return
    data = mutate(data, rng)
    path.write_bytes(with_checksums(data) if path.suffix == ".tar" and rng.random() < 0.7 else data)


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


def read_some(listing: Listing) -> bool:
    """Read the first images as a task does; whether all are whole. Raises what a task would raise."""
    rows = listing.rows(np.arange(min(len(listing), 10)))
    job = ShardingJob(str(listing.source), "", "", "", rows, ShardConfig(source="", out=""), None, listing.convert)
    with Reader() as reader:
        places = zip(*(rows[name] for name in ("path", "offset", "size", "packed", "page", "parts")), strict=True)
        return not any(isinstance(_read_image(reader, list(place), job), str) for place in places)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with every source: layouts/NAME, originals/NAME, tfds/NAME."""
    root = tmp_path_factory.mktemp("mutations")
    for name, (make, _) in SOURCES.items():
        (root / "layouts" / name).mkdir(parents=True)
        make(root / "layouts" / name)
    truth = vtab_originals.write_originals(root / "originals")
    vtab_originals.write_tfds(root / "tfds", truth)
    shutil.copytree(root / "originals/dsprites", root / "originals/npz")
    vtab_originals.dsprites_as_npz(root / "originals/npz")
    return root


def targets(root: Path) -> list[tuple[str, str]]:
    """(kind, name) of everything that can be mutated."""
    layouts = [("layouts", name) for name in SOURCES]
    return [*layouts, *(("originals", path.name) for path in sorted((root / "originals").iterdir())),
            *(("tfds", name) for name in sorted(vtab_originals.TFDS))]  # fmt: skip


def mutation_of(number: int, root: Path, work: Path) -> str:
    """Make and read mutation `number`; what became of it."""
    kinds = targets(root)
    kind, name = kinds[number % len(kinds)]
    # Seeded by name, so that another source changes no mutation of the others.
    rng = np.random.default_rng([SEED, zlib.crc32(f"{kind} {name}".encode()), number // len(kinds)])
    folder = root / kind / (Path(vtab_originals.TFDS[name][0]).parent if kind == "tfds" else name)
    source = Path(shutil.copytree(folder, work / "source"))
    files = sorted(path for path in source.rglob("*") if path.is_file())
    tables = [path for path in files if path.suffix not in (".jpg", ".JPEG", ".jpeg", ".png", ".webp")] or files
    chosen = tables if rng.random() < 0.9 else files
    damage(chosen[int(rng.integers(len(chosen)))], rng)
    try:
        with in_time(SECONDS_EACH):
            if kind == "layouts":
                settings = dict(SOURCES[name][1])
                if "val_labels" in settings:
                    settings["val_labels"] = str(source / "raw/val.txt")
                place = next(iter(source.glob("*.csv")), None) or next(iter(source.iterdir()))
                place = next((path for path in files if path.name in ("l.csv", "l.parquet")), place)
                config = ShardConfig(source=str(place), out="unused", **settings)  # type: ignore[arg-type]
                listing = list_source(place, config, work / "staging")
            else:
                task = TASK_OF["dsprites" if name == "npz" else name]
                config = ShardConfig(source=str(source), out="unused", splits=dict.fromkeys(prepare.SPLITS, ""))
                origin = Origin("tfds" if kind == "tfds" else "originals", source)
                with vtab_originals.small_splits():
                    listing = prepare._list(task, origin, False, source, config, work / "staging")
            is_whole = read_some(listing)
    except UserError:
        return "refused"
    return "whole" if is_whole and not listing.skipped else "skipped"


@pytest.mark.slow
def test_every_mutation_is_read_or_skipped_or_refused(originals: Path, tmp_path: Path) -> None:
    found = {"refused": 0, "whole": 0, "skipped": 0}
    failed = []
    for number in range(NUM_MUTATIONS):
        work = tmp_path / str(number)
        work.mkdir()
        try:
            found[mutation_of(number, originals, work)] += 1
        except (Exception, KeyboardInterrupt) as error:
            failed.append(f"{number} {targets(originals)[number % len(targets(originals))]}: {error!r}")
        shutil.rmtree(work)
    assert not failed, "\n".join(failed)
    assert min(found.values()) > NUM_MUTATIONS // 40, found  # Each outcome occurs, and not by chance.
