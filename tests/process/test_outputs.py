"""Output paths: what is wrong with one is said before any work, and trying one leaves nothing behind."""

import dataclasses
import errno
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from ranks import ROOT

from pipeline.base.errors import UserError
from pipeline.base.files import hidden_folder, replacing
from pipeline.process import outputs
from pipeline.process.outputs import Holds, Output, kind_of, try_output, try_outputs
from pipeline.settings import run, schema
from pipeline.settings.command import main
from pipeline.settings.commands import data, operate, reports, transfer, weights

RUN = ["name=try", "model.name=ViT-Ti/16", "data.path=here", "train.length=90 epochs"]
WEIGHTS = ["weights=w", "source=i"]
SWEEP = ["weights=w", "--config", str(ROOT / "configs/vtab/vit_paper.yaml")]


def load(cls: type, *settings: str) -> Any:
    if "--config" in settings:
        at = settings.index("--config")
        return schema.load(cls, settings[at + 1], [*settings[:at], *settings[at + 2 :]])
    return schema.load(cls, None, settings)


def problem(cls: type, *settings: str) -> str:
    with pytest.raises(UserError) as error:
        try_outputs(load(cls, *settings))
    assert len(str(error.value)) < 500
    return str(error.value)


def everything_in(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "output"),
    [
        *((path, "folder") for path in ("file", "file/x", "file/x/y", "nowhere", "/proc/x")),
        *((path, "file") for path in ("folder.csv", "/tmp", "file/x.csv", "missing/x.csv", "/dev/stdout", "/dev/null")),
        *((path, "new") for path in ("folder", "file/x.npz")),
    ],
)
def test_outputs_that_cannot_be(path: str, output: Output, place: Path) -> None:
    before = everything_in(place)
    with pytest.raises(UserError, match=r"^out = "):
        try_output("out", place / path, output)
    assert everything_in(place) == before


def test_what_can_be_written_is_not_touched(place: Path) -> None:
    before = everything_in(place)
    for path, output in (("new/deep", "folder"), ("file", "file"), ("folder/x.csv", "file"), ("new/x.npz", "new")):
        try_output("out", place / path, output)
    assert everything_in(place) == before


def test_a_file_server_that_fails_is_no_wrong_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was exit code 2 and "Choose another path"; a supervisor did not start the run again."""

    def fail(**_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(outputs.tempfile, "TemporaryFile", fail)
    with pytest.raises(OSError, match="Input/output") as error:
        try_output("out", place / "folder" / "x")
    assert error.value.filename == str(place / "folder" / "x")


def test_every_command_tries_its_outputs(place: Path) -> None:
    file = place / "file"
    assert problem(run.RunConfig, *RUN, f"out={file}").startswith(f"out = {file}: {file} is not a folder")
    assert "checkpoint.folder" in problem(run.RunConfig, *RUN, f"checkpoint.folder={file}/x")
    assert "data.cache" in problem(run.RunConfig, *RUN, f"data.cache={file}/x")
    assert "csv = /nowhere/x: there is no" in problem(operate.SamplesConfig, "run=r", "step=1", "csv=/nowhere/x")
    assert "is a folder, not a file" in problem(weights.PredictConfig, *WEIGHTS, f"out={place}/folder.csv")
    assert "exists already" in problem(weights.ExportConfig, "weights=w", "format=timm", f"out={place}/folder")


# What a folder holds -> the files that its command wrote, as far as they tell it from others; a command that writes
# such a folder.
HELD: dict[Holds, tuple[list[str], type, list[str]]] = {
    "run": (["config.yaml", "status.json", "scores.json", "metrics.jsonl"], run.RunConfig, RUN[1:]),
    "experiment": (["experiment.json", "report.html", "results.json"], reports.GridConfig, ["run=r", "lr=1"]),
    "data set": (["dataset.json", "samples.parquet"], data.ShardConfig, ["source=s"]),
    "evaluation": (["scores.json", "report.md", "per_class.csv"], weights.ScoreConfig, ["weights=w", "data=d"]),
    "explanation": (["explain.json"], weights.ExplainConfig, ["weights=w"]),
    "comparison": (["report.md", "report.html", "runs.parquet"], reports.CompareConfig, ["runs=[a,b]"]),
    "report of a run": (["report.md", "report.html"], reports.RunReportConfig, ["run=r"]),
    "verification": (["report.json"], data.VerifyConfig, ["data=d"]),
    "statistics": (["stats.json", "classes.csv"], data.StatsConfig, ["data=d"]),
}


@pytest.mark.parametrize("kind", HELD)
def test_a_folder_is_for_results_of_one_kind(kind: Holds, tmp_path: Path) -> None:
    """Each wrote its own report.md or results.json over another's, without a word."""
    folder = tmp_path / "taken"
    for name in HELD[kind][0]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    assert kind_of(folder) == kind
    for other, (_, cls, settings) in HELD.items():
        is_named = cls in (run.RunConfig, reports.GridConfig)
        config = load(cls, *settings, *([f"out={tmp_path}", "name=taken"] if is_named else [f"out={folder}"]))
        if other == kind:
            try_outputs(config)
            continue
        with pytest.raises(UserError, match=rf"= {folder}: this folder holds .*{kind}, not "):
            try_outputs(config)
    for name in HELD[kind][0]:
        assert (folder / name).read_text() == "x"


def test_every_output_is_declared() -> None:
    """A new setting of these names would else be tried when the work is done."""
    modules = (run, data, weights, operate, transfer, reports)
    classes = [cls for module in modules for cls in vars(module).values() if dataclasses.is_dataclass(cls)]
    fields = [(cls.__name__, f.name, f.metadata.get("output")) for cls in classes for f in dataclasses.fields(cls)]
    declared = {name for _, name, output in fields if output}
    assert declared == {"out", "name", "csv", "sheet", "folder", "cache"}
    undeclared = [(cls, name) for cls, name, output in fields if name in declared - {"name"} and not output]
    assert undeclared == [("StatsConfig", "sheet")]  # A number of images.


@pytest.mark.parametrize(
    ("cls", "settings", "name"),
    [
        (run.RunConfig, [*RUN, "out=s3://bucket/runs"], "out"),
        (run.RunConfig, [*RUN, "data.cache=s3://bucket/cache"], "data.cache"),
    ],
)
def test_what_cannot_be_in_a_bucket_is_refused(cls: type, settings: list[str], name: str) -> None:
    """It was written into a local folder `s3:`, which ends with a pod."""
    url = settings[-1].partition("=")[2]
    assert problem(cls, *settings) == f"{name} = {url}: this is written to a file system, not to a bucket. Give a path."


def test_what_is_not_written_is_not_tried(place: Path) -> None:
    file = place / "file"
    try_outputs(load(operate.PlanConfig, *RUN, f"out={file}", f"checkpoint.folder={file}"))
    try_outputs(load(data.VtabPrepareConfig, "prove=true", f"out={file}"))
    try_outputs(load(transfer.VtabConfig, *SWEEP, "plan=true", f"out={file}"))
    try_outputs(load(run.RunConfig, *RUN, "checkpoint.folder=s3://bucket/x", f"out={place}/new"))
    try_outputs(load(data.ShardConfig, "source=s", "out=gs://bucket/x"))
    assert not (place / "new").exists()


@pytest.mark.parametrize(
    ("cls", "settings", "writes"),
    [
        (weights.PredictConfig, WEIGHTS, replacing),
        (weights.ExportConfig, ["weights=w", "format=timm"], hidden_folder),
    ],
)
def test_the_next_command_removes_what_a_killed_one_left(
    cls: type, settings: list[str], writes: Callable[[Path], AbstractContextManager[object]], tmp_path: Path
) -> None:
    out = tmp_path / "out.parquet"
    if (pid := os.fork()) == 0:
        with writes(out):
            os._exit(9)
    os.waitpid(pid, 0)
    assert any(tmp_path.iterdir())
    try_outputs(load(cls, *settings, f"out={out}"))
    assert not any(tmp_path.iterdir())


def test_rank_0_tries_for_all(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["x.py", "source=s", f"out={place}/file"])
    monkeypatch.setenv("RANK", "1")
    main(data.ShardConfig, seen.append, "About.", by_launcher=True)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        main(data.ShardConfig, seen.append, "About.", by_launcher=True)
    assert len(seen) == 1
