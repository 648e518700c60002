"""MLflow's pages of runs that the tracker wrote, in a real browser."""

import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlparse

import pytest
import servers
from browser import open_browser
from servers import MlflowServer

from pipeline.base.metric import Metric
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.mlflow.connection import VIEW_KEY
from pipeline.monitor.run_page import DatasetFacts, ModelFacts, RunFacts
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.settings.run import TrackConfig

# What pages of MLflow 3.17.2 complain of by themselves: without logins there is no such user, and a harmless message of
# Chromium.
OF_MLFLOW_ITSELF = ("ajax-api/2.0/mlflow/users/current", "status of 404", "ResizeObserver loop")
PHOTOS = DatasetFacts("photos", "/data/photos", "0123456789abcdef", "train", 12_000, 100, "training")
FACTS = RunFacts(
    "photos-s16",
    "pretrain",
    {"optimizer.lr": 0.001},
    {"model": "ViT-S/16"},
    (PHOTOS, replace(PHOTOS, split="val", context="evaluation")),
    "**Pre-training of ViT-S/16** at 224 px.",
    steps=20,
    images_per_step=256,
    flops_per_image=9.2e9,
    score="val_top1",
    metrics={"val_top1": Metric("proportion", "higher", "eval")},
)


def add_run(out: Path, facts: RunFacts, top1: float) -> None:
    models = [ModelFacts(20, str(out / facts.name / "checkpoints/step-00000020"), f"{top1:064}", ("last",))]
    timing = ExportTiming(poll=0.05, retry=(0.1,), finish=120)
    tracker = Tracker(TrackConfig(), out, out / facts.name, facts, 0, timing, lambda ended: models if ended else [])
    for step in range(1, 21):
        tracker.log(step, {"loss": 1 / step, "images_per_second": 900.0, "bad_samples": 0})
    tracker.log(20, {"val_top1": top1})
    tracker.finish("FINISHED", outcome="finished")


@pytest.mark.slow
def test_the_pages_show_what_the_project_wrote_and_ask_nobody_else(database: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs"
    out.mkdir()
    shutil.copy(database, out / "mlflow.db")
    with open_browser(tmp_path) as browser:
        add_run(out, FACTS, 0.71)
        add_run(out, replace(FACTS, name="photos-b16"), 0.8766)
        server = MlflowServer(tmp_path, default_uri(out))
        with servers.running(server.start()):
            page = f"{server.url}/#/experiments/1/runs?workflowType=machine_learning&viewStateShareKey={VIEW_KEY}"
            browser.open(page, "photos-s16", "photos-b16")
            browser.reads("kind", "score", "outcome", "model", "parent", "progress")  # The columns.
            browser.reads("pretrain", "ViT-S/16", "71.00 % top-1 photos:val", "87.66 % top-1 photos:val")
            browser.page.locator("a[href*='/runs/']", has_text="photos-b16").click()
            browser.sees("Pre-training of ViT-S/16", "photos:train", "0123456789abcdef", "optimizer.lr")
            browser.reads("eval/val_top1", "photos-b16-step-00000020")
            asked = {urlparse(request).netloc for request in browser.requests if request.startswith(("http", "ws"))}
    assert asked == {urlparse(server.url).netloc}
    assert [text for text in browser.complaints if not any(known in text for known in OF_MLFLOW_ITSELF)] == []
