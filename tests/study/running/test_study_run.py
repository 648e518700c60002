"""Studies as they run: what becomes of cells, kills of workers and of the driver, shared steps, hours."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from child_runs import leave_behind
from forked import Forge
from safetensors.torch import load_file
from tiny_study import write_run
from tiny_vtab import SETTINGS, prepare_tasks
from tiny_vtab import run_here as run_vtab_here

from pipeline.base import json_record
from pipeline.base.errors import UserError
from pipeline.lifecycle.run_folder import RESUME
from pipeline.ray_tasks import LostError, run_here, tasks
from pipeline.settings import schema
from pipeline.settings.commands.study import StudyConfig
from pipeline.settings.commands.transfer import VtabConfig
from pipeline.settings.run import RunConfig
from pipeline.study.results import StudyResults, read_results
from pipeline.study.running import cell_run, driver
from pipeline.study.running.cells import open_study
from pipeline.transfer import child_run, vtab
from pipeline.transfer.child_run import make_child

ROOT = Path(__file__).resolve().parents[3]
TUNE = """
name: tuned
model: {image_size: 16}
data: {path: DATA, streams: 4, window: 16, threads: 1}
augment: {eval_crop: resize}
train: {length: 3 steps, global_batch: 24, micro_batch: 24, loss: softmax}
optimizer: {name: sgd, lr: 0.1, weight_decay: 0}
schedule: {decay: cosine, warmup: 1 steps}
engine: {precision: fp32}
init: {weights: any}
track: {enabled: false, figures: false}
"""


@pytest.fixture
def base(dataset: Path, tmp_path: Path) -> Path:
    (tmp_path / "tune.yaml").write_text(TUNE.replace("DATA", str(dataset)))
    return write_run(tmp_path, dataset)


Started = list[tuple[str, str]]


@pytest.fixture
def started(forge: Forge, monkeypatch: pytest.MonkeyPatch) -> Started:
    """The commands (name, run) of cells, which run as forked ranks: their start takes a second instead of ten."""
    begun: Started = []

    def start(
        command: str, arguments: list[str], launcher: str = "", output: Any = None, environment: Any = None
    ) -> int:
        file, overrides = arguments[1], arguments[2:]
        if command == "vtab":  # Not as a process that starts Ray.
            sweep = schema.load(VtabConfig, file, overrides)
            begun.append((command, Path(sweep.weights).name))
            vtab.run(sweep, Path(sweep.out), run_vtab_here)
            return 0
        config = schema.load(RunConfig, file, overrides)
        begun.append((command, config.name))
        (code,) = (run := forge.start(1, overrides_of(schema.to_dict(config)))).wait()
        output.write(run.said().encode())
        return code

    monkeypatch.setattr(cell_run, "start_command", start)
    return begun


def make(base: Path, name: str, question: str, *settings: str) -> StudyConfig:
    return schema.load(
        StudyConfig,
        None,
        [f"run={base}", f"out={base.parent / 'runs'}", f"name={name}", f"question={question}", *settings],
    )


def overrides_of(config: dict[str, Any], **others: str) -> list[str]:
    """All settings of a run, with others of these names, for another process."""
    flat = schema.flatten(config) | others
    return [f"{n}={json.dumps(v) if isinstance(v, list) else v}" for n, v in flat.items() if v is not None]


def no_pause(*arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "RETRY_PAUSES", (0.0,))
        yield from run_here(*arguments)


def same_tensors(first: Path, second: Path) -> bool:
    """Whether two files of weights have the same tensors, bit for bit. (Their metadata name the runs.)"""
    tensors = [load_file(path) for path in (first, second)]
    return tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0]
    )


def by_name(results: StudyResults | None) -> dict[str, Any]:
    assert results
    return {cell.name: cell for cell in results.cells}


def test_lengths_that_share_their_first_steps_equal_runs_of_their_own(
    base: Path, started: Started, forge: Forge
) -> None:
    scaling = ["models=[{name: slim}]", "lengths=[6 steps,12 steps]", "cooldown=0.5"]
    results = driver.run(make(base, "shared", "scaling", *scaling), no_pause)
    folder = base.parent / "runs" / "shared"
    assert started == [
        ("pretrain", "slim-trunk-seed0"), ("pretrain", "slim-6_steps-seed0"),
        ("pretrain", "slim-trunk-seed0"), ("pretrain", "slim-12_steps-seed0"),
    ]  # fmt: skip
    log = (folder / "slim-12_steps-seed0" / "log.txt").read_text()
    assert "step-00000006 at step 6 of 12" in log
    assert "slim-6_steps-seed0" not in log
    assert [cell.images_seen for cell in by_name(results).values()] == [6 * 24, 12 * 24]
    # The same run by itself, from its first step.
    config = json.loads((folder / "slim-12_steps-seed0" / "config.json").read_text())
    assert forge.start(1, overrides_of(config, name="alone")).wait() == [0]
    assert "resumed" not in (folder / "alone" / "log.txt").read_text()
    weights = [
        folder / name / "checkpoints" / "step-00000012" / "model.safetensors"
        for name in ("alone", "slim-12_steps-seed0")
    ]
    assert same_tensors(*weights)
    # A longer one is added later, and only what is new is trained.
    del started[:]
    driver.run(
        make(base, "shared", "scaling", *scaling[:1], "lengths=[6 steps,12 steps,16 steps]", "cooldown=0.5"), no_pause
    )
    assert started == [("pretrain", "slim-trunk-seed0"), ("pretrain", "slim-16_steps-seed0")]


def test_labels_compare_weights_with_a_new_model_at_equal_compute(base: Path, started: Started, forge: Forge) -> None:
    """The weights are of a run of 10 steps of the same model, so a new one trains 10 steps more."""
    settings = overrides_of(schema.to_dict(schema.load(RunConfig, base, ["name=earlier", "train.length=10 steps"])))
    assert forge.start(1, [*settings, f"out={base.parent}"]).wait() == [0]
    architecture = [s for s in settings if s.startswith("model.") and s.partition("=")[0] != "model.image_size"]
    models = f"models=[{{name: scratch, settings: {json.dumps(architecture)}}},{{name: early, weights: {base.parent / 'earlier'}}}]"
    own = base.with_name("tune.yaml")  # Its init.weights are of no model.
    given = [f"run={own}", f"out={base.parent / 'runs'}", "name=few", "question=labels", models, "data_sizes=[50]"]
    config = schema.load(StudyConfig, None, given)
    assert {cell.name: cell.steps for cell in open_study(config).cells} == {"scratch-seed0": 13, "early-seed0": 3}
    driver.run(schema.load(StudyConfig, None, [*given, "cell=early-seed0"]), no_pause)
    assert started == [("finetune", "early-seed0")]
    results = by_name(driver.run(schema.load(StudyConfig, None, [*given, "report=true"]), no_pause))
    assert {name: cell.state for name, cell in results.items()} == {"scratch-seed0": "not run", "early-seed0": "done"}
    text = (base.parent / "runs" / "few" / "report.md").read_text()
    assert f"early starts from {base.parent / 'earlier'}, pre-trained for" in text
    assert "Models without weights train for" in text


def test_what_diverges_or_fails_is_reported_and_the_others_go_on(
    base: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    models = (
        "models=[{name: good},{name: wild,settings: [optimizer.lr=1e18]},"
        "{name: bad,settings: [data.threads=2,model.dropout=0.1,checkpoint.folder=/dev/null/x]}]"
    )
    config = make(
        base, "mixed", "ablation", models, f"finetune=[{base.with_name('tune.yaml')}]", "score=finetune:tuned"
    )
    with pytest.raises(
        UserError, match=r"1 of 3 cells failed, such as bad-seed0: .*/dev/null/x.*The same command tries them again"
    ):
        driver.run(config, no_pause)
    results = read_results(base.parent / "runs" / "mixed")
    good, wild, bad = results.cells
    assert (good.state, wild.state, bad.state) == ("done", "diverged", "failed")
    assert set(good.scores) == {"top1", "finetune:tuned"}
    assert good.num_test["finetune:tuned"] == 37
    assert good.hours
    assert "max_skipped_steps" in wild.reason
    assert "bad-seed0.txt" in bad.reason
    assert ("finetune", "good-seed0-tuned") in started
    said = capsys.readouterr().out
    assert "good-seed0: finetune:tuned" in said
    # Again: what is done is not run again, nor what diverged; what failed is.
    del started[:]
    with pytest.raises(UserError):
        driver.run(config, no_pause)
    assert {name for _, name in started} == {"bad-seed0"}
    # The report alone runs nothing, and still knows why a cell failed.
    del started[:]
    with pytest.raises(UserError, match=r"1 of 3 cells failed, such as bad-seed0: .*/dev/null/x"):
        driver.run(schema.load(StudyConfig, None, [
            f"run={base}", f"out={base.parent / 'runs'}", "name=mixed", "question=ablation", models, "report=true",
            f"finetune=[{base.with_name('tune.yaml')}]", "score=finetune:tuned",
        ]), no_pause)  # fmt: skip
    assert started == []


def test_a_cell_whose_folder_is_of_another_user_fails_and_the_others_go_on(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the study, before any cell ran. Root may read all, so the folder only seems to be forbidden."""

    def forbidden(path: Path, *_: object) -> Any:
        if Path(path).parent.name == "one-seed0":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return None if path.name == "lock" else read(path, *_)

    def start(command: str, arguments: list[str], *_: object) -> int:
        run = make_child("two-seed0", arguments[1], arguments[2:])
        return leave_behind(run, command, 0.5)

    read = json_record.read
    monkeypatch.setattr(json_record, "read", forbidden)
    monkeypatch.setattr(child_run, "holder", lambda folder: forbidden(folder / "lock"))
    monkeypatch.setattr(cell_run, "start_command", start)
    config = make(base, "foreign", "ablation", "models=[{name: one},{name: two,settings: [model.width=32]}]")
    with pytest.raises(
        UserError, match=r"1 of 2 cells failed, such as one-seed0: .*/one-seed0/lock: permission denied\."
    ):
        driver.run(config, run_here)
    assert by_name(read_results(base.parent / "runs" / "foreign"))["two-seed0"].state == "done"


def test_a_hybrid_and_a_vit_are_scored_on_vtab(base: Path, started: Started, tmp_path: Path) -> None:
    prepare_tasks(tmp_path / "tasks", ["dtd", "svhn"])
    (tmp_path / "vtab.yaml").write_text("{}")
    settings = [*SETTINGS, "protocol.image_size=32", "protocol.lr=[0.1]", f"data={tmp_path / 'tasks'}"]
    models = "models=[{name: plain},{name: hybrid,settings: [model.name=R+Ti/16,model.image_size=32]}]"
    config = make(
        base, "scored", "ablation", models, f"vtab={tmp_path / 'vtab.yaml'}", f"vtab_settings={json.dumps(settings)}", "score=vtab"
    )  # fmt: skip
    results = by_name(driver.run(config, no_pause))
    assert sorted(started) == [
        ("pretrain", "hybrid-seed0"), ("pretrain", "plain-seed0"), ("vtab", "hybrid-seed0"), ("vtab", "plain-seed0"),
    ]  # fmt: skip
    for name, cell in results.items():
        content = json.loads((base.parent / "runs" / "scored" / f"{name}-vtab" / "results.json").read_text())
        dtd, svhn = (row["accuracy"] for row in content["scores"])
        assert cell.state == "done"
        assert cell.scores["vtab"] == (dtd + svhn) / 2
    # Nothing is scored again. Of other files than the published ones, the scores are marked wherever they stand.
    del started[:]
    for sweep in (base.parent / "runs" / "scored").glob("*-vtab/results.json"):
        sweep.write_text(json.dumps({**json.loads(sweep.read_text()), "unpublished": ["svhn"]}))
    assert driver.run(config, no_pause).unpublished == ["svhn"]
    assert started == []
    text = (base.parent / "runs" / "scored" / "report.md").read_text()
    assert "than the published ones (†): SVHN." in text.partition("## ")[0]
    assert [
        text.count(shown) for shown in ("| vtab† [95 %] |", "| vtab†, % |", "mean accuracy of 2 VTAB-1k tasks†.")
    ] == [1, 1, 1]


def test_a_cell_whose_processes_die_is_tried_again_and_one_that_is_asked_to_stop_ends_the_study(
    base: Path, started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., int] = cell_run.start_command
    codes = iter([-signal.SIGKILL, None, RESUME, -9, -9])

    def start(*arguments: Any, **more: Any) -> int:
        code = next(codes, None)
        return real(*arguments, **more) if code is None else code

    monkeypatch.setattr(cell_run, "start_command", start)
    config = make(base, "tried", "ablation", "models=[{name: one},{name: two,settings: [model.width=32]}]")
    with pytest.raises(SystemExit) as stopped:
        driver.run(config, no_pause)
    assert stopped.value.code == RESUME
    output = capsys.readouterr()
    assert "failed (exit code -9)" in output.err
    assert "retries so far: 1" in output.err
    assert "two-seed0 was asked to stop: the same command continues (exit code 75)" in output.err
    assert [name for _, name in started] == ["one-seed0"]
    # Two deaths are one too many with one pause: the cell failed.
    with pytest.raises(UserError, match=r"1 of 2 cells failed, such as two-seed0: .*exit code -9"):
        driver.run(config, no_pause)
    assert by_name(driver.run(config, no_pause))["two-seed0"].state == "done"


def test_why_an_earlier_start_ended_is_not_said_of_one_that_died_without_a_word(
    base: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(base, "silent", "ablation", "models=[{name: one},{name: two,settings: [model.width=32]}]")
    folder = base.parent / "runs" / "silent" / "one-seed0"

    def start(*arguments: Any) -> int:
        if folder.exists():
            return -9
        folder.mkdir()
        (folder / "status.json").write_text('{"status": "failed", "step": 0, "code": 1, "reason": "no memory"}')
        return 1

    monkeypatch.setattr(cell_run, "start_command", start)
    with pytest.raises(UserError, match=r"2 of 2 cells failed, such as one-seed0: \S+ failed \(exit code -9\)\. See "):
        driver.run(config, no_pause)


def test_a_common_part_that_diverges_is_told_in_the_report(base: Path, started: Started) -> None:
    """The cell itself has no run then."""
    models = "models=[{name: good},{name: wild,settings: [optimizer.lr=1e18]}]"
    config = make(base, "trunks", "scaling", models, "lengths=[8 steps]", "cooldown=0.25")
    results = by_name(driver.run(config, no_pause))
    assert results["good-seed0"].state == "done"
    assert results["wild-seed0"].state == "diverged"
    assert "max_skipped_steps" in results["wild-seed0"].reason
    assert not (base.parent / "runs" / "trunks" / "wild-seed0" / "log.txt").exists()


def test_hours_leave_out_what_does_not_fit(
    base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(job: cell_run.StudyJob) -> dict[str, str]:
        return {}

    monkeypatch.setattr(driver, "run_job", slow)
    config = make(
        base,
        "limited",
        "ablation",
        "models=[{name: one},{name: two,settings: [model.width=32]}]",
        "hours=0.5",
        "tflops=1",
    )
    monkeypatch.setattr(driver, "_hours_of", lambda study, cells: 0.3 * len(cells[0].name))
    results = driver.run(config, run_here)
    assert [cell.state for cell in by_name(results).values()] == ["not run", "not run"]
    assert "2 cells left out: one-seed0, two-seed0. A larger hours=... continues." in capsys.readouterr().out
    (base.parent / "runs" / "limited" / "spent.json").write_text('{"hours": 0.6}')
    with pytest.raises(UserError, match=r"hours = 0.5 cannot hold this study: 0.6 h are spent, and 2 cells would take"):
        driver.run(config, run_here)


def test_lost_jobs_are_tried_as_often_as_there_are_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "RETRY_PAUSES", (0.0, 0.0))
    tried: list[int] = []

    def lost(job: Any) -> dict[str, str]:
        tried.append(job)
        raise LostError("gone")

    retried, failed = list[str](), list[tuple[int, str]]()
    assert list(run_here(lost, [7], retried.append, lambda *what: failed.append(what))) == []
    assert (tried, retried, failed) == ([7, 7, 7], ["gone", "gone"], [(0, "gone")])


# -------------------------------------------------------------------- the command itself
@contextlib.contextmanager
def command(*arguments: str, said: Path) -> Iterator[psutil.Popen]:
    """launch/study.py, in a session of its own; killed at the end with all that it started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with said.open("ab") as output:
        process = psutil.Popen(
            [sys.executable, str(ROOT / "launch" / "study.py"), *arguments],
            env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            family = process.children(recursive=True) if process.is_running() else []
            for one in [process, *family]:
                with contextlib.suppress(psutil.Error):
                    one.kill()


def wait_for(condition: Callable[[], Any], what: str, said: Path, seconds: float = 300) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"no {what}: {said.read_text()}"
        time.sleep(0.05)
    return found


def cells_in(driver_process: psutil.Popen, name: str = "") -> list[psutil.Process]:
    """The pre-training processes below workers of Ray. name: of one cell, as "name=..."; by default of all."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in driver_process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                is_cell = any(word.endswith("pretrain.py") for word in words) and (not name or name in words)
                if is_cell and (parent := process.parent()) and "ray::" in " ".join(parent.cmdline()):
                    found.append(process)
    return found


def test_cells_on_ray_with_a_killed_worker_and_a_killed_driver(
    own_ray: None, base: Path, forge: Forge, tmp_path: Path
) -> None:
    """The scores are those of runs that nothing disturbed."""
    said = tmp_path / "said"
    settings = [
        f"run={base}", f"out={tmp_path / 'runs'}", "name=two", "question=data_size", "on=ray", "threads=1", "mlflow=none",
        "models=[{name: wide,settings: [model.width=32]}]", "data_sizes=[60,150]",
    ]  # fmt: skip
    folder = tmp_path / "runs" / "two"
    with command(*settings, said=said) as first:
        seen = set[int]()

        def next_process(of: str = "") -> psutil.Process:
            """A cell's process that has just begun. of: "name=..." of the cell; by default of any."""
            found = wait_for(lambda: [c for c in cells_in(first, of) if c.pid not in seen], "cell", said)
            seen.update(cell.pid for cell in found)
            return found[0]

        # A worker of Ray, with the cell below it, which must not end the run by itself meanwhile.
        cell = next_process()
        name = next(word for word in cell.cmdline() if word.startswith("name="))
        cell.suspend()
        cell.parent().kill()
        wait_for(lambda: "retries so far: 1" in said.read_text(), "retry", said)
        with contextlib.suppress(psutil.NoSuchProcess):
            cell.kill()
        # One stands still, so that not all are done before the driver is killed.
        halted = next_process(name)
        halted.suspend()
        wait_for(lambda: "[1 of 2 cells" in said.read_text(), "a cell", said)
        first.kill()
        first.wait(timeout=300)
        with contextlib.suppress(psutil.NoSuchProcess):
            halted.resume()
    with command(*settings, said=said) as second:
        assert second.wait(timeout=500) == 0, said.read_text()
    results = read_results(folder)
    assert [cell.state for cell in results.cells] == ["done"] * 2
    assert "2 cells, 1 of them done" in said.read_text()
    assert not (folder / "progress.json").exists()
    # The same runs in a row, without Ray.
    configs = [json.loads((Path(cell.folder) / "config.json").read_text()) for cell in results.cells]
    undisturbed = [overrides_of(config, out=str(tmp_path / "alone")) for config in configs]
    assert forge.start(1, *undisturbed).wait() == [0]
    for cell in results.cells:
        files = [
            found / "checkpoints" / "step-00000008" / "model.safetensors"
            for found in (Path(cell.folder), tmp_path / "alone" / cell.name)
        ]
        assert same_tensors(*files), cell.name
        alone = json.loads((tmp_path / "alone" / cell.name / "scores.json").read_text())
        assert cell.scores["top1"] == alone["top1"]
