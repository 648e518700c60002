"""What goes wrong around a run: broken images, full disks, files that do not fit. Nothing is lost, and one line says
it.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faulty_s3
import numpy as np
import pytest
from forked import Forge, ForkedRun, train
from polling import until
from ranks import metrics, settings

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.checkpoint.store import Checkpoints, read_state
from pipeline.cluster.status_files import RESUME, Status, read_failures, read_settings, read_status
from pipeline.cluster.stop import Stop
from pipeline.data.dataset.manifest import open_dataset
from pipeline.experiment.spec import RunSpec, row_of
from pipeline.monitor import tracking
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.page_folder import PageFolder
from pipeline.monitor.run_page import RunFacts
from pipeline.process.console import Console
from pipeline.review import samples
from pipeline.settings import schema
from pipeline.settings.commands.operate import SamplesConfig
from pipeline.settings.run import RunConfig
from pipeline.train import bookkeeping, setup
from pipeline.train.bookkeeping import TrainingRun
from pipeline.train.zero import engine


def load(overrides: list[str]) -> RunConfig:
    return schema.load(RunConfig, None, overrides)


def spoil(dataset: Path, rows: list[int], name: str = "train") -> None:
    """Overwrite the image bytes of samples of a split, as a bad disk would."""
    split = open_dataset(dataset).split(name)
    for row in rows:
        with open(split.shard_paths[int(split.shard_of(np.array(row)))], "r+b") as file:
            file.seek(split.place_of(row)[0])
            file.write(b"\0" * split.place_of(row)[1])


def test_a_few_bad_images_are_counted_and_named_and_too_many_stop_the_run(
    forge: Forge, dataset: Path, tmp_path: Path
) -> None:
    """They count once for all starts, ranks and epochs: in the checkpoint, the metrics and the
    budget.
    """
    data = tmp_path / "data"
    shutil.copytree(dataset, data)
    spoil(data, [3, 77])

    def of(name: str, steps: int, share: float = 0.02) -> list[str]:
        length = ("schedule.decay=constant", f"train.length={steps} steps")
        return settings(data, tmp_path, name, *length, f"data.max_bad_share={share}")

    forge.start(2, of("whole", 13), of("patient", 6)).finish()
    said = forge.start(1, of("patient", 13)).finish()
    counted = metrics(tmp_path / "patient", "bad_samples")
    assert counted == metrics(tmp_path / "whole", "bad_samples")
    assert (counted[1], counted[13]) == (0, 2)
    for name in ("whole", "patient"):
        state = read_state(tmp_path / name / "checkpoints" / "step-00000012")
        assert [row for row, _ in state.counts.unreadable] == [3, 77]

    # The images are readable again, and yet the run has left some out.
    shutil.rmtree(data)
    shutil.copytree(dataset, data)
    said = forge.start(1, of("patient", 14)).finish()
    assert "left out train00003" in said
    assert "left out train00077" in said
    run = forge.start(1, of("patient", 15, share=0.001))
    assert run.wait() == [2], run.said()
    assert "error: 2 samples of 150 cannot be read, more than data.max_bad_share = 0.001 allows (1)" in run.said()

    spoil(data, [3, 77])
    run = forge.start(1, of("strict", 12, share=0.001))
    assert run.wait() == [2], run.said()
    assert "data.max_bad_share = 0.001" in only_error(run, 1)

    # Held-out images have the same budget: a score on what is left would say nothing.
    spoil(data, list(range(10)), "val")
    run = forge.start(1, settings(data, tmp_path, "scored", "train.length=2 epochs", "data.max_bad_share=0.02"))
    assert run.wait() == [2], run.said()
    error = only_error(run, 1)
    assert "cannot be read, more than data.max_bad_share = 0.02 allows" in error
    assert "the first is val0000" in error
    assert not (tmp_path / "scored/scores.json").exists()


def test_a_head_that_is_kept_keeps_its_classes(dataset: Path, tmp_path: Path) -> None:
    """Only their number was compared: a run went on with the same classes in another order, each in place of another
    one.
    """

    def begin(*classes: str) -> str:
        models.save(
            models.create("ViT-mu/8", 16, 4), tmp_path / "four.pt", {"classes": list(classes)} if classes else {}
        )
        fresh = [text for text in settings(dataset, tmp_path, "tuned") if not text.startswith("model.")]
        given = [f"init.weights={tmp_path / 'four.pt'}", "init.new_head=false", "model.image_size=16"]
        config = load([*fresh, *given])
        (tmp_path / "log.txt").write_text("")
        setup.initial_model(config, open_dataset(dataset), None, Console(tmp_path / "log.txt", True))
        return (tmp_path / "log.txt").read_text()

    assert "classes" not in begin("class0", "class1", "class2", "class3")
    assert "classes by number: 1 of " in (said := begin("class0", "cat", "class2", "class3"))
    assert "such as 'class1' for 'cat'" in said
    assert "four.pt" in (said := begin())
    assert "0 is 'class0', 3 is 'class3'" in said  # The order that is assumed for weights without names.
    with pytest.raises(UserError, match=r"class 1 of .* is 'class1', which is class 2 of .*init.new_head=true"):
        begin("class0", "class2", "class1", "class3")


def only_error(run: ForkedRun, num_ranks: int) -> str:
    """The one line that all ranks together say of an error, without what precedes it."""
    said = [line for rank in range(num_ranks) for line in run.said(rank).splitlines()]
    (line,) = [line for line in said if re.search(r"rror|Traceback|^  File", line)]
    return line.removeprefix("error: ")


def test_a_full_disk_leaves_the_last_checkpoint_and_one_line(
    forge: Forge, dataset: Path, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("1500k")
    more = ["train.length=8 steps", "checkpoint.every=1 steps", "checkpoint.keep=8", "evaluate.every=8 steps"]
    run = forge.start(1, settings(dataset, disk, "full", *more))
    assert run.wait() == [2], run.said()
    assert "no space left" in only_error(run, 1).lower()
    names = sorted(path.name for path in (disk / "full" / "checkpoints").iterdir())
    assert names[0] == "latest"
    assert all(name.startswith("step-") for name in names[1:]), "nothing half-written stays"
    assert models.load(disk / "full").config.num_classes == 4


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_disk_without_a_free_byte_ends_all_ranks_in_one_line(
    num_ranks: int, forge: Forge, dataset: Path, small_disk: Callable[[str], Path]
) -> None:
    """status.json, which could not be replaced, went on saying that the run is running; the other rank printed a
    traceback.
    """
    disk = small_disk("1500k")
    more = ["train.length=100000 steps", "evaluate.every=100%", "checkpoint.every=100%"]
    run = forge.start(num_ranks, settings(dataset, disk, "full", *more))
    until(lambda: "step 3/" in run.said())
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    assert run.wait() == [2] * num_ranks, run.said()
    line = only_error(run, num_ranks)
    assert str(disk / "full") in line
    assert read_status(disk / "full") == Status("refused", 0, 2, line)


def train_until_a_disk_of_rank_1_fails(argument: tuple[int, list[str]]) -> None:
    """In a rank: the other one waits for it in a collective call."""
    number, overrides = argument
    record = TrainingRun.record_step

    def fails(run: TrainingRun, *of: Any) -> None:
        if run.ranks.rank == 1 and run.progress.step == 3:
            raise OSError(number, os.strerror(number), "/local/cache")
        record(run, *of)

    TrainingRun.record_step = fails  # type: ignore[method-assign]
    train([overrides])


@pytest.mark.parametrize(("number", "code", "how"), [(errno.ENOSPC, 2, "refused"), (errno.EIO, 1, "failed")])
def test_a_disk_that_fails_one_rank_ends_all_with_its_line(
    number: int, code: int, how: str, forge: Forge, dataset: Path, tmp_path: Path
) -> None:
    """Rank 0 said that it lost a rank, and that a supervisor starts it again, which it does not after code 2."""
    argument = [number, settings(dataset, tmp_path, "lost", "evaluate.every=100%", "checkpoint.every=2 steps")]
    run = forge.start_work(2, "test_train_faults:train_until_a_disk_of_rank_1_fails", argument)
    assert run.wait() == [code, code], run.said(0) + run.said(1)
    line, folder = only_error(run, 2), tmp_path / "lost"
    assert line.startswith("rank 1 on ")
    assert "/local/cache" in line
    assert read_status(folder) == Status(how, 0, code, line)  # type: ignore[arg-type]
    assert {rank: f.lost_others for rank, f in read_failures(folder).items()} == {1: False}
    end = PageFolder(folder).read_facts().end
    assert (end.status, line in end.tags["outcome"]) == ("FAILED", True)


def train_and_count_stats(overrides: list[str]) -> None:
    """In a rank: prints how many tars it asked for."""
    stat, asked = os.stat, []

    def count(path: Any, *of: Any, **named: Any) -> os.stat_result:
        if str(path).endswith(".tar"):
            asked.append(path)
        return stat(path, *of, **named)

    os.stat = count  # type: ignore[assignment]
    try:
        train([overrides])
    finally:
        print(f"asked for {len(asked)} tars", flush=True)


@pytest.mark.parametrize("damage", ["none", "gone", "cut"])
def test_ranks_share_the_check_of_tars_and_agree(damage: str, forge: Forge, dataset: Path, tmp_path: Path) -> None:
    data = shutil.copytree(dataset, tmp_path / "data")
    tars = sorted(data.glob("*.tar"))
    assert len(tars) == 5
    for tar in tars[1:3]:  # One for each rank.
        if damage == "gone":
            tar.unlink()
        elif damage == "cut":
            os.truncate(tar, 100)
    run = forge.start_work(2, "test_train_faults:train_and_count_stats", settings(data, tmp_path, "short"))
    assert run.wait() == [0 if damage == "none" else 2] * 2, run.said(0) + run.said(1)
    asked = [int(re.findall(r"asked for (\d+) tars", run.said(rank))[0]) for rank in (0, 1)]
    assert sorted(asked) == [2, 3], "four of train, one of val"
    if damage != "none":
        line = only_error(run, 2)
        assert all(str(tar) in line for tar in tars[1:3])


@pytest.mark.parametrize(("split", "column", "processes"), [("train", "sizes", 1), ("val", "labels", 0)])
def test_a_damaged_index_ends_a_run_in_one_line_and_a_restart_mends_it(
    split: str, column: str, processes: int, forge: Forge, dataset: Path, tmp_path: Path
) -> None:
    data = shutil.copytree(dataset, tmp_path / "data")
    (file,) = data.glob(f"index/{split}-*/{column}")
    whole = file.read_bytes()
    file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    arguments = settings(data, tmp_path, "damaged", f"data.processes={processes}")
    run = forge.start(2, arguments)
    assert run.wait() == [1, 1], run.said(0) + run.said(1)
    line = only_error(run, 2)
    assert str(file) in line
    assert read_status(tmp_path / "damaged").code == 1
    run = forge.start(2, arguments)
    assert run.wait() == [0, 0], run.said(0) + run.said(1)
    assert file.read_bytes() == whole


def train_and_be_asked_while_ranks_connect(argument: tuple[str, int, list[str]]) -> None:
    """In a rank: this one gets SIGTERM right before the ranks make their process group, or use it for the first
    time.
    """
    place, asked, overrides = argument
    owner = {"init_distributed": engine.deepspeed, "connect": Stop}[place]
    function = getattr(owner, place)

    def ask_first(*of: Any, **named: Any) -> Any:
        if int(os.environ["RANK"]) == asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*of, **named)

    setattr(owner, place, ask_first)
    train([overrides])


@pytest.mark.parametrize(("place", "asked"), [("init_distributed", 0), ("init_distributed", 1), ("connect", 1)])
def test_ranks_that_connect_leave_with_the_one_that_is_asked(
    place: str, asked: int, forge: Forge, dataset: Path, tmp_path: Path
) -> None:
    """The other one met the end of the first, with code 1 and torch's traceback, before it could be told."""
    argument = [place, asked, settings(dataset, tmp_path, "asked")]
    run = forge.start_work(2, "test_train_faults:train_and_be_asked_while_ranks_connect", argument)
    assert run.wait() == [RESUME, RESUME], run.said(0) + run.said(1)
    said = [line for rank in (0, 1) for line in run.said(rank).splitlines()]
    assert len([line for line in said if line.startswith("stopped by SIGTERM")]) == 1
    assert not re.search("rror|Traceback", "".join(said))
    assert read_status(tmp_path / "asked") == Status("stopped", 0, RESUME, "SIGTERM, before training began")


def train_until_its_settings_are_written(overrides: list[str]) -> None:
    """In a rank: a run that is killed right after that."""
    write = bookkeeping.write_settings

    def write_and_die(config: RunConfig, folder: Path) -> None:
        write(config, folder)
        os.kill(os.getpid(), signal.SIGKILL)

    bookkeeping.write_settings = write_and_die
    train([overrides])


def test_a_finished_run_whose_longer_start_is_killed_is_not_taken_for_finished(
    forge: Forge, dataset: Path, tmp_path: Path
) -> None:
    """A grid or a study took the scores of its six steps for those of twelve: status.json was of the start before."""
    short = settings(dataset, tmp_path, "grown", "schedule.decay=constant")
    longer = [*short, "train.length=12 steps"]
    run = RunSpec("grown", "pretrain", "", [], load(longer))
    forge.start(1, short).finish()
    killed = forge.start_work(1, "test_train_faults:train_until_its_settings_are_written", longer)
    assert killed.wait() == [-signal.SIGKILL], killed.said()
    assert read_settings(run.folder).train.length == run.config.train.length
    assert row_of(run).state == "not run"
    forge.start(1, longer).finish()
    assert row_of(run).state == "done"


def test_a_start_compiles_nothing_and_leaves_no_shared_memory(
    forge: Forge, tmp_path: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed would compile a collective on a CPU, behind a lock that outlives a compiler that died, and name its
    buffers.
    """
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    run = forge.start(2, settings(dataset, tmp_path, "ready", "train.length=1 steps", "schedule.warmup=0 steps"))
    run.finish()
    assert not (tmp_path / "extensions").exists()
    assert not list(Path("/dev/shm").glob(f"deepspeed_*_{run.port}_*"))


def test_a_run_keeps_its_checkpoints_in_a_bucket(
    forge: Forge, dataset: Path, tmp_path: Path, s3: tuple[faulty_s3.S3, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lives; the best and the newest stay, and what was trained is known from there."""
    more = [
        f"checkpoint.folder={s3[1]}/all",
        "checkpoint.best=val_loss",
        "checkpoint.keep=1",
        "checkpoint.keep_every=1 steps",
    ]
    lives = [settings(dataset, tmp_path, "far", *more, f"train.length={steps} steps") for steps in (4, 6)]
    lives[1][-2] = "checkpoint.keep_every=0 steps"
    assert "resumed from s3://" in forge.start(1, *lives).finish()
    assert not (tmp_path / "far" / "checkpoints").exists()
    checkpoints = Checkpoints(faulty_s3.bucket_path(f"{s3[1]}/all/far"))
    # 1 to 4 were to be kept; the best of 3, 4 and 6 is 6.
    assert [path.name[-1] for path in checkpoints.candidates()] == ["6", "4", "3", "2", "1"]
    kept = checkpoints.kept()
    assert (kept.best, kept.metric) == ("step-00000006", "val_loss")
    samples.run(schema.load(SamplesConfig, None, [f"run={tmp_path / 'far'}", "step=1"]))
    assert "(the newest checkpoint is of step 6)" in capsys.readouterr().err


def train_and_send_often(overrides: list[str]) -> None:
    """In a rank: a run whose sender looks each half second for what to send, not each half minute, for which two ranks
    would train on.
    """
    tracking.ExportTiming = partial(ExportTiming, poll=0.5)  # type: ignore[misc]
    train([overrides])


def points(store: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of every point of a metric in MLflow's database."""
    # Not read-only: a run that was killed while it wrote has left a journal, which the next reader has to apply.
    with contextlib.closing(sqlite3.connect(f"file:{store}?mode=rw", uri=True, timeout=30)) as database:
        return database.execute(
            "SELECT step, value FROM metrics WHERE key = ? ORDER BY step", [RunFacts("", "").sent_name(name)]
        ).fetchall()


def test_a_killed_run_has_one_point_a_step_in_mlflow(
    forge: Forge, dataset: Path, database: Path, tmp_path: Path
) -> None:
    """Steps after the last checkpoint run again, here on one rank instead of two, and are not sent again."""
    store, folder = shutil.copy(database, tmp_path / "mlflow.db"), tmp_path / "run"
    shared = ["track.enabled=true", "schedule.decay=constant", "evaluate.every=100%"]

    def newest_sent() -> int:
        with contextlib.suppress(sqlite3.OperationalError, IndexError):
            return points(store, "loss")[-1][0]
        return 0

    def newest_checkpoint() -> int:
        steps = [int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")]
        return max(steps, default=0)

    def kill_once(is_so: Callable[[], bool], every: str) -> None:
        times = ["train.length=100000 steps", f"checkpoint.every={every}"]
        run = forge.start_work(
            2, "test_train_faults:train_and_send_often", settings(dataset, tmp_path, "run", *shared, *times)
        )
        until(is_so)
        run.kill()
        run.wait()

    kill_once(lambda: newest_checkpoint() > 0, "20 steps")
    before = newest_sent()
    # What this one has sent itself, so no writer of the first one is at work any more. It commits nothing, which could
    # overtake what is sent.
    kill_once(lambda: newest_sent() > max(before, newest_checkpoint()), "100%")
    sent, committed = newest_sent(), newest_checkpoint()
    forge.start(1, settings(dataset, tmp_path, "run", *shared, f"train.length={sent + 5} steps")).finish()
    told = (folder / "log.txt").read_text()
    resumed = int(told.rpartition("resumed from ")[2].partition("at step ")[2].partition(" of ")[0].replace(",", ""))
    assert committed <= resumed
    assert f"after step {resumed:,}, from which the run continues" in told
    for name in ("loss", "grad_norm", "images_per_second"):
        found = points(store, name)
        # A kill between a request and the note that it was made: its points, at most 500 numbers, are there twice.
        assert sorted({step for step, _ in found}) == list(range(1, sent + 6))
        assert len(found) - (sent + 5) <= 100
        if name == "loss":
            assert dict(found) == pytest.approx(metrics(folder, name), rel=1e-3)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, sent + 6), sent + 5]  # The last is the evaluation's.
    with contextlib.closing(sqlite3.connect(store)) as database:
        assert database.execute("SELECT count(*), min(status) FROM runs").fetchall() == [(1, "FINISHED")]
        params = dict(database.execute("SELECT key, value FROM params"))
    # The architecture as built, whatever said so.
    assert params["model.name"] == "ViT-32x2h2m64/8"
    assert (params["model.patch_size"], params["model.pool"], params["optimizer.lr"]) == ("8", "token", "0.01")
