"""What MLflow shows of a run beside its curves."""

import json
import math
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.base.errors import UserError
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.mlflow.connection import connect, experiment_id
from pipeline.monitor.page_folder import End, PageFolder, Start
from pipeline.monitor.run_page import DatasetFacts, RunFacts, hide_passwords
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.settings.run import TrackConfig

FAST = ExportTiming(poll=0.05, retry=(0.05,), finish=300)
DATA = DatasetFacts("photos", "/data/photos", "0123456789abcdef", "train", 900, 3, "training")


def tracked(
    out: Path, facts: RunFacts, folder: str = "run", outcome: str = "", start: int | None = None, result: str = ""
):
    """A run of ten steps, evaluated at the fifth and the last; what MLflow has of it."""
    tracker = Tracker(TrackConfig(), out, out / folder, facts, start, FAST)
    for step in range((start or 0) + 1, (start or 0) + 11):
        tracker.log(step, {"loss": 1 / step, "mfu": 0.4, "bad_samples": 0.0})
        if step % 5 == 0:
            tracker.log(step, {"val_top1": step / 10})
    tracker.finish("FINISHED", outcome=outcome, result=result)
    client = connect(default_uri(out))
    experiment = client.get_experiment_by_name("vit")
    return client, experiment, client.search_runs([experiment.experiment_id])[0]


def test_a_start_never_shows_the_end_of_the_one_before(out: Path) -> None:
    page = PageFolder(out)
    for step in (0, 10):
        page.begin("vit", RunFacts("a", "pretrain", steps=20), Start(1.0, step, []))
        assert page.read_facts().end is None
        page.end(End("FINISHED", {"outcome": "finished"}))
    assert [start.step for start in page.starts()] == [0, 10]
    page.file.write_text(page.file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match=r"run\.json.*format"):  # Not overwritten.
        page.begin("vit", RunFacts("a", "pretrain", steps=20), Start(2.0, 20))


def test_the_list_of_runs_says_what_a_run_is_and_how_far_it_came(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch/pretrain.py", "track.uri=postgresql://me:secret@host/db", "seed=1"])
    facts = RunFacts(
        "a",
        "pretrain",
        {"optimizer.lr": 0.1, "settings": "track.uri=postgresql://me:secret@host/db"},
        {"model": "ViT-S/16"},
        (DATA,),
        "What it is.",
        {"parent": "f00"},
        20,
        64,
        1e15,
    )
    client, _, run = tracked(out, facts, outcome="stopped by SIGTERM", result="**Result**: fine.")
    tags = run.data.tags
    assert tags["progress"] == "50% (10 of 20 steps)"
    assert tags["outcome"] == "stopped by SIGTERM"
    assert tags["mlflow.note.content"] == "**Result**: fine.\n\nWhat it is."
    assert tags["command"] == "python launch/pretrain.py track.uri=postgresql://me:***@host/db seed=1"
    assert "secret" not in json.dumps(run.to_dictionary())
    assert run.data.params == {"optimizer.lr": "0.1", "settings": "track.uri=postgresql://me:***@host/db"}
    assert "secret" not in (out / "run" / "run.json").read_text()
    assert sorted(run.data.metrics) == [
        "eval/val_top1",
        "health/bad_samples",
        "speed/mfu",
        "train/exaflops",
        "train/images_seen",
        "train/loss",
    ]
    assert run.data.metrics["train/images_seen"] == 640
    assert run.data.metrics["train/exaflops"] == pytest.approx(0.64)
    images = client.get_metric_history(run.info.run_id, "train/images_seen")
    assert [point.step for point in images] == list(range(1, 11)), "one point a step, also where two records have it"
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest, used.tags[0].value) == ("photos:train", DATA.digest, "training")


def test_the_description_of_an_experiment_stays_as_a_person_wrote_it(out: Path) -> None:
    client, experiment, _ = tracked(out, RunFacts("a", "pretrain", description="first", steps=30))
    client.set_experiment_tag(experiment.experiment_id, "mlflow.note.content", "ours")
    _, experiment, run = tracked(out, RunFacts("a", "pretrain", description="second", steps=30), start=10)
    assert run.data.tags["mlflow.note.content"] == "second"
    assert experiment.tags["mlflow.note.content"] == "ours"


def test_runs_that_begin_together_share_an_experiment(out: Path) -> None:
    uri = default_uri(out)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: experiment_id(connect(uri), "vit", None), range(8)))
    assert len(set(found)) == 1
    shutil.rmtree(out / "mlruns", ignore_errors=True)


HELD_OUT = replace(DATA, split="val", context="evaluation")


PRETRAINED = RunFacts("a", "pretrain", datasets=(DATA, HELD_OUT))
SWEEP = RunFacts("a", "vtab", score="vtab_mean", scored_on="VTAB-1k")


@pytest.mark.parametrize(
    ("facts", "metrics", "sent"),
    [
        (replace(PRETRAINED, score="val_top1"), {"val_top1": 0.53672, "val_loss": 1.0}, {"score": 53.67}),
        (replace(PRETRAINED, score="val_loss"), {"val_loss": 1.0}, {}),
        (replace(PRETRAINED, score="val_20nn"), {"val_20nn": 0.25}, {"score_knn": 25}),
        (replace(PRETRAINED, score="a_b_5shot_l2_10"), {"a_b_5shot_l2_10": 0.25}, {"score_linear": 25}),
        (SWEEP, {"vtab_mean": 0.712}, {"score": 71.2}),
        (RunFacts("a", "study", {"score": "20nn"}, score="best_score"), {"best_score": 0.5}, {"score_knn": 50}),
        (replace(PRETRAINED, score="val_top1"), {"val_top1": math.nan}, {}),
    ],
)
def test_scores_of_one_kind_have_one_column(facts: RunFacts, metrics: dict[str, float], sent: dict[str, float]) -> None:
    """A column sorts: a kNN of 60 % is not better than a top-1 of 50 %."""
    found = facts.as_sent(metrics)
    assert {name: value for name, value in found.items() if name.startswith("score")} == sent


@pytest.mark.parametrize(
    ("kind", "score", "words"),
    [
        ("pretrain", "other_20nn", ("kNN", "other", "20")),
        ("evaluation", "x_5shot", ("linear probe", "5", "x:val")),
    ],
)
def test_the_tag_names_the_kind_of_the_score_and_its_data(kind: str, score: str, words: tuple[str, ...]) -> None:
    facts = RunFacts("a", kind, datasets=(replace(HELD_OUT, name="x"),), score=score)
    said = facts.score_in_words(score, 0.25)
    assert all(word in said for word in ("25.00 %", *words)), said


def test_losses_of_different_objectives_are_different_metrics(out: Path) -> None:
    for objective in ("softmax", "sigmoid", "masked_mean_color"):
        facts = RunFacts(objective, "pretrain", score="val_loss", objective=objective)
        tracker = Tracker(TrackConfig(), out, out / objective, facts, None, FAST)
        tracker.log(1, {"loss": 1.0, "val_loss": 2.0, "loss_spikes": 0.0, "pets_5shot_std": 0.1})
        tracker.finish("FINISHED")
    found = connect(default_uri(out)).search_runs(["1"])
    sent = {run.info.run_name: sorted(run.data.metrics) for run in found}
    assert sent == {
        "softmax": ["eval/val_loss", "health/loss_spikes", "probe/pets_5shot_std", "train/loss"],
        "sigmoid": ["eval/val_loss_sigmoid", "health/loss_spikes", "probe/pets_5shot_std", "train/loss_sigmoid"],
        "masked_mean_color": [
            "eval/val_loss_masked_mean_color",
            "health/loss_spikes",
            "probe/pets_5shot_std",
            "train/loss_masked_mean_color",
        ],
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:p@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("x https://u:p%40@h/y and s3://k:s@b", "x https://u:***@h/y and s3://k:***@b"),
        ("postgresql://u:se/cr+et=@h/db and http://h:5000/a@b", "postgresql://u:***@h/db and http://h:5000/a@b"),
        ("postgresql://u@h/db?sslmode=require&password=p", "postgresql://u@h/db?sslmode=require&password=***"),
    ],
)
def test_passwords_are_hidden(text: str, shown: str) -> None:
    assert hide_passwords(text) == shown
