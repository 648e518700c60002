"""Decoding in processes gives the batches that threads give, and no process outlives its loader."""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from polling import until

from pipeline.base.errors import Interrupted, OneRankCrashError, UserError
from pipeline.data.dataset.manifest import Dataset
from pipeline.data.loading import workers
from pipeline.data.loading.loader import Batch, Loader
from pipeline.data.loading.views import Views, ViewWriter, train_views
from pipeline.settings import schema
from pipeline.settings.quantities import ImageSize
from pipeline.settings.run import AugmentConfig, RunConfig

COUNT = 40
GROUPS = (Views(2, 24, AugmentConfig(color_jitter=0.4)), Views(3, ImageSize(8, 12), AugmentConfig(blur=0.5)))
SMALL = (Views(2, 16, AugmentConfig()), Views(3, 8, AugmentConfig()))


@pytest.fixture(scope="module")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, encode: Callable[..., bytes], make_dataset: Callable[..., Dataset]
) -> Dataset:
    generator = np.random.default_rng(0)
    sides = generator.integers(20, 60, (COUNT, 2))
    files = [encode(generator.integers(0, 256, (h, w, 3), np.uint8), "JPEG") for h, w in sides]
    files[7] = b"no image"
    labels = [[row % 5] if row % 4 else [row % 5, 7] for row in range(COUNT)]
    return make_dataset(tmp_path_factory.mktemp("workers") / "data", files, labels, 9)


def requests(epoch: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rows = np.random.default_rng(1).permutation(COUNT)
    return [(rows[i : i + 12], np.full(len(rows[i : i + 12]), epoch)) for i in range(0, COUNT, 12)]


def load(dataset: Dataset, processes: int, **more: Any) -> tuple[list[Batch], dict[int, str]]:
    """The batches of two epochs, the second one of other views, and what could not be read."""
    writers = [train_views(groups, 3) for groups in (GROUPS, SMALL)]
    found = []
    with Loader(dataset.split("train"), writers[0], 2, 2, 1.0, processes=processes, writers=writers, **more) as loader:
        for epoch, writer in enumerate(writers):
            loader.writer = writer
            found += list(loader.batches(requests(epoch)))
        assert len(children()) == processes
    assert children() == []
    return found, loader.bad


def children() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.mark.parametrize("shared", [workers._SHARED_BYTES, 1])  # The least has room for the views of one sample.
def test_processes_give_the_batches_of_threads(dataset: Dataset, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_SHARED_BYTES", shared)
    expected, bad = load(dataset, 0)
    for processes in (1, 3):
        found, bad_there = load(dataset, processes)
        assert bad_there == bad
        assert list(bad) == [7]
        for one, other in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one.views, other.views, strict=True))
            assert torch.equal(one.labels, other.labels)
            assert torch.equal(one.valid, other.valid)
            assert (one.rows.tolist(), one.epochs.tolist()) == (other.rows.tolist(), other.epochs.tolist())


def test_a_killed_process_is_named(dataset: Dataset) -> None:
    with Loader(dataset.split("train"), train_views(GROUPS, 3), 2, 2, 1.0, processes=1) as loader:
        children()[0].kill()
        with pytest.raises(OneRankCrashError, match=r"decodes images \(data.processes\) was killed"):
            list(loader.batches(requests()))


def test_signals_to_stop_do_not_end_a_process(dataset: Dataset) -> None:
    """A launcher sends them to all processes of a rank, which ends its step first."""
    with Loader(dataset.split("train"), train_views(GROUPS, 3), 2, 2, 1.0, processes=2) as loader:
        batches = loader.batches(requests())
        next(batches)  # They have begun to work, so they ignore signals.
        for child in children():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                child.send_signal(number)
        assert len(list(batches)) == 3


def test_a_wait_for_a_process_ends_with_the_run(dataset: Dataset) -> None:
    def hang(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        signal.pause()

    writer = ViewWriter(((1, 8, 8),), hang)
    with (
        Loader(dataset.split("train"), writer, 2, 2, 1.0, is_stop_wanted=lambda: True, processes=2) as loader,
        pytest.raises(Interrupted),
    ):
        list(loader.batches(requests()))
    assert children() == []


def test_mistakes_of_ours_are_not_swallowed(dataset: Dataset) -> None:
    def broken(data: bytes, outs: Sequence[np.ndarray], epoch: int, row: int) -> None:
        raise TypeError("ours")

    writer = ViewWriter(((1, 8, 8),), broken)
    with (
        Loader(dataset.split("train"), writer, 2, 2, 1.0, processes=2) as loader,
        pytest.raises(TypeError, match="ours"),
    ):
        list(loader.batches(requests()))


def test_processes_end_with_the_one_that_made_them(dataset: Dataset) -> None:
    """Also when it is killed."""
    ours, theirs = os.pipe()
    process = os.fork()
    if not process:
        Loader(dataset.split("train"), train_views(GROUPS, 3), 2, 2, 1.0, processes=2)
        os.write(theirs, " ".join(str(child.pid) for child in children()).encode())
        signal.pause()
    found = [int(number) for number in os.read(ours, 100).split()]
    assert len(found) == 2
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    until(lambda: not any(psutil.pid_exists(number) for number in found))
    os.close(ours)
    os.close(theirs)


def test_a_bucket_is_refused() -> None:
    given = ["name=x", "model.name=ViT-S/16", "train.length=1 epochs", "data.processes=2"]
    with pytest.raises(UserError, match=r"data.processes = 2 reads local files only: leave it out for s3://a/b"):
        schema.load(RunConfig, None, [*given, "data.path=s3://a/b"]).check()
    with pytest.raises(UserError, match="leave it out for gs://c"):
        schema.load(RunConfig, None, [*given, "data.path=a", "data.mix=[{path: 'gs://c', weight: 1}]"]).check()
