"""Batches: the same for any number of threads; a bad sample is counted and changes no other; too many stop the run."""

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import train_view

from pipeline.architecture.pixels import RGB8
from pipeline.base.errors import UserError
from pipeline.data.dataset.manifest import Dataset, Split
from pipeline.data.loading import views
from pipeline.data.loading.decode import decode
from pipeline.data.loading.loader import Batch, Loader, normalise
from pipeline.data.loading.shard_reader import ShardReader
from pipeline.data.loading.views import ViewWriter, eval_view
from pipeline.data.storage import retry
from pipeline.settings.run import AugmentConfig

COUNT = 40
LABELS = [[row % 5] if row % 4 else [row % 5, 7] for row in range(COUNT)]


@pytest.fixture
def dataset(tmp_path: Path, encode: Callable[..., bytes], make_dataset: Callable[..., Dataset]) -> Dataset:
    generator = np.random.default_rng(0)
    sides = generator.integers(20, 60, (COUNT, 2))
    files = [encode(generator.integers(0, 256, (h, w, 3), np.uint8), "JPEG") for h, w in sides]
    return make_dataset(tmp_path / "data", files, LABELS, 9)


def requests(epoch: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rows = np.random.default_rng(1).permutation(COUNT)
    return [(rows[i : i + 12], np.full(len(rows[i : i + 12]), epoch)) for i in range(0, COUNT, 12)]


def load(split: Split, threads: int = 2, max_bad_share: float = 0.0, epoch: int = 0) -> tuple[list[Batch], Loader]:
    with Loader(split, train_view(AugmentConfig(), 3, 24), threads, 2, max_bad_share) as loader:
        return list(loader.batches(requests(epoch))), loader


def test_threads_draw_what_each_batch_of_the_objective_reads(dataset: Dataset) -> None:
    names = set[str]()

    def draw(batch: Batch) -> dict[str, torch.Tensor]:
        names.add(threading.current_thread().name)
        return {"drawn": torch.from_numpy(100 * batch.epochs + batch.rows)}

    with Loader(dataset.split("train"), train_view(AugmentConfig(), 3, 24), 2, 2, 0.0) as loader:
        batches = list(loader.batches(requests(epoch=3), draw))
    assert len(batches) == 4
    for batch in batches:
        assert batch.drawn["drawn"].tolist() == (300 + batch.rows).tolist()
    assert names
    assert all(name.startswith("decode") for name in names)


def spoil(split: Split, row: int) -> None:
    """Overwrite the bytes of a sample."""
    with open(split.shard_paths[int(split.shard_of(row))], "r+b") as file:
        file.seek(split.place_of(row)[0])
        file.write(b"\x55" * split.place_of(row)[1])


def test_ctrl_c_waits_for_no_retry(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for as long as a disk or a store failed, ten minutes at worst."""
    split = dataset.split("train")
    attempts, interrupted = list[tuple[int, int]](), list[bool]()

    def fail(file: int, size: int, offset: int) -> bytes:
        attempts.append((size, offset))
        raise OSError(errno.EIO, "failed")

    def interrupt() -> bool:
        if split.storage.retry.retries and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(os, "pread", fail)
    monkeypatch.setattr(retry, "_FIRST_PAUSE", 60.0)
    view = eval_view(AugmentConfig(), 24)
    with pytest.raises(KeyboardInterrupt), Loader(split, view, 2, 2, 0.0, is_stop_wanted=interrupt) as loader:
        list(loader.batches(requests()))
    assert len(set(attempts)) == len(attempts)  # A thread may have begun another image meanwhile.


def test_a_batch_is_its_samples(dataset: Dataset) -> None:
    split = dataset.split("train")
    batches, loader = load(split, epoch=2)
    reader = ShardReader(split)
    for batch, (rows, epochs) in zip(batches, requests(2), strict=True):
        assert batch.images.dtype == torch.uint8
        assert batch.valid.all()
        for place, row in enumerate(rows):
            expected = np.empty((24, 24, 3), np.uint8)
            views.write_train_view(decode(reader.read(row)), expected, AugmentConfig(), 3, int(epochs[place]), int(row))
            assert np.array_equal(batch.images[place].numpy(), expected)
            assert batch.labels[place].tolist() == (LABELS[row] + [-1])[:2]
    assert not loader.bad


def test_memory_is_used_again_when_nobody_holds_it(dataset: Dataset) -> None:
    split = dataset.split("train")
    rows = np.arange(8)
    epochs = np.zeros(8, np.int64)

    def places(keep: list[object], of: Callable[[torch.Tensor], object]) -> int:
        found = set()
        with Loader(split, train_view(AugmentConfig(), 3, 24), 2, 1, 0.0) as loader:
            for batch in loader.batches([(rows, epochs)] * 12):
                found.add(batch.images.data_ptr())
                keep.append(of(batch.images))
        return len(found)

    assert places([], lambda images: None) < 6
    # Everything that shares the memory keeps it alive, also without the batch and the loader.
    for of in (lambda t: t, lambda t: t.permute(0, 3, 1, 2)[2:], lambda t: t.numpy(), lambda t: t[0].numpy()[::-1]):
        kept: list[object] = []
        assert places(kept, of) == 12
        for other in kept[1:]:
            assert np.array_equal(np.asarray(kept[0]), np.asarray(other))


def test_a_flipped_bit_that_still_decodes_is_a_bad_sample(dataset: Dataset) -> None:
    """Most flipped bits of a JPEG only change its pixels; the manifest's hash detects them."""
    split = dataset.split("train")
    good, _ = load(split)
    row, at = 7, split.place_of(7)[1] // 2
    path = Path(split.shard_paths[int(split.shard_of(np.array(row)))])
    content = bytearray(path.read_bytes())
    content[split.place_of(row)[0] + at] ^= 1
    path.write_bytes(content)
    decode(
        bytes(content[split.place_of(row)[0] : split.place_of(row)[0] + split.place_of(row)[1]])
    )  # It can be decoded.
    found, loader = load(split, max_bad_share=0.05)
    assert list(loader.bad) == [row]
    assert loader.bad[row].endswith("are not those of the manifest (xxh128)")
    for a, b in zip(good, found, strict=True):
        is_bad = torch.from_numpy(a.rows == row)
        assert torch.equal(b.valid, ~is_bad)
        assert torch.equal(a.images[~is_bad], b.images[~is_bad])
        assert torch.equal(a.labels[~is_bad], b.labels[~is_bad])
        assert (b.images[is_bad] == 0).all()
        assert (b.labels[is_bad] == -1).all()
    with pytest.raises(UserError, match=r"1 sample of 40 cannot be read.*class/7: its bytes in .*xxh128"):
        load(split, max_bad_share=0.0)


def test_too_many_bad_samples_stop_the_run(dataset: Dataset) -> None:
    split = dataset.split("train")
    for row in (7, 17, 27):
        spoil(split, row)
    with Loader(split, train_view(AugmentConfig(), 3, 24), 2, 2, 0.075) as loader:
        for epoch in range(3):
            list(loader.batches(requests(epoch)))
        assert sorted(loader.bad) == [7, 17, 27], "each is counted once"
    with pytest.raises(UserError, match=r"^3 samples of 40 .*data.max_bad_share = 0.05.*class/\d*7"):
        load(split, max_bad_share=0.05)


def test_bad_samples_are_those_of_the_batches_read_so_far(dataset: Dataset) -> None:
    """Not of those decoded ahead: the count after a batch is the same at any speed, and threads do not change it
    meanwhile.
    """
    split = dataset.split("train")
    for row in range(COUNT):
        spoil(split, row)
    with Loader(split, train_view(AugmentConfig(), 3, 24), 4, 3, max_bad_share=1.0) as loader:
        seen: set[int] = set()
        for batch in loader.batches(requests()):
            time.sleep(0.01)  # The threads decode ahead.
            seen |= set(batch.rows.tolist())
            assert set(loader.bad) == seen


def test_mistakes_of_ours_are_not_swallowed(dataset: Dataset) -> None:
    def broken(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        raise TypeError("ours")

    writer = ViewWriter(((1, 24, 24),), broken)
    with Loader(dataset.split("train"), writer, 2, 2, 1.0) as loader, pytest.raises(TypeError, match="ours"):
        list(loader.batches(requests()))


def test_decoding_runs_ahead_but_not_away(dataset: Dataset) -> None:
    asked = 0

    def endless():
        nonlocal asked
        while True:
            asked += 1
            yield np.arange(4), np.zeros(4, np.int64)

    with Loader(dataset.split("train"), train_view(AugmentConfig(), 3, 24), 2, 3, 0.0) as loader:
        batches = loader.batches(endless())
        next(batches)
        assert asked == 4
        next(batches)
        assert asked == 5


def test_normalise() -> None:
    images = torch.zeros((1, 2, 3, 3), dtype=torch.uint8)
    images[0, 0, 1] = torch.tensor([0, 51, 255], dtype=torch.uint8)
    found = normalise(images, torch.device("cpu"), torch.float32, RGB8)
    assert found.shape == (1, 3, 2, 3)
    torch.testing.assert_close(found[0, :, 0, 1], torch.tensor([-1, -0.6, 1]))
    assert found[0, 0, 1, 2] == -1
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(-1, -1, -1, 3)
    values = normalise(every, torch.device("cpu"), torch.float32, RGB8)[0, 0].ravel()
    assert torch.equal(values, torch.arange(256, dtype=torch.float32) / 127.5 - 1)
    assert normalise(every, torch.device("cpu"), torch.bfloat16, RGB8).dtype == torch.bfloat16
