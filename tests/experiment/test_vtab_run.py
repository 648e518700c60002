"""What a sweep runs, stores, refuses and reports; the cells run one after another in this process."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tiny_vtab import PREPARED, in_turn, prepare, run_here

from pipeline import model as models
from pipeline.architecture.pixels import RGB8, RGB_CHANNELS, Pixels
from pipeline.base.errors import UserError
from pipeline.base.trained_on import TrainedSet
from pipeline.experiment import vtab
from pipeline.experiment import vtab_report as report
from pipeline.experiment.vtab import Sweep, protocol_title, settings_of
from pipeline.experiment.vtab_cell import SweepJob, VtabCell
from pipeline.experiment.vtab_tasks import TASKS
from pipeline.settings import schema
from pipeline.settings.commands.transfer import VtabConfig

PROTOCOLS = Path(__file__).resolve().parents[2] / "configs" / "vtab"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings with tiny weights and three tasks."""
    return [*prepare(tmp_path_factory.mktemp("vtab")), "protocol.lr=[0.1]"]


def sweep(folder: Path, settings: Sequence[str], *more: str) -> dict[str, Any]:
    config = schema.load(VtabConfig, None, [*settings, f"out={folder}", *more])
    results = vtab.run(config, run_here)
    assert json.loads((folder / "results.json").read_text()) == results
    return results


def refused(folder: Path, settings: Sequence[str], *more: str) -> str:
    with pytest.raises(UserError) as error:
        sweep(folder, settings, *more)
    return str(error.value)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prepared: list[str]) -> Path:
    """The folder of a finished sweep; tests must not change it."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    sweep(folder, prepared)
    return folder


def run_nowhere(*_: object) -> Iterable[tuple[int, dict[str, Any]]]:
    raise AssertionError("a cell that is done is run again")


def test_what_is_done_is_not_run_again_and_another_sweep_is_refused(
    finished: Path, prepared: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "results.json").read_bytes()
    config = schema.load(VtabConfig, None, [*prepared, f"out={finished}"])
    vtab.run(config, run_nowhere)
    assert (finished / "results.json").read_bytes() == before
    assert "3 runs, 3 of them done" in capsys.readouterr().out

    said = refused(finished, prepared, "protocol.lr=[0.2]", "precision=bf16")
    assert "holds another experiment: protocol.lr was [0.1], is [0.2] in this sweep, " in said
    assert "precision was fp32, is bf16" in said
    models.save(models.create("ViT-mu/4", 8, 7, seed=1), tmp_path / "other.pt")
    assert "checkpoint_sha256 was " in refused(finished, prepared, f"weights={tmp_path / 'other.pt'}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "is not empty (it holds thesis.tex), and holds no experiment" in refused(tmp_path / "mine", prepared)
    assert (finished / "results.json").read_bytes() == before

    # A file that is not what was written there is no outcome: it is said, and that cell alone runs again.
    cell = next((finished / "cells").glob("dtd-*"))
    content = cell.read_bytes()
    outcome = json.loads(content)
    cell.write_bytes(content[:40])
    with pytest.raises(AssertionError, match="run again"):
        vtab.run(config, run_nowhere)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "It runs again." in line]
    assert str(cell) in said
    jobs: list[str] = []

    def again(
        function: Callable[[SweepJob], dict], given: Sequence[SweepJob], *_: object
    ) -> Iterable[tuple[int, dict[str, Any]]]:
        for number, job in enumerate(given):
            jobs.append(job.cell.name)
            yield number, outcome

    vtab.run(config, again)
    assert jobs == [cell.stem]
    assert (finished / "results.json").read_bytes() == before
    cell.write_bytes(content)

    sweep_file = finished / "experiment.json"
    whole = sweep_file.read_bytes()
    sweep_file.write_bytes(whole[:40])
    assert str(sweep_file) in refused(finished, prepared)
    sweep_file.write_bytes(whole)


def test_a_published_protocol_that_was_changed_says_so_wherever_it_is_named(
    prepared: list[str], tmp_path: Path
) -> None:
    for file in PROTOCOLS.glob("*.yaml"):
        if file.stem != "prepare":
            config = schema.load(VtabConfig, file, ["weights=any"])
            assert protocol_title(config.protocol) == file.stem
    assert protocol_title(schema.load(VtabConfig, None, prepared).protocol) == "tiny"
    assert protocol_title(schema.load(VtabConfig, None, [*prepared, "protocol.name=prepare"]).protocol) == "prepare"

    changes = [
        "protocol.image_size=8",
        "protocol.length=[2 steps]",
        "protocol.lr=[0.1]",
        "protocol.weight_decay=[0]",
        "protocol.schedule.warmup=0 steps",
    ]
    folder = tmp_path / "peft_224-finetune"
    settings = [*prepared[:2], *changes, "tasks=[dtd]", "seeds=[0]", "threads=1", "mlflow=none", f"out={folder}"]
    results = vtab.run(schema.load(VtabConfig, PROTOCOLS / "peft_224.yaml", settings), run_here)
    title = "peft_224, changed: image_size, length, lr, weight_decay, schedule.warmup"
    assert results["protocol"]["name"] == title
    assert (folder / "report.md").read_text().startswith(f"# VTAB-1k: finetune by {title}")
    assert report.tags_of(results)["protocol"] == title


def test_the_plan_counts_cells_and_work(
    finished: Path, prepared: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["plan=true", "tasks=[svhn,dtd]", "seeds=[0,1]", "protocol.lr=[0.1,0.01]", f"out={finished}"]
    config = schema.load(VtabConfig, None, [*prepared, *more])
    vtab.run(config, run_nowhere)
    printed = capsys.readouterr().out
    flops = models.training_flops_per_image(models.read_weights(config.weights)[0])
    rows = [line.split() for line in printed.splitlines() if line.startswith("dtd")]
    # 2 settings on train800, 2 seeds on the 1,000, 2 steps of 16 each; 5 and 12 images scored.
    assert [row[1:3] for row in rows] == [["16", "2"]] * 2 + [["21", "2"]] * 2
    assert sum(float(row[3]) for row in rows) == pytest.approx(flops * (128 + 34 / 3) / 1e18, rel=1e-2)
    assert "8 runs, 0 of them done; " in printed


def test_tasks_that_are_not_prepared_are_named(prepared: list[str], tmp_path: Path) -> None:
    results = sweep(tmp_path / "out", prepared, "method=linear")
    assert [row["task"] for row in results["scores"]] == list(PREPARED)
    assert results["missing"] == [task.name for task in TASKS if task.name not in PREPARED]
    assert {type(row["l2"]) for row in results["scores"]} == {float}
    # A start of fewer tasks writes results.json with the scores of the others, as they were.
    again = sweep(tmp_path / "out", prepared, "method=linear", "tasks=[svhn]")
    assert (again["scores"], again["data"]) == (results["scores"], results["data"])
    said = refused(tmp_path / "out", prepared, "method=linear", "tasks=[svhn,eurosat]")
    assert "launch/vtab_prepare.py tasks=[eurosat]" in said
    assert "cifar100" in refused(tmp_path, prepared, "tasks=[cifar]")


def test_data_sets_of_other_files_than_the_published_ones_are_named(prepared: list[str], tmp_path: Path) -> None:
    weights, data = (setting.partition("=")[2] for setting in prepared[:2])
    shutil.copytree(data, tmp_path / "tasks")
    file = tmp_path / "tasks" / "pets" / "dataset.json"
    about = json.loads(file.read_text())
    about["source"]["vtab"]["published"] = False
    file.write_text(json.dumps(about))
    settings = [*prepared, f"weights={weights}", f"data={tmp_path / 'tasks'}"]
    results = sweep(tmp_path / "out", settings, "method=linear")
    assert results["unpublished"] == ["pets"]
    # A start of other tasks keeps the score, and the mark.
    again = sweep(tmp_path / "out", settings, "method=linear", "tasks=[svhn]")
    assert [row["task"] for row in again["scores"]] == list(PREPARED)
    assert again["unpublished"] == ["pets"]


def test_an_image_size_that_the_weights_cannot_take_is_refused_before_anything_is_written(
    prepared: list[str], tmp_path: Path
) -> None:
    said = refused(tmp_path / "out", prepared, "protocol.image_size=3")
    assert re.fullmatch(r"protocol\.image_size = 3 does not suit .*/weights\.pt: .* Nearest sizes: 4\.", said)
    small = "protocol.small_image_size=3"
    assert "protocol.small_image_size = 3 does not suit" in refused(tmp_path / "out", prepared, small)
    models.save(models.create("BiT-R50x1", 8, 7, units=(1,), width=32), tmp_path / "bit.pt")
    bit = [*prepared, f"weights={tmp_path / 'bit.pt'}", "protocol.dropout=0.1"]
    assert "protocol.dropout = 0.1: " in refused(tmp_path / "out", bit)
    gray, wide = Pixels.full_range(("gray",), "uint16"), Pixels.full_range(RGB_CHANNELS, "uint16")
    for pixels in (gray, Pixels.of_all([wide, RGB8])):
        models.save(models.create("ViT-mu/4", 8, 7, pixels=pixels), tmp_path / "other.pt")
        assert "VTAB-1k" in refused(tmp_path / "out", [*prepared, f"weights={tmp_path / 'other.pt'}"])
    assert not (tmp_path / "out").exists()
    # Of small images alone, which DTD has none of.
    more = ["tasks=[dtd]", "plan=true", f"out={tmp_path / 'out'}"]
    assert vtab.run(schema.load(VtabConfig, None, [*prepared, small, *more]), run_nowhere) is None


def test_the_best_setting_is_chosen_and_a_failed_cell_loses_nothing_else(prepared: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = schema.load(
        VtabConfig,
        None,
        [
            *prepared,
            f"out={out}",
            "tasks=[dtd,pets,svhn]",
            "seeds=[4,5]",
            "protocol.lr=[0.1,0.01,0.001]",
            "protocol.weight_decay=[0,0.1]",
        ],
    )
    ran: list[str] = []

    def outcome(cell: VtabCell) -> dict[str, Any] | str:
        ran.append(cell.name)
        if cell.stage == "search":
            assert cell.seed == 4
            if cell.task.name == "svhn" and cell.setting == settings_of(config.protocol)[3] and "svhn" in broken:
                return "no space left"
            best = {"dtd": 0.01, "pets": 0.1, "svhn": 0.001}[cell.task.name]
            tie = cell.task.name == "pets" and cell.setting.lr == 0.01
            return {"accuracy": 0.9 if cell.setting.lr == best or tie else 0.5}
        if (cell.task.name, cell.seed) == ("dtd", 5) and "dtd" in broken:
            return "it burst"
        return {"accuracy": {4: 0.7, 5: 0.8}[cell.seed]}

    broken = {"svhn", "dtd"}
    with pytest.raises(
        UserError, match=r"2 of 24 runs failed, such as svhn-search-lr0.01-wd0.1-2_steps-seed4: no space left"
    ):
        vtab.run(config, in_turn(outcome))
    results = json.loads((out / "results.json").read_text())
    assert [
        (row["task"], row["seed"], row["learning_rate"], row["weight_decay"], row["val_accuracy"])
        for row in results["scores"]
    ] == [("dtd", 4, 0.01, 0.0, 0.9), ("pets", 4, 0.01, 0.0, 0.9), ("pets", 5, 0.01, 0.0, 0.9)]
    assert [(row["task"], row["seed"], row["reason"]) for row in results["failed"]] == [
        ("svhn", 4, "no space left"),
        ("dtd", 5, "it burst"),
    ]

    ran.clear()
    broken.clear()
    done = vtab.run(config, in_turn(outcome))
    assert ran == [
        "svhn-search-lr0.01-wd0.1-2_steps-seed4",
        "dtd-final-lr0.01-wd0.0-2_steps-seed5",
        "svhn-final-lr0.001-wd0.0-2_steps-seed4",
        "svhn-final-lr0.001-wd0.0-2_steps-seed5",
    ]
    assert done["failed"] == []
    assert len(done["scores"]) == 6


def test_a_test_split_that_the_weights_were_trained_on_is_counted(
    prepared: list[str], finished: Path, tmp_path: Path
) -> None:
    dtd = json.loads((finished / "results.json").read_text())["data"]["dtd"]
    sets = {"trained_on": [asdict(TrainedSet("dtd", dtd, split, "tuned")) for split in ("trainval", "test")]}
    models.save(models.create("ViT-mu/4", 8, 7), tmp_path / "weights.pt", sets)
    given = [*prepared, f"weights={tmp_path / 'weights.pt'}", "tasks=[dtd,pets]"]
    opened = Sweep(schema.load(VtabConfig, None, given), tmp_path / "out")
    assert opened.results(list(opened.known()[1].values()))["trained_by"] == {"dtd": "tuned"}
    assert "dtd: the scores on test are not of held-out images: it was trained on by tuned" in opened.notes


def test_a_sweep_of_a_checkpoint_is_in_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = schema.load(VtabConfig, PROTOCOLS / "lightweight.yaml", ["weights=runs/a/checkpoints/step-00001000"])
    name = f"step-00001000-{config.protocol.name}-{config.method}"
    assert vtab.output(config) == tmp_path / "runs/a/vtab" / name
