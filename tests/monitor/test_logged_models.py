"""Checkpoints as logged and registered models, and weights named by their MLflow URI."""

import errno
import hashlib
import json
import math
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tracked_steps import warnings_in

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.base.metric import Metric
from pipeline.estimate import forecast
from pipeline.monitor.mlflow.mirror import RunMirror
from pipeline.monitor.mlflow.models import ModelStore
from pipeline.monitor.mlflow.reading import ReadingStore
from pipeline.monitor.mlflow.sender import SenderTimeouts
from pipeline.monitor.mlflow.state import SentModel, SyncState, run_id_of
from pipeline.monitor.mlflow.store import MlflowStore, _with_children
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.monitor.run_page import NOTE, DatasetFacts, ModelFacts, RunFacts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.process.committed import Checksum
from pipeline.review.reader import RunReader, from_mlflow
from pipeline.review.report import weights_of
from pipeline.settings import schema
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.run import TrackConfig
from pipeline.train import setup

FAST = SenderTimeouts(poll=0.05, retry=(0.05,), finish=300)
DATA = DatasetFacts("photos", "/data/photos", "0123456789abcdef", "val", 90, 3, "evaluation")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Path) -> Path:
    shutil.copy(database, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def checkpoint(out: Path, run: str, step: int) -> ModelFacts:
    """A checkpoint folder with the weights of a tiny model, which depend on the step."""
    folder = out / run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    config = models.ViTConfig(16, 1, 16, 2, 4, (8, 8), 3)
    models.save_safetensors(models.build(config, seed=step), folder / "model.safetensors", {"step": step})
    content = (folder / "model.safetensors").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    checksums = {"model.safetensors": asdict(Checksum(len(content), sha256))}
    (folder / "checksums.json").write_text(json.dumps(checksums))
    return ModelFacts(step, str(folder), sha256, ("kept",))


def tracked(
    out: Path, run: str, found: list[ModelFacts], scores: dict[int, float], start: int = 0, **settings: object
) -> None:
    facts = RunFacts(run, "pretrain", tags={"model": "ViT-Ti/16"}, datasets=(DATA,), score="val_top1")
    tracker = Tracker(TrackConfig(**settings), out, out / run, facts, start, FAST, lambda ended: found)
    for step, score in scores.items():
        tracker.log(step, {"loss": 1.0, "val_top1": score})
    tracker.finish("FINISHED")


def logged(out: Path) -> list:
    client = MlflowStore(default_uri(out)).client
    found = client.search_logged_models([client.get_experiment_by_name("vit").experiment_id])
    return sorted(found, key=lambda model: int(model.params["step"]))


def test_a_kept_checkpoint_is_a_logged_model_with_its_scores_which_load_by_its_uri(tmp_path: Path) -> None:
    found = [checkpoint(tmp_path, "a", 10), checkpoint(tmp_path, "a", 20)]
    tracked(tmp_path, "a", found, {10: 0.25, 20: 0.5})
    first, second = logged(tmp_path)
    assert (first.name, first.model_type, first.status.value) == ("a-step-00000010", "ViT-Ti/16", "READY")
    assert (first.tags["sha256"], first.tags["path"]) == (found[0].sha256, found[0].path)
    shown = {"step": "10", "model": "ViT-Ti/16", "run": "a", "path": found[0].path, "sha256": found[0].sha256}
    assert first.params == shown
    for text in (found[0].path, found[0].sha256, "Step 10 of `a`", f'load(weights_path("{first.model_uri}"))'):
        assert text in first.tags["mlflow.note.content"]
    for model, score in ((first, 0.25), (second, 0.5)):
        (metric,) = MlflowStore(default_uri(tmp_path)).client.get_logged_model(model.model_id).metrics
        assert (metric.key, metric.value, metric.dataset_digest) == ("eval/val_top1", score, DATA.digest)
    client = MlflowStore(default_uri(tmp_path)).client
    (run,) = client.search_runs([first.experiment_id])
    outputs = [(output.model_id, output.step) for output in run.outputs.model_outputs]
    assert sorted(outputs, key=lambda output: output[1]) == [(first.model_id, 10), (second.model_id, 20)]

    lines: list[str] = []
    path = weights_path(second.model_uri, default_uri(tmp_path), lines.append)
    assert lines == [f"{second.model_uri}: {found[1].path}"]
    loaded, trained = models.load(path).state_dict(), models.load(found[1].path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())
    assert weights_path(f"runs:/{run.info.run_id}", default_uri(tmp_path)) == found[1].path


def test_weights_are_looked_up_where_the_runs_of_a_folder_are_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run in another folder than runs/ was told that there is no runs/mlflow.db, though its own database had them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shared = tmp_path / "shared"
    found, empty = checkpoint(shared, "a", 10), tmp_path / "empty.db"
    shutil.copy(tmp_path / "mlflow.db", empty)
    shutil.move(tmp_path / "mlflow.db", shared)
    tracked(shared, "a", [found], {10: 0.25})
    (model,) = logged(shared)
    needed = ["name=b", "data.path=d", "train.length=1 steps", f"out={shared}", f"init.weights={model.model_uri}"]
    config, console = schema.load(PlanConfig, None, needed), SimpleNamespace(say=print)
    assert setup._find_weights(config, console).path == f"{found.path}/model.safetensors"
    assert forecast._model(config, 3, ["a", "b", "c"]).depth == 1
    with pytest.raises(UserError, match=r"there is no MLflow database .*/other/mlflow\.db"):
        weights_path(model.model_uri, out="other")
    shutil.move(shared, tmp_path / "runs")
    shutil.copytree(tmp_path / "runs" / "a", shared / "a")
    assert weights_path(model.model_uri, out="other") == found.path  # Which has no database yet.
    # Once the run has one, as at a restart and below a study that names it, the weights are still those of runs/.
    (tmp_path / "other").mkdir()
    shutil.copy(empty, tmp_path / "other/mlflow.db")
    assert weights_path(model.model_uri, out="other") == found.path
    assert weights_path(model.model_uri, default_uri(tmp_path / "other"), out="other/study") == found.path
    with pytest.raises(
        UserError, match=r"models:/m-0 is not found in MLflow at sqlite:.*other/.*, nor at sqlite:.*runs/.*"
    ):
        weights_path("models:/m-0", out="other")
    # A server is asked below a study, too, whose runs are given its database.
    shutil.move(tmp_path / "runs/mlflow.db", tmp_path / "server.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/server.db")
    assert weights_path(model.model_uri, default_uri(tmp_path / "other"), out="other/study") == found.path
    with pytest.raises(UserError, match=r"m-0 is not found in MLflow at sqlite:.*server\.db, nor at sqlite:.*other/"):
        weights_path("models:/m-0", default_uri(tmp_path / "other"), out="other/study")
    with pytest.raises(UserError, match=r"nowhere.db"):  # One that the user has set goes before it.
        weights_path(model.model_uri, default_uri(tmp_path / "nowhere.db"), out="other/study")


def test_a_checkpoint_that_was_removed_or_trained_again_is_no_model_any_more(tmp_path: Path) -> None:
    old, kept = checkpoint(tmp_path, "a", 10), checkpoint(tmp_path, "a", 20)
    tracked(tmp_path, "a", [old, kept], {10: 0.25, 20: 0.5})
    again = ModelFacts(10, old.path, "f" * 64, ("best",))  # The same step, with other weights.
    tracked(tmp_path, "a", [again, kept], {})
    assert [(model.tags["sha256"], model.tags["roles"]) for model in logged(tmp_path)] == [
        ("f" * 64, "best"), (kept.sha256, "kept"),
    ]  # fmt: skip


def test_a_run_with_more_models_than_mlflow_lists_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of over 100 checkpoints was not found, and a report from MLflow alone left out the oldest."""
    monkeypatch.setattr("mlflow.store.tracking.sqlalchemy_store.SEARCH_LOGGED_MODEL_MAX_RESULTS_DEFAULT", 2)
    found = [checkpoint(tmp_path, "a", step) for step in (10, 20, 30, 40, 50)]
    best = replace(found[0], roles=("best",))
    tracked(tmp_path, "a", [best, *found[1:]], {10: 0.5})
    store, run_id = ReadingStore(default_uri(tmp_path)), run_id_of(tmp_path / "a")
    assert [model["step"] for model in store.models_of(store.read_run(str(run_id)))] == ["10", "20", "30", "40", "50"]
    assert weights_path(f"runs:/{run_id}", default_uri(tmp_path)) == best.path
    shown, problem = weights_of(from_mlflow(store, str(run_id)), RunReader(default_uri(tmp_path)))
    assert ([model for model, _ in shown], problem) == ([best, *found[1:]], "")
    assert all(address.startswith("models:/m-") for _, address in shown)


def test_weights_that_are_not_where_the_run_wrote_them(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    found = [checkpoint(tmp_path, "a", 10)]
    tracked(tmp_path, "a", found, {10: 0.25})
    (model,) = logged(tmp_path)
    shutil.move(tmp_path / "a" / "checkpoints", tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"of step 10, .*were not uploaded, or .*track.upload_weights=true\. .*No such"):
        weights_path(model.model_uri, default_uri(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.artifacts.download_artifacts", full_disk)
        with pytest.raises(UserError, match=r"cannot be downloaded\. .*No space left"):
            weights_path(model.model_uri, default_uri(tmp_path))
    shutil.move(tmp_path / "elsewhere", tmp_path / "a" / "checkpoints")

    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    # Some disks have none; and the folder of a second name stayed in the checkpoint after a kill.
    monkeypatch.setattr(os, "link", no_links)
    uploaded = [checkpoint(tmp_path, "b", 10)]
    tracked(tmp_path, "b", uploaded, {10: 0.25}, upload_weights=True)
    model = next(model for model in logged(tmp_path) if model.tags["run"] == "b")
    shutil.rmtree(tmp_path / "b" / "checkpoints")
    cached = cache / "vit-pipeline" / "models" / uploaded[0].sha256 / "model.safetensors"
    download = ModelStore.download_model_file

    def seen_by_others(*arguments: Any) -> Path:
        found = download(*arguments)
        assert not cached.exists(), "another process could read a part of it"
        return found

    monkeypatch.setattr(ModelStore, "download_model_file", seen_by_others)
    path = weights_path(model.model_uri, default_uri(tmp_path))
    assert path == str(cached)
    assert os.listdir(cached.parent) == [cached.name]
    assert models.load(path).config.depth == 1
    with open(path, "r+b") as file:  # A damaged download is not used, and not kept.
        file.write(b"damaged")
    with pytest.raises(UserError, match="damaged"):
        weights_path(model.model_uri, default_uri(tmp_path))
    assert weights_path(model.model_uri, default_uri(tmp_path)) == path


def test_the_registered_model_names_the_last_and_the_best(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def last(run: str, step: int) -> ModelFacts:
        found = checkpoint(tmp_path, run, step)
        return ModelFacts(step, found.path, found.sha256, ("last",))

    aliases = []
    for run, score in (("a", 0.25), ("b", 0.75), ("c", 0.5)):
        tracked(tmp_path, run, [last(run, 10)], {10: score}, register="photos")
        uris = ("models:/photos@last", "models:/photos@best")
        paths = [Path(weights_path(uri, default_uri(tmp_path))) for uri in uris]
        aliases.append([path.relative_to(tmp_path).parts[0] for path in paths])
    assert aliases == [["a", "a"], ["b", "b"], ["c", "b"]]
    tracked(tmp_path, "c", [last("c", 11)], {}, register="photos")  # A restart without scores.
    client = MlflowStore(default_uri(tmp_path)).client
    assert len(client.search_model_versions("name = 'photos'")) == 4
    assert client.get_model_version_by_alias("photos", "best").tags["run"] == "b"

    other = RunFacts(
        "d", "pretrain", datasets=(DatasetFacts("x", "/x", "f00", "val", 9, 3, "evaluation"),), score="val_top1"
    )
    found = last("d", 10)
    tracker = Tracker(TrackConfig(register="photos"), tmp_path, tmp_path / "d", other, 0, FAST, lambda ended: [found])
    tracker.log(10, {"val_top1": 1.0})
    tracker.finish("FINISHED")
    assert client.get_model_version_by_alias("photos", "best").tags["run"] == "b"
    assert (
        "`best` stays at b, whose score (val_top1 on data 0123456789abcdef) cannot be compared"
        in capfd.readouterr().err
    )


def test_a_score_that_is_no_number_is_never_the_best(tmp_path: Path) -> None:
    """It stayed so for ever, because no number is above it."""
    aliases: dict[str, dict[str, str]] = {}

    class Store:
        def set_version_tags(self, name: str, version: str, tags: dict[str, str]) -> None:
            self.tags = tags

        def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
            aliases[alias] = self.tags

        @property
        def client(self) -> "Store":
            return self

        def tags_of_alias(self, name: str, alias: str) -> dict[str, str] | None:
            return aliases.get(alias)

    facts = RunFacts(
        "a", "pretrain", datasets=(DATA,), score="val_loss", metrics={"val_loss": Metric("loss", "lower", "eval")}
    )
    mirror = RunMirror(tmp_path, facts, lambda ended: [], TrackConfig(register="photos"), lambda *_: None, print)
    model = ModelFacts(10, "a", "f00", ("kept",))
    state = SyncState("run", models={"f00": SentModel("m", (), 1, "1")})

    def register(value: float) -> str | None:
        points = {10: [SimpleNamespace(key="eval/val_loss", value=value)]}
        mirror._register(Store(), state, model, points)  # type: ignore[arg-type]
        return aliases.get("best", {}).get("score")

    assert register(math.nan) is None
    assert register(2.0) == "2.0"
    aliases["best"]["score"] = "nan"  # As earlier versions left it.
    assert [register(3.0), register(math.nan), register(1.0)] == ["3.0", "3.0", "1.0"]


def test_a_run_whose_name_has_dots_gets_its_logged_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every run of a grid has such a name, `lr-0.003`, and MLflow allows no dot in that of a model."""
    tracked(tmp_path, "lr-0.003", [checkpoint(tmp_path, "lr-0.003", 20)], {20: 0.25})
    (model,) = logged(tmp_path)
    assert (model.name, model.tags["run"]) == ("lr-0_003-step-00000020", "lr-0.003")
    assert "warning" not in capfd.readouterr().err


def test_what_mlflow_refuses_is_named_once_and_the_rest_arrives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A registered model's name allows no slash: that is no outage, and no later start could send it."""
    found = [checkpoint(tmp_path, "a", 10), checkpoint(tmp_path, "a", 20)]
    tracked(tmp_path, "a", found, {10: 0.25, 20: 0.5}, register="vit/pets")
    assert [len(model.metrics) for model in logged(tmp_path)] == [1, 1]
    said = warnings_in(capfd.readouterr().err)
    assert len(said) == 2  # For each version.
    assert "step-00000010 as a version of the registered model vit/pets (" in said[0]
    assert "Invalid model name 'vit/pets'" in said[0]
    assert "will never arrive" in said[0]
    assert "cannot be reached" not in said[0]


def test_a_server_without_logged_models_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLflow 2 answers 404: that was an outage for ever, and the end of each run waited for it."""
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND

    def missing(*_: object, **__: object) -> None:
        raise MlflowException("failed with error code 404", ENDPOINT_NOT_FOUND)

    monkeypatch.setattr("mlflow.tracking.MlflowClient.search_logged_models", missing)
    tracked(tmp_path, "a", [checkpoint(tmp_path, "a", 10)], {10: 0.25})
    (line,) = warnings_in(capfd.readouterr().err)
    assert "refused the logged model of" in line
    assert "404; is this the address of an MLflow server, and its version at least 3?" in line


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            "models:/m-0",
            r"models:/m-0 is not found in MLflow at sqlite:.*mlflow\.db\. track\.uri or MLFLOW_TRACKING_URI names the server",
        ),
        ("models:/photos@best", r"models:/photos@best is not found"),
        ("runs:/0", r"runs:/0 is not found"),
    ],
)
def test_weights_that_mlflow_does_not_know(tmp_path: Path, weights: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        weights_path(weights, default_uri(tmp_path))


def test_other_weights_ask_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert weights_path("runs/a") == "runs/a"
    for uri, setting in ("", ""), ("sqlite:///typo.db", r"track\.uri or "):  # The database would be created there.
        with pytest.raises(UserError, match=rf"models:/a@best: there is no .*\.db: set {setting}MLFLOW_TRACKING_URI"):
            weights_path("models:/a@best", uri, out="elsewhere")
    assert os.listdir(tmp_path) == ["mlflow.db"]  # The fixture's; nothing was asked or written.


def test_a_parent_and_its_child_name_each_other(tmp_path: Path) -> None:
    def run(name: str, parent: str = "", times: int = 1) -> str:
        for _ in range(times):
            facts = RunFacts(
                name,
                "finetune",
                description=f"What {name} is, from `{parent}`.",
                parents={"parent": parent} if parent else {},
            )
            Tracker(TrackConfig(), tmp_path, tmp_path / name, facts, 0, FAST).finish("FINISHED")
        client = MlflowStore(default_uri(tmp_path)).client
        (found,) = client.search_runs(["1"], f"attributes.run_name = '{name}'")
        return found.info.run_id

    parent = run("large")
    children = [run(name, parent, times=2) for name in ("cars", "birds")]
    client = MlflowStore(default_uri(tmp_path)).client
    note = client.get_run(parent).data.tags["mlflow.note.content"]
    lines = sorted(
        f"- finetune [{n}](#/experiments/1/runs/{c})" for n, c in zip(("cars", "birds"), children, strict=True)
    )
    assert note.startswith("What large is, from ``.\n\n**Made from this run**\n\n- finetune [")
    assert sorted(note.splitlines()[-2:]) == lines
    shown = [tag for tag in client.get_run(parent).data.tags if not tag.startswith("mlflow.")]
    assert not any("made_from_this" in tag for tag in shown), "MLflow would show their Markdown as text"
    tags = client.get_run(children[0]).data.tags
    assert (tags["parent_run_id"], tags["parent"]) == (parent, "large")
    assert tags["mlflow.note.content"] == f"What cars is, from [large](#/experiments/1/runs/{parent})."
    # Also after the parent was started again.
    assert run("large") == parent
    assert sorted(client.get_run(parent).data.tags["mlflow.note.content"].splitlines()[-2:]) == lines
    # A parent in another store costs nothing.
    assert run("lost", "0" * 32)


def test_a_model_that_a_killed_sender_registered_gets_its_alias_and_no_second_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise RuntimeError("killed")

    found = [checkpoint(tmp_path, "a", 10), checkpoint(tmp_path, "a", 20)]
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.tracking.MlflowClient.set_registered_model_alias", kill)
        tracked(tmp_path, "a", found, {10: 0.5, 20: 0.25}, register="photos")
    tracked(tmp_path, "a", found, {}, start=20, register="photos")
    client = MlflowStore(default_uri(tmp_path)).client
    versions = client.search_model_versions("name = 'photos'")
    assert sorted(version.tags["step"] for version in versions) == ["10", "20"]
    assert client.get_model_version_by_alias("photos", "best").tags["step"] == "10"


def test_a_model_that_a_killed_sender_created_goes_with_the_run_that_another_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlflow.json did not name it yet: it stayed as a logged model of a deleted run."""

    def kill(*_: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(MlflowStore, "delete_points_after", lambda self, run_id, step: False)
    found = [checkpoint(tmp_path, "a", 10)]
    with monkeypatch.context() as patch:
        patch.setattr("mlflow.tracking.MlflowClient.set_logged_model_tags", kill)
        tracked(tmp_path, "a", found, {10: 0.5})
    (left,) = logged(tmp_path)
    tracked(tmp_path, "a", found, {10: 0.25}, start=0)
    (model,) = logged(tmp_path)
    assert left.source_run_id != model.source_run_id == run_id_of(tmp_path / "a")


def test_a_checkpoint_that_cannot_be_read_is_no_fault_of_the_store(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was said that the server cannot be reached, without its being asked."""

    def fails(ended: bool) -> list[ModelFacts]:
        raise OSError(errno.EIO, "Input/output error", "/runs/a/checkpoints/latest")

    tracker = Tracker(TrackConfig(), tmp_path, tmp_path / "a", RunFacts("a", "pretrain"), 0, FAST, fails)
    tracker.log(1, {"loss": 1.0})
    tracker.finish("FINISHED")
    said = warnings_in(capfd.readouterr().err)
    assert "/runs/a/checkpoints/latest" in said[0]
    assert "reached" not in said[0]


def test_a_registered_model_that_somebody_deleted_is_not_made_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its run was never complete again, at no start and not by launch/track_sync.py."""
    found = [checkpoint(tmp_path, "a", 10)]
    tracked(tmp_path, "a", found, {10: 0.5}, register="photos")
    client = MlflowStore(default_uri(tmp_path)).client
    client.delete_registered_model("photos")
    tracked(tmp_path, "a", found, {}, start=10, register="photos")
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert "as a version of the registered model photos (" in line
    assert not client.search_registered_models()


def test_a_parent_lists_no_run_that_another_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a server, each kill after which steps ran again left a link to a deleted run on the page of the parent."""
    monkeypatch.setattr(MlflowStore, "delete_points_after", lambda self, run_id, step: False)
    Tracker(TrackConfig(), tmp_path, tmp_path / "large", RunFacts("large", "pretrain"), 0, FAST).finish("FINISHED")
    facts = RunFacts("small", "finetune", parents={"parent": str(run_id_of(tmp_path / "large"))})
    replaced = []
    for start in (0, 5):
        tracker = Tracker(TrackConfig(), tmp_path, tmp_path / "small", facts, start, FAST)
        tracker.log(10, {"loss": 1.0})
        tracker.finish("FINISHED")
        replaced.append(run_id_of(tmp_path / "small"))
    assert replaced[0] != replaced[1]
    note = MlflowStore(default_uri(tmp_path)).client.get_run(run_id_of(tmp_path / "large")).data.tags[NOTE]
    assert note.partition("**Made from this run**\n\n")[2] == f"- finetune [small](#/experiments/1/runs/{replaced[1]})"


def test_a_description_that_is_too_long_for_mlflow_is_written_anew(tmp_path: Path) -> None:
    """MLflow cut it, after which it looked edited: twenty restarts with long reasons hid how the run ended."""
    for letter in "ab":
        facts = RunFacts("run", "pretrain", description=letter * 9000)
        Tracker(TrackConfig(), tmp_path, tmp_path / "run", facts, 0, FAST).finish("FINISHED")
    run = MlflowStore(default_uri(tmp_path)).client.get_run(run_id_of(tmp_path / "run"))
    assert run.data.tags["mlflow.note.content"] == "b" * 8000


def test_a_run_that_replaces_another_gets_its_description(tmp_path: Path) -> None:
    """On a server, one whose steps run again: it had the digest of a description, and none, as if a person had removed it."""
    store = MlflowStore(default_uri(tmp_path))
    first = store.create_run(store.experiment_id("vit", None), "run", {})
    store.set_tags(first, {NOTE: "What it is."})
    second = store.create_copy(first)
    store.set_tags(second, {NOTE: "What it is, started twice."})
    assert store.client.get_run(second).data.tags[NOTE] == "What it is, started twice."
    store.client.set_tag(second, NOTE, "Mine.")
    third = store.create_copy(second)
    store.set_tags(third, {NOTE: "What it is, started three times."})
    assert store.client.get_run(third).data.tags[NOTE] == "Mine."


def test_a_run_that_was_to_replace_another_when_its_sender_was_killed_is_used(tmp_path: Path) -> None:
    """Before mlflow.json named it: it stayed beside the next one, empty and running for ever."""
    store = MlflowStore(default_uri(tmp_path))
    tags = {"run_folder": "f00"}
    first = store.create_run(store.experiment_id("vit", None), "run", tags)
    store.log_parameters(first, {"seed": 1})
    other = store.create_run(store.experiment_id("vit", None), "run", {"run_folder": "another"})
    made = store.create_copy(first)
    assert made not in (first, other)
    assert store.create_copy(first) == made
    store.log_parameters(made, {"seed": 1})
    assert store.create_copy(made) not in (first, other, made)


def test_a_description_lists_as_many_runs_as_it_may_hold() -> None:
    """MLflow cut it at 8,000 characters, after which it looked edited, and was never written again."""
    one = "finetune [pets-384px](#/experiments/1/runs/0123456789abcdef0123456789abcdef), 91.34 % pets:test"
    for count in (1, 84, 85, 1000):
        tags = {f"mlflow.made_from_this.{number:032x}": f"{one} {number}" for number in range(count)}
        note = _with_children("What it is.", tags)
        *listed, last = note.partition("**Made from this run**\n\n")[2].splitlines()
        assert len(note) <= 8000
        if last.startswith("- and "):
            assert last == f"- and {count - len(listed):,} more"
            assert len(listed) > 70
        else:
            assert len(listed) + 1 == count < 85
