"""Set-up of a run in this process."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import Forge
from ranks import settings

from pipeline.base.errors import UserError
from pipeline.cluster.status_files import Status, read_status
from pipeline.evaluate import score_report
from pipeline.review import report as run_report
from pipeline.review.reader import from_folder
from pipeline.review.statistics import comparable
from pipeline.settings import schema
from pipeline.settings.commands.weights import ScoreConfig
from pipeline.train import setup


def test_scores_of_images_that_weights_were_trained_on_are_marked(forge: Forge, dataset: Path, tmp_path: Path) -> None:
    """By the run itself, by the one that it began with, and by a teacher; also after a restart without that run's
    folder.
    """
    base = settings(dataset, tmp_path, "base", "data.eval_split=train", "probe.every=3 steps")
    tuned = [text for text in base if not text.startswith(("model.", "name=", "train.length"))]
    tuned += ["name=tuned", f"init.weights={tmp_path / 'base'}", "model.image_size=16", "data.train_split=val"]
    forge.start(1, base, [*tuned, "train.length=3 steps"]).finish()
    (tmp_path / "base").rename(tmp_path / "moved")
    taught = settings(
        dataset,
        tmp_path,
        "taught",
        "data.train_split=val",
        "data.eval_split=train",
        "train.loss=distill_classes",
        f"objective.teacher={tmp_path / 'moved'}",
    )
    forge.start(1, [*tuned, "train.length=6 steps"], taught).finish()

    def marked(run: str, file: str) -> Any:
        return json.loads((tmp_path / run / file).read_text())["trained_by"]

    assert marked("moved", "scores.json") == marked("tuned", "scores.json") == marked("taught", "scores.json") == "base"
    assert marked("moved", "probe.json") == {}, "its probe is tested on val"
    assert marked("tuned", "probe.json") == {"val": "tuned"}
    facts = json.loads((tmp_path / "tuned/run.json").read_text())["facts"]
    assert [of["notes"].get("trained_by") for of in facts["datasets"]] == [None, "base"]
    for run, split, by in (
        ("moved", "train", "base"),
        ("moved", "val", ""),
        ("tuned", "train", "base"),
        ("tuned", "val", "tuned"),
    ):
        given = [f"weights={tmp_path / run}", f"data={dataset}", f"split={split}", "shots=0", f"out={tmp_path / 'out'}"]
        assert score_report.run(schema.load(ScoreConfig, None, given))["trained_by"] == by
        assert (f"trained on by {by}" in (tmp_path / "out/report.md").read_text()) == bool(by)


def test_a_run_of_which_most_steps_were_skipped_does_not_end_like_others(
    forge: Forge, dataset: Path, tmp_path: Path
) -> None:
    """optimizer.lr=1e6 ended "finished", with code 0 and a top-1 of 0 %."""
    broken = settings(dataset, tmp_path, "broken", "optimizer.lr=1e30", "schedule.warmup=0 steps")
    sound = settings(dataset, tmp_path, "sound", "train.length=30 steps")
    forge.start(1, broken, broken, sound).finish()  # The second start has nothing left to do, and says the same.
    status = read_status(tmp_path / "broken")
    assert (status.status, status.code) == ("finished", 0)
    assert "of 6 steps were skipped" in status.reason
    assert "on 37 images" in status.reason
    assert "37.84%" in status.reason, "14 of them are of one class"
    assert status.reason in (tmp_path / "broken/log.txt").read_text().splitlines()[-1]
    end = json.loads((tmp_path / "broken/run.json").read_text())["end"]
    assert (end["status"], end["tags"]["outcome"]) == ("FINISHED", f"finished, but {status.reason}"[:500])
    assert status.reason in end["tags"]["mlflow.note.content"]
    records = {name: from_folder(tmp_path / name) for name in ("broken", "sound")}
    assert any("broken (finished, but " in line for line in comparable(records, []))
    assert any("of 6 steps were skipped" in problem for problem in run_report.problems(records["broken"]))
    assert records["sound"].outcome == "finished"
    assert read_status(tmp_path / "sound") == Status("finished", 30, 0, "")
    told = json.loads((tmp_path / "sound/run.json").read_text())["end"]["tags"]["mlflow.note.content"]
    assert re.search(r"; val_top1 [\d.]+ % \[[\d.]+, [\d.]+\] at step 30; ", told), "its interval over images"


class Loader:
    """Knows whether it was closed."""

    is_open = False

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(self, *exception: object) -> None:
        self.is_open = False


def test_a_set_up_that_fails_ends_the_decoding_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lived until the process ended, which may go on with other runs."""
    loader = Loader()
    ranks = SimpleNamespace(device=torch.device("cpu"), on_all=lambda function: function())
    engine, init = SimpleNamespace(activation_checkpointing=False), SimpleNamespace(fit_head=False)
    start: Any = SimpleNamespace(
        config=SimpleNamespace(engine=engine, init=init),
        resumed=None,
        plan=None,
        ranks=ranks,
        stop=None,
        data=SimpleNamespace(split=None),
        model=SimpleNamespace(config=SimpleNamespace(pixels=None)),
    )

    def broken(*of: object) -> None:
        assert loader.is_open
        raise UserError("no room")

    monkeypatch.setattr(setup, "Feed", lambda *of: SimpleNamespace(loader=loader))
    monkeypatch.setattr(setup.objectives, "create", broken)
    with pytest.raises(UserError, match="no room"), contextlib.ExitStack() as undone:
        setup._build_training_on_all_ranks(start, undone)
    assert not loader.is_open
