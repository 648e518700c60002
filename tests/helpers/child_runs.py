"""Runs of an experiment that were not trained."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cluster import ray_tasks
from pipeline.cluster.status_files import write_settings
from pipeline.experiment import spec
from pipeline.experiment.spec import RunSpec, make_spec
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.run_page import RunFacts
from pipeline.monitor.tracking import Tracker


def instead_of_commands(monkeypatch: pytest.MonkeyPatch, start: Callable[[RunSpec], int]) -> None:
    """Call a function where an experiment starts the command of a run. It returns the exit code."""

    def start_command(command: str, arguments: list[str], launcher: str, output: object) -> int:
        config = make_spec("", command, arguments[1], arguments[2:]).config
        return start(RunSpec(config.name, command, arguments[1], arguments[2:], config))

    monkeypatch.setattr(spec, "start_command", start_command)
    monkeypatch.setattr(ray_tasks, "RETRY_PAUSES", (0.0,))


def leave_behind(run: RunSpec, kind: str, top1: float, diverged: bool = False) -> int:
    """Write what a run leaves behind, and send it as it sends itself; returns its exit code."""
    settings = run.config
    run.folder.mkdir(parents=True, exist_ok=True)
    status = {"status": "diverged" if diverged else "finished", "step": 12, "code": 0, "reason": "the loss is nan."}
    (run.folder / "status.json").write_text(json.dumps(status))
    write_settings(settings, run.folder)
    (run.folder / "scores.json").write_text(json.dumps({"top1": top1, "top5": 1.0, "loss": 0.5, "num_samples": 12}))
    if settings.track.enabled:
        parent = settings.track.parent_run
        tags = {"mlflow.parentRunId": parent} if parent else {}
        facts = RunFacts(run.name, kind, tags=tags, parents={"group": parent} if parent else {})
        tracker = Tracker(settings.track, Path(settings.out), run.folder, facts, timing=ExportTiming(finish=300))
        tracker.log(12, {"val_top1": top1})
        tracker.finish("FAILED" if diverged else "FINISHED")
    return 2 if diverged else 0
