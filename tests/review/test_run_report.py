"""The report of a run: the same from its folder and from MLflow alone, with its lineage."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from review_runs import MODEL, upload, write_run

from pipeline import model as models
from pipeline.base.errors import UserError
from pipeline.base.page import markdown
from pipeline.base.words import shorten
from pipeline.checkpoint.store import FORMAT
from pipeline.monitor.mlflow.reading import ReadingStore
from pipeline.monitor.mlflow.state import run_id_of
from pipeline.monitor.page_folder import Start, describe
from pipeline.monitor.run_page import PREDICTED_SPEED, DatasetFacts, WeightsOrigin, plain_name
from pipeline.monitor.tracking import default_uri
from pipeline.process.committed import checkpoints_of
from pipeline.review import lineage, report
from pipeline.review.reader import RunReader, _flops_per_image, from_folder, from_mlflow
from pipeline.settings import schema
from pipeline.settings.commands.reports import RunReportConfig


def reader(out: Path) -> RunReader:
    return RunReader(default_uri(out))


def checkpoint(run: Path, step: int) -> Path:
    """A checkpoint with checksums, as far as a report reads it, where the run keeps its checkpoints."""
    folder = Path(checkpoints_of(run)) / f"step-{step:08d}"
    folder.mkdir(parents=True)
    settings = json.loads((run / "config.json").read_text())
    identity = {
        **{name: settings[name] for name in ("name", "out")},
        "checkpoint.folder": settings["checkpoint"]["folder"],
    }
    (folder / "state.json").write_text(
        json.dumps({"format": FORMAT, "step": step, "model": MODEL.to_dict(), "identity": identity})
    )
    (folder / "checksums.json").write_text(json.dumps({"model.safetensors": {"bytes": 1, "sha256": f"{step:064x}"}}))
    return folder


@pytest.mark.slow
def test_folder_and_mlflow_alone_give_the_same_page(out: Path) -> None:
    parent = write_run(out / "parent", evaluations={10: 0.6, 20: 0.7}, tracked=True, digest="aaaa")
    web = DatasetFacts("web", "/data/web", "0123456789abcdef", "train", 900, 0, "training", {"share": "30.00%"})
    child = write_run(
        out / "child", f"init.weights={parent}", evaluations={5: 0.8, 20: 0.9}, tracked=True, beside=(web,)
    )
    store = ReadingStore(default_uri(out))
    for tag, value in (("parent_run_id", run_id_of(parent)), ("run_folder_path", str(child.resolve()))):
        store.set_tags(str(run_id_of(child)), {tag: str(value)})
    facts = json.loads((child / "page" / "facts.json").read_text())
    facts["facts"]["parents"] = {"parent": run_id_of(parent)}
    (child / "page" / "facts.json").write_text(json.dumps(facts))
    figures = child / "page" / "figures"
    figures.mkdir()
    (figures / "confusion.png").write_bytes(report.draw_run(from_folder(child)) or b"")
    starts = [{"time": 1.7e9, "step": 0, "hosts": ["a", "b"], "before": ""},
              {"time": 1.71e9, "step": 8, "hosts": ["a"], "before": "host b was lost"}]  # fmt: skip
    (child / "page" / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in starts))
    upload(child, "page/starts.jsonl")
    upload(child, "page/figures/confusion.png", to="figures")

    pages = []
    for record in (from_folder(child), from_mlflow(store, str(run_id_of(child)))):
        blocks = [block for block in report.page(record, reader(out)) if block != report.Heading("Weights")]
        pages.append(
            markdown(record.name, blocks).partition("MLflow has no logged model")[0].partition("There is no")[0]
        )
    assert pages[0] == pages[1]
    for shown in (
        "90.00 % [86.67, 92.57]",
        "host b was lost",
        "parent -> child",
        "web -> child",
        "training 30.00%",
        "| optimizer.lr |",
    ):
        assert (shown in pages[0]) == (shown != "| optimizer.lr |"), shown
    # From the parent's side.
    for record in (from_folder(parent), from_mlflow(store, str(run_id_of(parent)))):
        assert "parent -> child" in lineage.lineage_of(record, reader(out)).lines()


@pytest.mark.slow
def test_what_a_parent_scored_later_is_not_what_was_taken_from_it(out: Path) -> None:
    """Fine-tuning began at step 200 of a run in progress, which had 4.55 % then and has 6.42 % now."""
    parent = write_run(out / "large", evaluations={10: 0.0455, 20: 0.0642}, tracked=True, digest="aaaa")
    origin = WeightsOrigin(f"{parent}/checkpoints/step-00000010/model.safetensors", "c0ffee" * 10, "large", str(run_id_of(parent)), 10,
                    "4.55 % digits:test")  # fmt: skip
    child = write_run(out / "small", f"init.weights={parent}", evaluations={20: 0.9}, tracked=True, origin=origin)
    store = ReadingStore(default_uri(out))
    for record in (from_folder(child), from_mlflow(store, str(run_id_of(child)))):
        assert record.origin == origin
        boxes = lineage.lineage_of(record, reader(out)).boxes.values()
        shown = next(box.lines for box in boxes if box.lines[0] == "large")
        assert "used: step 10, 4.55 % digits:test" in shown
        assert not any("6.42" in line for line in shown)
        text = markdown("small", list(report.page(record, reader(out))))
        assert "(large, step 10, SHA-256 c0ffeec0ffeec0ff..., which scored 4.55 % digits:test)" in text
        assert "6.42" not in text
    for record in (from_folder(parent), from_mlflow(store, str(run_id_of(parent)))):
        boxes = lineage.lineage_of(record, reader(out)).boxes.values()
        assert "from step 10, 4.55 % digits:test" in next(box.lines for box in boxes if box.lines[0] == "small")


@pytest.mark.slow
def test_points_come_back_as_they_were_logged(out: Path) -> None:
    folder = write_run(out / "a", steps=30, tracked=True, evaluations={30: 0.5})
    with open(folder / "metrics.jsonl") as file:
        written = [json.loads(line) for line in file]
    store = ReadingStore(default_uri(out))
    run_id = str(run_id_of(folder))
    from mlflow.entities import Metric

    odd = [
        Metric("train/loss", float(text), 1_000 * step, step) for step, text in ((40, "nan"), (41, "inf"), (42, "-inf"))
    ]
    store.client.log_batch(run_id, metrics=odd)
    stored = store.read_run(run_id)
    read: dict[str, dict[int, float]] = {}
    for name, points in store.read_points(stored, list(stored.metrics)):
        read.setdefault(plain_name(name), {}).update({step: value for step, value, _ in points})
    for line in written:
        for name, value in line["metrics"].items():
            assert read[name].pop(line["step"]) == value
    left = read.pop("loss")
    assert np.isnan(left.pop(40))
    assert left == {41: float("inf"), 42: -float("inf")}
    assert read.pop("score") == {30: 50.0}
    assert not any(read.values())


@pytest.mark.parametrize("checkpoints", ["in the run", "elsewhere"])
def test_lineage_through_folders(tmp_path: Path, checkpoints: str) -> None:
    """data -> pre-training -> fine-tuning -> sweep and grid; siblings that began elsewhere are left out."""
    place = "checkpoint.folder=" + (str(tmp_path / "checkpoints") if checkpoints == "elsewhere" else "")
    base = write_run(tmp_path / "base", place, evaluations={20: 0.6}, digest="aaaa")
    weights = checkpoint(base, 20)
    tuned = write_run(tmp_path / "tuned", place, f"init.weights={weights}", evaluations={20: 0.9}, digest="bbbb")
    write_run(tmp_path / "other", "init.weights=elsewhere.npz", evaluations={20: 0.9})
    odd = write_run(tmp_path / "odd", "init.weights=" + "x" * 300, evaluations={20: 0.9})
    sweep = tuned / "vtab" / "paper"
    sweep.mkdir(parents=True)
    origin = {"path": str(checkpoint(tuned, 20)), "sha256": "c", "run_id": None}
    scores = [{"task": "caltech101", "seed": 0, "accuracy": 0.5, "num_test": 100}]
    (sweep / "results.json").write_text(json.dumps({
        "protocol": {"name": "paper", "sha256": "d"}, "method": "finetune", "checkpoint": origin, "data": {},
        "contamination": None, "scores": scores, "failed": [], "missing": [],
    }))  # fmt: skip
    for folder in (base, tuned, sweep):
        found = lineage.lineage_of(from_folder(folder), reader(tmp_path))
        assert set(found.lines()) >= {"digits -> base", "base -> tuned", "tuned -> paper"}, folder
        assert "other" not in {box.lines[0] for box in found.boxes.values()}
        (subject,) = (box for box in found.boxes.values() if box.is_subject)
        assert subject.lines[0] == folder.name
        depths = {box.lines[0]: box.depth for box in found.boxes.values() if box.kind == "run"}
        assert (depths["base"], depths["tuned"], depths["paper"]) == (1, 2, 3)
    other = lineage.lineage_of(from_folder(tmp_path / "other"), reader(tmp_path))
    assert "elsewhere.npz -> other" in other.lines()
    assert lineage.lineage_of(from_folder(odd), reader(tmp_path)).lines()  # No system has so long a name.
    page = markdown("sweep", list(report.page(from_folder(sweep), reader(tmp_path))))
    assert "paper is not complete: 1 of 19 tasks have a score" in page


def test_lines_end_within_their_box() -> None:
    """A hybrid's name ran over its box and the arrow where system-ui is a wide font."""
    name, font = "hybrid-32-64-64-128-128+96x1h3/1024 of a run", FontProperties("DejaVu Sans")
    boxes = (lineage._WIDTH, lineage._MAX_CHARACTERS), (lineage._NARROW_WIDTH, lineage._MAX_NARROW_CHARACTERS)
    for width, most in boxes:
        text = TextPath((0, 0), shorten(name, most), size=lineage._FONT, prop=font)
        assert text.get_extents().width <= width - 2 * lineage._PAD


def test_the_page_of_a_run_that_went_wrong(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=20, evaluations={10: 0.6, 20: 0.5})
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 21, "time": 1, "metrics": {"skipped_steps": 3, "loss": "nan"}}\n{"cut')
    (folder / "status.json").write_text(
        json.dumps({"status": "diverged", "step": 20, "code": 1, "reason": "loss is NaN. Lower optimizer.lr."})
    )
    (folder / "page" / "end.json").unlink(missing_ok=True)
    starts = [Start(0, 0, ["a"]), Start(1, 10, ["a"], "stopped at step 10: SIGTERM", "optimizer.lr was 0.1, is 0.2")]
    (folder / "page" / "starts.jsonl").write_text("".join(json.dumps(asdict(start)) + "\n" for start in starts))
    described = describe("A run.", starts).splitlines()[-1]
    assert described.endswith(
        "from step 10: the start before was stopped at step 10: SIGTERM; optimizer.lr was 0.1, is 0.2"
    )
    checkpoint(folder, 10)
    checkpoint(folder, 20)
    (folder / "checkpoints" / "kept.json").write_text(
        json.dumps({"always": [], "best": "step-00000010", "metric": "test_top1", "value": 0.6})
    )
    page = markdown("a", list(report.page(from_folder(folder), reader(tmp_path))))
    for shown in (
        "from step 10 on, other settings: optimizer.lr was 0.1, is 0.2 |", "| stopped at step 10: SIGTERM | optimizer.lr was 0.1, is 0.2 |",
        "3 steps skipped", "1 log line with a loss that is not finite", "1 damaged line of", "loss is NaN",
        f"| best | 10 | {10:064x} |", f"| last | 20 | {20:064x} |", "weights=" + str(folder / "checkpoints" / "step-00000010"), "Lower optimizer.lr, recorded from",
        "| 50.00 % [45.12, 54.88] | 20 | 60.00 % [55.13, 64.68] | 10 | 400 |",
    ):  # fmt: skip
        assert re.search(re.escape(shown), page, re.IGNORECASE), shown
    places = [
        page.index(text) for text in ("# Health", "to know before trusting the scores", "# Lineage", "![", "# Scores")
    ]
    assert places == sorted(places)


def test_a_run_on_gpus_has_its_predicted_speed_beside_it(tmp_path: Path) -> None:
    """20 log lines, 110.5 images/s and an MFU of 20 % in the median."""
    folder = write_run(tmp_path / "a")
    page = markdown("a", list(report.page(from_folder(folder), reader(tmp_path))))
    assert "| images/s, median | – | 110.5 |" in page
    assert "| MFU, median | – | 20.0 % |" in page
    assert "predicted from" not in page
    facts = json.loads((folder / "page" / "facts.json").read_text())
    facts["facts"]["parameters"][PREDICTED_SPEED] = "221.0"
    (folder / "page" / "facts.json").write_text(json.dumps(facts))
    page = markdown("a", list(report.page(from_folder(folder), reader(tmp_path))))
    assert "| images/s, median | 221.0 | 110.5 |" in page
    assert "| MFU, median | 40 % | 20.0 % |" in page
    assert "| time of training steps | 1 s |" in page
    assert "Planned speed and time are predicted from the GPU's data sheet" in page


def test_epochs_of_a_mixture_are_those_of_its_first_set(tmp_path: Path) -> None:
    """All images of the mixture were counted as those of data.path."""
    folder = write_run(tmp_path / "a", steps=500)  # Of 16 images each, 4,000 of them from the 1,000 of data.path.
    facts = json.loads((folder / "page" / "facts.json").read_text())
    for epochs, shown in (({}, "8.0"), ({"epochs": "4.0"}, "4.0")):
        facts["facts"]["parameters"] |= epochs
        (folder / "page" / "facts.json").write_text(json.dumps(facts))
        page = markdown("a", list(report.page(from_folder(folder), reader(tmp_path))))
        assert f"| epochs | {shown} | {shown} |" in page


def test_only_settings_that_differ_are_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "optimizer.lr=0.5", model=replace(MODEL, dropout=0.25))
    page = markdown("a", list(report.page(from_folder(folder), reader(tmp_path))))
    assert "| optimizer.lr | 0.5 | 0.001 |" in page
    assert "| model.dropout | 0.25 | 0.0 |" in page
    assert "optimizer.beta1" not in page


@pytest.mark.slow
def test_the_command_writes_one_page_without_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", evaluations={20: 0.5})
    (folder / "review").mkdir()
    (folder / "review" / "report.html").write_text("")
    file = report.run(schema.load(RunReportConfig, None, [f"run={folder}"]))
    assert file == folder / "review" / "report.html"
    html = file.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)[^"#]', html)
    assert 'name="viewport"' in html
    assert "@media print" in html
    text = (file.parent / "report.md").read_text()
    assert all((file.parent / name).is_file() for name in re.findall(r"\]\((\S+)\)", text))
    out = capsys.readouterr().out
    assert "50.00 %" in out
    assert "report.html (the earlier one there is replaced)" in out


def test_the_report_of_an_evaluation_begins_like_a_sentence(tmp_path: Path) -> None:
    record = replace(from_folder(write_run(tmp_path / "a", steps=10)), kind="evaluation")
    assert markdown("a", list(report.page(record, reader(tmp_path)))).startswith("# a\n\nEvaluation of ViT-")


@pytest.mark.parametrize("address", ["nowhere", "mlflow:0123", "0" * 32])
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, address: str) -> None:
    with pytest.raises(UserError) as refused:
        RunReader(f"sqlite:///{tmp_path / 'none.db'}").read(address)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "none.db").exists()


def test_a_long_password_of_a_store_that_cannot_be_opened_is_not_shown() -> None:
    """MLflow repeats the address in its error; what was cut in the middle of the password no longer looked like one."""
    with pytest.raises(UserError, match=r"postgresq://ann:\*\*\*@host/db cannot be opened: ") as refused:
        RunReader(f"postgresq://ann:{'secret' * 50}@host/db").read("mlflow:0")
    assert "secret" not in str(refused.value)


def test_an_empty_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json is missing"):
        from_folder(tmp_path)


def test_flops_are_those_of_the_model(tmp_path: Path) -> None:
    record = from_folder(write_run(tmp_path / "a", steps=10))
    assert record.exaflops == pytest.approx(10 * 16 * models.training_flops_per_image(MODEL) / 1e18)


def test_flops_are_those_of_the_whole_objective(tmp_path: Path) -> None:
    """As the run itself counted them; read from MLflow, of which the page may be missing, as its parameters say."""
    folder = write_run(tmp_path / "a", steps=10)
    page = json.loads((folder / "page/facts.json").read_text())
    page["facts"]["flops_per_image"] = 7e9
    (folder / "page/facts.json").write_text(json.dumps(page))
    assert from_folder(folder).exaflops == pytest.approx(10 * 16 * 7e9 / 1e18)
    parameters = {"gflops_per_image": "7"}
    assert _flops_per_image({"train.loss": "dino"}, None, parameters, 1e9) == 7e9
    assert _flops_per_image({"train.loss": "sigmoid"}, None, parameters, 1e9) == 1e9
    assert _flops_per_image({"train.loss": "mae"}, None, {}, 1e9) == 1e9


def test_the_command_that_scores_the_weights_names_a_split_that_there_is(out: Path) -> None:
    """Images held out of the training split ("dev") are no split of the data."""
    run = write_run(out / "two words", evaluations={20: 0.5})
    path = checkpoint(run, 20)
    record = from_folder(run)
    held_out = replace(record.datasets[1], split="dev")
    for settings, datasets, split in (
        ({}, record.datasets, " split=test"),
        ({"data.eval_split": "test"}, (record.datasets[0], held_out), " split=test"),
        ({"data.eval_split": None}, (record.datasets[0], held_out), ""),
    ):
        *_, code = report._weights(replace(record, datasets=datasets, settings=record.settings | settings), reader(out))
        assert f"evaluate.py 'weights={path.resolve()}' data=datasets/digits{split}\n" in code.text
