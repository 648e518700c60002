"""Studies as they run: what becomes of cells, kills of workers and of the driver, shared steps, hours."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from forked import Forge
from ranks import ROOT, metrics
from safetensors.torch import load_file
from tiny import make_dataset
from tiny_study import write_run

from pipeline.base.errors import UserError
from pipeline.cluster import ray_tasks
from pipeline.cluster.ray_tasks import run_here
from pipeline.cluster.status_files import RESUME
from pipeline.experiment import spec, study
from pipeline.experiment.study import Study
from pipeline.experiment.table import StudyResults, read_table
from pipeline.settings import schema
from pipeline.settings.commands.study import StudyConfig
from pipeline.settings.run import RunConfig

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
        config = schema.load(RunConfig, file, overrides)
        begun.append((command, config.name))
        (code,) = (run := forge.start(1, overrides_of(schema.to_dict(config)))).wait()
        output.write(run.said().encode())
        return code

    monkeypatch.setattr(spec, "start_command", start)
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
        patch.setattr(ray_tasks, "RETRY_PAUSES", (0.0,))
        yield from run_here(*arguments)


def same_tensors(first: Path, second: Path) -> bool:
    """Whether two files of weights have the same tensors, bit for bit. (Their metadata name the runs.)"""
    tensors = [load_file(path) for path in (first, second)]
    return tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0]
    )


def by_name(results: StudyResults | None) -> dict[str, Any]:
    return {cell.name: cell for cell in results.cells}


def test_lengths_that_share_their_first_steps_equal_runs_of_their_own(
    base: Path, started: Started, forge: Forge
) -> None:
    scaling = ["models=[{name: slim}]", "lengths=[6 steps,12 steps]", "cooldown=0.5"]
    results = study.run(make(base, "shared", "scaling", *scaling), no_pause)
    folder = base.parent / "runs" / "shared"
    assert started == [
        ("pretrain", "slim-trunk-seed0"),
        ("pretrain", "slim-6_steps-seed0"),
        ("pretrain", "slim-trunk-seed0"),
        ("pretrain", "slim-12_steps-seed0"),
    ]
    log = (folder / "slim-12_steps-seed0" / "log.txt").read_text()
    assert "step-00000006 at step 6 of 12" in log
    assert "slim-6_steps-seed0" not in log
    assert [cell.images_seen for cell in by_name(results).values()] == [6 * 24, 12 * 24]
    # The same run by itself, from its first step.
    config = yaml.safe_load((folder / "slim-12_steps-seed0" / "config.yaml").read_text())
    assert forge.start(1, overrides_of(config, name="alone")).wait() == [0]
    assert "resumed" not in (folder / "alone" / "log.txt").read_text()
    weights = [
        folder / name / "checkpoints" / "step-00000012" / "model.safetensors"
        for name in ("alone", "slim-12_steps-seed0")
    ]
    assert same_tensors(*weights)
    # A longer one is added later, and only what is new is trained.
    del started[:]
    study.run(
        make(base, "shared", "scaling", *scaling[:1], "lengths=[6 steps,12 steps,16 steps]", "cooldown=0.5"), no_pause
    )
    assert started == [("pretrain", "slim-trunk-seed0"), ("pretrain", "slim-16_steps-seed0")]


def test_labels_compare_weights_with_a_new_model_at_equal_compute(base: Path, started: Started, forge: Forge) -> None:
    """The weights are of a run of 10 steps of the same model, so a new one trains 10 steps more."""
    settings = overrides_of(schema.to_dict(schema.load(RunConfig, base, ["name=earlier", "train.length=10 steps"])))
    assert forge.start(1, [*settings, f"out={base.parent}"]).wait() == [0]
    architecture = [s for s in settings if s.startswith("model.") and s.partition("=")[0] != "model.image_size"]
    models = (
        f"models=[{{name: scratch, settings: {json.dumps(architecture)}}},{{name: early, weights:"
        f" {base.parent / 'earlier'}}}]"
    )
    own = base.with_name("tune.yaml")  # Its init.weights are of no model.
    given = [f"run={own}", f"out={base.parent / 'runs'}", "name=few", "question=labels", models, "data_sizes=[50]"]
    config = schema.load(StudyConfig, None, given)
    assert {cell.name: cell.facts["steps"] for cell in Study(config).cells} == {
        "scratch-n50-seed0": 13,
        "early-n50-seed0": 3,
    }
    study.run(schema.load(StudyConfig, None, [*given, "cell=early-n50-seed0"]), no_pause)
    assert started == [("finetune", "early-n50-seed0")]
    results = by_name(study.run(schema.load(StudyConfig, None, [*given, "report=true"]), no_pause))
    assert {name: cell.state for name, cell in results.items()} == {
        "scratch-n50-seed0": "not run",
        "early-n50-seed0": "done",
    }
    text = (base.parent / "runs" / "few" / "report.md").read_text()
    assert f"early: {base.parent / 'earlier'}, pre-trained for" in text
    assert "Models without weights train for" in text


def test_ways_to_continue_weights_are_compared_with_the_probe_before_the_first_step(
    base: Path, dataset: Path, started: Started, forge: Forge
) -> None:
    settings = overrides_of(schema.to_dict(schema.load(RunConfig, base, ["name=earlier"])))
    assert forge.start(1, [*settings, f"out={base.parent}"]).wait() == [0]
    old = make_dataset(base.parent / "old", {"train": 60, "val": 30})
    architecture = [s for s in settings if s.startswith("model.") and s.partition("=")[0] != "model.image_size"]
    weights = f"weights: {base.parent / 'earlier'}"
    models = (
        f"models=[{{name: all, {weights}}}, {{name: decay, {weights}, settings: [optimizer.layer_decay=0.5]}},"
        f" {{name: scratch, settings: {json.dumps(architecture)}}}]"
    )
    probe = ["probe.every=100%", f"probe.data={dataset},{old}", "probe.shots=[2]", "probe.neighbours=5"]
    given = [f"run={base.with_name('tune.yaml')}", f"out={base.parent / 'runs'}", "name=ways", "question=continue"]
    config = schema.load(StudyConfig, None, [*given, models, "score=5nn", f"settings={json.dumps(probe)}"])
    results = study.run(config, no_pause)
    assert [name for _, name in started] == ["all-seed0", "decay-seed0", "scratch-seed0"]
    folder = base.parent / "runs" / "ways"
    for cell in results.cells:
        for data, name in (("tiny", "5nn"), ("old", "old_5nn")):
            at = metrics(folder / cell.name, f"{data}_5nn")
            first = at[0] if cell.group != "scratch" else None
            assert (cell.scores.get(f"start:{name}"), cell.scores[name]) == (first, at[max(at)])
    assert len({cell.steps for cell in results.cells}) == 1, "also the new model"
    text = (folder / "report.md").read_text()
    assert text.index("| untouched weights |") < text.index("| scratch | 1 |")


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
        UserError, match=r"1 of 6 runs failed, such as bad-seed0: .*/dev/null/x.*The same command tries them again"
    ):
        study.run(config, no_pause)
    rows = {row.name: row for row in read_table(base.parent / "runs" / "mixed")}
    good, tuned, wild, bad = (rows[name] for name in ("good-seed0", "good-seed0-tuned", "wild-seed0", "bad-seed0"))
    assert (good.state, wild.state, bad.state) == ("done", "diverged", "failed")
    assert (set(good.scores), set(tuned.scores), tuned.parent) == ({"top1"}, {"top1"}, "good-seed0")
    assert tuned.num_test["top1"] == 37
    assert good.hours
    assert "max_skipped_steps" in wild.reason
    assert "bad-seed0.txt" in bad.reason
    assert ("finetune", "good-seed0-tuned") in started
    said = capsys.readouterr().out
    assert said.index("output/good-seed0-tuned.txt") < said.index("good-seed0-tuned: "), "where a run is to be seen"
    assert said.index("6 runs, 0 of them done") < said.index("output/")
    # Again: what is done is not run again, nor what diverged; what failed is.
    del started[:]
    with pytest.raises(UserError):
        study.run(config, no_pause)
    assert {name for _, name in started} == {"bad-seed0"}
    # The report alone runs nothing, and still knows why a cell failed.
    del started[:]
    with pytest.raises(UserError, match=r"1 of 6 runs failed, such as bad-seed0: .*/dev/null/x"):
        study.run(replace(config, report=True), no_pause)
    assert started == []


def test_a_cell_whose_processes_die_is_tried_again_and_one_that_is_asked_to_stop_ends_the_study(
    base: Path, started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., int] = spec.start_command
    codes = iter([-signal.SIGKILL, None, RESUME, -9, -9])

    def start(*arguments: Any, **more: Any) -> int:
        code = next(codes, None)
        return real(*arguments, **more) if code is None else code

    monkeypatch.setattr(spec, "start_command", start)
    config = make(base, "tried", "ablation", "models=[{name: one},{name: two,settings: [model.width=32]}]")
    with pytest.raises(SystemExit) as stopped:
        study.run(config, no_pause)
    assert stopped.value.code == RESUME
    output = capsys.readouterr()
    assert "failed (exit code -9)" in output.err
    assert "retries so far: 1" in output.err
    assert "two-seed0 was asked to stop: the same command continues (exit code 75)" in output.err
    assert [name for _, name in started] == ["one-seed0"]
    # Two deaths are one too many with one pause: the cell failed.
    with pytest.raises(UserError, match=r"1 of 2 runs failed, such as two-seed0: .*exit code -9"):
        study.run(config, no_pause)
    assert by_name(study.run(config, no_pause))["two-seed0"].state == "done"


def test_a_common_part_that_diverges_is_told_in_the_report(base: Path, started: Started) -> None:
    """The cell itself has no run then."""
    models = "models=[{name: good},{name: wild,settings: [optimizer.lr=1e18]}]"
    config = make(base, "trunks", "scaling", models, "lengths=[8 steps]", "cooldown=0.25")
    results = by_name(study.run(config, no_pause))
    assert results["good-8_steps-seed0"].state == "done"
    assert results["wild-8_steps-seed0"].state == "diverged"
    assert "max_skipped_steps" in results["wild-8_steps-seed0"].reason
    assert not (base.parent / "runs" / "trunks" / "wild-8_steps-seed0" / "log.txt").exists()


# -------------------------------------------------------------------- the command itself
@contextlib.contextmanager
def command(*arguments: str, said: Path) -> Iterator[psutil.Popen]:
    """launch/study.py, in a session of its own; killed at the end with all that it started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with said.open("ab") as output:
        process = psutil.Popen(
            [sys.executable, str(ROOT / "launch" / "study.py"), *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
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
        f"run={base}",
        f"out={tmp_path / 'runs'}",
        "name=two",
        "question=data_size",
        "on=ray",
        "threads=1",
        "mlflow=none",
        "models=[{name: wide,settings: [model.width=32]}]",
        "data_sizes=[60,150]",
    ]
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
        wait_for(lambda: "[1 of 2 runs" in said.read_text(), "a cell", said)
        first.kill()
        first.wait(timeout=300)
        with contextlib.suppress(psutil.NoSuchProcess):
            halted.resume()
    with command(*settings, said=said) as second:
        assert second.wait(timeout=500) == 0, said.read_text()
    results = read_table(folder)
    assert [cell.state for cell in results] == ["done"] * 2
    assert "2 runs, 1 of them done" in said.read_text()
    assert not (folder / "progress.json").exists()
    # The same runs in a row, without Ray.
    configs = [yaml.safe_load((Path(cell.folder) / "config.yaml").read_text()) for cell in results]
    undisturbed = [overrides_of(config, out=str(tmp_path / "alone")) for config in configs]
    assert forge.start(1, *undisturbed).wait() == [0]
    for cell in results:
        files = [
            found / "checkpoints" / "step-00000008" / "model.safetensors"
            for found in (Path(cell.folder), tmp_path / "alone" / cell.name)
        ]
        assert same_tensors(*files), cell.name
        alone = json.loads((tmp_path / "alone" / cell.name / "scores.json").read_text())
        assert cell.scores["top1"] == alone["top1"]
