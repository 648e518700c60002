"""Checkpoints as logged and registered models, and weights named by their MLflow URI."""

import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tracked_steps import warnings_in

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.estimate import forecast
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.mlflow.connection import connect
from pipeline.monitor.mlflow.weights import weights_path
from pipeline.monitor.run_page import DatasetFacts, ModelFacts, RunFacts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.process.committed import Checksum
from pipeline.settings import schema
from pipeline.settings.commands.operate import PlanConfig
from pipeline.settings.run import TrackConfig
from pipeline.train import setup

FAST = ExportTiming(poll=0.05, retry=(0.05,), finish=300)
DATA = DatasetFacts("photos", "/data/photos", "0123456789abcdef", "val", 90, 3, "evaluation")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Path) -> None:
    shutil.copy(database, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def checkpoint(out: Path, run: str, step: int) -> ModelFacts:
    """A checkpoint folder with the weights of a tiny model, which depend on the step."""
    folder = out / run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    config = models.ViTConfig(16, 1, 16, 2, 4, (8, 8), 3)
    models.save(models.build(config, seed=step), folder / "model.safetensors", {"step": step})
    content = (folder / "model.safetensors").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    checksums = {"model.safetensors": asdict(Checksum(len(content), sha256))}
    (folder / "checksums.json").write_text(json.dumps(checksums))
    return ModelFacts(step, str(folder), sha256, ("kept",))


def tracked(
    out: Path, run: str, found: list[ModelFacts], scores: dict[int, float], start: int = 0, **settings: object
) -> None:
    facts = RunFacts(run, "pretrain", tags={"model": "ViT-Ti/16"}, datasets=(DATA,), score="val_top1", steps=100)
    tracker = Tracker(TrackConfig(**settings), out, out / run, facts, start, FAST, lambda ended: found)
    for step, score in scores.items():
        tracker.log(step, {"loss": 1.0, "val_top1": score})
    tracker.finish("FINISHED")


def logged(out: Path) -> list:
    client = connect(default_uri(out))
    found = client.search_logged_models([client.get_experiment_by_name("vit").experiment_id])
    return sorted(found, key=lambda model: int(model.params["step"]))


def test_a_kept_checkpoint_is_a_logged_model_with_its_scores_which_load_by_its_uri(tmp_path: Path) -> None:
    found = [checkpoint(tmp_path, "a", 10), checkpoint(tmp_path, "a", 20)]
    tracked(tmp_path, "a", found, {10: 0.25, 20: 0.5})
    first, second = logged(tmp_path)
    assert (first.name, first.model_type, first.status.value) == ("a-step-00000010", "ViT-Ti/16", "READY")
    assert (first.params["sha256"], first.params["path"]) == (found[0].sha256, found[0].path)
    shown = {"step": "10", "model": "ViT-Ti/16", "run": "a", "path": found[0].path, "sha256": found[0].sha256}
    assert first.params == shown
    for model, score in ((first, 0.25), (second, 0.5)):
        (metric,) = connect(default_uri(tmp_path)).get_logged_model(model.model_id).metrics
        assert (metric.key, metric.value, metric.dataset_digest) == ("eval/val_top1", score, DATA.digest)
    client = connect(default_uri(tmp_path))
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
    with pytest.raises(UserError, match=r"not found in MLflow at .*other/mlflow\.db"):
        weights_path(model.model_uri, out="other")
    shutil.move(shared, tmp_path / "runs")
    shutil.copytree(tmp_path / "runs" / "a", shared / "a")
    assert weights_path(model.model_uri, out="other") == found.path  # Which has no database yet.
    # Once the run has one, as at a restart and below a study that names it, the weights are still those of runs/.
    (tmp_path / "other").mkdir()
    shutil.copy(empty, tmp_path / "other/mlflow.db")
    assert weights_path(model.model_uri, default_uri(tmp_path / "other"), out="other/study") == found.path
    # A server is asked below a study, too, whose runs are given its database.
    shutil.move(tmp_path / "runs/mlflow.db", tmp_path / "server.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/server.db")
    assert weights_path(model.model_uri, default_uri(tmp_path / "other"), out="other/study") == found.path
    with pytest.raises(UserError, match=r"m-0 is not found in MLflow at sqlite:.*server\.db, nor at sqlite:.*other/"):
        weights_path("models:/m-0", default_uri(tmp_path / "other"), out="other/study")


def test_a_checkpoint_that_was_removed_or_trained_again_is_no_model_any_more(tmp_path: Path) -> None:
    old, kept = checkpoint(tmp_path, "a", 10), checkpoint(tmp_path, "a", 20)
    tracked(tmp_path, "a", [old, kept], {10: 0.25, 20: 0.5})
    again = ModelFacts(10, old.path, "f" * 64, ("best",))  # The same step, with other weights.
    tracked(tmp_path, "a", [again, kept], {})
    assert [(model.params["sha256"], model.tags["roles"]) for model in logged(tmp_path)] == [
        ("f" * 64, "best"),
        (kept.sha256, "kept"),
    ]


def test_weights_that_are_not_where_the_run_wrote_them(tmp_path: Path) -> None:
    tracked(tmp_path, "a", [checkpoint(tmp_path, "a", 10)], {10: 0.25})
    (model,) = logged(tmp_path)
    shutil.move(tmp_path / "a" / "checkpoints", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="of step 10, are not in"):
        weights_path(model.model_uri, default_uri(tmp_path))


def test_what_mlflow_refuses_is_named_once_and_the_rest_arrives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no outage, and no later start could send it."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    create = MlflowClient.create_logged_model

    def refuses_step_10(self, experiment, name, *others, **more):
        if name.endswith("10"):
            raise MlflowException.invalid_parameter_value("no such model, please")
        return create(self, experiment, name, *others, **more)

    monkeypatch.setattr(MlflowClient, "create_logged_model", refuses_step_10)
    found = [checkpoint(tmp_path, "a", 10), checkpoint(tmp_path, "a", 20)]
    tracked(tmp_path, "lr-0.003", found, {10: 0.25, 20: 0.5})
    assert [(model.name, len(model.metrics)) for model in logged(tmp_path)] == [("lr-0_003-step-00000020", 1)]
    (said,) = warnings_in(capfd.readouterr().err)
    assert f"the logged model of {found[0].path} (" in said
    assert "will never arrive" in said


def test_other_weights_ask_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert weights_path("runs/a") == "runs/a"
    for uri, said in ("", "elsewhere/"), ("sqlite:///typo.db", r"typo"):  # MLflow would create it.
        with pytest.raises(UserError, match=rf"models:/a@best.*{said}.*MLFLOW_TRACKING_URI"):
            weights_path("models:/a@best", uri, out="elsewhere")
    assert os.listdir(tmp_path) == ["mlflow.db"]  # The fixture's; nothing was asked or written.
