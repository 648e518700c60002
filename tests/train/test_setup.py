"""Set-up of a run in this process."""

import json
from pathlib import Path
from typing import Any

from forked import Forge
from ranks import settings

from pipeline.evaluate import score_report
from pipeline.settings import schema
from pipeline.settings.commands.weights import ScoreConfig


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
