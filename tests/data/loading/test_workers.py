"""Decoding in processes gives the batches that threads give, and no process outlives its loader."""

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from polling import until
from test_loader import COUNT, LABELS, requests

from pipeline.base.errors import Interrupted, OneRankCrashError, UserError
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.loading import loader as loading
from pipeline.data.loading.loader import Batch, Loader
from pipeline.data.loading.views import Views, ViewWriter, train_views
from pipeline.data.mixture.run_data import _refuse_remote
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig, DataConfig

GROUPS = (Views(2, 24, AugmentConfig(color_jitter=0.4)), Views(3, ImageSize(8, 12), AugmentConfig(blur=0.5)))


@pytest.fixture(scope="module")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, encode: Callable[..., bytes], make_dataset: Callable[..., Dataset]
) -> Dataset:
    generator = np.random.default_rng(0)
    sides = generator.integers(20, 60, (COUNT, 2))
    files = [encode(generator.integers(0, 256, (h, w, 3), np.uint8), "JPEG") for h, w in sides]
    files[7] = b"no image"
    return make_dataset(tmp_path_factory.mktemp("workers") / "data", files, LABELS, 9)


def load(dataset: Dataset, processes: int, **more: Any) -> tuple[list[Batch], dict[int, str]]:
    """The batches of two epochs, and what could not be read."""
    found, split = [], dataset.split("train")
    numbers = np.arange(2 * len(split), dtype=np.float32).reshape(-1, 2)
    split = replace(split, index=replace(split.index, targets=numbers))
    with Loader(split, train_views(GROUPS, 3), 2, 2, 1.0, processes=processes, **more) as loader:
        for epoch in (0, 1):
            found += list(loader.batches(requests(epoch)))
        working = processes_of(loader) if processes else []
        assert len(working) == processes
    assert not any(process.is_running() for process in working)
    return found, loader.bad


def processes_of(loader: Loader) -> list[psutil.Process]:
    """Not all children of this process: other tests have some, too."""
    return [psutil.Process(worker.process) for worker in loader.processes._workers]


def is_alive(number: int) -> bool:
    """Not a process that has ended and that nobody waits for, as in a container whose first process waits for none."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("shared", [loading._SHARED_BYTES, 1])  # The least has room for the views of one sample.
def test_processes_give_the_batches_of_threads(dataset: Dataset, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_SHARED_BYTES", shared)
    expected, bad = load(dataset, 0)
    for processes in (1, 3):
        found, bad_there = load(dataset, processes)
        assert bad_there == bad
        assert list(bad) == [7]
        for one, other in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one.views, other.views, strict=True))
            assert torch.equal(one.labels, other.labels)
            for batch in (one, other):
                numbers = [[2 * row, 2 * row + 1] if row != 7 else [np.nan] * 2 for row in batch.rows]
                assert np.array_equal(batch.targets, np.array(numbers), equal_nan=True)
            assert torch.equal(one.valid, other.valid)
            assert (one.rows.tolist(), one.epochs.tolist()) == (other.rows.tolist(), other.epochs.tolist())


def test_a_killed_process_is_named(dataset: Dataset) -> None:
    with Loader(dataset.split("train"), train_views(GROUPS, 3), 2, 2, 1.0, processes=1) as loader:
        processes_of(loader)[0].kill()
        with pytest.raises(OneRankCrashError, match=r"decodes images \(data.processes\) was killed"):
            list(loader.batches(requests()))


def test_signals_to_stop_do_not_end_a_process(dataset: Dataset) -> None:
    """A launcher sends them to all processes of a rank, which ends its step first."""
    with Loader(dataset.split("train"), train_views(GROUPS, 3), 2, 2, 1.0, processes=2) as loader:
        for process in processes_of(loader):  # Also if they have not begun to run.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                process.send_signal(number)
        assert len(list(loader.batches(requests()))) == 4


def test_a_wait_for_a_process_ends_with_the_run(dataset: Dataset) -> None:
    def hang(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        signal.pause()

    writer = ViewWriter(((1, 8, 8),), hang)
    loader = Loader(dataset.split("train"), writer, 2, 2, 1.0, is_stop_wanted=lambda: True, processes=2)
    working = processes_of(loader)
    with loader, pytest.raises(Interrupted):
        list(loader.batches(requests()))
    assert not any(process.is_running() for process in working)


def test_mistakes_of_ours_are_not_swallowed(dataset: Dataset) -> None:
    """Nor is where they were made, also if the exception cannot be pickled."""

    class UnpicklableError(TypeError):
        pass

    def broken(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        raise UnpicklableError("ours")

    writer = ViewWriter(((1, 8, 8),), broken)
    with (
        Loader(dataset.split("train"), writer, 2, 2, 1.0, processes=2) as loader,
        pytest.raises(RuntimeError, match=r"(?s)in broken.*UnpicklableError: ours"),
    ):
        list(loader.batches(requests()))


def test_reading_a_shard_again_is_announced_and_counted(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank waited without a word, as in a hang, and its count stayed 0."""
    split, pread, announced = dataset.split("train"), os.pread, list[str]()
    failures = [errno.EIO]

    def fail(*place: int) -> bytes:
        if failures:
            raise OSError(failures.pop(), "failed")
        return pread(*place)

    @contextlib.contextmanager
    def waiting(what: str, seconds: float, setting: str) -> Iterator[None]:
        announced.append(what)
        yield

    monkeypatch.setattr(os, "pread", fail)  # Before the fork.
    monkeypatch.setattr(loading, "_USUAL_SECONDS", 0.0)
    monkeypatch.setattr(loading, "waiting", waiting)
    with Loader(split, train_views(GROUPS, 3), 2, 2, 1.0, processes=1) as loader:
        assert len(list(loader.batches(requests()))) == 4
    assert loader.bad.keys() == {7}
    assert split.storage.retry.retries == 1
    assert set(announced) == {"a process that decodes images"}


def test_torch_uses_no_threads_in_a_process(dataset: Dataset) -> None:
    """A fork has none of OpenMP's threads: resizing with torch (augment.resize_filter = bicubic) would wait for them
    forever.
    """

    def count(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        outs[0][:] = torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with Loader(dataset.split("train"), ViewWriter(((1, 8, 8),), count), 2, 2, 1.0, processes=1) as loader:
            (batch,) = loader.batches(requests()[:1])
    finally:
        torch.set_num_threads(before)
    assert batch.images.unique().tolist() == [1]


def test_processes_end_with_the_one_that_made_them(dataset: Dataset) -> None:
    """Also when it is killed."""
    ours, theirs = os.pipe()
    process = os.fork()
    if not process:
        loader = Loader(dataset.split("train"), train_views(GROUPS, 3), 2, 2, 1.0, processes=2)
        os.write(theirs, " ".join(str(child.pid) for child in processes_of(loader)).encode())
        signal.pause()
    found = [int(number) for number in os.read(ours, 100).split()]
    assert len(found) == 2
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    until(lambda: not any(is_alive(number) for number in found))
    os.close(ours)
    os.close(theirs)


def test_a_bucket_is_refused(dataset: Dataset) -> None:
    """Also if only the manifest is in local files."""
    split = dataset.split("train")
    remote = replace(split, shard_paths=[*split.shard_paths[:-1], "s3://a/b.tar"])
    config = DataConfig(path="a", processes=2)
    _refuse_remote(config, split)
    _refuse_remote(replace(config, processes=0), remote)
    with pytest.raises(UserError, match=r"data.processes = 2 reads local files only: leave it out for s3://a/b.tar"):
        _refuse_remote(config, remote)
