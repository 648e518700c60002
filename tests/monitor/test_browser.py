"""MLflow's pages of runs that the tracker wrote, in a real browser."""

import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlparse

import pytest
import servers
from browser import Browser, open_browser
from polling import until
from servers import MlflowServer

from pipeline.base.metric import Metric
from pipeline.monitor.export import ExportTiming
from pipeline.monitor.mlflow.connection import connect, how_to_open, runs_page
from pipeline.monitor.run_page import DatasetFacts, ModelFacts, RunFacts, WeightsOrigin
from pipeline.monitor.tracking import Tracker, default_uri
from pipeline.settings.run import TrackConfig
from pipeline.train.shown_facts import last_scores

pytestmark = pytest.mark.slow

# What pages of MLflow 3.17.2 complain of by themselves: without logins there is no such user, and a harmless message of
# Chromium.
OF_MLFLOW_ITSELF = ("ajax-api/2.0/mlflow/users/current", "status of 404", "ResizeObserver loop")
PHOTOS = DatasetFacts("photos", "/data/photos", "0123456789abcdef", "train", 12_000, 100, "training")
PETS = DatasetFacts("pets", "/data/pets", "fedcba9876543210", "train", 3_680, 37, "training")


def add_run(out: Path, facts: RunFacts, top1: float | None, outcome: str = "finished", last: int = 20) -> str:
    """Track a small run with a figure and logged models. Returns its MLflow ID."""
    import matplotlib.figure

    folder = out / facts.name
    (folder / "page" / "figures").mkdir(parents=True)
    figure = matplotlib.figure.Figure(figsize=(6, 4))
    figure.subplots(1, 1).plot([math.exp(-step / 8) for step in range(last)])
    figure.savefig(folder / "page" / "figures" / "loss.png")
    (folder / "config.yaml").write_text(f"name: {facts.name}\nmodel:\n  name: ViT-S/16\n")
    models = [
        ModelFacts(
            last, str(folder / "checkpoints" / f"step-{last:08d}"), f"{abs(hash(facts.name)):064x}", ("best", "last")
        )
    ]
    config = TrackConfig(experiment="vit")
    timing = ExportTiming(poll=0.05, retry=(0.1,), finish=120)
    tracker = Tracker(config, out, folder, facts, 0, timing, lambda ended: models if ended else [])
    for step in range(1, last + 1):
        loss = 2.5 * math.exp(-step / 9) + 0.4 - 0.2 * (top1 or 0)
        tracker.log(
            step,
            {"loss": loss, "lr": 1e-3 * (1 - step / 21), "images_per_second": 900.0, "mfu": 0.41, "bad_samples": 0},
        )
        if step % 4 == 0:
            scores = {"val_top1": top1 * (1 - math.exp(-step / 7)), "val_num_samples": 920} if top1 else {}
            tracker.log(step, {**scores, "val_loss": loss + 0.1})
    result = f"**Result**: {'; '.join([outcome, *last_scores(folder, facts)])}."
    tracker.finish("FINISHED" if outcome == "finished" else "FAILED", outcome=outcome, result=result)
    client = connect(default_uri(out))
    experiment = client.get_experiment_by_name("vit")
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{facts.name}'")
    return run.info.run_id


def fill(out: Path) -> dict[str, str]:
    """Track runs of several kinds; returns their MLflow IDs by name."""
    held_out = replace(PHOTOS, split="val", num_samples=1_000, context="evaluation")
    first = RunFacts(
        "photos-s16",
        "pretrain",
        {"optimizer.lr": 0.001, "train.global_batch": 256},
        {"model": "ViT-S/16", "dataset": "photos"},
        (PHOTOS, held_out),
        "**Pre-training of ViT-S/16** at 224 px on **photos**.",
        {},
        20,
        256,
        9.2e9,
        ("config.yaml",),
        "val_top1",
        metrics={"val_top1": Metric("proportion", "higher", "eval")},
    )
    larger = replace(first, name="photos-b16", tags={**first.tags, "model": "ViT-B/16"}, flops_per_image=3.5e10)
    ids = {first.name: add_run(out, first, 0.71), larger.name: add_run(out, larger, 0.78)}
    diverged = replace(larger, name="photos-b16-lr1", parameters={"optimizer.lr": 0.1})
    ids[diverged.name] = add_run(out, diverged, 0.2, "diverged at step 9: the loss is nan", 9)
    pets = replace(
        first,
        name="pets-b16",
        kind="finetune",
        tags={"model": "ViT-B/16", "dataset": "pets"},
        datasets=(PETS, replace(PETS, split="val", num_samples=920, context="evaluation")),
        description="**Fine-tuning of ViT-B/16** at 384 px on **pets**.",
        parents={"parent": ids["photos-b16"]},
        origin=WeightsOrigin(
            f"{out}/photos-b16/checkpoints/step-00000008/model.safetensors",
            "ab" * 32,
            "photos-b16",
            ids["photos-b16"],
            8,
            "53.10 % top-1 photos:val",
        ),
    )
    ids[pets.name] = add_run(out, pets, 0.93)
    masked = replace(first, name="masked-lr-0.003", score="val_loss", objective="masked_mean_color")
    ids[masked.name] = add_run(out, masked, None)
    return ids


@pytest.fixture(scope="module")
def pages(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, str, dict[str, str]]]:
    """A browser, the address of the server, and the IDs of the runs. Pictures go to BROWSER_PICTURES, if that is
    set.
    """
    folder = tmp_path_factory.mktemp("browser")
    pictures = Path(os.environ.get("BROWSER_PICTURES", folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("USER", "researcher")
        patch.setenv("LOGNAME", "researcher")
        patch.setattr(sys, "argv", ["launch/pretrain.py", "--config", "configs/demo/pretrain.yaml"])
        out = Path(os.environ.get("BROWSER_STORE", folder / "runs"))
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(database, out / "mlflow.db")
        ids = fill(out)
        server = MlflowServer(folder, default_uri(out)).serves_runs(out / "mlflow.db")
        with servers.running(server.start()), open_browser(pictures) as browser:
            browser.page.set_default_timeout(300_000)
            yield browser, server.url, ids


def test_clicks_lead_from_the_first_page_to_scores_and_their_intervals(
    pages: tuple[Browser, str, dict[str, str]],
) -> None:
    browser, url, _ = pages
    browser.page.set_viewport_size({"width": 1366, "height": 768})  # A laptop's.
    browser.open(url, "vit")
    browser.click("vit")
    browser.reads("87.66 % top-1 pets:val", "loss 0.7709 photos:val", "ViT-B/16", "finished", "diverged at step")
    browser.picture("run_list")
    look = "heads => heads.map(head => [head.getBoundingClientRect().right, head.innerText.trim()])"
    heads = sorted(browser.page.locator(".ag-header-cell").evaluate_all(look))
    shown = [name for right, name in heads if name and right <= 1366]
    assert shown[:7] == ["Run Name", "Created", "score", "score", "dataset", "model", "outcome"]
    assert "Ask questions" not in browser.text()  # Of MLflow's assistant, which covers a third of the page.
    browser.page.locator(".anticon:has(path[d^='M1 1v13'])").first.click()  # The button with a chart on it.
    browser.reads("Score in per cent (2)")
    browser.page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for()  # A curve.
    browser.picture("run_compare")
    browser.page.locator("a[href*='/runs/']", has_text="pets-b16").click()
    browser.sees("87.66 % [85.38, 89.63] at step 20")
    browser.page.set_viewport_size({"width": 1500, "height": 1000})
    # Another choice of the reader's stays.
    browser.click("GenAI")
    browser.open(f"{url}/?again", "vit", "AI Gateway")
    browser.click("Model training")


def test_the_addresses_that_are_printed(pages: tuple[Browser, str, dict[str, str]]) -> None:
    """Also on a plain server of MLflow's, without this project's script."""
    browser, url, _ = pages
    browser.open(url + runs_page("1"), "photos-s16", "pets-b16", "finetune")
    browser.reads("kind", "score", "outcome", "model", "parent", "progress")  # The columns.
    browser.reads("pretrain", "ViT-B/16", "87.66 % top-1 pets:val", "loss 0.7709 photos:val", "photos-b16, step 8")
    browser.open(f"{url}{runs_page('1')}&orderByKey=metrics.%60score%60&orderByAsc=true", "photos-s16", "pets-b16")
    worst_first = ["photos-b16-lr1", "photos-s16", "photos-b16", "pets-b16"]
    until(lambda: [name for name in shown_runs(browser) if name in worst_first] == worst_first)
    plain = browser.page.context.browser.new_page()
    plain.set_default_timeout(300_000)
    import mlflow.server

    index = Path(mlflow.server.__file__).parent / "js/build/index.html"
    plain.route(f"{url}/", lambda route: route.fulfill(path=index))
    plain.goto(how_to_open(url, "1"))
    plain.get_by_text("87.66 % top-1 pets:val").wait_for()
    assert plain.evaluate("localStorage.getItem('mlflow.workflowType_v1')") is None
    plain.close()


def shown_runs(browser: Browser) -> list[str]:
    """Names in the list of runs, from top to bottom."""
    # In one look: the page may draw the list anew at any time, and a link of the one before has no place.
    look = "links => links.map(link => [link.getBoundingClientRect().y, link.innerText])"
    return [name for _, name in sorted(browser.page.locator("a[href*='/runs/']").evaluate_all(look))]


def test_the_pages_of_a_run(pages: tuple[Browser, str, dict[str, str]]) -> None:
    browser, url, ids = pages
    run, mode = f"{url}/#/experiments/1/runs/{ids['pets-b16']}", "?workflowType=machine_learning"
    browser.open(
        run, "Fine-tuning of ViT-B/16", "Result", "pets:train", "fedcba9876543210", "researcher", "optimizer.lr"
    )
    browser.reads("pretrain.py", "finetune", "ViT-B/16", "eval/val_top1", "pets-b16-step-00000020")
    browser.reads("53.10 % top-1 photos:val", "photos-b16, step 8")
    browser.picture("run")
    browser.open(f"{run}/model-metrics{mode}", "eval", "train")
    browser.reads("eval (3)", "health (1)", "speed (2)", "train (4)", "Model metrics (1)")
    browser.picture("run_charts")
    browser.open(f"{run}/artifacts/page/figures/loss.png{mode}", "config.yaml")
    browser.page.locator("img[src*='loss.png'], img[src^='blob:'], img[src^='data:image/png']").first.wait_for()
    browser.picture("artifacts")


def test_the_pages_ask_nobody_else_and_complain_of_nothing(pages: tuple[Browser, str, dict[str, str]]) -> None:
    """After all tests above."""
    browser, url, _ = pages
    asked = {urlparse(request).netloc for request in browser.requests if request.startswith(("http", "ws"))}
    assert asked == {urlparse(url).netloc}
    assert [text for text in browser.complaints if not any(known in text for known in OF_MLFLOW_ITSELF)] == []
