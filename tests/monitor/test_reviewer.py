"""A reviewer who has only MLflow's API, and no folder, answers seven questions about a store with eighteen runs of all kinds.

Which run is best, on what data, from which parent, with which code and settings, can it be trusted, what changed since last
week, where are the weights?
"""

import hashlib
import json
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from pipeline.monitor.mlflow.sender import SenderTimeouts
from pipeline.monitor.mlflow.state import run_id_of
from pipeline.monitor.run_page import DatasetFacts, ModelFacts, RunFacts
from pipeline.monitor.tracking import Tracker, default_uri, send_report
from pipeline.settings.run import TrackConfig

pytestmark = pytest.mark.slow
FAST = SenderTimeouts(poll=0.02, retry=(0.05,), finish=300)
WEEK = 7 * 24 * 3600
ROOT = Path(__file__).resolve().parents[2]
PHOTOS = DatasetFacts(
    "photos", "/data/photos", "aaaa000011112222", "train", 9000, 10, "training", {"test_copies": "pets:test 12"}
)
HELD_OUT = DatasetFacts("photos", "/data/photos", "aaaa000011112222", "val", 900, 10, "evaluation")
PETS = DatasetFacts("pets", "/data/pets", "bbbb000011112222", "train", 3680, 37, "training")
PETS_TEST = DatasetFacts("pets", "/data/pets", "bbbb000011112222", "test", 3669, 37, "evaluation")


@dataclass
class Team:
    """Makes runs as the commands do. The store is all that the reviewer gets."""

    out: Path
    ids: dict[str, str] = field(default_factory=dict)

    def train(
        self, name: str, score: float, lr: float, parent: str = "", data: tuple[DatasetFacts, ...] = (PHOTOS, HELD_OUT),
        end: tuple[str, str] = ("FINISHED", "finished"), bad: int = 0, starts: int = 1,
    ) -> None:  # fmt: skip
        """A training run with two evaluations, its last checkpoint, and unreadable images."""
        folder, split = self.out / name, data[1].split
        model = self.checkpoint(name)
        settings = {"optimizer": {"lr": lr}, "train": {"global_batch": 64}}
        for start in range(starts):
            before = "failed at step 10: rank 3 on node-b is gone (it, or its host, was killed)" if start else ""
            facts = RunFacts(
                name, "finetune" if parent else "pretrain", {"optimizer.lr": lr, "steps": 20}, {"model": "ViT-S/16", "data": data[0].digest},
                data, f"**{name}** on {data[0].name}.", {"parent": self.ids[parent]} if parent else {}, 20, 64, 1e10, ("config.yaml",),
                f"{split}_top1", ("node-a",) if start else ("node-a", "node-b"), before,
            )  # fmt: skip
            first = 10 * start
            tracker = Tracker(
                TrackConfig(), self.out, folder, facts, first, FAST, lambda ended: [model] if ended else []
            )
            (folder / "config.yaml").write_text(yaml.safe_dump(settings))
            for step in range(first + 1, 21):
                tracker.log(step, {"loss": 2 / step, "lr": lr, "bad_samples": float(bad), "skipped_steps": 0.0})
                if step % 10 == 0:
                    tracker.log(step, {f"{split}_top1": score - (20 - step) / 100})
            warnings = f"Warnings: {bad} unreadable images." if bad else "No step was skipped, no image unreadable."
            tracker.finish(end[0], outcome=end[1], result=warnings)
        self.ids[name] = run_id_of(folder) or ""

    def checkpoint(self, name: str) -> ModelFacts:
        folder = self.out / name / "checkpoints" / "step-00000020"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(name.encode())
        return ModelFacts(20, str(folder), hashlib.sha256(name.encode()).hexdigest(), ("last",))

    def report(
        self, name: str, kind: str, metrics: dict[str, float], parent: str = "", data: DatasetFacts = HELD_OUT
    ) -> None:
        folder = self.out / name
        folder.mkdir()
        (folder / "report.md").write_text(f"# {name}")
        facts = RunFacts(
            name,
            kind,
            tags={"data": data.digest},
            datasets=(data,),
            parents={"parent": self.ids[parent]} if parent else {},
        )
        send_report(default_uri(self.out), folder, facts, metrics, [folder / "report.md"])
        self.ids[name] = run_id_of(folder) or ""


@pytest.fixture(scope="module")
def store(database: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with eighteen runs; the run folders are removed, so that only the store can answer."""
    out = tmp_path_factory.mktemp("team")
    shutil.copy(database, out / "mlflow.db")
    team, patch = Team(out), pytest.MonkeyPatch()
    patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    now = time.time
    patch.setattr(time, "time", lambda: now() - WEEK - 3600)
    team.report("stats photos", "data", {"train.samples": 9000.0}, data=PHOTOS)
    team.train("base", 0.71, 0.001, starts=2)
    for number in range(2):
        team.train(f"early-{number}", 0.5 + number / 100, 0.001)
    patch.setattr(time, "time", now)
    team.train("wider", 0.78, 0.003, bad=41)
    team.train("hot", 0.2, 0.3, end=("FAILED", "diverged after step 12: 9 steps were skipped"))
    team.train("preempted", 0.6, 0.003, end=("KILLED", "stopped by SIGTERM at step 15; the same command resumes it"))
    for number in range(3):
        team.train(f"late-{number}", 0.6 + number / 100, 0.003)
    for number in range(3):
        team.train(f"pets-{number}", 0.9 + number / 100, 0.01, "wider" if number == 2 else "base", (PETS, PETS_TEST))
    team.report("wider on photos:val", "evaluation", {"val_top1": 0.78, "val_num_samples": 900.0}, "wider")
    team.report("wider attention", "explain", {"tokens": 197.0}, "wider")
    team.report("vtab wider", "vtab", {"vtab_mean": 0.66, "tasks_scored": 19.0}, "wider")
    team.report("pets grid", "grid", {"top1": 0.92, "best_lr": 0.01}, "wider", PETS_TEST)
    team.report("stats pets", "data", {"train.samples": 3680.0}, data=PETS)
    for folder in out.iterdir():
        if folder.is_dir() and folder.name != "mlartifacts":
            shutil.rmtree(folder)
    patch.undo()
    return default_uri(out)


class Reviewer:
    """Answers from MLflow's API alone."""

    def __init__(self, uri: str) -> None:
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=uri)
        self.experiment = self.client.get_experiment_by_name("vit").experiment_id

    def runs(self, query: str = "", order: str = "attributes.start_time ASC") -> list:
        return list(self.client.search_runs([self.experiment], query, order_by=[order]))

    def best(self, dataset: str, metric: str) -> object:
        """The run with the highest score of those that were evaluated on one data set."""
        found = self.runs(
            f"dataset.digest = '{dataset}' AND tags.outcome = 'finished' AND metrics.`{metric}` > 0",
            f"metrics.`{metric}` DESC",
        )
        return next(run for run in found if run.data.tags["kind"] in ("pretrain", "finetune"))


@pytest.fixture(scope="module")
def reviewer(store: str) -> Reviewer:
    return Reviewer(store)


def test_there_are_runs_of_all_kinds(reviewer: Reviewer) -> None:
    runs = reviewer.runs()
    assert len(runs) == 18
    assert {run.data.tags["kind"] for run in runs} == {
        "pretrain",
        "finetune",
        "evaluation",
        "explain",
        "vtab",
        "grid",
        "data",
    }
    for run in runs:
        assert run.data.tags["outcome"]
        assert run.data.tags["mlflow.user"]
        assert run.inputs.dataset_inputs, run.info.run_name


def test_which_run_is_best_and_on_what_data(reviewer: Reviewer) -> None:
    best = reviewer.best(HELD_OUT.digest, "eval/val_top1")
    assert (best.info.run_name, best.data.metrics["eval/val_top1"]) == ("wider", 0.78)
    given = {tag.value: each.dataset for each in best.inputs.dataset_inputs for tag in each.tags}
    assert (given["training"].name, given["training"].digest) == ("photos:train", PHOTOS.digest)
    assert json.loads(given["evaluation"].profile)["num_samples"] == 900
    assert json.loads(given["training"].source)["uri"] == "/data/photos"
    # Other data, another ranking.
    assert reviewer.best(PETS_TEST.digest, "eval/test_top1").info.run_name == "pets-2"


def test_from_which_parent_and_back(reviewer: Reviewer) -> None:
    child = reviewer.best(PETS_TEST.digest, "eval/test_top1")
    parent = reviewer.client.get_run(child.data.tags["parent_run_id"])
    assert parent.info.run_name == "wider"
    # Back: what was made of it, by links in its description and by a search.
    note = parent.data.tags["mlflow.note.content"].partition("**Made from this run**")[2]
    names = ["pets grid", "pets-2", "vtab wider", "wider attention", "wider on photos:val"]
    assert sorted(line.split("[")[1].split("]")[0] for line in note.strip().splitlines()) == names
    assert f"#/experiments/{reviewer.experiment}/runs/{child.info.run_id}" in note
    found = reviewer.runs(f"tags.parent_run_id = '{parent.info.run_id}'")
    assert sorted(run.info.run_name for run in found) == names


def test_with_which_code_and_settings(reviewer: Reviewer, tmp_path: Path) -> None:
    best = reviewer.best(HELD_OUT.digest, "eval/val_top1")
    revision = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    assert best.data.tags["mlflow.source.git.commit"] == revision
    assert best.data.tags["command"]
    assert best.data.params["optimizer.lr"] == "0.003"
    file = reviewer.client.download_artifacts(best.info.run_id, "config.yaml", str(tmp_path))
    assert yaml.safe_load(Path(file).read_text())["optimizer"] == {"lr": 0.003}


def test_can_it_be_trusted(reviewer: Reviewer) -> None:
    best = reviewer.best(HELD_OUT.digest, "eval/val_top1")
    assert best.data.metrics["health/bad_samples"] == 41
    assert "Warnings: 41 unreadable images." in best.data.tags["mlflow.note.content"]
    training = next(each.dataset for each in best.inputs.dataset_inputs if each.tags[0].value == "training")
    assert json.loads(training.profile)["test_copies"] == "pets:test 12"
    # How others ended, and why one was started again.
    ended = {run.info.run_name: (run.info.status, run.data.tags["outcome"].split()[0]) for run in reviewer.runs()}
    assert (ended["hot"], ended["preempted"]) == (("FAILED", "diverged"), ("KILLED", "stopped"))
    (base,) = reviewer.runs("attributes.run_name = 'base'")
    assert base.data.tags["starts"] == "2"
    assert (
        "from step 10, without node-b: the start before was failed at step 10: rank 3"
        in base.data.tags["mlflow.note.content"]
    )
    history = reviewer.client.get_metric_history(base.info.run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, 21))  # One point a step over both starts.


def test_what_changed_since_last_week(reviewer: Reviewer) -> None:
    border = int((time.time() - WEEK) * 1000)
    old = reviewer.runs(f"attributes.start_time < {border} AND tags.kind = 'pretrain'", "metrics.`eval/val_top1` DESC")
    new = reviewer.runs(f"attributes.start_time >= {border} AND tags.kind = 'pretrain'", "metrics.`eval/val_top1` DESC")
    assert (len(old), len(new)) == (3, 6)
    then, now = old[0], new[0]
    assert (then.info.run_name, now.info.run_name) == ("base", "wider")
    changed = {
        name
        for name in then.data.params.keys() | now.data.params.keys()
        if then.data.params.get(name) != now.data.params.get(name)
    }
    assert changed == {"optimizer.lr"}
    assert now.data.metrics["eval/val_top1"] - then.data.metrics["eval/val_top1"] == pytest.approx(0.07)
    assert then.data.tags["data"] == now.data.tags["data"]


def test_where_are_the_weights(reviewer: Reviewer) -> None:
    best = reviewer.best(HELD_OUT.digest, "eval/val_top1")
    (output,) = best.outputs.model_outputs
    model = reviewer.client.get_logged_model(output.model_id)
    assert model.tags["sha256"] == hashlib.sha256(b"wider").hexdigest()
    assert model.tags["path"].endswith("/wider/checkpoints/step-00000020")
    assert (output.step, model.source_run_id) == (20, best.info.run_id)
    (score,) = [metric for metric in model.metrics if metric.key == "eval/val_top1"]
    assert (score.value, score.dataset_digest) == (0.78, HELD_OUT.digest)
