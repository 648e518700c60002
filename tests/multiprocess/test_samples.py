"""Samples left out of a run, and the answer to which samples were in it: both of a real run on two ranks."""

import csv
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from forked import Forge
from ranks import settings

from pipeline.base.errors import UserError
from pipeline.checkpoint.store import Checkpoints, checksum, read_state
from pipeline.data.dataset.exclusion import EXCLUDED, write_list
from pipeline.data.dataset.manifest import Dataset, open_dataset
from pipeline.data.loading.loader import train_requests
from pipeline.data.loading.order import SampleOrder
from pipeline.process.console import Console
from pipeline.process.distributed import Ranks
from pipeline.review import samples
from pipeline.settings import schema
from pipeline.settings.commands.operate import SamplesConfig
from pipeline.settings.quantities import Limit
from pipeline.settings.run import RunConfig
from pipeline.train import setup

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
LEFT_OUT = [3, 40, 41, 149]


def leave_out(dataset: Dataset, split: str, rows: list[int]) -> None:
    keys = dataset.table(split).keys(rows)
    columns = {"split": [split] * len(rows), "row": rows, "key": keys, "reason": ["a copy"] * len(rows)}
    write_list(dataset, f"copies_{split}", pa.table(columns, EXCLUDED))


def ask(run: Path, *more: str) -> list[dict[str, Any]]:
    return samples.run(schema.load(SamplesConfig, None, [f"run={run}", *more]))


@pytest.fixture(scope="module")
def data(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """150 training and 37 validation samples, of which 146 and 35 stay."""
    copy = open_dataset(shutil.copytree(dataset, tmp_path_factory.mktemp("excluded") / "data"))
    leave_out(copy, "train", LEFT_OUT)
    leave_out(copy, "val", [0, 36])
    return copy


@pytest.fixture(scope="module")
def overrides(data: Dataset) -> list[str]:
    return settings(data.path, data.path.parent, "run", "train.length=8 steps")


@pytest.fixture(scope="module")
def said(forge: Forge, overrides: list[str]) -> str:
    """What a run says, one on 60 samples before it, and the same command with data.exclude=none after it."""
    limited = [*overrides, "name=limited", "data.limit=60", "train.length=4 steps"]
    run = forge.start(1, limited, overrides, [*overrides, "data.exclude=none"])
    assert run.wait() == [2], run.said()
    return run.said()


@pytest.fixture(scope="module")
def run(said: str, data: Dataset) -> Path:
    return data.path.parent / "run"


def test_a_run_says_and_keeps_what_it_leaves_out(said: str, run: Path, data: Dataset) -> None:
    assert said.count("excluded from train: 4 of 150 samples (copies_train 4, copies_val 0)") == 1
    assert said.count("excluded from val: 2 of 37 samples (copies_train 0, copies_val 2)") == 2, "of both runs"
    assert "epochs of 146)" in said
    assert "on 35 images" in said
    identity = read_state(run / "checkpoints" / "step-00000008").identity
    assert identity["excluded"] == data.split("train").excluded
    assert identity["left_out.train.copies_train"] == 4


def test_a_run_is_not_continued_on_other_samples(said: str, run: Path, data: Dataset) -> None:
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert f"excluded was {data.split('train').excluded}, is none" in errors[0]
    assert "Traceback" not in said

    leave_out(data, "train", [*LEFT_OUT, 5])
    with pytest.raises(UserError, match="is not what the run was trained on: excluded was 4 samples"):
        ask(run, "step=1")
    leave_out(data, "train", LEFT_OUT)


def test_a_limited_run_has_its_samples_and_keeps_them(said: str, run: Path, data: Dataset) -> None:
    assert "excluded from train: 90 of 150 samples (copies_train 4, copies_val 0, data.limit 86)" in said
    assert "epochs of 60)" in said
    limited = run.parent / "limited"
    keys = [row["key"] for step in range(1, 5) for row in ask(limited, f"step={step}")]
    split = data.split("train", limit=Limit.parse("60"))
    assert set(keys) == set(split.keys(np.arange(60)))
    assert len(set(keys[:60])) == 60, "each once in the first epoch"

    checkpoints, console = Checkpoints(limited / "checkpoints"), Console(limited / "log.txt", False)
    newest = checkpoints.candidates()[0]
    then = read_state(newest).identity
    assert setup.find_checkpoint_on_all_ranks(checkpoints, then, 99, ALONE, console) == (newest, set())
    with pytest.raises(UserError, match=r"data\.limit was 60, is 70"):
        setup.find_checkpoint_on_all_ranks(checkpoints, {**then, "data.limit": "70"}, 99, ALONE, console)


def test_a_checkpoint_that_knows_less_settings_is_continued(said: str, run: Path, tmp_path: Path) -> None:
    """It had the defaults of what came later."""
    copy = shutil.copytree(run.parent / "run" / "checkpoints", tmp_path / "checkpoints")
    checkpoints = Checkpoints(copy)
    now = read_state(checkpoints.candidates()[0]).identity
    for folder in copy.glob("step-*"):
        state = json.loads((folder / "state.json").read_text())
        for name in ("model.positions", "model.drop_path", "data.limit", "schedule.drops"):
            del state["identity"][name]
        (folder / "state.json").write_text(json.dumps(state))
        sums = json.loads((folder / "checksums.json").read_text())
        sums["state.json"] = asdict(checksum(folder / "state.json"))
        (folder / "checksums.json").write_text(json.dumps(sums))
    console = Console(tmp_path / "log.txt", False)
    assert setup.find_checkpoint_on_all_ranks(checkpoints, now, 99, ALONE, console) == (
        checkpoints.candidates()[0],
        set(),
    )
    with pytest.raises(UserError, match=r"model\.positions was learned, is none"):
        setup.find_checkpoint_on_all_ranks(checkpoints, {**now, "model.positions": "none"}, 99, ALONE, console)


def test_ranks_that_see_other_lists_are_stopped() -> None:
    """Another node's copy of the data set, or a list that changed between the starts of two ranks."""
    facts = {"fingerprint": "f", "excluded": "none"}
    setup.refuse_other_facts(facts, dict(facts))
    with pytest.raises(
        UserError, match=r"^differs from rank 0: excluded is 1 samples \(ab\) here, none on rank 0; left_out"
    ):
        setup.refuse_other_facts({**facts, "excluded": "1 samples (ab)", "left_out.train.a": 1}, facts)


def test_a_host_with_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = setup.versions()
    setup.refuse_other_facts(setup.versions(), there)
    monkeypatch.setattr(torch, "__version__", "0.1")
    with pytest.raises(UserError, match=r"^differs from rank 0: torch is 0\.1 here, .* on rank 0\. Give"):
        setup.refuse_other_facts(setup.versions(), there)


def test_a_step_names_what_each_rank_read(run: Path, overrides: list[str], data: Dataset, tmp_path: Path) -> None:
    config, split = schema.load(RunConfig, None, overrides), data.split("train")
    order = SampleOrder(split.shard_sizes, config.seed, 24, 4, 16)
    seen: set[str] = set()
    for step in range(1, 9):
        requests = [list(train_requests(order, step - 1, step, 6, rank, 2)) for rank in range(2)]
        keys = [key for of_rank in requests for rows, _ in of_rank for key in split.keys(rows)]
        assert [row["key"] for row in ask(run, f"step={step}")] == keys
        seen |= set(keys)
    assert seen == set(data.table("train").keys(np.setdiff1d(np.arange(150), LEFT_OUT)))
    assert {row["epoch"] for row in ask(run, "step=7")} == {0, 1}


def test_the_command_writes_a_table_and_a_sheet(
    run: Path, overrides: list[str], data: Dataset, tmp_path: Path, forge: Forge
) -> None:
    file, sheet = tmp_path / "part.csv", tmp_path / "part.png"
    command = ["launch/samples.py", f"run={run}", "step=2", f"csv={file}", f"sheet={sheet}"]
    said = forge.start_work(1, "forked:command", command).finish()
    assert "step 2 of 8: 24 samples, trained" in said
    part = list(csv.DictReader(file.open()))
    assert part == [{name: str(value) for name, value in row.items()} for row in ask(run, "step=2")]
    for row in part:
        assert row["key"] == f"train{int(row['row']):05d}"
        assert row["shard"] == f"train-{int(row['row']) // 40:06d}.tar"
        assert row["class"] == f"class{row['label']}"
    assert sheet.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_has_not_begun_is_planned(overrides: list[str], run: Path, tmp_path: Path) -> None:
    file = tmp_path / "planned.yaml"
    file.write_text(yaml.safe_dump(schema.to_dict(schema.load(RunConfig, None, overrides))))
    assert ask(file, "step=3") == ask(run, "step=3")
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    assert ask(tmp_path, "step=3") == ask(run, "step=3")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["step=9"], "step = 9, but .* has 8 steps"),
        (["step=1", "data=nowhere"], "nowhere: no such data set"),
    ],
)
def test_mistakes_are_told_in_one_line(run: Path, asked: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected) as error:
        ask(run, *asked)
    assert "\n" not in str(error.value)
