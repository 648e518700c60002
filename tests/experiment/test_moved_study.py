"""A study whose folder was moved, or whose cells are damaged, keeps its results, and says what is wrong with which
cell.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_study import write_run

from pipeline.base.errors import UserError
from pipeline.cluster.status_files import write_settings
from pipeline.evaluate.intervals import of_samples
from pipeline.experiment import study as studies
from pipeline.experiment.points import points_of
from pipeline.experiment.spec import RunSpec
from pipeline.experiment.study import Study
from pipeline.experiment.table import TO_RUN, StudyResults, read_table
from pipeline.settings import schema
from pipeline.settings.commands.study import StudyConfig, StudyModel

MODELS = "models=[{name: one},{name: two,settings: [model.width=32]}]"


@pytest.fixture
def base(dataset: Path, tmp_path: Path) -> Path:
    return write_run(tmp_path, dataset)


def make(base: Path, out: str = "study", *settings: str) -> StudyConfig:
    given = [f"run={base}", f"out={base.parent / out}", "name=s", "question=ablation", MODELS, *settings]
    return schema.load(StudyConfig, None, given)


def end(run: RunSpec, top1: float | None) -> None:
    """Write what a finished run leaves. top1: None for one that nothing is measured of on held-out images."""
    run.folder.mkdir(parents=True)
    write_settings(run.config, run.folder)
    (run.folder / "status.json").write_text('{"status": "finished", "step": 8, "code": 0, "reason": ""}')
    scores = {"step": 8, "top1": top1, "top5": 1.0, "loss": 0.5, "num_samples": 37}
    if top1 is not None:
        (run.folder / "scores.json").write_text(json.dumps(scores))


def report(config: StudyConfig) -> StudyResults:
    results = studies.run(config)
    assert results
    return results


@pytest.fixture
def done(base: Path) -> Study:
    """A study of two cells that are done, with its report."""
    study = Study(make(base, "study", "report=true"))
    study.claim(study.specs)
    for cell, top1 in zip(study.cells, (0.25, 0.5), strict=True):
        end(cell, top1)
    assert states(report(study.config)) == ["done", "done"]
    return study


def to_run(study: Study) -> set[str]:
    return {name for name, row in study.known()[1].items() if row.state in TO_RUN}


def states(results: StudyResults) -> list[str]:
    return [cell.state for cell in results.cells]


def test_a_copied_study_is_as_done_as_it_was(base: Path, done: Study) -> None:
    """Its settings differ in `out` only. It was "not run, not run", and results.json was overwritten."""
    shutil.copytree(done.folder, base.parent / "new" / "s")
    config = make(base, "new", "report=true")
    results = report(config)
    assert states(results) == ["done", "done"]
    assert [cell.scores["top1"] for cell in results.cells] == [0.25, 0.5]
    assert to_run(Study(config)) == set()


def cut(folder: Path, name: str) -> None:
    (folder / name).write_text((folder / name).read_text()[:20])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "scores": (lambda folder: cut(folder, "scores.json"), "scores.json is not valid JSON"),
    "other settings": (
        lambda folder: (folder / "config.yaml").write_text(
            (folder / "config.yaml").read_text().replace("\nseed: 0", "\nseed: 5")
        ),
        "was trained with other settings: seed was 5, is 0.",
    ),
    "gone": (shutil.rmtree, "its run is not there"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cell_is_named_and_its_earlier_result_is_kept(
    damage: str, base: Path, done: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    do, said = DAMAGES[damage]
    do(done.cells[0].folder)
    capsys.readouterr()
    for _ in range(2):  # A second report does not lose what the first has kept.
        results = report(done.config)
        assert states(results) == ["done", "done"]
        assert results.cells[0].scores["top1"] == 0.25
        assert "scores of an earlier report, because now: " in results.cells[0].reason
        assert said in results.cells[0].reason
        assert said in (done.folder / "report.md").read_text()
    if damage != "gone":
        assert f"one-seed0: {done.cells[0].folder}" in capsys.readouterr().out
    # A start without report=true runs it again.
    assert to_run(done) == {"one-seed0"}
    # Nothing to keep: it is no result, and says why.
    (done.folder / "results.parquet").unlink()
    assert states(report(done.config)) == ["not run" if damage == "gone" else "damaged", "done"]


def test_a_report_of_fewer_cells_does_not_lose_what_was_kept_of_the_others(done: Study) -> None:
    """results.parquet then is all that is known of a cell whose run was removed."""
    report(done.config)
    shutil.rmtree(done.cells[0].folder)
    for _ in range(2):
        other = StudyModel(name="three", settings=["model.width=48"])
        fewer = report(replace(done.config, models=[done.config.models[1], other]))
        assert [cell.name for cell in fewer.cells] == ["two-seed0", "three-seed0"]
        assert {row.name for row in read_table(done.folder)} == {"one-seed0", "two-seed0", "three-seed0"}
    results = report(done.config)
    assert states(results) == ["done", "done"]
    assert results.cells[0].scores["top1"] == 0.25


def test_runs_without_labels_are_done_and_scored_by_their_probes(base: Path, dataset: Path) -> None:
    """LeJEPA measures nothing on held-out images: its cells were "damaged". RankMe is no share: results.parquet was."""
    old = shutil.copytree(dataset, base.parent / "old")
    probe = [
        f"probe.data={dataset},{old}",
        "probe.every=100%",
        "probe.shots=[0]",
        "probe.neighbours=5",
        "probe.rankme_images=20",
    ]
    settings = f"settings={json.dumps(['train.loss=lejepa', 'objective.local_views=0', *probe])}"
    study = Study(make(base, "study", "report=true", "score=5nn", settings))
    study.claim(study.specs)
    for cell, top1 in zip(study.cells, (0.25, 0.5), strict=True):
        end(cell, None)
        knn = {"neighbours": 5, "top1": top1, "effective_images": 6.5}
        probed = {"knn": knn, "spread": {"rankme": 9.5, "feature_std": 0.1}, "num_samples": 37}
        probed["also"] = {"old": {"knn": {"neighbours": 5, "top1": top1 / 2}, "num_samples": 9}}
        (cell.folder / "probe.json").write_text(json.dumps(probed))
    results = report(study.config)
    assert states(results) == ["done", "done"]
    assert [cell.scores for cell in results.cells] == [{"5nn": top1, "old_5nn": top1 / 2} for top1 in (0.25, 0.5)]
    counts = {"5nn": 37, "old_5nn": 9}
    assert [(cell.num_test, cell.effective_images) for cell in results.cells] == [(counts, {"5nn": 6.5})] * 2
    assert [point.interval for point in points_of(results)] == [of_samples(0.25, 6.5), of_samples(0.5, 6.5)]
    assert results.evaluated_on == "tiny:val"
    with pytest.raises(UserError, match=r"score = rankme: these cells will not have it, but 5nn, old_5nn\."):
        Study(make(base, "study", "score=rankme", settings))
